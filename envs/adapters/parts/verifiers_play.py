"""Plays an `Env` of verifiers 0.4 that talks with one agent, turn by turn, controlled from outside.

The `Env`'s `run(task, agents)` is a coroutine that asks the agent and waits. It runs on an event
loop of ours until it asks; then the loop is stopped until the reply is there.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from envs.adapters.parts.verifiers_trace import Exchange, opening_messages, verifiers_module


class Play:
    """One rollout of an `Env` of verifiers.

    Args:
        loop: the event loop for the foreign coroutines; the same for all rollouts of a process.
        env: the foreign `Env`.
        task: the foreign task.

    Attributes:
        exchange: the conversation with the model; None before it begins.
        over: whether the model gets no further turns.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, env: Any, task: Any) -> None:
        """Prepare a rollout of `task` in `env` (both of verifiers); it runs only while the event
        loop does, as in `until_asked`."""
        self.loop = loop
        self.exchange: Exchange | None = None
        self.over = False
        self._question = loop.create_future()  # resolves to the messages that the model must answer
        self._answer = loop.create_future()  # resolves to the model's text, or None at the end
        self._rollout = loop.create_task(self._play_episode(env, task))

    def until_asked(self) -> list[Any] | None:
        """Run the foreign `Env` until it asks the model, or ends. Returns the messages of verifiers
        that the model must answer, or None if the rollout is over.

        Raises what the `Env` raised.
        """
        # `ask`, which the `Env` calls, resolves the question.
        self.loop.run_until_complete(
            asyncio.wait({self._rollout, self._question}, return_when=asyncio.FIRST_COMPLETED)
        )
        if self._question.done():
            messages = self._question.result()
            self._question = self.loop.create_future()
            return messages
        self._rollout.result()  # raises what the `Env` raised
        return None

    def reply(self, text: str) -> None:
        """Give the `Env` the model's answer to its last question."""
        answer = self._answer
        self._answer = self.loop.create_future()  # for the next question
        answer.set_result(text)

    def finish(self) -> Any:
        """End the rollout and return its scored trace. An `Env` that waits for a reply is told that
        none will come."""
        if not self._rollout.done():
            self.over = True
            self._answer.set_result(None)
            self.loop.run_until_complete(self._rollout)
        self._rollout.result()  # raises what the `Env` raised
        assert self.exchange is not None  # it was asked at least once
        return self.exchange.trace

    def drop(self) -> None:
        """End a rollout that will not be scored, so that the `Env` closes what it has open."""
        if not self._rollout.done():
            self._rollout.cancel()
            self.loop.run_until_complete(asyncio.wait({self._rollout}))

    def __del__(self) -> None:
        """Cancel a rollout that was not finished; it ends when the event loop runs again."""
        if not self.loop.is_closed():
            self._rollout.cancel()

    async def ask(self, messages: list[Any]) -> str | None:
        """Ask the model these messages; return its reply, or None if there will be none.

        Called by the foreign side, inside the event loop.
        """
        answer = self._answer
        self._question.set_result(messages)
        return await answer

    async def _play_episode(self, env: Any, task: Any) -> None:
        """Play one episode of the `Env` in the order of verifiers: setup, run, finalize."""
        v1 = verifiers_module()
        roles = verifiers_module("configs.agent").agent_config_fields(env.config)
        agents = Agents({name: Seat(self, name, config) for name, config in roles.items()})
        await env.setup(agents)
        await env.run(task, agents)
        if self.exchange is None:
            raise ValueError(f"{type(env).__name__}.run() asked no agent")
        trace = self.exchange.trace
        episode = v1.Episode(
            env=v1.EnvInfo(id=env.config.env_id),
            task=trace.task,
            ok=True,
            traces=[trace],
        )
        await env.finalize(task, episode)


class Agents:
    """The agents of an `Env`, as attributes named by their roles."""

    def __init__(self, seats: Mapping[str, "Seat"]) -> None:
        """Store the agents, by role: each becomes an attribute of that name, as `agents.player`."""
        vars(self).update(seats)


class Seat:
    """An agent as an `Env` sees it; its model is the one that the play asks."""

    def __init__(self, play: Play, name: str, config: Any) -> None:
        """Make the agent with the role `name` in the rollout `play`; `config` is its
        `AgentConfig` of verifiers."""
        self.play = play
        self.name = name
        self.config = config
        self.trainable = True  # agents of verifiers have this attribute

    async def run(self, task: Any, *, on_trace: Any = None, **borrowed: Any) -> Any:
        """Have the model answer the prompt of `task` once; return the scored trace.

        The other arguments are those of `interaction`.
        """
        async with self.interaction(task, on_trace=on_trace, **borrowed) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(
        self, task: Any, *, on_trace: Any = None, **borrowed: Any
    ) -> AsyncIterator["Talk"]:
        """A context with a conversation about `task`, which is scored at the end of the context.

        `on_trace` is called with the trace once it is begun; `borrowed` is what the `Env` lends the
        agent. Raises NotImplementedError if it lends anything, such as a runtime or tools, or
        begins a second conversation in one episode.
        """
        borrowed_names = [name for name, value in borrowed.items() if value]
        if borrowed_names:
            raise NotImplementedError(
                f"an agent that is lent {', '.join(borrowed_names)} is not played here"
            )
        if self.play.exchange is not None:
            raise NotImplementedError("a second conversation in one episode is not played here")
        exchange = Exchange(task, self.config, self.name)
        self.play.exchange = exchange
        if on_trace is not None:
            on_trace(exchange.trace)
        async with exchange.open():
            talk = Talk(self.play, exchange, self.config.max_turns)
            yield talk
            condition = "max_turns" if talk.cut else "user_closed"
            await exchange.finish(condition)


class Talk:
    """A conversation that the `Env` leads, `turn` by `turn`, in the role of the user."""

    def __init__(self, play: Play, exchange: Exchange, most_turns: int | None) -> None:
        """Begin a conversation in the rollout `play`, recorded by `exchange`; the model gets at
        most `most_turns` turns, None for no limit."""
        self.play = play
        self.exchange = exchange
        self.most_turns = most_turns
        self.cut = False  # whether no further reply comes: a turn limit, or the rollout is over
        self._started = False

    @property
    def trace(self) -> Any:
        """The trace: what has been said so far."""
        return self.exchange.trace

    async def turn(self, message: Any = None) -> Any:
        """Return the model's reply to `message` as a `Segment`; without a message, to the task's
        prompt.

        A `terminated` segment means that no reply came. Raises ValueError for a first message if
        the task has a prompt, or a missing message if it has none or is already under way;
        RuntimeError after the end.
        """
        if self.cut:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        task, v1 = self.exchange.task, verifiers_module()
        takes_prompt = not self._started and task.data.prompt is not None
        has_message = message is not None
        if takes_prompt == has_message:  # exactly one of the two begins a turn
            raise ValueError(
                "a bare turn() takes the opening reply of a task with a prompt; every other turn "
                "takes a message"
            )
        messages = [] if self._started else opening_messages(task)
        if isinstance(message, str):
            messages.append(v1.UserMessage(content=message))
        elif message is not None:
            parse = verifiers_module("dialects").parse_message
            messages += [parse(item) if isinstance(item, dict) else item for item in message]
        self._started = True
        text = None
        if self.most_turns is None or self.trace.num_turns < self.most_turns:
            self.exchange.ask(messages)
            text = None if self.play.over else await self.play.ask(messages)
        if text is None:
            self.cut = True
            return v1.Segment(messages=[], terminated=True)
        return v1.Segment(messages=[self.exchange.commit(text)])
