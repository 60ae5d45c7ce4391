"""Fixtures of the fault suites: everything here is opt-in (`make faults`) and may take minutes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.home.run_dir import Home
from mcp_server.access.sharing import share
from tests.engine.conftest import Bench, add_env, tuned  # noqa: F401  a fixture

HERE = Path(__file__).parent
LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Makes small file systems, where this user may mount some."""
    mounted: list[Path] = []

    def make(options: str, *how: str) -> Path:
        folder = tmp_path / f"small-{len(mounted)}"
        folder.mkdir()
        argv = ["mount", *(how or ("-t", "tmpfs", "-o", options, "none")), str(folder)]
        if os.geteuid() != 0 or subprocess.run(argv, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a small file system")
        mounted.append(folder)
        return folder

    yield make
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_home(mount, monkeypatch) -> Callable[[str], Home]:
    """A home of its own on a small file system."""

    def make(options: str) -> Home:
        root = mount(options) / "home"
        monkeypatch.setenv("HONESMITH_HOME", str(root))
        return Home.locate(root)

    return make


@pytest.fixture
def bench(home: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs whose trainer is tests/engine/fake_trainer.py."""
    script = HERE.parent / "engine" / "fake_trainer.py"
    stand_in(monkeypatch, trainer=script)
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "0.2")
    return Bench(home)


@pytest.fixture
def steady(home: Home, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pushed environment, in a home whose trainers are steady_trainer.py; its id."""
    script = HERE.parent / "helpers" / "steady_trainer.py"
    stand_in(monkeypatch, trainer=script)
    return add_env(home, "sums")


@pytest.fixture
def env(home: Home) -> str:
    """A pushed environment with 40 train and 20 held-out rows, for every key to use; its id."""
    env_id = add_env(home, "sums")
    share(home, "sums", may="use")
    return env_id
