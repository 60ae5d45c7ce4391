"""Every detector against seeded troubles it was not tuned on, and against healthy runs."""

import ast
import json
import math
import random
from pathlib import Path

import pytest
from replayed import replay
from simulated import exam_records, rollout_records
from troubled import TROUBLES, healthy

from engine.core.hints import Change
from engine.evidence.detect.alerts import Watch
from engine.evidence.detect.baseline import compared_with_start
from engine.evidence.detect.detectors import DETECTORS, IDS, find_all, not_judged
from engine.evidence.detect.findings import ORDER, Finding, edit_lever, ranked, setting_lever
from engine.evidence.detect.views import Facts, View, is_pleased_and_wrong, view_of
from engine.evidence.stats import text_metrics, thresholds
from engine.evidence.stats.trends import level_if_lasting, trend
from engine.home.run_dir import RunDir
from engine.records.known_settings import KnownSettings
from engine.records.settings import SCHEMAS
from playbook import sections

# Thresholds were settled on seeds below 2,000 and are frozen; these are others. `make test` takes
# three of them, `make evidence` thirty-five more.
SEEDS = [
    pytest.param(range(2000, 2003), id="three"),
    pytest.param(range(2005, 2040), id="thirty-five", marks=pytest.mark.evidence),
]
EIGHT_SEEDS = [
    pytest.param(range(2001, 2003), id="two"),
    pytest.param(range(2001, 2009), id="eight", marks=pytest.mark.evidence),
]
RECALL = 0.9


def enough(seeds: range | list[int]) -> int:
    """How many of `seeds` must be hit: nine of ten, and all but one of a few."""
    return min(len(seeds) - 1, math.ceil(RECALL * len(seeds)))


# --- recall and false alarms --------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_planted_trouble_is_found_and_named_first(trouble: str, seeds: range):
    found = [[finding.id for finding in find_all(TROUBLES[trouble](s).facts())] for s in seeds]
    hits = sum(trouble in ids for ids in found)
    first = sum(ids[:1] == [trouble] for ids in found)
    assert hits >= enough(seeds), found
    assert first >= enough(seeds), found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seeds", SEEDS)
def test_healthy_runs_are_left_in_peace(seeds: range):
    found = {s: [f.id for f in find_all(healthy(s).facts())] for s in seeds}
    alarms = {seed: ids for seed, ids in found.items() if ids}
    assert len(alarms) <= len(seeds) - enough(seeds), alarms


@pytest.mark.timeout(20)
@pytest.mark.parametrize("seeds", SEEDS)
def test_healthy_runs_raise_no_alert_on_their_way(tmp_path: Path, seeds: range):
    alarms = {s: raised for s in seeds if (raised := replay(healthy(s), tmp_path))}
    assert len(alarms) <= len(seeds) - enough(seeds), alarms


@pytest.mark.parametrize("seeds", EIGHT_SEEDS)
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("trouble", "by"),
    [
        ("uniform_groups", 9),
        ("too_hard", 9),
        ("truncation", 9),
        ("reward_errors", 9),
        ("slow_reward", 9),
        ("judge_pleasing", 40),
        ("reward_hacking", 60),
        ("repetition", 60),
        ("reward_falls", 10),
        ("plateau", 40),
        ("solved", 60),
    ],
)
def test_an_alert_comes_while_there_is_time_to_stop(
    trouble: str, by: int, seeds: range, tmp_path: Path
):
    """Before step `by`; for the signals of groups before `no_signal` would end the run at ten."""
    steps = [
        min(
            [step for step, found in replay(TROUBLES[trouble](s), tmp_path) if found == trouble],
            default=10**6,
        )
        for s in seeds
    ]
    assert sum(step <= by for step in steps) >= len(seeds) - 1, steps


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_run_cries_at_every_step(trouble: str, tmp_path: Path):
    raised = [found for _, found in replay(TROUBLES[trouble](2002), tmp_path)]
    assert all(raised.count(found) <= 2 for found in raised), raised


def paid_run(right: float, wrong: tuple[float, float], longer: float) -> Facts:
    """30 steps in which success rises from 0.3 to 0.6 and answers grow `longer`; a right answer
    earns `right` more than a wrong one, which earns `wrong` at the start and at the end."""
    lines, views = [], []
    for step in range(1, 31):
        way = step / 30
        solved = 0.3 + 0.3 * way + 0.01 * (-1) ** step
        pays = wrong[0] + (wrong[1] - wrong[0]) * way
        views.append(
            View(
                step,
                64,
                solved_share=solved,
                wrong_reward=pays,
                right_reward=pays + right,
                mean_tokens=10 * (1 + (longer - 1) * way),
            )
        )
        lines.append({"step": step, "reward_mean": pays + right * solved})
    return Facts("grpo", KnownSettings(), lines, views)


@pytest.mark.parametrize(
    ("right", "wrong", "longer", "found"),
    [
        (0.2, (0.1, 0.8), 2.0, ["reward_hacking"]),  # the exploit is most of what is paid
        (0.2, (0.1, 0.8), 1.0, []),  # and nothing in the answers shows that it is one
        (1.0, (0.0, 0.0), 2.0, []),  # longer answers, all of them paid for being right
        (0.6, (0.0, 0.25), 2.0, []),  # paid part of the way, and never half of the whole
        (0.9, (0.8, 0.95), 2.0, []),  # wrong answers were paid well from the start
    ],
)
def test_a_reward_that_rises_mostly_for_wrong_answers_is_told_from_one_that_is_earned(
    right: float, wrong: tuple[float, float], longer: float, found: list[str]
):
    said = find_all(paid_run(right, wrong, longer))
    assert [finding.id for finding in said] == found
    if said:
        assert said[0].evidence["signals"] == ["longer", "wrong_paid"]
        assert said[0].where == "success == False"


@pytest.mark.timeout(20)
def test_pay_for_part_of_the_way_is_no_exploit():
    """Healthy worlds whose wrong answers are paid more and grow longer while they get better."""
    seeds = [seed for seed in range(2000, 2200) if seed % 7 == 6 and seed % 3 != 2][:15]
    alarms = {
        seed: ids for seed in seeds if (ids := [f.id for f in find_all(healthy(seed).facts())])
    }
    assert len(alarms) <= len(seeds) - enough(seeds), alarms


# --- what a finding says ----------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_finding_has_numbers_one_lever_and_a_section_that_exists(trouble: str):
    for seed in range(2000, 2002):
        run = TROUBLES[trouble](seed)
        found = [finding for finding in find_all(run.facts()) if finding.id == trouble]
        if not found:
            continue
        (finding,) = found
        assert finding.playbook in dict(sections())
        assert finding.numbers and len(finding.what) < 320
        json.dumps([finding.numbers, finding.lever.to_json()], allow_nan=False)
        if finding.lever.setting:
            assert finding.lever.setting in SCHEMAS[run.algorithm].model_fields
            assert finding.lever.to != finding.lever.now
            if finding.lever.setting in run.settings:
                assert finding.lever.now == run.settings[finding.lever.setting]
        else:
            assert finding.lever.edit


def test_every_id_has_a_place_in_the_order_and_a_detector():
    assert sorted(IDS) == sorted(ORDER) == sorted(TROUBLES)
    assert len(set(IDS)) == len(IDS) == len(DETECTORS)


def test_every_threshold_says_why():
    source = Path(thresholds.__file__).read_text("utf-8")
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            above = [lines[node.lineno - 2]]
            while above[0].startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")):
                above.insert(0, lines[node.lineno - 2 - len(above)])
            assert above[0].startswith("# "), lines[node.lineno - 1]


def test_thresholds_are_used():
    folder = Path(thresholds.__file__).parents[1]
    text = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    for name in vars(thresholds):
        if name.isupper():
            assert f"limits.{name}" in text, name


def test_a_known_cause_comes_before_what_usually_stands_higher():
    plain = Finding("truncation", "cut", {}, edit_lever("x"))
    cause = Finding("uniform_groups", "alike", {}, edit_lever("x"), is_cause=True)
    errors = Finding("reward_errors", "raise", {}, edit_lever("x"), is_cause=True)
    machine = Finding("infra", "disk", {}, edit_lever("x"))
    assert ranked([plain, cause, machine, errors]) == [machine, errors, cause, plain]


def test_a_lever_is_what_to_change_in_the_call_and_reads_as_it_always_did():
    grown = setting_lever("max_tokens", 16, 32, "answers are cut")
    assert grown.hint.change == Change(settings={"max_tokens": 32})
    assert grown.words() == "max_tokens = 32 (answers are cut)"
    assert grown.to_json() == {
        "setting": "max_tokens",
        "now": 16,
        "to": 32,
        "why": "answers are cut",
    }
    unknown = setting_lever("max_turns", None, None)
    assert unknown.to_json() == {"setting": "max_turns", "now": None, "to": None}
    assert unknown.hint.change == Change()
    assert setting_lever("rows", 100, 400).hint.change == Change(arguments={"rows": 400})
    assert edit_lever("harder tasks").to_json() == {"edit": "harder tasks"}


@pytest.mark.parametrize(("after", "is_told"), [(1.0, False), (2.0, False), (3.0, True)])
def test_an_alert_is_told_at_the_end_only_if_the_loss_rose(after: float, is_told: bool):
    sides = [
        exam_records([{"task": f"t-{i}", "loss": loss + i / 100} for i in range(40)])
        for loss in (2.0, after)
    ]
    against_start = compared_with_start(*sides, 5, 1)
    assert against_start.measure == "loss"
    alert = Finding("truncation", "Answers are cut.", {}, edit_lever("shorter answers"))
    facts = Facts(
        "sft",
        KnownSettings(),
        comparison=against_start.comparison,
        against_start=against_start,
        alerts=[alert],
    )
    assert (alert.id in [finding.id for finding in find_all(facts)]) is is_told


def test_detectors_without_anything_to_read_are_named():
    facts = Facts("grpo", KnownSettings(), lines=[{"step": 1, "grad_norm": 0.5, "lr": 1e-3}])
    assert "overthinking" in not_judged(facts) and "too_hard" in not_judged(facts)
    assert not {"unstable", "no_update", "infra"} & set(not_judged(facts))
    assert find_all(facts) == []


# --- the parts, by hand -----------------------------------------------------------------------


def test_repeated_share_counts_four_grams_seen_before():
    # 12 pieces, 9 four-grams, of which abcd bcda cdab dabc are new and five repeat.
    assert text_metrics.repeated_share("a b c d a b c d a b c d") == pytest.approx(5 / 9)
    assert (
        text_metrics.repeated_share("one two three four five six seven eight nine ten eleven")
        == 0.0
    )
    assert text_metrics.repeated_share("so so so so so") == 0.0  # too short to say


@pytest.mark.parametrize(
    ("said", "inside"),
    [
        ("```python\nx\n```", True),
        ("Sure! It is 4.", True),
        ('"4"', True),
        ("4", False),
        ('He said "4" to me.', False),
        ("Surely 4", False),
        ("Of course: 4", True),
    ],
)
def test_wrapping_is_seen_at_the_beginning_of_an_answer(said: str, inside: bool):
    assert text_metrics.is_wrapped(said) is inside


def test_alike_share_is_about_neighbouring_tasks():
    assert text_metrics.alike_share(["4", "4", "4", "5"]) == 0.5  # 4=4, 4=4, 4≠5, 5≠4
    assert text_metrics.alike_share(["4", "4"]) is None
    long = "one two three four five six seven eight nine ten eleven twelve thirteen"
    changed = long.replace("thirteen", "fourteen")  # 9 of 11 four-grams shared
    assert text_metrics.alike_share([long, changed, long, changed]) == 1.0


def test_a_trouble_that_mends_itself_is_not_stuck():
    assert level_if_lasting([0.4] * 20, 0.1) == pytest.approx(0.4)
    assert level_if_lasting([0.05] * 20, 0.1) is None
    assert level_if_lasting([0.4] * 10 + [0.15] * 10, 0.1) is None  # fell to under 60 %
    assert level_if_lasting([0.9] * 10 + [0.5] * 10, 0.1) == pytest.approx(0.5)  # too much to wait
    assert level_if_lasting([0.4] * 4, 0.1) is None  # four steps are too few


def test_a_trend_needs_three_standard_errors():
    flat = [0.5 + 0.1 * (-1) ** i for i in range(30)]
    assert abs(trend(flat).z) < 0.5
    rising = [value + 0.02 * i for i, value in enumerate(flat)]
    # Thirds of ten: means 0.4 apart; each third has a variance of about 0.0144.
    assert trend(rising).change == pytest.approx(0.4) and trend(rising).rose
    assert trend([1.0] * 17) is None
    assert trend([1.0] * 18).z == 0.0


def test_a_view_counts_what_its_rows_say():
    def row(group: int, said: str, **more):
        return {
            "task": f"t{group}",
            "group": group,
            "completion": said,
            "reward": 0.0,
            "tokens": 10,
            "success": False,
            "metrics": {"parsed": 1.0},
            "error": None,
            "stop_reason": "stop",
        } | more

    rows = [
        row(0, "4", reward=1.0, success=True),
        row(0, "5", metrics={"parsed": 0.0}),
        row(0, "4 and so", stop_reason="max_tokens", tokens=40),
        row(1, "7"),
        row(1, "7"),
        row(1, "x", error="ValueError", success=None),
    ]
    view = view_of(3, rollout_records(rows), KnownSettings(max_tokens=40))
    assert view is not None and (view.step, view.answer_count) == (3, 6)
    assert view.solved_share == pytest.approx(1 / 5) and view.reward == pytest.approx(1 / 5)
    assert view.error_share == pytest.approx(1 / 6) and view.cut_share == pytest.approx(1 / 6)
    assert view.cut_reward == 0.0 and view.uncut_reward == pytest.approx(1 / 4)
    assert view.mean_tokens == pytest.approx((5 * 10 + 40) / 6)
    assert view.distinct_share == pytest.approx((2 / 2 + 1 / 2) / 2)
    assert (view.form_metric, view.form_score) == ("parsed", pytest.approx(4 / 5))
    assert view.judge_gap is None and view.think_size is None
    assert view_of(3, [], KnownSettings()) is None


@pytest.mark.parametrize(
    ("metrics", "form"),
    [
        ({"parsed": 0.5}, 0.5),
        ({"is_formatted": 1.0}, 1.0),
        ({"information": 0.1, "unparsed": 0.1}, None),
        ({"format_errors": 0.0, "parse_time": 0.2}, None),
        ({"format_score": 7.0}, None),
    ],
)
def test_a_metric_about_the_form_is_known_by_its_name(metrics: dict[str, float], form: float):
    row = {"task": "t", "completion": "4", "reward": 0.0, "metrics": metrics}
    assert view_of(0, rollout_records([row]), KnownSettings()).form_score == form


@pytest.mark.parametrize(
    ("metrics", "success", "pleased"),
    [
        ({"judge": 0.9}, False, True),
        ({"judge": 0.9}, True, False),
        ({"judge": 0.4}, False, False),
        ({"quality": 0.8, "exact": 0.0}, None, True),
        ({"judge": 9.0}, False, None),
        ({"judge": 0.9}, None, None),
        ({"judge_seconds": 0.9, "exact": 0.0}, None, None),
    ],
)
def test_a_pleased_judge_is_set_against_the_hard_check(
    metrics: dict[str, float], success: bool | None, pleased: bool | None
):
    (row,) = rollout_records([{"task": "t", "metrics": metrics, "success": success}])
    assert is_pleased_and_wrong(row) is pleased


def test_a_think_block_is_measured_against_its_budget():
    thought = {"role": "assistant", "reasoning_content": "a" * 90, "content": "b" * 10}
    row = {"task": "t", "completion": "b" * 10, "messages": [thought], "tokens": 80, "reward": 0.0}
    # 90 of 100 characters of 80 tokens, of a budget of 100.
    assert view_of(
        0, rollout_records([row]), KnownSettings(max_tokens=100)
    ).think_size == pytest.approx(0.72)
    never_closed = {"task": "t", "completion": "<think> and on", "tokens": 100, "reward": 0.0}
    assert (
        view_of(0, rollout_records([never_closed]), KnownSettings(max_tokens=100)).think_size == 1.0
    )
    for opening in ("[THINK]", "<|channel>thought\n"):
        cut = never_closed | {"completion": f"{opening} and on"}
        assert view_of(0, rollout_records([cut]), KnownSettings(max_tokens=100)).think_size == 1.0
    plain = {"task": "t", "completion": "4", "tokens": 1, "reward": 1.0}
    assert view_of(0, rollout_records([plain]), KnownSettings(max_tokens=100)).think_size is None


def test_a_raised_alert_is_not_raised_again_until_it_was_silent_for_a_while(tmp_path: Path):
    run = RunDir(tmp_path / "r")
    run.create()
    watch = Watch(run, "grpo", KnownSettings(max_tokens=20, steps=400))
    rng = random.Random(4)

    def steps(first: int, count: int, cut: float) -> tuple[list[str], list[str]]:
        raised, cleared = [], []
        for step in range(first, first + count):
            share = cut + rng.uniform(-0.01, 0.01) if cut else 0.0
            found, over = watch.check_step(step, {"truncated_share": share, "length_p95": 20.0})
            raised += [finding.id for finding in found]
            cleared += over
        return raised, cleared

    assert steps(1, 30, 0.5) == (["truncation"], [])
    assert steps(31, 30, 0.0) == ([], ["truncation"])
    assert steps(61, 30, 0.5) == (["truncation"], [])


def test_a_watch_takes_up_a_run_where_its_checkpoint_left_it(tmp_path: Path):
    run = RunDir(tmp_path / "r")
    run.create()
    lines = [{"step": s, "time": 1.0, "truncated_share": 0.5} for s in range(1, 13)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"event": "data", "rows": 10, "truncated": 0, "dropped": 0},
        {"event": "alert", "id": "truncation", "step": 7},
        {"event": "alert", "id": "unstable", "step": 12},  # after the checkpoint: played again
        {"event": "alert", "id": "too_hard", "step": 5},
        {"event": "alert_cleared", "id": "too_hard", "step": 9},
    ]
    run.events.write_text("".join(json.dumps({"time": 0.0} | event) + "\n" for event in events))
    watch = Watch(run, "grpo", KnownSettings(max_tokens=20, steps=40))
    watch.catch_up(10)
    assert [line["step"] for line in watch.lines] == list(range(1, 11))
    assert set(watch.active_alerts) == {"truncation"} and watch.training_rows.rows == 10
    assert watch.check_step(11, {"truncated_share": 0.5}) == ([], [])
