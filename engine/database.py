"""Opening the database of a home: its schema as a list of steps, and what can be wrong with it.

`PRAGMA user_version` counts the steps applied. A step that was released never changes: a new need
is a new step at the end of the list.
"""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from engine.errors import UserError
from engine.run_dir import Home

_BUSY_S = 30.0

_M001 = (
    """
    CREATE TABLE runs (
        rowid INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        kind TEXT NOT NULL,
        algorithm TEXT NOT NULL,
        state TEXT NOT NULL,
        created REAL NOT NULL,
        queued REAL NOT NULL,
        started REAL,
        ended REAL,
        attempt INTEGER NOT NULL,
        device TEXT NOT NULL DEFAULT '',
        request_id TEXT NOT NULL DEFAULT '',
        env_id TEXT NOT NULL DEFAULT '',
        model TEXT NOT NULL DEFAULT '',
        note TEXT NOT NULL DEFAULT '',
        expect TEXT NOT NULL DEFAULT '',
        parent TEXT NOT NULL DEFAULT '',
        max_gpu_hours REAL NOT NULL DEFAULT 0,
        estimated_hours REAL NOT NULL DEFAULT 0,
        spent_hours REAL NOT NULL DEFAULT 0,
        spent_before REAL NOT NULL DEFAULT 0,
        continuations INTEGER NOT NULL DEFAULT 0,
        reason_kind TEXT NOT NULL DEFAULT '',
        reason TEXT NOT NULL DEFAULT '',
        hint TEXT NOT NULL DEFAULT '',
        verdict TEXT NOT NULL DEFAULT '',
        UNIQUE (name, number)
    )
    """,
    "CREATE INDEX runs_by_state ON runs (state, queued)",
    """
    CREATE TABLE requests (
        request_id TEXT PRIMARY KEY,
        body_hash TEXT NOT NULL,
        run_id TEXT NOT NULL REFERENCES runs (run_id),
        at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE history (
        run_id TEXT NOT NULL REFERENCES runs (run_id),
        at REAL NOT NULL,
        came_from TEXT NOT NULL,
        went_to TEXT NOT NULL
    )
    """,
    "CREATE INDEX history_by_run ON history (run_id)",
    """
    CREATE TABLE envs (
        env_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        hash TEXT NOT NULL,
        kind TEXT NOT NULL,
        created REAL NOT NULL,
        pushed REAL NOT NULL,
        info TEXT NOT NULL
    )
    """,
    "CREATE INDEX envs_by_name ON envs (name, pushed)",
    """
    CREATE TABLE deployments (
        deployment_id TEXT PRIMARY KEY,
        base_name TEXT NOT NULL,
        base_path TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'starting',
        url TEXT NOT NULL DEFAULT '',
        adapters TEXT NOT NULL,
        serve_base INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        created REAL NOT NULL,
        ended REAL,
        message TEXT NOT NULL DEFAULT ''
    )
    """,
    """
    CREATE TABLE estimates (
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        features TEXT NOT NULL,
        predicted REAL NOT NULL,
        actual REAL NOT NULL
    )
    """,
)


def m001_first_tables(db: sqlite3.Connection) -> None:
    for statement in _M001:
        db.execute(statement)


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [m001_first_tables]


def open_database(home: Home) -> sqlite3.Connection:
    if _emptied(home):
        raise damaged(home.db, "the file is empty although this home holds runs")
    try:
        db = sqlite3.connect(home.db, timeout=_BUSY_S, isolation_level=None)
    except sqlite3.Error as error:
        raise unusable(home.db, error) from error
    try:
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA synchronous = FULL")
        _prepare(home, db)
    except sqlite3.OperationalError as error:
        db.close()
        raise unusable(home.db, error) from error
    except sqlite3.DatabaseError as error:
        db.close()
        raise damaged(home.db, str(error)) from error
    except UserError:
        db.close()
        raise
    return db


def _emptied(home: Home) -> bool:
    try:
        if home.db.stat().st_size:
            return False
    except OSError:
        return False
    # A database that another process creates right now is empty too, but then it has no runs.
    return any(home.runs.glob("*/config.json"))


def _prepare(home: Home, db: sqlite3.Connection) -> None:
    """Bring the schema up to date; the usual case costs one read."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == len(MIGRATIONS):
        return
    if version > len(MIGRATIONS):
        raise UserError(
            "HOME_UNUSABLE",
            f"the database {home.db} was written by a newer Honesmith (schema {version}, this "
            f"one knows {len(MIGRATIONS)})",
            hint="Upgrade Honesmith, or use another home.",
        )
    _use_wal(db)
    db.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have migrated while this one waited.
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for migrate in MIGRATIONS[version:]:
            migrate(db)
        db.execute(f"PRAGMA user_version = {max(version, len(MIGRATIONS))}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _use_wal(db: sqlite3.Connection) -> None:
    # Switching the journal needs the file alone, and SQLite does not wait for that by itself.
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def unusable(path: Path, error: sqlite3.Error) -> UserError:
    if "full" in str(error):
        return UserError(
            "DISK_FULL",
            f"the disk under {path} has no room (bytes or inodes): {error}",
            hint="Free some space, then call again; nothing was stored.",
            retryable=True,
        )
    return UserError(
        "HOME_UNUSABLE",
        f"the database {path} cannot be used: {error}",
        hint="Check that the home is writable by this user and not on a network file system.",
        retryable="locked" in str(error),
    )


def damaged(path: Path, what: str) -> UserError:
    return UserError(
        "HOME_UNUSABLE",
        f"the database {path} is damaged: {what}",
        hint=f"Move {path} (with its -wal and -shm files) away and restart; run folders stay.",
    )
