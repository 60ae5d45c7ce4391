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
from envs.adapters.parts.verifiers_plugin import Plugin, load_plugin, unsupported
from envs.adapters.parts.verifiers_trace import (
    Exchange,
    as_message,
    new_loop,
    opening_messages,
    run_in_loop,
)
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
            raise unsupported(
                f"the taskset {options.taskset!r} yields tasks for ever",
                "Say how many are taken: [adapter] size = 200.",
            )
        for foreign_task in taskset:
            self.plugin.check_task(foreign_task)
            data = foreign_task.data
            task_id = data.id or f"task-{data.idx}"
            answer = self._answer(data) if options.answer else None
            yield foreign_task, task_id, answer, {"data": data.model_dump(mode="json")}

    def foreign_task(self, task: Task) -> Any:
        """Rebuild the task of verifiers from which `task` was made, by its metadata."""
        task_type = self.plugin.task_type
        data = task_type.data_type().model_validate(task.metadata["data"])
        return task_type(data, self.plugin.taskset.config.task)

    def score_of_trace(self, trace: Any) -> Score:
        """Return the score that stands on a trace of verifiers: the sum of its weighted rewards,
        each reward as a part, and its metrics. Rewards and metrics that are None are left out."""
        parts = {
            name: (float(reward.weight), float(reward.score))
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        total = float(trace.reward)
        success = total >= self.options.success_reward
        return Score(total, success=success, metrics=metrics, parts=parts)

    def _answer(self, data: Any) -> str:
        """Return the reference answer in the field that the options name.

        Raises EnvProblem ENV_INVALID if the data have no such field.
        """
        name = self.options.answer
        if name not in dict(data):  # a pydantic model gives (field, value) pairs
            fields = sorted(field_name for field_name, _value in data)
            raise unsupported(
                f"tasks of {self.options.taskset!r} have no field {name!r}",
                f"Name another: [adapter] answer; they have {', '.join(fields)}.",
            )
        return str(getattr(data, name))


class VerifiersSingleTurn(SingleTurnEnv):
    """A taskset whose tasks are answered with one message."""

    def __init__(self, foreign: _VerifiersTaskset) -> None:
        """Wrap a taskset of verifiers."""
        self.foreign = foreign

    def tasks(self) -> list[Task]:
        """Return the taskset's tasks, each with the system message and prompt that verifiers would
        send."""
        tasks = []
        for foreign_task, task_id, answer, metadata in self.foreign.rows():
            messages = [as_message(message) for message in opening_messages(foreign_task)]
            tasks.append(Task(task_id, messages, answer, metadata=metadata))
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """Return what the task's own rewards and metrics give for a trace with this one answer."""
        foreign = self.foreign
        trace = run_in_loop(foreign.loop, self._trace_of_answer(task, completion))
        return foreign.score_of_trace(trace)

    async def _trace_of_answer(self, task: Task, completion: str) -> Any:
        """Return the scored trace of a conversation in which `completion` answers the task's
        prompt."""
        exchange = Exchange(self.foreign.foreign_task(task))
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
        """Wrap a taskset of verifiers and start its `Env`."""
        self.foreign = foreign
        run_in_loop(foreign.loop, foreign.plugin.env.start())

    def tasks(self) -> list[Task]:
        """Return the taskset's tasks. If a task has no prompt, because the `Env` speaks first, a
        rollout of it is begun to get the opening messages, and dropped."""
        tasks = []
        for foreign_task, task_id, answer, metadata in self.foreign.rows():
            foreign_messages = opening_messages(foreign_task)
            if foreign_task.data.prompt is None:  # the `Env` says what the model reads first
                play = Play(self.foreign.loop, self.foreign.plugin.env, foreign_task)
                foreign_messages = play.until_asked() or []
                play.drop()
            messages = [as_message(message) for message in foreign_messages]
            tasks.append(Task(task_id, messages, answer, metadata=metadata))
        return tasks

    def start(self, task: Task) -> State:
        """Begin a rollout; the `Env` runs until it asks the model. Raises ValueError if it ends
        before that."""
        foreign_task = self.foreign.foreign_task(task)
        play = Play(self.foreign.loop, self.foreign.plugin.env, foreign_task)
        if play.until_asked() is None:
            raise ValueError("the Env's run_in_loop() ended before it asked the model")
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
        """Return the score that the `Env` and the task recorded on the trace of the rollout."""
        return self.foreign.score_of_trace(state.play.finish())


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Env:
    """Load the taskset that the options name.

    Raises EnvProblem ENV_INVALID if there is no such taskset or it needs what is not supported
    here.
    """
    options = read_options(adapter, Options)
    importlib.import_module(PACKAGE)  # a missing package is reported like any other
    plugin = load_plugin(folder, options.taskset, options.config)
    taskset = _VerifiersTaskset(options, plugin)
    # A taskset with an `Env` of its own is played turn by turn.
    return VerifiersMultiTurn(taskset) if plugin.env is not None else VerifiersSingleTurn(taskset)
