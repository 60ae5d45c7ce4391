"""A run that starts from the model of a run that is not done waits for it, without a daemon."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.cost.estimate import estimate_cost
from engine.dry_run.dry_run import dry_run
from engine.home.rows import NewRun
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.processes import launcher, waiting
from engine.machine.processes.waiting import link_checkpoint
from engine.runs import lifecycle
from engine.runs.deletion import deletable, delete_run
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

pytestmark = pytest.mark.timeout(60)

SFT = {"steps": 3, "learning_rate": 1e-3, "lora_rank": 4, "lora_targets": "attention"}


@pytest.fixture
def held(bench, env):
    """Trainers hold before their first step until the test takes the file away."""
    hold = bench.home.root / "hold"
    hold.touch()
    yield hold
    hold.unlink(missing_ok=True)
    for row in lifecycle.overview(bench.home, "runs")["runs"]:
        lifecycle.cancel(bench.home, row["run_id"])
    for row in lifecycle.overview(bench.home, "runs")["runs"]:
        run = bench.home.run(row["run_id"])
        bench.until(lambda run=run: not launcher.is_alive(run), f"{run.id} is gone")


def sft(bench, env, **arguments) -> RunDir:
    request = TrainRequest(**({"env_id": env, "algorithm": "sft", "settings": SFT} | arguments))
    return bench.home.run(lifecycle.submit(bench.home, request)["run_id"])


def grpo_from(bench, env, model: str, **settings) -> RunDir:
    request = TrainRequest(env_id=env, model=model, settings={"steps": 2} | settings)
    return bench.home.run(lifecycle.submit(bench.home, request)["run_id"])


def test_grpo_from_a_running_sft_waits_for_it_and_then_starts_from_its_best(bench, env, held):
    first = sft(bench, env)
    bench.pids(first)
    request = TrainRequest(env_id=env, model=f"{first.id}@best", settings={"steps": 2})
    reply = lifecycle.submit(bench.home, request)
    assert reply["state"] == "queued" and f"behind {first.id}" in reply["summary"]
    second = bench.home.run(reply["run_id"])
    config = second.read_config()
    assert (config.settings.lora_rank, config.settings.lora_targets) == (
        4,
        first.read_config().settings.lora_targets,
    )
    assert config.sources["lora_rank"] == "parent run"
    status = lifecycle.status(bench.home, second.id)
    assert status["waits_for"] == [f"{first.id} is {bench.row(first).state}"]
    assert status["summary"].startswith(f"{second.id} waits for the model of {first.id}")
    entry, _ = lifecycle.overview(bench.home, "runs")["runs"]
    assert entry["waits_for"] == [first.id]
    held.unlink()
    assert lifecycle.wait(bench.home, second.id, timeout_s=30)["state"] == "done"
    assert bench.row(first).state == "done" and bench.row(second).waits_for == ""
    start = read_json(second.config)["start_adapter"]
    manifests = [RunDir(second.path).start_adapter / "MANIFEST.json", first.best / "MANIFEST.json"]
    assert start == str(second.start_adapter)
    assert [read_json(path) for path in manifests] == [{"step": 3}, {"step": 3}]


def test_other_runs_pass_one_that_waits(bench, env, held):
    first = sft(bench, env)
    waiting = grpo_from(bench, env, first.id)
    other = sft(bench, env, note="needs nothing")
    held.unlink()
    bench.until_state(waiting, "done")
    bench.until_state(other, "done")
    with Store(bench.home) as store:
        began = {
            run.id: next(at for at, _, state in store.history(run.id) if state == "preparing")
            for run in (first, waiting, other)
        }
    assert began[first.id] < min(began[waiting.id], began[other.id])


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_chain_fails_with_the_reason_when_its_first_run_does_not_get_done(
    bench, env, held, end: str
):
    first = sft(bench, env)
    second = grpo_from(bench, env, f"{first.id}@best")
    third = grpo_from(bench, env, second.id)
    if end == "cancelled":
        lifecycle.cancel(bench.home, first.id, "not wanted")
    else:
        bench.kill(bench.pids(first)[1])
    bench.until_state(first, end)
    for run, maker in ((second, first), (third, second)):
        row = bench.until_state(run, "failed")
        assert row.reason_kind == "awaited" and maker.id in row.reason
        assert run.status_md.read_text().startswith(f"# {run.id}: failed")
        error = lifecycle.status(bench.home, run.id)["error"]
        assert error["call"] == {"tool": "submit_train", "arguments": {"resume": maker.id}}
    # Resumed in the order of the chain, all of it gets done.
    held.unlink()
    for run in (first, second, third):
        lifecycle.submit(bench.home, TrainRequest(resume=run.id))
    assert bench.until_state(third, "done").attempt == 2


def test_a_checkpoint_that_was_never_written_is_the_reason(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, f"{first.id}@step77")
    held.unlink()
    row = bench.until_state(second, "failed")
    assert "left no checkpoint step77" in row.reason and "@step3" in row.hint.text


def test_the_waiting_survives_the_death_of_everything(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, f"{first.id}@best")
    bench.kill(*bench.pids(first))
    bench.until(lambda: not launcher.is_alive(first), "nothing lives")
    held.unlink()
    assert lifecycle.wait(bench.home, second.id, timeout_s=30)["state"] == "done"
    assert bench.row(first).attempt == 2


def test_a_death_while_the_checkpoint_is_linked_is_mended(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, first.id)
    second.start_adapter.mkdir()  # what a process left that was killed before its first link
    held.unlink()
    bench.until_state(second, "done")
    assert (second.start_adapter / "MANIFEST.json").is_file()


@pytest.fixture
def no_hard_links(monkeypatch):
    """A file system without hard links. Of a file that is there already it says so first."""

    def link(source, target, **_options) -> None:
        code = errno.EEXIST if Path(target).exists() else errno.EPERM
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(os, "link", link)


def test_a_checkpoint_is_copied_whole_or_not_at_all(tmp_path, no_hard_links, monkeypatch):
    source, target = tmp_path / "step_000003", tmp_path / "start"
    source.mkdir()
    (source / "adapter_model.safetensors").write_bytes(b"weights")

    def dies_half_way(original, copy, *_rest) -> None:
        copy.write(original.read(3))
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(shutil, "copyfileobj", dies_half_way)
        link_checkpoint(source, target)
    assert list(target.iterdir()) == []
    link_checkpoint(source, target)
    link_checkpoint(source, target)  # a second process
    assert [file.name for file in target.iterdir()] == ["adapter_model.safetensors"]
    assert (target / "adapter_model.safetensors").read_bytes() == b"weights"


def test_a_folder_in_a_checkpoint_stops_nobody(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, f"{first.id}@step3")
    (first.checkpoints / ".step_000003" / "notes").mkdir(parents=True)
    held.unlink()
    bench.until_state(second, "done")
    assert (second.start_adapter / "MANIFEST.json").is_file()


@pytest.mark.parametrize(("code", "state"), [(errno.ENOENT, "failed"), (errno.EIO, "queued")])
def test_a_checkpoint_that_cannot_be_read_holds_up_its_own_run_alone(
    bench, env, held, monkeypatch, code: int, state: str
):
    first = sft(bench, env)
    second = grpo_from(bench, env, first.id)

    def broken(source, target) -> None:
        raise OSError(code, os.strerror(code), str(source))

    lifecycle.cancel(bench.home, second.id)
    held.unlink()
    bench.until_state(first, "done")
    held.touch()
    monkeypatch.setattr(waiting, "link_checkpoint", broken)
    lifecycle.submit(bench.home, TrainRequest(resume=second.id))
    other = sft(bench, env, note="needs nothing")
    assert bench.row(other).state == "preparing"
    row = bench.row(second)
    assert row.state == state
    if state == "failed":
        assert "cannot be read" in row.reason and row.hint.call.arguments == {"resume": second.id}


def test_a_run_whose_id_begins_with_that_of_a_lost_one_is_not_taken_for_it(bench, env):
    with Store(bench.home) as store:
        for name, waits_for in (("sums-sft", ""), ("other-sft", "sums-sft-")):
            new = NewRun(name, "train", "sft", env, "pebble", waits_for=waits_for)
            row = store.insert_run(new, lambda run_id: bench.home.run(run_id).create())
        waiting.release_waiting(bench.home, store)
        assert store.get_run(row.run_id).reason == "sums-sft-, whose model it waited for, is gone"


def test_an_evaluation_asks_what_is_there_and_waits_for_what_is_not(bench, env, held, tuned):
    first = sft(bench, env)
    request = EvaluationRequest(env_id=env, models=["pebble", tuned, f"{first.id}@best"], rows=4)
    evaluation = bench.home.run(lifecycle.submit_evaluation(bench.home, request)["run_id"])
    assert bench.row(evaluation).awaited_ids == [first.id]
    base, present, awaited = evaluation.read_config().models
    assert base.adapter is None and present.adapter == str(evaluation.model_adapter(1))
    assert awaited.adapter == str(evaluation.model_adapter(2))
    held.unlink()
    bench.until_state(evaluation, "done")
    assert (evaluation.model_adapter(2) / "MANIFEST.json").is_file()


def test_a_step_that_is_written_already_is_not_waited_for(bench, env):
    first = bench.start(steps=3, hold_at=2)
    bench.until_step(first, 1)
    request = EvaluationRequest(env_id=env, models=[f"{first.id}@step1"], rows=4)
    with pytest.raises(UserError) as caught:  # the stand-in's checkpoint holds no adapter
        lifecycle.submit_evaluation(bench.home, request)
    assert caught.value.code != "MODEL_NOT_FOUND"
    bench.go(first)
    bench.until_state(first, "done")


def test_what_comes_before_a_submit_copes_with_a_model_that_is_still_to_be_made(bench, env, held):
    first = sft(bench, env)
    model = f"{first.id}@best"
    costs = estimate_cost(bench.home, env, model, "grpo", {"steps": 2})
    assert costs["fits"] and costs["hours"]["likely"] > 0
    report = dry_run(bench.home, env, model, "grpo", {"steps": 2}, samples=4)
    checks = {check["name"]: check for check in report["checks"]}
    assert f"what {first.id} is still to make" in checks["model"]["detail"]
    assert checks["probe"]["status"] == "skip" and first.id in checks["probe"]["detail"]
    assert not [check for check in report["checks"] if check["status"] == "fail"]
    with pytest.raises(UserError, match="lora_rank"):
        grpo_from(bench, env, model, lora_rank=8)


def test_a_run_that_is_waited_for_cannot_be_deleted(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, first.id)
    lifecycle.cancel(bench.home, second.id)
    held.unlink()
    bench.until_state(first, "done")
    lifecycle.submit(bench.home, TrainRequest(resume=second.id))
    with pytest.raises(UserError) as caught:
        deletable(bench.home, [first.id], force=True)
        delete_run(bench.home, first.id)
    assert caught.value.code == "RUN_STATE"
    bench.until_state(second, "done")


def test_a_lost_database_still_knows_who_waits(bench, env, held):
    first = sft(bench, env)
    second = grpo_from(bench, env, f"{first.id}@best")
    bench.kill(*bench.pids(first))
    bench.until(lambda: not launcher.is_alive(first), "nothing lives")
    for suffix in ("", "-wal", "-shm"):
        bench.home.db.with_name(bench.home.db.name + suffix).unlink(missing_ok=True)
    with Store(bench.home) as store:
        assert store.get_run(second.id).waits_for == first.id
    held.unlink()
    assert lifecycle.wait(bench.home, second.id, timeout_s=30)["state"] == "done"
