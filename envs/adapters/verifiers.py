"""Tasksets of verifiers (its v1, from release 0.4 on): a completion is scored by the task's own
`@reward` functions.

The model's answer stands in the trace that those functions read, as a rollout without tools leaves
it. Rewards that ask for a runtime (a container with what an agent did) cannot be scored so: the
sample is then an error that names them.
"""

import asyncio
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from envs.adapters.parts.options import read_options
from envs.base import Message, Score, SingleTurnEnv, Task
from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

PACKAGE = "verifiers.v1"


@dataclass(frozen=True)
class Options:
    """Which tasks.

    Attributes:
        taskset: the module that exports one `Taskset` by `__all__`, in the folder or installed;
            an id of the hub (`owner/name@version`) imports `name`.
        size: the most tasks.
        config: the taskset's own options.
    """

    taskset: str
    size: int = 1000
    config: JsonObject = field(default_factory=dict)


class Verifiers(SingleTurnEnv):
    """The tasks of a taskset."""

    def __init__(self, options: Options) -> None:
        self.options = options
        loaders = importlib.import_module(f"{PACKAGE}.utils.loaders")
        generic = importlib.import_module(f"{PACKAGE}.utils.generic")
        self.v1 = importlib.import_module(PACKAGE)
        self.trace = importlib.import_module(f"{PACKAGE}.trace")
        self.state_class = importlib.import_module(f"{PACKAGE}.state").state_cls
        taskset_class = loaders.taskset_class(options.taskset)
        config_class = generic.concrete_type(taskset_class, self.v1.TasksetConfig)
        given = {**options.config, "id": options.taskset}
        self.taskset = taskset_class((config_class or self.v1.TasksetConfig)(**given))
        self.loaded: dict[str, Any] = {}  # by the id of ours

    def tasks(self) -> list[Task]:
        """The tasks that the taskset yields, at most `size`. Raises EnvProblem ENV_INVALID for one
        whose user opens the conversation."""
        return [self._task(task_id, task) for task_id, task in self._foreign()]

    def score(self, task: Task, completion: str) -> Score:
        """The weighted sum of the task's rewards; solved where it is their largest, the sum of
        the weights."""
        if not self.loaded:
            self.loaded = dict(self._foreign())
        foreign = self.loaded[task.id]
        skipped = [hook.__name__ for hook in foreign.hooks("reward") if _needs_runtime(hook)]
        if skipped:
            return Score(0.0, error=f"scored in a runtime alone: {', '.join(skipped)}")
        trace = self._trace(foreign, task, completion)
        asyncio.run(foreign.score(trace))
        rewards = {name: float(reward.score) for name, reward in trace.rewards.items()}
        whole = sum(reward.weight for reward in trace.rewards.values() if reward.weight > 0)
        metrics = {name: float(v) for name, v in trace.metrics.items() if v is not None}
        reward = float(trace.reward)
        return Score(reward, success=reward >= whole, metrics={**metrics, **rewards})

    def _foreign(self) -> Iterator[tuple[str, Any]]:
        """(id, task of the taskset) for each."""
        for number, task in enumerate(islice(iter(self.taskset), self.options.size)):
            yield f"{self.options.taskset.rsplit('/', 1)[-1]}-{number}", task

    def _task(self, task_id: str, foreign: Any) -> Task:
        data = foreign.data
        if not data.prompt:
            message = f"the task {task_id} has no prompt: its user opens the conversation"
            raise EnvProblem("ENV_INVALID", message, hint="Choose a taskset with prompts.")
        prompt = [Message("system", data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            prompt.append(Message("user", data.prompt))
        else:
            prompt += [Message.from_dict(each.model_dump()) for each in data.prompt]
        return Task(task_id, prompt, metadata={"key": foreign.key})

    def _trace(self, foreign: Any, task: Task, completion: str) -> Any:
        """A trace in which the model gave one answer to the task's prompt."""
        said = [message.to_dict() for message in task.messages]
        said.append({"role": "assistant", "content": completion})
        nodes = [
            {
                "parent": number - 1 if number else None,
                "message": message,
                "sampled": number == len(said) - 1,
            }
            for number, message in enumerate(said)
        ]
        return self.trace.Trace(
            task=self.trace.TraceTask(
                type=type(foreign).__name__, data=foreign.data, key=foreign.key, hash=foreign.hash
            ),
            state=self.state_class(type(foreign))(),
            agent=self.trace.AgentInfo(config=self.v1.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )


def _needs_runtime(hook: Any) -> bool:
    """Whether a reward function cannot be called without a runtime."""
    wanted = inspect.signature(hook).parameters.get("runtime")
    return wanted is not None and wanted.default is inspect.Parameter.empty


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Verifiers:
    """The taskset that the options name."""
    return Verifiers(read_options(adapter, Options))
