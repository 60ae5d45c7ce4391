"""What every environment in the home is built with: alone, with room, proved, then in its place."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installer import Installer

from engine.core.errors import UserError
from engine.core.files import take_lock
from engine.home.run_dir import Home
from engine.machine.install import setup_env, venvs, vllm_env

Setup = Callable[..., dict[str, object]]
BOTH = pytest.mark.parametrize(
    ("setup", "lock", "command", "needed"),
    [
        pytest.param(setup_env.setup, "setup.lock", "honesmith setup", "3", id="training"),
        pytest.param(
            vllm_env.setup_vllm, "setup-vllm.lock", "honesmith setup --vllm", "5", id="vllm"
        ),
    ],
)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@BOTH
def test_two_setups_at_once_are_refused(
    home: Home, setup: Setup, lock: str, command: str, needed: str
):
    held = take_lock(home.cache / lock)
    assert held is not None
    try:
        with pytest.raises(UserError, match=f"another `{command}`") as refusal:
            setup(home, run=Installer(), proof="import json")
    finally:
        os.close(held)
    assert refusal.value.code == "RUN_STATE" and refusal.value.retryable


@BOTH
def test_too_little_disk_is_said_before_anything_is_fetched(
    home: Home, monkeypatch: pytest.MonkeyPatch, setup: Setup, lock: str, command: str, needed: str
):
    usage = type("Usage", (), {"free": 2_000_000_000})
    monkeypatch.setattr(venvs.shutil, "disk_usage", lambda path: usage)
    run = Installer()
    with pytest.raises(UserError, match=f"2.0 GB are free .* about {needed} are") as refusal:
        setup(home, run=run, proof="import json")
    assert refusal.value.code == "DISK_FULL" and run.calls == []


def test_the_lock_of_a_setup_that_failed_is_free(home: Home):
    with pytest.raises(ValueError), venvs.only_builder(home.cache / "x.lock", "x"):
        raise ValueError
    with venvs.only_builder(home.cache / "x.lock", "x"):
        pass


def test_an_interpreter_says_last_why_it_cannot():
    python = Path(sys.executable)
    assert venvs.complaint(python, "import json", 60) is None
    assert venvs.complaint(python, "raise SystemExit(3)", 60) == "it said nothing"
    said = venvs.complaint(python, "import no_such_package", 60)
    assert said is not None and said.endswith("No module named 'no_such_package'")


def test_what_was_built_aside_replaces_what_was_there(tmp_path: Path):
    folder = tmp_path / "venv"
    for place, name in ((folder, "old"), (venvs.build_folder(folder), "new")):
        place.mkdir()
        (place / name).touch()
    venvs.take_place(folder)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert not venvs.build_folder(folder).exists()
