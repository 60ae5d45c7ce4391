"""Checks with every step's batch whether the sampler has the weights of the policy that is trained.

The trainer computes the log-probability of every sampled token anyway. If the sampler has the same
weights, the two log-probabilities differ only by rounding. If an adapter was not delivered, or
answers come from a cache of older weights, they differ by what training has changed since, which
grows with the steps. Such a run seems healthy and learns nothing, so an event reports it, and a
hard limit ends the run.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.records.run_config import DistillConfig, GRPOConfig
from engine.records.settings import GRPOSettings
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, LoopState
from engine.worker.network.network import Network

WINDOW = 4  # the first 4 steps are compared with the latest 4
GROWTH = 5.0  # the latest gap may be so many times the first one (a gap below the floor is fine)


@dataclass(frozen=True)
class Limits:
    """Bounds of the mean gap between sampler and trainer, in nats per token.

    Attributes:
        floor: the largest gap that rounding causes.
        warn: an event is written if the gap is larger.
        fail: the run ends if the gap is larger, since no rounding causes that.
    """

    floor: float
    warn: float
    fail: float


# Measured gaps: 1e-6 between float32 engines, 0.002 to 0.02 if one of them computes in bfloat16,
# and 0.06 to 3 between a base and an adapter that was trained on it.
LIMITS = {
    "float32": Limits(floor=1e-4, warn=1e-3, fail=0.02),
    "bfloat16": Limits(floor=0.01, warn=0.05, fail=0.25),
}
# For runs whose settings make the two differ: only growth of the gap is judged.
LOOSE = Limits(floor=0.05, warn=math.inf, fail=math.inf)


class SyncCheck:
    """Judges at every step the gap between sampler and trainer: the difference between their
    log-probabilities of a token."""

    def __init__(
        self,
        precision: str,
        event: Callable[..., None],
        state: LoopState,
        *,
        exact: bool = True,
    ) -> None:
        """Choose how large the gap may be. Without `exact` only its growth is judged.

        Args:
            precision: the coarser number format of sampler and trainer, float32 or bfloat16; the
                limits follow from its rounding.
            event: writes an event of the run: name, message, fields.
            state: keeps the gaps seen so far, also in checkpoints.
            exact: whether sampler and trainer should give the same distribution; with top_p below
                1, for example, they do not.
        """
        self.limits = LIMITS[precision] if exact else LOOSE
        self._event = event
        self._state = state
        state.setdefault("first", [])  # the mean gaps of the first steps
        state.setdefault("latest", [])  # those of the latest steps
        state.setdefault("told", [])  # events that were written and are not repeated for now

    def metrics(self, step: int, measured: Mapping[str, float | None]) -> dict[str, float]:
        """Judge the gap that the update of `step` measured: the distance between the sampler's and
        the trainer's log-probabilities of the same tokens. Returns the gap's metrics by name, or {}
        if `measured` holds no gap, as in a step that trained nothing.

        Raises:
            WorkerFailure: kind internal, if the gap is too large or NaN.
        """
        mean, largest = measured.get("sampler_gap_mean"), measured.get("sampler_gap_max")
        if mean is None or largest is None:
            return {}
        return self.check(step, mean, largest)

    def check(self, step: int, mean: float, largest: float) -> dict[str, float]:
        """Judge the gap of a step (between the sampler's and the trainer's log-probabilities) and
        return the gap's metrics by name. If its mean is above the limit `warn`, or has grown, an
        event is written.

        Args:
            mean, largest: over all tokens of the step, in nats.

        Raises:
            WorkerFailure: kind internal, if the mean is NaN or above the limit `fail`.
        """
        first_gap, latest_gap = self._remember(mean)
        if mean > self.limits.fail or math.isnan(mean):
            raise self._failure(step, mean, largest, first_gap)
        if mean > self.limits.warn:
            self._report_once("sampler_gap", step, mean, largest, "more than rounding explains")
        elif self._has_grown(first_gap, latest_gap):
            reason = (
                f"and growing: {first_gap:.2g} in the first steps, {latest_gap:.2g} in the latest"
            )
            self._report_once("sampler_gap_grows", step, mean, largest, reason)
        else:
            self._state["told"] = []  # the gap is fine, so a later one is reported again
        return {
            "sampler_gap_mean": mean,
            "sampler_gap_max": largest,
            "sampler_gap_drift": latest_gap - first_gap,  # both are medians over steps
        }

    def _remember(self, mean_gap: float) -> tuple[float, float]:
        """Add the mean gap of a step to those seen so far. Returns the median of the first `WINDOW`
        steps and the median of the latest `WINDOW`."""
        first, latest = self._state["first"], self._state["latest"]
        if len(first) < WINDOW:
            first.append(mean_gap)
        latest.append(mean_gap)
        del latest[:-WINDOW]  # in place, since checkpoints save this list
        return statistics.median(first), statistics.median(latest)

    def _has_grown(self, first_gap: float, latest_gap: float) -> bool:
        """Tell whether the gap of the latest steps is above GROWTH times that of the first steps,
        and above what rounding explains (`floor`). False before there are `WINDOW` steps."""
        allowed_gap = max(self.limits.floor, GROWTH * first_gap)
        return len(self._state["latest"]) == WINDOW and latest_gap > allowed_gap

    def _failure(self, step: int, mean: float, largest: float, first_gap: float) -> WorkerFailure:
        """Return the failure of a run whose sampler cannot have the trained policy. `mean` and
        `largest` are the gaps of `step`, `first_gap` is the median mean gap of the first steps."""
        return WorkerFailure(
            "internal",
            "The sampler does not speak with the trained policy: adapter not delivered.",
            evidence=f"step {step}: its log-probabilities are {mean:.4g} nats off on average"
            f" (at most {largest:.4g}); rounding explains {self.limits.floor:g}; at the start"
            f" it was {first_gap:.2g}",
            hint="Submit again with sampler torch. If it happens there too, report it with the"
            " run's metrics.",
        )

    def _report_once(self, name: str, step: int, mean: float, largest: float, reason: str) -> None:
        """Write the event `name` with the mean and the largest gap of `step` and the reason. The
        event is not repeated until a step had a gap within the limits."""
        if name in self._state["told"]:
            return
        self._state["told"].append(name)
        message = f"Sampler and trainer are {mean:.3g} nats apart per token, {reason}."
        self._event(name, message, step=step, mean=mean, largest=largest)


def sync_check_of(
    job: Job[GRPOConfig] | Job[DistillConfig],
    network: Network,
    settings: GRPOSettings,
    state: LoopState,
) -> SyncCheck:
    """Make the `SyncCheck` of a run, which watches that sampler and trainer give the same
    log-probabilities. It keeps what it has seen in `state`, the state of the training loop.

    It allows the rounding of the format in which `network` stores its weights. If the settings make
    the distributions differ (tokens left out, sampling ahead, dropout), it only watches whether
    their distance grows.
    """
    is_rounded = network.dtype != torch.float32 or settings.quantization != "none"
    samples_all_tokens = settings.top_p == 1 and not settings.top_k and not settings.min_p
    return SyncCheck(
        precision="bfloat16" if is_rounded else "float32",
        event=job.event,
        state=state.setdefault("sync", {}),
        exact=samples_all_tokens and not settings.async_sampling and not settings.lora_dropout,
    )
