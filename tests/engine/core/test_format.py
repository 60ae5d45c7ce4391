"""Numbers as people say them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.format import decimal, percent, significant


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


@given(st.integers(2, 100_000))
def test_one_error_among_many_is_seen_in_every_form(count: int):
    share = (count - 1) / count
    assert not percent(share).startswith("100")
    assert float(decimal(share)) < 1
    assert float(significant(share)) < 1
