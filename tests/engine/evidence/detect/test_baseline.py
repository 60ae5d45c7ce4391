"""A run against what it began with: below its start, longer than its room, still learning."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from replayed import lines_of, replay
from simulated import exam_records, examined, judged, sft
from troubled import TROUBLES, Simulated, healthy

from engine.core.files import write_json
from engine.evidence.detect.alerts import Watch
from engine.evidence.detect.baseline import compared_with_start, fall_of_the_start
from engine.evidence.detect.detectors import find_all
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.learning import unstable
from engine.evidence.verdict.regression import KeptSkills, SinceBase, compare_skills
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.team.owners import Share, Viewer
from engine.records.lines.evaluation_row import read_evaluation

# --- below its start ------------------------------------------------------------------------------


def told(run: Simulated) -> dict[str, Finding]:
    return {finding.id: finding for finding in find_all(run.facts())}


@pytest.mark.parametrize("seed", [2000, 2002, 2004])
def test_a_fall_below_the_start_names_its_numbers_and_a_third_of_the_rate(seed: int):
    found = told(TROUBLES["below_start"](seed))["below_start"]
    assert found.severity == "high" and found.numbers["after"] < found.numbers["before"]
    assert found.lever.setting == "learning_rate"
    assert found.lever.to == pytest.approx(found.lever.now / 3, rel=0.02)
    assert f"{found.numbers['before']:.1%} at step 0 to {found.numbers['after']:.1%}" in found.what


@pytest.mark.parametrize(("checkpoint", "step"), [("", 60), ("@best", 40), ("@step20", 20)])
def test_the_start_of_a_run_is_the_checkpoint_that_it_went_on_from(
    learned_run, make_run, checkpoint: str, step: int
):
    child = make_run(model=f"{learned_run.id}{checkpoint}")
    fall = fall_of_the_start(child.run.home, child.run)
    assert fall is not None and fall.step == step
    # The run's own copy knows better than a name whose meaning may have changed since.
    child.run.start_adapter.mkdir()
    write_json(child.run.start_adapter / "MANIFEST.json", {"step": 20})
    fall = fall_of_the_start(child.run.home, child.run)
    assert fall is not None and fall.step == 20


def test_the_fall_of_a_start_is_not_told_to_who_does_not_see_its_run(learned_run, make_run):
    child = make_run(model=f"{learned_run.id}@best")
    with Store(child.run.home) as store:
        store.add_share(Share("run", child.id, "", "bob", "read"))
    bobs = Home(child.run.home.root, Viewer("bob"))
    assert fall_of_the_start(bobs, child.run) is None
    with Store(child.run.home) as store:
        store.add_share(Share("run", learned_run.id, "", "bob", "read"))
    assert fall_of_the_start(bobs, child.run) is not None


def length_paid(cut: float = 0.95) -> Simulated:
    """The run that pays `0.55 * right + min(0.27, 0.03 * tokens)`: 72 % to 0 %, lengths to 40."""
    run = Simulated(
        "length_paid",
        1,
        "grpo",
        {"learning_rate": 1e-3, "steps": 40, "max_tokens": 40, "group_size": 8},
    )
    rng = random.Random(3)
    for step in range(41):
        way = min(1.0, max(0.0, (step - 8) / 12))
        line: dict = {"step": step, "entropy": 0.5}
        if step:
            rows = []
            for at in range(64):
                is_cut = rng.random() < cut * way
                right = rng.random() < 0.72 * (1 - way) and not is_cut
                tokens = 40 if is_cut else round(8 + 30 * way)
                rows.append(
                    {
                        "task": f"t{at // 8}",
                        "group": at // 8,
                        "member": at % 8,
                        "tokens": tokens,
                        "completion": f"{rng.random()}",
                        "success": right,
                        "error": None,
                        "reward": 0.55 * right + min(0.27, 0.03 * tokens),
                        "metrics": {},
                        "stop_reason": "max_tokens" if is_cut else "stop",
                    }
                )
            run.rollouts[step] = rows
            flat = 0.9 * way
            line |= {
                "truncated_share": sum(r["stop_reason"] == "max_tokens" for r in rows) / 64,
                "reward_mean": sum(r["reward"] for r in rows) / 64,
                "grad_norm": 0.3,
                "lr": 1e-3,
                "groups_effective": 1 - flat,
                "groups_too_hard": flat,
                "groups_too_easy": 0.0,
                "zero_advantage_share": flat,
                "length_p95": 40.0,
            }
        if step % 10 == 0:
            level = 0.72 * (1 - way)
            line |= {"heldout_success": level, "heldout_reward": level}
            paid = 0.55 * level + min(0.27, 0.03 * (8 + 32 * way))
            examined(run, step, level, cut=way, length=8 + 32 * way, reward=paid, n=60)
        run.lines.append(line)
    return run


def test_a_reward_that_pays_for_length_is_named_and_more_room_is_not_advised(tmp_path: Path):
    run = length_paid()
    found = find_all(run.facts())
    ids = [finding.id for finding in found]
    assert ids[0] == "below_start" and "length_grew" in ids, ids
    assert not {"truncation", "too_hard"} & set(ids)
    assert found[0].lever.edit.startswith("score(): pay nothing for length")
    assert "answers that are cut earn 0.27, as much as the mean" in found[0].what
    grew = told(run)["length_grew"]
    assert "grew from 8 to 39.9" in grew.what and grew.lever.edit.startswith("score()")
    assert all(finding.lever.setting != "max_tokens" for finding in found)
    alerts = [name for _, name in replay(run, tmp_path)]
    assert "below_start" in alerts and "length_grew" in alerts and "truncation" not in alerts


def test_a_fall_while_the_reward_held_points_at_the_reward():
    found = told(TROUBLES["below_start"](2000)).get("below_start")
    run = TROUBLES["below_start"](2001)
    for step in run.exams:
        run.exams[step] = [row | {"reward": 0.8} for row in run.exams[step]]
    held = told(run)["below_start"]
    assert found is not None and found.lever.setting == "learning_rate"
    assert held.lever.edit.startswith("score(): it pays what is no success")
    assert "while the reward went from 0.8 to 0.8" in held.what


def test_a_reward_that_is_success_fell_with_it_however_little_it_fell():
    run = TROUBLES["below_start"](2000)
    examined(run, 0, 0.80, n=500)
    last = max(run.exams)
    run.exams = {0: run.exams[0]}
    examined(run, last, 0.76, n=500)
    found = told(run)["below_start"]
    assert found.numbers["reward_before"] == 0.8 and found.numbers["reward_after"] == 0.76
    assert found.lever.setting == "learning_rate" and "reward" not in found.what


@pytest.mark.parametrize(("every", "raised"), [(40, ["below_start"]), (5, [])])
def test_the_first_of_many_planned_exams_is_not_looked_at_as_if_it_were_the_only_one(
    tmp_path: Path, every: int, raised: list[str]
):
    run, place = healthy(2001), RunDir(tmp_path / "run")
    place.create()
    watch = Watch(place, "grpo", replace(run.known, steps=40, eval_every=every))
    run.exams = {}
    for step, level in ((0, 0.6), (5, 0.54)):
        examined(run, step, level)
        place.evals(step).write_text(lines_of(run.exams[step]))
    rows = read_evaluation(place.evals(5))
    place.evals(5).write_text("")  # a step reads nothing back that it has written
    found, _ = watch.check_step(5, {"heldout_success": 0.54}, evaluated=rows)
    assert [finding.id for finding in found] == raised, "a second look reads the same answers"
    assert watch.check_step(6, {}) == ([], []), "once is enough"


def test_a_collapse_between_two_evaluations_is_told_at_the_second_one(tmp_path: Path):
    """The rewards of a real run at a rate of 8e-3: they fall in the two steps before it."""
    rewards = (0.2656, 0.3438, 0.2344, 0.4531, 0.4688, 0.3438, 0.0156, 0.0469, 0.0, 0.0, 0.0)
    spreads = (0.4417, 0.475, 0.4236, 0.4978, 0.499, 0.475, 0.124, 0.2114, 0.0, 0.0, 0.0)
    run = healthy(2001)
    run.settings |= {"prompts_per_step": 8, "steps": 20, "eval_every": 10}
    run.rollouts, run.exams, run.lines = {}, {}, [{"step": 0, "heldout_success": 0.69}]
    for step, (reward, spread) in enumerate(zip(rewards, spreads, strict=True), 1):
        run.lines.append({"step": step, "reward_mean": reward, "reward_std": spread})
    for step, level in ((0, 0.69), (10, 0.02)):
        examined(run, step, level, n=100)
    assert replay(run, tmp_path) == [(10, "below_start")]


def test_a_wavering_run_is_not_below_its_start():
    """Thirty exams of the same model: the last is low by luck, and one of thirty may be."""
    run = TROUBLES["too_easy"](2000)
    run.exams = {}
    for step in range(30):
        examined(run, step, 0.6 if step < 29 else 0.54)
    one, other = run.exams[0], run.exams[29]
    alone = compared_with_start(exam_records(one), exam_records(other), 29, 1).comparison
    assert alone.outcome.verdict == "worse", "looked at once, it would be"
    assert "below_start" not in told(run)


def test_too_hard_is_not_said_of_tasks_that_an_exam_saw_solved():
    run = TROUBLES["too_hard"](2000)
    assert "too_hard" in told(run)
    run.lines[0] |= {"heldout_success": 0.72}
    assert "too_hard" not in told(run)


def test_sampled_answers_that_were_longer_than_the_greedy_exam_at_once_did_not_grow():
    run = length_paid()
    for rows in run.rollouts.values():
        for row in rows:
            is_cut = row["member"] < 2
            row |= {
                "tokens": 40 if is_cut else 20,
                "stop_reason": "max_tokens" if is_cut else "stop",
                "reward": float(row["success"]),
            }
    for line in run.lines[1:]:
        line["truncated_share"] = 0.25
    assert run.exams[0][0]["tokens"] == 8
    assert "length_grew" not in told(run) and "truncation" in told(run)


def test_where_nobody_says_what_is_right_no_cut_answer_is_called_paid():
    run = TROUBLES["truncation"](2002)
    for rows in run.rollouts.values():
        for row in rows:
            row |= {"reward": 0.4, "success": None}
    found = told(run)
    assert "length_grew" not in found and "truncation" in found


def test_answers_that_use_more_room_and_are_right_more_often_get_the_room():
    run = length_paid()
    for step, rows in run.rollouts.items():
        for at, row in enumerate(rows):
            row["success"] = at < (step + 6 if row["stop_reason"] == "stop" else step)
            row["reward"] = float(row["success"] and row["stop_reason"] == "stop")
    for step in run.exams:
        examined(run, step, 0.1 + step / 50, n=100)
        run.lines[step] |= {"heldout_success": 0.1 + step / 50}
    found = told(run)
    assert "length_grew" not in found and found["truncation"].lever.setting == "max_tokens"


def test_where_reference_answers_fit_the_room_is_not_what_is_missing():
    run = TROUBLES["truncation"](2002)
    room = run.settings["max_tokens"]
    assert told(run)["truncation"].lever.to == 2 * room
    run.gold_tokens = 0.4 * room
    found = told(run)["truncation"]
    assert found.lever.setting == "" and "short answers" in found.lever.edit
    assert f"Reference answers take {0.4 * room:.0f} tokens." in found.what
    run.gold_tokens = 0.9 * room
    assert told(run)["truncation"].lever.to == 2 * room


def test_exploration_lost_in_the_first_steps_is_said_where_the_fall_may_be_chance():
    run = healthy(2001)
    for line in run.lines:
        if line["step"]:
            line["entropy"] = 0.46 if line["step"] == 1 else 0.08
    run.exams = {}
    examined(run, 0, 0.775, n=40)
    examined(run, 20, 0.70, n=40)
    run.verdict = judged(random.Random(1), 0.775, 0.70, 40)
    found = told(run)
    assert "below_start" not in found
    cooled = found["entropy_collapse"]
    assert cooled.severity == "low" and cooled.lever.setting == "learning_rate"
    assert "Entropy fell from 0.46 to 0.08 within 5 steps" in cooled.what
    examined(run, 20, 0.9, n=40)
    assert "entropy_collapse" not in told(run), "above the start it was learning"
    examined(run, 0, 0.98, n=40)
    examined(run, 20, 0.95, n=40)
    run.verdict = judged(random.Random(1), 0.98, 0.95, 40)
    assert "entropy_collapse" not in told(run), "nothing is left to explore for"


# --- what a finding may ask for -------------------------------------------------------------------


def test_no_more_rows_are_asked_for_than_there_are():
    run = TROUBLES["underpowered"](2000)
    run.heldout_rows = 100_000
    assert told(run)["underpowered"].lever.setting == "eval_rows"
    run.heldout_rows = 160
    rate = run.verdict
    run.verdict = replace(rate, measure="reward", outcome=replace(rate.outcome, detectable=0.2))
    for have, to in ((100_000, 1600), (1000, 1000)):
        run.heldout_rows = have
        lever = told(run)["underpowered"].lever
        assert (lever.setting, lever.to) == ("eval_rows", to), "rows that nobody asked yet"
    run.verdict = replace(rate, outcome=replace(rate.outcome, detectable=0.2))
    run.heldout_rows = 160
    found = told(run)["underpowered"]
    assert found.lever.setting == "" and found.numbers["heldout_rows"] == 160
    wanted = 2 * found.numbers["tasks_needed"]
    assert f"tasks(): at least {wanted} held-out rows instead of 160" in found.lever.edit


def test_a_run_that_still_learns_is_told_to_go_on_and_not_that_its_exam_is_small():
    run = TROUBLES["too_short"](2000)
    (found,) = find_all(run.facts())
    assert run.verdict.outcome.verdict == "inconclusive"
    assert found.id == "too_short" and found.lever.setting == "steps"
    assert found.lever.to == 2 * run.lines[-1]["step"]


def skills_lost(count: int) -> KeptSkills:
    """`count` of 120 questions that were answered before."""
    sides = [
        [
            {"task": f"old-{i}", "battery": "old", "reward": 0.0, "error": None, "success": right}
            for i, right in enumerate([after] * count + [True] * (120 - count))
        ]
        for after in (True, False)
    ]
    return compare_skills(*map(exam_records, sides))


@pytest.mark.parametrize(
    ("trouble", "seed"), [("too_short", 2000), ("plateau", 2001), ("too_hard", 2000)]
)
def test_what_kept_a_run_from_learning_comes_before_what_it_forgot(trouble: str, seed: int):
    run = TROUBLES[trouble](seed)
    run.kept = skills_lost(30)
    ids = [finding.id for finding in find_all(run.facts())]
    assert ids[0] == trouble and "forgetting" in ids


def test_what_a_run_forgot_comes_first_where_it_learnt_its_task():
    run = TROUBLES["plateau"](2001)
    run.kept = skills_lost(30)
    exams = [line for line in run.lines if "heldout_success" in line]
    for line, share in zip(exams, [0.0] + [0.5] * len(exams), strict=False):
        line["heldout_success"] = share
    examined(run, 0, 0.0)
    examined(run, max(run.exams), 0.5)
    ids = [finding.id for finding in find_all(run.facts())]
    assert ids[0] == "forgetting" and "plateau" in ids


def test_steps_that_broke_an_unsolved_run_come_before_the_answers_that_do_not_end():
    """A real SFT of a language model at a rate of 0.1: 0 % before and after, nothing ends."""
    run = TROUBLES["too_short"](2000)
    rows = [line for line in run.lines if line["step"]]
    for line in rows[2::3]:
        line["grad_norm"] = 90.0 * rows[0]["grad_norm"]
    wrong = {"success": False, "reward": 0.0, "error": None, "completion": "so so so", "tokens": 24}
    run.exam_rows = [
        wrong | {"task": f"h{number}", "stop_reason": "max_tokens"} for number in range(40)
    ]
    for line in run.lines:
        if "heldout_loss" in line:
            line["heldout_loss"] = 9.0  # noise
    run.kept = skills_lost(80)
    ids = [finding.id for finding in find_all(run.facts())]
    assert ids[0] == "unstable" and {"truncation", "forgetting"} <= set(ids), ids


def cut_and_too_hard(cut: float) -> Simulated:
    """Nothing is ever right, this share of the answers is cut, and references are short."""
    run = TROUBLES["too_hard"](2000)
    for line in run.lines[1:]:
        line["truncated_share"] = cut
    for rows in run.rollouts.values():
        for at, row in enumerate(rows):
            is_cut = at < cut * len(rows)
            row |= {"stop_reason": "max_tokens" if is_cut else "stop"}
            row |= {"success": False, "reward": 0.0}
    run.gold_tokens = 0.2 * run.settings["max_tokens"]
    return run


def test_cut_answers_stand_behind_tasks_that_whole_answers_do_not_solve_either():
    run = cut_and_too_hard(0.4)
    assert [finding.id for finding in find_all(run.facts())][:2] == ["too_hard", "truncation"]
    unknown, long, thinks = (cut_and_too_hard(0.4) for _ in range(3))
    unknown.gold_tokens = None
    long.gold_tokens = 0.9 * long.settings["max_tokens"]
    thinks.settings["thinking"] = True
    for other in (cut_and_too_hard(1.0), unknown, long, thinks):
        ids = [finding.id for finding in find_all(other.facts())]
        assert ids.index("truncation") < ids.index("too_hard")


def test_a_loss_that_came_to_rest_halfway_through_three_exams_no_longer_falls():
    run = TROUBLES["too_short"](2000)
    examined_at = [line for line in run.lines if "heldout_loss" in line][-3:]
    run.lines = [line for line in run.lines if line in examined_at or "heldout_loss" not in line]
    for line, loss in zip(examined_at, (3.0, 1.5, 1.0), strict=True):
        line["heldout_loss"] = loss
    assert "too_short" in told(run)
    examined_at[1]["heldout_loss"] = 1.001
    assert "too_short" not in told(run)


@pytest.mark.parametrize("inherited", [False, True])
def test_forgetting_is_said_of_the_battery_that_was_forgotten(inherited: bool):
    run = healthy(2001)
    sides = [
        [
            {"task": f"{name}-{i}", "battery": name, "reward": 0.0, "error": None, "success": right}
            for name, right in (("old", True), ("keep@1", before))
            for i in range(48)
        ]
        for before in (True, False)
    ]
    lost = compare_skills(*map(exam_records, sides))
    run.kept = lost
    if inherited:
        since = SinceBase("pebble", lost.verdict, lost.batteries, lost.summary, ["units-1"])
        run.kept = KeptSkills("kept", [], against_base=since)
    what = told(run)["forgetting"].what
    assert "(keep@1): 100 % to 0 % on 48 tasks" in what and "no loss" not in what
    assert ("Forgotten since pebble (keep@1)" in what) == inherited


def test_what_a_parent_lost_weighs_less_than_what_the_run_lost_itself():
    own, inherited = (told(TROUBLES["forgetting"](s))["forgetting"] for s in (2001, 2002))
    assert own.severity == "high" and "does not come back" in own.lever.edit
    assert inherited.severity == "medium" and inherited.what.startswith("Inherited from units-1: ")
    assert inherited.numbers["lost_by"] == ["units-1"] and "units-1" in inherited.lever.edit


@pytest.mark.parametrize(("right", "said"), [(False, "length_grew"), (True, "truncation")])
def test_cut_answers_that_are_paid_tell_by_whether_they_are_right(right: bool, said: str):
    """Cut from the start, and paid like whole ones: for nothing, or for being right already."""
    run = TROUBLES["truncation"](2002)
    for rows in run.rollouts.values():
        for row in rows:
            cut = row["stop_reason"] == "max_tokens"
            row["reward"] = 0.4
            row["success"] = row["success"] or (cut and right)
    found = told(run)
    assert said in found and len({"length_grew", "truncation"} & set(found)) == 1


@pytest.mark.parametrize("harmful_from_the_start", [False, True])
def test_no_steps_are_advised_where_every_step_made_the_held_out_rows_less_likely(
    harmful_from_the_start: bool,
):
    run = sft("overfitting", 2001, overfit=1.0, scored=False)
    if harmful_from_the_start:
        first = next(line for line in run.lines if line["step"] == 0)
        first["heldout_loss"] = 0.9 * min(
            line["heldout_loss"] for line in run.lines if "heldout_loss" in line
        )
    found = told(run)["overfitting"]
    if harmful_from_the_start:
        assert found.lever.setting == "learning_rate"
        assert found.lever.to == pytest.approx(found.lever.now / 3, rel=0.02)
    else:
        assert found.lever.setting == "steps" and found.lever.to >= 1


def with_losses(first: float, highest: float, last: float) -> Simulated:
    """An SFT run whose loss soars at its fourth step and ends at `last`."""
    run = sft("unstable", 3)
    rows = [line for line in run.lines if line["step"]]
    for line in rows:
        line["loss"] = last
    for line, loss in zip(rows, (first, first, 2 * first, highest, highest), strict=False):
        line["loss"] = loss
    return run


def test_a_loss_that_soars_and_comes_down_again_is_no_trouble():
    assert unstable(with_losses(1.5, 5.4, 0.02).facts()) is None
    finding = unstable(with_losses(1.5, 5.4, 5.0).facts())
    assert finding is not None and "rose from 1.5 at the first step to 5.4" in finding.what
