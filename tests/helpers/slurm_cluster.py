"""Fixtures: runs as jobs of a real Slurm of one node, whose trainers have no torch."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback_slurm import WHY_NOT, LoopbackSlurm

from engine.core.files import read_json
from engine.executors import hosts, jobs
from engine.executors.cluster.place import Place
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store


class Cluster:
    """A home with the cluster `hpc`, whose commands this machine has, and runs that go there."""

    compute = "slurm:hpc"

    def __init__(self, home: Home, slurm: LoopbackSlurm, box: Any, root: Path) -> None:
        self.home, self.slurm, self.root = home, slurm, root
        self.host = hosts.host_of(home, "hpc")
        # What runs at another place have in common with those of a host over SSH.
        self.queue, self.start, self.until_ended = box.queue, box.start, box.until_ended
        self.handle, self.bench, self._events = box.handle, box.bench, box.events

    def events(self, run: RunDir) -> list[str]:
        """The names of the run's events here, as far as there are any yet."""
        return self._events(run) if run.events.exists() else []

    def place(self, run: RunDir) -> Place:
        """The launch of a run at the other side."""
        return Place(self.root, hosts.home_id(self.home), run.id, self.handle(run).launch)

    def far_run(self, run: RunDir) -> RunDir:
        """The run's folder at the other side."""
        return self.place(run).run

    def far_row(self, run: RunDir) -> RunRow:
        """The run's row at the other side."""
        with Store(self.far_run(run).home) as store:
            return store.get_run(run.id)

    def until_held(self, run: RunDir) -> RunDir:
        """Until the trainer at the other side holds; returns its folder."""
        self.bench.until(lambda: run.far("placement").exists(), "it is put somewhere", 200)
        self.bench.until(lambda: (self.far_run(run).path / "holds").exists(), "it holds", 200)
        return self.far_run(run)

    def job(self, run: RunDir) -> str:
        """The state of the run's job, as Slurm shows it."""
        name = self.place(run).job_name
        return self.slurm.call("squeue", "-h", "--states=all", f"--name={name}", "-o", "%T").strip()

    def job_id(self, run: RunDir) -> str:
        """The id of the run's job."""
        name = self.place(run).job_name
        return self.slurm.call("squeue", "-h", "--states=all", f"--name={name}", "-o", "%i").strip()

    def job_pid(self, run: RunDir) -> int:
        """The process id of the job's own program."""
        supervisor = read_json(self.far_run(run).started_record)["supervisor_pid"]
        parent = psutil.Process(supervisor).parent()
        assert parent is not None
        return parent.pid

    def lives(self, pid: int) -> bool:
        """Whether a process lives."""
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    def variables(self, pid: int) -> set[str]:
        """The names of a process's variables."""
        return set(psutil.Process(pid).environ())


@pytest.fixture(name="slurm")
def slurm_of_one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackSlurm]:
    """A Slurm that every command of this test speaks to."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    server = LoopbackSlurm()
    for name, text in server.variables.items():
        monkeypatch.setenv(name, text)
    yield server
    server.close()


@pytest.fixture(name="cluster")
def cluster_of_slurm(
    home: Home,
    slurm: LoopbackSlurm,
    fake_python: Path,
    env: str,
    bench: Any,
    far_box: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    """A cluster that was set up, with trainers without torch."""
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "60")
    root = tmp_path / "shared" / "honesmith"
    options = {"kind": "slurm", "python": str(fake_python), "folder": str(root)}
    host = hosts.add_host(home, "hpc", options | {"gres": "none"})
    root.mkdir(parents=True)
    hosts.note_facts(home, host, str(fake_python), jobs.describe(str(root)))
    made = Cluster(home, slurm, far_box(home, None, env, bench, compute="slurm:hpc"), root)
    yield made
    for process in psutil.process_iter(["cmdline"]):
        if str(root) in " ".join(process.info["cmdline"] or []):
            process.send_signal(signal.SIGKILL)
