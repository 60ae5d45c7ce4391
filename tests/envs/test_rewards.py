"""Scorers read the final answer strictly and pay nothing for hedging."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rewards import (
    choice,
    combine,
    exact,
    f1,
    final_answer,
    json_schema,
    json_value,
    last_number,
    length,
    number,
    parse_number,
    regex,
)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("It is so.\n#### 7", "7"),
        ("#### 6\nno, #### 7", "7"),
        ("Answer: 7", "7"),
        ("The answer is 7.", "7."),
        ("the final answer is: 7", "7"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<think>8</think><answer> 7 </answer>", "7"),
        ("\\boxed{7} or 8", "7} or 8"),
        ("answering 7", "answering 7"),
    ],
)
def test_the_final_answer_is_what_stands_last(completion: str, answer: str):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    "completion",
    ["7", " 7.\n", "7.0", "+7", "$7", "14/2", "#### 7", "so the answer is 7.", "\\boxed{7}", "07"],
)
def test_a_number_is_recognised_in_its_usual_forms(completion: str):
    assert number(completion, 7) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "8",
        "not 7",
        "#### not 7",
        "7 8",
        "6, 7, 8",
        "7\n8",
        "#### 7\n#### 8",
        "It could be 7 or something else",
        "The answer is not 7.",
        "7 apples",
        "seven",
        "--7",
        "7/0",
        "1e999999999",
        "\\boxed{7} or 8",
    ],
)
def test_a_number_that_is_wrong_denied_or_one_of_many_is_not_paid(completion: str):
    assert number(completion, 7) == 0.0


@given(st.integers(-(10**12), 10**12))
def test_every_whole_number_is_its_own_answer_and_its_neighbour_is_not(n: int):
    assert number(f"Answer: {n:,}", str(n)) == 1.0
    assert number(str(n + 1), n) == 0.0
    assert last_number(f"about {n}.") == n


@given(st.fractions(-(10**9), 10**9, max_denominator=10**6))
def test_fractions_are_exact(value: Fraction):
    assert parse_number(f"{value.numerator}/{value.denominator}") == value


def test_tolerance_is_relative():
    assert number("3.14", "3.14159", tolerance=0.001) == 1.0
    assert number("3.1", "3.14159", tolerance=0.001) == 0.0
    with pytest.raises(ValueError, match="no number"):
        number("3", "three")


def test_last_number_reads_and_does_not_judge():
    assert last_number("not 7") == 7
    assert last_number("1,200.5 and -3") == -3
    assert last_number("none") is None


def test_exact_forgives_white_space_only():
    assert exact(" a  b\n", "a b") == 1.0
    assert exact("A b", "a b") == 0.0
    assert exact("A b", "a b", ignore_case=True) == 1.0
    assert exact("a b.", "a b") == 0.0


@pytest.mark.parametrize("completion", ["B", "(b)", "B.", "b)", "Answer: B", "\\boxed{B}"])
def test_a_choice_is_one_letter(completion: str):
    assert choice(completion, "B") == 1.0


@pytest.mark.parametrize("completion", ["A", "B or C", "A, B, C, D", "not B", "E", "", "B C"])
def test_another_letter_or_several_are_not_paid(completion: str):
    assert choice(completion, "B") == 0.0


def test_a_choice_may_be_given_by_its_text():
    options = {"A": "Oslo", "B": "Rome."}
    for said in ("B) Rome", "rome", "Rome.", "Answer: (B) Rome"):
        assert choice(said, "B", options) == 1.0
    for said in ("A) Rome", "Rome or Oslo", "B) Oslo"):
        assert choice(said, "B", options) == 0.0


def test_a_pattern_has_to_match_as_a_whole():
    assert regex(" ab12 ", r"[a-z]+\d+") == 1.0
    assert regex("ab12!", r"[a-z]+\d+") == 0.0
    assert regex("n=12", r"n=(\d+)", "12") == 1.0
    assert regex("n=13", r"n=(\d+)", "12") == 0.0


def test_json_is_the_whole_completion_or_one_fenced_block():
    assert json_value(' {"a": 1} ') == {"a": 1}
    assert json_value('```json\n{"a": 1}\n```') == {"a": 1}
    for wrong in ('so {"a": 1}', '{"a": NaN}', "```\n1\n```\n```\n2\n```", "", "[" * 99_999):
        with pytest.raises(ValueError):
            json_value(wrong)
    schema = {"type": "object", "required": ["a"]}
    assert json_schema('{"a": 1}', schema) == 1.0
    assert json_schema('{"b": 1}', schema) == json_schema("a", schema) == 0.0


def test_f1_is_the_overlap_of_words():
    assert f1("the cat sat", "a cat sat") == 1.0
    assert f1("cat dog", "cat") == pytest.approx(2 / 3)
    assert f1("dog", "cat") == 0.0
    assert f1("", "") == 1.0 and f1("", "cat") == 0.0


@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_and_between_zero_and_one(a: str, b: str):
    assert 0.0 <= f1(a, b) <= 1.0
    assert f1(a, b) == pytest.approx(f1(b, a))


def test_length_falls_outside_its_bounds():
    assert [length("w " * n, at_most=4) for n in (0, 4, 5, 6, 8, 99)] == [1, 1, 0.75, 0.5, 0, 0]
    assert length("w", at_most=4, at_least=4) == 0.0
    assert length("w w w", at_most=4, at_least=4) == 0.5
    assert length("abcd", at_most=2, unit="characters") == 0.0
    with pytest.raises(ValueError):
        length("a", at_most=0)
    with pytest.raises(ValueError):
        length("a", at_most=3, unit="pages")


def test_parts_are_weighed_and_become_metrics():
    score = combine({"right": (3.0, 1.0), "short": (1.0, 0.5)})
    assert score.reward == pytest.approx(0.875)
    assert score.metrics == {"right": 1.0, "short": 0.5} and score.success is False
    assert combine({"right": (1.0, 1.0)}).success is True


def test_without_a_required_part_nothing_is_paid():
    score = combine({"right": (1.0, 0.5), "short": (9.0, 1.0)}, require=("right",))
    assert (score.reward, score.success) == (0.0, False)
    score = combine({"right": (1.0, 1.0), "short": (1.0, 0.0)}, require=("right",))
    assert (score.reward, score.success) == (0.5, True)


@pytest.mark.parametrize("parts", [{}, {"a": (0.0, 1.0)}, {"a": (-1.0, 1.0)}, {"b": (1.0, 1.0)}])
def test_parts_that_cannot_be_weighed_are_refused(parts: dict):
    with pytest.raises(ValueError):
        combine(parts, require=("a",))
