"""What may not be queued, check by check."""

import pytest

from engine.admission import check_size, check_words
from engine.errors import UserError
from engine.estimate import DISK_RESERVE


def test_a_full_disk_is_told_with_what_has_to_stay_free():
    figures = {"fits": True, "disk_fits": False, "disk_bytes": 8_400_000}
    with pytest.raises(UserError) as caught:
        check_size(figures, DISK_RESERVE - 1)
    assert caught.value.code == "DISK_FULL" and caught.value.retryable
    assert "8.4 MB" in caught.value.message and "500.0 MB stay free" in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [("note", "x" * 4_001), ("reason", "a\0b"), ("request_id", "x" * 201)],
)
def test_words_that_nobody_could_show_are_refused(name: str, text: str):
    with pytest.raises(UserError) as caught:
        check_words(**{name: text})
    assert caught.value.code == "BAD_ARGUMENT" and caught.value.field == name
    assert caught.value.hint and len(caught.value.message) < 100


def test_words_of_an_ordinary_length_pass():
    check_words(note="x" * 4_000, request_id="try-1", reason="")
