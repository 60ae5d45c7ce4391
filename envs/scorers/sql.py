"""Judge a SQL query by the rows that it returns from a sqlite file.

The file is opened read-only, and an authorizer allows nothing but reading tables and calling
functions: no attached file, no pragma, no extension. Time, rows and the size of a value are
limited, so that a query which explodes is merely wrong.
"""

import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from envs.rewards import FENCE

SECONDS = 2.0  # time limit of one query
MOST_ROWS = 10_000
MOST_BYTES = 1 << 20  # size limit of one value, and of the query
STEPS = 1000  # instructions of sqlite's virtual machine between two checks of the time
DIGITS = 9  # significant digits to which numbers are compared
_ALLOWED = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)
_FORBIDDEN_FUNCTIONS = ("load_extension", "random", "randomblob")


def sql(
    completion: str, expected: str, database: str | Path, *, ordered: bool | None = None
) -> float:
    """Return 1 if the query in the completion returns the same rows as the query `expected`, else
    0.

    The completion must be a query and nothing else, plain or as one fenced block. Column names are
    ignored, the order of columns is not; numbers are compared to DIGITS digits.

    Args:
        database: a sqlite file, such as `Path(__file__).with_name("shop.sqlite")`.
        ordered: whether the order of the rows counts; with None it does if `expected` contains
            ORDER BY.

    Raises ValueError if `expected` itself cannot be run, and FileNotFoundError if there is no such
    file.
    """
    try:
        target = _rows(expected, database)
    except sqlite3.Error as error:
        raise ValueError(f"the expected query cannot be run: {error}") from error
    try:
        rows = _rows(_query_in(completion), database)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return 0.0
    if ordered is None:
        ordered = "order by" in expected.casefold()
    if ordered:
        return float(rows == target)
    return float(Counter(rows) == Counter(target))


def _query_in(completion: str) -> str:
    """Return the query in a completion, without the fences around it if it is one fenced block.

    Raises ValueError if the query is longer than MOST_BYTES characters.
    """
    text = completion.strip()
    fenced_blocks = FENCE.findall(text)
    # Only a block that is the whole completion: text around it would hide other answers.
    is_one_block = len(fenced_blocks) == 1 and text.startswith("```") and text.endswith("```")
    if is_one_block:
        text = fenced_blocks[0].strip()
    if len(text) > MOST_BYTES:
        raise ValueError("the query is too long")
    return text


def _rows(query: str, database: str | Path) -> list[tuple[Any, ...]]:
    """Run a query on a sqlite file, opened read-only; return its rows, with numbers rounded.

    Raises sqlite3.Error if the query does more than read, takes too long or returns too much, and
    FileNotFoundError if there is no such file.
    """
    path = Path(database).absolute()
    if not path.is_file():
        raise FileNotFoundError(path)
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        connection.set_authorizer(_authorised)
        deadline = time.monotonic() + SECONDS
        # Called after every STEPS instructions of the query, which ends once it returns True.
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        rows = connection.execute(query).fetchmany(MOST_ROWS + 1)  # + 1: to notice too many
    finally:
        connection.close()
    if len(rows) > MOST_ROWS:
        raise sqlite3.DataError(f"more than {MOST_ROWS} rows")
    return [tuple(_rounded(value) for value in row) for row in rows]


def _authorised(action: int, _first: str | None, detail: str | None, *_others: str | None) -> int:
    """Tell sqlite whether it may do something (its authorizer callback): SQLITE_OK for reading and
    for functions that are not random, else SQLITE_DENY.

    `action` is a code such as SQLITE_READ. For a function call `detail` is the function's name; the
    other arguments do not matter here.
    """
    is_forbidden = action == sqlite3.SQLITE_FUNCTION and detail in _FORBIDDEN_FUNCTIONS
    is_allowed = action in _ALLOWED and not is_forbidden
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rounded(value: Any) -> Any:
    """Round a number to DIGITS significant digits, so that sums added in another order are equal.
    Other values are returned unchanged."""
    if not isinstance(value, int | float):
        return value
    return float(f"{value:.{DIGITS}g}")
