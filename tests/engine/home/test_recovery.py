"""What folders tell about runs whose row is lost; whole homes: tests/faults/test_database.py."""

import dataclasses

from run_configs import evaluate_config, train_config

from engine.core.files import write_json
from engine.core.hints import Hint
from engine.home.recovery import damaged_configs, env_rows, run_rows
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.processes import outcome


def lost(bench, run, state: str = "", **values) -> dict:
    """The row that the run's folder tells once its database is gone."""
    row = dataclasses.replace(bench.row(run), **({"state": state} if state else {}), **values)
    write_status(run, row)
    for path in bench.home.root.glob("honesmith.db*"):
        path.unlink()
    with Store(bench.home) as store:
        return vars(store.get_run(run.id))


def test_a_run_that_waited_waits_again(bench):
    run = bench.queue(max_gpu_hours=3.0)
    write_json(run.config, train_config(run.id, env_id="a@1", max_gpu_hours=3.0))
    row = lost(bench, run)
    assert (row["state"], row["env_id"], row["max_gpu_hours"]) == ("queued", "a@1", 3.0)


def test_how_a_run_ended_is_read_from_its_record_and_its_hours_are_kept(bench):
    run = bench.queue()
    write_json(run.config, train_config(run.id))
    write_json(run.started_record, {"attempt": 2, "time": 5.0})
    end = outcome.abandon(run, bench.row(run), "oom", "memory ran out", Hint("use less"))
    outcome.record(run, dataclasses.replace(end, attempt=2))
    row = lost(bench, run, "running", attempt=2, spent_hours=1.25)
    assert (row["state"], row["reason_kind"], str(row["hint"])) == ("failed", "oom", "use less")
    assert (row["attempt"], row["spent_hours"], row["started"]) == (2, 1.25, 5.0)


def test_a_run_nobody_recorded_the_end_of_is_interrupted(bench):
    run = bench.queue()
    write_json(run.config, train_config(run.id))
    write_json(run.started_record, {"attempt": 1, "time": 5.0})
    assert lost(bench, run, "running")["state"] == "interrupted"


def test_a_run_that_was_cancelled_while_it_waited_stays_cancelled(bench):
    run = bench.queue()
    write_json(run.config, train_config(run.id))
    row = lost(bench, run, "cancelled", reason_kind="cancelled", reason="not wanted")
    assert (row["state"], row["reason"]) == ("cancelled", "not wanted")


def test_a_folder_whose_submit_was_never_answered_becomes_no_run(home):
    run = home.run("arith-grpo-1")
    run.create()
    write_json(run.config, train_config("arith-grpo-1"))
    (home.runs / "no run at all").mkdir()
    assert run_rows(home) == []


def test_a_run_whose_config_is_damaged_is_named_with_its_fault(home, bench, caplog):
    runs = [bench.queue() for _ in range(3)]
    for run in runs:
        write_status(run, bench.row(run))
    torn = runs[0].config.read_text()[:-30]
    runs[0].config.write_text(torn)
    runs[1].config.unlink()
    assert [row["run_id"] for row in run_rows(home)] == [runs[2].id]
    assert caplog.text.count("was left out") == 2
    broken, missing = damaged_configs(home)
    assert broken.startswith(f"{runs[0].config} is damaged: ")
    assert missing == f"{runs[1].config} is gone"


def test_a_folder_that_is_no_version_is_left_out_with_a_word_and_the_others_are_kept(home, caplog):
    rows = {"train": 2, "heldout": 1}
    good = {"kind": "single", "scored": True, "rows": rows, "tools": []}
    good |= {"limits": {}, "secrets": []}
    for number, facts in enumerate(
        [good, good | {"tools": 5}, good | {"kind": ["x"]}, good | {"rows": None}, []]
    ):
        folder = home.env("sums", f"{number:012d}")
        folder.mkdir(parents=True)
        write_json(folder / "env.json", facts)
        write_json(folder / "audit.json", {"verdict": "ok", "headline": "fine"})
    assert [row["env_id"] for row in env_rows(home)] == ["sums@000000000000"]
    assert caplog.text.count("is no whole environment version") == 4
    with Store(home) as store:  # a database that is lost is made again from them
        assert [row.env_id for row in store.list_envs()] == ["sums@000000000000"]


def test_a_run_on_no_device_is_one_again_and_has_spent_no_hours(bench):
    endpoint = {"name": "big", "url": "https://h/v1", "model": "big-1"}
    asked = {"ref": "openai:big", "base_path": "", "endpoint": endpoint}
    run = bench.queue()
    write_json(run.config, evaluate_config(run.id, models=[asked]))
    outcome.note_event(run, "attempt_started", "attempt 1", attempt=1, device="")
    outcome.note_event(run, "trainer_exited", "failed", attempt=1)
    row = lost(bench, run)
    assert (row["gpus"], row["spent_hours"], row["model"]) == (0, 0.0, "openai:big")
