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
        launch: the number of the launch of this run at the executor, from 1 on. What another launch
            has left at the executor is stale.
        phase: "starting" (the job may or may not be there), "started", or "ended" (all its files
            were fetched; only an explicit resume launches the run again).
        stop_asked: whether the job was told to end.
        ended_in: the attempt of the run in which the job's end was taken over; 0 before that.
        losses: how often in a row the executor lost the job before it wrote a new checkpoint.
        lost_at_step: the step of the last checkpoint when the job was lost last.
    """

    executor: str
    launch: int
    phase: Phase
    stop_asked: bool = False
    ended_in: int = 0
    losses: int = 0
    lost_at_step: int = 0

    def write(self, run: RunDir) -> "Handle":
        """Store the handle in the run's folder, in `placement.json`; return the handle itself."""
        write_json(run.far("placement"), asdict(self))
        return self

    def changed(self, run: RunDir, **values: object) -> "Handle":
        """Return a copy of the handle with other `values` of its fields, stored in the run's folder
        in place of this one."""
        return replace(self, **values).write(run)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def read(run: RunDir) -> "Handle | None":
        """Return the stored handle of a run; None if the run was never placed anywhere, or if
        `placement.json` is damaged."""
        stored = read_object(run.far("placement"))
        try:
            return Handle(**stored)
        except TypeError:
            return None


@dataclass(frozen=True)
class End:
    """How a job ended at its executor, in the words of its own supervisor.

    Attributes:
        is_lost: whether the executor took the job away although it could go on, because a node
            failed or a time limit was reached. It is to be started again from its last checkpoint.
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
        state: the state of the run at the executor; "" if it is not known.
        device: the devices that the job holds there; "" for none.
        end: how the job ended; None as long as it has not.
        why: why the job still waits, or why nothing is known of it, in the executor's words; "" if
            that is not known.
        spent_s: seconds for which the job has held its devices; None if the executor does not count
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
    """A job of this home at an executor."""

    run_id: str
    launch: int
    life: Life


class Executor(Protocol):
    """A place where runs are carried out: this machine, a machine over SSH, a cluster.

    All methods may raise the executor's own error if it cannot be reached; `probe` returns the life
    "unknown" instead.
    """

    @property
    def name(self) -> str:
        """The name of the executor in the setting `compute`, such as "ssh:box"."""
        ...

    def capabilities(self) -> Caps:
        """Return the hardware of the executor and the packages that train there."""
        ...

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch of `run` that the handle names; do nothing if it was started before."""
        ...

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """Return what became of the job. This also renews the job's lease, after which it would end
        by itself."""
        ...

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the job to save a checkpoint and end; a second call changes nothing."""
        ...

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of an ended job at the executor; a second call changes nothing."""
        ...

    def list_owned(self) -> Sequence[Owned]:
        """Return every job of this home that is at the executor."""
        ...
