"""A host over a real sshd on loopback that serves models, with a server without torch there."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from loopback_sshd import LoopbackSshd, python_there, sshd
from stand_ins import stand_in

from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.home.run_dir import Home
from engine.machine.processes import deployments

__all__ = ["sshd"]  # a fixture
STAND_INS = Path(__file__).parents[2]


class ServingBox:
    """The host `box` of a home."""

    def __init__(self, home: Home, server: LoopbackSshd) -> None:
        self.home, self.sshd = home, server

    @property
    def far_home(self) -> Home:
        """The home at the other side."""
        return Home(self.sshd.home / ".honesmith-host" / "homes" / hosts.home_id(self.home))

    def far_deployments(self) -> list[str]:
        """The ids of the deployments that live at the other side."""
        return [row.deployment_id for row in deployments.living(self.far_home)]

    def forwarder(self, deployment_id: str) -> psutil.Process:
        """The process of a deployment here."""
        process = json.loads(self.home.deployment(deployment_id).process.read_text())
        return psutil.Process(process["pid"])

    def cut(self, deployment_id: str) -> None:
        """End the connections of a deployment, as a network does that dies."""
        for child in self.forwarder(deployment_id).children(recursive=True):
            if child.name() == "ssh":
                child.kill()


@pytest.fixture
def serving_box(
    home: Home, sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServingBox]:
    """A host that was set up. Neither here nor there is torch needed."""
    stand_in(monkeypatch, trainer=STAND_INS / "fake_trainer.py")
    monkeypatch.setattr(host_setup, "PROOF", "pass")
    python = python_there(
        tmp_path / "python-there",
        trainer=STAND_INS / "fake_trainer.py",
        server=STAND_INS / "fake_server.py",
    )
    hosts.add_host(home, "box", {"ssh": "box", "python": str(python)})
    host_setup.set_up(home, "box")
    box = ServingBox(home, sshd)
    yield box
    for place in (home, box.far_home):
        for row in deployments.living(place):
            deployments.stop(place, row, "the test is over")
