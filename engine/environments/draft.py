"""A version while it is made: the folder it is made in, its settings, and processes of it that keep
to the time of the push."""

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
from engine.environments import push_limits, registry, snapshot
from engine.home import recovery
from engine.home.run_dir import Home
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings
from envs.host.process import EnvProcess

_T = TypeVar("_T")
_STAGING = ".push-"


@dataclass
class Draft:
    """A version being made.

    Attributes:
        folder: where it is made, aside of the stored versions.
        shot: the copy of its files.
        deadline: `time.monotonic()` at which the push has to be done.
        python: the interpreter with its packages, "" for any.
        warnings, problems: what its author should read.
    """

    home: Home
    name: str
    folder: Path
    shot: snapshot.Snapshot
    settings: EnvSettings
    deadline: float
    python: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hash(self) -> str:
        return self.shot.digest[:12]

    @property
    def source(self) -> Path:
        return self.folder / registry.SOURCE

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def secrets(self) -> dict[str, str]:
        """The secrets of the version that are set for this server, by name."""
        return {n: os.environ[n] for n in self.settings.secrets if os.environ.get(n)}

    @property
    def unset_secrets(self) -> list[str]:
        """The names of those that are not."""
        return [n for n in self.settings.secrets if not os.environ.get(n)]

    def process(self) -> EnvProcess:
        """An env process of the version, with as much patience as the push has."""
        limits = self.settings.limits
        start = max(push_limits.START_SECONDS, self.seconds_left - push_limits.AFTER_START)
        return EnvProcess(
            self.source,
            python=self.python or None,
            limits=replace(
                limits,
                start_seconds=min(limits.start_seconds, start),
                call_seconds=min(limits.call_seconds, push_limits.CALL_SECONDS),
            ),
            secrets=self.secrets,
            sandbox=registry.sandbox_of(self.home),
        )

    def timed(self, limit: float, call: Callable[[], _T]) -> tuple[_T, float]:
        """What `call` returns, and the seconds it took.

        Raises EnvProblem; where it took as long as `limit`, with a hint about limits.
        """
        began = time.monotonic()
        try:
            return call(), time.monotonic() - began
        except EnvProblem as problem:
            if time.monotonic() - began >= limit:
                problem.hint = (
                    f"It had {limit:.3g} s: limits.start_seconds in environment.toml is "
                    f"{self.settings.limits.start_seconds:g}, and a push has "
                    f"{push_limits.PUSH_SECONDS:g} s in all, {push_limits.AFTER_START:g} of them "
                    "for the audit. Load or compute less at the start, or raise the limit where "
                    "it is below that."
                )
            raise


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


def database_row(folder: Path) -> recovery.Columns | None:
    """What the database keeps of a version's folder; None where that is no whole version."""
    row = recovery.env_row(folder)
    return row if row and (folder / registry.TASKS).is_file() else None


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
