"""The packages that an environment names in requirements.txt: which are missing, and installing
them.

`install` builds a virtual environment in the home's cache, once per content of requirements.txt. A
separate process does that, so that a long installation continues after the call that started it.
pip itself runs in the same kind of sandbox as user code (envs/host/installer.py).
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
from packaging.utils import canonicalize_name

from engine.core.errors import UserError
from engine.core.files import is_locked, read_tail, write_json
from engine.home.run_dir import Home
from engine.machine.install import pip_index
from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.pipe import Fault, Pipe
from envs.isolation.packages import InstallOrder, packages_of
from envs.isolation.sandbox import Reach, Sandbox

FILE = "requirements.txt"
BUILT = "built.json"
POLL_S = 0.05  # seconds between two checks for the result
BUILD_S = 3_600.0  # time limit of one installation in seconds
# The resources that pip may use in its sandbox.
LIMITS = Limits(memory_mb=8192, processes=256, file_mb=8192, open_files=1024)


@dataclass(frozen=True)
class Venv:
    """The virtual environment for one requirements.txt; it may not be built yet."""

    folder: Path

    @property
    def python(self) -> Path:
        """The path of its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def outcome(self) -> Path:
        """The result file, written last: {"ok": bool, "error": str, "hint": str, "isolation":
        str}."""
        return self.folder / BUILT

    @property
    def lock(self) -> Path:
        """The lock file that its builder holds."""
        return self.folder.with_suffix(".lock")

    @property
    def log(self) -> Path:
        """The file with the output of its builder, including pip's."""
        return self.folder.with_suffix(".log")

    def is_ready(self) -> bool:
        """Return whether the virtual environment was built completely."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self.outcome.read_text())["ok"] is True
        return False


def read_requirements(source: Path) -> list[Requirement]:
    """Return the packages that an environment in the folder `source` needs.

    These are the packages in its requirements.txt, and those that its adapter needs and the file
    does not name. Packages whose markers exclude this machine are left out.

    Raises UserError ENV_INVALID if the file is not UTF-8 text, or a line names no package (the
    message then has the line). Options, addresses and paths are not allowed.
    """
    try:
        text = (source / FILE).read_text("utf-8-sig")  # also with a byte order mark
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "ENV_INVALID",
            f"{FILE} cannot be read: {error}",
            hint="Save it as UTF-8 text, one package per line.",
            field="path",
        ) from error
    requirements = _requirements_in(text)
    named_packages = {canonicalize_name(requirement.name) for requirement in requirements}
    for line in _adapter_requirements(source):
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) not in named_packages:
            requirements.append(requirement)
    return requirements


def _requirements_in(text: str) -> list[Requirement]:
    """Return the packages in the text of a requirements.txt, without those whose markers exclude
    this machine.

    Raises UserError ENV_INVALID, with the line number, if a line names no package.
    """
    requirements: list[Requirement] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(" #")[0].strip()  # without a comment at its end
        if not line or line.startswith("#"):
            continue
        requirement = _requirement_on_line(line, number)
        if requirement.marker is None or requirement.marker.evaluate():
            requirements.append(requirement)
    return requirements


def _adapter_requirements(source: Path) -> tuple[str, ...]:
    """Return the requirements of an environment's adapter; () if it has no adapter.

    Also () if environment.toml cannot be read; whoever loads the environment will report that.
    """
    with contextlib.suppress(EnvProblem):
        adapter = read_settings(source).adapter
        return adapter.format.requirements if adapter else ()
    return ()


def _requirement_on_line(line: str, number: int) -> Requirement:
    """Return the package that line `number` of requirements.txt names. Raises UserError ENV_INVALID
    if the line names none."""
    try:
        return _parse_requirement(line)
    except InvalidRequirement as error:
        raise UserError(
            "ENV_INVALID",
            f"{FILE}:{number}: {line[:80]!r} names no package: {str(error).splitlines()[0]}",
            hint="Write one package per line, as in reasoning-gym==0.1.25.",
        ) from error


def _parse_requirement(line: str) -> Requirement:
    """Parse one line of requirements.txt.

    Raises InvalidRequirement if the line names no package, or is an option, an address or a path,
    which pip would accept but which are not allowed here.
    """
    if line.startswith("-"):
        raise InvalidRequirement("options are not read here")
    requirement = Requirement(line)
    if requirement.url:
        raise InvalidRequirement("addresses and paths are not installed from")
    return requirement


def missing(requirements: list[Requirement]) -> list[str]:
    """Return those of the requirements that the interpreter of this process does not meet.

    For example ["sympy", "numpy>=2 (here is 1.26)"]: the first is not installed, the second is too
    old.
    """
    unmet = []
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(str(requirement))
            continue
        # An installed pre-release is accepted.
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement} (here is {version})")
    return unmet


def venv_of(home: Home, requirements: list[Requirement]) -> Venv:
    """Return the virtual environment for these packages and this interpreter; it may not exist yet.

    Its folder is named by a hash of the packages and the interpreter, so that environments with
    equal requirements share it.
    """
    names = sorted(str(requirement) for requirement in requirements)
    key = json.dumps([names, sys.version_info[:3], sys.base_prefix])
    folder_name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Venv(home.cache / "venvs" / folder_name)


def install(home: Home, requirements: list[Requirement], patience_s: float) -> Path:
    """Return the interpreter of the virtual environment with `requirements`; build it if it is
    missing.

    Raises UserError ENV_DEPS if pip fails (with its message), or, marked as retryable, if the
    installation is not finished after `patience_s` seconds. It then continues, and a later call
    gets the result.
    """
    venv = venv_of(home, requirements)
    if venv.is_ready():
        return venv.python
    builder = _start_builder(venv, requirements)
    _wait_for_outcome(venv, builder, patience_s)
    with contextlib.suppress(subprocess.TimeoutExpired):
        builder.wait(timeout=5)  # the builder has its result; this only reaps the process
    if venv.is_ready():
        return venv.python
    error, hint = _failure_of(venv)
    raise UserError(
        "ENV_DEPS",
        f"the packages could not be installed: {error}",
        hint=f"{hint or f'Correct {FILE}.'} pip's whole output is in {venv.log}.",
    )


def _wait_for_outcome(venv: Venv, builder: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait until the outcome of an installation exists, or until its builder was killed.

    Raises UserError ENV_DEPS, marked as retryable, if neither happens within `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while not venv.outcome.exists():
        # If our builder ended without a result and no other one works, it was killed. The result is
        # checked again, because the builder may have written it just before it ended.
        if builder.poll() is not None and not venv.outcome.exists() and not is_locked(venv.lock):
            return
        if time.monotonic() > deadline:
            raise UserError(
                "ENV_DEPS",
                f"the packages are still being installed ({venv.log})",
                hint="Push again in a minute; the installation goes on meanwhile.",
                retryable=True,
            )
        time.sleep(POLL_S)


def _start_builder(venv: Venv, requirements: list[Requirement]) -> subprocess.Popen[bytes]:
    """Start a process that builds the virtual environment `venv` with the packages `requirements`
    (it runs `build`); the process outlives this one."""
    venv.folder.parent.mkdir(mode=0o700, exist_ok=True)
    venv.folder.mkdir(mode=0o755, exist_ok=True)
    venv.outcome.unlink(missing_ok=True)  # an earlier outcome would end the waiting at once
    (venv.folder / FILE).write_text("".join(f"{requirement}\n" for requirement in requirements))
    with open(venv.log, "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.machine.install.env_packages", str(venv.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )


def build(folder: Path) -> None:
    """Build the virtual environment in `folder` and write the outcome, unless another process has
    just built it.

    This is the work of the process that `_start_builder` starts.
    """
    venv = Venv(folder)
    home = Home(folder.parents[2])  # `venv_of` puts it at home/cache/venvs/<hash>
    with open(venv.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits, then finds the work done
        if venv.is_ready():
            return
        requirements = (folder / FILE).read_text().splitlines()
        _recreate(folder)
        write_json(venv.outcome, _outcome_of_install(home, venv, requirements))


def _outcome_of_install(home: Home, venv: Venv, requirements: list[str]) -> dict[str, object]:
    """Install `requirements` into the empty folder of `venv`; return the outcome as JSON.

    The outcome says whether it worked ("ok"), why not ("error", "hint"), and the "isolation" of
    pip.
    """
    outcome: dict[str, object] = {"ok": False, "error": "", "hint": "", "isolation": ""}
    try:
        outcome["isolation"] = _install_in_sandbox(home, venv, requirements)
        outcome["ok"] = True
    # EnvProblem: the sandbox does not start; Fault: pip failed or took too long in it;
    # UserError: there is no pip, or the config of the home is wrong.
    except (EnvProblem, Fault, UserError) as problem:
        texts = (str(problem), _pip_error(venv.log))
        outcome["error"] = ": ".join(text for text in texts if text)
        outcome["hint"] = getattr(problem, "hint", "")  # a Fault has none
    return outcome


def _install_in_sandbox(home: Home, venv: Venv, requirements: list[str]) -> str:
    """Let pip install `requirements` into the empty folder of `venv`, in a sandbox.

    Returns the isolation of pip in words. Raises EnvProblem or UserError if pip or its sandbox
    cannot start, Fault if the installation fails or takes too long.
    """
    # The sandbox asks for an environment's folder; pip needs none, so it gets an empty one.
    with tempfile.TemporaryDirectory() as empty_folder:
        pipe = _pipe_to_pip(home, venv, requirements, Path(empty_folder))
        try:
            # The process sends its greeting only after pip has finished.
            isolation, _ = pipe.greet(seconds=BUILD_S)
        finally:
            pipe.close()  # ends every process of the sandbox, so nobody changes the folder now
            _take_ownership(venv.folder)
    return str(isolation)


def _pipe_to_pip(home: Home, venv: Venv, requirements: list[str], empty_folder: Path) -> Pipe:
    """Start a sandboxed process that installs `requirements` into the folder of `venv` with pip.

    The process may read pip and local indexes, write to that folder, and connect to the ports of
    indexes. `empty_folder` is passed as the environment's folder, because pip needs no environment.
    """
    config = home.user_config()
    pip = _pip_path()
    index = pip_index.read(pip)
    order = InstallOrder(
        requirements=tuple(requirements),
        target=str(venv.folder),
        pip=str(pip),
        variables=index.variables,
        source_builds=config.allow_source_builds,
    )
    reach = Reach(
        readable=(str(pip), *index.paths), writable=(str(venv.folder),), ports=index.ports
    )
    return Pipe(
        source=empty_folder,
        packages=packages_of(sys.executable),
        limits=replace(LIMITS, network=bool(index.ports)),
        secrets={},
        log=venv.log,
        sandbox=Sandbox(config.sandbox, config.allow_root, hidden=(str(home.root),)),
        order=order,
        reach=reach,
    )


def _pip_path() -> Path:
    """Return the folder that holds this interpreter's package pip, or the wheel of pip bundled with
    Python.

    Raises UserError ENV_DEPS if there is neither.
    """
    spec = importlib.util.find_spec("pip")
    if spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    with contextlib.suppress(ImportError):
        import ensurepip  # noqa: PLC0415 - Debian's Python may lack it

        bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
        if bundled:  # Python bundles exactly one wheel
            return bundled[-1]
    raise UserError(
        "ENV_DEPS",
        f"{sys.executable} has no pip, which installs packages",
        hint="Install pip for it, or start the server with a Python that has ensurepip.",
    )


def _recreate(folder: Path) -> None:
    """Delete `folder` and make it again, so that nothing of an earlier attempt is left in it."""
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)  # whatever the umask: the env process may run under another uid


def _take_ownership(folder: Path) -> None:
    """Make this user the owner of everything in `folder`, and let all users read it.

    Special files are removed, and so are links that lead neither into the folder nor to the files
    of this Python.
    """
    allowed_targets = (folder.resolve(), Path(sys.base_prefix).resolve())
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _take_ownership_of_entry(Path(parent, name), allowed_targets)
    os.chown(folder, os.geteuid(), os.getegid())
    folder.chmod(0o755)


def _take_ownership_of_entry(path: Path, allowed_targets: tuple[Path, ...]) -> None:
    """Make this user the owner of a file, folder or link, and let all users read it.

    Special files are removed, and so are links that lead into none of the folders
    `allowed_targets`.
    """
    uid, gid = os.geteuid(), os.getegid()
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = path.resolve()
        if any(target.is_relative_to(allowed) for allowed in allowed_targets):
            os.lchown(path, uid, gid)
        else:
            path.unlink()
    elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        os.chown(path, uid, gid, follow_symlinks=False)
        is_executable = stat.S_ISDIR(mode) or mode & 0o100
        path.chmod(0o755 if is_executable else 0o644)
    else:  # a socket, a pipe or a device
        path.unlink()


def _pip_error(log: Path) -> str:
    """Return the ERROR lines at the end of pip's log, at most 600 characters; "" if there are
    none."""
    with contextlib.suppress(OSError):
        lines = read_tail(log, max_bytes=20_000).splitlines()
        return " ".join(line for line in lines if line.startswith("ERROR"))[:600]
    return ""


def _failure_of(venv: Venv) -> tuple[str, str]:
    """Return why a virtual environment was not built, as (error, hint); the hint may be "".

    Both come from the outcome that the builder wrote. If it wrote none, the error is taken from the
    end of pip's log, and the hint is to push again.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        outcome = json.loads(venv.outcome.read_text())
        return outcome["error"], outcome.get("hint", "")
    return _pip_error(venv.log) or "the installation was ended from outside", "Push again."


if __name__ == "__main__":
    build(Path(sys.argv[1]))
