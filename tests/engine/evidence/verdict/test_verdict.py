"""The verdict on a run, read from the files it left."""

import json
import math
import random
import re

import pytest
from as_json import compare_rows, measure_of, run_verdict
from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.files import write_json
from engine.evidence.stats.results import best_step, in_half
from engine.evidence.verdict.comparison import sentence
from engine.evidence.verdict.sides import result_step
from engine.home.run_dir import CHECKPOINT_MANIFEST
from engine.records.lines.evaluation_row import read_evaluation
from tests.helpers.env_versions import write_version


def test_a_run_that_learned_is_better_with_its_evidence(learned_run):
    verdict = run_verdict(learned_run.run)
    assert verdict["verdict"] == "better" and verdict["metric"] == "success"
    assert verdict["n"] == 120 and verdict["half"] == "report"
    assert verdict["before"]["step"] == 0 and verdict["after"]["step"] == 40
    low, high = verdict["interval"]
    assert 0 < low < verdict["difference"] < high
    assert verdict["difference"] == pytest.approx(
        verdict["after"]["value"] - verdict["before"]["value"], abs=1e-3
    )
    flips = verdict["flips"]
    assert flips["gained"] - flips["lost"] == round(verdict["difference"] * 120)
    assert flips["gained"] + flips["lost"] + flips["unchanged"] == 120
    example = flips["examples"]["gained"][0]
    assert (example["before"], example["after"]) == ("41", "42")
    assert example["prompt"] == f"What is {example['task']}?"
    assert verdict["expected"] == "better" and verdict["as_expected"] is True
    assert verdict["summary"].startswith("Better: held-out success went from")
    assert len(json.dumps(verdict)) < 10_000


def test_a_gain_does_not_hide_what_was_right_before_and_is_lost(make_run, rows):
    run = make_run()
    run.evals(0, rows.halved(lambda i: i < 80, 400))
    run.evals(30, rows.halved(lambda i: i >= 16, 400)).checkpoint(30, best=True)
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "better" and (verdict["gained"], verdict["lost"]) == (160, 8)
    # Of the 40 reported tasks that were right; Wilson's interval of 8 of 40 by hand.
    lost = {"right": 40, "lost": 8, "share": 0.2, "interval": (0.105, 0.3476)}
    assert verdict["lost_of_right"] == lost
    assert "points); 8 of 40 right ones lost (10 to 35 %)." in verdict["summary"]


def test_a_run_that_forgot_is_worse(make_run, rows):
    run = make_run(expect="better")
    run.evals(0, rows.halved(lambda i: i % 5 != 0, 300))
    run.evals(30, rows.halved(lambda i: i % 3 == 0, 300)).checkpoint(30, best=True)
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "worse" and verdict["interval"][1] < 0
    assert verdict["as_expected"] is False


def solving(make_run, rows, share: float, **config):
    """A run that solved nothing before and `share` of 200 reported tasks after."""
    run = make_run(**config)
    run.evals(0, rows.halved(lambda i: False, 400))
    run.evals(30, rows.halved(lambda i: i % 20 < 20 * share, 400)).checkpoint(30, best=True)
    return run_verdict(run.run)


def test_a_target_is_reached_or_not_whatever_the_verdict(make_run, rows):
    missed = solving(make_run, rows, 0.8, expect="90 %")
    assert missed["verdict"] == "better" and missed["as_expected"] is False
    assert "Target 90 %: not reached, 80.0 % (95 % interval 7" in missed["summary"]
    reached = solving(make_run, rows, 0.95, expect="90 %")
    assert reached["as_expected"] is True and reached["expected"] == "90 %"
    assert "Target 90 %: reached, but not for sure, 90.0 %" in reached["summary"]
    assert "more tasks would tell whether it holds" in reached["summary"]


def test_a_weak_result_is_trained_on_and_not_served(make_run, rows):
    def tools(share, **config) -> list[str]:
        return [call["tool"] for call in solving(make_run, rows, share, **config)["next"][:3]]

    assert tools(0.2) == ["submit_train", "diagnose", "read_rollouts"]
    assert tools(0.6) == ["read_rollouts", "deploy"]
    assert tools(0.6, expect="90 %") == ["submit_train", "diagnose", "read_rollouts"]
    assert tools(0.2, expect="10 %") == ["read_rollouts", "deploy"]


def test_after_weak_sft_grpo_follows_where_groups_differ_else_more_sft(make_run, rows):
    grpo = solving(make_run, rows, 0.3, algorithm="sft", expect="90 %")["next"][0]["arguments"]
    assert (grpo["algorithm"], grpo["expect"]) == ("grpo", "90 %")
    assert grpo["model"].endswith("@best") and "settings" not in grpo
    run = make_run(algorithm="sft")
    run.evals(0, rows.halved(lambda i: False, 400))
    run.evals(30, rows.halved(lambda i: i % 23 == 0, 400)).checkpoint(30, best=True)
    hardly = run_verdict(run.run)
    assert hardly["verdict"] == "better" and hardly["after"]["value"] < 0.05
    assert hardly["next"][0]["arguments"]["algorithm"] == "sft"


def test_a_run_that_changed_nothing_on_many_tasks_makes_no_difference(make_run, rows):
    run = make_run()
    for step in (0, 30):
        run.evals(step, rows.halved(lambda i: i % 2 == 0, 400))
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "no_difference" and verdict["difference"] == 0


def test_answers_that_cannot_be_read_are_counted_in_the_verdict(learned_run):
    run = learned_run.run
    whole = run_verdict(run)
    assert not any("damaged" in warning for warning in whole["warnings"])
    lines = run.evals(40).read_text().splitlines()
    lines[0], lines[1] = '{"task": "torn', "[1, 2]"
    run.evals(40).write_text("\n".join(lines) + "\n")
    verdict = run_verdict(run)
    expected = f"2 damaged lines among the stored answers of {run.id} could not be read"
    assert any(warning.startswith(expected) for warning in verdict["warnings"])
    assert verdict["verdict"] == "better" and verdict["n"] < whole["n"]


def test_few_tasks_are_inconclusive_and_the_number_needed_is_said(make_run, rows):
    rng = random.Random(1)
    run = make_run()
    run.evals(0, rows.halved(lambda i: rng.random() < 0.5, 40))
    run.evals(30, rows.halved(lambda i: rng.random() < 0.5, 40))
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "inconclusive"
    [needed] = [text for text in verdict["warnings"] if "show a change of 5 points" in text]
    assert needed.endswith("has 20, half of its eval_rows: the other half chose the checkpoint.")
    assert verdict["smallest_detectable_gap"] > 0.2


def test_the_select_half_chooses_and_never_counts(make_run, rows):
    """Step 20 is best on select and useless on report; the verdict must not see the select half."""
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 200))
    run.evals(20, rows.halved(lambda i: i % 2 == 0, 200)).checkpoint(20, best=True)
    run.evals(40, [r for r in rows.halved(lambda i: i % 4 == 0, 200) if r["half"] == "select"])
    assert best_step(run.run) == 20
    verdict = run_verdict(run.run)
    assert verdict["after"]["step"] == 20 and verdict["n"] == 100
    assert verdict["difference"] == 0 and verdict["verdict"] == "no_difference"


def test_the_named_best_wins_over_what_the_rows_would_choose(make_run, rows):
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 40))
    run.evals(10, rows.halved(lambda i: i < 10, 40)).checkpoint(10, best=True)
    run.evals(20, rows.halved(lambda i: i < 30, 40)).checkpoint(20)
    assert result_step(run.run) == 10
    run.run.best.unlink()
    assert result_step(run.run) == 20


def test_of_equal_checkpoints_the_earliest_is_chosen(make_run, rows):
    run = make_run()
    for step in (0, 10, 20, 30):
        run.evals(step, rows.halved(lambda i, s=step: s >= 20 and i < 20, 40))
    assert best_step(run.run) == 20


def test_scoring_errors_above_five_percent_forbid_a_verdict(make_run, rows):
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 100))
    broken = rows.halved(lambda i: True, 100)
    for row in broken[1:20:3]:
        row |= {"error": "ZeroDivisionError", "reward": 0.0, "success": None}
    run.evals(10, broken)
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "unknown" and "above 5%" in verdict["reason"]
    assert verdict["errors"] == [0, 4] and verdict["difference"] is None


def test_a_few_scoring_errors_are_left_out_and_said(make_run, rows):
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 100))
    broken = rows.halved(lambda i: True, 100)
    broken[1] |= {"error": "timeout", "reward": 0.0, "success": None}
    run.evals(10, broken)
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "better" and verdict["n"] == 49
    assert verdict["after"]["value"] == 1.0
    assert verdict["after"]["value_with_errors"] == pytest.approx(0.98)
    assert any("Scoring failed on 0 attempts before and 1 after" in w for w in verdict["warnings"])


def test_a_graded_reward_is_compared_by_its_mean(make_run, rows):
    rng = random.Random(2)
    run = make_run()
    for step, lift in ((0, 0.0), (10, 0.2)):
        members = rows.halved(lambda i: False, 120)
        for row in members:
            row |= {"success": None, "reward": round(0.3 + lift + rng.gauss(0, 0.1), 3)}
        run.evals(step, members)
    verdict = run_verdict(run.run)
    assert verdict["metric"] == "reward" and verdict["verdict"] == "better"
    assert "bootstrap" in verdict["method"]


def test_rows_without_a_scorer_are_compared_by_loss_and_less_is_better(make_run):
    rng = random.Random(3)
    run = make_run("sft")
    for step, loss in ((0, 2.0), (10, 1.2)):
        run.evals(
            step,
            [
                {
                    "task": f"t{i}",
                    "half": "report" if i % 2 else "select",
                    "attempt": 0,
                    "loss": loss + rng.gauss(0, 0.2),
                    "tokens": 9,
                    "error": None,
                }
                for i in range(80)
            ],
        )
    verdict = run_verdict(run.run)
    assert verdict["metric"] == "loss" and verdict["verdict"] == "better"
    assert verdict["difference"] < 0
    assert "held-out loss went from 1.9" in verdict["summary"]


def test_a_placeholder_reward_beside_a_loss_is_no_score():
    row = {"task": "a", "reward": 0.0, "success": None, "loss": 1.5, "error": None}
    assert measure_of([row]) == "loss"
    assert measure_of([row | {"reward": 0.5}]) == "reward"
    assert measure_of([row | {"error": "x"}]) is None


def test_an_unfinished_run_is_unknown_and_says_what_is_missing(make_run, rows):
    run = make_run()
    assert "no evaluation before training" in run_verdict(run.run)["reason"]
    run.evals(0, rows.halved(lambda i: False, 10))
    assert "no evaluation after step 0" in run_verdict(run.run)["reason"]
    run.evals(10, [r for r in rows.halved(lambda i: True, 10) if r["half"] == "select"])
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "unknown" and "report half was not played" in verdict["reason"]
    assert verdict["summary"].startswith("The verdict is unknown")


def test_a_torn_run_folder_gives_unknown(make_run):
    run = make_run()
    run.run.config.write_text("{")
    run.run.evals(0).write_text("not json\n[1]\n")
    assert run_verdict(run.run)["verdict"] == "unknown"
    run.run.evals(0).write_text('{"task": 1}\n')
    assert run_verdict(run.run)["verdict"] == "unknown"


def test_tasks_without_halves_are_all_reported_with_a_warning(make_run, rows):
    run = make_run()
    for step in (0, 10, 20):
        run.evals(step, [rows.eval(f"t{i}", step > 0, half="") for i in range(30)])
    verdict = run_verdict(run.run)
    assert verdict["n"] == 30 and verdict["half"] == "all"
    assert any("flattered" in text for text in verdict["warnings"])


def test_an_accepted_reward_risk_stands_in_the_verdict(make_run, rows):
    run = make_run(settings={"accept_reward_risk": True})
    run.evals(0, rows.halved(lambda i: False, 60))
    run.evals(10, rows.halved(lambda i: True, 60))
    assert any("accept_reward_risk" in text for text in run_verdict(run.run)["warnings"])


def test_secrets_and_hidden_characters_stay_out_of_the_examples(make_run, rows, home, monkeypatch):
    monkeypatch.setenv("ARITH_KEY", "s3cret-value-77")
    folder = home.env("arith", "0123456789ab")
    folder.mkdir(parents=True)
    write_version(folder / "env.json", secrets=("ARITH_KEY",))
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 40))
    run.evals(10, rows.halved(lambda i: True, 40, completion="\x1b[31ms3cret-\u200bvalue-77"))
    text = json.dumps(run_verdict(run.run), ensure_ascii=False)
    assert "s3cret" not in text and "[secret ARITH_KEY]" in text and "\x1b" not in text


def test_an_evaluation_compares_every_model_with_the_first(make_run, rows):
    refs = ("pebble", "arith-sft-1", "arith-grpo-2")
    run = make_run(kind="evaluate", algorithm="evaluate", models=[{"ref": ref} for ref in refs])
    for index, share in enumerate((20, 50, 90)):
        run.model_evals(index, [rows.eval(f"t{i}", i < share) for i in range(100)])
    verdict = run_verdict(run.run)
    assert [row["model"] for row in verdict["models"]] == list(refs)
    assert [row["value"] for row in verdict["models"]] == [0.2, 0.5, 0.9]
    assert [item["verdict"] for item in verdict["comparisons"]] == ["better", "better"]
    assert verdict["after"]["model"] == "arith-grpo-2" and verdict["verdict"] == "better"


def test_an_evaluation_of_one_model_reports_its_level(make_run, rows):
    run = make_run(kind="evaluate", algorithm="evaluate", models=[{"ref": "pebble"}])
    run.model_evals(0, [rows.eval(f"t{i}", i < 30) for i in range(100)])
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "unknown"
    assert verdict["models"][0]["value"] == 0.3 and "30.0 %" in verdict["summary"]


def test_many_equal_models_in_one_evaluation_rarely_look_better(make_run, rows):
    rng = random.Random(4)
    wrong = 0
    for _ in range(8):
        models = [{"ref": f"m{index}"} for index in range(8)]
        run = make_run(kind="evaluate", algorithm="evaluate", models=models)
        for index in range(8):
            run.model_evals(index, [rows.eval(f"t{i}", rng.random() < 0.5) for i in range(60)])
        found = run_verdict(run.run)["comparisons"]
        wrong += any(item["verdict"] in ("better", "worse") for item in found)
    assert wrong <= 2


def test_of_a_curve_of_noise_the_best_checkpoint_gains_nothing(home, rows):
    """Twelve equal checkpoints: the best leads on the half that chooses, not on the other."""
    rng = random.Random(21)
    tasks, steps, curves = 60, range(10, 130, 10), 40
    chosen, reported, alarms = [], [], 0
    for number in range(curves):
        run = home.run(f"noise-{number}")
        run.create()
        write_json(run.config, {"kind": "train", "settings": {}}, fsync=False)
        for step in (0, *steps):
            lines = rows.halved(lambda _: rng.random() < 0.5, tasks)
            run.evals(step).write_text("".join(json.dumps(line) + "\n" for line in lines))
        best = best_step(run)
        halves = [in_half(read_evaluation(run.evals(step)), "select") for step in (0, best)]
        before, after = (sum(bool(row.success) for row in half) / len(half) for half in halves)
        chosen.append(after - before)
        run.checkpoint(best).mkdir()
        write_json(run.checkpoint(best) / CHECKPOINT_MANIFEST, {"step": best}, fsync=False)
        run.best.symlink_to(run.checkpoint(best).name)
        verdict = run_verdict(run)
        assert verdict["after"]["step"] == best and verdict["n"] == tasks // 2
        reported.append(verdict["difference"])
        alarms += verdict["verdict"] in ("better", "worse")
    noise = math.sqrt(2 * 0.25 / (tasks // 2) / curves)  # of the mean of the reported gains
    assert abs(sum(reported) / curves) < 3 * noise
    assert sum(chosen) / curves > 6 * noise, "the half that chooses would have flattered it"
    assert alarms <= 6  # 5 % of 40 is 2; more than 6 happens once in 300


# --- a word and its interval ----------------------------------------------------------------------

SHOWN = re.compile(r"^(\w[\w ]*): .*interval of the change (\S+) to (\S+?)( points)?\)")


def agrees(found) -> None:
    """The word in the sentence and in the result against the interval shown beside it."""
    word, low, high, _ = SHOWN.match(sentence(found)).groups()
    table = found.to_json()
    assert word.lower().replace(" ", "_") == table["verdict"]
    for bottom, top in ((float(low), float(high)), table["interval"]):
        away = bottom > 0 or top < 0
        assert away == (table["verdict"] in ("better", "worse")), (word, bottom, top, found.outcome)
    sign = -1 if found.measure == "loss" else 1
    if table["verdict"] in ("better", "worse"):
        assert (sign * table["difference"] > 0) == (table["verdict"] == "better")


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 3000))
@example(0, 4, 44)  # the exact test says 0.06, the score interval would begin below 0
@example(4, 0, 44)
@example(2600, 2400, 0)
def test_the_word_of_a_rate_never_contradicts_its_interval(gained: int, lost: int, same: int):
    n = gained + lost + same
    if n == 0:
        return
    sides = [
        [{"task": f"t{i}", "success": solved(i), "reward": 0.0, "error": None} for i in range(n)]
        for solved in (lambda i: gained <= i, lambda i: not gained <= i < gained + lost)
    ]
    agrees(compare_rows(*sides))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(-0.2, 0.2)), min_size=10, max_size=40),
    st.sampled_from(["reward", "loss"]),
)
def test_the_word_of_a_mean_never_contradicts_its_interval(values, measure: str):
    sides = [
        [
            {"task": f"t{i}", measure: 1.0 + start + change * at, "error": None}
            for i, (start, change) in enumerate(values)
        ]
        for at in (0, 1)
    ]
    agrees(compare_rows(*sides))


# --- a start that nothing beat --------------------------------------------------------------------


def test_a_run_in_which_nothing_beat_the_start_says_what_to_go_on_with(make_run, rows):
    run = make_run(model="units-sft-1@best")
    run.evals(0, rows.halved(lambda i: i // 2 % 10 < 8, 200))
    run.evals(20, rows.halved(lambda i: i // 2 % 10 < 7, 200)).checkpoint(20, best=True)
    verdict = run_verdict(run.run)
    assert verdict["go_on_with"] == "units-sft-1@best"
    assert (
        "No checkpoint beat the start (70.0 % at best against 80.0 %, on the half that chooses): "
        "go on with units-sft-1@best." in verdict["summary"]
    )
    assert not any(call["tool"] in ("submit_train", "deploy") for call in verdict["next"])


def test_a_run_that_came_out_worse_says_to_go_on_with_its_start(make_run, rows):
    """The half that chooses liked it by one task; the reported half says that it is worse."""
    run = make_run(model="units-sft-1@best")
    start = rows.halved(lambda i: i // 2 % 10 < 8, 200)
    run.evals(0, start)
    end = [
        row | ({"success": False, "reward": 0.0} if row["half"] == "report" else {})
        for row in start
    ]
    low = next(at for at, row in enumerate(end) if row["half"] == "select" and not row["success"])
    end[low] |= {"success": True, "reward": 1.0}
    verdict = run_verdict(run.evals(20, end).checkpoint(20, best=True).run)
    assert verdict["verdict"] == "worse" and verdict["go_on_with"] == "units-sft-1@best"
    assert "The start is better: go on with units-sft-1@best." in verdict["summary"]


def test_a_run_that_beat_its_start_on_the_half_that_chooses_is_the_one_to_go_on_with(
    make_run, rows
):
    run = make_run()
    run.evals(0, rows.halved(lambda i: i // 2 % 10 < 5, 60))
    run.evals(20, rows.halved(lambda i: i // 2 % 10 < 5 or i == 12, 60)).checkpoint(20, best=True)
    verdict = run_verdict(run.run)
    assert verdict["verdict"] != "better" and "go_on_with" not in verdict


# --- failed scorings and repeated prompts -------------------------------------------------------


def solved_and_failed(rows, solved, failed=(), n=200, **more):
    """Reported tasks; `failed` ones could not be scored."""
    made = [rows.eval(f"t{i}", i in solved, **more) for i in range(n)]
    for at in failed:
        made[at] |= {"error": "score() raised ValueError", "reward": 0.0, "success": None}
    return made


def test_a_side_does_not_get_better_by_breaking_the_scorer_where_it_would_fail(make_run, rows):
    """Nine solved tasks fail to score afterwards and eight others are gained: one fewer in all."""
    run = make_run()
    run.evals(0, solved_and_failed(rows, range(100)))
    run.evals(10, solved_and_failed(rows, range(108), failed=range(9)))
    verdict = run_verdict(run.run)
    assert verdict["verdict"] == "inconclusive"
    assert (
        "the 9 answers whose scoring failed decide: left out, the verdict is better; "
        in (verdict["summary"])
    )
    assert "counted as not solved, no difference (50.0 % to 49.5 %)" in verdict["reason"]
    assert any("mend the scorer" in said for said in verdict["warnings"])
    assert [call["tool"] for call in verdict["next"]] == ["read_rollouts", "diagnose"]
    assert verdict["next"][0]["arguments"]["pick"] == "error"


def test_a_graded_reward_is_judged_with_its_failed_scorings_too(rows):
    before = [row | {"success": None} for row in solved_and_failed(rows, range(100))]
    after = solved_and_failed(rows, range(108), failed=range(9))
    after = [row | {"success": None, "reward": row["reward"] and 0.9} for row in after]
    found = compare_rows([row | {"reward": row["reward"] and 0.9} for row in before], after)
    assert found.measure == "reward" and found.errors_decide
    assert found.outcome.verdict == "inconclusive"


def test_copies_of_a_question_are_one_question(rows):
    def copies(solved):
        return [
            rows.eval(f"h{k}-{i}", solved, prompt=[{"role": "user", "content": f"After {k}?"}])
            for k in range(4)
            for i in range(50)
        ]

    found = compare_rows(copies(False), copies(True))
    assert (found.outcome.n, len(found.outcome.gained), found.id_count) == (4, 4, 200)
    assert found.outcome.verdict == "inconclusive"
    assert found.after is not None and found.after.tasks == 4


def test_copies_of_some_questions_weigh_no_more_than_the_others(rows):
    """Fifty questions of their own lost, and one that was gained and stands there fifty times."""

    def exam(own, copied):
        one = [{"role": "user", "content": "Again and again?"}]
        made = [rows.eval(f"own{i}", own) for i in range(50)]
        return made + [rows.eval(f"copy{i}", copied, prompt=one) for i in range(50)]

    found = compare_rows(exam(True, False), exam(False, True))
    assert (found.outcome.n, found.outcome.verdict) == (51, "worse")
    assert (len(found.outcome.gained), len(found.outcome.lost)) == (1, 50)


def test_tasks_of_one_prompt_stay_apart_where_the_environment_went_on_talking(rows):
    def episode(solved):
        said = {"role": "assistant", "content": "5"}
        return [
            rows.eval(
                f"t{i}",
                solved,
                prompt=[{"role": "user", "content": "Guess my number."}],
                messages=[said, {"role": "user", "content": "Higher."}, said],
            )
            for i in range(30)
        ]

    found = compare_rows(episode(False), episode(True))
    assert (found.outcome.n, found.outcome.verdict, found.id_count) == (30, "better", 0)


def test_a_verdict_on_repeated_prompts_says_how_many_differ(make_run, rows):
    run = make_run()
    for step in (0, 10):
        run.evals(
            step,
            [
                rows.eval(f"t{i}", step > 0, prompt=[{"role": "user", "content": f"{i % 20}?"}])
                for i in range(100)
            ],
        )
    verdict = run_verdict(run.run)
    assert verdict["n"] == 20 and verdict["verdict"] == "better"
    assert any("100 tasks have 20 different prompts" in said for said in verdict["warnings"])
