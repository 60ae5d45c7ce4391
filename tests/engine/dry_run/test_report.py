"""What the reply to a dry run says."""

from dataclasses import replace
from typing import Any

import pytest

from engine.core.hardware import Device
from engine.cost import throughput
from engine.cost.throughput import Speed
from engine.dry_run import dry_run
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit.requests import DryRunRequest
from tests.engine.dry_run.conftest import add_env

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(name="measured", params=[False, True])
def is_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this machine was measured; else its speed is that of a table."""
    measured: bool = request.param

    def load(home: Home, device: Device, cores: int, precision: str) -> Speed:
        return replace(throughput.table(device, cores, precision), measured=measured)

    monkeypatch.setattr(throughput, "load", load)
    monkeypatch.setattr(throughput, "ensure", lambda *of_machine: measured)
    return measured


def test_a_time_from_a_table_says_so_with_its_band_and_the_submit_comes_next(
    home: Home, measured: bool
):
    report = dry_run.dry_run(home, add_env(home, "sums"))
    assert report["summary"].startswith("Ready to train, about ")
    says_so = "by a table (" in report["summary"] and "not measured yet" in report["summary"]
    assert says_so is not measured
    *before, submit = [call["tool"] for call in report["next"]]
    assert submit == "submit_train"
    # A range of more than a factor of ten is never told without the call that narrows it.
    hours = report["estimate"]["hours"]
    is_wide = hours["high"] > 10 * hours["low"]
    assert is_wide or measured, "the range of a table is wide"
    assert before == (["dry_run"] if is_wide else [])
    if not measured:
        assert report["next"][0]["arguments"]["smoke"] is True
        assert "a wide range: the first call in next" in report["summary"]


@pytest.mark.parametrize("measured", [False], indirect=True)
@pytest.mark.parametrize("then", [[], [{"algorithm": "grpo", "settings": {"steps": 2}}]])
def test_two_steps_that_could_not_be_done_are_not_asked_for_again(
    home: Home, measured: bool, then: list[dict[str, Any]]
):
    env_id = add_env(home, "sums")
    request = DryRunRequest(env_id=env_id, algorithm="sft", then=then)
    assert dry_run.dry_run_request(home, request)["next"][0]["tool"] == "dry_run"
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-sft", "train", "sft", env_id, "pebble"))
        store.set_state(row.run_id, "preparing", only_from={"queued"})
        report = dry_run.dry_run_request(home, replace(request, smoke=True))
        store.set_state(row.run_id, "failed", only_from={"preparing"})
    smoke = next(check for check in report["checks"] if check["name"] == "smoke")
    assert smoke["status"] == "skip" and f"{row.run_id} holds the device" in smoke["detail"]
    assert [call["tool"] for call in report["next"]] == ["submit_train"]
    assert "first call in next" not in report["summary"]
