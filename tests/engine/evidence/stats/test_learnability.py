"""Tasks of known difficulty: what the probe says about them is known beforehand."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.stats.learnability import (
    Sample,
    learnability,
    share_that_differs,
    success_to_start,
    teaching_share,
)
from engine.records.run_result import AnswerLengths, FailedScores


def answers(*rewards: float, text: str | None = None, **more) -> list[Sample]:
    return [
        Sample(reward, success=reward == 1.0, text=text or str(i), **more)
        for i, reward in enumerate(rewards)
    ]


def drawn(rates: list[float], n: int, seed: int) -> list[list[Sample]]:
    rng = random.Random(seed)
    return [answers(*(float(rng.random() < rate) for _ in range(n))) for rate in rates]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8), st.data())
def test_up_to_the_samples_taken_the_share_is_counted_over_all_groups(rewards, data):
    size = data.draw(st.integers(2, len(rewards)))
    groups = list(combinations(rewards, size))
    expected = sum(len(set(group)) > 1 for group in groups) / len(groups)
    assert math.isclose(teaching_share([answers(*rewards)], size), expected, abs_tol=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 12, 16])
def test_tasks_of_known_difficulty_give_the_known_share_of_groups(size):
    rates = [0.0] * 100 + [0.1] * 100 + [0.5] * 100 + [1.0] * 100
    expected = sum(1 - rate**size - (1 - rate) ** size for rate in rates) / len(rates)
    found = teaching_share(drawn(rates, 8, seed=3), size)
    # Beyond the 8 samples taken it is extrapolated, here over tasks that are no smooth population.
    assert found == pytest.approx(expected, abs=0.05 if size <= 8 else 0.1)


def test_what_never_differed_is_not_said_to_differ_in_larger_groups():
    assert teaching_share([answers(*[0.0] * 4)] * 9, 16) == 0.0
    assert teaching_share([answers(*[1.0] * 4)] * 9, 16) == 0.0


def test_shares_come_with_their_intervals():
    groups = [answers(1, 0), answers(1, 1), answers(0, 0), answers(0, 0)]
    found = learnability(groups, 2, max_tokens=32)
    assert (found.effective, found.too_easy, found.too_hard) == (0.25, 0.25, 0.5)
    low, high = found.intervals["effective"]
    assert (low, high) == (pytest.approx(0.0456, abs=1e-3), pytest.approx(0.6994, abs=1e-3))
    assert found.pass_at_k == {"1": pytest.approx(3 / 8), "2": pytest.approx(0.5)}
    assert found.summary.startswith("25% of 4 tasks (5% to 70%)")


def levers(groups, n=8, max_tokens=32) -> list[str]:
    return [item.lever for item in learnability(groups, n, max_tokens).advice]


def test_the_advice_names_the_lever():
    half = [answers(*[1.0, 0.0] * 4)] * 10
    assert levers(half) == ["group_size"], "smaller groups would do"
    never = [answers(*[0.0] * 8)]
    always = [answers(*[1.0] * 8)]
    assert levers(never * 19 + half[:1])[0] == "sft"
    assert levers(always * 19 + half[:1])[0] == "data"
    assert levers(never * 5 + half[:5])[0] == "curriculum"
    assert levers(always * 5 + half[:5])[0] == "curriculum"


def test_rare_successes_ask_for_larger_groups():
    rare = drawn([0.08] * 60, 4, seed=5)
    found = learnability(rare, 4, 32)
    said = {item.lever: item.say for item in found.advice}
    assert "group_size 16 would give" in said["group_size"] or "group_size 12" in said["group_size"]
    assert found.gradient_share["16"] > 2 * found.gradient_share["4"]


def test_answers_cut_at_the_limit_and_answers_all_alike_are_named():
    cut = [answers(1.0, 0.0, 0.0, 0.0, tokens=32, cut=True)] * 10
    found = learnability(cut, 4, max_tokens=32)
    assert found.advice[0].lever == "max_tokens" and "64" in found.advice[0].say
    assert found.length == AnswerLengths(p50=32, p95=32, max_tokens=32)
    alike = [answers(*[0.0] * 8, text="7")] * 6 + [answers(1.0, *[0.0] * 7, text="7")] * 4
    assert "temperature" in levers(alike)


def test_failed_scores_are_never_solved_and_never_silent():
    broken = [[*answers(1.0, 1.0), Sample(0.0, error=True)]] * 4
    found = learnability(broken, 3, 32)
    assert (found.effective, found.too_easy, found.too_hard) == (0.0, 0.0, 0.0)
    assert found.pass_at_k["1"] == pytest.approx(2 / 3)
    assert found.error_share == pytest.approx(1 / 3)
    assert found.failed_scores == FailedScores(failed=4, of=12)
    assert found.summary.startswith("Not ready: 33% of the scores failed")
    assert [item.lever for item in found.advice] == ["score"]


def test_a_few_failed_scores_stand_before_the_other_advice():
    groups = [answers(*[0.0] * 8)] * 9 + [[*answers(*[0.0] * 7), Sample(0.0, error=True)]]
    found = learnability(groups, 8, 32)
    assert found.summary.startswith("1% of the scores failed; ")
    assert [item.lever for item in found.advice][:2] == ["score", "sft"]


def test_what_is_left_beside_failed_scores_is_called_neither_solved_nor_too_hard():
    groups = [[*answers(*[1.0] * 9), Sample(0.0, error=True)]] * 4
    assert [item.lever for item in learnability(groups, 10, 32).advice] == ["score"]


def test_the_success_from_which_groups_differ_is_that_of_a_quarter_of_them():
    assert success_to_start(8) == pytest.approx(0.0353, abs=1e-4)  # 1 - 0.75 ** (1 / 8)
    assert success_to_start(4) > success_to_start(16)
    assert share_that_differs(success_to_start(8), 8) == pytest.approx(0.25, abs=1e-6)
    assert share_that_differs(0.5, 2) == 0.5 and share_that_differs(1.0, 8) == 0.0
