"""The band of a run's hours on a machine that others keep busy."""

from dataclasses import replace

import pytest
from machines import CPU, GPU

from engine.core.hardware import Hardware
from engine.home.run_dir import Home
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
