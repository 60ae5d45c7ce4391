"""One run as its worker sees it: where it writes, what it was asked, when it must stop."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar, cast

from engine.core.files import Appender, keep_lines, write_json
from engine.home.run_dir import RunDir
from engine.processes.outcome import Failure
from engine.records.lines.event import Event
from engine.records.lines.metrics_line import MetricsLine
from engine.records.run_config import RunConfig, TrainConfig, read_run_config
from engine.worker.core.failures import WorkerFailure

ConfigT = TypeVar("ConfigT", bound=RunConfig, covariant=True)

# What a run came to, as result.json holds it: each kind of run says something else.
Result = dict[str, Any]
# What a loop keeps in checkpoints beside weights and optimizer: counters, the best step.
LoopState = dict[str, Any]


class Stopped(Exception):
    """The run was asked to stop; a checkpoint has been written where there was one to write."""


class Job(Generic[ConfigT]):
    """The run folder opened for writing.

    Args:
        folder: `runs/<id>`, with the config.json that submit wrote.

    Raises DamagedRecord when config.json lacks a key or holds a wrong one.
    """

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        # Which kind of config it is decides which loop is called with the job: see __main__.py.
        self._config = cast(ConfigT, read_run_config(self.run.config))
        leased = self._config.device if isinstance(self._config, TrainConfig) else ""
        self.device = os.environ.get("HONESMITH_DEVICE") or leased or "cpu"
        self._metrics = Appender(self.run.metrics)
        self._events = Appender(self.run.events)
        self._stop = threading.Event()

    @property
    def config(self) -> ConfigT:
        """What submit resolved, the settings among it."""
        return self._config

    def listen(self) -> None:
        """Stop at the next step on SIGTERM; die at once when the supervisor is gone."""
        signal.signal(signal.SIGTERM, self._on_term)
        lifeline = os.environ.get("HONESMITH_LIFELINE_FD")
        if lifeline:
            threading.Thread(target=_die_with, args=(int(lifeline),), daemon=True).start()

    def check_stop(self) -> None:
        """Raises Stopped when the run was asked to stop."""
        if self._stop.is_set():
            raise Stopped

    def event(self, name: str, message: str, **fields: Any) -> None:
        """One line in events.jsonl."""
        line = Event(time=time.time(), event=name, message=message, **fields)
        self._events.append(line.to_line())

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One line in metrics.jsonl: `step`, `time`, and what was measured."""
        self._metrics.append(MetricsLine(step=step, time=time.time(), **values).to_line())

    def rewind(self, step: int) -> None:
        """Forget metrics after `step`: a resumed run writes them again, each step once."""
        keep_lines(self.run.metrics, lambda line: line["step"] <= step)
        self._metrics = Appender(self.run.metrics)

    def finish(self, result: Result) -> None:
        """The run's own last word; the supervisor turns it into the row."""
        write_json(self.run.result, result)

    def fail(self, failure: Failure) -> None:
        """The failure with the last complete checkpoint, for the supervisor and for people."""
        latest = self.run.latest_checkpoint()
        whole = replace(failure, last_checkpoint=latest.name if latest else None)
        write_json(self.run.failure, whole.to_json())

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop.set()


def require(rows: Sequence[Any], what: str, hint: str) -> None:
    """Raises WorkerFailure (kind data) when there is nothing to work on."""
    if not rows:
        raise WorkerFailure("data", f"There are no {what}.", hint=hint)


def _die_with(descriptor: int) -> None:
    """Block until the other end of the pipe closes: the supervisor is gone, so are we."""
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        pass
    os._exit(9)
