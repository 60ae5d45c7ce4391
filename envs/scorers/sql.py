"""A query, judged by the rows that it gives on a sqlite file.

The file is opened for reading alone, and an authorizer lets through nothing but reading tables and
calling functions: no attached file, no pragma, no extension. Time, rows and the size of a value are
limited, so that a query which explodes is wrong and nothing else.
"""

import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from envs.rewards import FENCE

SECONDS = 2.0  # of one query
MOST_ROWS = 10_000
MOST_BYTES = 1 << 20  # of one value, and of the query
STEPS = 1000  # of sqlite's machine between two looks at the clock
DIGITS = 9  # to which numbers are compared
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
    """Return 1 if the query in the completion gives the rows of the query `expected`, else 0.

    The completion is a query and nothing else, plain or as one fenced block. Names of columns do
    not matter, their order does; numbers are compared to DIGITS digits.

    Args:
        database: a sqlite file, such as `Path(__file__).with_name("shop.sqlite")`.
        ordered: whether the order of the rows counts; None where `expected` has an ORDER BY.

    Raises ValueError where `expected` itself cannot be run.
    """
    try:
        target = _rows(expected, database)
    except sqlite3.Error as error:
        raise ValueError(f"the expected query cannot be run: {error}") from error
    try:
        rows = _rows(_query_in(completion), database)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return 0.0
    if ordered if ordered is not None else "order by" in expected.casefold():
        return float(rows == target)
    return float(Counter(rows) == Counter(target))


def _query_in(completion: str) -> str:
    """The query of a completion that holds nothing else. Raises ValueError for a longer one."""
    text = completion.strip()
    blocks = FENCE.findall(text)
    if len(blocks) == 1 and text.startswith("```") and text.endswith("```"):
        text = blocks[0].strip()
    if len(text) > MOST_BYTES:
        raise ValueError("the query is too long")
    return text


def _rows(query: str, database: str | Path) -> list[tuple[Any, ...]]:
    """The rows of a query, numbers rounded. Raises sqlite3.Error where it does more than read,
    takes too long or gives too much, and FileNotFoundError without the file."""
    path = Path(database).absolute()
    if not path.is_file():
        raise FileNotFoundError(path)
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        connection.set_authorizer(_authorised)
        deadline = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
        rows = connection.execute(query).fetchmany(MOST_ROWS + 1)
    finally:
        connection.close()
    if len(rows) > MOST_ROWS:
        raise sqlite3.DataError(f"more than {MOST_ROWS} rows")
    return [tuple(_rounded(value) for value in row) for row in rows]


def _authorised(action: int, _first: str | None, second: str | None, *_: str | None) -> int:
    """Whether sqlite may do something: reading, and functions without chance."""
    is_forbidden = action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN_FUNCTIONS
    is_allowed = action in _ALLOWED and not is_forbidden
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _rounded(value: Any) -> Any:
    """A number to DIGITS digits, so that sums in another order are equal; others as they are."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, int | float) else value
