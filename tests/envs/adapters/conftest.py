"""Stand-ins for packages of others: the same names and shapes, in a virtual environment of the
environment's own, so that nothing has to be fetched."""

import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def packages(tmp_path: Path) -> Callable[..., str]:
    """Writes packages, by the path of each file; the interpreter that can import them."""

    def write(files: dict[str, str]) -> str:
        venv = tmp_path / "venv"
        variables = {"base": str(venv), "platbase": str(venv)}
        folder = Path(sysconfig.get_path("purelib", "venv", variables))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))
        python = venv / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.symlink_to(sys.executable)
        return str(python)

    return write


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of an environment: its environment.toml, and files by path."""

    def write(toml: str, files: dict[str, str] | None = None) -> Path:
        folder = tmp_path / "foreign"
        for name, text in {"environment.toml": toml, **(files or {})}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))
        return folder

    return write
