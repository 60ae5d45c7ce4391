"""How often held-out tasks were used to choose."""

import random

from as_json import holdout_use, run_verdict, use_by_env

from engine.evidence.compare.compare import compare_runs
from engine.evidence.stats.inference import ALPHA, mcnemar_midp
from engine.evidence.verdict import holdout_reuse
from engine.evidence.verdict.holdout_reuse import HoldoutUse, correction_factor, reuse_warning
from engine.home.store import Store
from engine.runs.overview import overview

OTHER = "arith@ffffffffffff"


def examined(make_run, rows, steps=(10, 20), gain=0.0, seed=0, **more):
    rng = random.Random(seed)
    run = make_run(**more)
    for step in (0, *steps):
        level = 0.5 + gain * (step > 0)
        run.evals(step, rows.halved(lambda _, v=level: rng.random() < v, 200))
    return run.checkpoint(steps[-1], best=True).finish()


def test_every_checkpoint_compared_and_every_model_evaluated_is_a_look(home, make_run, rows):
    first = examined(make_run, rows)
    models = [{"ref": "pebble"}, {"ref": first.id}]
    evaluation = make_run("evaluate", kind="evaluate", models=models, split="heldout")
    for index in (0, 1):
        evaluation.model_evals(index, [rows.eval("t0", True)])
    evaluation.finish()
    on_train = make_run("evaluate", kind="evaluate", models=models[:1], split="train")
    on_train.model_evals(0, [rows.eval("t9", True)]).finish()
    examined(make_run, rows, steps=(10, 20, 30))
    examined(make_run, rows, env_id=OTHER)
    use = holdout_use(home, first.config["env_id"])
    assert (use["judged"], use["checkpoints"], use["evaluations"]) == (2, 5, 2)
    assert use["looks"] == 9 and holdout_use(home, OTHER)["looks"] == 3
    assert {env: used["looks"] for env, used in use_by_env(home).items()} == {
        first.config["env_id"]: 9,
        OTHER: 3,
    }


def test_a_count_that_is_kept_follows_every_run_that_comes_or_ends(
    home, make_run, rows, monkeypatch
):
    counted, count_uses = [], holdout_reuse._count_uses
    monkeypatch.setattr(
        holdout_reuse, "_count_uses", lambda *given: counted.append(1) or count_uses(*given)
    )
    first = examined(make_run, rows)
    env_id = first.config["env_id"]
    assert use_by_env(home)[env_id]["looks"] == 3
    before = len(counted)
    assert use_by_env(home)[env_id]["looks"] == 3 and len(counted) == before
    examined(make_run, rows, steps=(10, 20, 30))
    assert use_by_env(home)[env_id]["looks"] == 7
    evaluation = make_run("evaluate", kind="evaluate", models=[{"ref": "pebble"}], split="heldout")
    evaluation.model_evals(0, [rows.eval("t0", True)])
    assert use_by_env(home)[env_id]["looks"] == 8
    evaluation.finish()
    assert use_by_env(home)[env_id]["looks"] == holdout_use(home, env_id)["looks"] == 8


def test_a_verdict_counts_the_looks_up_to_its_own_run(home, make_run, rows):
    early = examined(make_run, rows)
    examined(make_run, rows, seed=1)
    assert run_verdict(early.run)["exam_use"]["judged"] == 1
    late = examined(make_run, rows, seed=2)
    assert run_verdict(late.run)["exam_use"] | {"env_id": ""} == {
        "env_id": "",
        "judged": 3,
        "checkpoints": 6,
        "evaluations": 0,
        "looks": 9,
    }


def test_the_lucky_one_of_many_runs_is_doubted_and_a_clear_gain_is_not(make_run, rows):
    for seed in range(7):
        examined(make_run, rows, seed=seed)
    clear = examined(make_run, rows, gain=0.4, seed=50)
    verdict = run_verdict(clear.run)
    assert verdict["verdict"] == "better" and not any("judged" in t for t in verdict["warnings"])
    lucky = HoldoutUse("", 8, 0, 0)
    (said,) = reuse_warning(lucky, "better", 0.03)
    assert "8 runs have been judged on these held-out tasks" in said
    assert "has a chance of 18%" in said and "new tasks" in said  # 1 - 0.975 ** 8
    assert reuse_warning(HoldoutUse("", 4, 0, 0), "better", 0.03) == []
    assert reuse_warning(lucky, "better", 0.001) == []
    assert "best of them" in reuse_warning(lucky, "inconclusive", 0.4)[0]


def test_the_overview_says_it_beside_the_environment(home, make_run, rows):
    run = examined(make_run, rows)
    name, _, hash12 = run.config["env_id"].partition("@")
    with Store(home) as store:
        store.add_env(name, hash12, kind="single", info={"rows": {"train": 1, "heldout": 1}})
        store.add_env(name, "eeeeeeeeeeee", kind="single", info={})
    envs = {env["env_id"]: env for env in overview(home, "envs")["envs"]}
    assert envs[run.config["env_id"]]["exam_use"] == 3
    assert "exam_use" not in envs[f"{name}@eeeeeeeeeeee"]


def test_looking_until_two_models_differ_costs_little_more_than_one_look():
    """Two equal models on 100, 400, 800 and 1600 rows, one asking more while nothing is said."""
    rng, known, found = random.Random(1), {}, {"once": 0, "paid": 0, "unpaid": 0}
    trials = 300
    for _ in range(trials):
        moves = [rng.choices((0, 1, -1), (0.85, 0.075, 0.075))[0] for _ in range(1600)]
        ps = []
        for n in (100, 400, 800, 1600):
            pair = (moves[:n].count(1), moves[:n].count(-1))
            if pair not in known:
                known[pair] = mcnemar_midp(*pair)
            ps.append(known[pair])
        found["once"] += ps[0] < ALPHA
        found["unpaid"] += min(ps) < ALPHA
        found["paid"] += any(p * correction_factor(look) < ALPHA for look, p in enumerate(ps, 1))
    assert found["unpaid"] > 0.1 * trials
    assert found["paid"] < 0.08 * trials and found["paid"] - found["once"] < 0.03 * trials


def evaluated(make_run, rows, n, gained, lost, refs=("pebble", "tuned"), **more):
    config = {"split": "heldout", "rows": n, "attempts": 1} | more
    run = make_run("evaluate", kind="evaluate", models=[{"ref": ref} for ref in refs], **config)
    run.model_evals(0, [rows.eval(f"t{i}", i < lost) for i in range(n)])
    run.model_evals(1, [rows.eval(f"t{i}", lost <= i < lost + gained) for i in range(n)])
    return run.finish()


def test_a_difference_found_by_evaluating_again_has_to_be_clearer(home, make_run, rows):
    first = evaluated(make_run, rows, 100, 6, 3)
    assert not any("evaluated" in said for said in run_verdict(first.run)["warnings"])
    lucky = evaluated(make_run, rows, 400, 15, 5)  # mid-p 0.027
    for found in (run_verdict(lucky.run), compare_runs(home, [lucky.id])):
        assert found["verdict"] == "inconclusive"
        assert "after correction for 2 evaluations of these models" in found["summary"]
        assert any("evaluated 2 times on this environment" in said for said in found["warnings"])
    clear = evaluated(make_run, rows, 800, 40, 10)
    for found in (run_verdict(clear.run), compare_runs(home, [clear.id])):
        assert found["verdict"] == "better"
        assert any("evaluated 3 times on this environment" in said for said in found["warnings"])


def test_a_first_evaluation_and_other_models_rows_and_versions_are_no_looks(home, make_run, rows):
    evaluated(make_run, rows, 100, 6, 3, refs=("pebble", "another"))
    evaluated(make_run, rows, 100, 6, 3, env_id=OTHER)
    evaluated(make_run, rows, 100, 6, 3, split="train")
    evaluated(make_run, rows, 400, 15, 5, regrade="x")
    found = evaluated(make_run, rows, 400, 15, 5)
    evaluated(make_run, rows, 400, 15, 5)  # the same again
    again = evaluated(make_run, rows, 400, 15, 5)
    evaluated(make_run, rows, 900, 15, 5)  # later
    for run in (found, again):
        verdict = run_verdict(run.run)
        assert verdict["verdict"] == "better"
        assert not any("evaluated" in said for said in verdict["warnings"])
