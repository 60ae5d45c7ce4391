"""What the probe of the machine makes of its measurements."""

import pytest

from engine.worker.probe_speed import rate_and_fixed_cost


def test_two_sizes_tell_what_a_unit_costs_from_what_a_pass_costs() -> None:
    # 10 ms whatever the size, and a millisecond for every unit of 2,000,000 operations.
    rate, fixed = rate_and_fixed_cost(2e6, (10, 0.020), (100, 0.110))
    assert rate == pytest.approx(2e9)
    assert fixed == pytest.approx(0.010)


def test_a_large_pass_no_dearer_than_a_small_one_gives_no_infinite_rate() -> None:
    rate, fixed = rate_and_fixed_cost(2e6, (10, 0.020), (100, 0.019))
    assert rate == pytest.approx(2e6 * 100 / 0.019)
    assert 0 < fixed <= 0.020
