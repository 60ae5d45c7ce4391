"""Forecasts how long a run will still take: seconds as a band, from the run's own measured pace.

The heartbeat (the trainer's sign of life) says how many steps, answers and checkpoints are still to
come, and how long those done have taken. Work of a kind that has not begun yet is taken from the
estimate made at submit. A band contains the true end in nine of ten cases, if the pace keeps
varying as it has so far.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.files import read_object
from engine.home.run_dir import RunDir
from engine.machine.pace.heartbeat import Heartbeat, Work

_NORMAL_90 = 1.645  # standard deviations on each side of a band that holds 90 %
_DRIFT = 0.05  # share by which the pace of the remaining steps may differ from that of those done
_VARIATION = 0.25  # the same share for work that is not timed unit by unit
_ENOUGH_DONE = 0.1  # share of such work after which its measured pace alone is believed
# The band of work that was only estimated, not measured: its low and high end as multiples.
_UNMEASURED = (0.4, 2.5)
# Phases of an estimate (engine/cost) that make up a kind of work.
_ESTIMATED_PHASES = {
    "training": ("training", "rollouts", "rewards"),
    "evaluation": ("evaluation",),
    "checkpoint": ("checkpoints",),
}


@dataclass(frozen=True)
class Band:
    """How many seconds some work will still take: at least (low), most likely, and at most
    (high)."""

    low: float = 0.0
    likely: float = 0.0
    high: float = 0.0

    def __add__(self, other: "Band") -> "Band":
        """Return the seconds of two pieces of work, one after the other."""
        return Band(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, share: float) -> "Band":
        """Return the seconds of a part of the work; `share` is that part, from 0 to 1."""
        return Band(self.low * share, self.likely * share, self.high * share)

    def shortened_by(self, seconds: float) -> "Band":
        """Return the seconds that remain after `seconds` more have passed, never less than 0."""
        return Band(
            low=max(0.0, self.low - seconds),
            likely=max(0.0, self.likely - seconds),
            high=max(0.0, self.high - seconds),
        )


@dataclass(frozen=True)
class Remaining:
    """What is left of an attempt.

    Attributes:
        seconds: seconds until the attempt ends.
        until_last_step: likely seconds until the last training step is done; the final evaluation
            and the skill check come after it.
        steps: how many training steps are left.
        is_measured: whether the attempt has measured at least some of its work. If not, everything
            rests on the estimate made before the start.
    """

    seconds: Band
    until_last_step: float
    steps: int
    is_measured: bool


def remaining(run: RunDir, heartbeat: Heartbeat, now: float | None = None) -> Remaining | None:
    """Forecast what is left of the attempt under way, by its last heartbeat (what the trainer has
    planned and done). Returns None before the trainer has planned its work.

    `now` is in unix seconds; None stands for the current time.
    """
    if not any(work.planned for work in heartbeat.work.values()):
        return None
    elapsed_s = max(0.0, (time.time() if now is None else now) - heartbeat.time)
    return remaining_after(heartbeat, estimated_seconds(run), elapsed_s)


def remaining_after(
    heartbeat: Heartbeat, estimated: Mapping[str, float], elapsed_s: float = 0.0
) -> Remaining:
    """Forecast what is left of an attempt, `elapsed_s` seconds after this heartbeat (a report of
    what the trainer has planned and done).

    Args:
        estimated: likely seconds of each phase as estimated before the start; {} for no estimate.
    """
    work = heartbeat.work  # what was planned and what is done, by phase
    # How many seconds each kind of work will still take, as a band.
    training = _seconds_of_steps(work, estimated)
    checkpoints = _seconds_of_other_work("checkpoint", work, estimated)
    evaluation = _seconds_of_other_work("evaluation", work, estimated)
    # This is 0 before the first answer, because an estimate counts the skill check as evaluation.
    skill_check = _seconds_of_other_work("skill check", work, estimated)
    evaluation_before_end = evaluation.times(_share_before_last_step(heartbeat))
    to_last_step = training + checkpoints + evaluation_before_end
    to_end = training + checkpoints + evaluation + skill_check
    # A run that may stop early ends at the earliest after a part of its steps.
    steps = work.get("training", Work())
    low = to_end.low * _share_until_earliest_end(heartbeat, steps)
    return Remaining(
        seconds=replace(to_end, low=low).shortened_by(elapsed_s),
        until_last_step=max(0.0, to_last_step.likely - elapsed_s),
        steps=steps.left,
        is_measured=any(kind.done and kind.planned for kind in work.values()),
    )


def cap_sentence(left: Remaining, step: int, cap_left_s: float, reason: str) -> str:
    """Say where a run will be stopped by its cap of hours, e.g. "at this pace max_gpu_hours=2 is
    spent at step 30 of 40". Returns "" if the run will likely end before.

    Args:
        left: what is left of the attempt, ignoring the cap.
        step: the last step that is done; 0 for a run without steps.
        cap_left_s: seconds until the cap is reached.
        reason: the cap in words, such as "max_gpu_hours=2 is spent".
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
    """Read the likely seconds of each phase, as estimated at submit, from config.json. Returns {}
    if it has no estimate. Values that are not finite numbers are left out.

    The file is read as plain JSON, because its schema needs pydantic, which the supervisor must not
    load.
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


def _half_width(steps: Work, mean: float) -> float:
    """Return half the width, in seconds, of the band that `_seconds_of_steps` forecasts for the
    remaining steps. `mean` is the mean seconds of the steps done, of which there is at least one.
    """
    likely = mean * steps.left
    if steps.done == 1:  # one step does not show how much steps vary
        return likely * _VARIATION
    # `squares` is the sum of the squared seconds of the steps done.
    variance_of_done = max(0.0, steps.squares / steps.done - mean**2)
    variance = variance_of_done * (steps.done / (steps.done - 1))  # unbiased
    deviation = math.sqrt(variance * (steps.left + steps.left**2 / steps.done))
    return _NORMAL_90 * deviation + likely * _DRIFT


def _seconds_of_steps(work_by_phase: Mapping[str, Work], estimated: Mapping[str, float]) -> Band:
    """Forecast the seconds of the remaining steps, including their sampling, which is timed
    separately.

    The band is a prediction interval for the sum of the n remaining steps, from the mean and the
    variance of the k steps done. Its standard deviation is sqrt(variance * (n + n**2 / k)), whose
    second term is the uncertainty of the mean. The interval is widened by `_DRIFT`.
    """
    steps = work_by_phase.get("training", Work())
    if not steps.left:
        return Band()
    if not steps.done:
        return _estimated_seconds_of("training", estimated)
    measured_s = steps.seconds + work_by_phase.get("sampling", Work()).seconds
    mean = measured_s / steps.done
    likely = mean * steps.left
    half_width = _half_width(steps, mean)
    return Band(max(0.0, likely - half_width), likely, likely + half_width)


def _seconds_of_other_work(
    phase: str, work_by_phase: Mapping[str, Work], estimated: Mapping[str, float]
) -> Band:
    """Forecast the seconds of the rest of a phase whose units are not timed one by one: the mean
    time of the units done times the number of those left, give or take `_VARIATION`.

    Answers are sampled many at a time, so the first ones that end look slow: nearly all of the
    seconds so far belong to those that have not ended. Until `_ENOUGH_DONE` of the units are done,
    the missing ones count with their estimated time, if there is an estimate.
    """
    work = work_by_phase.get(phase, Work())
    if not work.left:
        return Band()
    of_whole_run = _estimated_seconds_of(phase, estimated)
    if not work.done:
        return of_whole_run
    missing_units = 0.0  # units that count with their estimated time
    if of_whole_run.likely:
        missing_units = max(0.0, _ENOUGH_DONE * work.planned - work.done)
    seconds = work.seconds + missing_units * of_whole_run.likely / work.planned
    likely = seconds / (work.done + missing_units) * work.left
    return Band(likely * (1 - _VARIATION), likely, likely * (1 + _VARIATION))


def _estimated_seconds_of(kind_of_work: str, estimated: Mapping[str, float]) -> Band:
    """Return the seconds of a kind of work that has not begun, by the estimate of the whole run.
    They are 0 if the estimate has no phase for this kind."""
    phases = _ESTIMATED_PHASES.get(kind_of_work, ())
    likely = sum(estimated.get(phase, 0.0) for phase in phases)
    low_factor, high_factor = _UNMEASURED
    return Band(low_factor * likely, likely, high_factor * likely)


def _share_until_earliest_end(heartbeat: Heartbeat, steps: Work) -> float:
    """Return the share (0 to 1) of the remaining steps that are done even if the run stops as early
    as it may. The share is 1 if the run may not stop before its last step."""
    earliest_end = heartbeat.outlook.earliest_end
    if earliest_end is None or not steps.left:
        return 1.0
    steps_to_end = earliest_end - heartbeat.outlook.steps_before - steps.done
    return min(1.0, max(0.0, steps_to_end / steps.left))


def _share_before_last_step(heartbeat: Heartbeat) -> float:
    """Return the share (0 to 1) of the remaining evaluation answers that are asked before the last
    step is done; 0 if none remain."""
    answers_left = heartbeat.work.get("evaluation", Work()).left
    if not answers_left:
        return 0.0
    at_end = min(answers_left, heartbeat.outlook.answers_at_end)
    return 1 - at_end / answers_left
