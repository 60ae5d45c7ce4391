"""The schema of a home's database, as a list of migrations.

`PRAGMA user_version` is the number of migrations that were applied. A migration that was released
never changes; a change of the schema is a new migration at the end of the list.
"""

import sqlite3
from collections.abc import Callable

from engine.home.team.tables import READY

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
# Table, column, value of the rows that were there before.
_OWNER_COLUMNS = (
    ("runs", "owner", ""),
    ("runs", "project", ""),
    ("runs", "priority", "normal"),
    ("deployments", "owner", ""),
)
_OWNER_TABLES = (
    """
    CREATE TABLE env_owners (
        env_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        pushed REAL NOT NULL,
        PRIMARY KEY (env_id, owner)
    )
    """,
    "INSERT INTO env_owners (env_id, owner, pushed) SELECT env_id, '', pushed FROM envs",
    """
    CREATE TABLE shares (
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        grantee TEXT NOT NULL,
        may TEXT NOT NULL,
        PRIMARY KEY (kind, name, owner, grantee)
    )
    """,
    "CREATE INDEX runs_by_owner ON runs (owner)",
)
_LINE = "(owner, priority, queued)"
_INDEXES = (
    f"CREATE INDEX queued_here ON runs {_LINE} {READY} gpus > 0 AND compute = 'local'",
    f"CREATE INDEX queued_without_device ON runs {_LINE} {READY} gpus = 0",
    "CREATE INDEX queued_elsewhere ON runs (compute, owner, priority, queued) "
    f"{READY} compute != 'local'",
    "CREATE INDEX queued_behind ON runs (queued) WHERE state = 'queued' AND waits_for != ''",
    "CREATE INDEX runs_by_time ON runs (queued)",
    "CREATE INDEX runs_by_end ON runs (ended)",
)


def m001_first_tables(db: sqlite3.Connection) -> None:
    """Create the tables of version 0.1.0."""
    for statement in _M001:
        db.execute(statement)


def m002_waiting_runs(db: sqlite3.Connection) -> None:
    """Add the column with the ids of the runs for which a run waits."""
    db.execute("ALTER TABLE runs ADD COLUMN waits_for TEXT NOT NULL DEFAULT ''")


def m003_plans(db: sqlite3.Connection) -> None:
    """Add the column with the id of the plan of which a run is a step."""
    db.execute("ALTER TABLE runs ADD COLUMN plan TEXT NOT NULL DEFAULT ''")


def m004_several_gpus(db: sqlite3.Connection) -> None:
    """Add the column with the number of devices that a run is to have."""
    db.execute("ALTER TABLE runs ADD COLUMN gpus INTEGER NOT NULL DEFAULT 1")


def m005_elsewhere(db: sqlite3.Connection) -> None:
    """Add the column that says on which machine a run runs."""
    db.execute("ALTER TABLE runs ADD COLUMN compute TEXT NOT NULL DEFAULT 'local'")


def m006_owners(db: sqlite3.Connection) -> None:
    """Add the columns and tables that say to which keys runs, environments and deployments belong,
    and with whom they are shared."""
    for table, column, default in _OWNER_COLUMNS:
        db.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT NOT NULL DEFAULT '{default}'")
    for statement in _OWNER_TABLES:
        db.execute(statement)


def m007_long_queues(db: sqlite3.Connection) -> None:
    """Add the indexes with which starting or queueing a run takes no longer if the queue is
    long."""
    for statement in _INDEXES:
        db.execute(statement)


def m008_places_left(db: sqlite3.Connection) -> None:
    """Add the column with the hours that a run has taken at places which it has left."""
    db.execute("ALTER TABLE runs ADD COLUMN earlier_hours TEXT NOT NULL DEFAULT ''")


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [
    m001_first_tables,
    m002_waiting_runs,
    m003_plans,
    m004_several_gpus,
    m005_elsewhere,
    m006_owners,
    m007_long_queues,
    m008_places_left,
]
