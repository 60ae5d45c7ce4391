"""The packages an environment names in requirements.txt: are they here, and a place of their own.

With `install` a virtual environment is built once per content of requirements.txt, in the home's
cache, by a process of its own: a long installation outlives the call that started it.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from engine.errors import UserError
from engine.files import is_locked, write_json
from engine.run_dir import Home

FILE = "requirements.txt"
BUILT = "built.json"
POLL_S = 0.05


@dataclass(frozen=True)
class Venv:
    """Where the packages of one requirements.txt are, or will be."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def outcome(self) -> Path:
        """Written last: {"ok": bool, "error": str}."""
        return self.folder / BUILT

    @property
    def lock(self) -> Path:
        """Held while it is being built."""
        return self.folder.with_suffix(".lock")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.outcome.read_text())["ok"] is True
        return False


def read_requirements(source: Path) -> list[Requirement]:
    """The packages named by the environment in `source`; [] where it names none.

    Raises UserError ENV_INVALID with the line that is no package name.
    """
    try:
        text = (source / FILE).read_text("utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "ENV_INVALID",
            f"{FILE} cannot be read: {error}",
            hint="Save it as UTF-8 text, one package per line.",
            field="path",
        ) from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        try:
            if line.startswith("-"):
                raise InvalidRequirement("options are not read here")
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise UserError(
                "ENV_INVALID",
                f"{FILE}:{number}: {line[:80]!r} names no package: {str(error).splitlines()[0]}",
                hint="Write one package per line, as in reasoning-gym==0.1.25.",
            ) from error
        if requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def missing(requirements: list[Requirement]) -> list[str]:
    """Those that this interpreter does not have in the version asked for."""
    found = []
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement} (here is {version})")
    return found


def venv_of(home: Home, requirements: list[Requirement]) -> Venv:
    """The place of these packages, for this interpreter; it need not exist yet."""
    named = sorted(str(requirement) for requirement in requirements)
    key = json.dumps([named, sys.version_info[:3], sys.base_prefix])
    return Venv(home.cache / "venvs" / hashlib.sha256(key.encode()).hexdigest()[:16])


def install(home: Home, requirements: list[Requirement], patience_s: float) -> Path:
    """The interpreter that has `requirements`; builds its environment if there is none.

    Raises UserError ENV_DEPS: when pip fails (with its words), or retryable when it is still at
    work after `patience_s` seconds; it goes on then, and the next push finds the result.
    """
    place = venv_of(home, requirements)
    if place.is_ready():
        return place.python
    place.folder.parent.mkdir(mode=0o700, exist_ok=True)
    place.folder.mkdir(mode=0o755, exist_ok=True)
    place.outcome.unlink(missing_ok=True)
    (place.folder / FILE).write_text("".join(f"{requirement}\n" for requirement in requirements))
    with open(place.log, "wb") as log:
        builder = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.env_packages", str(place.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=place.folder,
            start_new_session=True,
        )
    deadline = time.monotonic() + patience_s
    while not place.outcome.exists():
        if builder.poll() is not None and not place.outcome.exists() and not is_locked(place.lock):
            break
        if time.monotonic() > deadline:
            raise UserError(
                "ENV_DEPS",
                f"the packages are still being installed ({place.log})",
                hint="Push again in a minute; the installation goes on meanwhile.",
                retryable=True,
            )
        time.sleep(POLL_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        builder.wait(5)
    if place.is_ready():
        return place.python
    raise UserError(
        "ENV_DEPS",
        f"the packages could not be installed: {_error_of(place)}",
        hint=f"Correct {FILE}; pip's whole output is in {place.log}.",
    )


def build(folder: Path) -> None:
    """Runs in a process of its own: makes the environment in `folder` and says how it ended."""
    place = Venv(folder)
    os.umask(0o022)  # the env process may run under another uid
    with open(place.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits, then finds the work done
        if place.is_ready():
            return
        # Our own pip can install into another environment, which saves unpacking one there.
        own_pip = importlib.util.find_spec("pip") is not None
        venv.create(folder, with_pip=not own_pip, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(place.python)]
        if not own_pip:
            pip = [str(place.python), "-m", "pip"]
        options = ["--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [*pip, *options, "install", "--no-warn-script-location", "-r", str(folder / FILE)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONNOUSERSITE": "1"},
        )
        sys.stdout.write(done.stdout + done.stderr)
        error = "" if done.returncode == 0 else _pip_error(done.stderr)
        write_json(place.outcome, {"ok": done.returncode == 0, "error": error})


def _pip_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")]
    return " ".join(lines or text.splitlines()[-3:])[:600]


def _error_of(place: Venv) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(place.outcome.read_text())["error"]
    with contextlib.suppress(OSError):
        return " ".join(place.log.read_text("utf-8", "replace").splitlines()[-2:])[:600]
    return "the builder left no word"


if __name__ == "__main__":
    build(Path(sys.argv[1]))
