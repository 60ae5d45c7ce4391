"""Points at which a test kills a process, as a lost machine would: before or after a call.

The code under test knows nothing of them. `tests/helpers/injected/sitecustomize.py` wraps the
function of the point that HONESMITH_CRASH_AT names, in the processes the point is about:
"checkpoint.aside:2" is the second passage, without a number it is the first. A function that is
no longer there ends the process at once, so a point cannot go lost silently.
"""

import functools
import importlib
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

Arguments = tuple[Any, ...]


def _always(_arguments: Arguments, _result: Any) -> bool:
    return True


def _succeeded(_arguments: Arguments, result: Any) -> bool:
    return bool(result)


def _file(name: str) -> Callable[[Arguments, Any], bool]:
    """The first argument is a path of this name."""
    return lambda arguments, _: Path(arguments[0]).name == name


def _becomes(name: str) -> Callable[[Arguments, Any], bool]:
    """A rename to something in the folder of checkpoints whose name begins so."""

    def matches(arguments: Arguments, _: Any) -> bool:
        target = Path(arguments[1])
        return target.parent.name == "checkpoints" and target.name.startswith(name)

    return matches


def _a_step(arguments: Arguments, _: Any) -> bool:
    """A line of metrics.jsonl after the evaluation before the first step."""
    appender, line = arguments
    return Path(appender.path).name == "metrics.jsonl" and line.get("step", 0) >= 1


def _to_a_checkpoint(arguments: Arguments, _: Any) -> bool:
    _job, step = arguments
    return step >= 0  # an attempt without a checkpoint forgets all


def _old_checkpoint(arguments: Arguments, _: Any) -> bool:
    folder = Path(arguments[0])
    return folder.name.startswith("step_") and folder.exists()


@dataclass(frozen=True)
class Point:
    """Before or after a call of `function` ("Class.method" too) of `module`."""

    module: str
    function: str
    when: str
    matches: Callable[[Arguments, Any], bool] = _always


_FILES = "engine.core.files"
_LAUNCHER, _OUTCOME = "engine.machine.processes.launcher", "engine.machine.processes.outcome"
_RUNS = "engine.home.store_runs"
POINTS: Mapping[str, Point] = {
    # whoever submits
    # the run's folder is made, nothing is in it
    "submit.folder": Point("engine.home.run_dir", "RunDir.create", "after"),
    # its files are durable, no row yet
    "submit.config": Point("engine.runs.submit.run_folder", "write_folder", "after"),
    # the row is written, not committed
    "submit.inserted": Point(_RUNS, "RunTable._log_state", "after"),
    # the run exists, nobody was told
    "submit.committed": Point(_RUNS, "RunTable.insert_run", "after"),
    # whoever starts what is queued
    # the lock is taken inside the transaction
    "lease.claimed": Point(_LAUNCHER, "_claim", "after", _succeeded),
    # the row is preparing, no supervisor yet
    "lease.leased": Point(_RUNS, "RunTable.lease_next", "after", _succeeded),
    # the supervisor is started
    "lease.started": Point(_LAUNCHER, "_start", "after"),
    # the supervisor
    # before it spawns the trainer
    "supervise.began": Point(_LAUNCHER, "trainer_command", "before"),
    # the trainer lives, started.json is not written
    "supervise.spawned": Point(_FILES, "write_json", "before", _file("started.json")),
    # the trainer has ended, exit.json is not written
    "supervise.exited": Point(_OUTCOME, "record", "before"),
    # exit.json is written, the row is not
    "supervise.recorded": Point(_OUTCOME, "record", "after"),
    # the row is final, the report is not written
    "supervise.applied": Point(_OUTCOME, "apply", "after"),
    # the trainer
    # the row is running, nothing is loaded
    "train.running": Point(_RUNS, "RunTable.set_state", "after"),
    # metrics after the checkpoint are forgotten
    "train.rewound": Point("engine.worker.core.job", "Job.rewind", "after", _to_a_checkpoint),
    # the weights have changed, no metrics yet
    "step.updated": Point("engine.worker.update.schedule", "apply_step", "after"),
    # the metrics line is written
    "step.logged": Point(_FILES, "Appender.append", "after", _a_step),
    # files are written, without a manifest
    "checkpoint.aside": Point(_FILES, "write_json", "before", _file("MANIFEST.json")),
    # complete, not yet in its place
    "checkpoint.manifest": Point(_FILES, "write_json", "after", _file("MANIFEST.json")),
    # in its place, nothing tidied
    "checkpoint.renamed": Point("os", "replace", "after", _becomes("step_")),
    # an old one is half deleted
    "checkpoint.pruning": Point("shutil", "rmtree", "before", _old_checkpoint),
    # before `best` points at it
    "checkpoint.best": Point("os", "replace", "before", _becomes("best")),
    # the last evaluation is over, no result yet
    "finish.examined": Point(_FILES, "write_json", "before", _file("result.json")),
    # result.json is written, the seal is not
    "finish.result": Point(_FILES, "write_json", "after", _file("result.json")),
    # nothing is left but to exit
    "finish.sealed": Point("engine.evidence.verdict.provenance", "seal", "after"),
}
# The program whose processes die at a point; whoever submits may be any process.
_PROGRAMS = {"supervise": "engine.supervisor", "submit": "", "lease": ""}
_INJECTED = Path(__file__).parent / "injected"


def variables(at: str) -> dict[str, str]:
    """The environment variables under which processes die at `at` ("label" or "label:number")."""
    return {"PYTHONPATH": str(_INJECTED), "HONESMITH_CRASH_AT": at}


def install(at: str) -> None:
    """Have this process killed at `at`, if the point is about its program."""
    label, _, number = at.partition(":")
    program = _PROGRAMS.get(label.partition(".")[0], "engine.worker")
    if program and program not in sys.orig_argv:
        return
    point = POINTS[label]
    passages = iter(range(int(number or 1) - 1, -1, -1))
    patch = functools.partial(_wrap, point, lambda: next(passages, 1) or _die(label))
    if point.module in sys.modules:
        patch(sys.modules[point.module])
    else:
        sys.meta_path.insert(0, _WhenLoaded(point.module, patch))


def kill_at(point: Point) -> None:
    """Have this process killed at a point that needs no name, at its first passage."""
    patch = functools.partial(_wrap, point, lambda: _die(f"{point.when} {point.function}"))
    patch(importlib.import_module(point.module))


def _die(label: str) -> None:
    os.write(2, f"crash point {label}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(point: Point, passed: Callable[[], object], module: ModuleType) -> None:
    *owners, name = point.function.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if point.when == "before" and point.matches(arguments, None):
            passed()
        result = inner(*arguments, **named)
        if point.when == "after" and point.matches(arguments, result):
            passed()
        return result

    setattr(owner, name, wrapped)


class _WhenLoaded(MetaPathFinder):
    """Calls `patch` with a module as soon as its code has run, before anybody imports from it."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            self._patch(module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec
