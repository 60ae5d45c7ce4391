"""The packages an environment names in requirements.txt: are they here, and a place of their own.

With `install` a virtual environment is built once per content of requirements.txt, in the home's
cache, by a process of its own: a long installation outlives the call that started it. pip itself
runs in the box that user code runs in (envs/host/installer.py).
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from engine.core.errors import UserError
from engine.core.files import is_locked, read_tail, write_json
from engine.home.run_dir import Home
from engine.install import pip_index
from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.pipe import Fault, Pipe
from envs.isolation.packages import Order, packages_of
from envs.isolation.sandbox import Reach, Sandbox

FILE = "requirements.txt"
BUILT = "built.json"
POLL_S = 0.05
BUILD_S = 3_600.0  # that one installation may take
LIMITS = Limits(memory_mb=8192, processes=256, file_mb=8192, open_files=1024)


@dataclass(frozen=True)
class Venv:
    """Where the packages of one requirements.txt are, or will be."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def outcome(self) -> Path:
        """Written last: {"ok": bool, "error": str, "hint": str, "isolation": str}."""
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
    requirements = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        try:
            if line.startswith("-"):
                raise InvalidRequirement("options are not read here")
            requirement = Requirement(line)
            if requirement.url:
                raise InvalidRequirement("addresses and paths are not installed from")
        except InvalidRequirement as error:
            raise UserError(
                "ENV_INVALID",
                f"{FILE}:{number}: {line[:80]!r} names no package: {str(error).splitlines()[0]}",
                hint="Write one package per line, as in reasoning-gym==0.1.25.",
            ) from error
        if requirement.marker is None or requirement.marker.evaluate():
            requirements.append(requirement)
    return requirements


def missing(requirements: list[Requirement]) -> list[str]:
    """Those that this interpreter does not have in the version asked for."""
    absent = []
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            absent.append(f"{requirement} (here is {version})")
    return absent


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
            [sys.executable, "-P", "-m", "engine.install.env_packages", str(place.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
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
    error, hint = _error_of(place)
    raise UserError(
        "ENV_DEPS",
        f"the packages could not be installed: {error}",
        hint=f"{hint or f'Correct {FILE}.'} pip's whole output is in {place.log}.",
    )


def build(folder: Path) -> None:
    """Runs in a process of its own: makes the environment in `folder` and says how it ended."""
    place = Venv(folder)
    home = Home(folder.parents[2])
    with open(place.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits, then finds the work done
        if place.is_ready():
            return
        requirements = (folder / FILE).read_text().splitlines()
        _empty(folder)
        outcome: dict[str, object] = {"ok": False, "error": "", "hint": "", "isolation": ""}
        try:
            outcome["isolation"] = _install_in_box(home, place, requirements)
            outcome["ok"] = True
        except (EnvProblem, Fault, UserError) as problem:
            lines = (str(problem), _pip_error(place.log))
            outcome["error"] = ": ".join(filter(None, lines))
            outcome["hint"] = getattr(problem, "hint", "")
        write_json(place.outcome, outcome)


def _install_in_box(home: Home, place: Venv, requirements: list[str]) -> str:
    """Has pip install into the empty folder of `place`; what held it, in words.

    Raises EnvProblem, Fault, UserError.
    """
    config = home.user_config()
    pip = _own_pip()
    index = pip_index.read(pip)
    order = Order(
        tuple(requirements),
        str(place.folder),
        str(pip),
        index.variables,
        source_builds=config.allow_source_builds,
    )
    limits = replace(LIMITS, network=bool(index.ports))
    reach = Reach((str(pip), *index.paths), (str(place.folder),), index.ports)
    sandbox = Sandbox(config.sandbox, config.allow_root, (str(home.root),))
    here = packages_of(sys.executable)
    with tempfile.TemporaryDirectory() as nothing:
        pipe = Pipe(Path(nothing), here, limits, {}, place.log, sandbox, order, reach)
        try:
            held, _ = pipe.greet(BUILD_S)
        finally:
            pipe.close()  # every process of it has ended
            _settle(place.folder)
    return str(held)


def _own_pip() -> Path:
    """The folder with this interpreter's pip, or the wheel that comes with Python.

    Raises UserError ENV_DEPS where there is neither.
    """
    spec = importlib.util.find_spec("pip")
    if spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    with contextlib.suppress(ImportError):
        import ensurepip  # noqa: PLC0415 - Debian leaves it out of Python

        bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return bundled[-1]
    raise UserError(
        "ENV_DEPS",
        f"{sys.executable} has no pip, which installs packages",
        hint="Install pip for it, or start the server with a Python that has ensurepip.",
    )


def _empty(folder: Path) -> None:
    """Nothing of an earlier attempt stays, so nothing of it can run."""
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)  # whatever the umask: the env process may run under another uid


def _settle(folder: Path) -> None:
    """What was installed belongs to this user again, readable by all; links that lead out go."""
    own = (os.geteuid(), os.getegid())
    base = Path(sys.base_prefix).resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                real = path.resolve()
                if not real.is_relative_to(folder.resolve()) and not real.is_relative_to(base):
                    path.unlink()
                else:
                    os.lchown(path, *own)
                continue
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                path.unlink()
                continue
            os.chown(path, *own, follow_symlinks=False)
            runs = stat.S_ISDIR(mode) or mode & 0o100
            path.chmod(0o755 if runs else 0o644)
    os.chown(folder, *own)
    folder.chmod(0o755)


def _pip_error(log: Path) -> str:
    """What pip said was wrong; "" where it said nothing."""
    with contextlib.suppress(OSError):
        lines = read_tail(log, 20_000).splitlines()
        return " ".join(line for line in lines if line.startswith("ERROR"))[:600]
    return ""


def _error_of(place: Venv) -> tuple[str, str]:
    """Why it was not built, and what to do about it."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        outcome = json.loads(place.outcome.read_text())
        return outcome["error"], outcome.get("hint", "")
    return _pip_error(place.log) or "the installation was ended from outside", "Push again."


if __name__ == "__main__":
    build(Path(sys.argv[1]))
