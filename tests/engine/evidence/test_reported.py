"""The one number to report of a trained model, the same wherever it is asked for."""

import json
from pathlib import Path

import pytest

from engine.core.files import write_json
from engine.evidence.compare.compare import compare_runs
from engine.evidence.report.dossier import gather
from engine.evidence.report.markdown import markdown_of
from engine.evidence.reported import number_to_report
from engine.home.store import Store
from engine.runs.ledger import best_runs
from engine.runs.run_status import status_of

NUMBER = ("value", "interval", "tasks")
LIMITS = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "stop": [], "thinking": False}


@pytest.fixture
def trained(make_run, rows):
    """A run that chose step 20 of two on the even ones of its 200 held-out tasks, where it solves
    all from t40 on, and is reported on the odd ones, where it solves them from t100 on."""
    run = make_run("grpo", settings={"max_tokens": 64})
    run.evals(0, rows.halved(lambda i: False, 200))
    run.evals(10, rows.halved(lambda i: i >= 150, 200))
    run.evals(20, rows.halved(lambda i: i >= (100 if i % 2 else 40), 200))
    run.checkpoint(10).checkpoint(20, best=True)
    write_json(run.run.result, {"best_step": 20, "best_score": 0.8, "verdict": "better"})
    return run.finish(verdict="better")


@pytest.fixture
def evaluated(make_run, rows):
    """evaluated(ref, n) -> an evaluation of pebble and the model on n tasks; it solves the odd ones
    of t0 to t99 no better than the run itself did, and all later ones."""

    def make(ref, n, **changes):
        content = {"models": [{"ref": "pebble"}, {"ref": ref}], "split": "heldout", "rows": n}
        run = make_run("evaluate", kind="evaluate", settings=LIMITS, **content | changes)
        run.model_evals(0, [rows.eval(f"t{i}", False) for i in range(n)])
        run.model_evals(1, [rows.eval(f"t{i}", i >= 100) for i in range(n)])
        return run.finish()

    return make


def everywhere(home, run) -> list[dict]:
    """The number of a run's result as each place gives it: value, interval, tasks."""
    with Store(home) as store:
        row = store.get_run(run.id)
        status = status_of(home, store, row)["report_this"]
        (best,) = best_runs(home, store, [row]).values()
        number = number_to_report(home, store, row)
    assert number.sentence in markdown_of(gather(home, run.id))
    assert number.to_json() == status
    arms = [
        compare_runs(home, ["pebble", ref])["arms"][1]
        for ref in (run.id, f"{run.id}@best", f"{run.id}@step20")
    ]
    best = best | {"value": best["score"]}
    return [{name: place[name] for name in NUMBER} for place in (status, best, *arms)]


def test_a_run_has_one_number_wherever_it_is_asked_for_and_however_it_is_spelt(
    home, trained, evaluated
):
    first, *others = everywhere(home, trained)
    assert all(other == first for other in others)
    assert first["value"] == 0.5 and first["tasks"] == 100  # and not the 0.8 of its curve
    low, high = first["interval"]
    assert low < 0.41 and high > 0.59
    # An evaluation of more tasks that chose nothing gives the number from then on.
    larger = evaluated(f"{trained.id}@best", 400)
    first, *others = everywhere(home, trained)
    assert all(other == first for other in others)
    # The 100 even tasks below t200 chose; of the 300 others all but the 50 odd ones below t100.
    assert first["tasks"] == 300 and first["value"] == pytest.approx(250 / 300, abs=1e-4)
    with Store(home) as store:
        row = store.get_run(trained.id)
        assert number_to_report(home, store, row).measured_in == larger.id


def test_the_curve_is_said_to_have_chosen_the_checkpoint(home, trained):
    with Store(home) as store:
        number = number_to_report(home, store, store.get_run(trained.id))
    assert number.to_json()["curve"] == {"value": 0.8, "of": "tasks that chose the checkpoint"}
    assert "success 50.0 % (95 % interval 40.4 % to 59.6 %) on 100 held-out" in number.sentence
    assert "(curve 80.0 %: chose the checkpoint)" in number.sentence


@pytest.mark.parametrize(
    "changes",
    [{"split": "train"}, {"attempts": 4}, {"settings": LIMITS | {"max_tokens": 8}}],
    ids=["training tasks", "sampled", "shorter answers"],
)
def test_an_evaluation_of_another_kind_does_not_give_the_number(
    home, trained, make_run, rows, changes
):
    models = [{"ref": "pebble"}, {"ref": f"{trained.id}@best"}]
    content = {"models": models, "split": "heldout", "rows": 400, "settings": LIMITS} | changes
    run = make_run("evaluate", kind="evaluate", **content)
    run.model_evals(1, [rows.eval(f"t{i}", True) for i in range(400)]).finish()
    with Store(home) as store:
        number = number_to_report(home, store, store.get_run(trained.id))
    assert number.measured_in == trained.id and number.level.tasks == 100


def test_the_word_of_a_failed_audit_travels_with_the_number_and_the_best_run(home, trained):
    folder = Path(trained.run.read_config().env_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", {"verdict": "risk", "risks": ["junk"]})
    with Store(home) as store:
        row = store.get_run(trained.id)
        number = number_to_report(home, store, row)
        (best,) = best_runs(home, store, [row]).values()
    assert number.to_json()["audit"] == best["audit"] == "risk"
    assert number.sentence.endswith("the reward audit says risk: a score may not mean right.")


def test_what_one_answer_to_all_tasks_would_reach_stands_beside_the_number(home, make_run, rows):
    run = make_run("sft")
    env_dir = Path(run.run.find_config().env_dir)
    env_dir.mkdir(parents=True, exist_ok=True)
    teams = ["red", "red", "blue", "green"] * 25  # red is right on half of the reported tasks
    tasks = [
        {"id": f"t{i}", "split": "heldout", "answer": [{"role": "assistant", "content": team}]}
        for i, team in enumerate(teams * 2)
    ]
    (env_dir / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    run.evals(0, rows.halved(lambda i: False, 200))
    run.evals(20, rows.halved(lambda i: i % 4 < 2, 200))
    run.checkpoint(20, best=True)
    write_json(run.run.result, {"best_step": 20, "best_score": 0.5, "verdict": "better"})
    run.finish(verdict="better")
    rival = "Always answering 'red' would be right on 50 of 100 of these tasks (50%)"
    with Store(home) as store:
        number = number_to_report(home, store, store.get_run(run.id))
    assert number is not None and rival in number.sentence
    assert number.to_json()["constant_answer"] == {"answer": "red", "right": 0.5}
    reply = compare_runs(home, [f"{run.id}@step0", run.id])
    assert rival in reply["summary"]
