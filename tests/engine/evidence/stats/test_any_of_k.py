"""pass@k of a model and its paired change, against counts by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.stats.any_of_k import change_of_pass_at_k, pass_at_each_k
from engine.evidence.stats.inference import Side, tango_interval, wilson
from engine.evidence.stats.results import level
from engine.evidence.verdict.comparison import compare_rows
from engine.records.lines.evaluation_row import EvaluationRow


def side_of(**tasks: list[float]) -> Side:
    return Side(tasks, attempts=sum(map(len, tasks.values())))


def rows_of(**tasks: list[bool]) -> list[EvaluationRow]:
    return [
        EvaluationRow.of(
            {"task": task, "model": "m", "attempt": i, "reward": float(right), "success": right},
            "test",
        )
        for task, attempts in tasks.items()
        for i, right in enumerate(attempts)
    ]


def test_any_of_k_is_the_share_of_choices_of_k_attempts_with_a_right_one():
    half_right, never = [1.0, 0.0, 0.0, 1.0], [0.0] * 4
    (two, four) = pass_at_each_k(side_of(a=half_right, b=never))
    by_hand = sum(any(pair) for pair in itertools.combinations(half_right, 2)) / 6
    assert (two.k, two.value) == (2, pytest.approx(by_hand / 2))
    assert (four.k, four.value) == (4, pytest.approx(0.5))
    assert four.low <= four.value <= four.high


def test_one_attempt_per_task_has_no_any_of_k():
    assert pass_at_each_k(side_of(a=[1.0], b=[0.0, 1.0])) == []
    assert pass_at_each_k(side_of()) == []


def test_ks_are_powers_of_two_and_the_number_of_attempts():
    assert [each.k for each in pass_at_each_k(side_of(a=[0.0] * 6))] == [2, 4, 6]
    assert [each.k for each in pass_at_each_k(side_of(a=[0.0] * 8, b=[1.0] * 9))] == [2, 4, 8]


def test_the_change_compares_the_tasks_that_both_sides_have():
    before = side_of(a=[0.0, 0.0], b=[1.0, 0.0], gone=[1.0, 1.0])
    after = side_of(a=[1.0, 0.0, 0.0], b=[1.0, 1.0], new=[0.0, 0.0])
    change = change_of_pass_at_k(before, after)
    assert change is not None
    # Of three attempts with one right, two of the three pairs hold it; b was and stays certain.
    assert (change.k, change.value) == (2, pytest.approx((2 / 3 + 0) / 2))


@pytest.mark.parametrize("solved", [0, 2, 5])
def test_few_tasks_that_are_all_solved_or_not_prove_nothing_for_certain(solved: int):
    answers = {f"t{i}": [float(i < solved)] * 4 for i in range(5)}
    two, four = pass_at_each_k(side_of(**answers))
    by_tasks = wilson(solved, 5)
    assert (four.low, four.high) == (two.low, two.high) == (by_tasks.low, by_tasks.high)
    change = change_of_pass_at_k(
        side_of(**{task: [0.0] * 4 for task in answers}), side_of(**answers)
    )
    of_change = tango_interval(solved, 0, 5)
    assert change is not None and (change.low, change.high) == (of_change.low, of_change.high)


@given(st.integers(1, 6), st.integers(0, 4))
def test_an_interval_holds_its_value_and_is_never_a_point(tasks: int, right: int):
    answers = {f"t{i}": [1.0] * right + [0.0] * (4 - right) for i in range(tasks)}
    nothing = {task: [0.0] * 4 for task in answers}
    change = change_of_pass_at_k(side_of(**nothing), side_of(**answers))
    assert change is not None
    for each in (*pass_at_each_k(side_of(**answers)), change):
        assert each.low <= each.value <= each.high and each.high - each.low > 0.1


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=12))
def test_more_attempts_never_find_less(answers: list[list[bool]]):
    tasks = {f"t{i}": [float(right) for right in row] for i, row in enumerate(answers)}
    values = [each.value for each in pass_at_each_k(side_of(**tasks))]
    mean = sum(map(sum, answers)) / (4 * len(answers))
    assert values == sorted(values) and values[0] >= mean - 1e-12
    change = change_of_pass_at_k(side_of(**tasks), side_of(**tasks))
    assert change is not None and change.value == 0


def test_results_of_several_attempts_hold_any_of_k_and_single_ones_do_not():
    rows = rows_of(a=[True, False], b=[False, False])
    assert level(rows, "success").to_json()["pass_at_k"] == [
        {"k": 2, "value": 0.5, "interval": pytest.approx([0, 1], abs=0.3)}
    ]
    assert "pass_at_k" not in level(rows_of(a=[True], b=[False]), "success").to_json()
    assert "pass_at_k" not in level(rows, "reward").to_json()
    compared = compare_rows(rows_of(a=[False, False], b=[False, False]), rows).to_json()
    assert compared["pass_at_k_change"] == {
        "k": 2,
        "value": 0.5,
        "interval": compared["pass_at_k_change"]["interval"],  # type: ignore[index]
    }
