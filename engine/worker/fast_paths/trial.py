"""Compares one fast path (a faster way to compute) with the plain way: it must give the same
numbers within rounding, and must not be slower."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.machine.fast_paths.catalogue import FAST_PATHS
from engine.machine.fast_paths.results import PathResult
from engine.worker.core import switched_off

ROUNDS = 5  # each way is timed so often, in turn; the fastest round counts
# A path may take this many times as long as the plain way: its gain depends on sizes, and may be
# larger at those of a run.
SLOWER = 1.1
SHOWN_CHARS = 200  # an error's message is cut to this length

Work = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Trial:
    """What to compute with the fast path and without it.

    Attributes:
        work: computes with the fast path if that is switched on; returns tensors of any shapes.
        allowed: largest relative difference of the tensors that rounding explains.
        plain: computes the same without the fast path; None if `work` does so when the path is
            switched off.
    """

    work: Work
    allowed: float
    plain: Work | None = None


class PathUnavailable(Exception):
    """Raised if the path cannot be tried on this machine; the message says why."""


def try_path(name: str, make: Callable[[torch.device], Trial], device: torch.device) -> PathResult:
    """Compute with the fast path and in the plain way, compare the numbers, and time both.

    Args:
        name: of the path in the catalogue.
        make: prepares what is computed. It raises PathUnavailable if the path cannot be tried here.

    Raises nothing. A path that fails is "off", with the reason. If the plain way fails, the path is
    "skipped", because there is nothing to compare it with.
    """
    try:
        with switched_off.everything_on():
            trial = make(device)
    except PathUnavailable as error:
        return PathResult(name=name, state="skipped", reason=str(error))
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way
        return PathResult(name=name, state="off", reason=_one_line(error))

    def plainly() -> Sequence[torch.Tensor]:
        """Compute in the plain way, with this path switched off."""
        compute = trial.work if trial.plain is None else trial.plain
        with switched_off.without(name):
            return compute()

    def fast() -> Sequence[torch.Tensor]:
        """Compute with every path switched on, this one included."""
        with switched_off.everything_on():
            return trial.work()

    try:
        expected = plainly()
    except Exception as error:  # noqa: BLE001 - see above
        reason = f"the plain way failed: {_one_line(error)}"
        return PathResult(name=name, state="skipped", reason=reason)
    try:
        numbers = _judge_difference(name, difference_of(fast(), expected), trial.allowed)
        is_timed = numbers.state == "on" and FAST_PATHS[name].timed
        return _judge_time(numbers, fast, plainly, device) if is_timed else numbers
    except Exception as error:  # noqa: BLE001 - see above
        return PathResult(name=name, state="off", reason=_one_line(error))


def _judge_difference(name: str, difference: float, allowed: float) -> PathResult:
    """Make the result of a path whose numbers differ from those of the plain way by `difference`:
    "on" if that is at most `allowed`, else "off" with the reason."""
    if difference <= allowed:  # not true of NaN
        return PathResult(name=name, state="on", difference=difference, allowed=allowed)
    return PathResult(
        name=name,
        state="off",
        reason=f"differs from the plain way by {difference:.1e}, {allowed:.0e} is rounding",
        difference=difference if math.isfinite(difference) else None,
        allowed=allowed,
    )


def _judge_time(numbers: PathResult, fast: Work, plainly: Work, device: torch.device) -> PathResult:
    """Time both ways and add their seconds to `numbers`, the result of a path whose numbers are
    right. The path is "off" if it takes more than SLOWER times as long as the plain way."""
    fast_rounds, plain_rounds = [], []
    for _ in range(ROUNDS):  # in turn, so that a change of load meets both
        fast_rounds.append(seconds_of(fast, device))
        plain_rounds.append(seconds_of(plainly, device))
    seconds, plain_seconds = min(fast_rounds), min(plain_rounds)
    times = {"seconds": seconds, "plain_seconds": plain_seconds}
    if seconds > SLOWER * plain_seconds:
        reason = f"slower: {1000 * seconds:.3g} ms, the plain way {1000 * plain_seconds:.3g} ms"
        return numbers.model_copy(update={"state": "off", "reason": reason, **times})
    return numbers.model_copy(update=times)


def difference_of(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest distance between a number in `tensors` and the expected one, relative to
    the largest magnitude that is expected in its tensor.

    Returns NaN if a tensor holds NaN, and infinity if the number of tensors or their shapes differ.
    """
    if [tuple(t.shape) for t in tensors] != [tuple(t.shape) for t in expected]:
        return math.inf
    differences = []
    for tensor, right in zip(tensors, expected, strict=True):
        right64 = right.detach().double().cpu()
        scale = right64.abs().max().clamp_min(1e-12)  # 1e-12: against a division by 0
        distance = (tensor.detach().double().cpu() - right64).abs().max()
        differences.append((distance / scale).item())
    has_nan = any(math.isnan(difference) for difference in differences)
    return math.nan if has_nan else max(differences)


def seconds_of(work: Work, device: torch.device) -> float:
    """Measure the seconds that one call of `work` takes, until the device has finished."""
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work that was queued. A CPU has none queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one_line(error: Exception) -> str:
    """The type of an error and the beginning of its message, on one line, such as "ValueError: bad
    size"."""
    message = " ".join(str(error).split())[:SHOWN_CHARS] or "no message"
    return f"{type(error).__name__}: {message}"
