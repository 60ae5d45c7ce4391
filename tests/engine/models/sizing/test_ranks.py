"""What several devices do for the time of a run, and how many pay."""

import pytest

from engine.models.sizing import ranks

SECONDS = {"startup": 60.0, "training": 4000.0, "rollouts": 4000.0, "rewards": 500.0}


def test_one_device_changes_nothing() -> None:
    assert ranks.seconds_on(SECONDS, 1) == SECONDS


def test_what_ranks_share_shrinks_and_the_rest_stays() -> None:
    on_four = ranks.seconds_on(SECONDS, 4)
    assert on_four["training"] == pytest.approx(4000 * (0.05 + 0.95 / 4))
    assert on_four["rewards"] == 500.0 and on_four["startup"] == 65.0


def test_of_rollouts_sampled_beside_only_what_training_waits_for_counts() -> None:
    on_two = ranks.seconds_on(SECONDS | {"rollouts": 5000.0}, 2, beside=True)
    assert on_two["training"] == 4000.0 and on_two["rollouts"] == 1000.0
    assert ranks.seconds_on(SECONDS, 4, beside=True)["rollouts"] == 0.0


@pytest.mark.parametrize(("devices", "training"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_half_of_the_devices_train_where_others_sample(devices: int, training: int) -> None:
    assert ranks.training_devices(devices, beside=True) == training
    assert ranks.training_devices(devices, beside=False) == devices


def test_a_sharded_base_takes_longer() -> None:
    whole, sharded = (ranks.seconds_on(SECONDS, 4, sharded=s) for s in (False, True))
    assert sharded["training"] > whole["training"] and sharded["rollouts"] > whole["rollouts"]


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
    assert ranks.paying_gpu_count({1: alone} | others) == chosen
