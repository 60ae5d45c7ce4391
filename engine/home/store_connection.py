"""One connection to a home's database: transactions, reads, the write-ahead log.

Several servers and supervisors share one database, so every write is one BEGIN IMMEDIATE
transaction (a deferred one that reads first fails at once, whatever the busy timeout), the journal
is a write-ahead log, and only the holder of a flock on `checkpoint.lock` moves that log into the
database.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from engine.core.errors import UserError
from engine.core.files import take_lock
from engine.home.database import (
    damage_in,
    damaged_error,
    mend,
    open_database,
    unusable_error,
)
from engine.home.run_dir import Home
from engine.home.team.owners import Viewer
from engine.home.team.tables import seen_deployments, seen_envs, seen_runs

_WAL_LIMIT = 4_000_000  # bytes of the write-ahead log above which a writer tries to checkpoint


class Connection:
    """An open database, as a context manager that closes it. Not for use by several threads.

    The subclasses have the methods of the tables. Where the home has a viewer, these return only
    what the viewer sees (`engine/home/team/tables.py`).
    """

    def __init__(self, home: Home) -> None:
        """Open the database of `home`. Raises UserError HOME_UNUSABLE or DISK_FULL if it cannot be
        opened."""
        self.home = home
        viewer = home.viewer
        self._owner = viewer.owner if viewer else ""  # of what is made over this connection
        self._seen_runs = seen_runs(viewer)
        self._seen_envs = seen_envs(viewer)
        self._seen_deployments = seen_deployments(viewer)
        self._db, self._lock = open_database(home)

    def close(self) -> None:
        """Close the database, then release the lock that shows other processes that it is open."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def checkpoint(self) -> bool:
        """Move the content of the write-ahead log into the database file, and return True.

        If another process is doing this just now, nothing is done, and False is returned.
        """
        lock = take_lock(self.home.checkpoint_lock)
        if lock is None:
            return False
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return True
        finally:
            os.close(lock)

    def check(self) -> None:
        """Read every page of the database. If one is damaged, the database is moved aside, and a
        new one is filled from the folders of the home.

        A server does this when it starts, because only reading every page finds a page that was
        overwritten. Raises UserError HOME_UNUSABLE if the database is damaged and cannot be mended
        now.
        """
        fault = damage_in(self._db)
        if fault:
            if self._lock < 0:  # the disk cannot be written, so nothing can be mended
                raise damaged_error(self.home, fault)
            self.close()
            self._db, self._lock = mend(self.home, fault)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """Context manager: run the block in a transaction, and roll it back if the block raises.

        After a commit, a write-ahead log that has become long is moved into the database. Raises
        UserError HOME_UNUSABLE or DISK_FULL if the database cannot be written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # A failure of the rollback must not hide the error that led here.
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise unusable_error(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged_error(self.home, str(error)) from error
        self._checkpoint_if_long()

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        """Return the rows that a query selects, as tuples; `values` replace its question marks.

        Raises UserError HOME_UNUSABLE or DISK_FULL if the database cannot be read.
        """
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.OperationalError as error:  # the database is locked, or the disk fails
            raise unusable_error(self.home.db, error) from error
        except sqlite3.DatabaseError as error:  # any other error means that the database is damaged
            raise damaged_error(self.home, str(error)) from error

    def _readable(
        self, select_seen: Callable[[Viewer | None], tuple[str, tuple[str, ...]]]
    ) -> tuple[str, tuple[str, ...]]:
        """Return (SQL, values) to read what the viewer may at least read, even if the present call
        does more than reading.

        `select_seen` is one of the functions seen_* of engine/home/team/tables.py, such as
        `seen_runs`.
        """
        viewer = self.home.viewer
        return select_seen(None if viewer is None else replace(viewer, may="read"))

    def _name_of_owner(self, name: str) -> str:
        """Return the name of a run, plan or deployment, such as "sums-grpo", with the owner's id
        before it: "ana.sums-grpo"; unchanged for the local user.

        So the runs of an owner are counted by themselves, and the number in an id says nothing
        about the runs of others. An owner's id has no dot.
        """
        return f"{self._owner}.{name}" if self._owner else name

    def _checkpoint_if_long(self) -> None:
        """Checkpoint if the write-ahead log has grown beyond `_WAL_LIMIT`.

        Errors are ignored: the data is committed already, and the next write tries again.
        """
        with contextlib.suppress(OSError, sqlite3.Error):
            if os.stat(f"{self.home.db}-wal").st_size > _WAL_LIMIT:
                self.checkpoint()


def shared_too_little(name: str, field: str) -> UserError:
    """Make the error FORBIDDEN for `name`, which its owner lets the viewer read but not use or
    change. `field` is the argument that named it."""
    return UserError(
        "FORBIDDEN",
        f"{name} belongs to another key, which shares it for less than that",
        hint="Ask its owner to share it to be used; only the owner can change or stop it.",
        field=field,
    )


def placeholders(values: Collection[Any]) -> str:
    """Return the SQL placeholders for the values: "?, ?, ?" for three values."""
    return ", ".join("?" * len(values))


def assignments(values: Mapping[str, Any]) -> str:
    """Return the assignments of an SQL UPDATE of the columns `values`: "state = ?, ended = ?"."""
    return ", ".join(f"{name} = ?" for name in values)
