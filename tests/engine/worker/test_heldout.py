"""Which held-out tasks are met, in which half, and what a summary counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker import heldout
from engine.worker.evaluate import learnability, pass_at_k
from engine.worker.trajectory import Group, Trajectory

ids = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=60)


def tasks(names: list[str]) -> list[dict[str, str]]:
    return [{"id": n} for n in names]


@given(ids, st.randoms(use_true_random=False))
def test_the_order_of_the_tasks_depends_on_their_ids_alone(names: list[str], rng) -> None:
    shuffled = names[:]
    rng.shuffle(shuffled)
    assert heldout.ordered(tasks(names), 1000) == heldout.ordered(tasks(shuffled), 1000)


@given(ids, st.integers(1, 60))
def test_asking_for_fewer_tasks_keeps_the_first_and_their_halves(names: list[str], n: int) -> None:
    all_tasks = heldout.ordered(tasks(names), 1000)
    fewer = heldout.ordered(tasks(names), n)
    assert fewer == all_tasks[:n]
    wide, narrow = heldout.halves(all_tasks), heldout.halves(fewer)
    assert all(wide[k] == v for k, v in narrow.items())


@given(ids)
def test_the_halves_differ_by_at_most_one_task(names: list[str]) -> None:
    halves = list(heldout.halves(heldout.ordered(tasks(names), 1000)).values())
    assert abs(halves.count(heldout.SELECT) - halves.count(heldout.REPORT)) <= 1


def play(reward: float, success: bool | None = None, error: str | None = None) -> Trajectory:
    return Trajectory("t", [], [1], reward=reward, success=success, error=error)


def test_errors_count_as_not_solved_and_are_told_apart() -> None:
    summary = heldout.summarise([play(1, True), play(0, False), play(0, None, "boom")])
    assert (summary.n, summary.errors) == (3, 1)
    assert summary.success == 1 / 3
    assert summary.curves()["heldout_reward"] == 1 / 3


def test_without_success_there_is_no_success_curve() -> None:
    assert "heldout_success" not in heldout.summarise([play(0.5)]).curves()


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int, data: st.DataObject) -> None:
    from itertools import combinations

    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    right = [i < c for i in range(n)]
    draws = list(combinations(right, k))
    assert math.isclose(pass_at_k([(n, c)], k), sum(map(any, draws)) / len(draws))


def test_learnability_tells_effective_easy_and_hard_groups_apart() -> None:
    groups = [
        Group("a", [play(1, True), play(0, False)]),
        Group("b", [play(1, True), play(1, True)]),
        Group("c", [play(0, False), play(0, False)]),
        Group("d", [play(0, False), play(0, False)]),
    ]
    found = learnability(groups, 2)
    assert (found["effective"], found["too_easy"], found["too_hard"]) == (0.25, 0.25, 0.5)
    assert found["pass_at_k"] == {"1": pytest.approx(3 / 8), "2": pytest.approx(0.5)}
