"""A run's life: started, killed, stopped, capped, continued."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.core.files import append_line, read_json, read_lines, take_lock, write_json
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

# Each of these takes about a second; the limit is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(60)


def test_a_run_that_ends_by_itself_is_done_with_its_verdict(bench):
    run = bench.start(steps=3)
    row = bench.until_state(run, "done", "failed")
    assert (row.state, row.verdict, row.reason) == ("done", "better", "")
    assert bench.steps(run) == [0, 1, 2, 3]
    assert row.started is not None and row.ended is not None and row.spent_hours > 0
    record = read_json(run.exit_record)
    assert (record["rc"], record["signal"], record["attempt"]) == (0, None, 1)
    events = [event["event"] for event in read_lines(run.events)[0]]
    assert events[0] == "attempt_started" and events[-1] == "trainer_exited"
    assert "trainer starts" in run.log(1).read_text()
    assert f"# {run.id}: done" in run.status_md.read_text()


def test_a_trainer_killed_alone_fails_with_signal_and_last_checkpoint(bench):
    run = bench.start(steps=5, hold_at=4)
    _, trainer = bench.pids(run)
    bench.until_step(run, 3)
    bench.kill(trainer)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "killed"
    assert "signal 9 (SIGKILL)" in row.reason and "step_000003" in row.reason
    assert f'resume="{run.id}"' in str(row.hint)
    record = read_json(run.exit_record)
    assert (record["rc"], record["signal"], record["last_checkpoint"]) == (None, 9, "step_000003")
    assert launcher.reap(bench.home) == []
    assert bench.row(run).attempt == 1


def test_a_trainer_told_to_end_from_outside_is_killed_by_signal_15(bench):
    run = bench.start(steps=5, hold_at=4)
    _, trainer = bench.pids(run)
    bench.until_step(run, 3)
    os.kill(trainer, signal.SIGTERM)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "killed" and "signal 15" in row.reason


def test_supervisor_and_trainer_killed_are_continued_by_the_next_process(bench):
    run = bench.start(steps=5, hold_at=4)
    supervisor, trainer = bench.pids(run)
    bench.until_step(run, 3)
    bench.kill(supervisor, trainer)
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    bench.go(run)
    assert launcher.reap(bench.home) == [run.id]
    row = bench.until_state(run, "done", "failed")
    assert (row.state, row.attempt, row.continuations) == ("done", 2, 1)
    assert bench.steps(run) == [0, 1, 2, 3, 4, 5]
    assert run.log(2).exists()
    with Store(bench.home) as store:
        went = [to for _, _, to in store.history(run.id)]
    assert went[:5] == ["queued", "preparing", "running", "interrupted", "queued"]


def test_the_trainer_dies_with_its_supervisor(bench):
    run = bench.start(steps=5, hold_at=2)
    supervisor, trainer = bench.pids(run)
    bench.until_step(run, 1)
    bench.kill(supervisor)
    bench.until(lambda: not launcher.is_alive(run), "nothing holds the lock")
    assert not psutil.pid_exists(trainer) or psutil.Process(trainer).status() == "zombie"
    bench.go(run)
    launcher.reap(bench.home)
    assert bench.until_state(run, "done").continuations == 1


def test_after_three_continuations_an_interrupted_run_is_failed(bench):
    run = bench.start(steps=5, hold_at=1)  # before its first checkpoint
    for _ in range(3):
        bench.kill_all_of(run)
        assert launcher.reap(bench.home) == [run.id]
    assert bench.row(run).attempt == 4
    bench.kill_all_of(run)
    launcher.reap(bench.home)
    row = bench.row(run)
    assert (row.state, row.reason_kind, row.continuations) == ("failed", "interrupted", 3)
    assert f'resume="{run.id}"' in str(row.hint)


def test_a_new_checkpoint_gives_an_interrupted_run_its_continuations_back(bench):
    run = bench.start(steps=9, hold_at=2)
    for step in (2, 3, 4, 5, 6):  # each attempt saves one step more
        bench.until_step(run, step - 1)
        config = read_json(run.config)
        config["fake_trainer"]["hold_at"] = step + 1
        write_json(run.config, config)
        (run.path / "holds").unlink()
        bench.kill_all_of(run)
        assert launcher.reap(bench.home) == [run.id]
    assert (bench.row(run).attempt, bench.row(run).continuations) == (6, 1)
    bench.until_step(run, 6)
    bench.go(run)
    assert bench.until_state(run, "done").continuations == 1


def test_a_checkpoint_of_an_earlier_attempt_gives_nothing_back(bench):
    """Attempts that end before their trainer starts leave the old checkpoint the newest."""
    run = bench.start(steps=5, hold_at=3)
    bench.until_step(run, 2)
    bench.kill_all_of(run)
    (bench.home.root / "hold").touch()  # later trainers never come to a step
    launcher.reap(bench.home)
    for attempt in (2, 3, 4):
        assert (bench.row(run).attempt, bench.row(run).continuations) == (attempt, attempt - 1)
        bench.kill_all_of(run)
        run.started_record.unlink()
        write_json(run.started_record, {"attempt": 1, "supervisor_pid": 0, "trainer_pid": 0})
        os.utime(run.started_record, (1, 1))  # as of the first attempt, which saved
        launcher.reap(bench.home)
    row = bench.row(run)
    assert (row.state, row.reason_kind) == ("failed", "interrupted")
    assert "4 times without a new checkpoint" in row.reason


def test_a_failure_the_trainer_explains_is_told_in_its_words(bench):
    row = bench.until_state(bench.start(behave="fail"), "failed")
    assert (row.reason_kind, row.reason, str(row.hint)) == ("data", "row 3 is empty", "fill it")


def test_an_odd_exit_status_is_an_internal_failure_with_the_last_words(bench):
    row = bench.until_state(bench.start(behave="odd_exit"), "failed")
    assert row.reason_kind == "internal"
    assert "exit status 7: something odd happened" in row.reason


def test_a_trainer_that_leaves_no_result_did_not_finish(bench):
    row = bench.until_state(bench.start(behave="no_result"), "failed")
    assert row.reason_kind == "internal" and "without writing a result" in row.reason


def test_a_cancelled_trainer_writes_a_checkpoint_first(bench):
    run = bench.start(steps=5, hold_at=4, save_every=100)
    bench.until_step(run, 3)
    with Store(bench.home) as store:
        asked = store.set_state(
            run.id, "stopping", only_from={"running"}, reason_kind="cancelled", reason="enough"
        )
    assert asked
    row = bench.until_state(run, "cancelled")
    assert (row.reason_kind, row.reason) == ("cancelled", "enough")
    assert run.latest_checkpoint() == run.checkpoint(3)
    assert "step_000003" in str(row.hint)


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace(bench):
    run = bench.start(steps=5, hold_at=4, behave="ignore_sigterm")
    bench.until_step(run, 3)
    with Store(bench.home) as store:
        store.set_state(
            run.id, "stopping", only_from={"running"}, reason_kind="cancelled", reason="enough"
        )
    row = bench.until_state(run, "cancelled")
    assert "ended by SIGKILL" in row.reason
    assert read_json(run.exit_record)["signal"] == 9


def test_a_spent_cap_stops_the_run_with_a_checkpoint(bench):
    run = bench.start(steps=5, hold_at=4, max_gpu_hours=1.0 / 3600)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "budget" and "max_gpu_hours" in row.reason
    assert run.latest_checkpoint() == run.checkpoint(3)
    assert "max_gpu_hours=0.000277778)" in str(row.hint)
    assert row.spent_hours >= 1.0 / 3600


def test_the_wall_limit_of_a_run_holds_without_any_server(bench):
    run = bench.start(steps=5, hold_at=4, wall_limit_hours=0.8 / 3600)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "timeout"


def test_an_evaluation_goes_on_beyond_its_wall_limit_while_it_writes_answers(bench):
    limit_s = 1.0
    run = bench.start(steps=5, hold_at=4, wall_limit_hours=limit_s / 3600)
    bench.until_step(run, 3)
    began = time.monotonic()
    while time.monotonic() < began + 2.5 * limit_s:
        append_line(run.model_evals(0), {"reward": 1.0})
        threading.Event().wait(0.1)
    with Store(bench.home) as store:
        assert store.get_run(run.id).state == "running"
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "timeout" and "wrote no answer" in row.reason


def test_hours_spent_before_a_continuation_count_towards_the_cap(bench):
    run = bench.start(steps=5, hold_at=4, max_gpu_hours=1.0)
    bench.until_step(run, 3)
    with Store(bench.home) as store:
        store.update_run(run.id, only_in={"running"}, spent_hours=2.0)
    bench.kill_all_of(run)
    launcher.reap(bench.home)
    row = bench.until_state(run, "failed")
    assert (row.reason_kind, row.attempt) == ("budget", 2)


def test_the_home_has_a_cap_over_all_runs(bench):
    bench.home.config_file.write_text("max_gpu_hours_total = 0.0001\n")
    run = bench.start(steps=5, hold_at=4)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "budget" and "max_gpu_hours_total" in row.reason


def test_devices_that_run_at_once_share_the_cap_over_all_runs(bench, monkeypatch):
    """A second supervisor is played by this process: it holds a lease and counts in its lock."""
    bench.home.config_file.write_text("max_gpu_hours_total = 1.0\n")
    other = bench.queue("other-grpo")
    with Store(bench.home) as store:
        lock = store.lease_next(["cuda:0"], lambda row: True) and take_lock(other.lock)
    assert lock is not None
    os.pwrite(lock, b'{"attempt": 1, "elapsed_s": 1800.0}\n', 0)
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    os.pwrite(lock, b'{"attempt": 1, "elapsed_s": 3599.9}\n', 0)  # alone, it could go on
    # Looked at once because it changes: half an hour does not pass in a moment elsewhere.
    bench.home.config_file.write_text("max_gpu_hours_total = 1.000001\n")
    row = bench.until_state(run, "failed")
    os.close(lock)
    assert row.reason_kind == "budget" and "max_gpu_hours_total" in row.reason
    assert run.latest_checkpoint() == run.checkpoint(3)
    assert row.spent_hours < 0.1


def test_what_a_trainer_leaves_behind_is_ended(bench):
    run = bench.start(steps=1, behave="leave_daemon")
    bench.until_state(run, "done")
    left = int((run.path / "daemon.pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie"


def test_a_supervisor_told_to_end_leaves_the_run_to_be_continued(bench):
    run = bench.start(steps=5, hold_at=4, save_every=100)
    supervisor, _ = bench.pids(run)
    bench.until_step(run, 3)
    os.kill(supervisor, signal.SIGTERM)
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    assert bench.row(run).state == "running"
    bench.go(run)
    launcher.reap(bench.home)
    row = bench.until_state(run, "done")
    assert (row.attempt, bench.steps(run)) == (2, [0, 1, 2, 3, 4, 5])


def test_a_finishing_run_starts_the_one_that_waits(bench):
    first = bench.start(steps=3, hold_at=2)
    second = bench.start(steps=1)
    assert bench.row(second).state == "queued"
    bench.go(first)
    assert bench.until_state(second, "done").device == "cpu"
    bench.until(lambda: not launcher.is_alive(first), "the first supervisor is gone")


def test_a_run_that_died_before_its_row_was_set_is_finished_from_its_record(bench):
    run = bench.start(steps=2)
    bench.until_state(run, "done")
    with Store(bench.home) as store:
        store._db.execute("UPDATE runs SET state = 'running', verdict = ''")
    assert launcher.reap(bench.home) == [run.id]
    row = bench.row(run)
    assert (row.state, row.verdict, row.attempt) == ("done", "better", 1)


def test_the_supervisor_never_imports_torch_or_the_heavy_rooms(bench):
    import subprocess
    import sys

    code = "import engine.supervisor, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "pydantic", "httpx", "mcp", "psutil", "engine.runs.lifecycle"} & set(
        loaded
    )


@pytest.mark.parametrize("record", ["", "{", "[]", '{"elapsed_s": "x"}'])
def test_a_lock_file_with_nonsense_counts_no_time(bench, record):
    run = bench.queue()
    Path(run.lock).write_text(record)
    assert launcher.seconds_in_lock_file(run) == 0.0


def events(run, name: str) -> list[dict]:
    return [event for event in read_lines(run.events)[0] if event["event"] == name]


def alert_of(run, alert_id: str) -> dict | None:
    raised = [event for event in events(run, "alert") if event["id"] == alert_id]
    assert len(raised) <= 1
    return raised[0] if raised else None


def test_a_trainer_that_hangs_is_ended_with_the_place_and_can_be_resumed(bench):
    bench.home.config_file.write_text("stop_stalled_minutes = 0.02\n")
    run = bench.start(steps=5, hold_at=4, beats="until_hold")
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "stalled"
    assert "no sign of life" in row.reason and "in the phase training" in row.reason
    assert "ended by SIGKILL" in row.reason and f'resume="{run.id}"' in str(row.hint)
    assert "hang_here" in run.log(1).read_text()  # every thread's stack, before it was ended
    assert len(events(run, "stalled")) == 1
    bench.go(run)
    resumed = lifecycle.submit(bench.home, TrainRequest(resume=run.id))
    assert resumed["run_id"] == run.id
    assert bench.until_state(run, "done", "failed").state == "done"
    assert bench.steps(run) == [0, 1, 2, 3, 4, 5]


def test_a_slow_step_that_gives_signs_of_life_is_no_hang(bench):
    bench.home.config_file.write_text("stop_stalled_minutes = 0.005\n")  # 0.3 s of silence
    run = bench.start(steps=5, hold_at=4, beats="always")
    bench.until_step(run, 3)
    began = bench.row(run).started
    bench.until(lambda: launcher.seconds_in_lock_file(run) > 4, "it has held for seconds")
    assert bench.row(run).state == "running" and events(run, "stalled") == [] and began
    bench.go(run)
    assert bench.until_state(run, "done", "failed").state == "done"


def test_silence_ends_nothing_where_the_owner_switched_that_off(bench):
    bench.home.config_file.write_text("stop_stalled_minutes = 0\n")
    run = bench.start(steps=5, hold_at=4, beats="until_hold")
    bench.until_step(run, 3)
    bench.until(lambda: launcher.seconds_in_lock_file(run) > 3, "it has hung for seconds")
    assert bench.row(run).state == "running"
    bench.kill(*bench.pids(run))


def test_a_cap_that_will_not_do_is_an_event_long_before_it_is_spent(bench):
    run = bench.start(steps=300, hold_at=3, beats="always", step_s=36.0, max_gpu_hours=1.0)
    alert = bench.until(lambda: alert_of(run, "over_cap"), "the forecast is an alert")
    assert "step" not in alert  # so that no resume takes it for one that the trainer raised
    # Less than an hour is left, which has room for 99 steps of 36 s after the two that are done.
    assert "max_gpu_hours=1 is spent at step 101 of 300" in alert["message"]
    bench.kill(*bench.pids(run))


def test_a_run_that_keeps_to_its_cap_and_estimate_raises_no_alert(bench):
    run = bench.start(steps=5, hold_at=4, beats="always", step_s=0.1, max_gpu_hours=1.0)
    bench.until_step(run, 3)
    bench.until(lambda: launcher.seconds_in_lock_file(run) > 3, "it was looked at")
    assert events(run, "alert") == []
    bench.go(run)
    assert bench.until_state(run, "done").state == "done"


def test_a_run_that_takes_far_longer_than_estimated_says_so(bench):
    run = bench.start(steps=300, hold_at=3, beats="always", step_s=3600.0)
    alert = bench.until(lambda: alert_of(run, "over_estimate"), "the forecast is an alert")
    assert "it will take about 298.0 h, estimated were at most" in alert["message"]
    assert alert_of(run, "over_cap") is None
    bench.kill(*bench.pids(run))
