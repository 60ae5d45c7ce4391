"""`heartbeat.json` of a run: what its trainer is doing, how far it is, and how long its work took.

The trainer writes it at every change of phase and about twice a second in between, in place, as one
line of fixed length. Whoever reads it sees a whole line: it is written by one call and is shorter
than a page.
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
EXAM_PHASES = ("evaluation", "skill check")  # in them answers are counted, and no step moves
_LINE_BYTES = 3072


@dataclass(frozen=True)
class Work:
    """Work of one kind (a phase) that an attempt has to do, and how long it has taken so far.

    A unit is a step of training, an answer of an evaluation or of the skill check, or a checkpoint.

    Attributes:
        planned: units that the attempt will do from its start to its end.
        done: units that it has done.
        seconds: that the units done took, without other work in between.
        squares: the sum of the squares of the seconds of each unit, for their spread; 0 where units
            are not timed one by one.
        longest_silence_s: the longest time between two signs of life in this phase.
    """

    planned: int = 0
    done: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    longest_silence_s: float = 0.0

    @property
    def left(self) -> int:
        """The units that are still to do."""
        return max(0, self.planned - self.done)


@dataclass(frozen=True)
class Outlook:
    """What an attempt knows about its steps and its end beside the work of each phase.

    Attributes:
        steps_before: steps that earlier attempts have done.
        answers_at_end: answers of evaluations that are asked after the last step.
        earliest_end: the step at which the run may end at the earliest, where it may end before its
            last one; None where it may not.
    """

    steps_before: int = 0
    answers_at_end: int = 0
    earliest_end: int | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a trainer.

    Attributes:
        attempt: which attempt of the run it is.
        time: when it was given, in unix seconds.
        phase: what the trainer is doing.
        done, of: how many units of this phase are done, and of how many; 0 of 0 where nothing is
            counted.
        outlook: what it knows about the attempt's steps and end.
        work: what is planned and done, by phase.
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
        """How much of the phase is done; None where nothing is counted."""
        return round(min(100.0, 100 * self.done / self.of), 1) if self.of > 0 else None

    def to_line(self) -> bytes:
        """The heartbeat as JSON, filled up with spaces to a line of `_LINE_BYTES` bytes, so that
        nothing of an earlier heartbeat stays in the file."""
        text = json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))
        return text.ljust(_LINE_BYTES - 1).encode() + b"\n"


def write_heartbeat(descriptor: int, heartbeat: Heartbeat) -> None:
    """Write a heartbeat into the open file `descriptor`, over the one before. Raises OSError."""
    os.pwrite(descriptor, heartbeat.to_line(), 0)


def read_heartbeat(run: RunDir) -> Heartbeat | None:
    """The last heartbeat of a run; None where there is none, or where its file is damaged.

    Runs of earlier versions, and those that score stored answers again, write none.
    """
    stored = read_object(run.heartbeat)
    work_by_phase = stored.get("work") or {}
    try:
        return Heartbeat(
            attempt=int(stored["attempt"]),
            time=_number(stored["time"]),
            phase=str(stored["phase"]),
            done=int(stored["done"]),
            of=int(stored["of"]),
            outlook=_outlook(stored.get("outlook") or {}),
            work={str(phase): _work(fields) for phase, fields in work_by_phase.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # damaged, or of another shape
        return None


def _outlook(stored: Mapping[str, Any]) -> Outlook:
    """The outlook as it was stored. Raises TypeError, ValueError or AttributeError if damaged."""
    earliest_end = stored.get("earliest_end")
    return Outlook(
        steps_before=int(stored.get("steps_before", 0)),
        answers_at_end=int(stored.get("answers_at_end", 0)),
        earliest_end=None if earliest_end is None else int(earliest_end),
    )


def _work(stored: Mapping[str, Any]) -> Work:
    """One entry of `work` as it was stored. Raises KeyError, TypeError or ValueError if damaged."""
    return Work(
        planned=int(stored["planned"]),
        done=int(stored["done"]),
        seconds=_number(stored["seconds"]),
        squares=_number(stored["squares"]),
        longest_silence_s=_number(stored["longest_silence_s"]),
    )


def _number(value: Any) -> float:
    """`value` as a finite float. Raises TypeError or ValueError for anything else."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number
