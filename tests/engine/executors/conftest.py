"""Runs on a host over a real sshd on loopback, with a trainer without torch at the other end."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback_sshd import LoopbackSshd, python_there, sshd
from ray_pool import pool_of_ray, ray_of_two_nodes
from rented_machines import rented_machines, sky
from run_configs import train_config
from slurm_cluster import cluster_of_slurm, slurm_of_one_node

from engine.core.files import write_json
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.home.rows import TERMINAL, NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.machine.processes.seam import Handle
from engine.models import catalog

__all__ = [  # fixtures
    "cluster_of_slurm",
    "pool_of_ray",
    "ray_of_two_nodes",
    "rented_machines",
    "sky",
    "slurm_of_one_node",
    "sshd",
]
FAKE_TRAINER = Path(__file__).parent.parent / "fake_trainer.py"


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter for the other side whose trainers are the script without torch."""
    return python_there(tmp_path / "python-there", trainer=FAKE_TRAINER)


class Box:
    """A home with the host `box`, and runs that go there."""

    def __init__(
        self, home: Home, sshd: Any, env_id: str, bench: Any, compute: str = "ssh:box"
    ) -> None:
        self.home, self.sshd, self.env_id, self.bench = home, sshd, env_id, bench
        self.compute = compute

    @property
    def far_root(self) -> Path:
        """Everything of ours at the other side."""
        return self.sshd.home / ".honesmith-host"

    @property
    def far_home(self) -> Home:
        """The home at the other side."""
        return Home(self.far_root / "homes" / hosts.home_id(self.home))

    def far_run(self, run: RunDir) -> RunDir:
        """The run's folder at the other side."""
        return self.far_home.run(run.id)

    def far_row(self, run: RunDir) -> RunRow:
        """The run's row at the other side."""
        with Store(self.far_home) as store:
            return store.get_run(run.id)

    def queue(self, **settings: Any) -> RunDir:
        """Queue a run of the fake trainer at the other side."""
        folder = self.home.envs / self.env_id.replace("@", "/")
        base = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
        cap = settings.pop("max_gpu_hours", 0.0)

        def prepare(run_id: str) -> None:
            self.home.run(run_id).create()
            config = train_config(run_id, base=base, settings={"compute": self.compute})
            config |= {"env_id": self.env_id, "env_dir": str(folder)}
            config["fake_trainer"] = {"steps": 3, "save_every": 1} | settings
            write_json(self.home.run(run_id).config, config)

        new = NewRun("far", "train", "grpo", self.env_id, "pebble", compute=self.compute)
        with Store(self.home) as store:
            row = store.insert_run(new, prepare)
            store.update_run(row.run_id, only_in={"queued"}, max_gpu_hours=cap)
        return self.home.run(row.run_id)

    def until_ended(self, run: RunDir) -> RunRow:
        """Until the run has ended here and nothing of it lives here; returns its row."""

        def ended() -> RunRow | None:
            row = self.bench.row(run)
            return row if row.state in TERMINAL and not launcher.is_alive(run) else None

        return self.bench.until(ended, f"{run.id} has ended: {self.bench.row(run)}", 200)

    def start(self, **settings: Any) -> RunDir:
        """Queue a run and start what is queued."""
        run = self.queue(**settings)
        launcher.start_queued(self.home)
        return run

    def until_held(self, run: RunDir) -> RunDir:
        """Until the trainer at the other side holds; returns its folder."""
        far = self.far_run(run)
        self.bench.until(lambda: (far.path / "holds").exists(), "the far trainer holds", 40)
        return far

    def connection(self) -> psutil.Process:
        """The ssh program of this home's connection."""

        def find() -> psutil.Process | None:
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name() == "ssh" and "box" in process.cmdline():
                        return process
                except psutil.NoSuchProcess:
                    continue
            return None

        return self.bench.until(find, "there is a connection")

    def cut(self) -> None:
        """Cut the connection as a dead network does, for both sides at once."""
        self.connection().send_signal(signal.SIGKILL)

    def events(self, run: RunDir) -> list[str]:
        """The names of the run's events here."""
        return [json.loads(line)["event"] for line in run.events.read_text().splitlines()]

    def handle(self, run: RunDir) -> Handle:
        """The run's handle."""
        handle = Handle.read(run)
        assert handle is not None
        return handle


@pytest.fixture
def box(
    home: Home,
    sshd: LoopbackSshd,
    fake_python: Path,
    env: str,
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Box:
    """A host that was set up, with trainers without torch."""
    monkeypatch.setattr(host_setup, "PROOF", "pass")
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "20")
    hosts.add_host(home, "box", {"ssh": "box", "python": str(fake_python)})
    host_setup.set_up(home, "box")
    return Box(home, sshd, env, bench)


@pytest.fixture
def far_box() -> type[Box]:
    """`Box`, for fixtures of other places that runs go to."""
    return Box


@pytest.fixture
def bench_until() -> Any:
    """Polls until something holds."""

    def until(holds: Any, seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return until
