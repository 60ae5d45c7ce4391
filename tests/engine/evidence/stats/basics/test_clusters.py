"""Groups of tasks as witnesses: the numbers by hand, and by simulation."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.basics.distributions import normal_quantile, t_quantile
from engine.evidence.stats.bootstrap import paired_bootstrap
from engine.evidence.stats.inference import Side, mcnemar_midp, paired_verdict


def side(values: dict[str, float], groups: dict[str, str]) -> Side:
    return Side({task: [value] for task, value in values.items()}, len(values), groups=groups)


def test_tasks_without_a_group_in_common_are_no_clusters():
    assert Clusters.from_groups(["a", "b"], {}) is None
    assert Clusters.from_groups(["a", "b"], {"a": "x", "b": "y"}) is None


def test_a_task_without_a_group_is_one_of_its_own_even_if_a_group_has_its_name():
    clusters = Clusters.from_groups(["a", "b", "c", "d"], {"a": "x", "b": "x", "c": "d"})
    assert clusters is not None
    assert sorted(map(list, clusters.members)) == [["a", "b"], ["c"], ["d"]]


def test_the_design_effect_is_what_the_formula_says_by_hand():
    # Mean 0.5. Sums of (value - mean) by group: 1.0, -1.0, 0.0; squares 2.0 together. Over tasks:
    # six times 0.25. 2.0 / 1.5 * 3 / 2 = 2.
    values = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 1.0, "f": 0.0}
    clusters = Clusters([["a", "b"], ["c", "d"], ["e", "f"]])
    widening = (t_quantile(0.975, 2) / normal_quantile(0.975)) ** 2
    assert clusters.design_effect(values) == pytest.approx(2 * widening)


def test_groups_whose_tasks_are_all_alike_count_as_one_task_each():
    clusters = Clusters([[f"{group}{n}" for n in range(5)] for group in range(2000)])
    values = {task: 1.0 for tasks in clusters.members for task in tasks}
    assert clusters.design_effect(values) == pytest.approx(5, rel=0.01)


def test_p_is_the_t_test_over_the_sums_of_the_groups():
    clusters = Clusters([["a", "b"], ["c"], ["d"]])
    # Sums 2, 1, 0: 3 / sqrt(5) with 2 degrees of freedom, p = 1 - t / sqrt(t * t + 2).
    t = 3 / math.sqrt(5)
    p = clusters.p_of_mean({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
    assert p == pytest.approx(1 - t / math.sqrt(t * t + 2))


def test_one_group_says_nothing():
    groups = dict.fromkeys("abcdefghijkl", "x")
    verdict = paired_verdict(
        side(dict.fromkeys(groups, 0.0), groups), side(dict.fromkeys(groups, 1.0), groups)
    )
    assert (verdict.verdict, verdict.groups) == ("inconclusive", 1)
    assert (verdict.low, verdict.high, verdict.p) == (-1.0, 1.0, 1.0)
    assert verdict.reason == "12 tasks are of 1 groups, too few to tell (at least 10)"


@given(st.lists(st.integers(1, 5), min_size=12, max_size=30), st.integers(0, 10_000))
def test_the_order_of_the_tasks_does_not_matter(sizes: list[int], seed: int):
    rng = random.Random(seed)
    groups = {f"{g}-{n}": str(g) for g, size in enumerate(sizes) for n in range(size)}
    after = {task: float(rng.random() < 0.6) for task in groups}
    before = {task: float(rng.random() < 0.4) for task in groups}
    shuffled = rng.sample(list(groups), len(groups))
    one = paired_verdict(side(before, groups), side(after, groups))
    other = paired_verdict(
        side({t: before[t] for t in shuffled}, {t: groups[t] for t in shuffled}),
        side({t: after[t] for t in shuffled}, groups),
    )
    assert one.verdict == other.verdict
    assert one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((other.low, other.high))


def no_change(rng: random.Random, group_count: int, size: int, share: float):
    """Two equal models on groups whose tasks are gained or lost together with the chance `share`:
    (the groups of the tasks, the changes)."""
    groups, before, after = {}, {}, {}
    for group in range(group_count):
        common = rng.choice([-1, 0, 1])
        for n in range(size):
            task = f"{group}-{n}"
            change = common if rng.random() < share else rng.choice([-1, 0, 1])
            groups[task] = str(group)
            before[task], after[task] = float(change < 0), float(change > 0)
    return groups, before, after


def test_two_equal_models_differ_in_about_one_of_twenty_samples_by_group_and_far_more_by_task():
    rng = random.Random(1)
    samples = 300
    by_group = by_task = covered = 0
    for _ in range(samples):
        groups, before, after = no_change(rng, group_count=20, size=8, share=0.8)
        verdict = paired_verdict(side(before, groups), side(after, groups))
        assert verdict.low is not None and verdict.high is not None
        by_group += verdict.verdict in ("better", "worse")
        covered += verdict.low <= 0 <= verdict.high
        gained = sum(after[t] > before[t] for t in groups)
        lost = sum(after[t] < before[t] for t in groups)
        by_task += mcnemar_midp(gained, lost) < 0.05
    assert by_group / samples <= 0.08
    assert covered / samples >= 0.92
    assert by_task / samples > 0.25


def test_the_bootstrap_by_group_covers_where_the_one_by_task_does_not():
    rng = random.Random(2)
    samples = 80
    by_group = by_task = 0
    for _ in range(samples):
        clusters = Clusters([[f"{g}-{n}" for n in range(6)] for g in range(25)])
        values = {
            task: [common + rng.gauss(0, 0.3)]
            for tasks in clusters.members
            for common in [rng.gauss(0, 1)]
            for task in tasks
        }
        grouped = paired_bootstrap(values, resamples=200, clusters=clusters)
        plain = paired_bootstrap(values, resamples=200)
        by_group += grouped.low <= 0 <= grouped.high
        by_task += plain.low <= 0 <= plain.high
    assert by_group / samples >= 0.90
    assert by_task / samples < 0.75


def test_a_change_of_every_group_is_seen():
    rng = random.Random(3)
    groups = {f"{g}-{n}": str(g) for g in range(30) for n in range(4)}
    before = {task: float(rng.random() < 0.3) for task in groups}
    after = {task: float(rng.random() < 0.8) for task in groups}
    verdict = paired_verdict(side(before, groups), side(after, groups))
    assert (verdict.verdict, verdict.groups, verdict.n) == ("better", 30, 120)
    assert verdict.method.startswith("by group")
