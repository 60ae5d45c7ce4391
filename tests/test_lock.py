"""requirements.lock holds a version and hashes for everything that pyproject.toml asks for."""

import hashlib
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# Its wheel differs by index and accelerator; see the Makefile.
LEFT_OUT = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py$).*")


@dataclass(frozen=True)
class Pin:
    """One entry of the lock."""

    requirement: Requirement
    hashes: int

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        (specifier,) = self.requirement.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, str(self.requirement)
        return specifier.version

    def is_for(self, python: str) -> bool:
        marker = self.requirement.marker
        here = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
        }
        return marker is None or marker.evaluate(here)


@cache
def pins() -> list[Pin]:
    found = []
    joined = LOCK.read_text("utf-8").replace("\\\n", " ")
    for line in joined.splitlines():
        text = line.partition("#")[0].strip()
        if text:
            said = text.split(" --hash=")[0].strip()
            found.append(Pin(Requirement(said), len(HASH.findall(text))))
    return found


def wanted() -> list[Requirement]:
    """What `make setup` installs, and what the project itself is built with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    texts = [
        *project["project"]["dependencies"],
        *extras["train"],
        *extras["dev"],
        *project["build-system"]["requires"],
    ]
    needed = [Requirement(text) for text in texts]
    own = [each for each in needed if each.name == project["project"]["name"]]  # honesmith[gguf]
    of_own = [Requirement(text) for each in own for extra in each.extras for text in extras[extra]]
    return [each for each in needed if each not in own] + of_own


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_locked_within_its_bounds(python: str):
    locked = {pin.name: pin for pin in pins() if pin.is_for(python)}
    for requirement in wanted():
        name = canonicalize_name(requirement.name)
        if LEFT_OUT.fullmatch(name):
            continue
        assert name in locked, f"{name} is not in the lock for {python}: make lock"
        version = locked[name].version
        assert requirement.specifier.contains(version), f"{requirement}, locked {version}"


def test_nothing_stands_in_the_lock_without_a_hash():
    assert len(pins()) > 60
    assert [str(pin.requirement) for pin in pins() if not pin.hashes] == []


def test_no_package_has_two_versions_for_one_interpreter():
    for python in PYTHONS:
        names = [pin.name for pin in pins() if pin.is_for(python)]
        assert sorted(names) == sorted(set(names))


def test_what_depends_on_the_accelerator_is_left_out():
    assert [pin.name for pin in pins() if LEFT_OUT.fullmatch(pin.name)] == []


def test_the_lock_names_no_index_and_no_place():
    text = LOCK.read_text("utf-8")
    assert not re.search(r"://| @ |^ *-(?!-hash=)", text, re.MULTILINE)
    assert "make lock" in text.splitlines()[1]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("honest", [True, False])
def test_pip_refuses_a_file_that_is_not_what_the_lock_says(tmp_path: Path, honest: bool):
    """With the options of `make setup LOCKED=1`, on a wheel made here."""
    wheel = tmp_path / "tiny_rows-1.0-py3-none-any.whl"
    info = "tiny_rows-1.0.dist-info"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_rows.py", "ROWS = 44\n")
        said = "Metadata-Version: 2.1\nName: tiny-rows\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", said)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if honest else "0" * 64
    lock = tmp_path / "tiny.lock"
    lock.write_text(f"tiny-rows==1.0 \\\n    --hash=sha256:{digest}\n")
    recipe = (ROOT / "Makefile").read_text("utf-8")
    options = ["--require-hashes", "--no-deps"]
    assert " ".join(["$(PIP)", *options, "-r $(LOCK)"]) in recipe
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--isolated",
            "--no-index",
            "--find-links",
            str(tmp_path),
            "--target",
            str(tmp_path / "there"),
            *options,
            "-r",
            str(lock),
        ],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert (done.returncode == 0) is honest, done.stderr
    assert honest or "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize(("given", "locked"), [("", False), ("0", False), ("1", True)])
def test_only_a_setup_that_asks_for_the_lock_takes_it(tmp_path: Path, given: str, locked: bool):
    said = subprocess.run(
        ["make", "--dry-run", "setup", f"LOCKED={given}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=25,
        check=True,
    ).stdout
    assert ("--require-hashes" in said) is locked
