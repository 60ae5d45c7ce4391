"""The statistics against scipy, against worked examples in print, and by simulation."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sp

from engine.evidence.stats import inference, power
from engine.evidence.stats.basics import distributions as d
from engine.evidence.stats.inference import Side, paired_verdict


@given(st.floats(-40, 40), st.floats(0.5, 2000))
def test_t_cdf_agrees_with_scipy(t, df):
    assert d.t_cdf(t, df) == pytest.approx(float(sp.t.cdf(t, df)), rel=1e-8, abs=1e-14)


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 2000))
@settings(max_examples=40)
def test_t_quantile_agrees_with_scipy(p, df):
    assert d.t_quantile(p, df) == pytest.approx(float(sp.t.ppf(p, df)), rel=1e-6, abs=1e-9)


@given(
    st.integers(0, 400), st.integers(0, 400), st.floats(1e-9, 1 - 1e-9) | st.sampled_from([0, 1])
)
def test_binomial_probabilities_agree_with_scipy(k, n, p):
    assert d.binomial_cdf(k, n, p) == pytest.approx(float(sp.binom.cdf(k, n, p)), abs=1e-10)
    assert math.exp(d.log_binomial(k, n, p)) == pytest.approx(
        float(sp.binom.pmf(k, n, p)), abs=1e-10
    )


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy(case):
    k, n = case
    theirs = sp.binomtest(k, n).proportion_ci(0.95, method="wilson")
    ours = inference.wilson(k, n)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_wilson_without_data_says_anything_is_possible():
    assert inference.wilson(0, 0) == inference.Interval(0.0, 1.0)


@given(st.integers(0, 300), st.integers(0, 300))
def test_midp_is_the_exact_p_less_the_weight_of_what_was_seen(b, c):
    expected = sp.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    if b != c:
        expected -= float(sp.binom.pmf(min(b, c), b + c, 0.5))
    assert inference.mcnemar_midp(b, c) == pytest.approx(expected, abs=1e-9)
    assert inference.mcnemar_midp(b, c) == inference.mcnemar_midp(c, b)


def test_midp_of_the_example_in_fagerland_2013():
    # Table 2 there: 1 against 7 discordant pairs.
    assert inference.mcnemar_midp(1, 7) == pytest.approx(0.0391, abs=5e-5)


def test_tango_interval_of_the_example_in_fagerland_2014():
    # Table II there (airway hyper-responsiveness, n = 21, 1 against 7): -0.517 to -0.026.
    interval = inference.tango_interval(1, 7, 21)
    assert interval.low == pytest.approx(-0.517, abs=6e-4)
    assert interval.high == pytest.approx(-0.026, abs=6e-4)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.data())
def test_tango_bounds_are_where_the_score_is_at_the_critical_value(case, data):
    b, n = case
    c = data.draw(st.integers(0, n - b))
    low, high = (getattr(inference.tango_interval(b, c, n), side) for side in ("low", "high"))
    assert -1.0 <= low <= (b - c) / n <= high <= 1.0
    mirrored = inference.tango_interval(c, b, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((-high, -low), abs=1e-9)
    z = float(sp.norm.ppf(0.975))
    if -1.0 < low < (b - c) / n and c < n:
        assert inference._tango_score(b, c, n, low) == pytest.approx(z, abs=1e-5)
    if b + c:
        without_correction = abs(b - c) / math.sqrt(b + c)
        clear = abs(without_correction - z) > 1e-6
        excludes = inference.tango_interval(b, c, n).excludes_zero
        assert not clear or excludes == (without_correction > z)


def test_tango_interval_stays_open_when_nothing_changed():
    interval = inference.tango_interval(0, 0, 30)
    assert interval.low < -0.1 and interval.high > 0.1


def test_tango_interval_covers_the_true_difference():
    rng = random.Random(3)
    n, gain, loss = 60, 0.18, 0.06
    covered = 0
    for _ in range(800):
        draws = [rng.random() for _ in range(n)]
        b, c = sum(x < gain for x in draws), sum(x > 1 - loss for x in draws)
        interval = inference.tango_interval(b, c, n)
        covered += interval.low <= gain - loss <= interval.high
    assert 0.93 <= covered / 800 <= 0.975


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_a_p_and_keeps_the_order(p_values):
    adjusted = inference.holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
    by_p = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in by_p] == sorted(adjusted[i] for i in by_p)


def test_holm_of_a_worked_example():
    assert inference.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_bootstrap_interval_agrees_with_t_on_well_behaved_differences():
    rng = random.Random(1)
    diffs = {f"t{i}": [rng.gauss(0.1, 0.3)] for i in range(80)}
    values = [diff[0] for diff in diffs.values()]
    theirs = sp.ttest_1samp(values, 0.0)
    interval = theirs.confidence_interval(0.95)
    boot = inference.paired_bootstrap(diffs, seed=5)
    assert boot.mean == pytest.approx(sum(values) / 80)
    assert (boot.low, boot.high) == pytest.approx((interval.low, interval.high), abs=0.012)
    assert boot.p == pytest.approx(theirs.pvalue, abs=0.01)


def test_bootstrap_is_the_same_for_a_seed_and_any_order_of_tasks():
    rng = random.Random(2)
    diffs = {f"t{i}": [rng.random() - 0.4, rng.random() - 0.4] for i in range(40)}
    backwards = dict(reversed(diffs.items()))
    assert inference.paired_bootstrap(diffs, 7) == inference.paired_bootstrap(backwards, 7)
    assert inference.paired_bootstrap(diffs, 7) != inference.paired_bootstrap(diffs, 8)


def test_repeating_an_attempt_does_not_narrow_the_interval():
    rng = random.Random(4)
    once = {f"t{i}": [rng.gauss(0, 1)] for i in range(30)}
    ten = {task: diff * 10 for task, diff in once.items()}
    a, b = inference.paired_bootstrap(once, 1), inference.paired_bootstrap(ten, 1)
    assert (a.low, a.high) == pytest.approx((b.low, b.high))


def test_bootstrap_interval_covers_the_truth_on_few_skewed_tasks():
    rng = random.Random(6)
    covered = 0
    for trial in range(200):
        diffs = {str(i): [rng.choice([0, 0, 0.25, 0.5, -0.25, 1.0])] for i in range(20)}
        boot = inference.paired_bootstrap(diffs, trial, resamples=400)
        covered += boot.low <= 0.25 <= boot.high
    assert covered / 200 >= 0.90


def test_bootstrap_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        inference.paired_bootstrap({})


@pytest.mark.parametrize(("n", "discordant"), [(100, 30), (200, 60), (400, 159)])
def test_the_smallest_detectable_gap_is_found_with_the_promised_power(n, discordant):
    gap = inference.smallest_detectable_gap(n, discordant)
    assert power.mcnemar_power(n, gap, (discordant + 1) / (n + 1)) == pytest.approx(0.8, abs=0.035)


@given(st.integers(1, 3000), st.integers(0, 300))
def test_more_tasks_never_make_the_smallest_gap_larger(n, extra):
    discordant = n // 3
    here = inference.smallest_detectable_gap(n, discordant)
    there = inference.smallest_detectable_gap(n + extra, discordant)
    assert 0.0 < there <= here + 1e-9 and here <= 1.0


def test_tasks_needed_inverts_the_smallest_gap():
    needed = inference.tasks_needed(0.05, 0.3)
    assert inference.smallest_detectable_gap(needed, round(0.3 * needed) - 1) == pytest.approx(
        0.05, abs=5e-4
    )


def test_power_by_summation_agrees_with_simulation():
    rng = random.Random(8)
    n, gap, share = 120, 0.15, 0.35
    found = 0
    for _ in range(1500):
        b = c = 0
        for _ in range(n):
            x = rng.random()
            b += x < (share + gap) / 2
            c += x > 1 - (share - gap) / 2
        found += b > c and inference.mcnemar_midp(b, c) < 0.05
    assert power.mcnemar_power(n, gap, share) == pytest.approx(found / 1500, abs=0.04)


def test_a_gain_from_50_to_60_percent_on_400_tasks_is_found_four_times_in_five():
    assert power.mcnemar_power(400, 0.10, 0.40) >= 0.80


@given(st.integers(1, 30), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    expected = 1 - math.comb(n - correct, k) / math.comb(n, k)
    assert d.pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-9)


def test_pass_at_k_with_too_few_attempts_is_refused():
    with pytest.raises(ValueError, match="at least 8 attempts, there are 4"):
        d.pass_at_k(4, 2, 8)


def _sides(pairs, errors=(0, 0)):
    before = {f"t{i}": (float(a),) for i, (a, _) in enumerate(pairs)}
    after = {f"t{i}": (float(b),) for i, (_, b) in enumerate(pairs)}
    n = len(pairs)
    return Side(before, n + errors[0], errors[0]), Side(after, n + errors[1], errors[1])


@pytest.mark.timeout(20)
def test_equal_models_are_told_apart_in_five_percent_of_comparisons():
    rng = random.Random(11)
    known = {}  # a verdict on yes/no answers depends on the counts alone
    alarms = 0
    for _ in range(2000):
        draws = [rng.random() for _ in range(200)]
        counts = sum(x < 0.15 for x in draws), sum(x > 0.85 for x in draws)
        if counts not in known:
            b, c = counts
            pairs = [(0, 1)] * b + [(1, 0)] * c + [(1, 1)] * (200 - b - c)
            known[counts] = paired_verdict(*_sides(pairs)).verdict
        alarms += known[counts] in ("better", "worse")
    assert 0.035 <= alarms / 2000 <= 0.065


@pytest.mark.timeout(20)
@pytest.mark.parametrize("discordant", [0.2, 0.3, 0.4])
def test_the_verdict_finds_a_gain_from_50_to_60_percent_on_400_tasks(discordant):
    """Simulated through the whole verdict: 10 points, so half of the rest moved back and forth."""
    rng = random.Random(13)
    gained, lost = (discordant + 0.10) / 2, (discordant - 0.10) / 2
    known = {}
    found = 0
    for _ in range(1000):
        draws = [rng.random() for _ in range(400)]
        counts = sum(x < gained for x in draws), sum(x > 1 - lost for x in draws)
        if counts not in known:
            b, c = counts
            pairs = [(0, 1)] * b + [(1, 0)] * c + [(1, 1)] * (400 - b - c)
            known[counts] = paired_verdict(*_sides(pairs)).verdict
        found += known[counts] == "better"
    assert found / 1000 >= 0.80


@pytest.mark.timeout(20)
def test_equal_rewards_are_told_apart_in_about_five_percent_of_comparisons(monkeypatch):
    monkeypatch.setitem(inference.paired_bootstrap.__kwdefaults__, "resamples", 200)
    rng = random.Random(12)
    alarms = 0
    for trial in range(200):
        pairs = [(rng.choice([0, 0.3, 0.8]), rng.choice([0, 0.3, 0.8])) for _ in range(40)]
        alarms += paired_verdict(*_sides(pairs), seed=trial).verdict in ("better", "worse")
    assert 0.015 <= alarms / 200 <= 0.1


@pytest.mark.parametrize(
    ("gained", "lost", "kept", "verdict"),
    [
        (60, 10, 130, "better"),
        (10, 60, 130, "worse"),
        (10, 10, 380, "no_difference"),
        (20, 18, 62, "inconclusive"),
        (0, 0, 20, "inconclusive"),
        (0, 0, 400, "no_difference"),
    ],
)
def test_the_verdict_follows_the_interval(gained, lost, kept, verdict):
    result = paired_verdict(*_sides([(0, 1)] * gained + [(1, 0)] * lost + [(1, 1)] * kept))
    assert result.verdict == verdict
    assert (len(result.gained), len(result.lost)) == (gained, lost)
    assert result.low <= result.diff <= result.high
    assert result.n == gained + lost + kept


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120))
def test_swapping_the_sides_swaps_the_verdict(pairs):
    before, after = _sides(pairs)
    there, back = paired_verdict(before, after), paired_verdict(after, before)
    swapped = {"better": "worse", "worse": "better"}
    assert back.verdict == swapped.get(there.verdict, there.verdict)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
    assert there.gained == back.lost and there.lost == back.gained
    as_loss = paired_verdict(after, before, higher_is_better=False)
    assert as_loss.verdict == there.verdict and as_loss.gained == there.gained


def test_a_lower_loss_is_better():
    rng = random.Random(9)
    pairs = [(2 + rng.random(), 1 + rng.random()) for _ in range(50)]
    result = paired_verdict(*_sides(pairs), higher_is_better=False)
    assert result.verdict == "better" and result.diff < 0


def test_there_is_no_verdict_above_five_percent_errors():
    pairs = [(0, 1)] * 90
    assert paired_verdict(*_sides(pairs, errors=(0, 4))).verdict == "better"
    result = paired_verdict(*_sides(pairs, errors=(0, 6)))
    assert result.verdict == "unknown"
    assert "6 of 96" in result.reason and result.errors == (0, 6)


def test_there_is_no_verdict_without_shared_tasks():
    result = paired_verdict(Side({"a": (1.0,)}, 1), Side({"b": (1.0,)}, 1))
    assert result.verdict == "unknown" and result.unpaired == 2 and result.diff is None


def test_ten_identical_changes_of_a_reward_are_not_enough_below_ten_tasks():
    result = paired_verdict(*_sides([(0.2, 0.9)] * 9))
    assert result.verdict == "inconclusive" and "too few" in result.reason


def test_attempts_of_a_task_are_averaged_and_stay_one_task():
    before = Side({f"t{i}": (0.0, 0.0, 1.0, 0.0) for i in range(30)}, 120)
    after = Side({f"t{i}": (1.0, 0.0, 1.0, 1.0 * (i % 2)) for i in range(30)}, 120)
    result = paired_verdict(before, after, margin=0.05)
    assert result.n == 30 and result.before == pytest.approx(0.25)
    assert result.verdict == "better" and result.method.startswith("bootstrap")
