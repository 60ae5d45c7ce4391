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
from engine.home.database import damaged, intact, mend, open_database, unusable
from engine.home.run_dir import Home

_WAL_LIMIT = 4_000_000  # bytes of write-ahead log after which a writer tries to checkpoint


class Connection:
    """A context manager; not for sharing between threads. The tables stand in its subclasses."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._db, self._lock = open_database(home)

    def close(self) -> None:
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database, unless another process is doing so."""
        lock = take_lock(self.home.checkpoint_lock)
        if lock is None:
            return False
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return True
        finally:
            os.close(lock)

    def check(self) -> None:
        """Read every page; a damaged database is kept aside and made again from the folders.

        A scribbled page is found by nothing less, so a server does this when it starts. Raises
        UserError HOME_UNUSABLE where it cannot be mended now.
        """
        wrong = intact(self._db)
        if wrong:
            if self._lock < 0:  # a home for reading alone
                raise damaged(self.home, wrong)
            self.close()
            self._db, self._lock = mend(self.home, wrong)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
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
            raise unusable(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged(self.home, str(error)) from error
        self._checkpoint_if_long()

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.OperationalError as error:
            raise unusable(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged(self.home, str(error)) from error

    def _checkpoint_if_long(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):
            if os.stat(f"{self.home.db}-wal").st_size > _WAL_LIMIT:
                self.checkpoint()


def placeholders(values: Collection[Any]) -> str:
    """A question mark for each value, as SQL takes them."""
    return ", ".join("?" * len(values))


def assignments(values: Mapping[str, Any]) -> str:
    """`name = ?` for each value, as an UPDATE takes them."""
    return ", ".join(f"{name} = ?" for name in values)
