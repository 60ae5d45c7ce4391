"""The packages of user code: added to `sys.path` after the process is confined, never before.

An interpreter that finds its packages by itself runs code from them while it starts: lines of
`.pth` files, `sitecustomize`, `usercustomize`. So an env process starts on the server's own
interpreter without `site`, and the packages are added once the sandbox is closed. Lines of `.pth`
files are not read at all. Standard library only.
"""

import builtins
import os
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem

# Path files (`.pth`) whose package works without them too.
_NOT_NEEDED = ("distutils-precedence.pth", "_virtualenv.pth", "a1_coverage.pth", "pytest-cov.pth")
_SHOWN = 3  # path files named in an error message


@dataclass(frozen=True)
class Packages:
    """Where the packages of an environment are.

    Args:
        python: the value of `sys.executable` for user code.
        prefix: the value of `sys.prefix` for user code.
        folders: the folders to add to `sys.path`, behind the standard library.
        installed: whether they were installed for this environment alone, so that its author chose
            them.
    """

    python: str
    prefix: str
    folders: tuple[str, ...]
    installed: bool = False


@dataclass(frozen=True)
class InstallOrder:
    """Which packages to install, and where.

    Args:
        requirements: one requirement each, as in requirements.txt.
        target: an empty folder, which becomes a virtual environment.
        pip: the folder that holds the package pip, or a wheel of pip.
        variables: environment variables that tell pip about indexes, proxies and certificates; the
            process gets no others.
        source_builds: whether source distributions may be built.
    """

    requirements: tuple[str, ...]
    target: str
    pip: str
    variables: dict[str, str]
    source_builds: bool = False


def packages_of(python: str) -> Packages:
    """Return where the packages are that the interpreter `python` would import, without running it.

    `python` is the server's own interpreter, or that of a virtual environment made with it.

    Raises:
        EnvProblem: ENV_IMPORT if there is no such program, ENV_DEPS if its virtual environment has
            no packages for this version of Python.
    """
    if _same_path(python, sys.executable):
        return Packages(sys.executable, sys.prefix, _existing_folders(site.getsitepackages()))
    import sysconfig  # noqa: PLC0415 - every env process imports this file, and few need it

    prefix = Path(python).parent.parent
    variables = {"base": str(prefix), "platbase": str(prefix)}
    folders = [sysconfig.get_path(kind, "venv", variables) for kind in ("purelib", "platlib")]
    existing = _existing_folders(folders)
    if not existing:
        raise _no_packages(python, prefix)
    return Packages(python, str(prefix), existing, installed=True)


def _no_packages(python: str, prefix: Path) -> EnvProblem:
    """Return the problem of a virtual environment in `prefix` that has no packages, or whose
    interpreter `python` is missing."""
    hint = "Push the environment again, its packages installed."
    if not os.access(python, os.X_OK):
        message = f"the interpreter {python} does not start: there is no such program"
        return EnvProblem("ENV_IMPORT", message, hint)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    message = f"{prefix} holds no packages for Python {version}, on which this server runs"
    return EnvProblem("ENV_DEPS", message, hint)


def make_importable(packages: Packages) -> None:
    """Make an environment's packages importable. Call this only once this process is confined,
    because an import runs their code.

    Their folders are added at the end of `sys.path`. User code also gets the names that the module
    `site` would have defined, such as `exit` and `help`.

    Raises:
        EnvProblem: ENV_DEPS if packages installed for the environment need a path file (`.pth`),
            which would run code or add folders when Python starts.
    """
    # The server's own packages are known to work without their path files.
    needed_files = path_files(packages.folders) if packages.installed else []
    if needed_files:
        file_names = "; ".join(f"{owner} ({file})" for file, owner in needed_files[:_SHOWN])
        raise EnvProblem(
            "ENV_DEPS",
            f"these packages work through path files, which are never run: {file_names}",
            hint="Use a release that installs without one (no editable install, no namespace of "
            "the old kind), or leave the package out of requirements.txt.",
        )
    sys.path += [folder for folder in packages.folders if folder not in sys.path]
    sys.executable = packages.python
    sys.prefix = sys.exec_prefix = packages.prefix
    if not hasattr(builtins, "exit"):  # Python was started without the module `site`
        site.setquit()
        site.setcopyright()
        site.sethelper()


def path_files(folders: Iterable[str]) -> list[tuple[str, str]]:
    """Return the path files (`.pth`) in `folders` that a package may need.

    Returns sorted pairs (file name, package that installed it), e.g. ("x.pth", "x 1.0"). Files in
    `_NOT_NEEDED` are left out: their packages work without them.
    """
    files = []
    real_folders = dict.fromkeys(os.path.realpath(folder) for folder in folders)  # each once
    for folder in real_folders:
        names = {entry.name for entry in os.scandir(folder) if entry.name.endswith(".pth")}
        needed_names = names - set(_NOT_NEEDED)
        files += [(name, owner_of(Path(folder), name)) for name in needed_names]
    return sorted(files)


def owner_of(folder: Path, file: str) -> str:
    """Return the package that installed `file` into `folder`, e.g. "numpy 2.1".

    The installed packages' own RECORD files say so. Returns "a package without a record" if none of
    them lists the file.
    """
    import csv  # noqa: PLC0415 - only needed when an environment is refused

    for record in sorted(folder.glob("*.dist-info/RECORD")):
        with open(record, encoding="utf-8", errors="replace", newline="") as lines:
            # Each line begins with the path of a file that the package has installed.
            lists_file = any(row and row[0] == file for row in csv.reader(lines))
            if lists_file:
                return record.parent.name.removesuffix(".dist-info").replace("-", " ")
    return "a package without a record"


def add_source(folder: Path) -> None:
    """Add `folder` (the environment's) to `sys.path`, behind the standard library and before the
    folders of packages, so that the environment's own modules win over packages of the same name.

    Does nothing if the folder is there already.
    """
    if str(folder) in sys.path:
        return
    index = 0
    while index < len(sys.path) and not _holds_packages(sys.path[index]):
        index += 1
    sys.path.insert(index, str(folder))


def folders_on_path() -> list[str]:
    """Return the folders on `sys.path` of this process that hold packages (site-packages)."""
    return [path for path in sys.path if _holds_packages(path)]


def _holds_packages(path: str) -> bool:
    """Whether a folder is called site-packages, or dist-packages as on Debian."""
    return os.path.basename(path).endswith("-packages")


def _existing_folders(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the folders that exist, each once, in the order given."""
    return tuple(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def _same_path(left: str, right: str) -> bool:
    """Whether two paths of interpreters are the same. Links are not followed, because a virtual
    environment's interpreter is a link to the one it was made with."""
    return os.path.abspath(left) == os.path.abspath(right)
