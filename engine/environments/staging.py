"""The folder a version is made in, beside the stored ones, and its renaming to one of them."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.files import sync_folder
from engine.environments.registry import TASKS
from engine.home import recovery
from engine.home.run_dir import Home

_STAGING = ".push-"


@contextlib.contextmanager
def staging(home: Home, name: str) -> Iterator[Path]:
    """A folder beside the versions of `name`, gone afterwards unless it was renamed to one.

    Its lock lives as long as the push; what a killed one left is cleared away by the next push.
    """
    for left in home.envs.glob(f"*/{_STAGING}*"):
        _sweep(left)
    parent = home.env(name, "x").parent
    folder = parent / f"{_STAGING}{secrets.token_hex(6)}"
    lock = None
    while lock is None:  # another push may take a folder without a lock yet for a dead one's
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # a name that got no version leaves no folder
            parent.rmdir()


def publish(folder: Path, final: Path) -> None:
    """Renames the finished version in `folder` to `final`, durably; one that is there stays."""
    with contextlib.suppress(FileNotFoundError):
        if database_row(final) is None:
            shutil.rmtree(final)  # what an interrupted delete left
    try:
        os.rename(folder, final)
    except OSError:
        if database_row(final) is None:  # else somebody pushed the same content just now
            raise
    sync_folder(final.parent)


def database_row(folder: Path) -> dict[str, Any] | None:
    """What the database keeps of a version's folder; None where that is no whole version."""
    row = recovery.env_row(folder)
    return row if row and (folder / TASKS).is_file() else None


def _sweep(left: Path) -> None:
    lock = _lock_folder(left)
    if lock is not None:
        shutil.rmtree(left, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):
            left.parent.rmdir()


def _lock_folder(folder: Path) -> int | None:
    """A lock on the folder that is at this path now, None when somebody has it or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    os.close(lock)
    return None
