"""Fixtures: runs as jobs of a real Ray of two nodes, whose trainers have no torch."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback_ray
import psutil
import pytest
from loopback_ray import LoopbackRay

from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.executors.cluster.place import Place
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store


class Pool:
    """A home with the cluster `pool`, whose folder this machine sees, and runs that go there."""

    compute = "ray:pool"

    def __init__(self, home: Home, ray: LoopbackRay, box: Any, root: Path) -> None:
        self.home, self.ray, self.root = home, ray, root
        self.host = hosts.host_of(home, "pool")
        # What runs at another place have in common with those of a host over SSH.
        self.queue, self.start, self.until_ended = box.queue, box.start, box.until_ended
        self.handle, self.bench, self._events = box.handle, box.bench, box.events

    def events(self, run: RunDir) -> list[str]:
        """The names of the run's events here."""
        return self._events(run) if run.events.exists() else []

    def until_launch(self, run: RunDir, number: int, seconds: float) -> None:
        """Until the run was put there for the `number`-th time."""
        text = f"it is put there as launch {number}"
        self.bench.until(lambda: self.handle(run).launch == number, text, seconds)

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
        self.bench.until(lambda: run.far("placement").exists(), "it is put somewhere", 60)
        self.bench.until(lambda: (self.far_run(run).path / "holds").exists(), "it holds", 90)
        return self.far_run(run)

    def jobs(self) -> list[dict[str, Any]]:
        """Every job of this home, as Ray shows it."""
        prefix = f"hs-{hosts.home_id(self.home)[:6]}-"
        listed = self.ray.get("/api/jobs/").json()
        return [job for job in listed if str(job["submission_id"]).startswith(prefix)]

    def far_processes(self, run: RunDir) -> list[psutil.Process]:
        """Every process of the run's launches over there."""
        processes = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            of_driver = "engine.executors.ray.driver" in words and run.id in words
            if of_driver or f"/{run.id}." in " ".join(words):
                processes.append(process)
        return processes

    def require_ended(self, processes: list[psutil.Process]) -> None:
        """Fail where one of these still runs."""

        def have_ended() -> bool:
            return not any(
                each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes
            )

        self.bench.until(have_ended, "they have ended", 10)

    def driver(self, run: RunDir) -> psutil.Process:
        """The program that Ray started."""
        (driver,) = [
            process
            for process in self.far_processes(run)
            if "engine.executors.ray.driver" in process.cmdline()
            and "--carry-out" not in process.cmdline()
        ]
        return driver


@pytest.fixture(scope="session", name="ray_cluster")
def ray_of_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackRay]:
    """One Ray for all tests; each has a home, and so ids of jobs, of its own."""
    why_not = loopback_ray.why_not()
    if why_not:
        pytest.skip(why_not)
    cluster = LoopbackRay(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.stop()


@pytest.fixture(name="pool")
def pool_of_ray(
    home: Home,
    ray_cluster: LoopbackRay,
    fake_python: Path,
    env: str,
    bench: Any,
    far_box: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pool]:
    """A cluster that was set up, with trainers without torch."""
    ray_cluster.mend()
    monkeypatch.setattr(host_setup, "PROOF", "pass")
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "20")
    root = tmp_path / "shared" / "honesmith"
    add_pool(home, ray_cluster, root, str(fake_python), monkeypatch)
    yield Pool(home, ray_cluster, far_box(home, None, env, bench, compute="ray:pool"), root)
    for process in psutil.process_iter(["cmdline"]):
        if str(root) in " ".join(process.info["cmdline"] or []):
            process.send_signal(signal.SIGKILL)


def add_pool(
    home: Home, ray: LoopbackRay, root: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register the cluster with a home, and set it up."""
    monkeypatch.setenv("POOL_TOKEN", loopback_ray.TOKEN)
    options = {"kind": "ray", "address": ray.address, "token_env": "POOL_TOKEN", "on_gpu": False}
    hosts.add_host(home, "pool", options | {"python": python, "folder": str(root)})
    host_setup.set_up(home, "pool")
    assert os.environ["POOL_TOKEN"]
