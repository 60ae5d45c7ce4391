"""Constraints on form are counted one by one; nothing at all keeps none of them."""

import pytest

from envs.scorers import instruction_results, instructions

TEXT = "Dear Ada,\n\n- one\n- two\n\nYours."


@pytest.mark.parametrize(
    ("text", "constraints"),
    [
        (TEXT, {"bullets": 2, "paragraphs": 3, "lines": 4, "max_words": 8, "min_words": 7}),
        (TEXT, {"starts_with": "Dear", "ends_with": "Yours.", "includes": ["ada"]}),
        ("One. Two! Three", {"min_sentences": 3, "max_sentences": 3, "no_commas": True}),
        ("cat catalogue Cat", {"counts": {"cat": 2, "dog": 0}, "excludes": ["dog"]}),
        ("all small", {"case": "lower", "is_json": False}),
        ('{"a": 1}', {"is_json": True}),
    ],
)
def test_a_text_that_keeps_all_earns_all(text: str, constraints: dict):
    assert instructions(text, constraints) == 1.0


def test_each_constraint_counts_alike():
    results = instruction_results("a b c", {"max_words": 2, "includes": ["a"]})
    assert results == {"max_words": False, "includes": True}
    assert instructions("a b c", {"max_words": 2, "includes": ["a"]}) == 0.5


@pytest.mark.parametrize("text", ["", " \n"])
def test_saying_nothing_keeps_no_constraint(text: str):
    assert instructions(text, {"max_words": 5, "excludes": ["x"], "no_commas": True}) == 0.0


@pytest.mark.parametrize(
    "constraints", [{}, {"word": 1}, {"max_words": "5"}, {"max_words": True}, {"case": "title"}]
)
def test_a_constraint_that_is_none_is_refused(constraints: dict):
    with pytest.raises(ValueError, match=r"constraint|case"):
        instructions("a", constraints)
