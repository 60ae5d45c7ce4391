"""What the reply to a dry run says."""

from dataclasses import replace

import pytest

from engine.core.hardware import Device
from engine.cost import throughput
from engine.cost.throughput import Speed
from engine.dry_run import dry_run
from engine.home.run_dir import Home
from tests.engine.dry_run.conftest import add_env


@pytest.mark.parametrize("measured", [False, True])
def test_a_time_from_a_table_says_so_with_its_band_and_the_submit_comes_next(
    home: Home, monkeypatch: pytest.MonkeyPatch, measured: bool
):
    def load(home: Home, device: Device, cores: int, precision: str) -> Speed:
        return replace(throughput.table(device, cores, precision), measured=measured)

    monkeypatch.setattr(throughput, "load", load)
    monkeypatch.setattr(throughput, "ensure", lambda *of_machine: measured)
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
