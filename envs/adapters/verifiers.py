"""Tasksets of verifiers 0.4: a module whose `__all__` names one subclass of `Taskset`, whose tasks
score themselves by methods with `@vf.reward` and `@vf.metric`.

If a taskset has no `Env` of its own, the model answers each task once. If its `Env` talks with a
single agent (`agents.player.interaction(task)`), it is played turn by turn. Tools, containers,
harnesses and judges between agents are refused, with an error that names them.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.adapters.parts.options import read_options
from envs.adapters.parts.verifiers_play import Play
from envs.adapters.parts.verifiers_plugin import Plugin, load_plugin, refused
from envs.adapters.parts.verifiers_trace import Exchange, as_message, new_loop, opening, run
from envs.base import Env, Message, MultiTurnEnv, Score, SingleTurnEnv, Task
from envs.config.adapters import Adapter
from envs.json_types import JsonObject

PACKAGE = "verifiers.v1"


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        taskset: the taskset's id: a module of the folder, or an installed package.
        size: how many of its tasks to take, from the first on; 0 for all.
        answer: the field of a task's data with the reference answer, for the audit and for SFT; ""
            for none.
        success_reward: the reward from which a rollout counts as solved.
        config: the taskset's own config.
    """

    taskset: str
    size: int = 0
    answer: str = ""
    success_reward: float = 1.0
    config: JsonObject = field(default_factory=dict)


class _VerifiersTaskset:
    """A taskset with its tasks; also turns scored traces into scores."""

    def __init__(self, options: Options, plugin: Plugin) -> None:
        """Store the options and the taskset, and make an event loop for its coroutines."""
        self.options = options
        self.plugin = plugin
        self.loop = new_loop()

    def rows(self) -> Iterator[tuple[Any, str, str | None, JsonObject]]:
        """Yield (the foreign task, its id, its reference answer, metadata to rebuild it from) of
        every task.

        Raises EnvProblem ENV_INVALID for an endless taskset without `size`, and for a task that
        needs what is not supported here.
        """
        options, taskset = self.options, self.plugin.taskset
        if options.size:
            taskset = taskset.take(options.size)
        elif not taskset.bounded:
            raise refused(
                f"the taskset {options.taskset!r} yields tasks for ever",
                "Say how many are taken: [adapter] size = 200.",
            )
        for foreign in taskset:
            self.plugin.check_task(foreign)
            data = foreign.data
            task_id = data.id or f"task-{data.idx}"
            answer = self._answer(data) if options.answer else None
            yield foreign, task_id, answer, {"data": data.model_dump(mode="json")}

    def task_of(self, task: Task) -> Any:
        """Rebuild the foreign task from which a task of ours was made."""
        kind = self.plugin.task_type
        data = kind.data_type().model_validate(task.metadata["data"])
        return kind(data, self.plugin.taskset.config.task)

    def scored(self, trace: Any) -> Score:
        """Return a scored trace as a score: the sum of its weighted rewards, each reward as a part,
        and its metrics."""
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        reward = float(trace.reward)
        return Score(
            reward,
            success=reward >= self.options.success_reward,
            metrics={
                name: float(value) for name, value in trace.metrics.items() if value is not None
            },
            parts={name: (float(part.weight), float(part.score)) for name, part in rewards.items()},
        )

    def _answer(self, data: Any) -> str:
        """Return the reference answer in the field that the options name.

        Raises EnvProblem ENV_INVALID if the data have no such field.
        """
        name = self.options.answer
        if name not in dict(data):
            fields = sorted(name for name, _ in data)
            raise refused(
                f"tasks of {self.options.taskset!r} have no field {name!r}",
                f"Name another: [adapter] answer; they have {', '.join(fields)}.",
            )
        return str(getattr(data, name))


class VerifiersSingleTurn(SingleTurnEnv):
    """A taskset whose tasks are answered with one message."""

    def __init__(self, foreign: _VerifiersTaskset) -> None:
        """Wrap a taskset."""
        self.foreign = foreign

    def tasks(self) -> list[Task]:
        """Return the taskset's tasks, each with the system message and prompt that verifiers would
        send."""
        tasks = []
        for foreign_task, task_id, answer, metadata in self.foreign.rows():
            messages = [as_message(message) for message in opening(foreign_task)]
            tasks.append(Task(task_id, messages, answer, metadata=metadata))
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """Return what the task's own rewards and metrics give for a trace with this one answer."""
        foreign = self.foreign
        return foreign.scored(run(foreign.loop, self._trace_of_answer(task, completion)))

    async def _trace_of_answer(self, task: Task, completion: str) -> Any:
        """Return the scored trace of an exchange with this one answer."""
        exchange = Exchange(self.foreign.task_of(task))
        async with exchange.open():
            exchange.ask(exchange.messages_of(task.messages))
            exchange.commit(completion)
            await exchange.finish("agent_completed")
        return exchange.trace


@dataclass
class State:
    """One rollout of a multi-turn taskset."""

    play: Play


class VerifiersMultiTurn(MultiTurnEnv):
    """A taskset whose own `Env` talks with one agent."""

    def __init__(self, foreign: _VerifiersTaskset) -> None:
        """Wrap a taskset and start its `Env`."""
        self.foreign = foreign
        run(foreign.loop, foreign.plugin.env.start())

    def tasks(self) -> list[Task]:
        """Return the taskset's tasks. If its `Env` speaks first, each task is begun once to get the
        opening messages."""
        tasks = []
        for foreign_task, task_id, answer, metadata in self.foreign.rows():
            opening_messages = opening(foreign_task)
            if foreign_task.data.prompt is None:
                play = Play(self.foreign.loop, self.foreign.plugin.env, foreign_task)
                opening_messages = play.until_asked() or []
                play.drop()
            messages = [as_message(message) for message in opening_messages]
            tasks.append(Task(task_id, messages, answer, metadata=metadata))
        return tasks

    def start(self, task: Task) -> State:
        """Begin a rollout; the `Env` runs until it asks the model. Raises ValueError if it ends
        before that."""
        play = Play(self.foreign.loop, self.foreign.plugin.env, self.foreign.task_of(task))
        if play.until_asked() is None:
            raise ValueError("the Env's run() ended before it asked the model")
        return State(play)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Give the reply to the `Env`; return the messages that it asks next, or None once it is
        done."""
        state.play.reply(completion.content)
        question = state.play.until_asked()
        if question is None:
            return None
        return [as_message(message) for message in question]

    def score(self, task: Task, state: State) -> Score:
        """Return what the `Env` and the task recorded on the trace."""
        return self.foreign.scored(state.play.finish())


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Env:
    """Load the taskset that the options name.

    Raises EnvProblem ENV_INVALID if there is no such taskset or it needs what is not supported
    here.
    """
    options = read_options(adapter, Options)
    importlib.import_module(PACKAGE)  # a missing package is reported like any other
    plugin = load_plugin(folder, options.taskset, options.config)
    foreign = _VerifiersTaskset(options, plugin)
    return VerifiersMultiTurn(foreign) if plugin.env is not None else VerifiersSingleTurn(foreign)
