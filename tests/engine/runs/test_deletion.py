"""Runs thrown away: what is refused, what goes, what stays."""

import json
import os

import pytest
from answered import answer, evaluation, push, training
from as_json import holdout_use, verify
from command_line import call

from engine.core.errors import UserError
from engine.core.files import take_lock, write_json
from engine.curation import curate
from engine.curation.curated import Choices
from engine.home import recovery
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import deletion, lifecycle
from engine.runs.submit import contamination
from engine.runs.submit import training as submit_training
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from mcp_server.api import verbs

GOOD = [answer("1+1", "2", 1.0), answer("1+1", "3", 0.0, 1)]


@pytest.fixture
def env_id(home: Home, tmp_path) -> str:
    return push(home, tmp_path / "env")


def trained(home: Home, env_id: str, model: str = "pebble"):
    """A run that ended, with a megabyte of checkpoints and an evaluation."""
    run = training(home, env_id, model=model, rollouts={1: GOOD}, evals={1: GOOD})
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "adapter_model.safetensors").write_bytes(b"0" * 1_000_000)
    write_json(run.checkpoint(1) / "MANIFEST.json", {"step": 1})
    write_json(run.result, {"verdict": "better", "summary": "it got better"})
    with Store(home) as store:
        store.update_run(run.id, only_in={"done"}, spent_hours=0.5)
    return run


def test_a_deleted_run_frees_its_room_and_keeps_its_line_its_hours_and_its_looks(
    home: Home, env_id: str
):
    run = trained(home, env_id)
    used = holdout_use(home, env_id)
    links = [{"name": "run", "files": {"metrics.jsonl": "0"}, "hash": "0"}]
    write_json(run.chain, {"head": "0", "links": links})
    done = call("runs", "delete", run.id, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["deleted"][run.id] > 900_000
    assert not run.checkpoints.exists() and not run.rollouts_dir.exists()
    assert run.evals(1).stat().st_size == 0
    with Store(home) as store:
        assert store.spent_hours() == 0.5
    (line,) = lifecycle.overview(home, "runs")["runs"]
    assert line["run_id"] == run.id and line["deleted"]
    assert holdout_use(home, env_id) == used and used["looks"] > 0
    found = lifecycle.status(home, run.id)
    assert "it got better" in found["summary"] and "were deleted" in found["warnings"][0]
    assert verify(home, run.id)["intact"] is None
    written = [json.loads(text) for text in home.audit.read_text().splitlines()]
    assert [(note["tool"], note["run_id"]) for note in written] == [("delete_run", run.id)]


def test_the_report_of_a_deleted_run_is_the_one_of_before(home: Home, env_id: str):
    run = trained(home, env_id)
    assert call("runs", "delete", run.id).exit_code == 0
    before = run.report.read_bytes()
    assert call("report", run.id).exit_code == 0
    assert run.report.read_bytes() == before


def test_a_deleted_run_is_neither_continued_nor_trained_on(home: Home, env_id: str):
    with Store(home) as store:
        row = store.insert_run(
            NewRun("arith-sft", "train", "sft", env_id, "pebble"),
            lambda run_id: home.run(run_id).create(),
        )
        store.set_state(row.run_id, "cancelled", only_from={"queued"})
    write_json(home.run(row.run_id).config, {"kind": "train", "settings": {}})
    assert call("runs", "delete", row.run_id).exit_code == 0
    with pytest.raises(UserError) as refusal:
        lifecycle.submit(home, TrainRequest(resume=row.run_id))
    assert refusal.value.code == "RUN_STATE" and "deleted" in refusal.value.message
    with pytest.raises(UserError) as refusal:
        lifecycle.submit(home, TrainRequest(env_id=env_id, model=row.run_id))
    assert "deleted" in refusal.value.message


def test_an_open_run_is_not_deleted_even_by_force(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launcher, "reap", lambda home: None)  # nothing is started
    with Store(home) as store:
        row = store.insert_run(NewRun("arith-sft", "train", "sft", env_id, "pebble"))
    for force in ((), ("--force",)):
        told = call("runs", "delete", row.run_id, *force)
        assert told.exit_code == 2 and "is queued" in told.stderr
        offered = "Cancel it, or wait until it has ended; then delete it. honesmith cancel"
        assert f"{offered} {row.run_id}" in " ".join(told.stderr.split())
    with pytest.raises(UserError) as refusal:
        deletion.deletable(home, [row.run_id])
    assert refusal.value.hint.endswith(f'cancel_run(run_id="{row.run_id}")')


def test_a_run_that_others_come_from_is_only_deleted_by_force_or_with_them(home: Home, env_id: str):
    first = trained(home, env_id)
    second = trained(home, env_id, f"{first.id}@step1")
    judged = evaluation(home, env_id, {f"{second.id}@step1": GOOD})
    told = call("runs", "delete", first.id)
    assert told.exit_code == 2 and second.id in told.stderr and "--force" in told.stderr
    assert call("runs", "delete", second.id).exit_code == 2
    assert first.checkpoints.exists()
    both = call("runs", "delete", first.id, second.id, judged.id, "--json")
    assert list(json.loads(both.stdout)["deleted"]) == [first.id, second.id, judged.id]


def test_nothing_is_deleted_when_one_of_several_may_not_be(home: Home, env_id: str):
    first = trained(home, env_id)
    second = trained(home, env_id, f"{first.id}@step1")
    third = trained(home, env_id, f"{second.id}@step1")
    assert call("runs", "delete", third.id, first.id).exit_code == 2
    assert third.checkpoints.exists()
    forced = call("runs", "delete", third.id, first.id, "--force", "--json")
    assert f"{second.id} came from {first.id}" in json.loads(forced.stdout)["warnings"]
    assert not third.checkpoints.exists() and not first.checkpoints.exists()


@pytest.mark.timeout(20)
def test_a_run_that_a_dataset_was_curated_from_is_only_deleted_by_force(home: Home, env_id: str):
    run = trained(home, env_id)
    rows = [answer(f"1+{b}", str(1 + b), 1.0) for b in range(1, 9)]
    judged = evaluation(home, env_id, {"pebble": rows}, attempts=1)
    saved = curate.curate(home, "chosen", Choices([judged.id]), preview=False).to_json()
    told = call("runs", "delete", judged.id)
    assert told.exit_code == 2 and saved["env_id"] in told.stderr
    assert call("runs", "delete", run.id).exit_code == 0, "the dataset is not of this run"
    assert call("runs", "delete", judged.id, "--force").exit_code == 0


def test_a_prefix_is_taken_and_said_and_options_before_delete_are_refused(home: Home, env_id: str):
    run = trained(home, env_id)
    told = call("runs", "--home", str(home.root), "delete", run.id)
    assert told.exit_code == 2 and run.checkpoints.exists()
    done = call("runs", "delete", run.id[:-2], "--json")
    assert f"run {run.id[:-2]!r} was taken as {run.id}" in json.loads(done.stdout)["warnings"]


def failed(home: Home, env_id: str) -> RunDir:
    """A run that failed at a checkpoint: one that may be resumed."""
    with Store(home) as store:
        row = store.insert_run(
            NewRun("arith-sft", "train", "sft", env_id, "pebble"),
            lambda run_id: home.run(run_id).create(),
        )
        store.set_state(row.run_id, "cancelled", only_from={"queued"})
    run = home.run(row.run_id)
    write_json(run.config, {"kind": "train", "settings": {}})
    run.checkpoint(1).mkdir(parents=True)
    return run


def test_a_run_resumed_while_it_is_about_to_be_deleted_keeps_its_checkpoints(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launcher, "reap", lambda home: None)  # nothing is started
    run = failed(home, env_id)
    # The report is written between the look at the state and the marker.
    monkeypatch.setattr(
        deletion,
        "write_report",
        lambda home, run_id: lifecycle.submit(home, TrainRequest(resume=run_id)),
    )
    with pytest.raises(UserError) as refusal:
        deletion.delete_run(home, run.id)
    assert refusal.value.code == "RUN_STATE" and "is queued" in refusal.value.message
    assert run.checkpoint(1).exists() and not run.deleted.exists()


def test_a_run_regraded_while_it_is_about_to_be_deleted_keeps_its_answers(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launcher, "start_queued", lambda *_: None)
    run = evaluation(home, env_id, {"pebble": GOOD})
    monkeypatch.setattr(
        deletion,
        "write_report",
        lambda home, run_id: lifecycle.submit_evaluation(
            home, EvaluationRequest(env_id=env_id, regrade=run_id)
        ),
    )
    with pytest.raises(UserError) as refusal:
        deletion.delete_run(home, run.id)
    assert refusal.value.code == "RUN_STATE" and "is needed by sums-regrade-1" in str(refusal.value)
    assert not run.deleted.exists() and run.model_evals(0).stat().st_size


def test_answers_deleted_while_they_are_about_to_be_regraded_are_refused(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    run = evaluation(home, env_id, {"pebble": GOOD})
    shared = contamination.compare_models

    def meanwhile(*asked):
        deletion.delete_run(home, run.id)
        return shared(*asked)

    monkeypatch.setattr(contamination, "compare_models", meanwhile)
    with pytest.raises(UserError) as refusal:
        lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env_id, regrade=run.id))
    assert refusal.value.code == "RUN_STATE" and refusal.value.field == "regrade"
    with Store(home) as store:
        assert [row.kind for row in store.list_runs()] == ["evaluate"], "none but the deleted one"


def test_a_run_deleted_while_it_is_about_to_be_resumed_stays_ended(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    run = failed(home, env_id)
    # The last thing that a resume looks at before its transaction.
    monkeypatch.setattr(
        submit_training, "check_hours_left", lambda home, store: deletion.delete_run(home, run.id)
    )
    with pytest.raises(UserError) as refusal:
        lifecycle.submit(home, TrainRequest(resume=run.id))
    assert refusal.value.code == "RUN_STATE" and "deleted" in refusal.value.message
    with Store(home) as store:
        assert store.get_run(run.id).state == "cancelled"


def starting(home: Home, name: str) -> tuple[str, int]:
    """A deployment that lives and is not ready: its id, and the lock that says it lives."""
    with Store(home) as store:
        row = store.add_deployment(
            base_name="pebble", base_path="/base", adapters=[], serve_base=False, memory_bytes=1
        )
    folder = home.deployment(row.deployment_id)
    folder.path.mkdir(parents=True)
    adapters = [{"name": name, "path": "/adapter"}]
    write_json(folder.config, {"base_path": "/base", "base_name": "pebble", "adapters": adapters})
    lock = take_lock(folder.alive)
    assert lock is not None
    return row.deployment_id, lock


def test_a_run_that_a_deployment_is_starting_with_is_only_deleted_by_force(home: Home, env_id: str):
    run = trained(home, env_id)
    deployment_id, lock = starting(home, f"{run.id}@best")
    try:
        told = call("runs", "delete", run.id)
        assert told.exit_code == 2 and deployment_id in told.stderr
        assert run.checkpoints.exists()
        (row,) = recovery.deployment_rows(home)
        assert row["adapters"] == [{"name": f"{run.id}@best", "path": "/adapter"}]
        assert (row["state"], row["serve_base"]) == ("starting", False)
    finally:
        os.close(lock)
    assert call("runs", "delete", run.id).exit_code == 0, "nothing is starting any more"


def test_what_was_deleted_is_told_when_one_of_several_could_not_be(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    first, second, third = (trained(home, env_id) for _ in range(3))
    delete = deletion.delete_run

    def refuse_second(home: Home, run_id: str):
        if run_id == second.id:
            raise UserError("RUN_STATE", f"{run_id} is queued")
        return delete(home, run_id)

    monkeypatch.setattr(deletion, "delete_run", refuse_second)
    told = call("runs", "delete", first.id, second.id, third.id, "--json")
    reply = json.loads(told.stdout)
    assert told.exit_code == 1
    assert list(reply["deleted"]) == [first.id, third.id]
    assert [second.id in said and "is queued" in said for said in reply["warnings"]] == [True]


def test_links_in_a_run_go_and_what_they_lead_to_stays(home: Home, env_id: str, tmp_path):
    run = trained(home, env_id)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (run.checkpoints, run.evals(1)):
        kept = elsewhere / path.name
        path.rename(kept)
        path.symlink_to(kept)
    answers = (elsewhere / run.evals(1).name).read_bytes()
    done = call("runs", "delete", run.id, "--json")
    said = json.loads(done.stdout)["warnings"]
    assert [str(elsewhere) in warning for warning in said] == [True, True]
    assert not run.checkpoints.is_symlink() and not run.evals(1).is_symlink()
    assert run.evals(1).read_bytes() == b"" and answers
    assert (elsewhere / run.evals(1).name).read_bytes() == answers
    assert (elsewhere / "checkpoints" / "step_000001" / "adapter_model.safetensors").exists()


def test_a_folder_of_evaluations_that_is_a_link_is_replaced_by_names(
    home: Home, env_id: str, tmp_path
):
    run = trained(home, env_id)
    run.evals_dir.rename(tmp_path / "evals")
    run.evals_dir.symlink_to(tmp_path / "evals")
    deletion.delete_run(home, run.id)
    assert run.eval_steps() == [1] and run.evals(1).stat().st_size == 0
    assert (tmp_path / "evals" / run.evals(1).name).stat().st_size > 0


def test_what_could_not_be_removed_is_said(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    run = trained(home, env_id)
    monkeypatch.setattr(deletion.shutil, "rmtree", lambda path, ignore_errors: None)
    said = deletion.delete_run(home, run.id)["warnings"]
    assert f"{run.checkpoints} could not be removed and is still there" in said


def test_nothing_of_a_deleted_run_is_suggested(home: Home, env_id: str):
    run = trained(home, env_id)
    assert verbs.wait_run(home, run.id)["next"]
    deletion.delete_run(home, run.id)
    assert verbs.wait_run(home, run.id)["next"] == []
    assert "its files were deleted" in verbs.read_logs(home, run.id)["summary"]
    judged = evaluation(home, env_id, {"pebble": GOOD})
    deletion.delete_run(home, judged.id)
    for gone in (run, judged):
        with pytest.raises(UserError) as refusal:
            verbs.read_rollouts(home, gone.id)
        assert "its files were deleted" in refusal.value.message
        with pytest.raises(UserError) as refusal:
            verbs.compare_runs(home, [gone.id, "pebble"])
        assert f"the files of {gone.id} were deleted" in refusal.value.message
        assert "its files were deleted" in verbs.diagnose(home, gone.id)["summary"]
