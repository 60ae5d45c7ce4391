"""The band of a run's hours on a machine that others keep busy."""

from dataclasses import replace

import pytest
from machines import CPU, GPU

from engine.core.hardware import Hardware
from engine.cost.hours import narrowing_call
from engine.home.run_dir import Home
from engine.records.estimate import Range
from tests.engine.cost.test_estimate import figures


@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
def test_a_busy_cpu_whose_speed_is_from_a_table_makes_likely_and_high_longer(
    home: Home, load: float
):
    idle, busy = figures(home)["hours"], figures(home, hardware=replace(CPU, load=load))["hours"]
    assert busy["low"] == idle["low"]
    for level in ("likely", "high"):
        assert busy[level] == pytest.approx((1 + load) * idle[level], rel=1e-3)


def test_a_gpu_is_taken_whole_whatever_its_cores_do(home: Home):
    busy: Hardware = replace(GPU, load=3.0)
    assert figures(home, hardware=busy)["hours"] == figures(home, hardware=GPU)["hours"]


def test_a_wide_range_comes_with_two_steps_here_and_with_nothing_for_a_run_elsewhere(home: Home):
    wide, narrow = (Range(low=0.1, likely=0.5, high=high) for high in (1.1, 0.9))
    arguments = {"env_id": "sums", "model": "pebble", "algorithm": "sft", "max_gpu_hours": 1}
    call = narrowing_call(home, wide, "model", arguments)
    assert call is not None and call.tool == "dry_run"
    assert call.arguments["smoke"] is True and "max_gpu_hours" not in call.arguments
    assert narrowing_call(home, narrow, "model", arguments) is None
    # A dry run refuses to try here what goes to another machine.
    elsewhere = {**arguments, "settings": {"compute": "ssh:box"}}
    assert narrowing_call(home, wide, "model", elsewhere) is None
