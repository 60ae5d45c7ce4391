"""Decides whether a run has been silent for longer than its own pace explains.

How long a trainer may be silent depends on what it does: reading weights of many gigabytes gives no
sign of life, while the sampler gives one every few milliseconds. So the limit is a multiple of the
longest silence that this attempt has shown in the same phase, and of the time of a step or an
evaluation, and never below a floor. How long a trainer may take to stop follows from the same
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.home.user_config import DEFAULT_STOP_MINUTES
from engine.machine.pace.heartbeat import Heartbeat, Work

# A long silence is normal in these phases: libraries do the work, and give no sign of life.
_QUIET_PHASES = ("loading", "finishing", "checkpoint")
_QUIET_FACTOR = 3  # the floor of the quiet phases, as a multiple of that of other phases
_USUAL_FACTOR = 30  # the limit as a multiple of the longest silence so far
_EXPECTED_FACTOR = 10  # the limit as a multiple of the expected time of a step or an evaluation
LEAST_GRACE_S, MOST_GRACE_S = 20.0, 300.0  # time to write a checkpoint after SIGTERM
_GRACE_FACTOR = 2  # extra grace as a multiple of the expected time of the step or evaluation
# A run counts as stalled after this share of the silence that ends it.
_STALLED_SHARE = 0.3


@dataclass(frozen=True)
class Patience:
    """How long a trainer may be silent in its current phase, in seconds.

    Attributes:
        phase: what the trainer did at its last heartbeat; "loading" before the first.
        stalled_s: a run that is silent for longer is shown as stalled.
        stop_s: a run that is silent for longer is ended.
        usual_s: the longest silence in this phase so far; 0 if there was none.
    """

    phase: str
    stalled_s: float
    stop_s: float
    usual_s: float


def patience(
    heartbeat: Heartbeat | None, estimated: Mapping[str, float], stop_minutes: float
) -> Patience:
    """Return how long a trainer may be silent now, before it counts as stalled and is ended.

    Args:
        heartbeat: the trainer's last heartbeat; None before its first, while its program is loaded.
        estimated: likely seconds of each phase of the whole run, as estimated at submit.
        stop_minutes: the setting `stop_stalled_minutes`: the shortest silence in minutes that ends
            a trainer, in phases other than the quiet ones. If it is 0, no silence ends the trainer,
            and `DEFAULT_STOP_MINUTES` decides when it is shown as stalled.
    """
    phase = heartbeat.phase if heartbeat is not None else "loading"
    work = heartbeat.work.get(phase, Work()) if heartbeat is not None else Work()
    floor_s = 60 * (stop_minutes or DEFAULT_STOP_MINUTES)
    if phase in _QUIET_PHASES:
        floor_s *= _QUIET_FACTOR
    limit_s = max(
        floor_s,
        _USUAL_FACTOR * work.longest_silence_s,
        _EXPECTED_FACTOR * _expected_silence_s(phase, heartbeat, estimated),
    )
    return Patience(
        phase,
        stalled_s=_STALLED_SHARE * limit_s,
        stop_s=limit_s,
        usual_s=work.longest_silence_s,
    )


def stop_grace_s(heartbeat: Heartbeat | None, estimated: Mapping[str, float]) -> float:
    """Return how many seconds a trainer may take to stop after it was asked to. It first ends its
    step or evaluation and then writes a checkpoint, so a slow one is given longer.

    Args:
        heartbeat: the trainer's last heartbeat; None before its first.
        estimated: likely seconds of each phase of the whole run, as estimated at submit.
    """
    if heartbeat is None:
        return LEAST_GRACE_S
    expected_s = _expected_silence_s(heartbeat.phase, heartbeat, estimated)
    return min(MOST_GRACE_S, LEAST_GRACE_S + _GRACE_FACTOR * expected_s)


def _phases_of_work(phase: str) -> tuple[str, Sequence[str]]:
    """Return (phase of the heartbeat under which the units of `phase` are counted, names of the
    phases in the run's estimate that make up this work)."""
    if phase in ("training", "sampling"):
        return "training", ("training", "rollouts", "rewards")
    if phase == "checkpoint":
        return "checkpoint", ("checkpoints",)
    return phase, ("evaluation",)


def _expected_silence_s(
    phase: str, heartbeat: Heartbeat | None, estimated: Mapping[str, float]
) -> float:
    """Return how many seconds of a phase's work are expected to pass without a heartbeat: those of
    the start, of one step with its sampling, of one checkpoint, or of all answers of an evaluation.

    They are taken from this attempt's measurements, or from the estimate before there are any
    (`estimated` has the seconds of each phase of the whole run), or are 0 without an estimate.
    """
    if heartbeat is None or phase == "loading":
        return estimated.get("startup", 0.0)
    counted_phase, estimated_phases = _phases_of_work(phase)
    # How many units (steps, checkpoints or answers) may pass without a heartbeat: one step or
    # checkpoint, or all answers of an evaluation.
    units = 1
    if counted_phase not in ("training", "checkpoint"):
        units = heartbeat.of or 1
    work = heartbeat.work.get(counted_phase, Work())
    if work.done:
        measured_s = work.seconds
        if counted_phase == "training":  # a step includes its sampling, which is timed separately
            measured_s += heartbeat.work.get("sampling", Work()).seconds
        return measured_s / work.done * units
    estimated_s = sum(estimated.get(name, 0.0) for name in estimated_phases)
    share_of_work = min(1.0, units / max(1, work.planned))
    return estimated_s * share_of_work
