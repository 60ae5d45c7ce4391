"""Two real steps before a run: what they measured, where they failed, and nothing left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import push
from stand_ins import stand_in
from typed_settings import grpo_settings, sft_settings

from engine.core.errors import UserError
from engine.dry_run.dry_run import dry_run_request
from engine.dry_run.smoke_check import MOST_ROWS, STEPS, smoke_settings
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes.programs import STAND_INS
from engine.runs.submit.requests import DryRunRequest


def smoke(home: Home, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the check `smoke`, the whole report)."""
    defaults = {"env_id": "sums", "algorithm": "sft", "smoke": True, "smoke_s": 60.0}
    report = dry_run_request(home, DryRunRequest(**(defaults | arguments)))
    return next(check for check in report["checks"] if check["name"] == "smoke"), report


def left_behind(home: Home) -> list[str]:
    """What a smoke run might leave: folders of its own, and runs."""
    with Store(home) as store:
        runs = [row.run_id for row in store.list_runs(10)]
    return [path.name for path in home.cache.glob("smoke-*")] + runs


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_sft_lowers_its_loss_on_the_rows_and_its_adapter_is_read_back(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(STAND_INS)
    push(home, tmp_path / "sums")
    given_settings = {"learning_rate": 3e-3, "batch_size": 16, "lora_rank": 4, "steps": 500}
    check, report = smoke(home, settings=given_settings)
    measured = report["smoke"]
    assert check["status"] == "pass" and "was read back" in check["detail"]
    assert measured["rows"] == MOST_ROWS and len(measured["steps"]) == STEPS
    assert measured["loss_after"] < measured["loss_before"] == measured["steps"][0]["loss"]
    assert measured["finite"] and measured["updated"] and measured["adapter_bytes"] > 1000
    assert measured["peak_memory"] > 1e7 and all(s["seconds"] > 0 for s in measured["steps"])
    assert report["settings"]["steps"] == 500 and left_behind(home) == []


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_grpo_samples_scores_and_updates(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(STAND_INS)
    push(home, tmp_path / "sums")
    settings = {"group_size": 8, "max_tokens": 20, "temperature": 1.3}
    check, report = smoke(home, algorithm="grpo", settings=settings)
    measured = report["smoke"]
    assert check["status"] == "pass", check
    assert measured["updated"] and all(0 < s["reward_mean"] < 1 for s in measured["steps"])
    assert measured["loss_after"] is None and left_behind(home) == []


@pytest.fixture
def stand_in_stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a worker in the place of the real one that stops where it is told."""

    def stops(at: str) -> None:
        stand_in(monkeypatch, smoke=Path(__file__).parents[1] / "fake_smoke.py")
        monkeypatch.setenv("HONESMITH_TEST_SMOKE", at)

    return stops


@pytest.mark.parametrize(
    ("at", "stage"),
    [
        ("load", "loading model, rows and environment"),
        ("step 1", "step 1"),
        ("step 2", "step 2"),
        ("save", "saving the adapter"),
        ("read", "reading the saved adapter back"),
    ],
)
@pytest.mark.timeout(30)
def test_a_failure_carries_the_step_that_failed(
    home: Home, add: Callable[..., str], stand_in_stops: Callable[[str], None], at: str, stage: str
):
    add()
    stand_in_stops(at)
    check, report = smoke(home)
    assert check["status"] == "fail" and check["detail"] == f"{stage}: It broke. (nan)"
    assert check["fix"] == "Mend it." and report["next"] == []
    assert report["summary"].startswith(f"Not ready: smoke: {stage}")
    assert left_behind(home) == []


@pytest.mark.timeout(30)
def test_a_worker_that_dies_or_hangs_is_told_by_the_step_it_was_in(
    home: Home, add: Callable[..., str], stand_in_stops: Callable[[str], None]
):
    add()
    stand_in_stops("step 2:die")
    check, _ = smoke(home)
    assert check["detail"] == "step 2: the worker ended with status 9"
    stand_in_stops("step 1:hang")
    check, _ = smoke(home, smoke_s=6.0)
    assert check["status"] == "fail" and check["detail"] == "step 1: not done within 6 s"
    assert left_behind(home) == []


def test_a_device_that_is_held_is_not_shared(home: Home, add: Callable[..., str]):
    env_id = add()
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-sft", "train", "sft", env_id, "pebble"))
        store.set_state(row.run_id, "preparing", only_from={"queued"})
        check, report = smoke(home)
        assert check["status"] == "skip" and f"{row.run_id} holds the device" in check["detail"]
        assert report["next"], "the run can be queued all the same"
        store.set_state(row.run_id, "failed", only_from={"preparing"})


def test_nothing_is_tried_where_a_check_fails_or_the_quota_is_spent(
    home: Home, add: Callable[..., str]
):
    add()
    assert smoke(home, settings={"lora_rank": 0})[0]["status"] == "skip"

    def spent(_hours: float) -> float:
        raise UserError("QUOTA", "nothing is left")

    request = DryRunRequest(env_id="sums", algorithm="sft", smoke=True)
    report = dry_run_request(home, request, spent)
    assert report["checks"][-1] | {"code": "QUOTA"} == report["checks"][-1]


@given(st.integers(1, 64), st.integers(1, 200))
def test_the_steps_take_few_rows_and_leave_the_other_settings_alone(batch: int, examples: int):
    sft = sft_settings({"batch_size": batch, "max_examples": examples, "lora_rank": 7})
    changed = smoke_settings(sft).model_dump()
    rows = min(MOST_ROWS, batch, examples)
    assert changed["batch_size"] == changed["max_examples"] == rows
    assert changed["steps"] == STEPS and changed["lora_rank"] == 7
    grpo = grpo_settings({"prompts_per_step": batch, "group_size": 4})
    changed = smoke_settings(grpo).model_dump()
    assert changed["prompts_per_step"] == min(MOST_ROWS, batch) and changed["group_size"] == 4
