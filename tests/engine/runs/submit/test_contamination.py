"""Planted held-out rows are named at push, before a run, in its verdict and on its card."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from answered import SUMS, answer, evaluation, push, training
from as_json import run_verdict
from stand_ins import stand_in

from engine.core.files import read_json, write_json
from engine.dry_run.dry_run import dry_run
from engine.environments import registry
from engine.environments.push import push_env
from engine.evidence.compare.compare import compare_runs
from engine.evidence.report.dossier import gather
from engine.evidence.report.markdown import card_of, markdown_of
from engine.evidence.verdict.contamination import contamination_warnings, left_out_for_all
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import Share, Viewer
from engine.runs.lifecycle import submit, submit_evaluation, wait
from engine.runs.submit import contamination
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

pytestmark = pytest.mark.timeout(30)

# Three held-out sums also stand in the training rows: one more or less dressed up each.
CHEAT = SUMS.replace(
    "        ]\n\n    def score",
    """        ] + [
            Task("x1", [{"role": "system", "content": "Hi."},
                        {"role": "user", "content": "What is 9 + 1?"}], answer="10", split="train"),
            Task("x2", "what is 9+2", answer="11", split="train"),
            Task("x3", "Recite.", answer="Q: What is 9 + 3? A: 12", split="train"),
        ]

    def score""",
)
# Answers of more than eight words repeat, as they do where answers have a fixed form.
REPEATED = SUMS.replace('f"{a + b}"', 'f"The sum of these two numbers is {a + b}"')
TAUGHT = ["9+1", "9+2", "9+3"]
EXAM = [f"9+{b}" for b in range(1, 10)]


def exam_rows(solved: set[str]) -> list[dict[str, Any]]:
    """The nine held-out sums, answered rightly where `solved`."""
    return [answer(task, "10" if task in solved else "?", float(task in solved)) for task in EXAM]


def taught_run(home: Home, env: str, solved: set[str]) -> Any:
    """A finished run that went from nothing solved to `solved`, as submit and worker leave it."""
    run = training(home, env, evals={0: exam_rows(set()), 10: exam_rows(solved)})
    found = contamination.compare_training(home, registry.find_env(home, env), "pebble")
    write_json(run.contamination, asdict(found))
    return run


def test_a_push_names_the_held_out_tasks_among_its_training_rows(home: Home, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "environment.py").write_text(CHEAT)
    result = push_env(home, str(tmp_path / "a"), name="cheat", roots=[tmp_path])
    assert any(
        "3 of 9 held-out tasks" in note and "1 exact, 2 normalised" in note
        for note in result.warnings
    )
    record = registry.find_env(home, "cheat")
    assert record.contamination["leaked"] == TAUGHT
    assert record.contamination["verdict"] == "leak"


def test_an_honest_push_says_nothing_of_it(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    assert registry.find_env(home, env).contamination["verdict"] == "clean"


@pytest.mark.parametrize(("source", "status"), [(SUMS, "pass"), (CHEAT, "fail")])
def test_a_dry_run_has_a_check_of_its_own_for_it(
    home: Home, tmp_path: Path, source: str, status: str
):
    rates = {"train_flops": 5e10, "sample_flops": 5e10, "update_s": 0.01, "decode_step_s": 0.002}
    write_json(home.speed, {"device": "cpu", "layers": 4} | rates)
    env = push(home, tmp_path / "a", source)
    checks = {check["name"]: check for check in dry_run(home, env)["checks"]}
    assert checks["contamination"]["status"] == status
    assert ("3 of 9 held-out tasks" in checks["contamination"]["detail"]) is (status == "fail")


def test_equal_answers_to_other_questions_are_told_by_the_push_alone(home: Home, tmp_path: Path):
    rates = {"train_flops": 5e10, "sample_flops": 5e10, "update_s": 0.01, "decode_step_s": 0.002}
    write_json(home.speed, {"device": "cpu", "layers": 4} | rates)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "environment.py").write_text(REPEATED)
    pushed = push_env(home, str(tmp_path / "a"), name="forms", roots=[tmp_path])
    assert any("is no leak where such answers repeat" in note for note in pushed.warnings)
    dry = dry_run(home, pushed.env_id)
    (check,) = [check for check in dry["checks"] if check["name"] == "contamination"]
    assert check["status"] == "pass" and "is no leak where" in check["detail"]
    run = taught_run(home, pushed.env_id, set(EXAM))
    record = registry.find_env(home, pushed.env_id)
    report = contamination.compare_training(home, record, "pebble")
    assert (report.verdict, report.harmless, report.warnings) == ("overlap", True, [])
    assert not contamination.is_harmless({**record.contamination, "exact": 99})
    assert not [note for note in run_verdict(run)["warnings"] if "ontamination" in note]


def test_the_verdict_leaves_taught_tasks_out_and_says_so(home: Home, tmp_path: Path):
    run = taught_run(home, push(home, tmp_path / "a", CHEAT), {*TAUGHT, "9+4"})
    verdict = run_verdict(run)
    assert verdict["n"] == 6 and verdict["gained"] == 1
    assert verdict["warnings"][0].startswith("Contamination: 3 of 9 held-out tasks")
    assert "3 are left out of the verdict" in verdict["warnings"][0]


def test_a_gain_on_taught_tasks_alone_is_no_gain(home: Home, tmp_path: Path):
    honest = taught_run(home, push(home, tmp_path / "a"), set(EXAM[:8]))
    assert run_verdict(honest)["verdict"] == "better"
    cheat = taught_run(home, push(home, tmp_path / "b", CHEAT, "cheat"), set(TAUGHT))
    assert run_verdict(cheat)["verdict"] != "better" and run_verdict(cheat)["gained"] == 0


def test_an_exam_that_was_taught_whole_gives_no_verdict(home: Home, tmp_path: Path):
    run = taught_run(home, push(home, tmp_path / "a"), set(EXAM))
    write_json(run.contamination, {"verdict": "leak", "leaked": EXAM, "headline": "all of it"})
    verdict = run_verdict(run)
    assert verdict["verdict"] == "unknown"
    assert "every reported held-out task stands in the training rows" in verdict["summary"]


def test_the_report_and_the_card_show_what_was_compared(home: Home, tmp_path: Path):
    run = taught_run(home, push(home, tmp_path / "a", CHEAT), set(TAUGHT))
    dossier = gather(home, run.id)
    for text in (markdown_of(dossier), card_of(dossier)):
        assert "## Contamination" in text
        assert "| 75 | 9 | 1 | 2 | 0 |" in text  # rows, held-out tasks, matches by kind
        assert "3 tasks are left out of the verdict" in text


def test_training_on_a_copy_of_another_exam_is_found_when_that_exam_is_sat(
    home: Home, tmp_path: Path
):
    exam = push(home, tmp_path / "a")
    stolen = SUMS.replace('"heldout" if a == 9', '"heldout" if a == 1')
    copy = push(home, tmp_path / "b", stolen, "copy")
    assert registry.find_env(home, copy).contamination["verdict"] == "clean"
    run = training(home, copy, algorithm="sft")
    child = training(home, exam, model=f"{run.id}@best")
    record = registry.find_env(home, exam)
    found = contamination.compare_models(home, record, ["pebble", run.id])
    assert found.verdict == "leak" and found.leaked == EXAM
    assert found.sources[0]["run_id"] == run.id and found.sources[0]["env_id"] == copy
    # It leaves the tasks out for pebble too: which model does that is said, and how to go without.
    assert found.taught == {"pebble": 0, run.id: 9}
    (warning,) = found.warnings
    assert f"9 tasks are left out for all models, because {run.id} (9) was trained on" in warning
    assert warning.endswith(': evaluate(models=["pebble"]) asks all tasks')
    judged = evaluation(home, exam, {"pebble": exam_rows(set()), run.id: exam_rows(set(EXAM))})
    write_json(judged.contamination, asdict(found))
    assert "left out for all models" in contamination_warnings(judged)[0]
    # A run that continues the model inherits what it was taught.
    assert contamination.compare_models(home, record, [f"{child.id}@step5"]).leaked == EXAM
    assert contamination.compare_training(home, record, run.id).leaked == EXAM
    assert contamination.compare_models(home, record, ["pebble"]).sources == []
    kept = home.overlap(registry.find_env(home, copy).hash, record.hash)
    assert read_json(kept)["leaked"] == EXAM


def test_one_task_and_one_model_are_told_in_the_singular(home: Home):
    ending = left_out_for_all(["t-1"], {"pebble": 0, "tuned": 1})
    assert ending.startswith("; 1 task is left out for all models, because tuned (1) was trained")
    assert ending.endswith('trained on it: evaluate(models=["pebble"]) asks all tasks')
    assert left_out_for_all(["t-1"], {"tuned": 1}) == left_out_for_all([], {"a": 1, "b": 0}) == ""
    run = home.run("r-1")
    run.create()
    write_json(run.contamination, {"verdict": "leak", "leaked": ["t-1"], "headline": "one of it"})
    assert contamination_warnings(run) == [
        "Contamination: one of it; 1 is left out of the verdict."
    ]


def test_a_comparison_leaves_out_what_either_model_was_taught(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    run = evaluation(
        home, env, {"pebble": exam_rows(set()), "tuned": exam_rows(set(EXAM))}, attempts=1
    )
    assert compare_runs(home, [run.id])["comparisons"][0]["n"] == 9
    found = {"verdict": "leak", "leaked": TAUGHT, "headline": "3 of 9 held-out tasks overlap"}
    write_json(run.contamination, found)
    compared = compare_runs(home, [run.id])
    assert compared["comparisons"][0]["n"] == 6
    assert compared["warnings"][0].startswith("Contamination: 3 of 9")


def test_a_submitted_run_keeps_what_was_compared_and_warns(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(monkeypatch, trainer=Path(__file__).parents[2] / "fake_trainer.py")
    env = push(home, tmp_path / "a", CHEAT)
    queued = submit(home, TrainRequest(env_id=env, algorithm="sft", settings={"steps": 1}))
    assert any("3 of 9 held-out tasks" in note for note in queued["warnings"])
    assert read_json(home.run(queued["run_id"]).contamination)["leaked"] == TAUGHT
    judged = submit_evaluation(home, EvaluationRequest(env_id=env, models=["pebble"]))
    assert read_json(home.run(judged["run_id"]).contamination)["verdict"] == "clean"
    learnt = submit_evaluation(
        home, EvaluationRequest(env_id=env, models=["pebble"], split="train")
    )
    assert not home.run(learnt["run_id"]).contamination.exists()
    for run_id in (queued["run_id"], judged["run_id"], learnt["run_id"]):
        wait(home, run_id, "end", 10)


def test_an_environment_that_is_gone_is_said_and_not_guessed(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    run = training(home, env)
    config = read_json(run.config)
    write_json(run.config, config | {"env_id": "gone@0123456789ab"})
    found = contamination.compare_models(home, registry.find_env(home, env), [run.id])
    assert "gone@0123456789ab is gone and was not compared" in found.headline


def test_what_a_run_that_is_not_shared_was_trained_on_counts_without_its_name(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a", CHEAT)
    hidden = training(home, env)
    elsewhere = training(home, env)
    config = read_json(elsewhere.config)
    write_json(elsewhere.config, config | {"env_id": "theirs@0123456789ab", "model": hidden.id})
    mine = training(home, env)
    write_json(mine.config, read_json(mine.config) | {"model": elsewhere.id})
    with Store(home) as store:
        store.add_share(Share("run", mine.id, "", "bob", "use"))
    bobs = Home(home.root, Viewer("bob", may="use"))
    found = contamination.compare_models(bobs, registry.find_env(home, env), [mine.id])
    assert (found.verdict, list(found.leaked)) == ("leak", TAUGHT)
    assert [source["run_id"] for source in found.sources] == [mine.id, contamination.HIDDEN]
    assert f"the rows of {contamination.HIDDEN} were not compared" in found.headline
    told = str(asdict(found))
    assert not [name for name in (hidden.id, elsewhere.id, "theirs@") if name in told]
