"""One run as its worker sees it: where to write, what was submitted, and when to stop."""

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
from engine.machine.processes.outcome import Failure
from engine.records.lines.event import Event
from engine.records.lines.metrics_line import MetricsLine
from engine.records.run_config import RunConfig, TrainConfig, read_run_config
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure

ConfigT = TypeVar("ConfigT", bound=RunConfig, covariant=True)

# The content of result.json; its keys depend on the kind of run.
Result = dict[str, Any]
# What a training loop stores in checkpoints beside weights and optimizer: counters, the best step.
LoopState = dict[str, Any]


class Stopped(Exception):
    """The run was asked to stop. A checkpoint has been written if there was progress to save."""


class Job(Generic[ConfigT]):
    """The run folder opened for writing."""

    def __init__(self, folder: Path) -> None:
        """Read the config in the run folder `runs/<id>` and open its files for appending. Raises
        DamagedRecord if config.json lacks a key or holds a wrong one."""
        self.run = RunDir(folder)
        # The kind of config decides which loop is called with the job: see __main__.py.
        self._config = cast(ConfigT, read_run_config(self.run.config))
        # The device that was reserved for this process takes precedence over the config's. Only
        # training configs name one.
        configured = self._config.device if isinstance(self._config, TrainConfig) else ""
        leased = os.environ.get("HONESMITH_DEVICE") or configured or "cpu"
        # With several devices the first is this process's; the others belong to other ranks.
        self.device = leased.split(",")[0]
        self._metrics = Appender(self.run.metrics)
        self._events = Appender(self.run.events)
        self._stop = threading.Event()

    @property
    def config(self) -> ConfigT:
        """The content of config.json: what was submitted, with all settings filled in."""
        return self._config

    def listen(self) -> None:
        """From now on SIGTERM asks this run to stop at the next step, and this process exits at
        once if its supervisor (the process that started it) dies.

        HONESMITH_LIFELINE_FD is the number of our end of a pipe whose other end the supervisor
        holds. If that variable is not set, no supervisor is watched.
        """
        signal.signal(signal.SIGTERM, self._on_term)
        lifeline = os.environ.get("HONESMITH_LIFELINE_FD")
        if lifeline:
            # A daemon, so that it does not keep the process alive after the run.
            threading.Thread(
                target=_exit_with_supervisor, args=(int(lifeline),), daemon=True
            ).start()

    @property
    def stop_signal(self) -> threading.Event:
        """Set once the run was asked to stop."""
        return self._stop

    def check_stop(self) -> None:
        """Raise Stopped if the run was asked to stop. Code that waits calls this again and again,
        so it also gives a sign of life."""
        pulse.beat()
        if self._stop.is_set():
            raise Stopped

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, the event's name, a message for people, and
        the event's own fields."""
        line = Event(time=time.time(), event=name, message=message, **fields)
        self._events.append(line.to_line())

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl: `step`, the time, and the measured values."""
        self._metrics.append(MetricsLine(step=step, time=time.time(), **values).to_line())

    def rewind(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after `step`; -1 removes all. A resumed run does those
        steps again, and each step must have only one line."""
        keep_lines(self.run.metrics, lambda line: line["step"] <= step)
        self._metrics = Appender(self.run.metrics)  # the file was replaced by a new one

    def finish(self, result: Result) -> None:
        """Write result.json; the supervisor takes the run's final state from it."""
        write_json(self.run.result, result)

    def fail(self, failure: Failure) -> None:
        """Write failure.json: the failure, and the name of the last complete checkpoint (None if
        there is none)."""
        latest = self.run.latest_checkpoint()
        record = replace(failure, last_checkpoint=latest.name if latest else None)
        write_json(self.run.failure, record.to_json())

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        """Note that the run is asked to stop; the loop ends after its present step."""
        self._stop.set()


def require(rows: Sequence[Any], rows_in_words: str, hint: str) -> None:
    """Raise WorkerFailure (kind data) if `rows` is empty.

    Args:
        rows_in_words: completes the message "There are no ...".
        hint: what to try.
    """
    if not rows:
        raise WorkerFailure("data", f"There are no {rows_in_words}.", hint=hint)


def _exit_with_supervisor(descriptor: int) -> None:
    """Wait until the other end of a pipe closes, which means that the supervisor (the process that
    started this one) has died. Then exit this process. `descriptor` is our end of the pipe. Never
    returns."""
    try:
        while os.read(descriptor, 1):  # b"" once the other end is closed
            pass
    except OSError:  # our end is closed or broken: nobody watches this process either
        pass
    # os._exit ends the process at once, whatever the main thread is doing. Nobody is left to read
    # its status.
    os._exit(9)
