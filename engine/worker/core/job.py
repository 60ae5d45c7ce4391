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
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure

ConfigT = TypeVar("ConfigT", bound=RunConfig, covariant=True)

# What a run came to, as result.json holds it: each kind of run says something else.
Result = dict[str, Any]
# What a loop keeps in checkpoints beside weights and optimizer: counters, the best step.
LoopState = dict[str, Any]


class Stopped(Exception):
    """The run was asked to stop; a checkpoint has been written where there was one to write."""


class Job(Generic[ConfigT]):
    """The run folder opened for writing."""

    def __init__(self, folder: Path) -> None:
        """Read the config in the run folder `runs/<id>` and open its files for appending. Raises
        DamagedRecord when config.json lacks a key or holds a wrong one."""
        self.run = RunDir(folder)
        # Which kind of config it is decides which loop is called with the job: see __main__.py.
        self._config = cast(ConfigT, read_run_config(self.run.config))
        # The device reserved for this process goes first. Only training configs name one.
        configured = self._config.device if isinstance(self._config, TrainConfig) else ""
        leased = os.environ.get("HONESMITH_DEVICE") or configured or "cpu"
        self.device = leased.split(",")[0]  # the first of several; the others are other ranks'
        self._metrics = Appender(self.run.metrics)
        self._events = Appender(self.run.events)
        self._stop = threading.Event()

    @property
    def config(self) -> ConfigT:
        """The content of config.json: what was submitted, with all settings filled in."""
        return self._config

    def listen(self) -> None:
        """From now on SIGTERM asks for a stop at the next step, and this process exits at once if
        its supervisor dies.

        HONESMITH_LIFELINE_FD is the number of our end of a pipe whose other end the supervisor
        holds. Without that variable no supervisor is watched.
        """
        signal.signal(signal.SIGTERM, self._on_term)
        lifeline = os.environ.get("HONESMITH_LIFELINE_FD")
        if lifeline:
            # A daemon, so that it does not keep the process alive after the run.
            threading.Thread(
                target=_exit_with_supervisor, args=(int(lifeline),), daemon=True
            ).start()

    def check_stop(self) -> None:
        """Raises Stopped when the run was asked to stop. Whoever waits calls it again and again, so
        it is a sign of life too."""
        pulse.beat()
        if self._stop.is_set():
            raise Stopped

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, the event's name, a message for people, and
        the fields that this event has."""
        line = Event(time=time.time(), event=name, message=message, **fields)
        self._events.append(line.to_line())

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl: `step`, the time, and the measured values."""
        self._metrics.append(MetricsLine(step=step, time=time.time(), **values).to_line())

    def rewind(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after `step`; -1 removes all. A resumed run does those
        steps again, and each step must have one line only."""
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
        """Note that the run is asked to stop; the loop ends after its step."""
        self._stop.set()


def require(rows: Sequence[Any], rows_in_words: str, hint: str) -> None:
    """Raises WorkerFailure (kind data) when `rows` is empty.

    Args:
        rows_in_words: completes the message "There are no ...".
        hint: what to try.
    """
    if not rows:
        raise WorkerFailure("data", f"There are no {rows_in_words}.", hint=hint)


def _exit_with_supervisor(descriptor: int) -> None:
    """Wait until the other end of a pipe closes, which means that the supervisor has died, then
    exit this process. `descriptor` is our end of the pipe. Never returns."""
    try:
        while os.read(descriptor, 1):  # b"" once the other end is closed
            pass
    except OSError:  # our end is closed or broken: nobody watches this process either
        pass
    # At once, whatever the main thread is doing. Nobody is left who waits for the status.
    os._exit(9)
