"""How far a run is: step, time left, silence, alerts, STATUS.md."""

import os
import time

import pytest

from engine.core.files import Appender, write_json
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.progress import read_progress, status_text, write_status


def made(home: Home, state: str = "running", **values) -> tuple[RunDir, RunRow]:
    with Store(home) as store:
        row = store.insert_run(NewRun("a-grpo", "train", "grpo", "a@1", "pebble"))
        run = home.run(row.run_id)
        run.create()
        store._db.execute("UPDATE runs SET state = ?", (state,))
        store.update_run(row.run_id, only_in={state}, **({"device": "cpu"} | values))
        return run, store.get_run(row.run_id)


def steps(run: RunDir, *points: tuple[int, float]) -> None:
    with Appender(run.metrics) as metrics:
        for step, at in points:
            metrics.append({"step": step, "time": at, "loss": 1.0})


def started(run: RunDir, total: int) -> None:
    with Appender(run.events) as events:
        events.append({"event": "started", "total_steps": total})


def test_a_run_that_wrote_nothing_has_no_numbers(home):
    run, row = made(home, "queued")
    now = read_progress(run, row)
    assert (now.step, now.total_steps, now.eta_s, now.metrics) == (None, None, None, {})
    assert now.alerts == [] and now.cursor == 0 and now.quiet_s is None


def test_the_time_left_is_the_pace_of_the_last_steps(home):
    run, row = made(home)
    started(run, 30)
    steps(run, (0, 1000.0), *((n, 1000.0 + 2 * n) for n in range(1, 11)))
    assert read_progress(run, row).eta_s == pytest.approx(40.0)


def test_the_pause_between_two_attempts_does_not_count(home):
    run, row = made(home)
    started(run, 20)
    steps(run, *((n, 1000.0 + n) for n in range(5)))
    write_json(run.started_record, {"time": 90_000.0})
    assert read_progress(run, row).eta_s is None
    steps(run, *((n, 90_000.0 + 3 * n) for n in range(5, 10)))
    assert read_progress(run, row).eta_s == pytest.approx(33.0)


def test_a_clock_that_goes_back_gives_no_negative_time(home):
    run, row = made(home)
    started(run, 10)
    steps(run, (1, 5000.0), (2, 1400.0))
    assert read_progress(run, row).eta_s == 0.0


def test_the_last_started_event_tells_the_total(home):
    run, row = made(home)
    started(run, 10)
    started(run, 12)
    steps(run, (12, 1.0))
    now = read_progress(run, row)
    assert (now.step, now.total_steps, now.eta_s) == (12, 12, 0.0)


def test_a_silent_trainer_shows(home):
    run, row = made(home)
    steps(run, (1, 1.0))
    past = time.time() - 600
    os.utime(run.metrics, (past, past))
    assert read_progress(run, row).quiet_s == pytest.approx(600, abs=30)
    run.log(1).touch()
    assert read_progress(run, row).quiet_s < 30


def test_status_md_says_what_a_person_asks_for(home):
    run, row = made(
        home, "failed", reason_kind="killed", reason="by signal 9", hint="resume it", verdict="x"
    )
    started(run, 8)
    steps(run, (3, 1.0))
    with Appender(run.events) as events:
        events.append({"event": "alert", "message": "the reward is flat"})
    write_status(run, row)
    text = run.status_md.read_text()
    for part in ("# a-grpo-1: failed", "step 3 of 8", "(killed): by signal 9", "next: resume it"):
        assert part in text
    assert "alert: the reward is flat" in text and text.startswith(status_text(run, row)[:100])


def test_no_room_for_status_md_is_no_failure(home):
    run, row = made(home)
    run.status_md.mkdir()  # a rename onto a folder fails like a full disk does
    write_status(run, row)
    assert run.status_md.is_dir() and list(run.path.glob(".*aside")) == []


@pytest.mark.parametrize("line", ['{"step": NaN}', '{"step": 1e999}', '{"step": true}', '{"step"'])
def test_a_damaged_line_of_metrics_is_no_step(home, line):
    run, row = made(home)
    started(run, 10)
    run.metrics.write_text(f'{{"step": 1, "time": 1}}\n{line}\n')
    assert read_progress(run, row).step in (None, 1)
    assert "step" in status_text(run, row)
