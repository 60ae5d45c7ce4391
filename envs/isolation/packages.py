"""The packages user code may import: put on the path after it is confined, never before.

An interpreter that finds its packages by itself runs code from them while it starts: lines of
`.pth` files, `sitecustomize`, `usercustomize`. So an env process starts on the server's own
interpreter without `site`, and the folders are added to `sys.path` once nothing can be reached any
more. Lines of `.pth` files are not read at all. Standard library only.
"""

import builtins
import os
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem

# Path files whose package works as well without them.
_NOT_NEEDED = ("distutils-precedence.pth", "_virtualenv.pth", "a1_coverage.pth", "pytest-cov.pth")
_SHOWN = 3


@dataclass(frozen=True)
class Packages:
    """Where the packages of an environment are.

    Args:
        python: what `sys.executable` says to user code.
        prefix: what `sys.prefix` says.
        folders: what goes onto `sys.path` behind the standard library.
        installed: they were installed for this environment alone, so its author chose them.
    """

    python: str
    prefix: str
    folders: tuple[str, ...]
    installed: bool = False


@dataclass(frozen=True)
class Order:
    """One installation.

    Args:
        requirements: as in requirements.txt, one each.
        target: an empty folder, which becomes a virtual environment.
        pip: the folder that holds the package pip, or a wheel of it.
        variables: what pip is told of indexes, proxies and certificates; they reach the process
            as its variables and nothing else.
        source_builds: whether source distributions may be built.
    """

    requirements: tuple[str, ...]
    target: str
    pip: str
    variables: dict[str, str]
    source_builds: bool = False


def packages_of(python: str) -> Packages:
    """The packages that `python` would import, which is this interpreter or that of a virtual
    environment made for it. Nothing is run.

    Raises EnvProblem ENV_DEPS when it was made for another version of Python.
    """
    if _same(python, sys.executable):
        return Packages(sys.executable, sys.prefix, _existing(site.getsitepackages()))
    import sysconfig  # noqa: PLC0415 - every env process imports this file, and few need it

    prefix = Path(python).parent.parent
    names = {"base": str(prefix), "platbase": str(prefix)}
    folders = [sysconfig.get_path(kind, "venv", names) for kind in ("purelib", "platlib")]
    if existing := _existing(folders):
        return Packages(python, str(prefix), existing, installed=True)
    if not os.access(python, os.X_OK):
        raise EnvProblem(
            "ENV_IMPORT",
            f"the interpreter {python} does not start: there is no such program",
            hint="Push the environment again, its packages installed.",
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise EnvProblem(
        "ENV_DEPS",
        f"{prefix} holds no packages for Python {version}, on which this server runs",
        hint="Push the environment again, its packages installed.",
    )


def enter(packages: Packages) -> None:
    """Puts the packages behind the standard library, and gives user code the names that `site`
    would have given it. Call it when this process is confined.

    Raises EnvProblem ENV_DEPS naming packages that need code run or folders added at the start.
    """
    if packages.installed and (needed := path_files(packages.folders)):
        shown = "; ".join(f"{owner} ({file})" for file, owner in needed[:_SHOWN])
        raise EnvProblem(
            "ENV_DEPS",
            f"these packages work through path files, which are never run: {shown}",
            hint="Use a release that installs without one (no editable install, no namespace of "
            "the old kind), or leave the package out of requirements.txt.",
        )
    sys.path += [folder for folder in packages.folders if folder not in sys.path]
    sys.executable = packages.python
    sys.prefix = sys.exec_prefix = packages.prefix
    if not hasattr(builtins, "exit"):
        site.setquit()
        site.setcopyright()
        site.sethelper()


def path_files(folders: Iterable[str]) -> list[tuple[str, str]]:
    """Path files in `folders` that a package may need: (file name, package), sorted."""
    files = []
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
        names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(".pth")]
        wanted = set(names) - set(_NOT_NEEDED)
        files += [(name, owner_of(Path(folder), name)) for name in wanted]
    return sorted(files)


def owner_of(folder: Path, file: str) -> str:
    """The package that installed `file` into `folder`, as its record says."""
    import csv  # noqa: PLC0415 - only for a refusal

    for record in sorted(folder.glob("*.dist-info/RECORD")):
        with open(record, encoding="utf-8", errors="replace", newline="") as lines:
            if any(row and row[0] == file for row in csv.reader(lines)):
                return record.parent.name.removesuffix(".dist-info").replace("-", " ")
    return "a package without a record"


def add_source(folder: Path) -> None:
    """The environment's own modules: behind the standard library, before its packages."""
    if str(folder) in sys.path:
        return
    first = next(
        (index for index, path in enumerate(sys.path) if _is_packages(path)), len(sys.path)
    )
    sys.path.insert(first, str(folder))


def on_path() -> list[str]:
    """The folders of packages that this process imports from."""
    return [path for path in sys.path if _is_packages(path)]


def _is_packages(path: str) -> bool:
    return os.path.basename(path).endswith("-packages")


def _existing(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def _same(python: str, other: str) -> bool:
    return os.path.abspath(python) == os.path.abspath(other)
