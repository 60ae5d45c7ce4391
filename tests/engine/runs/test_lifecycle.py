"""Submit, look, wait, cancel, resume: what a client may ask about runs."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.files import append_line, read_json
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.machine.processes.programs import STAND_INS
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest, ProbeRequest, TrainRequest

# Each of these takes about a second; the limit is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(60)

SFT = {"steps": 3, "learning_rate": 1e-3, "lora_rank": 4}


def submit(home, env, **arguments):
    defaults = {"env_id": env, "algorithm": "sft", "settings": SFT}
    return lifecycle.submit(home, TrainRequest(**(defaults | arguments)))


def refused(code: str, call, *arguments, **named) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value.payload()
    assert caught.value.hint
    return caught.value


def test_a_submit_answers_in_under_a_second_and_the_run_ends_with_a_verdict(bench, env):
    seconds = []
    for _ in range(3):  # the quickest counts: other work on the machine is not its fault
        began = time.monotonic()
        said = submit(bench.home, env)
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 1.0
    assert said["run_id"] == "sums-sft-3" and said["state"] in ("queued", "preparing")
    assert said["metrics_uri"] == "run://sums-sft-3/metrics" and said["estimate"]["fits"]
    found = lifecycle.wait(bench.home, "sums-sft-3", timeout_s=20)
    assert (found["state"], found["verdict"], found["until_met"]) == ("done", "better", True)
    bench.until(lambda: not launcher.is_alive(bench.home.run("sums-sft-3")), "all is over")


def test_the_config_on_disk_is_whole_and_resolved(busy, bench, env):
    said = submit(bench.home, env, note="why", expect="better", max_gpu_hours=1.5)
    config = read_json(bench.home.run(said["run_id"]).config)
    assert config["run_id"] == said["run_id"] and config["env_id"] == env
    assert Path(config["env_dir"]).is_dir() and Path(config["base"]["path"]).is_dir()
    assert config["settings"]["steps"] == 3 and config["sources"]["steps"] == "user"
    assert config["sources"]["batch_size"] != "user"
    assert (config["note"], config["expect"], config["max_gpu_hours"]) == ("why", "better", 1.5)
    # What only later estimates read stays on disk.
    kept = config["estimate"].pop("uncalibrated")
    said_of_it = {name: config["estimate"][name] for name in said["estimate"]}
    assert said_of_it == said["estimate"] and {"gpu_hours", "basis", "fits"} <= said_of_it.keys()
    assert set(kept["works"]) >= {"training"}


def test_a_profile_is_asked_for_beside_the_settings(busy, bench, env):
    plain, traced = submit(bench.home, env), submit(bench.home, env, profile=True)
    configs = [read_json(bench.home.run(said["run_id"]).config) for said in (plain, traced)]
    assert configs[1]["profile"] is True and "profile" not in configs[0]
    assert configs[0]["settings"] == configs[1]["settings"]
    refused(
        "BAD_ARGUMENT",
        lifecycle.submit,
        bench.home,
        TrainRequest(resume=traced["run_id"], profile=True),
    )


def test_a_busy_device_queues_and_says_the_position(busy, bench, env):
    assert [submit(bench.home, env)["queue_position"] for _ in range(2)] == [1, 2]
    found = lifecycle.status(bench.home, "sums-sft-2")
    assert (found["state"], found["queue_position"]) == ("queued", 2)


def test_the_same_request_id_is_the_same_run(busy, bench, env):
    first = submit(bench.home, env, request_id="try-1")
    again = submit(bench.home, env, request_id="try-1")
    assert again["run_id"] == first["run_id"]
    refused("REQUEST_CONFLICT", submit, bench.home, env, request_id="try-1", note="other")
    assert len(lifecycle.overview(bench.home, "runs")["runs"]) == 2


def test_settings_that_differ_from_the_parent_are_named(busy, bench, env):
    submit(bench.home, env)
    said = submit(bench.home, env, settings=SFT | {"steps": 4}, parent="sums-sft-1")
    assert said["settings_changed_from_parent"] == {"steps": [3, 4]}
    refused("RUN_NOT_FOUND", submit, bench.home, env, parent="nobody-1")


def test_what_a_prefix_was_taken_as_is_said_where_something_is_started_or_changed(
    busy, bench, env, tuned
):
    def about(said: dict) -> list[str]:
        return [note for note in said["warnings"] if "was taken as" in note]

    for whole in (env, "sums", "Sums"):
        assert about(submit(bench.home, whole)) == []
    said = submit(bench.home, "su", parent="sums-sft-1")
    assert about(said) == [f"env_id 'su' was taken as {env}"]
    assert about(submit(bench.home, env, parent="bus")) == ["parent 'bus' was taken as busy-1"]
    probed = lifecycle.submit_evaluation(
        bench.home, EvaluationRequest(env_id="sum", models=["pebble"])
    )
    assert about(probed) == [f"env_id 'sum' was taken as {env}"]
    eval_id = probed["run_id"]
    assert about(lifecycle.cancel(bench.home, eval_id[:-1])) == [
        f"run_id {eval_id[:-1]!r} was taken as {eval_id}"
    ]
    assert about(lifecycle.cancel(bench.home, eval_id)) == []


def test_a_model_that_is_a_run_is_copied_so_that_tidying_cannot_take_it(busy, bench, env, tuned):
    said = submit(
        bench.home, env, model=f"{tuned}@best", settings={"steps": 2, "learning_rate": 1e-3}
    )
    config = read_json(bench.home.run(said["run_id"]).config)
    start = Path(config["start_adapter"])
    assert start.is_relative_to(bench.home.run(said["run_id"]).path)
    source = bench.home.run(tuned).checkpoint(5)
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in start.iterdir()) == names
    for path in source.iterdir():
        path.unlink()
    assert (start / "adapter_model.safetensors").stat().st_size > 0
    assert config["settings"]["lora_rank"] == 1


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("SETTING_UNKNOWN", {"settings": {"learning_rat": 1e-3}}),
        ("SETTING_INVALID", {"settings": {"learning_rate": 5.0}}),
        ("SETTING_INVALID", {"settings": {"learning_rate": float("nan")}}),
        ("SETTING_NOT_APPLICABLE", {"settings": {"group_size": 8}}),
        ("MODEL_NOT_FOUND", {"model": "pebbl"}),
        ("ENV_NOT_FOUND", {"env_id": "sms"}),
        ("BAD_ARGUMENT", {"env_id": ""}),
        ("BAD_ARGUMENT", {"algorithm": "dpo"}),
        ("BAD_ARGUMENT", {"expect": "worse"}),
        ("BAD_ARGUMENT", {"max_gpu_hours": 0}),
        ("BAD_ARGUMENT", {"max_gpu_hours": float("inf")}),
        ("BAD_ARGUMENT", {"max_gpu_hours": True}),
        ("BUDGET", {"settings": SFT | {"steps": 100_000}, "max_gpu_hours": 0.01}),
        ("RUN_NOT_FOUND", {"env_id": "", "algorithm": "grpo", "settings": {}, "resume": "x-1"}),
        ("BAD_ARGUMENT", {"resume": "x-1"}),
        ("BAD_ARGUMENT", {"note": "x" * 100_000}),
        ("BAD_ARGUMENT", {"note": "a\0b"}),
        ("BAD_ARGUMENT", {"request_id": "x" * 100_000}),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_is_queued(bench, env, code, arguments):
    refused(code, submit, bench.home, env, **arguments)
    assert lifecycle.overview(bench.home, "runs")["runs"] == []
    assert list(bench.home.runs.iterdir()) == []


def test_a_risky_reward_is_refused_unless_accepted_knowingly(busy, bench):
    env = bench.add_env("risky", verdict="risk", headline="empty answers earn 0.9 of gold")
    grpo = {"algorithm": "grpo", "settings": {"steps": 1}}
    error = refused("REWARD_RISK", submit, bench.home, env, **grpo)
    assert "empty answers earn" in error.message
    for given in (
        {"settings": SFT},
        {"algorithm": "grpo", "settings": {"steps": 1, "accept_reward_risk": True}},
    ):
        noted = submit(bench.home, env, **given)["warnings"]
        assert any("reward_audit: empty answers earn 0.9 of gold" in note for note in noted)
    accepted = {"algorithm": "grpo", "settings": {"steps": 1, "accept_reward_risk": True}}
    said = submit(bench.home, env, **accepted)
    assert read_json(bench.home.run(said["run_id"]).config)["settings"]["accept_reward_risk"]
    submit(bench.home, env)  # sft imitates answers, it does not chase the reward


def test_a_missing_secret_is_named_and_never_stored(bench, monkeypatch):
    env = bench.add_env("judged", secrets=("JUDGE_KEY",))
    error = refused("ENV_SECRETS", submit, bench.home, env)
    assert "JUDGE_KEY" in error.message
    monkeypatch.setenv("JUDGE_KEY", "canary-0815")
    said = submit(bench.home, env)
    run = bench.home.run(said["run_id"])
    bench.until_state(run, "done")
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")
    everything = b"".join(p.read_bytes() for p in bench.home.root.rglob("*") if p.is_file())
    assert b"canary-0815" not in everything and b"canary-0815" not in json.dumps(said).encode()


def test_spending_above_the_home_s_limits_is_refused(busy, bench, env):
    home = bench.home
    home.config_file.write_text("auto_approve_gpu_hours = 0.0\n")
    refused("NOT_APPROVED", submit, home, env)
    submit(home, env, approved=True)
    home.config_file.write_text("max_gpu_hours_total = 0.0000001\n")
    refused("BUDGET", submit, home, env)
    home.config_file.write_text("")
    submit(home, env)


def test_a_machine_without_torch_says_how_to_get_it(bench, env, monkeypatch):
    monkeypatch.delenv(STAND_INS)
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    error = refused("NO_TORCH", submit, bench.home, env)
    assert "honesmith setup" in error.hint
    assert lifecycle.overview(bench.home, "hardware")["hardware"]["training"].startswith(
        "not possible"
    )


def test_a_queued_run_is_cancelled_at_once_and_again_without_effect(busy, bench, env):
    run_id = submit(bench.home, env)["run_id"]
    said = lifecycle.cancel(bench.home, run_id, "a better idea")
    assert (said["state"], said["last_checkpoint"]) == ("cancelled", "")
    assert lifecycle.cancel(bench.home, run_id, "another reason")["state"] == "cancelled"
    found = lifecycle.status(bench.home, run_id)
    assert found["error"]["message"] == "a better idea" and f'"{run_id}"' in found["error"]["hint"]


def test_a_run_that_is_queued_again_while_it_is_cancelled_is_cancelled(bench, env, monkeypatch):
    run = bench.queue()
    with Store(bench.home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
    real = Store.set_state

    def after_an_interruption(store, run_id, to, **values) -> bool:
        """Between two looks of the cancel another process finds the trainer dead."""
        if to == "stopping":
            real(store, run_id, "interrupted", only_from={"preparing"})
            real(store, run_id, "queued", only_from={"interrupted"})
        return real(store, run_id, to, **values)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Store, "set_state", after_an_interruption)
        assert lifecycle.cancel(bench.home, run.id)["state"] == "cancelled"


def test_a_cancel_whose_reason_is_a_book_is_refused_and_changes_nothing(busy, bench, env):
    run_id = submit(bench.home, env)["run_id"]
    refused("BAD_ARGUMENT", lifecycle.cancel, bench.home, run_id, "x" * 100_000)
    with Store(bench.home) as store:
        assert store.get_run(run_id).state == "queued"


def test_a_running_run_stops_with_a_checkpoint_and_resumes_where_it_was(bench):
    run = bench.start(steps=6, hold_at=4, save_every=100)
    bench.until_step(run, 3)
    stopping = lifecycle.cancel(bench.home, run.id)
    assert stopping["state"] in ("stopping", "cancelled")
    if stopping["state"] == "stopping":  # what will come is not known yet
        assert "saves a checkpoint of step 3" in stopping["summary"] and stopping["resume"] == ""
    assert lifecycle.cancel(bench.home, run.id)["state"] in ("stopping", "cancelled")
    bench.until_state(run, "cancelled")
    bench.go(run)
    said = lifecycle.submit(bench.home, TrainRequest(resume=run.id, max_gpu_hours=3))
    assert (said["run_id"], said["attempt"]) == (run.id, 2)
    assert said["resumed_from"] == "step_000003" and said["warnings"] == []
    row = bench.until_state(run, "done")
    assert (row.attempt, row.max_gpu_hours, row.reason_kind) == (2, 3.0, "")
    assert bench.steps(run) == [0, 1, 2, 3, 4, 5, 6]
    assert run.log(2).exists()


def test_a_cancel_before_the_first_step_promises_no_checkpoint(bench):
    run = bench.queue()
    with Store(bench.home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
        store.set_state(run.id, "stopping", only_from={"preparing"})
        row = store.get_run(run.id)
    said = lifecycle._cancel_reply(run, row, warnings=[])
    assert "no step is done, so no checkpoint comes of it" in said["summary"]
    assert said["last_checkpoint"] == said["resume"] == ""


def test_a_resume_without_a_checkpoint_says_it_starts_over_under_its_own_cap(bench):
    run = bench.start(steps=2, behave="odd_exit", max_gpu_hours=0.4)
    bench.until_state(run, "failed")
    config = read_json(run.config)
    config["fake_trainer"].pop("behave")
    run.config.write_text(json.dumps(config))
    said = lifecycle.submit(bench.home, TrainRequest(resume=run.id))
    assert said["resumed_from"] == "" and "step 0" in said["warnings"][0]
    assert bench.until_state(run, "done").max_gpu_hours == 0.4


def test_a_done_run_never_changes(bench):
    run = bench.start(steps=1)
    before = bench.until_state(run, "done")
    error = refused("RUN_STATE", lifecycle.submit, bench.home, TrainRequest(resume=run.id))
    assert "done" in error.message
    assert lifecycle.cancel(bench.home, run.id)["state"] == "done"
    assert bench.row(run) == before


def test_resuming_a_resume_with_one_request_id_makes_one_attempt(bench):
    run = bench.start(steps=3, hold_at=2)
    bench.until_step(run, 1)
    lifecycle.cancel(bench.home, run.id)
    bench.until_state(run, "cancelled")
    first = lifecycle.submit(bench.home, TrainRequest(resume=run.id, request_id="go-on"))
    again = lifecycle.submit(bench.home, TrainRequest(resume=run.id, request_id="go-on"))
    assert first["run_id"] == again["run_id"] and bench.row(run).attempt == 2
    bench.go(run)
    bench.until_state(run, "done")


def test_a_failed_run_tells_kind_message_hint_and_checkpoint(bench):
    run = bench.start(behave="fail")
    bench.until_state(run, "failed")
    found = lifecycle.wait(bench.home, run.id)
    assert found["error"] == {
        "kind": "data",
        "message": "row 3 is empty",
        "hint": "fill it",
        "evidence": "",
        "last_checkpoint": "",
    }
    assert "row 3 is empty" in found["summary"]


def test_a_wait_is_over_with_its_time_and_says_where_the_run_is(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    began = time.monotonic()
    found = lifecycle.wait(bench.home, run.id, timeout_s=0.3)
    assert 0.2 < time.monotonic() - began < 2.0
    assert (found["until_met"], found["state"], found["step"], found["total_steps"]) == (
        False,
        "running",
        3,
        5,
    )
    assert found["metrics"]["loss"] == pytest.approx(1 / 3) and found["eta_s"] is not None
    bench.go(run)
    assert lifecycle.wait(bench.home, run.id, timeout_s=20)["until_met"]
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")


def test_a_wait_for_the_first_step_ends_with_it(bench):
    run = bench.start(steps=5, hold_at=2)
    found = lifecycle.wait(bench.home, run.id, until="first_step", timeout_s=20)
    assert found["until_met"] and found["step"] >= 1 and found["state"] == "running"
    bench.go(run)
    bench.until_state(run, "done")


@pytest.mark.parametrize(("until", "event"), [("next_eval", "evaluated"), ("alert", "alert")])
def test_what_happened_since_the_cursor_returns_at_once(bench, until, event):
    run = bench.start(steps=5, hold_at=2)
    bench.until_step(run, 1)
    first = lifecycle.wait(bench.home, run.id, until, timeout_s=0)
    assert not first["until_met"]
    append_line(run.events, {"event": event, "message": "m", "step": 1, "time": time.time()})
    found = lifecycle.wait(bench.home, run.id, until, timeout_s=20, cursor=first["cursor"])
    assert found["until_met"] and found["state"] == "running"
    assert len(found["alerts"]) == (1 if event == "alert" else 0)
    later = lifecycle.wait(bench.home, run.id, until, timeout_s=0, cursor=found["cursor"])
    assert not later["until_met"] and later["alerts"] == []
    bench.go(run)
    bench.until_state(run, "done")


@pytest.mark.parametrize(("until", "event"), [("next_eval", "evaluated"), ("alert", "alert")])
def test_what_was_reached_before_the_first_wait_is_not_skipped(bench, until, event):
    run = bench.start(steps=5, hold_at=2)
    bench.until_step(run, 1)
    append_line(run.events, {"event": event, "message": "m", "step": 1, "time": time.time()})
    found = lifecycle.wait(bench.home, run.id, until, timeout_s=20)
    assert found["until_met"] and found["state"] == "running"
    assert until != "next_eval" or found["evaluation"] == {"step": 1}
    (said,) = found["warnings"]
    assert said.startswith("this was reached before the call; cursor=")
    later = lifecycle.wait(bench.home, run.id, until, timeout_s=0, cursor=found["cursor"])
    assert not later["until_met"] and later["warnings"] == []
    bench.go(run)
    bench.until_state(run, "done")


def test_the_last_wait_still_shows_the_alerts_that_an_earlier_one_brought(bench):
    run = bench.start(steps=5, hold_at=2)
    bench.until_step(run, 1)
    append_line(run.events, {"event": "alert", "id": "flat", "message": "m", "time": time.time()})
    first = lifecycle.wait(bench.home, run.id, "alert", timeout_s=20)
    assert [alert["id"] for alert in first["alerts"]] == ["flat"]
    bench.go(run)
    last = lifecycle.wait(bench.home, run.id, timeout_s=20, cursor=first["cursor"])
    assert last["state"] == "done" and [alert["id"] for alert in last["alerts"]] == ["flat"]
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")


def test_an_alert_of_an_earlier_attempt_is_no_news_of_the_present_one(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    append_line(run.events, {"event": "alert", "id": "flat", "message": "m", "time": time.time()})
    lifecycle.cancel(bench.home, run.id)
    bench.until_state(run, "cancelled")
    bench.go(run)
    lifecycle.submit(bench.home, TrainRequest(resume=run.id))
    done = lifecycle.wait(bench.home, run.id, "alert", timeout_s=20)
    assert done["state"] == "done" and not done["until_met"]
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")


def test_a_wait_for_an_evaluation_brings_it_although_its_line_of_metrics_is_not_written(bench):
    """The trainer says that it examined, then looks for alerts, then writes the step's line."""
    run = bench.start(steps=5, hold_at=1)
    bench.until(lambda: (run.path / "holds").exists(), "it holds before its first step")
    first = lifecycle.wait(bench.home, run.id, "next_eval", timeout_s=0)
    started = {"event": "started", "heldout_tasks": 9, "total_steps": 5, "time": time.time()}
    said = {"event": "evaluated", "step": 1, "heldout_success": 0.75, "message": "m"}
    append_line(run.events, started)
    append_line(run.events, said | {"time": time.time()})
    found = lifecycle.wait(bench.home, run.id, "next_eval", timeout_s=20, cursor=first["cursor"])
    assert found["until_met"] and found["metrics"]["step"] == 0
    assert found["evaluation"] == {"step": 1, "heldout_success": 0.75} and found["step"] == 1
    words = "Evaluated at step 1: success 75.0 % on the 5 held-out tasks that choose."
    assert found["summary"].endswith(words)
    assert (found["heldout"]["tasks"], found["heldout"]["of"]) == (5, 9)
    assert "the other 4" in found["heldout"]["about"]
    bench.go(run)
    bench.until_state(run, "done")


def test_a_wait_reports_progress_and_ends_with_what_the_report_raises(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    seen: list[dict] = []

    def tell(status: dict) -> None:
        seen.append(status)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lifecycle.wait(bench.home, run.id, timeout_s=20, on_progress=tell)
    assert [status["step"] for status in seen] == [3, 3]
    bench.go(run)
    bench.until_state(run, "done")


def test_a_wait_takes_up_a_run_that_died(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    answers: list[dict] = []
    waiter = threading.Thread(
        target=lambda: answers.append(lifecycle.wait(bench.home, run.id, timeout_s=20))
    )
    bench.kill(*bench.pids(run))
    bench.go(run)
    waiter.start()
    waiter.join()
    assert answers[0]["state"] == "done" and bench.row(run).continuations == 1
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "9" * 40, "²"])
def test_a_cursor_of_somebody_else_is_refused(bench, cursor):
    run = bench.queue()
    bench.go(run)
    with Store(bench.home) as store:
        store.set_state(run.id, "cancelled", only_from={"queued"})
    refused("BAD_CURSOR", lifecycle.wait, bench.home, run.id, cursor=cursor)
    refused("BAD_CURSOR", lifecycle.overview, bench.home, "runs", 5, cursor)


def test_a_wait_for_something_unknown_is_refused(home):
    refused("BAD_ARGUMENT", lifecycle.wait, home, "x", until="forever")
    refused("RUN_NOT_FOUND", lifecycle.wait, home, "x")


def test_the_same_probe_is_one_run_and_gives_its_result_when_done(bench, env):
    ask = {"env_id": env, "model": "pebble", "settings": {"group_size": 4}, "samples": 3}
    first = lifecycle.submit_probe(bench.home, ProbeRequest(**ask))
    assert first["run_id"] == "sums-probe-1" and "result" not in first
    bench.until_state(bench.home.run("sums-probe-1"), "done")
    again = lifecycle.submit_probe(bench.home, ProbeRequest(**ask))
    assert again["run_id"] == "sums-probe-1" and again["result"]["verdict"] == "better"
    other = lifecycle.submit_probe(bench.home, ProbeRequest(**(ask | {"samples": 4})))
    assert other["run_id"] == "sums-probe-2"
    bench.until_state(bench.home.run("sums-probe-2"), "done")


def test_a_probe_that_was_made_before_is_read_whatever_may_be_afforded(bench, env):
    ask = {"env_id": env, "model": "pebble", "settings": {"group_size": 4}, "samples": 3}
    first = lifecycle.submit_probe(bench.home, ProbeRequest(**ask), cap_function=lambda hours: 0.5)

    def nothing_left(hours: float) -> float:
        raise UserError("QUOTA", "nothing is left")

    assert (
        lifecycle.submit_probe(bench.home, ProbeRequest(**ask), cap_function=nothing_left)["run_id"]
        == first["run_id"]
    )
    bench.until_state(bench.home.run(first["run_id"]), "done")
    again = lifecycle.submit_probe(bench.home, ProbeRequest(**ask), cap_function=nothing_left)
    assert again["run_id"] == first["run_id"] and again["result"]["verdict"] == "better"
    with pytest.raises(UserError, match="nothing is left"):
        lifecycle.submit_probe(bench.home, ProbeRequest(**ask | {"samples": 4}), nothing_left)


def test_the_overview_pages_through_runs_and_names_what_there_is(busy, bench, env):
    for _ in range(4):
        submit(bench.home, env)
    found = lifecycle.overview(bench.home)
    assert found["hardware"]["devices"][0]["run"] == busy.id
    assert found["queue"] == [f"sums-sft-{n}" for n in range(1, 5)]
    assert [item["env_id"] for item in found["envs"]] == [env]
    assert found["models"][0]["ref"] == "pebble" and found["deployments"] == []
    assert found["next"][0]["tool"] == "wait_run"
    names, cursor = [], ""
    while True:
        page = lifecycle.overview(bench.home, "runs", 2, cursor)
        names += [row["run_id"] for row in page["runs"]]
        cursor = page.get("next_cursor", "")
        if not cursor:
            break
    assert names == ["sums-sft-4", "sums-sft-3", "sums-sft-2", "sums-sft-1", busy.id]
    running = lifecycle.overview(bench.home, "runs", 9)["runs"][-1]
    assert (running["state"], running["step"], running["total_steps"]) == ("running", 1, 2)


def test_the_overview_counts_the_whole_home_and_says_what_follows(busy, bench, env):
    for number in range(3):
        bench.add_env(f"more-{number}")
    submit(bench.home, env)
    few = lifecycle.overview(bench.home, limit=1)
    assert len(few["envs"]) == len(few["runs"]) == 1
    assert few["summary"].startswith("1 running, 1 queued, 4 environments, ")
    assert few["summary"].endswith("More runs, envs, models follow with scope runs.")
    assert few["next"] == lifecycle.overview(bench.home)["next"]
    whole = lifecycle.overview(bench.home)["summary"]
    assert whole == few["summary"].partition(" More ")[0]


def test_an_empty_home_is_told_what_to_do_first(home):
    found = lifecycle.overview(home)
    assert [call["tool"] for call in found["next"]] == ["read_playbook", "push_env"]
    refused("BAD_ARGUMENT", lifecycle.overview, home, "weather")


def test_the_budget_left_counts_what_is_promised(busy, bench, env):
    bench.home.config_file.write_text("max_gpu_hours_total = 10.0\ngpu_hour_price = 2.0\n")
    likely = submit(bench.home, env)["estimate"]["gpu_hours"]["likely"]
    budget = lifecycle.overview(bench.home)["budget"]
    assert budget["left_gpu_hours"] == pytest.approx(10.0 - likely, abs=0.01)
    assert budget["max_gpu_hours_total"] == 10.0


def test_two_processes_that_submit_at_once_run_one_and_queue_one(bench, env):
    code = (
        "import json, sys; from engine.home.run_dir import Home; "
        "from engine.runs import lifecycle; "
        "from engine.runs.submit.requests import TrainRequest\n"
        "home = Home.locate(sys.argv[1]); sys.stdin.readline()\n"
        "said = lifecycle.submit(home, TrainRequest(env_id='sums', algorithm='sft',\n"
        "  settings={'steps': 2, 'learning_rate': 1e-3}))\n"
        "print(json.dumps(said))"
    )
    (bench.home.root / "hold").touch()
    argv, pipe = [sys.executable, "-P", "-c", code, str(bench.home.root)], subprocess.PIPE
    servers = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for server in servers:
        server.stdin.write("\n")
        server.stdin.flush()
    said = [json.loads(server.communicate()[0]) for server in servers]
    states = {item["run_id"]: lifecycle.status(bench.home, item["run_id"]) for item in said}
    assert sorted(states) == ["sums-sft-1", "sums-sft-2"]
    queued = [status for status in states.values() if status["state"] == "queued"]
    assert [status["queue_position"] for status in queued] == [1]
    (bench.home.root / "hold").unlink()
    for run_id in states:
        run = bench.home.run(run_id)
        assert bench.until_state(run, "done").attempt == 1
        text = run.events.read_text()
        assert text.count("attempt_started") == 1
