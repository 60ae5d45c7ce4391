"""The packages an environment names in requirements.txt: which are missing, and installing them.

`install` builds a virtual environment in the home's cache, once per content of requirements.txt. A
process of its own does that, so a long installation goes on after the call that started it. pip
itself runs in the sandbox that user code runs in (envs/host/installer.py).
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
POLL_S = 0.05  # seconds between two looks for the result
BUILD_S = 3_600.0  # seconds that one installation may take
# Of the sandbox that pip runs in.
LIMITS = Limits(memory_mb=8192, processes=256, file_mb=8192, open_files=1024)


@dataclass(frozen=True)
class Venv:
    """The virtual environment of one requirements.txt, which may not be built yet."""

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
        """The lock that is held while it is being built."""
        return self.folder.with_suffix(".lock")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def is_ready(self) -> bool:
        """Whether it was built completely."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.outcome.read_text())["ok"] is True
        return False


def read_requirements(source: Path) -> list[Requirement]:
    """The packages that the environment in `source` needs on this machine, by their markers.

    [] where it names none. Raises UserError ENV_INVALID where the file is no UTF-8 text, or with
    the line that names no package; options, addresses and paths are not allowed.
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
    """The requirements that this interpreter does not meet, with the version it has, if any."""
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
    """The virtual environment for these packages and this interpreter; it need not exist yet."""
    names = sorted(str(requirement) for requirement in requirements)
    key = json.dumps([names, sys.version_info[:3], sys.base_prefix])
    return Venv(home.cache / "venvs" / hashlib.sha256(key.encode()).hexdigest()[:16])


def install(home: Home, requirements: list[Requirement], patience_s: float) -> Path:
    """The interpreter that has `requirements`; builds its virtual environment if there is none.

    Waits up to `patience_s` seconds for it. Raises UserError ENV_DEPS: pip failed (with its
    message), or, retryable, it is still at work. It goes on then, and a later call finds the
    result.
    """
    venv = venv_of(home, requirements)
    if venv.is_ready():
        return venv.python
    venv.folder.parent.mkdir(mode=0o700, exist_ok=True)
    venv.folder.mkdir(mode=0o755, exist_ok=True)
    venv.outcome.unlink(missing_ok=True)
    (venv.folder / FILE).write_text("".join(f"{requirement}\n" for requirement in requirements))
    with open(venv.log, "wb") as log:
        builder = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.install.env_packages", str(venv.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + patience_s
    while not venv.outcome.exists():
        # Our builder ended without a result, and no other one is at work: it was killed.
        if builder.poll() is not None and not venv.outcome.exists() and not is_locked(venv.lock):
            break
        if time.monotonic() > deadline:
            raise UserError(
                "ENV_DEPS",
                f"the packages are still being installed ({venv.log})",
                hint="Push again in a minute; the installation goes on meanwhile.",
                retryable=True,
            )
        time.sleep(POLL_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        builder.wait(5)  # the result is there; this only collects its exit status
    if venv.is_ready():
        return venv.python
    error, hint = _failure_of(venv)
    raise UserError(
        "ENV_DEPS",
        f"the packages could not be installed: {error}",
        hint=f"{hint or f'Correct {FILE}.'} pip's whole output is in {venv.log}.",
    )


def build(folder: Path) -> None:
    """Build the virtual environment in `folder` and write how that ended; a process of its own."""
    venv = Venv(folder)
    home = Home(folder.parents[2])
    with open(venv.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits, then finds the work done
        if venv.is_ready():
            return
        requirements = (folder / FILE).read_text().splitlines()
        _remake(folder)
        outcome: dict[str, object] = {"ok": False, "error": "", "hint": "", "isolation": ""}
        try:
            outcome["isolation"] = _install_in_box(home, venv, requirements)
            outcome["ok"] = True
        except (EnvProblem, Fault, UserError) as problem:
            texts = (str(problem), _pip_error(venv.log))
            outcome["error"] = ": ".join(filter(None, texts))
            outcome["hint"] = getattr(problem, "hint", "")
        write_json(venv.outcome, outcome)


def _install_in_box(home: Home, venv: Venv, requirements: list[str]) -> str:
    """Have pip install into the empty folder of `venv`; returns what isolated it, in words.

    Raises EnvProblem, Fault or UserError.
    """
    config = home.user_config()
    pip = _pip_path()
    index = pip_index.read(pip)
    order = Order(
        tuple(requirements),
        str(venv.folder),
        str(pip),
        index.variables,
        source_builds=config.allow_source_builds,
    )
    limits = replace(LIMITS, network=bool(index.ports))
    reach = Reach((str(pip), *index.paths), (str(venv.folder),), index.ports)
    sandbox = Sandbox(config.sandbox, config.allow_root, (str(home.root),))
    interpreter = packages_of(sys.executable)
    with tempfile.TemporaryDirectory() as empty_folder:
        pipe = Pipe(Path(empty_folder), interpreter, limits, {}, venv.log, sandbox, order, reach)
        try:
            isolation, _ = pipe.greet(BUILD_S)
        finally:
            pipe.close()  # every process of it has ended
            _take_ownership(venv.folder)
    return str(isolation)


def _pip_path() -> Path:
    """The folder that holds this interpreter's pip, or the wheel of pip that comes with Python.

    Raises UserError ENV_DEPS where there is neither.
    """
    spec = importlib.util.find_spec("pip")
    if spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    with contextlib.suppress(ImportError):
        import ensurepip  # noqa: PLC0415 - Debian's Python may lack it

        bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return bundled[-1]
    raise UserError(
        "ENV_DEPS",
        f"{sys.executable} has no pip, which installs packages",
        hint="Install pip for it, or start the server with a Python that has ensurepip.",
    )


def _remake(folder: Path) -> None:
    """Delete a folder and make it anew, so that nothing of an earlier attempt is left in it."""
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)  # whatever the umask: the env process may run under another uid


def _take_ownership(folder: Path) -> None:
    """Give what was installed to this user, readable by all.

    Links that lead elsewhere than into the folder or this Python, and special files, are removed.
    """
    user_and_group = (os.geteuid(), os.getegid())
    base = Path(sys.base_prefix).resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                target = path.resolve()
                if not target.is_relative_to(folder.resolve()) and not target.is_relative_to(base):
                    path.unlink()
                else:
                    os.lchown(path, *user_and_group)
                continue
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                path.unlink()
                continue
            os.chown(path, *user_and_group, follow_symlinks=False)
            executable = stat.S_ISDIR(mode) or mode & 0o100
            path.chmod(0o755 if executable else 0o644)
    os.chown(folder, *user_and_group)
    folder.chmod(0o755)


def _pip_error(log: Path) -> str:
    """The ERROR lines of pip's log, at most 600 characters; "" where there are none."""
    with contextlib.suppress(OSError):
        lines = read_tail(log, 20_000).splitlines()
        return " ".join(line for line in lines if line.startswith("ERROR"))[:600]
    return ""


def _failure_of(venv: Venv) -> tuple[str, str]:
    """Why a virtual environment was not built, and the advice ("" where there is none)."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        outcome = json.loads(venv.outcome.read_text())
        return outcome["error"], outcome.get("hint", "")
    return _pip_error(venv.log) or "the installation was ended from outside", "Push again."


if __name__ == "__main__":
    build(Path(sys.argv[1]))
