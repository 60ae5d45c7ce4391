"""The table of docs/reliability.md has every row once, and every test it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [f"{kind}{n}" for kind, last in (("F", 28), ("I", 9), ("A", 33)) for n in range(1, last + 1)]
NAMED = re.compile(r"`?(tests/[\w/]+\.py)(?:::(\w+))?`?")


def table() -> dict[str, list[str]]:
    """The cells of each row by its id."""
    text = (ROOT / "docs/reliability.md").read_text("utf-8").partition("## The fault table")[2]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        # A pipe inside a cell is written \|.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"[FIA]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands twice"
            found[cells[0]] = cells
    return found


@cache
def functions(path: str) -> set[str]:
    module = ast.parse((ROOT / path).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(module) if isinstance(node, kinds)}


def test_every_row_stands_once_with_what_holds_and_where_it_is_shown():
    rows = table()
    assert list(rows) == ROWS and len(ROWS) == 70
    assert [row for row, cells in rows.items() if len(cells) != 4] == []
    assert [row for row, cells in rows.items() if not cells[2] or not cells[3]] == []


def test_every_test_that_is_named_exists():
    for row, cells in table().items():
        for path, name in NAMED.findall(cells[3]):
            assert (ROOT / path).is_file(), f"{row} names {path}"
            assert not name or name in functions(path), f"{row} names {path}::{name}"


def test_a_row_without_a_test_says_so_in_a_sentence():
    for row, cells in table().items():
        assert NAMED.search(cells[3]) or len(cells[3].split()) >= 6, f"{row}: {cells[3]!r}"
