"""Fixtures of the fault suites: everything here is opt-in (`make faults`) and may take minutes."""

from pathlib import Path

import pytest

from engine.run_dir import Home
from tests.engine.conftest import Bench, add_env

HERE = Path(__file__).parent
LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture
def bench(home: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs whose trainer is tests/engine/fake_trainer.py."""
    script = HERE.parent / "engine" / "fake_trainer.py"
    monkeypatch.setenv("HONESMITH_TEST_WORKER", str(script))
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "0.2")
    return Bench(home)


@pytest.fixture
def steady(home: Home, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pushed environment, in a home whose trainers are steady_trainer.py; its id."""
    script = HERE.parent / "helpers" / "steady_trainer.py"
    monkeypatch.setenv("HONESMITH_TEST_WORKER", str(script))
    return add_env(home, "sums")


@pytest.fixture
def env(home: Home) -> str:
    """A pushed environment with 40 train and 20 held-out rows; its id."""
    return add_env(home, "sums")


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests said about what they did: `record_property("said", ...)`."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "said" and report.when == "call":
                    terminalreporter.write_line(str(value))
