"""What a place to run is asked, whatever stands behind it.

An executor puts a process somewhere and says whether it lives; nothing more. Metrics, checkpoints
and results come back as the run's own files. Before `start` is called, the handle is on the disk
with the phase "starting"; so a crash in between loses nothing: whoever goes on calls `start` again,
and it finds what was started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from engine.core.files import read_object, write_json
from engine.core.hints import Hint
from engine.home.run_dir import RunDir

if TYPE_CHECKING:  # it loads psutil, which a supervisor does without
    from engine.core.hardware import Hardware

# pending: it waits over there for a device. gone: nothing of it is there. unknown: nobody could be
# asked, which is never a failure.
Life = Literal["pending", "running", "exited", "gone", "unknown"]
Phase = Literal["starting", "started", "ended"]


@dataclass(frozen=True)
class Handle:
    """A job at an executor; the content of the run's `placement.json`.

    Attributes:
        executor: where it is, as the setting `compute` names it, such as "ssh:box".
        launch: counts what this run was started as; 1 for the first. What another launch left over
            there is stale.
        phase: starting (it may or may not be there), started, or ended: all of it is here. Only
            an explicit resume makes another launch then.
        stop_asked: whether it was told to end.
        ended_in: the attempt of the run in which its end was taken over; 0 before that.
        losses: how often in a row its place took it away without a new checkpoint.
        lost_at_step: of the last checkpoint when that happened last.
    """

    executor: str
    launch: int
    phase: Phase
    stop_asked: bool = False
    ended_in: int = 0
    losses: int = 0
    lost_at_step: int = 0

    def write(self, run: RunDir) -> "Handle":
        """Put it on the disk of the run's folder; returns itself."""
        write_json(run.far("placement"), asdict(self))
        return self

    def changed(self, run: RunDir, **values: object) -> "Handle":
        """A copy with other values, on the disk."""
        return replace(self, **values).write(run)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def read(run: RunDir) -> "Handle | None":
        """The run's handle; None where it was never put anywhere, or the file is damaged."""
        stored = read_object(run.far("placement"))
        try:
            return Handle(**stored)
        except TypeError:
            return None


@dataclass(frozen=True)
class End:
    """How a job ended over there; the words are those of its own supervisor.

    Attributes:
        is_lost: whether its place took it away, though it could go on: a node that failed, a time
            limit. It is to be started again from its last checkpoint.
    """

    state: str
    reason_kind: str
    reason: str
    hint: Hint
    verdict: str
    is_lost: bool = False


@dataclass(frozen=True)
class Probe:
    """What became of a job.

    Attributes:
        life: see `Life`.
        state: of the run over there; "" where it is not known.
        device: what it holds over there, "" for nothing.
        end: how it ended; None as long as it has not.
        why: why it still waits, in the words of what it waits for, or why nothing is known of it;
            "" where that is not known.
        spent_s: seconds for which it has held its devices; None where its place does not count
            them: then all of its time counts.
    """

    life: Life
    state: str = ""
    device: str = ""
    end: End | None = None
    why: str = ""
    spent_s: float | None = None


@dataclass(frozen=True)
class Caps:
    """What a place has: its hardware, and the versions of the packages that train there."""

    hardware: "Hardware"
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Owned:
    """A job over there that is this home's."""

    run_id: str
    launch: int
    life: Life


class Executor(Protocol):
    """A place to run. All calls may raise the executor's own error for "not reached"; `probe`
    answers "unknown" instead."""

    @property
    def name(self) -> str:
        """As the setting `compute` names it."""
        ...

    def capabilities(self) -> Caps:
        """What it has."""
        ...

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch that the handle names; one that was started already stays as it is."""
        ...

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """What became of it. It is also the word that renews the job's lease."""
        ...

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end; again changes nothing."""
        ...

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of an ended job; again changes nothing."""
        ...

    def list_owned(self) -> Sequence[Owned]:
        """Every job of this home that is there."""
        ...
