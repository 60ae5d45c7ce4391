"""A version while a push makes it: its staging folder, its settings, and its env processes, whose
time limits fit into the push."""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from engine.core.files import sync_folder
from engine.endpoints import judges
from engine.environments import registry, snapshot
from engine.home import recovery
from engine.home.run_dir import Home
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings
from envs.host.process import EnvProcess

_T = TypeVar("_T")
_STAGING = ".push-"


@dataclass
class Draft:
    """A version that is being made.

    Attributes:
        name: the name that the environment is pushed under.
        folder: the staging folder, beside the stored versions.
        copied: the copy of the environment's files.
        settings: those of its environment.toml.
        deadline: value of `time.monotonic()` by which the push must be done.
        python: path of the interpreter that has its packages; "" if any interpreter will do.
        warnings, problems: texts that the author of the environment should read.
    """

    home: Home
    name: str
    folder: Path
    copied: snapshot.Snapshot
    settings: EnvSettings
    deadline: float
    python: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hash(self) -> str:
        """The hash that names the version: the beginning of the digest of the copied files."""
        return self.copied.digest[:12]

    @property
    def source(self) -> Path:
        """The folder with the copied files."""
        return self.folder / registry.SOURCE

    @property
    def seconds_left(self) -> float:
        """Seconds until the push must be done; negative after the deadline."""
        return self.deadline - time.monotonic()

    @property
    def secrets(self) -> dict[str, str]:
        """Name -> value of the version's secrets that are set for this server."""
        return {name: os.environ[name] for name in self.settings.secrets if os.environ.get(name)}

    @property
    def unset_secrets(self) -> list[str]:
        """The names of the version's secrets that are not set for this server."""
        return [name for name in self.settings.secrets if not os.environ.get(name)]

    def process(self) -> EnvProcess:
        """Make an env process of the version; it starts with its first call.

        Its time limits are those of the version, but not more than the push has time for. The start
        may take what the push can spare (at least `push_limits.START_SECONDS`), and a call at most
        `push_limits.CALL_SECONDS`.
        """
        limits = self.settings.limits
        spare_seconds = max(push_limits.START_SECONDS, self.seconds_left - push_limits.AFTER_START)
        push_time_limits = replace(
            limits,
            start_seconds=min(limits.start_seconds, spare_seconds),
            call_seconds=min(limits.call_seconds, push_limits.CALL_SECONDS),
        )
        return EnvProcess(
            self.source,
            python=self.python or None,  # "": the version names no packages
            limits=push_time_limits,
            secrets=self.secrets,
            sandbox=registry.sandbox_of(self.home),
            upstreams=judges.upstreams(self.home, self.settings.endpoints, spare_seconds),
        )

    def timed(self, limit_s: float, call: Callable[[], _T]) -> tuple[_T, float]:
        """Call `call`, which runs the environment; return its result and the seconds it took.

        `limit_s` is the time limit that `call` enforces itself; this method does not. An EnvProblem
        of `call` is passed on. If `call` used up `limit_s`, the problem gets a hint about the
        limits of a push.
        """
        began = time.monotonic()
        try:
            return call(), time.monotonic() - began
        except EnvProblem as problem:
            if time.monotonic() - began >= limit_s:
                problem.hint = (
                    f"It had {limit_s:.3g} s: limits.start_seconds in environment.toml is "
                    f"{self.settings.limits.start_seconds:g}, and a push has "
                    f"{push_limits.PUSH_SECONDS:g} s in all, {push_limits.AFTER_START:g} of them "
                    "for the audit. Load or compute less at the start, or raise the limit where "
                    "it is below that."
                )
            raise


@contextlib.contextmanager
def staging(home: Home, name: str) -> Iterator[Path]:
    """Context manager: yield a new staging folder beside the versions of `name`.

    The folder is removed at the end, unless it was renamed to a version. Staging folders that
    killed pushes have left behind are removed first.
    """
    for old_folder in home.envs.glob(f"*/{_STAGING}*"):
        _remove_abandoned(old_folder)
    parent = home.env(name, hash12="x").parent  # any hash does: only the parent is needed
    folder = parent / f"{_STAGING}{secrets.token_hex(6)}"
    lock = _make_locked_folder(folder)  # the lock shows other pushes that this push is alive
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # not empty: the name has versions
            parent.rmdir()


def _make_locked_folder(folder: Path) -> int:
    """Make the folder and lock it; return the descriptor that holds the lock until it is closed."""
    while True:  # again if another push removes the folder before it is locked
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _try_lock_folder(folder)
        if lock is not None:
            return lock


def publish(folder: Path, final: Path) -> None:
    """Rename the finished version in `folder` to `final` and sync the change to disk.

    If a complete version is already at `final`, that version and `folder` stay as they are. Raises
    OSError if the rename fails for another reason.
    """
    # FileNotFoundError: nothing is at `final`, which is the usual case.
    with contextlib.suppress(FileNotFoundError):
        if database_row(final) is None:
            shutil.rmtree(final)  # an interrupted delete has left this incomplete version
    try:
        os.rename(folder, final)
    except OSError:
        another_push_stored_it = database_row(final) is not None
        if not another_push_stored_it:
            raise
    sync_folder(final.parent)


def database_row(folder: Path) -> recovery.Columns | None:
    """Return the columns of the database row for the version in `folder`.

    Returns None if the folder holds no complete version: its env.json or its rows are missing.
    """
    row = recovery.env_row(folder)
    return row if row and (folder / registry.TASKS).is_file() else None


def _remove_abandoned(folder: Path) -> None:
    """Remove a staging folder, unless a running push has locked it. Its parent folder is removed
    too if that is then empty.
    """
    lock = _try_lock_folder(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # not empty: the name has versions
            folder.parent.rmdir()


def _try_lock_folder(folder: Path) -> int | None:
    """Lock a folder without waiting; return the open descriptor that holds the lock.

    Returns None if another process holds the lock, or if the folder is gone or was replaced
    meanwhile. Closing the descriptor releases the lock.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    # OSError: another process has the lock, or the folder was removed after it was opened.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The path may lead to a new folder by now, which this lock does not protect.
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    os.close(lock)
    return None
