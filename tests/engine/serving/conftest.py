"""Deployments without torch, for tests of what starts and asks them."""

from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.home.run_dir import Home
from engine.machine.processes import deployments


@pytest.fixture
def server(home: Home, monkeypatch: pytest.MonkeyPatch):
    """Deployments start a stand-in; returns a function that says how it behaves."""
    here = Path(__file__).parent
    stand_in(monkeypatch, server=here.with_name("fake_server.py"))
    stand_in(monkeypatch, trainer=here.with_name("fake_trainer.py"))
    monkeypatch.setattr(deployments, "STOP_S", 0.5)
    yield lambda behave: (home.root / "behave").write_text(behave)
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")
