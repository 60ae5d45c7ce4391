"""Where a run stands while it goes on: hours, share answered, what is left, whether it hangs."""

import fcntl
import json
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.core.files import append_line, write_json
from engine.home.store import Store
from engine.machine.pace.heartbeat import Heartbeat, Work
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest

pytestmark = pytest.mark.timeout(60)


def test_the_hours_of_a_run_count_while_it_goes_on(bench, env):
    run = bench.start(steps=2, hold_at=2)
    bench.until_step(run, 1)
    bench.until(
        lambda: lifecycle.status(bench.home, run.id)["spent_hours"] > 0, "some time is counted"
    )
    assert bench.row(run).spent_hours == 0
    bench.go(run)
    row = bench.until_state(run, "done")
    status = lifecycle.status(bench.home, run.id)
    assert status["spent_hours"] == pytest.approx(row.spent_hours, abs=1e-5)


def test_an_evaluation_under_way_says_how_much_is_answered(busy, bench, env):
    request = EvaluationRequest(env_id=env, models=["pebble"], rows=500, attempts=2)  # there are 20
    reply = lifecycle.submit_evaluation(bench.home, request)
    assert reply["estimate"]["gpu_hours"] > 0
    run = bench.home.run(reply["run_id"])
    with Store(bench.home) as store:
        assert store.get_run(run.id).estimated_hours == pytest.approx(
            reply["estimate"]["gpu_hours"], abs=1e-4
        )
        assert "percent" not in lifecycle.status(bench.home, run.id)
        lock = launcher_lock(run)
        store.set_state(run.id, "preparing", only_from={"queued"}, device="cuda:7")
        for _ in range(5):
            append_line(run.model_evals(0), {"task": "a"})
        assert lifecycle.status(bench.home, run.id)["percent"] == 12.5
        store.set_state(run.id, "failed", only_from={"preparing"})
    lock.close()


def test_the_word_of_a_failed_audit_stands_beside_the_scores_of_an_evaluation(busy, bench, env):
    request = EvaluationRequest(env_id=env, models=["pebble"])
    run = bench.home.run(lifecycle.submit_evaluation(bench.home, request)["run_id"])
    write_json(run.result, {"models": [{"ref": "pebble", "success": 0.9, "attempts": 10}]})
    with Store(bench.home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"}, device="cuda:7")
        store.set_state(run.id, "running", only_from={"preparing"})
        store.set_state(run.id, "done", only_from={"running"})
    assert not [w for w in lifecycle.status(bench.home, run.id)["warnings"] if "audit" in w]
    audit = {"verdict": "risk", "risks": ["junk"]}
    write_json(Path(run.read_config().env_dir) / "audit.json", audit)
    (said,) = [w for w in lifecycle.status(bench.home, run.id)["warnings"] if "audit" in w]
    assert "says risk (junk are paid): a score may not mean right" in said


def test_what_was_forgotten_is_said_once(home, tuned):
    lost = "Forgotten (pebble skills): 94 % to 4 % on 120 tasks."
    evidence = {"warnings": [lost, "About 900 reported tasks would show a change of 5 points."]}
    summary = f"Better: held-out success went from 0.0 % to 14.0 % on 100 tasks. {lost}"
    write_json(home.run(tuned).result, {"summary": summary, "evidence": evidence})
    status = lifecycle.status(home, tuned)
    assert json.dumps(status).count("Forgotten") == 1 and lost in status["summary"]
    assert status["warnings"] == ["About 900 reported tasks would show a change of 5 points."]


def test_the_verdict_is_said_once_at_the_end_of_a_run(home, tuned):
    went = "held-out success went from 0.0 % to 14.0 % on 100 tasks."
    write_json(home.run(tuned).result, {"summary": f"Better: {went}"})
    assert lifecycle.status(home, tuned)["summary"] == f"{tuned} is done, verdict better: {went}"
    write_json(home.run(tuned).result, {"summary": "Searched 8 prompts."})
    said = lifecycle.status(home, tuned)["summary"]
    assert said == f"{tuned} is done, verdict better. Searched 8 prompts."


def test_what_would_have_shown_is_left_out_once_a_difference_has_shown(home, tuned):
    gap = {"smallest_detectable_gap": 0.14, "smallest_detectable_gap_is": "measured: 9 of 100"}
    evidence = {"difference": 0.4, "n": 100, **gap}
    for verdict, told in (("better", {}), ("inconclusive", gap)):
        write_json(home.run(tuned).result, {"verdict": verdict, "evidence": evidence})
        shown = lifecycle.status(home, tuned)["result"]["evidence"]
        assert {name: value for name, value in shown.items() if name in gap} == told


def test_a_cancelled_run_that_has_a_best_checkpoint_offers_to_judge_it(busy, bench):
    run = bench.queue()
    (run.checkpoints / "step_000010").mkdir(parents=True)
    run.best.symlink_to("step_000010")
    with Store(bench.home) as store:
        store.set_state(run.id, "cancelled", only_from={"queued"}, reason_kind="cancelled")
        model = store.get_run(run.id).model
    calls = lifecycle.status(bench.home, run.id)["next"]
    assert calls[-1]["tool"] == "evaluate"
    assert calls[-1]["arguments"]["models"] == [model, f"{run.id}@best"]


def test_a_cancelled_run_says_that_its_skills_were_not_asked_again(busy, bench):
    run = bench.queue()
    with Store(bench.home) as store:
        store.set_state(run.id, "cancelled", only_from={"queued"}, reason_kind="cancelled")
    assert lifecycle.status(bench.home, run.id)["warnings"] == []
    for when, told in (("before", 1), ("after", 0)):
        run.kept(when).parent.mkdir(exist_ok=True)
        append_line(run.kept(when), {"task": "copy-1"})
        warnings = lifecycle.status(bench.home, run.id)["warnings"]
        assert sum("kept skills were asked before training alone" in w for w in warnings) == told


def heartbeat_of(run, phase: str, *, age_s: float = 0.0, **facts) -> None:
    """The last sign of life of a trainer, given `age_s` seconds ago."""
    heartbeat = Heartbeat(1, time.time() - age_s, phase, **facts)
    run.heartbeat.write_bytes(heartbeat.to_line())


@contextmanager
def under_way(bench, **settings):
    """A run that holds a device, whose processes this test plays."""
    run = bench.queue(**settings)
    lock = launcher_lock(run)
    with Store(bench.home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"}, device="cuda:7")
        store.set_state(run.id, "running", only_from={"preparing"})
        append_line(run.events, {"event": "started", "total_steps": 300})
        append_line(run.metrics, {"step": 60, "time": time.time()})
        yield run
        store.set_state(run.id, "failed", only_from={"running"})
    lock.close()


# 60 of 300 steps at 6 s, 100 of 400 answers at 0.1 s.
WORK = {"training": Work(300, 60, 360.0, 2160.0), "evaluation": Work(400, 100, 10.0)}


def test_a_run_says_what_is_left_what_it_will_cost_and_where_its_cap_stops_it(bench):
    bench.home.config_file.write_text("gpu_hour_price = 3.0\n")
    with under_way(bench, max_gpu_hours=0.3) as run:
        heartbeat_of(run, "training", work=WORK)
        status = lifecycle.status(bench.home, run.id)
        forecast = status["forecast"]
        assert status["eta_s"] == pytest.approx(240 * 6 + 30, abs=3)
        assert forecast["basis"] == "measured"
        assert forecast["left_hours"]["likely"] == pytest.approx(1470 / 3600, abs=1e-3)
        low, high = forecast["left_hours"]["low"], forecast["left_hours"]["high"]
        assert low < 1470 / 3600 < high
        assert forecast["total_money"]["likely"] == pytest.approx(3 * 1470 / 3600, abs=1e-2)
        # 0.3 h are 1080 s; steps and evaluations up to the last step take 1470.
        assert "max_gpu_hours=0.3 is spent at step 236 of 300" in forecast["cap"]
        assert forecast["cap"] in status["summary"] and forecast["cap"] in status["warnings"]


def test_a_run_that_has_passed_its_target_says_so_once_and_what_stopping_it_leaves(bench):
    with under_way(bench, expect="90 %") as run:
        append_line(run.events, {"event": "evaluated", "step": 20, "heldout_success": 0.85})
        status = lifecycle.status(bench.home, run.id)
        assert status["target"] == "90 %; best so far 0.85"
        assert "target" not in status["summary"] and "target_passed" not in status
        append_line(run.events, {"event": "evaluated", "step": 40, "heldout_success": 0.94})
        status = lifecycle.status(bench.home, run.id)
        assert "its target 90 % is passed on the tasks that choose" in status["summary"]
        assert "(94.0 % at step 40), but no checkpoint is there yet" in status["summary"]
        assert "target_passed" not in status and "target_note" not in status
        (run.checkpoints / "step_000040").mkdir(parents=True)
        run.best.symlink_to("step_000040")
        status = lifecycle.status(bench.home, run.id)
        assert (
            f"stops it and keeps {run.id}@best, without a verdict or a check of kept skills"
            in (status["summary"])
        )
        assert status["target_passed"]


def test_a_run_whose_start_passes_its_target_may_be_stopped_without_a_checkpoint(bench):
    with under_way(bench, expect="90 %") as run:
        append_line(run.events, {"event": "evaluated", "step": 0, "heldout_success": 0.94})
        status = lifecycle.status(bench.home, run.id)
        assert "(94.0 % at step 0): the model it starts from does" in status["summary"]
        assert status["target_passed"]


def test_a_run_within_its_cap_says_nothing_of_it_and_names_no_money_without_a_price(bench):
    with under_way(bench, max_gpu_hours=2.0) as run:
        heartbeat_of(run, "training", work=WORK)
        status = lifecycle.status(bench.home, run.id)
        assert set(status["forecast"]) == {"spent_hours", "left_hours", "total_hours", "basis"}
        assert status["warnings"] == []


def test_a_run_that_stop_early_ended_says_at_which_step(home, tuned):
    run = home.run(tuned)
    run.metrics.write_text(json.dumps({"step": 10, "time": 2.0, "loss": 1.0}) + "\n")
    for total, is_early in ((16, True), (10, False)):
        event = {"time": 1.0, "event": "started", "message": "", "total_steps": total}
        run.events.write_text(json.dumps(event) + "\n")
        says = (
            "(it ended early, at step 10 of 16: see the event stopped_early)"
            in lifecycle.status(home, tuned)["summary"]
        )
        assert says is is_early


def test_before_a_trainer_has_planned_its_work_the_estimate_is_told(bench):
    with under_way(bench) as run:
        forecast = lifecycle.status(bench.home, run.id)["forecast"]
        hours = run.read_config().estimate.hours
        assert forecast["basis"] == "estimate"
        assert forecast["left_hours"]["likely"] == pytest.approx(hours.likely, abs=1e-3)


def test_within_an_evaluation_of_a_training_run_the_share_answered_is_told(bench):
    with under_way(bench) as run:
        heartbeat_of(run, "evaluation", done=30, of=120, work=WORK)
        status = lifecycle.status(bench.home, run.id)
        assert (status["phase"], status["percent"]) == ("evaluation", 25.0)
        assert "in its evaluation (25 %)" in status["summary"]
        (listed,) = lifecycle.overview(bench.home, "runs")["runs"]
        assert (listed["phase"], listed["percent"]) == ("evaluation", 25.0)
        heartbeat_of(run, "training", work=WORK)
        assert "percent" not in lifecycle.status(bench.home, run.id)


def test_a_run_that_is_silent_for_too_long_is_stalled_and_says_what_to_do(bench):
    with under_way(bench) as run:
        heartbeat_of(run, "training", age_s=400, work=WORK)
        status = lifecycle.status(bench.home, run.id)
        assert status["state"] == "running"
        assert "no sign of life for 7 min in the phase training" in status["stalled"]
        assert "stalled" in status["summary"]
        tools = [call["tool"] for call in status["next"]]
        assert tools == ["read_logs", "cancel_run", "submit_train"]
        (listed,) = lifecycle.overview(bench.home, "runs")["runs"]
        assert listed["stalled"] == status["stalled"]


@pytest.mark.parametrize("phase", ["loading", "checkpoint", "finishing"])
def test_a_phase_that_is_quiet_by_nature_is_not_stalled_so_soon(bench, phase):
    with under_way(bench) as run:
        heartbeat_of(run, phase, age_s=400, work=WORK)
        status = lifecycle.status(bench.home, run.id)
        assert "stalled" not in status and status["quiet_s"] >= 400


def test_the_heartbeat_of_an_earlier_attempt_says_nothing_of_this_one(bench):
    with under_way(bench) as run, Store(bench.home) as store:
        heartbeat_of(run, "training", age_s=4000, work=WORK)
        store.update_run(run.id, only_in={"running"}, attempt=2)
        status = lifecycle.status(bench.home, run.id)
        assert "stalled" not in status and status["forecast"]["basis"] == "estimate"


def test_a_run_of_an_earlier_version_is_judged_by_the_times_of_its_steps(bench):
    with under_way(bench) as run:
        append_line(run.metrics, {"step": 61, "time": time.time() + 2})
        status = lifecycle.status(bench.home, run.id)
        assert status["eta_s"] == pytest.approx(239 * 2, abs=5) and "phase" not in status


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_run_whose_result_is_damaged_is_listed_so_and_offers_no_deployment(home, tuned, damage):
    if damage == "torn":
        home.run(tuned).result.write_text('{"verdict": "bet')
    status = lifecycle.wait(home, tuned, timeout_s=0)
    assert status["damaged"] == "result.json"
    assert any("result.json is missing or damaged" in warning for warning in status["warnings"])
    assert [call["tool"] for call in status["next"]] == ["read_logs", "evaluate"]
    (listed,) = lifecycle.overview(home, "runs")["runs"]
    assert listed["damaged"] == "result.json"


def test_a_run_whose_config_is_damaged_is_listed_so(home, tuned):
    home.run(tuned).config.write_text("{")
    (listed,) = lifecycle.overview(home, "runs")["runs"]
    assert (listed["run_id"], listed["damaged"]) == (tuned, "config.json")


def launcher_lock(run):
    """Hold the run's lock, so that nobody takes it for dead."""
    file = run.lock.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_wait_for_news_ends_when_the_target_is_passed_and_not_with_every_later_exam(bench):
    def exam(step: int, success: float) -> None:
        append_line(run.events, {"event": "evaluated", "step": step, "heldout_success": success})

    def news(cursor: str = "") -> dict:
        return lifecycle.wait(bench.home, run.id, "news", timeout_s=0, cursor=cursor)

    with under_way(bench, expect="90 %") as run:
        exam(20, 0.85)
        before = news()
        assert not before["until_met"]
        exam(40, 0.94)
        between = news(before["cursor"])
        assert not between["until_met"], "its checkpoint is still to come"
        (run.checkpoints / "step_000040").mkdir(parents=True)
        append_line(run.events, {"event": "checkpoint", "step": 40})
        run.best.symlink_to("step_000040")
        passed = news(between["cursor"])
        assert passed["until_met"] and "(94.0 % at step 40)" in passed["summary"]
        assert passed["target_passed"]
        exam(60, 0.97)
        append_line(run.events, {"event": "checkpoint", "step": 60})
        assert not news(passed["cursor"])["until_met"]


def test_a_best_checkpoint_that_does_not_pass_the_target_is_no_reason_to_stop(bench):
    with under_way(bench, expect="90 %") as run:
        (run.checkpoints / "step_000020").mkdir(parents=True)
        run.best.symlink_to("step_000020")
        for step, success in ((20, 0.85), (40, 0.94)):
            event = {"event": "evaluated", "step": step, "heldout_success": success}
            append_line(run.events, event)
        assert "target_passed" not in lifecycle.status(bench.home, run.id)
