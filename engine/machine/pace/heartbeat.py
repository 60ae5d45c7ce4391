"""`heartbeat.json` of a run: what its trainer is doing, how far it is, and how long its work took.

The trainer overwrites the file in place, at every change of phase and about twice a second in
between, with one line of fixed length. A reader always sees a whole line, because one call writes
it and it is shorter than a memory page.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.core.files import read_object
from engine.home.run_dir import RunDir

Phase = Literal[
    "loading", "sampling", "training", "evaluation", "skill check", "checkpoint", "finishing"
]
EXAM_PHASES = ("evaluation", "skill check")  # these phases count answers, and no step advances
_LINE_BYTES = 3072  # less than a memory page, so that readers never see half a line


@dataclass(frozen=True)
class Work:
    """Work of one kind (a phase) that an attempt has to do, and how long it has taken so far.

    A unit is a training step, an answer in an evaluation or skill check, or a checkpoint.

    Attributes:
        planned: how many units the attempt will do from its start to its end.
        done: how many units it has done.
        seconds: how long the units done took together, without other work in between.
        squares: the sum of the squares of the seconds of each unit, to compute their variance; 0 if
            units are not timed one by one.
        longest_silence_s: the longest time between two signs of life in this phase.
    """

    planned: int = 0
    done: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    longest_silence_s: float = 0.0

    @property
    def left(self) -> int:
        """How many units are still to do."""
        return max(0, self.planned - self.done)


@dataclass(frozen=True)
class Outlook:
    """What an attempt knows about its steps and its end, besides the work of each phase.

    Attributes:
        steps_before: how many steps earlier attempts have done.
        answers_at_end: how many evaluation answers are asked after the last step.
        earliest_end: the first step at which the run may stop early; None if it may not.
    """

    steps_before: int = 0
    answers_at_end: int = 0
    earliest_end: int | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a trainer.

    Attributes:
        attempt: the number of the attempt of the run.
        time: when the heartbeat was written, in unix seconds.
        phase: what the trainer is doing.
        done, of: how many units of this phase are done, and of how many; both are 0 if nothing is
            counted.
        outlook: what the trainer knows about the attempt's steps and end.
        work: what is planned and done in each phase.
    """

    attempt: int
    time: float
    phase: str
    done: int = 0
    of: int = 0
    outlook: Outlook = field(default_factory=Outlook)
    work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def percent(self) -> float | None:
        """How much of the phase is done, in percent; None if nothing is counted."""
        return round(min(100.0, 100 * self.done / self.of), 1) if self.of > 0 else None

    def to_line(self) -> bytes:
        """Return the heartbeat as one line of JSON, padded with spaces to `_LINE_BYTES` bytes, so
        that nothing of an earlier heartbeat remains in the file."""
        text = json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))
        return text.ljust(_LINE_BYTES - 1).encode() + b"\n"


def write_heartbeat(descriptor: int, heartbeat: Heartbeat) -> None:
    """Write a heartbeat into the open file `descriptor`, over the previous one. Raises OSError if
    the file cannot be written."""
    os.pwrite(descriptor, heartbeat.to_line(), 0)  # 0: at the beginning of the file


def read_heartbeat(run: RunDir) -> Heartbeat | None:
    """Read the last heartbeat of a run. Returns None if there is none, or if its file is damaged.

    Runs of earlier versions, and those that score stored answers again, write none.
    """
    stored = read_object(run.heartbeat)
    work_by_phase = stored.get("work") or {}
    try:
        return Heartbeat(
            attempt=int(stored["attempt"]),
            time=_parse_finite(stored["time"]),
            phase=str(stored["phase"]),
            done=int(stored["done"]),
            of=int(stored["of"]),
            outlook=_parse_outlook(stored.get("outlook") or {}),
            work={str(phase): _parse_work(fields) for phase, fields in work_by_phase.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # damaged, or of another shape
        return None


def _parse_outlook(stored: Mapping[str, Any]) -> Outlook:
    """Parse a stored outlook (what the trainer knows of its end). Raises TypeError, ValueError or
    AttributeError if it is damaged."""
    earliest_end = stored.get("earliest_end")
    return Outlook(
        steps_before=int(stored.get("steps_before", 0)),
        answers_at_end=int(stored.get("answers_at_end", 0)),
        earliest_end=None if earliest_end is None else int(earliest_end),
    )


def _parse_work(stored: Mapping[str, Any]) -> Work:
    """Parse one stored entry of `work`. Raises KeyError, TypeError or ValueError if it is
    damaged."""
    return Work(
        planned=int(stored["planned"]),
        done=int(stored["done"]),
        seconds=_parse_finite(stored["seconds"]),
        squares=_parse_finite(stored["squares"]),
        longest_silence_s=_parse_finite(stored["longest_silence_s"]),
    )


def _parse_finite(value: Any) -> float:
    """Convert `value` to a finite float. Raises TypeError or ValueError if that is impossible."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number
