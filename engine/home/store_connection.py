"""One connection to a home's database: transactions, reads, the write-ahead log.

Several servers and supervisors share one database, so every write is one BEGIN IMMEDIATE
transaction (a deferred one that reads first fails at once, whatever the busy timeout), the journal
is a write-ahead log, and only the holder of a flock on `checkpoint.lock` moves that log into the
database.
"""

import contextlib
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

from engine.core.files import take_lock
from engine.home.database import (
    damage_in,
    damaged_error,
    mend,
    open_database,
    unusable_error,
)
from engine.home.run_dir import Home

_WAL_LIMIT = 4_000_000  # bytes of write-ahead log after which a writer tries to checkpoint


class Connection:
    """A context manager; not for sharing between threads. The tables stand in its subclasses."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._db, self._lock = open_database(home)

    def close(self) -> None:
        """Close the database, then give back the lock that says it is open."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database. Returns False, having done nothing, when
        another process is doing so."""
        lock = take_lock(self.home.checkpoint_lock)
        if lock is None:
            return False
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return True
        finally:
            os.close(lock)

    def check(self) -> None:
        """Read every page of the database. If it is damaged, it is moved aside and a new one is
        made from the folders of the home.

        A server does this when it starts, because nothing less finds a page that was overwritten.
        Raises UserError HOME_UNUSABLE where the database cannot be mended now.
        """
        fault = damage_in(self._db)
        if fault:
            if self._lock < 0:  # the home can only be read
                raise damaged_error(self.home, fault)
            self.close()
            self._db, self._lock = mend(self.home, fault)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """A transaction: committed at the end of the block, rolled back when the block raises.

        Raises UserError HOME_UNUSABLE or DISK_FULL when the database cannot be written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise unusable_error(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged_error(self.home, str(error)) from error
        self._checkpoint_if_long()

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        """The rows that a query selects. Raises UserError HOME_UNUSABLE or DISK_FULL."""
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.OperationalError as error:
            raise unusable_error(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged_error(self.home, str(error)) from error

    def _checkpoint_if_long(self) -> None:
        """Checkpoint when the write-ahead log has grown beyond its limit; errors are left to the
        next write."""
        with contextlib.suppress(OSError, sqlite3.Error):
            if os.stat(f"{self.home.db}-wal").st_size > _WAL_LIMIT:
                self.checkpoint()


def placeholders(values: Collection[Any]) -> str:
    """A question mark for each value, separated by commas, as SQL takes them."""
    return ", ".join("?" * len(values))


def assignments(values: Mapping[str, Any]) -> str:
    """`name = ?` for each value, separated by commas, as an UPDATE takes them."""
    return ", ".join(f"{name} = ?" for name in values)
