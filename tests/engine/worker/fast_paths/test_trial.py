"""A fast path beside the plain way, with planted faults."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.worker.core import switched_off
from engine.worker.fast_paths.trial import PathUnavailable, Trial, difference_of, try_path

CPU = torch.device("cpu")
NAME = "shared_prompt"  # any path that is timed
NUMBERS = torch.linspace(0.5, 2.0, 7)


def with_path(fast: Callable[[], torch.Tensor]) -> Callable[[torch.device], Trial]:
    """A trial that computes `fast` with the path on, and NUMBERS in 2 ms with it off."""

    def work() -> Sequence[torch.Tensor]:
        return [busy(0.002)] if switched_off.is_off(NAME) else [fast()]

    return lambda device: Trial(work, allowed=1e-3)


def busy(seconds: float) -> torch.Tensor:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return NUMBERS


def raising() -> torch.Tensor:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def test_a_path_with_the_same_numbers_that_is_no_slower_is_on():
    result = try_path(NAME, with_path(lambda: NUMBERS * 1.0001), CPU)
    assert result.state == "on" and result.reason == ""
    assert result.difference == pytest.approx(1e-4, rel=0.01)
    assert result.speedup is not None


@pytest.mark.parametrize(
    ("fast", "reason"),
    [
        (lambda: NUMBERS * 1.01, "differs from the plain way by 1.0e-02"),
        (lambda: NUMBERS * float("nan"), "differs from the plain way by nan"),
        (lambda: NUMBERS[:3], "differs from the plain way by inf"),
        (raising, "RuntimeError: no kernel image is available for execution on the device"),
        (lambda: busy(0.01), "slower: "),
    ],
)
def test_a_wrong_a_failing_and_a_slow_path_are_off_with_the_reason(
    fast: Callable[[], torch.Tensor], reason: str
):
    result = try_path(NAME, with_path(fast), CPU)
    assert result.state == "off" and reason in result.reason


def test_a_path_that_saves_memory_may_be_slower():
    trial = Trial(lambda: [busy(0.005)], allowed=0.0, plain=lambda: [NUMBERS])
    assert try_path("four_bits", lambda device: trial, CPU).state == "on"


def test_what_cannot_be_tried_is_neither_on_nor_off():
    def missing(device: torch.device) -> Trial:
        raise PathUnavailable("bitsandbytes is not installed")

    result = try_path(NAME, missing, CPU)
    assert (result.state, result.reason) == ("skipped", "bitsandbytes is not installed")
    plain_fails = Trial(lambda: [NUMBERS], allowed=1.0, plain=lambda: [raising()])
    result = try_path(NAME, lambda device: plain_fails, CPU)
    assert result.state == "skipped" and "the plain way failed" in result.reason


def test_a_path_is_tried_though_it_is_switched_off_and_stays_off_afterwards():
    with switched_off.everything_on():
        switched_off.switch_off({NAME: "it differed"})
        assert try_path(NAME, with_path(lambda: NUMBERS * 2), CPU).state == "off"
        assert try_path(NAME, with_path(lambda: NUMBERS), CPU).state == "on"
        assert switched_off.reasons() == {NAME: "it differed"}
    assert switched_off.reasons() == {}


def test_the_difference_is_relative_to_the_largest_number_of_each_tensor():
    expected = [torch.tensor([1.0, -4.0]), torch.tensor([100.0])]
    assert difference_of([torch.tensor([1.2, -4.0]), torch.tensor([101.0])], expected) == (
        pytest.approx(0.05)
    )
    assert difference_of([torch.zeros(2)], [torch.zeros(2)]) == 0.0
