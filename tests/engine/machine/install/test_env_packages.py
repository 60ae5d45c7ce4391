"""requirements.txt: what is missing is named, and an environment is built once per content."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from packages import source, wheel

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.machine.install import env_packages, pip_index
from engine.machine.install.env_packages import install, missing, read_requirements, venv_of


@pytest.fixture
def index(tmp_path: Path, monkeypatch) -> Path:
    """The only place pip may look in."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def requirements(folder: Path, text: str):
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text(text)
    return read_requirements(folder)


def test_names_versions_comments_and_markers_are_read(tmp_path: Path):
    found = requirements(
        tmp_path / "env",
        "# packages\n\npydantic>=2  # ours\nno_such-package==1.0\n"
        'only-elsewhere; python_version < "3"\n',
    )
    assert [str(r) for r in found] == ["pydantic>=2", "no_such-package==1.0"]
    assert missing(found) == ["no_such-package==1.0"]


def test_a_version_that_does_not_fit_counts_as_missing(tmp_path: Path):
    (found,) = missing(requirements(tmp_path / "env", "pydantic==0.1\n"))
    assert found.startswith("pydantic==0.1 (here is 2.")


def test_without_the_file_nothing_is_needed(tmp_path: Path):
    assert read_requirements(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        "-r other.txt",
        "--index-url x",
        "a b c",
        "../local",
        "==1",
        "-e .",
        "--find-links /tmp",
        "x @ file:///tmp/x",
        "x @ https://host/x.whl",
        "/tmp/x.whl",
    ],
)
def test_a_line_that_names_no_package_is_told_by_its_number(tmp_path: Path, line: str):
    with pytest.raises(UserError, match=r"requirements\.txt:2") as caught:
        requirements(tmp_path / "env", f"pydantic\n{line}\n")
    assert caught.value.code == "ENV_INVALID"


def test_the_place_depends_on_the_packages_not_on_their_order(home: Home, tmp_path: Path):
    one = venv_of(home, requirements(tmp_path / "a", "x==1\ny\n"))
    same = venv_of(home, requirements(tmp_path / "b", "# z\ny\nx == 1\n"))
    other = venv_of(home, requirements(tmp_path / "c", "x==2\ny\n"))
    assert one == same != other
    assert one.folder.is_relative_to(home.cache)


@pytest.mark.timeout(60)
def test_an_environment_is_built_once_and_found_again(home: Home, index: Path, tmp_path: Path):
    wheel(index, "tiny_tasks", "1.2", "WORD = 'plum'\n")
    needed = requirements(tmp_path / "env", "tiny-tasks==1.2\n")
    python = install(home, needed, patience_s=50)
    said = subprocess.run(
        [python, "-c", "import tiny_tasks; print(tiny_tasks.WORD)"], capture_output=True, text=True
    )
    assert said.stdout == "plum\n"
    stamp = venv_of(home, needed).outcome.stat().st_mtime_ns
    (index / "tiny_tasks-1.2-py3-none-any.whl").unlink()
    assert install(home, needed, patience_s=1) == python
    assert venv_of(home, needed).outcome.stat().st_mtime_ns == stamp


@pytest.mark.timeout(60)
def test_no_variable_of_the_server_reaches_an_installation(
    home: Home, index: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-server")
    canary = tmp_path / "canary"
    spy = f"""
import os
print("VARIABLES", dict(os.environ), "HOME", os.listdir(os.environ["HOME"]), flush=True)
open({str(canary)!r}, "w").write("x")
"""
    source(index, "evil", "1.0", spy)
    needed = requirements(tmp_path / "env", "evil==1.0\n")
    with pytest.raises(UserError, match="evil") as caught:
        install(home, needed, patience_s=50)
    assert caught.value.code == "ENV_DEPS" and "allow_source_builds = true" in caught.value.hint
    assert not canary.exists()
    home.config_file.write_text("allow_source_builds = true\nallow_root = true\n")
    with pytest.raises(UserError):  # its code fails where it may not write
        install(home, needed, patience_s=50)
    log = venv_of(home, needed).log.read_text()
    assert "VARIABLES" in log and "canary-of-the-server" not in log
    assert not canary.exists()


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        ({}, (443,)),
        ({"PIP_NO_INDEX": "1"}, ()),
        ({"PIP_INDEX_URL": "http://mirror:3141/simple"}, (3141,)),
        ({"PIP_INDEX_URL": "file:///srv/index/simple"}, ()),
        ({"PIP_INDEX_URL": "https://a/simple", "PIP_EXTRA_INDEX_URL": "http://b/c"}, (80, 443)),
        ({"PIP_PROXY": "proxy:3128"}, (443, 3128)),
    ],
)
def test_only_the_ports_of_the_indexes_are_left_open(monkeypatch, settings, ports):
    for name in [*os.environ]:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", **settings}.items():
        monkeypatch.setenv(name, value)
    found = pip_index.read(env_packages._pip_path())
    assert found.ports == ports
    assert {name: found.variables[name] for name in settings} == settings
    if settings.get("PIP_INDEX_URL", "").startswith("file:"):
        assert "/srv/index" in found.paths


@pytest.mark.timeout(60)
def test_what_pip_cannot_do_is_told_in_its_words_and_tried_again(
    home: Home, index: Path, tmp_path: Path
):
    needed = requirements(tmp_path / "env", "tiny-tasks==9\n")
    with pytest.raises(UserError, match="tiny-tasks==9") as caught:
        install(home, needed, patience_s=50)
    assert caught.value.code == "ENV_DEPS" and not caught.value.retryable
    assert not venv_of(home, needed).is_ready()
    wheel(index, "tiny_tasks", "9", "")
    assert install(home, needed, patience_s=50).exists()


@pytest.mark.timeout(60)
def test_an_installation_outlives_the_call_that_lost_patience(
    home: Home, index: Path, tmp_path: Path
):
    wheel(index, "tiny_tasks", "1.2", "")
    needed = requirements(tmp_path / "env", "tiny-tasks==1.2\n")
    with pytest.raises(UserError, match="still being installed") as caught:
        install(home, needed, patience_s=0.0)
    assert caught.value.retryable
    assert install(home, needed, patience_s=50).exists()


def test_a_builder_that_died_leaves_no_half_environment_behind(home: Home, tmp_path: Path):
    needed = requirements(tmp_path / "env", "tiny-tasks==1.2\n")
    place = venv_of(home, needed)
    place.python.parent.mkdir(parents=True)
    place.python.touch()
    assert not place.is_ready()
    place.outcome.write_text('{"ok": tr')
    assert not place.is_ready()
    place.outcome.write_text(json.dumps({"ok": False, "error": "x"}))
    assert not place.is_ready()


def test_the_words_of_pip_are_cut_to_what_matters(tmp_path: Path):
    log = tmp_path / "pip.log"
    log.write_text("Looking\nERROR: No matching distribution found for x\nnotice: new pip\n")
    assert env_packages._pip_error(log) == "ERROR: No matching distribution found for x"


def test_an_adapter_brings_its_package_unless_the_folder_names_another_release(tmp_path: Path):
    (tmp_path / "environment.toml").write_text('[adapter]\nkind = "skyrl-gym"\n')
    assert [str(each) for each in env_packages.read_requirements(tmp_path)] == ["skyrl-gym==0.4.0"]
    (tmp_path / "requirements.txt").write_text("pyarrow\nskyrl_gym==0.3.0\n")
    named = [str(each) for each in env_packages.read_requirements(tmp_path)]
    assert named == ["pyarrow", "skyrl_gym==0.3.0"]
