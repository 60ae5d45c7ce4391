"""What is left of a run: seconds as a band, from its own measured pace.

The heartbeat says how many steps, answers and checkpoints are still to come and how long those done
have taken. Work of a kind that has not begun yet is taken from the run's estimate. A band holds
nine in ten ends, if the pace goes on to vary as it has varied so far.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.files import read_object
from engine.home.run_dir import RunDir
from engine.pace.heartbeat import Heartbeat, Work

_NORMAL_90 = 1.645  # standard deviations on each side of a band that holds 90 %
_DRIFT = 0.05  # share by which the pace of all steps to come may differ from that of those done
_VARIATION = 0.25  # the same for work that is not timed unit by unit
# Factors for low and high of what was not measured yet, only estimated before the start.
_UNMEASURED = (0.4, 2.5)
# Phases of an estimate (engine/cost) that make up a kind of work.
_ESTIMATED_PHASES = {
    "training": ("training", "rollouts", "rewards"),
    "evaluation": ("evaluation",),
    "checkpoint": ("checkpoints",),
}


@dataclass(frozen=True)
class Band:
    """Seconds that work is still going to take: at the least, most likely, at the most."""

    low: float = 0.0
    likely: float = 0.0
    high: float = 0.0

    def __add__(self, other: "Band") -> "Band":
        return Band(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, share: float) -> "Band":
        """This share of the work."""
        return Band(self.low * share, self.likely * share, self.high * share)

    def shortened_by(self, seconds: float) -> "Band":
        """What is left after `seconds` more of the same work; never less than 0."""
        return Band(*(max(0.0, each - seconds) for each in (self.low, self.likely, self.high)))


@dataclass(frozen=True)
class Remaining:
    """What is left of an attempt.

    Attributes:
        seconds: until its end.
        until_last_step: likely seconds until its last step is done; what comes after it are the
            final exam and the skill check.
        steps: how many steps are left.
        is_measured: whether at least some of it rests on what the attempt has measured.
    """

    seconds: Band
    until_last_step: float
    steps: int
    is_measured: bool


def remaining(run: RunDir, heartbeat: Heartbeat, now: float | None = None) -> Remaining | None:
    """What is left of the attempt under way, by its last heartbeat; None before the trainer has
    planned its work.

    `now` is in unix seconds; None for the clock's.
    """
    if not any(work.planned for work in heartbeat.work.values()):
        return None
    elapsed_s = max(0.0, (time.time() if now is None else now) - heartbeat.time)
    return remaining_after(heartbeat, estimated_seconds(run), elapsed_s)


def remaining_after(
    heartbeat: Heartbeat, estimated: Mapping[str, float], elapsed_s: float = 0.0
) -> Remaining:
    """What is left of an attempt, `elapsed_s` seconds after this heartbeat.

    Args:
        estimated: likely seconds of each phase as estimated before the start; {} for no estimate.
    """
    works = heartbeat.work
    training = _of_steps(works, estimated)
    checkpoints = _of_work("checkpoint", works, estimated)
    evaluation = _of_work("evaluation", works, estimated)
    skills = _of_work("skill check", works, estimated)  # an estimate has it in its evaluations
    steps = works.get("training", Work())
    shortest = _earliest_share(heartbeat, steps)
    to_last_step = training + checkpoints + evaluation.times(_share_on_the_way(heartbeat))
    whole = training + checkpoints + evaluation + skills
    return Remaining(
        seconds=replace(whole, low=whole.low * shortest).shortened_by(elapsed_s),
        until_last_step=max(0.0, to_last_step.likely - elapsed_s),
        steps=steps.left,
        is_measured=any(work.done and work.planned for work in works.values()),
    )


def cap_sentence(left: Remaining, step: int, cap_left_s: float, reason: str) -> str:
    """Where a run stops that does not end before its cap of hours; "" where it likely does end.

    Args:
        step: the last step that is done; 0 for a run without steps.
        cap_left_s: seconds until the cap is reached.
        reason: that the cap is spent, such as "max_gpu_hours=2 is spent".
    """
    if left.seconds.likely <= cap_left_s:
        return ""
    if cap_left_s <= 0:
        return f"{reason}: it stops now"
    last_step = step + left.steps
    if not left.steps:
        where = f"in the final evaluation, after step {step}" if step else "before its end"
    elif cap_left_s >= left.until_last_step:
        where = f"in the final evaluation, after step {last_step}"
    else:
        steps_to_cap = int(left.steps * cap_left_s / left.until_last_step)
        where = f"at step {step + steps_to_cap} of {last_step}"
    return f"at this pace {reason} {where}"


def estimated_seconds(run: RunDir) -> dict[str, float]:
    """The likely seconds of each phase as submit estimated them; {} where it did not.

    Read without the schema of a config, which the supervisor must not load.
    """
    estimate = read_object(run.config).get("estimate")
    seconds = estimate.get("seconds") if isinstance(estimate, dict) else None
    if not isinstance(seconds, dict):
        return {}
    return {
        str(phase): float(value)
        for phase, value in seconds.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _of_steps(works: Mapping[str, Work], estimated: Mapping[str, float]) -> Band:
    """What the steps still take. The seconds of sampling are kept apart and belong to them."""
    steps = works.get("training", Work())
    if not steps.left:
        return Band()
    if not steps.done:
        return _estimated("training", steps, estimated)
    seconds = steps.seconds + works.get("sampling", Work()).seconds
    mean = seconds / steps.done
    variance = max(0.0, steps.squares / steps.done - mean**2)
    if steps.done > 1:  # of a sample, not of all steps there are
        variance *= steps.done / (steps.done - 1)
    # The mean itself is uncertain, the more the fewer steps were measured.
    spread = math.sqrt(variance * (steps.left + steps.left**2 / steps.done))
    likely = mean * steps.left
    # One step says nothing about how steps vary.
    half_width = _NORMAL_90 * spread + likely * (_DRIFT if steps.done > 1 else _VARIATION)
    return Band(max(0.0, likely - half_width), likely, likely + half_width)


def _of_work(name: str, works: Mapping[str, Work], estimated: Mapping[str, float]) -> Band:
    """What work that is not timed unit by unit still takes."""
    work = works.get(name, Work())
    if not work.left:
        return Band()
    if not work.done:
        return _estimated(name, work, estimated)
    likely = work.seconds / work.done * work.left
    return Band(likely * (1 - _VARIATION), likely, likely * (1 + _VARIATION))


def _estimated(name: str, work: Work, estimated: Mapping[str, float]) -> Band:
    """What work takes of which nothing was measured yet, by the estimate of the whole run."""
    phases = _ESTIMATED_PHASES.get(name, ())
    likely = sum(estimated.get(phase, 0.0) for phase in phases)
    low, high = _UNMEASURED
    return Band(low * likely, likely, high * likely)


def _earliest_share(heartbeat: Heartbeat, steps: Work) -> float:
    """The share of what is left after which a run may end early, at the earliest; 1 where it does
    all its steps."""
    earliest_end = heartbeat.outlook.earliest_end
    if earliest_end is None or not steps.left:
        return 1.0
    steps_to_end = earliest_end - heartbeat.outlook.steps_before - steps.done
    return min(1.0, max(0.0, steps_to_end / steps.left))


def _share_on_the_way(heartbeat: Heartbeat) -> float:
    """The share of the answers still to come that are asked before the last step is done."""
    left = heartbeat.work.get("evaluation", Work()).left
    return 1 - min(left, heartbeat.outlook.answers_at_end) / left if left else 0.0
