"""Small file systems of a test, filled up, and runs that end on them."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from invariants import until

from engine.core.errors import UserError
from engine.home.rows import TERMINAL
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.processes import launcher


def fill(folder: Path, leave: int = 0) -> Path:
    """A file that takes all the room there is but `leave` bytes."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    if leave:
        os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def use_up_inodes(folder: Path) -> list[Path]:
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            path = folder / f"inode-{len(made)}"
            path.touch()
            made.append(path)
    return made


def row_of(run: RunDir) -> Any:
    with Store(run.home) as store:
        return store.get_run(run.id)


def ended(run: RunDir) -> Any:
    def over() -> bool:
        with contextlib.suppress(UserError):
            return row_of(run).state in TERMINAL and not launcher.is_alive(run)
        return False

    until(over, f"{run.id} is over", 120)
    return row_of(run)


def remounted(folder: Path, how: str) -> None:
    argv = ["mount", "-o", f"remount,{how}", str(folder)]
    assert subprocess.run(argv, capture_output=True).returncode == 0
