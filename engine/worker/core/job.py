"""One run as its worker sees it: where it writes, what it was asked, when it must stop."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from engine.core.files import Appender, read_json, write_json
from engine.core.metrics import LINE_KEYS
from engine.home.run_dir import RunDir
from engine.worker.core.failures import WorkerFailure


class Stopped(Exception):
    """The run was asked to stop; a checkpoint has been written where there was one to write."""


class Job:
    """The run folder opened for writing.

    Args:
        folder: `runs/<id>`, with the config.json that submit wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.config: dict[str, Any] = read_json(self.run.config)
        self.settings: dict[str, Any] = self.config["settings"]
        self.device = os.environ.get("HONESMITH_DEVICE") or self.config.get("device") or "cpu"
        self._metrics = Appender(self.run.metrics)
        self._events = Appender(self.run.events)
        self._stop = threading.Event()

    @property
    def base_path(self) -> Path:
        """The folder of the base model."""
        return Path(self.config["base"]["path"])

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
        self._events.append({"time": time.time(), "event": name, "message": message, **fields})

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One line in metrics.jsonl: `step`, `time`, and what was measured."""
        step_key, time_key = LINE_KEYS
        self._metrics.append({step_key: step, time_key: time.time(), **values})

    def rewind(self, step: int) -> None:
        """Forget metrics after `step`: a resumed run writes them again, each step once."""
        keep_lines(self.run.metrics, lambda line: line["step"] <= step)
        self._metrics = Appender(self.run.metrics)

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run's own last word; the supervisor turns it into the row."""
        write_json(self.run.result, dict(result))

    def fail(self, failure: Mapping[str, Any]) -> None:
        latest = self.run.latest_checkpoint()
        write_json(
            self.run.failure, {**failure, "last_checkpoint": latest.name if latest else None}
        )

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop.set()


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the whole lines of a JSONL file that are wanted, replacing it atomically."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and wanted(json.loads(line)):
                kept.append(line)
        except (ValueError, KeyError):
            continue
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, path)


def require(rows: list[Any], what: str, hint: str) -> None:
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
