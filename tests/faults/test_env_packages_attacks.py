"""Packages that attack: while they are installed (A21), and when an env process starts (A22).

Each attack runs as root and as an ordinary user, at every level of isolation. It leaves no canary:
where a level cannot hold code that runs, no code of the package runs.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import source, wheel

from tests.faults.test_env_attacks import (
    PLACES,
    SECRET,
    UID,
    WHO,
    interpreter,
    open_to_all,
    program,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

# Runs wherever it is put, and leaves word of where it could write and what it saw.
SPY = """
import os
def spy():
    for path in ("{canary}", "{own}/.ssh/id"):
        try:
            with open(path, "a") as file:
                file.write("{name} as uid %d\\n" % os.getuid())
        except OSError:
            pass
    try:
        text = open("{own}/.ssh/id").read() + os.environ.get("SERVER_SECRET", "")
    except OSError:
        text = os.environ.get("SERVER_SECRET", "")
    if "canary" in text:
        print("STOLEN " + text, flush=True)
spy()
"""

ENVIRONMENT = """
import json, random
from envs import Score, SingleTurnEnv, Task
import tiny_tasks

class Env(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "x", "y")]
    def score(self, task, completion):
        random.Random(1).random(), json.loads("{}")
        return Score(tiny_tasks.WORTH)

def load_environment():
    return Env()
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """A folder any user can reach: our package, the attack programs, pip, packages, a victim."""
    import pip

    with open_to_all() as folder:
        shutil.copytree(Path(pip.__file__).parent, folder / "pip" / "pip")
        (folder / "wheels").mkdir()
        for path in folder.rglob("*"):
            path.chmod(path.stat().st_mode | 0o044 | (0o011 if path.is_dir() else 0))
        yield folder


@pytest.fixture
def own(stage: Path, place: tuple[str, str, tuple[str, ...]]) -> Iterator[Path]:
    """What is worth stealing, of the user who installs; the canary would appear in it."""
    folder = stage / "own"
    (folder / ".ssh").mkdir(parents=True)
    (folder / ".ssh" / "id").write_text(SECRET)
    uid = UID if place[0] == "user" else 0
    for path in (folder, folder / ".ssh", folder / ".ssh" / "id"):
        os.chown(path, uid, uid)
        path.chmod(0o700 if path.is_dir() else 0o600)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=PLACES, ids=lambda p: "-".join((p[0], p[1], *p[2])))
def place(request: pytest.FixtureRequest) -> tuple[str, str, tuple[str, ...]]:
    if "unshare" in request.param[2] and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return request.param


class Attack:
    """One installation, and what it left."""

    def __init__(self, stage: Path, own: Path, place: tuple[str, str, tuple[str, ...]]) -> None:
        self.stage, self.own, self.place = stage, own, place
        self.canary = own / "canary"
        self.log = own / "pip.log"
        self.wheels = Path(tempfile.mkdtemp(dir=stage / "wheels"))
        self.wheels.chmod(0o755)

    def spy(self, name: str) -> str:
        return SPY.format(canary=self.canary, own=self.own, name=name)

    def run(self, *requirements: str, **order: Any) -> dict[str, Any]:
        target = self.own / "venv"
        target.mkdir()
        target.chmod(0o755)
        uid = UID if self.place[0] == "user" else 0
        os.chown(target, uid, uid)
        for path in self.wheels.iterdir():
            path.chmod(0o644)
        given = {
            "requirements": requirements,
            "target": str(target),
            "pip": str(self.stage / "pip"),
            "wheels": str(self.wheels),
            "log": str(self.log),
            "source_builds": False,
            "env": "",
            "plant": {},
            "refused": self.place[2],
            # Nothing else stands between root and its files here: the worst place there is.
            "sandbox": {"hidden": [str(self.own)], "allow_root": True},
        }
        done = subprocess.run(
            [
                *WHO[self.place[0]],
                interpreter(),
                "-I",
                "-B",
                str(program(self.stage, "installer")),
                json.dumps(given | order),
            ],
            capture_output=True,
            text=True,
            cwd="/",
            env={
                "PATH": os.defpath,
                "HOME": str(self.own),
                "SERVER_SECRET": SECRET,
                "PYTHONPATH": str(self.wheels),
                "PYTHONSTARTUP": str(self.wheels / "x.py"),
            },
            timeout=220,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    def environment(self, **files: str) -> str:
        folder = Path(tempfile.mkdtemp(dir=self.stage))
        folder.chmod(0o755)
        for name, text in {"environment.py": ENVIRONMENT, **files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        return str(folder)

    def left_nothing(self) -> bool:
        said = self.log.read_text("utf-8", "replace") if self.log.exists() else ""
        untouched = (self.own / ".ssh" / "id").read_text() == SECRET
        return not self.canary.exists() and untouched and "STOLEN" not in said


@pytest.fixture
def attack(stage: Path, own: Path, place: tuple[str, str, tuple[str, ...]]) -> Attack:
    return Attack(stage, own, place)


def test_a21_a_source_distribution_is_not_built_without_the_owners_consent(attack: Attack) -> None:
    source(attack.wheels, "evil", "1.0", attack.spy("setup"))
    said = attack.run("evil==1.0")
    assert said["problem"]["code"] == "ENV_DEPS"
    assert "allow_source_builds" in said["problem"]["hint"]
    assert attack.left_nothing()


@pytest.mark.parametrize("kind", ["source", "wheel"])
def test_a21_a_wheel_that_asks_for_an_address_is_refused(attack: Attack, kind: str) -> None:
    hidden = attack.wheels / "elsewhere"
    hidden.mkdir(mode=0o755)
    if kind == "source":
        path = source(hidden, "evil", "1.0", attack.spy("setup"))
    else:
        path = wheel(hidden, "evil", "1.0")
    path.chmod(0o644)
    wheel(attack.wheels, "carrier", "1.0", requires=[f"evil @ file://{path}"])
    said = attack.run("carrier==1.0")
    assert said["problem"]["code"] == "ENV_DEPS"
    assert attack.left_nothing()


def test_a21_a_source_distribution_that_the_owner_agreed_to_is_built_in_the_box(
    attack: Attack,
) -> None:
    source(attack.wheels, "evil", "1.0", attack.spy("setup"))
    said = attack.run("evil==1.0", source_builds=True)
    assert said["problem"] is None, said
    # Where files are open to user code, and said to be, they are open to what builds a package.
    assert attack.left_nothing() or any("can be reached" in gap for gap in said["gaps"])


TRAVERSALS = ["../../../../canary", "../../../../../canary", "/{own}/canary"]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_a21_a_wheel_writes_nowhere_but_into_its_environment(attack: Attack, path: str) -> None:
    name = path.replace("/{own}", str(attack.own))
    wheel(attack.wheels, "carrier", "1.0", files={name: "x"})
    said = attack.run("carrier==1.0")
    assert said["problem"] is None or said["problem"]["code"] == "ENV_DEPS"
    assert attack.left_nothing()


def test_a21_a_wheel_that_replaces_the_interpreter_is_started_by_nobody(attack: Attack) -> None:
    script = f"#!/bin/sh\ntouch {attack.canary}\n"
    files = {"carrier-1.0.data/scripts/python": script, "tiny_tasks.py": "WORTH = 0.5\n"}
    wheel(attack.wheels, "carrier", "1.0", files=files)
    said = attack.run("carrier==1.0", env=attack.environment())
    assert said["start"] is None and said["imported"] == 0.5
    assert attack.left_nothing()


def test_a22_a_path_file_is_refused_with_the_name_of_its_package(attack: Attack) -> None:
    line = f"import os; exec({attack.spy('pth')!r})\n"
    wheel(attack.wheels, "carrier", "1.0", files={"carrier_init.pth": line})
    said = attack.run("carrier==1.0")
    assert said["problem"]["code"] == "ENV_DEPS"
    assert "carrier 1.0 (carrier_init.pth)" in said["problem"]["message"]
    assert attack.left_nothing()


def test_a22_a_path_file_that_came_later_never_runs(attack: Attack) -> None:
    wheel(attack.wheels, "tiny_tasks", "1.0", "WORTH = 0.5\n")
    line = f"import os; exec({attack.spy('pth')!r})\n"
    said = attack.run("tiny_tasks", env=attack.environment(), plant={"late.pth": line})
    assert said["problem"] is None and said["start"]["code"] == "ENV_DEPS"
    assert "late.pth" in said["start"]["message"]
    assert attack.left_nothing()


def test_a22_a_path_file_that_needs_not_run_does_not(attack: Attack) -> None:
    wheel(attack.wheels, "tiny_tasks", "1.0", "WORTH = 0.5\n")
    plant = {"distutils-precedence.pth": f"import os; exec({attack.spy('pth')!r})\n"}
    said = attack.run("tiny_tasks", env=attack.environment(), plant=plant)
    assert said["imported"] == 0.5
    assert attack.left_nothing()


@pytest.mark.parametrize("where", ["packages", "source"])
def test_a22_modules_that_steer_an_interpreter_change_nothing(attack: Attack, where: str) -> None:
    names = (
        "sitecustomize.py",
        "usercustomize.py",
        "json/__init__.py",
        "random.py",
        "os.py",
        "encodings/__init__.py",
        "envs/__init__.py",
        "subprocess.py",
    )
    files = {name: attack.spy(name) for name in names}
    wheel(attack.wheels, "tiny_tasks", "1.0", "WORTH = 0.5\n")
    for name, text in files.items():  # PYTHONPATH of the server leads here
        (attack.wheels / name).parent.mkdir(exist_ok=True)
        (attack.wheels / name).write_text(text)
    plant, source_files = (files, {}) if where == "packages" else ({}, files)
    said = attack.run("tiny_tasks", env=attack.environment(**source_files), plant=plant)
    assert said["start"] is None and said["imported"] == 0.5
    assert attack.left_nothing()


def test_a22_a_compiled_file_that_came_along_is_made_again_from_its_source(attack: Attack) -> None:
    import importlib._bootstrap_external as compiled

    version = subprocess.run(
        [interpreter(), "-c", "import sys; print(sys.implementation.cache_tag)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if version != sys.implementation.cache_tag:
        pytest.skip("another version of Python installs here")
    lie = compile("WORTH = 9.0", "tiny_tasks.py", "exec")
    data = compiled._code_to_hash_pyc(lie, b"\0" * 8, checked=False)
    files = {f"__pycache__/tiny_tasks.{version}.pyc": data.decode("latin-1")}
    path = wheel(attack.wheels, "tiny_tasks", "1.0", "WORTH = 0.5\n")
    import zipfile

    with zipfile.ZipFile(path, "a") as archive:
        for name, text in files.items():
            archive.writestr(name, text.encode("latin-1"))
    said = attack.run("tiny_tasks", env=attack.environment())
    assert said["imported"] == 0.5
    assert stat.S_ISDIR(os.stat(attack.own / "venv").st_mode)
