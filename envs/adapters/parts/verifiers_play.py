"""An `Env` of verifiers 0.4 that talks with one agent, driven turn by turn from outside.

Its `run(task, agents)` is a coroutine that asks the agent and waits. Here it runs on a loop of ours
until it asks; the loop then rests until the reply is there.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from envs.adapters.parts.verifiers_trace import Exchange, module, opening


class Play:
    """One rollout of an `Env`.

    Args:
        loop: runs the foreign coroutines; the same for all rollouts of a process.
        env: the foreign `Env`.
        task: the foreign task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, env: Any, task: Any) -> None:
        self.loop = loop
        self.exchange: Exchange | None = None
        self.over = False  # the model has no turns left
        self._asked = loop.create_future()  # the messages of a turn
        self._reply = loop.create_future()  # the text that answers them, None at the end
        self._run = loop.create_task(self._played(env, task))

    def until_asked(self) -> list[Any] | None:
        """The foreign messages that the model is to answer; None where the rollout is over.

        Raises what the `Env` raised.
        """
        self.loop.run_until_complete(
            asyncio.wait({self._run, self._asked}, return_when=asyncio.FIRST_COMPLETED)
        )
        if self._asked.done():
            messages = self._asked.result()
            self._asked = self.loop.create_future()
            return messages
        self._run.result()
        return None

    def reply(self, text: str) -> None:
        """What the model answered to the last question."""
        waiting, self._reply = self._reply, self.loop.create_future()
        waiting.set_result(text)

    def finish(self) -> Any:
        """The trace of the rollout, scored; one that waits for a reply is told that none comes."""
        if not self._run.done():
            self.over = True
            self._reply.set_result(None)
            self.loop.run_until_complete(self._run)
        self._run.result()
        assert self.exchange is not None  # it was asked at least once
        return self.exchange.trace

    def drop(self) -> None:
        """End a rollout that is not to be scored; what its `Env` has open is closed."""
        if not self._run.done():
            self._run.cancel()
            self.loop.run_until_complete(asyncio.wait({self._run}))

    def __del__(self) -> None:  # a rollout without a score; it ends when the loop runs again
        if not self.loop.is_closed():
            self._run.cancel()

    async def ask(self, messages: list[Any]) -> str | None:
        """The model's reply to these messages; None if there will be none."""
        waiting = self._reply
        self._asked.set_result(messages)
        return await waiting

    async def _played(self, env: Any, task: Any) -> None:
        """One episode of the `Env`, as verifiers plays it: setup, run, finalize."""
        v1 = module()
        roles = module("configs.agent").agent_config_fields(env.config)
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
    """The agents of an `Env` by their roles, as attributes."""

    def __init__(self, seats: Mapping[str, "Seat"]) -> None:
        vars(self).update(seats)


class Seat:
    """An agent as an `Env` sees it, whose model is asked by the play."""

    def __init__(self, play: Play, name: str, config: Any) -> None:
        self.play = play
        self.name = name
        self.config = config
        self.trainable = True

    async def run(self, task: Any, *, on_trace: Any = None, **borrowed: Any) -> Any:
        """One answer to a task; its trace, scored."""
        async with self.interaction(task, on_trace=on_trace, **borrowed) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(
        self, task: Any, *, on_trace: Any = None, **borrowed: Any
    ) -> AsyncIterator["Talk"]:
        """A context with a conversation about `task`, which is scored at its end.

        Raises NotImplementedError for a runtime or tools that are lent to the agent, and for a
        second conversation in one episode.
        """
        lent = [name for name, value in borrowed.items() if value]
        if lent:
            raise NotImplementedError(f"an agent that is lent {', '.join(lent)} is not played here")
        if self.play.exchange is not None:
            raise NotImplementedError("a second conversation in one episode is not played here")
        exchange = Exchange(task, self.config, self.name)
        self.play.exchange = exchange
        if on_trace is not None:
            on_trace(exchange.trace)
        async with exchange.open():
            talk = Talk(self.play, exchange, self.config.max_turns)
            yield talk
            await exchange.finish("max_turns" if talk.cut else "user_closed")


class Talk:
    """A conversation that the `Env` leads: it speaks as the user, `turn` by `turn`."""

    def __init__(self, play: Play, exchange: Exchange, most_turns: int | None) -> None:
        self.play = play
        self.exchange = exchange
        self.most_turns = most_turns
        self.cut = False  # it was ended by a limit on its turns
        self._started = False

    @property
    def trace(self) -> Any:
        """What has been said so far."""
        return self.exchange.trace

    async def turn(self, message: Any = None) -> Any:
        """The model's reply to a message, as a `Segment`; to the task's prompt without one.

        A `terminated` segment says that no reply came. Raises ValueError for a message where the
        prompt opens the conversation, and the other way round; RuntimeError behind the end.
        """
        if self.cut:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        task, v1 = self.exchange.task, module()
        prompted = not self._started and task.data.prompt is not None
        if prompted is (message is not None):
            raise ValueError(
                "a bare turn() takes the opening reply of a task with a prompt; every other turn "
                "takes a message"
            )
        asked = [] if self._started else opening(task)
        if isinstance(message, str):
            asked.append(v1.UserMessage(content=message))
        elif message is not None:
            parse = module("dialects").parse_message
            asked += [parse(each) if isinstance(each, dict) else each for each in message]
        self._started = True
        text = None
        if self.most_turns is None or self.trace.num_turns < self.most_turns:
            self.exchange.ask(asked)
            text = None if self.play.over else await self.play.ask(asked)
        if text is None:
            self.cut = True
            return v1.Segment(messages=[], terminated=True)
        return v1.Segment(messages=[self.exchange.commit(text)])
