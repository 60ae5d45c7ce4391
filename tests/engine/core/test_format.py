"""Numbers as people say them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.format import decimal, percent, significant, whole_percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1999 / 2000, "99.95 %"),
        (1.0, "100.0 %"),
        (0.0, "0.0 %"),
        (0.412, "41.2 %"),
        (0.0002, "0.02 %"),
    ],
)
def test_a_share_in_percent_never_rounds_an_error_away(share: float, text: str):
    assert percent(share) == text


def test_decimals_and_significant_digits_keep_away_from_1():
    assert (decimal(0.31), decimal(0.9995), decimal(1.0), decimal(0.0)) == (
        "0.310",
        "0.9995",
        "1.000",
        "0.000",
    )
    assert (significant(0.41234), significant(0.9996), significant(1.0004)) == (
        "0.412",
        "0.9996",
        "1",
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.414, "41%"), (1.0, "100%"), (0.0, "0%"), (1995 / 2000, "99.8%"), (1 / 3000, "0.03%")],
)
def test_a_whole_percent_is_all_or_none_only_where_it_is(share: float, text: str):
    assert whole_percent(share) == text


def test_no_sentence_for_people_rounds_a_share_by_itself():
    """Every share that is printed goes through engine/core/format.py, which keeps an error."""
    folders = [Path(__file__).parents[3] / name for name in ("engine", "mcp_server")]
    by_themselves = [
        f"{file.name}: {line.strip()}"
        for folder in folders
        for file in folder.rglob("*.py")
        for line in file.read_text("utf-8").splitlines()
        if re.search(r":\.\d%\}", line)
    ]
    assert by_themselves == []


@given(st.integers(2, 100_000))
def test_one_error_among_many_is_seen_in_every_form(count: int):
    share = (count - 1) / count
    assert not percent(share).startswith("100")
    assert not whole_percent(share).startswith("100")
    assert float(whole_percent(1 - share).rstrip("%")) > 0
    assert float(decimal(share)) < 1
    assert float(significant(share)) < 1
