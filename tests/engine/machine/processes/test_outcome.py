"""From an exit status and what the trainer left to a final state."""

import pytest

from engine.core.errors import FAILURE_KINDS
from engine.core.files import write_json
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import outcome


def made(home: Home, state: str = "running", **values) -> tuple[RunDir, RunRow]:
    with Store(home) as store:
        row = store.insert_run(NewRun("a-sft", "train", "sft", "a@1", "pebble"))
        home.run(row.run_id).create()
        store._db.execute("UPDATE runs SET state = ?", (state,))
        store.update_run(row.run_id, only_in={state}, **({"device": "cpu"} | values))
        return home.run(row.run_id), store.get_run(row.run_id)


def checkpoint(run: RunDir, step: int) -> None:
    run.checkpoint(step).mkdir()
    write_json(run.checkpoint(step) / "MANIFEST.json", {})


def decide(run, row, status, **values):
    return outcome.decide(run, row, status=status, elapsed_s=7200.0, **values)


def test_a_result_makes_it_done_even_while_stopping(home):
    run, row = made(home, "stopping", reason_kind="cancelled")
    write_json(run.result, {"verdict": "no_difference"})
    end = decide(run, row, 0)
    assert (end.state, end.verdict, end.rc, end.signal) == ("done", "no_difference", 0, None)


@pytest.mark.parametrize("result", [None, "[]", "{"])
def test_exit_0_without_a_result_is_a_failure(home, result):
    run, row = made(home)
    if result is not None:
        run.result.write_text(result)
    assert decide(run, row, 0).reason_kind == "internal"


@pytest.mark.parametrize("kind", [*sorted(FAILURE_KINDS), "moon phase", None])
def test_a_failure_keeps_its_kind_if_it_is_one_of_ours(home, kind):
    run, row = made(home)
    write_json(run.failure, {"kind": kind, "message": "what happened"})
    end = decide(run, row, 3)
    assert end.state == "failed" and end.reason == "what happened"
    assert end.reason_kind == (kind if kind in FAILURE_KINDS else "internal")
    assert run.id in str(end.hint)


def test_exit_3_without_a_failure_file_shows_the_log(home):
    run, row = made(home)
    run.log(1).write_text("Traceback\nKeyError: 'gold'\n")
    end = decide(run, row, 3)
    assert end.reason_kind == "internal" and "KeyError: 'gold'" in end.reason


@pytest.mark.parametrize("status", [-9, -11, -15, 4])
def test_an_end_nobody_here_asked_for_is_a_kill(home, status):
    run, row = made(home)
    checkpoint(run, 20)
    end = decide(run, row, status)
    assert (end.state, end.reason_kind) == ("failed", "killed")
    assert f"signal {15 if status == 4 else -status}" in end.reason
    assert end.last_checkpoint == "step_000020" and "step_000020" in str(end.hint)


def test_a_kill_while_memory_ran_out_says_so(home):
    run, row = made(home)
    end = decide(run, row, -9, memory_ran_out=True)
    assert end.reason_kind == "killed" and "lack of memory" in end.reason
    assert "max_length" in str(end.hint) and "step 0" in str(end.hint)


@pytest.mark.parametrize(
    ("kind", "state"),
    [("cancelled", "cancelled"), ("budget", "failed"), ("timeout", "failed")],
)
@pytest.mark.parametrize("status", [4, -9, 3])
def test_a_stop_ends_as_what_was_asked_for_however_the_trainer_ended(home, kind, state, status):
    run, row = made(home, "stopping", reason_kind=kind, reason="because")
    end = decide(run, row, status)
    assert (end.state, end.reason_kind) == (state, kind)
    assert end.reason.startswith("because") and ("SIGKILL" in end.reason) == (status == -9)


@pytest.mark.parametrize(("status", "said"), [(-15, ""), (-9, "ended by SIGKILL"), (4, "")])
def test_only_a_stop_that_was_forced_says_so(home, status, said):
    run, row = made(home, "stopping", reason_kind="cancelled", reason="enough")
    reason = decide(run, row, status).reason
    assert reason == "enough" if not said else reason.startswith("enough; ") and said in reason


def test_a_record_counts_only_for_its_own_attempt(home):
    run, row = made(home)
    assert outcome.recorded(run, 1) is None
    end = decide(run, row, -9)
    outcome.record(run, end)
    assert outcome.recorded(run, 1) == end and outcome.recorded(run, 2) is None
    run.exit_record.write_text('{"attempt": 1}')
    assert outcome.recorded(run, 1) is None


@pytest.mark.parametrize("state", ["preparing", "running"])
def test_an_outcome_is_applied_once_with_the_hours_it_took(home, state):
    run, row = made(home, state, spent_hours=1.0)
    write_json(run.result, {"verdict": "better"})
    end = decide(run, row, 0)
    with Store(home) as store:
        assert outcome.apply(store, run, row, end)
        assert not outcome.apply(store, run, row, end)
        after = store.get_run(row.run_id)
    assert (after.state, after.verdict, after.spent_hours) == ("done", "better", 3.0)
    assert after.ended == end.time


def test_what_looks_like_a_key_is_hidden_in_the_reason_and_the_evidence(home):
    run, row = made(home)
    key = "sk-abcdefghijklmnop1234567890"
    failure = {"kind": "reward", "message": f"raised {key}", "evidence": f"ValueError: {key}"}
    write_json(run.failure, failure)
    end = decide(run, row, 3)
    assert end.reason == "raised [secret]"
    assert outcome.evidence(run) == "ValueError: [secret]"
