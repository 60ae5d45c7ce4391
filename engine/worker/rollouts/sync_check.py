"""Does the sampler speak with the policy that is trained? Asked of every step's batch.

The trainer computes the log-probability of every sampled token anyway. Where the sampler holds the
same weights, the two differ by rounding; where an adapter was not delivered, or answers come from a
cache of older weights, they differ by what training has moved since, which grows with the step.
Such a run looks healthy and learns nothing, so it is told, and ended beyond a hard limit.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import LoopState

WINDOW = 4  # steps compared with each other at the start and now
GROWTH = 5.0  # how many times the first gap the latest one may be, above the floor


@dataclass(frozen=True)
class Limits:
    """Mean gaps in nats per token: `floor` is rounding at its worst, `warn` needs looking at,
    `fail` cannot be rounding."""

    floor: float
    warn: float
    fail: float


# Measured: 1e-6 between float32 engines, 0.002 to 0.02 where one of them computes in bfloat16, and
# 0.06 to 3 between a base and an adapter that was trained on it.
LIMITS = {
    "float32": Limits(floor=1e-4, warn=1e-3, fail=0.02),
    "bfloat16": Limits(floor=0.01, warn=0.05, fail=0.25),
}
# Where the two differ on purpose nothing but growth is to be judged.
LOOSE = Limits(floor=0.05, warn=math.inf, fail=math.inf)


class SyncCheck:
    """Looks at the gap of every step.

    Args:
        precision: the coarser number format of sampler and trainer, float32 or bfloat16.
        event: writes an event: name, message, fields.
        state: what a checkpoint keeps of it; filled in here.
        exact: whether the two mean the same distribution. They do not where the sampler is an
            update behind on purpose, leaves out improbable tokens (top_p below 1), or where the
            trainer alone drops a part of the adapter's input (lora_dropout).
    """

    def __init__(
        self,
        precision: str,
        event: Callable[..., None],
        state: LoopState,
        *,
        exact: bool = True,
    ) -> None:
        self.limits = LIMITS[precision] if exact else LOOSE
        self._event = event
        self._state = state
        state.setdefault("first", [])
        state.setdefault("latest", [])
        state.setdefault("told", [])

    def metrics(self, step: int, measured: Mapping[str, float | None]) -> dict[str, float]:
        """Judge the gap that an update measured; {} where it measured none. Raises as `check`."""
        mean, largest = measured.get("sampler_gap_mean"), measured.get("sampler_gap_max")
        if mean is None or largest is None:
            return {}
        return self.check(step, mean, largest)

    def check(self, step: int, mean: float, largest: float) -> dict[str, float]:
        """Judge the gap of a step; returns the metrics of it.

        Args:
            mean, largest: distance between the sampler's and the trainer's log-probability of
                the same token, over the step's batch.

        Raises:
            WorkerFailure: kind internal, when the sampler cannot be speaking with this policy.
        """
        first, latest = self._state["first"], self._state["latest"]
        if len(first) < WINDOW:
            first.append(mean)
        latest.append(mean)
        del latest[:-WINDOW]
        then, now = statistics.median(first), statistics.median(latest)
        if mean > self.limits.fail or math.isnan(mean):
            raise WorkerFailure(
                "internal",
                "The sampler does not speak with the trained policy: adapter not delivered.",
                evidence=f"step {step}: its log-probabilities are {mean:.4g} nats off on average"
                f" (at most {largest:.4g}); rounding explains {self.limits.floor:g}; at the start"
                f" it was {then:.2g}",
                hint="Submit again with sampler torch. If it happens there too, report it with the"
                " run's metrics.",
            )
        if mean > self.limits.warn:
            self._tell("sampler_gap", step, mean, largest, "more than rounding explains")
        elif now > max(self.limits.floor, GROWTH * then) and len(latest) == WINDOW:
            growth = f"and growing: {then:.2g} in the first steps, {now:.2g} in the latest"
            self._tell("sampler_gap_grows", step, mean, largest, growth)
        else:
            self._state["told"] = []
        return {
            "sampler_gap_mean": mean,
            "sampler_gap_max": largest,
            "sampler_gap_drift": now - then,
        }

    def _tell(self, name: str, step: int, mean: float, largest: float, what: str) -> None:
        """Once each time it begins, not at every step it lasts."""
        if name in self._state["told"]:
            return
        self._state["told"].append(name)
        message = f"Sampler and trainer are {mean:.3g} nats apart per token, {what}."
        self._event(name, message, step=step, mean=mean, largest=largest)
