"""The names that evaluators import from rLLM (`rllm`, `rllm.types`, `rllm.eval.types`), for
machines without the package, which is on no package index. The shapes are those of August 2026."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.json_types import JsonObject

PACKAGE = "rllm"


@dataclass
class Task:
    """One problem to solve."""

    id: str
    instruction: str | list[JsonObject]
    metadata: JsonObject = field(default_factory=dict)
    dataset_dir: Path = field(default_factory=Path)
    sub_dir: Path | None = None


@dataclass
class Step:
    """One call of the model."""

    input: Any = None
    output: Any = None
    action: Any = None
    reward: float = 0.0
    done: bool = False
    metadata: JsonObject | None = None
    chat_completions: list[JsonObject] = field(default_factory=list)
    thought: str = ""
    model_response: str = ""
    id: str = ""


@dataclass
class Trajectory:
    """One agent's steps."""

    name: str = "default_traj_name"
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    input: JsonObject | None = None
    output: Any = None
    signals: dict[str, float] = field(default_factory=dict)
    metadata: JsonObject | None = None
    uid: str = ""


@dataclass
class Episode:
    """One rollout of a task."""

    id: str = ""
    task: Any = None
    termination_reason: Any = None
    is_correct: bool = False
    trajectories: list[Trajectory] = field(default_factory=list)
    artifacts: JsonObject = field(default_factory=dict)
    metrics: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)


@dataclass
class Signal:
    """A named number beside the reward."""

    name: str
    value: float
    metadata: JsonObject = field(default_factory=dict)


@dataclass
class EvalOutput:
    """An evaluator's result for an episode."""

    reward: float
    is_correct: bool
    signals: list[Signal] = field(default_factory=list)
    metadata: JsonObject = field(default_factory=dict)


def evaluator(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Stand in for rLLM's decorator of evaluators: return the function unchanged.

    It is used as `@evaluator`, or with arguments, which are ignored, as `@evaluator(name="x")`; the
    function then comes in a second call.
    """
    if function is not None:
        return function
    return lambda decorated: decorated


def provide() -> None:
    """Make the stand-ins of this module importable as `rllm`, `rllm.types` and `rllm.eval.types`,
    unless rLLM itself is installed."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return
    types = {"Task": Task, "Step": Step, "Trajectory": Trajectory, "Episode": Episode}
    results = {"EvalOutput": EvalOutput, "Signal": Signal}
    _provide_module(PACKAGE, {**types, "evaluator": evaluator})
    _provide_module(f"{PACKAGE}.types", types)
    _provide_module(f"{PACKAGE}.eval", results)
    _provide_module(f"{PACKAGE}.eval.types", results)


def _provide_module(name: str, names: JsonObject) -> None:
    """Put a new module with these attributes into `sys.modules`, where an import finds it."""
    module = ModuleType(name)
    module.__path__ = []  # makes it a package, whose submodules can be imported
    vars(module).update(names)
    sys.modules[name] = module
