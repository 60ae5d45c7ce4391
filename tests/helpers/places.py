"""Places to run, as tests/engine/executors/test_contract.py handles them: one class for each.

A new executor gets a subclass of `Place` and a row in `PLACES` of that test.
"""

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import crash_points
import pytest
from crash_points import Point
from fake_executor import DONE, LEASE_S, Cloud, FakeExecutor

from engine.core.files import read_object
from engine.executors import hosts, jobs
from engine.executors.attending.places import connected
from engine.executors.linked import LinkedExecutor
from engine.executors.ray.executor import RayExecutor
from engine.executors.sky.executor import SkyExecutor
from engine.executors.slurm import login_side
from engine.executors.slurm.executor import SlurmExecutor
from engine.executors.ssh import Link
from engine.executors.ssh_executor import SshExecutor
from engine.home.rows import LOCAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher, limits
from engine.machine.processes.local_executor import LocalExecutor
from engine.machine.processes.seam import Executor, Handle, Probe
from engine.records.run_config import TrainConfig

_LOCAL, _SSH = "engine.machine.processes.local_executor", "engine.executors.ssh_executor"
_SLURM = "engine.executors.slurm.executor"
_RAY = "engine.executors.ray.executor"
_SKY = "engine.executors.sky.executor"
_LAUNCH = "launch.json"


def killed(point: Point | None, act: Callable[[], Any]) -> None:
    """Do `act` in a process of its own that is killed at `point`; None: right after it."""
    pid = os.fork()
    if pid == 0:
        try:
            if point is not None:
                crash_points.kill_at(point)
            act()
            if point is None:
                os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, point


class Place:
    """A place to run, and what a test may do to it.

    Attributes:
        home: the home whose runs go there.
        executor_name: what a handle names it.
        points: the moments between intent and handle at which whoever starts a run may die.
    """

    executor_name = ""
    points: ClassVar[Mapping[str, Point | None]] = {}

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.home: Home = request.getfixturevalue("home")
        self.bench: Any = request.getfixturevalue("bench")

    def queue(self) -> RunDir:
        """A run that can go there, and whose trainer holds at its second step."""
        raise NotImplementedError

    def executor(self) -> contextlib.AbstractContextManager[Executor]:
        """The executor, opened anew: each is a launcher of its own."""
        raise NotImplementedError

    def intend(self, run: RunDir) -> Handle:
        """Put on the disk that the run is to be started; returns its first handle."""
        return Handle(self.executor_name, 1, "starting").write(run)

    def again(self, run: RunDir, handle: Handle) -> Handle:
        """The run has to be launched once more: put that on the disk."""
        return handle.changed(run, launch=handle.launch + 1, phase="starting")

    def put(self, executor: Executor, run: RunDir, handle: Handle) -> None:
        """Send what the run needs, and start it."""
        executor.start(run, handle)

    def crash(self, point: str, run: RunDir) -> None:
        """Start the run in a process that dies at one of the points."""
        handle = self.intend(run)

        def put() -> None:
            with self.executor() as executor:
                self.put(executor, run, handle)

        killed(self.points[point], put)

    def goes_on(self, executor: Executor, run: RunDir) -> Handle:
        """What the next launcher does, which knows nothing but what is on the disk."""
        handle = Handle.read(run)
        assert handle is not None
        if executor.probe(run, handle).life == "gone":
            self.put(executor, run, handle)
        return handle

    def trainings(self, run: RunDir) -> int:
        """How many trainers were started for the run there, ever."""
        logs = self.there(run).logs.glob("attempt_*.log")
        return sum(log.read_text().count("trainer starts") for log in logs)

    def there(self, run: RunDir) -> RunDir:
        """The run's folder at that place."""
        return run

    def until_held(self, run: RunDir) -> None:
        """Until the trainer there holds."""
        holds = self.there(run).path / "holds"
        self.bench.until(holds.exists, "the trainer holds", 60)

    def go(self, run: RunDir) -> None:
        """Let the trainer go on to its end."""
        (self.there(run).path / "go").touch()

    def die(self, run: RunDir) -> None:
        """Kill everything of the run there, without a word."""
        record = read_object(self.there(run).started_record)
        self.bench.kill(record["supervisor_pid"], record["trainer_pid"])
        self.bench.until(lambda: not launcher.is_alive(self.there(run)), "its lock is free")

    def lose_lease(self, run: RunDir) -> None:
        """Let nobody give a word for longer than the lease, until it has ended there."""
        limits.renew_lease(self.there(run), 0.1)
        self.bench.until(lambda: not launcher.is_alive(self.there(run)), "its lease ends it", 60)

    def word(self, run: RunDir) -> object:
        """The last word that somebody gave; changes with each."""
        return read_object(self.there(run).far("lease"))

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        """Nobody can be asked by this executor, which is of no use afterwards."""
        raise NotImplementedError
        yield

    def until(self, executor: Executor, run: RunDir, handle: Handle, *lives: str) -> Probe:
        """Until a probe says one of these lives; returns it."""

        def look() -> Probe | None:
            probe = executor.probe(run, handle)
            return probe if probe.life in lives else None

        return self.bench.until(look, f"{run.id} is {lives}", 60)


class LocalPlace(Place):
    """This machine."""

    executor_name = LOCAL
    points: ClassVar[Mapping[str, Point | None]] = {
        "in the transaction that hands out the device": Point(
            _LOCAL, "LocalExecutor.claim", "after"
        ),
        "the intent is on the disk": Point("engine.home.store", "LeaseTable.lease_next", "after"),
        "before the call": Point(_LOCAL, "spawn_detached", "before"),
        "after the call": Point(_LOCAL, "spawn_detached", "after"),
        "after the start": Point(_LOCAL, "LocalExecutor.start", "after"),
    }

    def queue(self) -> RunDir:
        return self.bench.queue(steps=3, hold_at=2)

    @contextlib.contextmanager
    def executor(self) -> Iterator[LocalExecutor]:
        with Store(self.home) as store:
            yield LocalExecutor(self.home, store)

    def intend(self, run: RunDir) -> Handle:
        with self.executor() as executor:
            row = executor.store.lease_next(["cpu"])
            assert row is not None and row.run_id == run.id
            return executor.handle(row)

    def again(self, run: RunDir, handle: Handle) -> Handle:
        with Store(self.home) as store:
            store.resume_run(run.id, max_gpu_hours=1, request_id="", body={})
        return self.intend(run)

    def crash(self, point: str, run: RunDir) -> None:
        killed(self.points[point], lambda: launcher.start_queued(self.home))

    def goes_on(self, executor: Executor, run: RunDir) -> Handle:
        launcher.reap(self.home)
        assert isinstance(executor, LocalExecutor)
        row = executor.store.get_run(run.id)
        return executor.handle(row)

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        assert isinstance(executor, LocalExecutor)
        executor.store.close()  # as a database that cannot be read
        yield


class FakePlace(Place):
    """A cloud in memory. It cannot outlive a process: whoever dies here is an exception."""

    executor_name = "fake"
    points: ClassVar[Mapping[str, Point | None]] = {"before the call": None, "after the call": None}

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self.cloud = Cloud()

    def queue(self) -> RunDir:
        return self.bench.queue()

    @contextlib.contextmanager
    def executor(self) -> Iterator[FakeExecutor]:
        yield FakeExecutor(self.cloud)

    def crash(self, point: str, run: RunDir) -> None:
        handle = self.intend(run)
        if point == "after the call":
            FakeExecutor(self.cloud).start(run, handle)

    def trainings(self, run: RunDir) -> int:
        return self.cloud.started[run.id]

    def until_held(self, run: RunDir) -> None:
        assert run.id in self.cloud.jobs

    def go(self, run: RunDir) -> None:
        self.cloud.jobs[run.id].end = DONE

    def die(self, run: RunDir) -> None:
        self.cloud.jobs[run.id].is_dead = True

    def lose_lease(self, run: RunDir) -> None:
        self.cloud.now += LEASE_S + 1

    def word(self, run: RunDir) -> object:
        self.cloud.now += 1.0
        return self.cloud.jobs[run.id].word_at

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        self.cloud.is_reached = False
        yield
        self.cloud.is_reached = True


class LinkedPlace(Place):
    """A place over a connection, which files are sent over.

    Attributes:
        far_start: what starts a run at the other side.
    """

    far_start: ClassVar[Callable[..., Any] | None] = None

    def put(self, executor: Executor, run: RunDir, handle: Handle) -> None:
        assert isinstance(executor, LinkedExecutor | SkyExecutor)
        config = run.read_config()
        assert isinstance(config, TrainConfig)
        executor.send(run, config, handle)
        executor.start(run, handle)

    def crash(self, point: str, run: RunDir) -> None:
        if not point.startswith("there"):
            super().crash(point, run)
            return
        far_start = type(self).far_start
        assert far_start is not None
        handle = self.intend(run)
        with self.executor() as executor:
            assert isinstance(executor, LinkedExecutor)
            config = run.read_config()
            assert isinstance(config, TrainConfig)
            executor.send(run, config, handle)
            asked: dict[str, Any] = {}
            executor.link.job = lambda name, **values: asked.update(values) or {}  # type: ignore[method-assign]
            executor.start(run, handle)
            root = executor.root
        # The other side is what dies.
        killed(self.points[point], lambda: far_start(root, **asked))


class SshPlace(LinkedPlace):
    """A machine over a real sshd on loopback."""

    executor_name = "ssh:box"
    far_start = staticmethod(jobs.start)
    points: ClassVar[Mapping[str, Point | None]] = {
        "before anything is sent": Point(_SSH, "SshExecutor.send", "before"),
        "everything is sent": Point(_SSH, "SshExecutor.send", "after"),
        "after the call": Point(_SSH, "SshExecutor.start", "after"),
        "there, before the launch is noted": Point(
            "engine.machine.processes.limits", "renew_lease", "after"
        ),
        "there, the launch is noted": Point(
            "engine.executors.jobs", "write_json", "after", lambda args, _: args[0].name == _LAUNCH
        ),
        "there, the row is placed": Point("engine.home.store", "LeaseTable.place_run", "after"),
        "there, the device is handed out": Point(
            "engine.home.store", "LeaseTable.lease_next", "after", lambda _, row: bool(row)
        ),
    }

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self.box = request.getfixturevalue("box")

    def queue(self) -> RunDir:
        return self.box.queue(hold_at=2)

    @contextlib.contextmanager
    def executor(self) -> Iterator[SshExecutor]:
        host = hosts.host_of(self.home, self.executor_name)
        python = hosts.facts_of(self.home, host).python
        with Link(host.ssh, host.folder, python) as link:
            yield SshExecutor(self.home, host, link)

    def there(self, run: RunDir) -> RunDir:
        return self.box.far_run(run)

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        assert isinstance(executor, SshExecutor)
        self.box.sshd.stop()
        executor.link._process.kill()
        yield
        self.box.sshd.start()


class SlurmPlace(LinkedPlace):
    """A real Slurm of one node, whose commands this machine has."""

    executor_name = "slurm:hpc"
    far_start = staticmethod(login_side.start)
    points: ClassVar[Mapping[str, Point | None]] = {
        "before anything is sent": Point(_SLURM, "SlurmExecutor.send", "before"),
        "everything is sent": Point(_SLURM, "SlurmExecutor.send", "after"),
        "after the call": Point(_SLURM, "SlurmExecutor.start", "after"),
        "there, before sbatch": Point("engine.executors.slurm.commands", "submit", "before"),
        "there, sbatch has answered": Point("engine.executors.slurm.commands", "submit", "after"),
    }

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self.cluster = request.getfixturevalue("cluster")

    def queue(self) -> RunDir:
        return self.cluster.queue(hold_at=2)

    @contextlib.contextmanager
    def executor(self) -> Iterator[SlurmExecutor]:
        with connected(self.home, self.cluster.host) as executor:
            assert isinstance(executor, SlurmExecutor)
            yield executor

    def goes_on(self, executor: Executor, run: RunDir) -> Handle:
        handle = super().goes_on(executor, run)
        executor.start(run, handle)  # as whoever takes a run up does
        return handle

    def there(self, run: RunDir) -> RunDir:
        return self.cluster.far_run(run)

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        assert isinstance(executor, SlurmExecutor)
        executor.link._process.kill()
        yield


class RayPlace(LinkedPlace):
    """A real Ray of two nodes, whose folder this machine sees."""

    executor_name = "ray:pool"
    points: ClassVar[Mapping[str, Point | None]] = {
        "before anything is sent": Point(_RAY, "RayExecutor.send", "before"),
        "everything is sent": Point(_RAY, "RayExecutor.send", "after"),
        "before the call": Point("engine.executors.ray.jobs_api", "JobsApi.submit", "before"),
        "after the call": Point("engine.executors.ray.jobs_api", "JobsApi.submit", "after"),
        "after the start": Point(_RAY, "RayExecutor.start", "after"),
    }

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self.pool = request.getfixturevalue("pool")

    def queue(self) -> RunDir:
        return self.pool.queue(hold_at=2)

    @contextlib.contextmanager
    def executor(self) -> Iterator[RayExecutor]:
        with connected(self.home, self.pool.host) as executor:
            assert isinstance(executor, RayExecutor)
            yield executor

    def goes_on(self, executor: Executor, run: RunDir) -> Handle:
        handle = super().goes_on(executor, run)
        executor.start(run, handle)  # as whoever takes a run up does
        return handle

    def there(self, run: RunDir) -> RunDir:
        return self.pool.far_run(run)

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        assert isinstance(executor, RayExecutor)
        executor.link._process.kill()
        yield


class SkyPlace(LinkedPlace):
    """Machines rented from a SkyPilot server on loopback."""

    executor_name = "sky:rented"
    points: ClassVar[Mapping[str, Point | None]] = {
        "before the intent": Point("engine.executors.rented", "note", "before"),
        "the intent is on the disk": Point("engine.executors.rented", "note", "after"),
        "before the call": Point("engine.executors.sky.api", "SkyApi.launch", "before"),
        "after the call": Point("engine.executors.sky.api", "SkyApi.launch", "after"),
        "after the start": Point(_SKY, "SkyExecutor.start", "after"),
    }

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self.rented = request.getfixturevalue("rented_machines")

    def queue(self) -> RunDir:
        return self.rented.queue(hold_at=2)

    @contextlib.contextmanager
    def executor(self) -> Iterator[SkyExecutor]:
        with connected(self.home, hosts.host_of(self.home, self.executor_name)) as executor:
            assert isinstance(executor, SkyExecutor)
            yield executor

    def put(self, executor: Executor, run: RunDir, handle: Handle) -> None:
        super().put(executor, run, handle)
        # What goes there goes once its machine is up, which a probe sees.
        if executor.probe(run, handle).life != "exited":
            self.until(executor, run, handle, "running", "exited")

    def goes_on(self, executor: Executor, run: RunDir) -> Handle:
        handle = super().goes_on(executor, run)
        self.until(executor, run, handle, "running")
        return handle

    def there(self, run: RunDir) -> RunDir:
        return self.rented.far_run(run)

    @contextlib.contextmanager
    def unreachable(self, executor: Executor) -> Iterator[None]:
        assert isinstance(executor, SkyExecutor)
        self.rented.sky.is_away = True
        executor.link.close()
        yield
        self.rented.sky.is_away = False
