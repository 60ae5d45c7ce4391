"""Comparing runs, evaluations and model references that share tasks."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from as_json import records
from run_configs import train_config

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.evidence.compare.candidates import Candidate, sampling_of
from engine.evidence.compare.compare import compare_runs
from engine.evidence.compare.seeds import compare_candidates
from engine.evidence.stats import inference
from engine.evidence.stats.basics.distributions import t_quantile
from engine.evidence.stats.power import attempts_needed
from engine.evidence.stats.results import load_rows
from engine.home.store import Store
from engine.records.run_config import as_run_config
from tests.helpers.env_versions import write_version

GREEDY = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "stop": [], "thinking": False}


@pytest.fixture
def evaluation(make_run, rows):
    """evaluation({"pebble": 30, ...}) -> a finished evaluation; each ref solves that many tasks."""

    def make(solved, n=100, *, attempts=1, settings=None, env_id="arith@0123456789ab"):
        run = make_run(
            "evaluate",
            kind="evaluate",
            env_id=env_id,
            models=[{"ref": ref} for ref in solved],
            attempts=attempts,
            settings=GREEDY | (settings or {}),
        )
        for index, count in enumerate(solved.values()):
            run.model_evals(
                index,
                [
                    rows.eval(f"t{i}", i < count, attempt=attempt)
                    for i in range(n)
                    for attempt in range(attempts)
                ],
            )
        return run.finish()

    return make


@pytest.fixture
def trained(make_run, rows):
    """trained(share, settings={...}) -> a finished training run on 200 reported tasks."""

    def make(share, algorithm="grpo", before=0.3, seed=0, **kwargs):
        rng = random.Random(seed)
        limit = {"max_tokens": 64} if algorithm == "grpo" else {}
        settings = {"learning_rate": 1e-4} | limit | kwargs.pop("settings", {})
        run = make_run(algorithm, settings=settings, **kwargs)
        hard = [(i * 7919 % 400) / 400 for i in range(400)]
        for step, level in ((0, before), (20, share)):
            run.evals(step, rows.halved(lambda i, v=level: hard[i] + rng.gauss(0, 0.05) < v, 400))
        return run.checkpoint(20, best=True).finish()

    return make


def test_one_evaluation_of_two_models_is_compared_by_its_id_alone(home, evaluation):
    run = evaluation({"pebble": 30, "arith-grpo-9": 70})
    found = compare_runs(home, [run.id])
    assert found["verdict"] == "better" and found["reference"] == "pebble"
    assert [arm["value"] for arm in found["arms"]] == [0.3, 0.7]
    (comparison,) = found["comparisons"]
    assert comparison["difference"] == pytest.approx(0.4) and comparison["n"] == 100
    assert comparison["gained"] == 40 and comparison["lost"] == 0
    assert "p_adjusted" not in comparison
    assert found["flips"]["gained"][0]["after"] == "42"


def test_where_success_ties_the_reward_and_the_cut_answers_stand_in_the_result(
    home, make_run, rows
):
    models = [{"ref": "pebble"}, {"ref": "tuned"}]
    run = make_run("evaluate", kind="evaluate", models=models, settings=GREEDY)
    cut = {"reward": 0.4, "stop_reason": "max_tokens"}
    run.model_evals(0, [rows.eval(f"t{i}", False) for i in range(60)])
    run.model_evals(1, [rows.eval(f"t{i}", False) | cut for i in range(60)])
    run.finish()
    said = compare_runs(home, [run.id])["summary"]
    assert "Success ties on every task; the reward went from 0 to 0.4 (95 % interval" in said
    assert said.endswith("Answers cut by a limit went from 0% to 100%.")


def test_a_trained_model_that_did_not_get_better_is_diagnosed_next(
    home, evaluation, make_run, rows
):
    run = make_run("sft").evals(0, [rows.eval("t0", False)]).finish()
    same = evaluation({"pebble": 30, f"{run.id}@best": 31})
    (first, *_) = compare_runs(home, [same.id])["next"]
    assert first["tool"] in ("diagnose", "evaluate")
    tools = [call for call in compare_runs(home, [same.id])["next"] if call["tool"] == "diagnose"]
    assert tools == [{"tool": "diagnose", "arguments": {"run_id": run.id}}]
    better = evaluation({"pebble": 30, f"{run.id}@best": 90})
    assert "diagnose" not in [call["tool"] for call in compare_runs(home, [better.id])["next"]]


def test_a_model_that_was_expected_to_stay_the_same_and_did_is_not_diagnosed(
    home, evaluation, make_run, rows
):
    run = make_run("sft").evals(0, [rows.eval("t0", False)]).finish()
    same = evaluation({"pebble": 60, f"{run.id}@best": 60})
    reply = compare_runs(home, [same.id])
    assert reply["verdict"] == "no_difference"
    assert "diagnose" in [call["tool"] for call in reply["next"]]
    with Store(home) as store:
        store.update_run(run.id, only_in={"done"}, expect="no_difference")
    assert "diagnose" not in [call["tool"] for call in compare_runs(home, [same.id])["next"]]


def test_the_word_of_a_failed_audit_travels_with_a_comparison(home, evaluation):
    run = evaluation({"pebble": 30, "tuned": 80})
    assert "audit" not in compare_runs(home, [run.id])["summary"]
    folder = Path(run.run.read_config().env_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", {"verdict": "risk", "risks": ["junk"]})
    said = compare_runs(home, [run.id])
    assert said["verdict"] == "better"
    assert said["summary"].endswith("says risk (junk are paid): a score may not mean right.")


def test_model_references_find_the_newest_evaluation_they_share(home, evaluation):
    evaluation({"pebble": 90, "other": 10})
    newest = evaluation({"pebble": 30, "tuned": 60, "third": 5})
    evaluation({"pebble": 50})
    found = compare_runs(home, ["pebble", "tuned"])
    assert [arm["evaluated_in"] for arm in found["arms"]] == [newest.id, newest.id]
    assert found["comparisons"][0]["difference"] == pytest.approx(0.3)


def test_two_training_runs_are_compared_on_the_half_nothing_was_chosen_on(home, trained):
    slow = trained(0.45, settings={"learning_rate": 1e-4})
    fast = trained(0.75, seed=1, settings={"learning_rate": 1e-3})
    found = compare_runs(home, [slow.id, fast.id])
    assert found["verdict"] == "better" and found["comparisons"][0]["n"] == 200
    assert found["settings"] == {"learning_rate": {slow.id: 1e-4, fast.id: 1e-3}}
    assert found["comparisons"][0]["attribution"]["to"] == "learning_rate"
    assert "One lever changed: learning_rate." in found["summary"]
    assert [arm["step"] for arm in found["arms"]] == [20, 20]
    assert found["arms"][0]["device_hours"] == 0.025


def test_a_difference_is_not_attributed_when_several_levers_changed(home, trained):
    one = trained(0.4, settings={"learning_rate": 1e-4, "group_size": 4, "save_every": 5})
    two = trained(0.8, settings={"learning_rate": 1e-3, "group_size": 8, "save_every": 9})
    found = compare_runs(home, [one.id, two.id])
    cause = found["comparisons"][0]["attribution"]
    assert cause["refused"] and cause["to"] == ""
    assert cause["levers"] == ["learning_rate", "group_size"]  # save_every teaches nothing
    assert "2 levers changed (learning_rate, group_size)" in found["summary"]
    assert set(found["settings"]) == {"learning_rate", "group_size", "save_every"}
    assert found["verdict"] == "better"


def test_a_default_that_follows_a_choice_is_no_lever_of_its_own(home, trained):
    base = {"lora_rank": "recipe", "lora_alpha": "recipe"}
    one = trained(0.4, settings={"lora_rank": 8, "lora_alpha": 16}, sources=base)
    two = trained(
        0.8, settings={"lora_rank": 32, "lora_alpha": 64}, sources=base | {"lora_rank": "user"}
    )
    cause = compare_runs(home, [one.id, two.id])["comparisons"][0]["attribution"]
    assert cause["levers"] == ["lora_rank"]


def test_two_seeds_of_one_setting_differ_by_noise_alone(home, trained):
    one = trained(0.5, settings={"seed": 1})
    two = trained(0.5, seed=3, settings={"seed": 2})
    cause = compare_runs(home, [one.id, two.id])["comparisons"][0]["attribution"]
    assert cause["levers"] == [] and cause["reason"].startswith("only the seed differs")


def seeds_of(trained, shares, start, **settings):
    """Runs of one configuration, one per share, each with a seed of its own."""
    return [
        trained(share, seed=start + at, settings={"seed": start + at} | settings)
        for at, share in enumerate(shares)
    ]


def test_seeds_of_two_configurations_are_compared_as_groups(home, trained):
    slow = seeds_of(trained, (0.42, 0.46, 0.44), 10, learning_rate=1e-4)
    fast = seeds_of(trained, (0.74, 0.70, 0.72), 20, learning_rate=1e-3)
    found = compare_runs(home, [run.id for run in (*slow, *fast)])
    assert len(found["arms"]) == 2 and found["verdict"] == "better"
    assert list(found["arms"][0]["seeds"].values()) == [10, 11, 12]
    assert found["arms"][1]["device_hours"] == 0.075
    (comparison,) = found["comparisons"]
    assert comparison["method"] == "t over 200 tasks and 3 + 3 seeds"
    assert comparison["attribution"]["to"] == "learning_rate"
    assert comparison["difference"] == pytest.approx(0.28, abs=0.03)
    assert "2 more seeds" in found["reference"]
    assert comparison["gained"] > comparison["lost"]


def test_seeds_of_tasks_in_groups_count_the_groups(home):
    """Ten groups of ten tasks that are solved or failed together tell as much as ten tasks."""

    def side(name, solved, group):
        members = [
            Candidate(
                f"{name}{seed}",
                "x",
                "env",
                records(
                    {
                        "task": f"t{at}",
                        "success": at // 10 in solved[seed],
                        "error": None,
                        "task_group": group(at),
                    }
                    for at in range(100)
                ),
                sampling_of(None),
            )
            for seed in range(2)
        ]
        together = [row for each in members for row in each.rows]
        return replace(members[0], label=name, rows=together, members=tuple(members))

    def outcome(group):
        before = side("a", ({0, 1, 2}, {0, 1, 3}), group)
        after = side("b", ({0, 1, 2, 4, 5, 6}, {0, 1, 3, 4, 5, 7}), group)
        return compare_candidates(home, before, after).outcome

    alone, grouped = outcome(lambda at: ""), outcome(lambda at: f"g{at // 10}")
    assert alone.method == "t over 100 tasks and 2 + 2 seeds" and alone.groups == 0
    assert grouped.method == "t over 10 groups and 2 + 2 seeds" and grouped.groups == 10
    # By hand: the differences are 0 on four groups, 1 on two, 0.5 on two and 0 on two; the variance
    # of their mean over ten groups is (2 * 0.7**2 + 2 * 0.2**2 + 6 * 0.3**2) / 9 / 10, over a
    # hundred tasks (20 * 0.7**2 + 20 * 0.2**2 + 60 * 0.3**2) / 99 / 100.
    assert alone.diff == grouped.diff == pytest.approx(0.3)
    # Seeds of one side are equally good, so that only the tasks vary.
    for found, variance, freedom in ((grouped, 1.6 / 90, 9), (alone, 16 / 9900, 99)):
        half = t_quantile(0.975, freedom) * variance**0.5
        assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half))


def test_seeds_that_come_out_far_apart_forbid_a_verdict_that_one_seed_would_give(home, trained):
    """Each fast seed but one beats its slow neighbour; as a group nothing is clear."""
    slow = seeds_of(trained, (0.30, 0.60), 10, learning_rate=1e-4)
    fast = seeds_of(trained, (0.40, 0.80), 20, learning_rate=1e-3)
    alone = compare_runs(home, [slow[1].id, fast[1].id])
    assert alone["verdict"] == "better"
    found = compare_runs(home, [run.id for run in (*slow, *fast)])
    assert found["verdict"] == "inconclusive"
    low, high = found["comparisons"][0]["interval"]
    assert low < 0 < high
    assert any("One more seed on each side" in text for text in found["warnings"])
    assert [call["tool"] for call in found["next"]] == ["read_rollouts"]


def test_a_base_against_several_seeds_counts_their_spread(home, trained):
    runs = seeds_of(trained, (0.66, 0.70, 0.68), 30)
    found = compare_runs(home, ["pebble", *(run.id for run in runs)])
    assert found["reference"] == "pebble" and len(found["arms"]) == 2
    assert found["verdict"] == "better"
    assert found["comparisons"][0]["method"].endswith("1 + 3 seeds")


@pytest.mark.timeout(20)
def test_equal_configurations_with_noisy_seeds_are_told_apart_in_five_percent(home, monkeypatch):
    """Simulated: a configuration's seeds scatter by five points around the same level."""
    monkeypatch.setitem(inference.paired_bootstrap.__kwdefaults__, "resamples", 20)  # not used here
    rng = random.Random(4)
    alarms = 0
    for _ in range(240):
        hard = [rng.random() for _ in range(60)]
        arms = []
        for group in ("a", "b"):
            runs = []
            for seed in range(3):
                level = 0.5 + rng.gauss(0, 0.05)
                rows = [
                    {"task": f"t{i}", "success": h + rng.gauss(0, 0.2) < level, "error": None}
                    for i, h in enumerate(hard)
                ]
                runs.append(
                    Candidate(f"{group}{seed}", "x", "env", records(rows), sampling_of(None))
                )
            together = [row for run in runs for row in run.rows]
            members = tuple(runs)
            arms.append(Candidate(group, "x", "env", together, sampling_of(None), members=members))
        alarms += compare_candidates(home, *arms).outcome.verdict in ("better", "worse")
    assert 0.008 <= alarms / 240 <= 0.08


def test_a_base_model_is_found_at_step_0_of_the_run_that_started_from_it(home, trained):
    run = trained(0.7)
    found = compare_runs(home, ["pebble", run.id])
    assert found["verdict"] == "better"
    assert found["comparisons"][0]["attribution"]["to"] == f"training of {run.id}"
    assert found["arms"][0]["evaluated_in"] == run.id and "step" not in found["arms"][0]


def test_a_run_and_the_run_it_continued_differ_by_one_training(home, trained):
    sft = trained(0.5, "sft")
    grpo = trained(0.8, "grpo", model=sft.id, before=0.5)
    found = compare_runs(home, [sft.id, grpo.id])
    assert found["comparisons"][0]["attribution"]["levers"] == [f"training of {grpo.id}"]
    whole = compare_runs(home, ["pebble", grpo.id, sft.id])
    assert whole["comparisons"][0]["attribution"]["levers"] == [
        f"training of {grpo.id}",
        f"training of {sft.id}",
    ]


def test_a_checkpoint_of_a_run_can_be_named(home, trained, rows):
    run = trained(0.7)
    run.evals(10, rows.halved(lambda i: i < 150, 400))
    found = compare_runs(home, [f"{run.id}@step10", f"{run.id}@best"])
    assert [arm["step"] for arm in found["arms"]] == [10, 20]
    assert found["comparisons"][0]["attribution"]["levers"] == ["checkpoint"]


def test_unequal_sampling_settings_are_refused_by_name(home, evaluation):
    one = evaluation({"pebble": 30}, attempts=4, settings={"temperature": 1.0})
    two = evaluation({"tuned": 60}, attempts=4, settings={"temperature": 0.7, "max_tokens": 32})
    with pytest.raises(UserError) as caught:
        compare_runs(home, [one.id, two.id])
    assert caught.value.code == "NOT_COMPARABLE"
    assert "temperature 1.0 against 0.7" in caught.value.message
    assert "max_tokens 64 against 32" in caught.value.message


def test_greedy_evaluations_ignore_the_temperature_they_did_not_use(home, evaluation):
    one = evaluation({"pebble": 30}, settings={"temperature": 1.0})
    two = evaluation({"tuned": 60}, settings={"temperature": 0.7})
    assert compare_runs(home, [one.id, two.id])["verdict"] == "better"


def test_a_limit_that_was_not_recorded_is_a_warning(home, trained, evaluation):
    sft = trained(0.5, "sft", settings={})
    grpo = trained(0.8, "grpo")
    found = compare_runs(home, [sft.id, grpo.id])
    assert any(sft.id in text and "not recorded" in text for text in found["warnings"])


def test_the_manifest_may_record_how_a_run_was_evaluated():
    config = as_run_config(train_config(algorithm="sft"))
    assert sampling_of(config).max_tokens is None
    recorded = sampling_of(config, {"eval_sampling": {"max_tokens": 24}})
    assert recorded.max_tokens == 24 and recorded.temperature == 0.0


def test_different_environment_versions_are_refused(home, evaluation):
    one = evaluation({"pebble": 30}, env_id="arith@aaaaaaaaaaaa")
    two = evaluation({"tuned": 60}, env_id="arith@bbbbbbbbbbbb")
    with pytest.raises(UserError) as caught:
        compare_runs(home, [one.id, two.id])
    assert caught.value.code == "NOT_COMPARABLE"
    assert "aaaaaaaaaaaa" in caught.value.message and "bbbbbbbbbbbb" in caught.value.message


def test_equal_task_ids_of_two_environments_stay_apart(home, evaluation):
    evaluation({"pebble": 90, "tuned": 10}, env_id="words@cccccccccccc")
    evaluation({"pebble": 10, "tuned": 90})
    newest = compare_runs(home, ["pebble", "tuned"])
    assert newest["env_id"].startswith("arith") and newest["verdict"] == "better"
    assert any("words@cccccccccccc" in text for text in newest["warnings"])
    named = compare_runs(home, ["pebble", "tuned"], "words")
    assert named["verdict"] == "worse" and named["warnings"] == []
    with pytest.raises(UserError, match="only on"):
        compare_runs(home, ["pebble", "tuned"], "numbers")


def test_several_attempts_per_task_are_averaged_and_stay_one_task(home, evaluation):
    run = evaluation({"pebble": 30, "tuned": 70}, attempts=4)
    found = compare_runs(home, [run.id])
    assert found["comparisons"][0]["n"] == 100
    assert found["arms"][0]["attempts"] == 400


def test_many_models_are_corrected_for_their_number(home, make_run, rows):
    """One of seven equal models looks better by chance at 5 %; Holm takes that back."""
    base = [rows.eval(f"t{i}", i >= 100) for i in range(200)]

    def evaluated(changes):
        """The base solves t100 up; each other model gains and loses as many tasks as told."""
        run = make_run(
            "evaluate",
            kind="evaluate",
            models=[{"ref": "base"}, *({"ref": ref} for ref in changes)],
            attempts=1,
            settings=GREEDY,
        )
        run.model_evals(0, base)
        for index, (gained, lost) in enumerate(changes.values(), 1):
            run.model_evals(
                index,
                [rows.eval(f"t{i}", i < gained or 100 <= i < 200 - lost) for i in range(200)],
            )
        return compare_runs(home, [run.finish().id])

    lucky = {"m0": (13, 3)}  # mid-p 0.013 alone
    found = evaluated(lucky | {f"m{i}": (8, 8) for i in range(1, 7)})
    first = found["comparisons"][0]
    assert first["p"] < 0.05 < first["p_adjusted"] and first["verdict"] == "inconclusive"
    assert "correction for 7 comparisons" in first["reason"]
    assert len(json.dumps(found, ensure_ascii=False, separators=(",", ":"))) < 10_000
    assert evaluated(lucky)["verdict"] == "better"


def test_tasks_that_chose_a_checkpoint_of_the_evaluation_are_left_out(
    home, trained, evaluation, rows
):
    run = trained(0.7)
    run.evals(10, rows.halved(lambda i: i < 100, 400))  # so that there was a choice
    shown = compare_runs(home, [evaluation({"pebble": 30, run.id: 60}).id])
    assert "50 of the 100 tasks asked chose a checkpoint of these models" in shown["warnings"][-1]
    # The odd ones of the first 60 of t0 to t99 are solved, of the 50 that chose nothing.
    assert shown["arms"][1]["tasks"] == 50 and shown["arms"][1]["value"] == 0.6
    bases = compare_runs(home, [evaluation({"pebble": 30, "other": 60}).id])
    assert bases["arms"][1]["tasks"] == 100 and bases["warnings"] == []


@pytest.mark.parametrize("ids", [[], ["pebble"] * 3, [f"m{i}" for i in range(9)]])
def test_the_number_of_ids_is_checked(home, evaluation, ids):
    evaluation({"pebble": 30})
    with pytest.raises(UserError) as caught:
        compare_runs(home, ids)
    assert caught.value.code == "BAD_ARGUMENT" and caught.value.field == "ids"


def test_an_unknown_id_names_the_nearest_run(home, trained):
    run = trained(0.5)
    with pytest.raises(UserError) as caught:
        compare_runs(home, [run.id, run.id[:-1] + "77"])
    assert caught.value.code == "RUN_NOT_FOUND"


def test_a_run_that_was_not_evaluated_says_how_to_evaluate_it(home, make_run, trained):
    ids = [trained(0.5).id, make_run("sft").id]
    found = compare_runs(home, ids)
    assert found["verdict"] == "unknown" and "no evaluation to compare" in found["warnings"][0]
    assert found["next"][0]["tool"] == "evaluate" and found["next"][0]["arguments"]["models"] == ids
    with pytest.raises(UserError) as caught:
        compare_runs(home, ["pebble", ids[1]])
    assert caught.value.hint


def test_a_model_given_by_path_never_reads_outside_the_home(home, evaluation, tmp_path):
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "config.json").write_text('{"kind": "train", "settings": {"learning_rate": 666}}')
    run = evaluation({"pebble": 30, str(secret): 60, "../elsewhere": 50})
    assert "666" not in json.dumps(compare_runs(home, [run.id]))


def test_inconclusive_results_suggest_a_larger_evaluation(home, evaluation):
    run = evaluation({"pebble": 30, "tuned": 33}, n=60)
    found = compare_runs(home, [run.id])
    assert found["verdict"] == "inconclusive"
    assert found["next"][0]["tool"] == "evaluate"
    assert found["next"][0]["arguments"]["rows"] >= 400


def pushed(home, rows, env_id="arith@0123456789ab"):
    name, _, hash12 = env_id.partition("@")
    write_version(home.env(name, hash12) / "env.json", rows={"train": 900, "heldout": rows})


def test_a_larger_evaluation_is_no_larger_than_the_split(home, evaluation):
    (home.env("arith", "0123456789ab")).mkdir(parents=True)
    pushed(home, 200)
    run = evaluation({"pebble": 30, "tuned": 33}, n=60)
    call = compare_runs(home, [run.id])["next"][0]
    assert (call["tool"], call["arguments"]["rows"]) == ("evaluate", 200)


def test_where_every_row_is_used_the_next_move_is_more_rows(home, evaluation):
    (home.env("arith", "0123456789ab")).mkdir(parents=True)
    pushed(home, 119)
    run = evaluation({"pebble": 60, "tuned": 63}, n=119)
    found = compare_runs(home, [run.id])
    assert found["verdict"] == "inconclusive"
    assert [call["tool"] for call in found["next"]] == ["push_env", "read_rollouts"]
    (said,) = [text for text in found["warnings"] if "All 119 rows" in text]
    needed = inference.tasks_needed(
        inference.MARGIN, 4 / 120
    )  # three tasks of 119 came out differently
    assert f"at least {needed} held-out rows instead of 119" in said


def test_tasks_that_were_asked_and_do_not_count_are_not_offered_to_be_asked_again(
    home, trained, evaluation, rows
):
    """A client that followed `next` alone asked all 102 tasks for ever: 20 had chosen."""
    run = trained(0.7)
    run.evals(10, rows.halved(lambda i: i < 100, 400))
    run_id = evaluation({"pebble": 55, run.id: 60}).id
    (home.env("arith", "0123456789ab")).mkdir(parents=True, exist_ok=True)
    for held_out, tools in ((100, ["push_env"]), (300, ["evaluate"])):
        pushed(home, held_out)
        found = compare_runs(home, [run_id])
        assert found["verdict"] == "inconclusive" and found["arms"][1]["tasks"] == 50
        offered = [call["tool"] for call in found["next"]]
        assert [tool for tool in offered if tool in ("push_env", "evaluate")] == tools


def test_where_answers_are_noisy_and_every_row_is_used_attempts_are_the_next_move(
    home, make_run, rows
):
    """Two models that solve every task now and then: what differs between tasks is chance alone."""
    rng = random.Random(4)
    (home.env("arith", "0123456789ab")).mkdir(parents=True)
    pushed(home, 400)
    run = make_run(
        "evaluate",
        kind="evaluate",
        models=[{"ref": "a"}, {"ref": "b"}],
        attempts=2,
        settings=GREEDY,
    )
    for index, rate in enumerate((0.5, 0.53)):
        run.model_evals(
            index,
            [
                rows.eval(f"t{i}", rng.random() < rate, attempt=k)
                for i in range(400)
                for k in range(2)
            ],
        )
    found = compare_runs(home, [run.finish().id])
    assert found["verdict"] == "inconclusive"
    call = found["next"][0]
    assert call["tool"] == "evaluate" and 3 <= call["arguments"]["attempts"] <= 8
    assert call["arguments"]["rows"] == 400
    assert any("attempts at each would show" in text for text in found["warnings"])


def test_attempts_help_against_chance_and_not_against_the_choice_of_tasks():
    rng = random.Random(2)

    def sides(chance: float) -> list[inference.Side]:
        """Tasks that are solved always or never, but for a share `chance` of pure luck."""
        made = []
        for _ in range(2):
            fixed = [float(rng.random() < 0.5) for _ in range(200)]
            values = {
                f"t{i}": [
                    f if rng.random() > chance else float(rng.random() < 0.5) for _ in range(4)
                ]
                for i, f in enumerate(fixed)
            }
            made.append(inference.Side(values, 800))
        return made

    assert attempts_needed(*sides(0.0), 0.05) is None
    found = attempts_needed(*sides(1.0), 0.05)
    assert found is not None
    # All of it is chance: a task's gap over k attempts has a variance of 2 * 0.25 / k.
    assert inference.smallest_detectable_mean(200, (0.5 / found) ** 0.5) == pytest.approx(
        0.05, rel=0.2
    )
    single = [inference.Side({f"t{i}": [1.0] for i in range(50)}, 50)] * 2
    assert attempts_needed(*single, 0.05) is None


def test_failed_scorings_that_decide_send_to_the_scorer_and_not_for_more_rows(
    home, evaluation, rows
):
    run = evaluation({"pebble": 100, "tuned": 100}, n=200)
    made = [rows.eval(f"t{i}", i < 108) for i in range(200)]
    for row in made[:9]:
        row |= {"error": "score() raised", "reward": 0.0, "success": None}
    run.run.model_evals(1).unlink()
    run.model_evals(1, made)
    found = compare_runs(home, [run.id])
    assert found["verdict"] == "inconclusive" and "scoring failed decide" in found["summary"]
    assert [call["tool"] for call in found["next"]][:2] == ["read_rollouts", "diagnose"]
    assert any("mend the scorer" in said for said in found["warnings"])


def test_seeds_do_not_get_better_by_breaking_the_scorer(home, trained):
    before = seeds_of(trained, (0.5, 0.5, 0.5), 1)
    after = seeds_of(trained, (0.53, 0.53, 0.53), 11, learning_rate=3e-4)
    for run in after:
        made = load_rows(run.run.evals(20))
        solved = [row for row in made if row["success"] and row["half"] == "report"]
        for row in solved[:9]:
            row |= {"error": "score() raised", "reward": 0.0, "success": None}
        run.run.evals(20).unlink()
        run.evals(20, made)
    found = compare_runs(home, [run.id for run in (*before, *after)])
    assert found["comparisons"][0]["method"].startswith("t over")
    assert found["verdict"] == "inconclusive" and "scoring failed decide" in found["summary"]
