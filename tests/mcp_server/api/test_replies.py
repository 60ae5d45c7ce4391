"""The envelope, the cleaning and the size of results and errors."""

import json

from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import CODES, UserError
from mcp_server.api.replies import (
    ERROR_CHARS,
    RESULT_CHARS,
    clean,
    compact,
    cut_to_size,
    envelope,
    error_line,
    fitting_page,
)

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200)
BRANCH = LEAF | st.lists(LEAF, max_size=6) | st.dictionaries(st.text(max_size=8), LEAF, max_size=6)
JSON = BRANCH | st.lists(BRANCH, max_size=6)


def test_an_envelope_has_the_three_fields_first_and_keeps_the_rest():
    body = envelope({"state": "done", "warnings": ["slow"]}, "It is done.")
    assert list(body) == ["summary", "next", "warnings", "state"]
    assert body["summary"] == "It is done."
    assert body["next"] == []
    assert body["warnings"] == ["slow"]


def test_an_envelope_offers_at_most_three_calls():
    calls = [{"tool": f"t{n}", "arguments": {}} for n in range(9)]
    assert len(envelope({"next": calls}, "s")["next"]) == 3


def test_escapes_and_invisible_characters_leave_a_result():
    dirty = "a\x1b[31mred\x1b[0m\x00b\u202ec\u200bd\U000e0041e\x07\r\nf\tg"
    assert clean({"text": dirty}) == {"text": "aredbcde\nf\tg"}


def test_nulls_leave_objects_and_stay_in_rows():
    assert clean({"a": None, "rows": [[1, None]]}) == {"rows": [[1, None]]}


@given(JSON)
def test_any_value_becomes_one_line_of_strict_json(value):
    line = compact(clean(value))
    assert "\n" not in line
    json.loads(line)
    line.encode("utf-8")


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=8), st.integers(400, 3000))
def test_a_capped_result_fits_and_keeps_its_head(data, size):
    for name in ("summary", "next", "warnings"):
        data.pop(name, None)
    whole = envelope(data, "s")
    body = cut_to_size(whole, size)
    assert len(compact(body)) <= size
    assert list(body)[:3] == ["summary", "next", "warnings"]
    if len(compact(whole)) <= size:
        assert body == whole


def test_a_huge_result_is_cut_and_says_so():
    body = cut_to_size(envelope({"rows": [{"text": "x" * 4000} for _ in range(50)]}, "s"))
    assert len(compact(body)) <= RESULT_CHARS
    assert body["truncated"] is True
    assert "cursor" in body["warnings"][-1]
    assert body["rows"]


def test_a_result_of_countless_fields_still_fits():
    body = cut_to_size(envelope({f"field{n}": n for n in range(5000)}, "s"))
    assert len(compact(body)) <= RESULT_CHARS
    assert body["summary"] == "s"


def test_a_page_that_does_not_fit_is_asked_for_again_with_half_the_rows():
    asked = []

    def page(limit: int) -> dict:
        asked.append(limit)
        return {"rows": ["x" * 900] * limit, "next_cursor": str(limit)}

    reply = fitting_page(page, 40)
    assert asked == [40, 20, 10]
    assert reply["next_cursor"] == "10"


@given(
    st.sampled_from(sorted(CODES)),
    st.text(max_size=3000),
    st.text(max_size=3000),
    st.text(max_size=1200),
    st.booleans(),
)
def test_any_error_is_one_line_of_at_most_a_thousand_characters(code, message, hint, field, again):
    line = error_line(UserError(code, message, hint=hint, field=field, retryable=again))
    assert len(line) <= ERROR_CHARS
    assert "\n" not in line
    payload = json.loads(line)
    assert payload["code"] == code
    assert payload["retryable"] is again


def test_an_error_that_fits_is_said_in_full():
    payload = json.loads(
        error_line(UserError("BUDGET", "too dear", hint="lower steps", field="steps"))
    )
    assert payload == {
        "code": "BUDGET",
        "message": "too dear",
        "field": "steps",
        "hint": "lower steps",
        "retryable": False,
    }


def test_a_long_sentence_is_cut_between_words_and_shows_it():
    text = "keep = 0.35 replayed " * 60
    head = envelope({"summary": text, "warnings": [text, "x" * 900]}, "")
    assert head["summary"].endswith(" ...") and len(head["summary"]) <= 800
    assert text.startswith(head["summary"].removesuffix(" ...") + " ")
    assert [len(warning) <= 400 for warning in head["warnings"]] == [True, True]
    assert envelope({"summary": "short"}, "")["summary"] == "short"
