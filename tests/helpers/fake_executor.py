"""A place to run in memory, whose clock and whose faults a test sets.

The `Cloud` is what a provider is: it goes on when whoever asked it has died. A `FakeExecutor` is
one launcher's view of it; any number of them may exist.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from machines import CPU

from engine.core.hints import Hint
from engine.home.run_dir import RunDir
from engine.machine.processes.seam import Caps, End, Handle, Owned, Probe

LEASE_S = 600.0
DONE = End("done", "", "", Hint(), "better")


class NotReached(Exception):
    """Nobody can be asked."""


@dataclass
class Job:
    """A launch of a run; `end` is None while it lives."""

    launch: int
    word_at: float  # when somebody asked for it last
    end: End | None = None
    is_dead: bool = False  # its processes are gone and nobody wrote how it ended


@dataclass
class Cloud:
    """Where the jobs are: run id -> job.

    Attributes:
        now: the clock, in seconds.
        is_reached: whether anybody can be asked.
        started: run id -> how often something was started for it, ever.
    """

    now: float = 0.0
    is_reached: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)

    def job(self, run_id: str) -> Job | None:
        """The job of a run, as its own watch left it: without a word for a lease it has ended."""
        job = self.jobs.get(run_id)
        if job and job.end is None and not job.is_dead and self.now - job.word_at > LEASE_S:
            job.end = End("failed", "lease", "nobody gave a word", Hint(), "unknown")
        return job


class FakeExecutor:
    """One launcher's view of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    @property
    def name(self) -> str:
        return "fake"

    def _ask(self) -> Cloud:
        if not self.cloud.is_reached:
            raise NotReached
        return self.cloud

    def capabilities(self) -> Caps:
        self._ask()
        return Caps(CPU)

    def start(self, run: RunDir, handle: Handle) -> None:
        cloud = self._ask()
        job = cloud.job(run.id)
        if job is not None and job.launch >= handle.launch:
            if job.launch == handle.launch:
                job.word_at = cloud.now
            return
        cloud.jobs[run.id] = Job(handle.launch, cloud.now)
        cloud.started[run.id] += 1

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        try:
            cloud = self._ask()
        except NotReached:
            return Probe("unknown")
        job = cloud.job(run.id)
        if job is None or job.launch != handle.launch or job.is_dead:
            return Probe("gone")
        if job.end is not None:
            return Probe("exited", job.end.state, "", job.end)
        job.word_at = cloud.now
        return Probe("running", "running", "fake:0")

    def stop(self, run: RunDir, handle: Handle) -> None:
        job = self._ask().job(run.id)
        if job is not None and job.launch == handle.launch and job.end is None:
            job.end = End("cancelled", "cancelled", "asked to end", Hint(), "unknown")

    def reap(self, run: RunDir, handle: Handle) -> None:
        cloud = self._ask()
        job = cloud.job(run.id)
        if job is not None and job.launch <= handle.launch and (job.end or job.is_dead):
            del cloud.jobs[run.id]

    def list_owned(self) -> Sequence[Owned]:
        cloud = self._ask()
        return [
            Owned(run_id, job.launch, "exited" if job.end else "gone" if job.is_dead else "running")
            for run_id, job in cloud.jobs.items()
        ]
