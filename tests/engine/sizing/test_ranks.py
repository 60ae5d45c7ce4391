"""What several devices do for the time of a run, and how many pay."""

import pytest

from engine.sizing import ranks

SECONDS = {"startup": 60.0, "training": 4000.0, "rollouts": 4000.0, "rewards": 500.0}


def test_one_device_changes_nothing() -> None:
    assert ranks.seconds_on(SECONDS, 1) == SECONDS


def test_what_ranks_share_shrinks_and_the_rest_stays() -> None:
    on_four = ranks.seconds_on(SECONDS, 4)
    assert on_four["training"] == pytest.approx(4000 * (0.05 + 0.95 / 4))
    assert on_four["rewards"] == 500.0 and on_four["startup"] == 65.0


@pytest.mark.parametrize(
    ("alone", "others", "chosen"),
    [
        (36_000, {2: 18_500, 4: 9_800, 8: 6_000}, 4),  # eight cost a third more
        (900, {2: 470, 4: 260}, 4),  # saves ten minutes
        (700, {2: 360, 4: 190}, 1),  # saves less
        (36_000, {2: 30_000}, 1),  # hardly faster
        (36_000, {}, 1),
    ],
)
def test_devices_are_taken_that_save_time_and_cost_little_more(
    alone: float, others: dict[int, float], chosen: int
) -> None:
    assert ranks.paying({1: alone} | others) == chosen
