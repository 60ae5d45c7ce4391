"""Fixtures: a home that rents machines from a SkyPilot server on loopback, for trainers without
torch."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sky import FakeCluster, FakeSky
from loopback_sshd import WHY_NOT

from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.executors.cluster.place import name_prefix
from engine.home.run_dir import Home, RunDir

TOKEN = "sky_" + "t" * 40


class Rented:
    """A home with the host `rented`, and runs that go there."""

    compute = "sky:rented"

    def __init__(self, home: Home, sky: FakeSky, box: Any) -> None:
        self.home, self.sky = home, sky
        self.queue, self.start, self.until_ended = box.queue, box.start, box.until_ended
        self.handle, self.bench, self._events = box.handle, box.bench, box.events

    def events(self, run: RunDir) -> list[str]:
        """The names of the run's events here."""
        return self._events(run) if run.events.exists() else []

    def name(self, run: RunDir, launch: int = 0) -> str:
        """The name of a launch's cluster; of the present one without a number."""
        number = launch or self.handle(run).launch
        return f"{name_prefix(hosts.home_id(self.home))}{run.id}-{number}"

    def cluster(self, run: RunDir, launch: int = 0) -> FakeCluster:
        """The machine of a launch, once there is one."""
        name = self.name(run, launch)
        return self.bench.until(lambda: self.sky.clusters.get(name), f"{name} is rented", 60)

    def far_run(self, run: RunDir) -> RunDir:
        """The run's folder on the machine of its present launch."""
        home_id = hosts.home_id(self.home)
        folder = self.sky.folder / self.name(run) / "home" / ".honesmith-host"
        return Home(folder / "homes" / home_id).run(run.id)

    def until_held(self, run: RunDir) -> RunDir:
        """Until the trainer over there holds; returns its folder."""
        self.bench.until(lambda: run.far("placement").exists(), "it is put somewhere", 60)
        self.bench.until(lambda: (self.far_run(run).path / "holds").exists(), "it holds", 90)
        return self.far_run(run)


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[FakeSky]:
    """A SkyPilot server whose machines are folders here."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    server = FakeSky(tmp_path / "sky", token=TOKEN)
    yield server
    server.close()
    server.end()


@pytest.fixture
def rented_machines(
    home: Home,
    sky: FakeSky,
    fake_python: Path,
    env: str,
    bench: Any,
    far_box: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Rented:
    """A host that was set up, with trainers without torch."""
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "20")
    monkeypatch.setenv("SKY_TOKEN", TOKEN)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    values: dict[str, str | int | float] = {"kind": "sky", "address": sky.address}
    values |= {"token_env": "SKY_TOKEN", "accelerators": "H100:1", "max_price": 3.0}
    hosts.add_host(home, "rented", values | {"python": str(fake_python)})
    host_setup.set_up(home, "rented")
    return Rented(home, sky, far_box(home, None, env, bench, "sky:rented"))
