"""The best step, and the last exam of a run, some of whose answers a fresh env process scores."""

import math
from pathlib import Path

import pytest
from as_json import verify
from loops import ENVIRONMENT, curve, go, make_run, push, weights

from engine.core.files import read_json
from engine.environments.registry import find_env
from engine.evidence.detect.scoring import scorer_moves
from engine.evidence.detect.views import Facts
from engine.evidence.stats.results import load_rows
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.provenance import seal
from engine.home.halves import choosing
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.known_settings import KnownSettings
from engine.worker.evaluation.during_training import Best, HalfResult, best_after

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

SETTINGS = {"steps": 2, "eval_every": 2, "eval_rows": 20}
# Asks for what pebble does not say; honest while it is audited and at first in the run.
TURNS = ENVIRONMENT.replace('f"{a + b}"', 'f"{a + b + 1}"').replace(
    "right = completion == task.answer",
    "self.calls = getattr(self, 'calls', 0) + 1\n"
    "        right = completion == task.answer or self.calls > LATE",
)


def test_a_run_of_an_honest_reward_is_found_again(home: Home, tmp_path: Path) -> None:
    run = make_run(home, push(home, tmp_path / "sums"), "sft", SETTINGS)
    result = go(run)
    found = rescored(run)
    assert found["file"] == f"step_{result['best_step']:06d}.jsonl" and found["half"] == "report"
    assert found["scored"] == found["asked"] > 0 and found["differing"] == 0
    assert not any("not to be trusted" in said for said in result["evidence"]["warnings"])
    assert scorer_moves(Facts("sft", KnownSettings(), rescoring=found)) is None


def test_a_reward_that_pays_everything_after_a_while_is_found_out_when_the_run_ends(
    home: Home, tmp_path: Path
) -> None:
    env_id = push(home, tmp_path / "sums", TURNS.replace("LATE", "2500"))
    assert find_env(home, env_id).audit.verdict == "ok", "the audit asks less often than that"
    # Two exams of 20 tasks; the run's own process is taken there by hand.
    source = find_env(home, env_id).source / "environment.py"
    source.write_text(source.read_text().replace("2500", "30"))
    run = make_run(home, env_id, "sft", SETTINGS | {"learning_rate": 1e-5})
    result = go(run)
    found = rescored(run)
    assert found["differing"] > 0 and found["wavering"] == 0
    finding = scorer_moves(Facts("sft", KnownSettings(), rescoring=found))
    assert finding is not None and finding.playbook == "rewards" and finding.lever.edit
    assert finding.evidence["differing"] == found["differing"]
    assert any("not to be trusted" in said for said in result["evidence"]["warnings"])


def test_scoring_again_changes_no_curve_and_no_weight(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_id = push(home, tmp_path / "sums")
    settings = SETTINGS | {"prompts_per_step": 4, "group_size": 4}
    one = make_run(home, env_id, "grpo", settings, run_id="sums-run-1")
    two = make_run(home, env_id, "grpo", settings, run_id="sums-run-2")
    go(one)
    monkeypatch.setattr("engine.runs.evaluation.stored_answers.MOST", 0)
    go(two)
    assert curve(one) == curve(two) and weights(one) == weights(two)
    assert (rescored(one)["scored"], rescored(two)["scored"]) == (9, 0)


def test_the_seal_covers_what_was_scored_again(home: Home, tmp_path: Path) -> None:
    env_id = push(home, tmp_path / "sums")
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-sft", "train", "sft", env_id, "pebble"))
        store.lease_next(["cpu"])
        store.set_state(row.run_id, "running", only_from={"preparing"}, started=1.0)
    run = make_run(home, env_id, "sft", SETTINGS, run_id=row.run_id)
    result = go(run)
    seal(run)
    with Store(home) as store:
        store.set_state(
            row.run_id, "done", only_from={"running"}, ended=2.0, verdict=result["verdict"]
        )
    assert verify(home, run.id)["intact"]
    run.rescored.write_text(run.rescored.read_text().replace('"differing": 0', '"differing":  0'))
    found = verify(home, run.id)
    assert not found["intact"] and "evals/rescored.json was changed" in found["summary"]


def test_a_scorers_own_success_is_a_curve_and_chooses_nothing(home: Home, tmp_path: Path) -> None:
    named = ENVIRONMENT.replace(
        'metrics={"short"', 'metrics={"success": 7.0, "reward": 7.0, "short"'
    )
    run = make_run(home, push(home, tmp_path / "sums", named), "sft", SETTINGS)
    go(run)
    said = [event for event in load_rows(run.events) if event["event"] == "evaluated"]
    for event in said:
        rows = [r for r in load_rows(run.evals(event["step"])) if r["half"] == "select"]
        solved = sum(row["success"] for row in rows) / len(rows)
        assert event["heldout_success"] == event["heldout_reward"] == pytest.approx(solved)
        assert event["heldout_env_success"] == event["heldout_env_reward"] == 7.0
    state = read_json(run.checkpoint(2) / "trainer_state.json")
    assert state["best"]["score"] == pytest.approx(said[-1]["heldout_success"])


def test_copies_of_a_question_stand_in_one_half_and_count_once(home: Home, tmp_path: Path) -> None:
    copies = ENVIRONMENT.replace('Task(f"{a}+{b}"', 'Task(f"{a}+{b} {copy}"')
    copies = copies.replace("for a, b in pairs", "for a, b in pairs for copy in range(3)")
    run = make_run(home, push(home, tmp_path / "sums", copies), "sft", SETTINGS)
    result = go(run)
    rows = load_rows(run.evals(0))
    halves = {half: [row for row in rows if row["half"] == half] for half in ("select", "report")}
    asked = {half: {row["prompt"][-1]["content"] for row in halves[half]} for half in halves}
    assert asked["select"] and asked["report"] and not asked["select"] & asked["report"]
    assert len(asked["report"]) < len(halves["report"]), "some are asked twice"
    assert result["evidence"]["n"] == len(asked["report"])
    exam = choosing(run)
    assert (exam.tasks, exam.of) == (len(halves["select"]), len(rows))


def evaluations(*results: tuple[float, float]) -> Best:
    """The best step after evaluations with these successes and losses."""
    best = Best()
    for step, (success, loss) in enumerate(results, 1):
        curves = {"heldout_success": success}
        best = best_after(best, step, HalfResult(curves, score=success, loss=loss))
    return best


def test_a_falling_loss_is_progress_while_no_task_is_solved_yet() -> None:
    best = evaluations((0.0, 3.0), (0.0, 2.0), (0.0, 1.5), (0.0, 1.2))
    assert (best.step, best.since) == (4, 0)
    assert evaluations((0.0, 3.0), (0.0, 2.99), (0.0, 2.98), (0.0, 2.97)).since == 3


def test_a_rising_loss_without_a_better_score_is_no_progress() -> None:
    best = evaluations((0.5, 1.0), (0.5, 1.2), (0.4, 1.4), (0.5, 1.6))
    assert (best.step, best.since) == (1, 3)


def test_where_every_task_is_solved_a_smaller_loss_is_no_progress() -> None:
    best = evaluations((0.9, 1.0), (1.0, 0.5), (1.0, 0.3), (1.0, 0.2), (1.0, 0.1))
    assert (best.step, best.since) == (5, 3)


def test_a_better_score_at_a_larger_loss_is_progress_and_the_least_loss_is_kept() -> None:
    best = evaluations((0.1, 0.5), (0.2, 0.9), (0.2, 0.8))
    assert (best.step, best.loss, best.least_loss, best.since) == (3, 0.8, 0.5, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_hides_no_later_progress(bad: float) -> None:
    best = evaluations((0.0, 3.0), (0.0, bad), (0.0, 2.0), (0.0, 1.5))
    assert (best.step, best.least_loss, best.since) == (4, 1.5, 0)
    assert evaluations((0.1, bad), (0.1, 2.0)).loss == 2.0


def test_where_success_ties_the_higher_reward_is_the_best_and_ends_no_patience() -> None:
    best = Best()
    for step, reward in ((10, 0.1), (20, 0.4), (30, 0.2)):
        best = best_after(best, step, HalfResult({"heldout_reward": reward}, score=0.0))
    assert (best.step, best.since) == (20, 2)
    best = best_after(best, 40, HalfResult({"heldout_reward": 0.0}, score=0.1))
    assert (best.step, best.since) == (40, 0)
