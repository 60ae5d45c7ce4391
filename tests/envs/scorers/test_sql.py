"""A query is judged by its rows, and can do nothing but read."""

import sqlite3
from pathlib import Path

import pytest

from envs.scorers import sql

EXPECTED = "SELECT name, price FROM items WHERE price > 1 ORDER BY price"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop ?#.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE items (name TEXT, price REAL)")
        connection.executemany(
            "INSERT INTO items VALUES (?, ?)", [("tea", 2.5), ("bun", 0.5), ("jam", 4.0)]
        )
    connection.close()
    return path


@pytest.mark.parametrize(
    "query",
    [
        EXPECTED,
        "```sql\nselect name as n, price * 1.0 from items where price > 1 order by price;\n```",
        "SELECT name, sum(price) FROM items WHERE price > 1 GROUP BY name ORDER BY 2",
    ],
)
def test_the_same_rows_are_paid_however_they_are_asked_for(shop: Path, query: str):
    assert sql(query, EXPECTED, shop) == 1.0


@pytest.mark.parametrize(
    "query",
    [
        "",
        "SELECT name FROM items",
        "SELECT name, price FROM items WHERE price > 1 ORDER BY price DESC",
        f"{EXPECTED}; {EXPECTED}",
        f"Here it is: {EXPECTED}",
        "DELETE FROM items",
        "ATTACH '/etc/passwd' AS other",
        "PRAGMA table_info(items)",
        "SELECT load_extension('x'), 1",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*), 1 FROM n",
        "SELECT zeroblob(2000000000), 1",
    ],
)
def test_other_rows_and_everything_but_reading_are_not_paid(shop: Path, query: str):
    assert sql(query, EXPECTED, shop) == 0.0
    assert sql(EXPECTED, EXPECTED, shop) == 1.0  # nothing was changed


def test_without_an_order_the_rows_may_come_in_any(shop: Path):
    backwards = "SELECT name, price FROM items ORDER BY price DESC"
    assert sql(backwards, "SELECT name, price FROM items", shop) == 1.0
    assert sql(backwards, "SELECT name, price FROM items", shop, ordered=True) == 0.0


def test_an_expected_query_that_does_not_run_is_a_fault_of_the_environment(shop: Path):
    with pytest.raises(ValueError, match="expected query"):
        sql("SELECT 1", "SELECT nothing FROM nowhere", shop)
