"""Installs an environment's packages inside the sandbox, with pip in this very process.

By default only wheels are installed and no program may be started, so no code of a package runs. If
the owner of the home has agreed, source distributions are built too, in the same sandbox. Standard
library only; pip comes as a folder or as a wheel.
"""

import compileall
import json
import os
import runpy
import shutil
import sys
import sysconfig
import traceback
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.config.problem import EnvProblem
from envs.isolation.packages import InstallOrder, path_files
from envs.json_types import Reply

WHEELS_ONLY = (
    "Packages are installed from wheels alone. Choose a release that has one for this machine, or "
    "let the owner of this home set allow_source_builds = true in config.toml: what the package "
    "runs to build itself then runs in the box of the environment."
)
# The audit events that Python raises before another program starts.
_STARTS = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
)
_SHOWN = 5  # how many packages a message names
_REASON_CHARS = 600  # how much of an unforeseen error the reply shows


def serve(replies: int, order: InstallOrder) -> None:
    """Install the packages of `order` and write one JSON line to the descriptor `replies`.

    The line is {"ready": ...}, or {"problem": ...} with whatever the installation raised. An env
    process sends such a line when it starts, so the client (`Pipe.greet`) can read both.
    """
    try:
        install(order)
        # The client expects an environment's description and ignores its values.
        reply: Reply = {"ready": {"kind": "sft", "scored": False, "tools": []}}
    except EnvProblem as problem:
        reply = {"problem": problem.to_dict()}
    except BaseException as error:  # noqa: BLE001 - pip may leave in any way, also by SystemExit
        traceback.print_exc()
        message = f"the packages could not be installed: {type(error).__name__}: {error}"
        reply = {"problem": EnvProblem("ENV_DEPS", message[:_REASON_CHARS]).to_dict()}
    sys.stdout.flush()
    os.write(replies, (json.dumps(reply) + "\n").encode())


def install(order: InstallOrder) -> None:
    """Make the virtual environment `order.target` and install the packages into it with pip.

    Raises EnvProblem ENV_DEPS if pip fails, if a source distribution would have to be built without
    the owner's consent, or if a package came from a direct address or needs a path file.
    """
    target = Path(order.target)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(target)
    folders = _enter_venv(target)
    temporary = target / ".tmp"
    temporary.mkdir()
    os.environ.update(TMPDIR=str(temporary), PIP_CONFIG_FILE=os.devnull)  # no settings of the user
    refused_commands: list[str] = []  # programs that pip tries to start and must not
    if not order.source_builds:
        _forbid_programs(refused_commands)
    status = _pip(order)
    shutil.rmtree(temporary, ignore_errors=True)
    _raise_for_failure(status, refused_commands, order.source_builds)
    refuse_unusable(folders)
    for folder in folders:  # pip was told not to compile
        _compile(folder)


def _raise_for_failure(
    status: int, refused_commands: Sequence[str], allows_source_builds: bool
) -> None:
    """Raise EnvProblem ENV_DEPS if pip failed, or tried to build a source distribution without
    consent.

    Args:
        status: pip's exit status.
        refused_commands: the programs that pip was not allowed to start.
        allows_source_builds: whether pip could build source distributions; if not, the hint says
            so.
    """
    # Only a build of a source distribution starts Python. pip tries other programs too, but works
    # without them.
    if any("python" in command for command in refused_commands):
        raise EnvProblem(
            "ENV_DEPS",
            "a package is a source distribution, which was not built",
            hint=WHEELS_ONLY,
        )
    if status != 0:
        hint = "" if allows_source_builds else WHEELS_ONLY
        raise EnvProblem("ENV_DEPS", "pip could not install them", hint=hint)


def refuse_unusable(folders: list[Path]) -> None:
    """Raise EnvProblem ENV_DEPS if packages came from a direct address or need a path file
    (`.pth`).

    `folders` are where packages were installed. The message names up to five packages.
    """
    # pip writes direct_url.json only for a package that did not come from an index.
    packages_from_address: list[str] = []
    for folder in folders:
        for path in folder.glob("*.dist-info/direct_url.json"):
            name_and_version = path.parent.name.removesuffix(".dist-info").replace("-", " ")
            packages_from_address.append(name_and_version)
    packages_from_address.sort()
    if packages_from_address:
        raise EnvProblem(
            "ENV_DEPS",
            "a requirement names an address in place of an index: "
            f"{', '.join(packages_from_address[:_SHOWN])}",
            hint="Name packages by name and version, and leave out those that ask for addresses.",
        )
    needed_files = path_files(map(str, folders))
    if needed_files:
        names = ", ".join(f"{owner} ({file})" for file, owner in needed_files[:_SHOWN])
        raise EnvProblem(
            "ENV_DEPS",
            f"these packages work through path files, which are never run: {names}",
            hint="Use a release that installs without one (no editable install, no namespace of "
            "the old kind), or leave the package out of requirements.txt.",
        )


def _enter_venv(target: Path) -> list[Path]:
    """Make this process look as if it ran in the virtual environment in `target`, because pip
    installs into the environment it runs in.

    Returns the folders into which pip will put packages: one, or two if the platform separates
    compiled packages.
    """
    scheme_variables = {"base": str(target), "platbase": str(target)}
    paths = [sysconfig.get_path(kind, "venv", scheme_variables) for kind in ("purelib", "platlib")]
    folders = list(dict.fromkeys(Path(folder) for folder in paths))
    sys.prefix = sys.exec_prefix = str(target)
    sys.executable = str(target / "bin" / "python")
    # sysconfig computed these from the old prefix when it was imported, and pip asks sysconfig.
    for name in ("_PREFIX", "_EXEC_PREFIX"):
        setattr(sysconfig, name, str(target))
    sysconfig._CONFIG_VARS = None  # type: ignore[attr-defined]
    # Newer versions of Python keep this flag beside the cached variables.
    if hasattr(sysconfig, "_CONFIG_VARS_INITIALIZED"):
        sysconfig._CONFIG_VARS_INITIALIZED = False  # type: ignore[attr-defined]
    sys.path += [str(folder) for folder in folders]
    return folders


def _forbid_programs(refused_commands: list[str]) -> None:
    """Prevent this process from starting any program, for good: an audit hook cannot be removed.

    Each attempt raises PermissionError and is appended to `refused_commands`. Code of a package
    could get around the hook, but none runs here: pip runs such code only in another program.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse the audit events that start a program; Python calls this for every event."""
        if event in _STARTS:
            refused_commands.append(str(arguments[:2]))
            raise PermissionError(f"{event} is refused while packages are installed")

    sys.addaudithook(hook)


def _pip(order: InstallOrder) -> int:
    """Run `pip install` for `order` in this process; return its exit status, 0 for success.

    pip is a folder or a wheel at `order.pip`, and reads its command line from sys.argv.
    """
    sys.argv = _pip_command(order)
    runner = Path(order.pip, "pip", "__pip-runner__.py")
    try:
        if runner.is_file():
            runpy.run_path(str(runner), run_name="__main__")
        else:  # `order.pip` is a wheel
            sys.path.insert(0, order.pip)
            runpy.run_module("pip", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        # sys.exit works like this: a number is the status, None means 0, anything else 1.
        if isinstance(ended.code, int):
            return ended.code
        return 0 if ended.code is None else 1
    return 0


def _pip_command(order: InstallOrder) -> list[str]:
    """Return the command line of pip for `order`: "pip", then its arguments."""
    command = ["pip", "install", "--no-compile", "--no-warn-script-location", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    if not order.source_builds:
        command += ["--only-binary", ":all:"]
    return [*command, "--", *order.requirements]


def _compile(folder: Path) -> None:
    """Delete all compiled files below `folder` and compile the sources again.

    Compiled files in a package are not trusted, because they may do something else than its
    sources.
    """
    for path in sorted(folder.rglob("__pycache__")):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob("*.pyc"):
        path.unlink()
    sys.pycache_prefix = None  # compiled files go beside their sources
    compileall.compile_dir(folder, quiet=2, workers=1)
