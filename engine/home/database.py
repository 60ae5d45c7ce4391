"""Opening the database of a home, bringing its schema up to date, and repair of damage."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from engine.core.errors import UserError
from engine.core.files import is_locked, share_lock, sync_folder, take_lock
from engine.home import recovery
from engine.home.run_dir import Home
from engine.home.schema.migrations import MIGRATIONS

_BUSY_S = 30.0  # how long to wait for another process that holds a lock on the database
# Errors of a disk that takes no writing: read-only, not permitted, full, or a limit is reached.
_NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MIN_FREE_BYTES = 65_536  # the free bytes that SQLite needs to open a database
_MIN_FREE_INODES = 4  # the free inodes for the files that SQLite makes beside the database
_MEND_S = 5.0  # how long to wait until no other process has a damaged database open


class Damaged(Exception):
    """The database file is no SQLite database, or a part is damaged; the message is SQLite's."""


def open_database(home: Home) -> tuple[sqlite3.Connection, int]:
    """Open the home's database and bring its schema up to date.

    A damaged database is moved aside, and a new one is filled from the folders of the home. If the
    disk cannot be written, the connection is read-only.

    Returns the connection, and the descriptor of a lock that shows other processes that the
    database is open (-1 if the disk cannot be written). Close the connection first, then the lock.
    Raises UserError HOME_UNUSABLE or DISK_FULL if the database can be neither opened nor mended.
    """
    lock = _shared_lock(home)
    try:
        db = _open(home) if lock >= 0 else _open_read_only(home)
        return db, lock
    except Damaged as damage:
        if lock < 0:  # nothing can be mended on a disk that cannot be written
            raise damaged_error(home, str(damage)) from damage
        os.close(lock)  # because `mend` needs the lock exclusively
        return mend(home, str(damage))
    except BaseException as error:  # any error, because the lock must be released
        if _comes_from_sqlite(error) and _is_readable_alone(home):
            # SQLite cannot write here. But there is no write-ahead log, so the database file alone
            # holds all data and can be read.
            return _open_read_only(home), lock
        if lock >= 0:
            os.close(lock)
        raise


def _shared_lock(home: Home) -> int:
    """Take the lock that shows other processes that the database is open; return its descriptor.

    Returns -1 if the disk cannot be written, so that no lock file can be made. Raises UserError
    HOME_UNUSABLE if another process is mending the database, or if the file cannot be locked.
    """
    try:
        lock = share_lock(home.db_lock, wait_s=_BUSY_S)
    except OSError as error:
        if error.errno not in _NO_WRITING:
            raise unusable_error(home.db, error) from error
        return -1  # no file can be written here; the database may still be readable
    if lock is None:  # `mend` in another process holds the lock exclusively
        raise unusable_error(home.db, TimeoutError("it is being mended by another process"))
    return lock


def _comes_from_sqlite(error: BaseException) -> bool:
    """Return whether the error is a UserError that was raised because of an error of SQLite."""
    return isinstance(error, UserError) and isinstance(error.__cause__, sqlite3.Error)


def _is_readable_alone(home: Home) -> bool:
    """Return whether the database file alone holds everything that was committed.

    It does if its write-ahead log is missing or empty. Returns False if there is no database.
    """
    write_ahead_log = Path(f"{home.db}-wal")
    if not home.db.exists():
        return False
    return not write_ahead_log.exists() or write_ahead_log.stat().st_size == 0


def _open_read_only(home: Home) -> sqlite3.Connection:
    """Open the database for reading only, in a home that cannot be written now.

    Raises Damaged if the file is no intact database. Raises UserError HOME_UNUSABLE or DISK_FULL if
    the database cannot be opened, or if reading would need writing, because the write-ahead log is
    not empty or the schema has another version.
    """
    try:
        if not _is_readable_alone(home):
            raise sqlite3.OperationalError("its write-ahead log cannot be read without writing")
        options = "?mode=ro&immutable=1"  # immutable: SQLite makes no lock file and no log file
        db = sqlite3.connect(f"{home.db.as_uri()}{options}", uri=True, isolation_level=None)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != len(MIGRATIONS):
            db.close()
            # An older schema cannot be brought up to date without writing.
            raise sqlite3.OperationalError(f"its schema is {version}, not {len(MIGRATIONS)}")
    except sqlite3.OperationalError as error:
        raise unusable_error(home.db, error) from error
    except sqlite3.DatabaseError as error:
        raise Damaged(str(error)) from error
    return db


def mend(home: Home, fault: str) -> tuple[sqlite3.Connection, int]:
    """Move the damaged database aside, and open a new one filled from the folders of the home.

    Args:
        home: the home with the damaged database.
        fault: what is wrong with the database, for the error.

    Returns the connection, and the descriptor of the lock that shows other processes that the
    database is open. Raises UserError HOME_UNUSABLE if the database cannot be moved, if the new one
    is damaged too, or if another process has the database open.
    """
    lock = take_lock(home.db_lock, wait_s=_MEND_S)
    # If another process has the database open, such as the supervisor of a living run, it must not
    # be replaced: on closing, SQLite in that process would delete the write-ahead log by its name,
    # and the new database would use the same name.
    if lock is None:
        raise damaged_error(home, fault, in_use=True)
    try:
        db = _open_if_mended(home) or _replace_damaged(home)
        fcntl.flock(lock, fcntl.LOCK_SH)  # from exclusive to shared, so that others may open it
        return db, lock
    except Damaged as damage:
        os.close(lock)
        raise damaged_error(home, str(damage)) from damage
    except OSError as error:  # the file cannot be renamed
        os.close(lock)
        raise damaged_error(home, f"{fault}; it cannot be moved aside: {error}") from error
    except BaseException:  # any error, because the lock must be released
        os.close(lock)
        raise


def _open_if_mended(home: Home) -> sqlite3.Connection | None:
    """Open the database if another process mended it while this process waited for the lock.

    Returns None if the database is still damaged.
    """
    try:
        db = _open(home)
    except Damaged:
        return None
    if not damage_in(db):
        return db
    db.close()
    return None


def _replace_damaged(home: Home) -> sqlite3.Connection:
    """Rename the damaged database and its write-ahead log, and open a new one in its place."""
    damaged = home.damaged_database(time.strftime("%Y%m%dT%H%M%S", time.gmtime()))
    # The log is renamed first. If this process dies in between, no old log must be left beside a
    # new database, because SQLite would apply that log to it.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{home.db}{suffix}", f"{damaged}{suffix}")
    sync_folder(home.root)
    return _open(home)


def damage_in(db: sqlite3.Connection) -> str:
    """Check every page of the database, and return its first faults in SQLite's words.

    Faults are separated by "; ". Returns "" if the database is intact.
    """
    try:
        reports = [line for (line,) in db.execute("PRAGMA quick_check")]
    except sqlite3.DatabaseError as error:
        reports = [str(error)]
    return "" if reports == ["ok"] else "; ".join(reports[:3])  # three are enough for a message


def _open(home: Home) -> sqlite3.Connection:
    """Open the database for reading and writing, and bring its schema up to date.

    Raises Damaged if the file is no intact database, UserError HOME_UNUSABLE or DISK_FULL if it
    cannot be opened or written.
    """
    if _was_emptied(home):
        raise Damaged("the file is empty although this home holds runs")
    try:
        # isolation_level=None: Python begins no transactions by itself, only the code's BEGIN does.
        db = sqlite3.connect(home.db, timeout=_BUSY_S, isolation_level=None)
    except sqlite3.Error as error:
        raise unusable_error(home.db, error) from error
    try:
        # Only the holder of `Home.checkpoint_lock` moves the log into the database.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA synchronous = FULL")
        _prepare(home, db)
    except sqlite3.OperationalError as error:  # the database is locked, or the disk fails
        db.close()
        raise unusable_error(home.db, error) from error
    except sqlite3.DatabaseError as error:  # any other error: the file is no intact database
        db.close()
        raise Damaged(str(error)) from error
    except UserError:
        db.close()
        raise
    return db


def _was_emptied(home: Home) -> bool:
    """Return whether something truncated the database: it is empty although the home holds runs.

    Returns False if there is no file.
    """
    try:
        if home.db.stat().st_size:
            return False
    except OSError:
        return False
    # A database that another process is just creating is empty too, but such a home has no runs.
    return any(home.runs.glob("*/config.json"))


def _prepare(home: Home, db: sqlite3.Connection) -> None:
    """Bring the schema of the database up to date. A new database is also filled from the folders
    of the home.

    Raises UserError HOME_UNUSABLE if a newer Honesmith wrote the database.
    """
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
    _migrate(home, db)


def _migrate(home: Home, db: sqlite3.Connection) -> None:
    """Run the missing migrations in one transaction, and fill the database if it is new."""
    db.execute("BEGIN IMMEDIATE")
    try:
        # Read again, because another process may have migrated while this one waited.
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for migrate in MIGRATIONS[version:]:
            migrate(db)
        if version == 0:  # the database is new
            _refill(home, db)
        # max(), because a newer Honesmith may have migrated while this process waited.
        db.execute(f"PRAGMA user_version = {max(version, len(MIGRATIONS))}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _refill(home: Home, db: sqlite3.Connection) -> None:
    """Fill a new database from the folders of the home.

    These hold the environment versions, the deployments, and the runs with their last states.
    """
    for row in recovery.env_rows(home):
        for owner in row.pop("owners"):  # they stand in a table of their own
            ownership = {"env_id": row["env_id"], "pushed": row["pushed"], "owner": owner}
            _insert(db, "env_owners", ownership)
        _insert(db, "envs", row | {"info": json.dumps(row["info"])})
    for row in recovery.deployment_rows(home):
        _insert(db, "deployments", row | {"adapters": json.dumps(row["adapters"])})
    for row in recovery.run_rows(home):
        _insert(db, "runs", row)
        # Of a run's history only the last state is known, and about when the run got it.
        at = row.get("ended") or row.get("started") or row["created"]
        change = {"run_id": row["run_id"], "at": at, "came_from": "", "went_to": row["state"]}
        _insert(db, "history", change)


def _insert(db: sqlite3.Connection, table: str, values: recovery.Columns) -> None:
    """Insert one row into `table`; `values` maps column names to values."""
    placeholders = ", ".join("?" * len(values))
    db.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({placeholders})", tuple(values.values())
    )


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch the database to a write-ahead log, and wait until no other process has it open.

    Raises sqlite3.OperationalError if another process still has it open after `_BUSY_S` seconds.
    """
    # The switch needs exclusive access to the file, and SQLite does not wait for that by itself.
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)  # another process usually has the file open for milliseconds only


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def reports_unwritable_disk(
    function: Callable[Concatenate[Home, Arguments], Result],
) -> Callable[Concatenate[Home, Arguments], Result]:
    """Decorator: turn an OSError about a file that cannot be written into a UserError.

    If `function`, whose first argument is a home, fails because the disk is full, read-only or the
    like, UserError DISK_FULL or HOME_UNUSABLE is raised. Other errors pass unchanged.
    """

    @functools.wraps(function)
    def wrapped(home: Home, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the function; if it raises an OSError about writing, raise a UserError instead."""
        try:
            return function(home, *args, **kwargs)
        except OSError as error:
            if error.errno not in _NO_WRITING:  # for example a file that does not exist
                raise
            raise _disk_error(home, error) from error

    return wrapped


def _disk_error(home: Home, error: OSError) -> UserError:
    """Make the UserError for a file that cannot be written.

    The code is DISK_FULL if the disk of the file is full, otherwise HOME_UNUSABLE. The message of
    HOME_UNUSABLE names the file if it is outside the home, and otherwise the home's database.
    """
    path = home.db  # if the error names no file
    if isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
    disk_full = disk_full_error(path, error)  # None if the disk is not full
    if disk_full is not None:
        return disk_full
    if path == home.db or path.is_relative_to(home.root):
        return unusable_error(home.db, error)
    return UserError(
        "HOME_UNUSABLE",
        f"{path} cannot be used: {error.strerror}",
        hint="Give this user the right to it, then call again.",
        retryable=True,
    )


def disk_full_error(path: Path, error: Exception) -> UserError | None:
    """Make the UserError DISK_FULL if `error` has a full disk, or a file size limit, as its cause.

    `path` is a file on the disk. The free space is measured, because on a full disk SQLite may only
    report "disk I/O error" or "unable to open". Returns None if there is another cause, or if the
    free space cannot be measured.
    """
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return None
    if _error_number(error) == errno.EFBIG:
        return _file_size_error(error)
    free_bytes, free_inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    # `f_files` is 0 on file systems that have no fixed number of inodes.
    lacks_inodes = disk.f_files > 0 and free_inodes < _MIN_FREE_INODES
    has_no_room = _says_full(error) or lacks_inodes or free_bytes < _MIN_FREE_BYTES
    if not has_no_room:
        return None
    return UserError(
        "DISK_FULL",
        f"the disk under {path} has no room: {free_bytes} bytes and {free_inodes} inodes are left "
        f"({error})",
        hint="Free some space (or inodes), then call again; nothing was stored.",
        retryable=True,
    )


def _error_number(error: Exception) -> int:
    """Return the errno of an error of the system; 0 for an error of SQLite, which has no errno."""
    return getattr(error, "errno", 0)


def _says_full(error: Exception) -> bool:
    """Return whether the error itself says that the disk, or the user's quota on it, is full."""
    if isinstance(error, sqlite3.Error):
        return "full" in str(error)
    # The message is not searched, because it names a path, which may contain "full".
    return _error_number(error) in (errno.ENOSPC, errno.EDQUOT)


def _file_size_error(error: Exception) -> UserError:
    """Make the error for a file that has reached the largest size that the system allows."""
    return UserError(
        "DISK_FULL",
        f"a file may not grow further, a limit on the size of files is reached: {error}",
        hint="Raise that limit (ulimit -f) where Honesmith is started, then call again; "
        "nothing was stored.",
        retryable=True,
    )


def unusable_error(path: Path, error: Exception) -> UserError:
    """Make the UserError for a database at `path` that cannot be used.

    The code is DISK_FULL if the disk has no room, otherwise HOME_UNUSABLE. The error is retryable
    if another process has the database locked.
    """
    disk_full = disk_full_error(path, error)
    if disk_full is not None:
        return disk_full
    return UserError(
        "HOME_UNUSABLE",
        f"the database {path} cannot be used: {error}",
        hint="Check that the home is writable by this user and not on a network file system.",
        retryable="locked" in str(error) or isinstance(error, TimeoutError),
    )


def damaged_error(home: Home, fault: str, in_use: bool = False) -> UserError:
    """Make the UserError HOME_UNUSABLE for a damaged database.

    Args:
        home: the home with the database.
        fault: what is wrong with the database, in words.
        in_use: whether other processes have the database open, so that it cannot be mended now. If
            so, the error is retryable and names living runs, whose supervisors are such processes.
    """
    if not in_use:
        return UserError(
            "HOME_UNUSABLE",
            f"the database {home.db} is damaged: {fault}",
            hint="Restart the server when the runs under way have ended: it keeps the damaged file "
            "and makes the run list again from the run folders.",
        )
    folders = list(home.runs.iterdir()) if home.runs.is_dir() else []
    living = [path.name for path in folders if is_locked(home.run(path.name).lock)]
    in_use_by = "others have it open"
    if living:
        in_use_by = ", ".join(living[:5]) + " still run(s)"
    return UserError(
        "HOME_UNUSABLE",
        f"the database {home.db} is damaged: {fault}; it is not touched while {in_use_by}",
        hint="Call again when that has ended: the run list is then made again from the run "
        "folders, and the damaged file is kept.",
        retryable=True,
    )
