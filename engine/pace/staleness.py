"""Whether a run has been silent for longer than its own pace explains.

How long a trainer may be silent depends on what it does: reading weights of many gigabytes gives no
sign of life, a round of the sampler does every few milliseconds. So the bound is a multiple of the
longest silence that this attempt has shown in the same phase, and of what a step or an evaluation
takes, and never below a floor. How long a trainer may take to stop follows from the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.home.user_config import DEFAULT_STOP_MINUTES
from engine.pace.heartbeat import Heartbeat, Work

# Phases without a loop of our own inside, in which a long silence is normal.
_QUIET_PHASES = ("loading", "finishing", "checkpoint")
_QUIET_FACTOR = 3  # times the floor of other phases, for these
_USUAL_FACTOR = 30  # times the longest silence so far
_EXPECTED_FACTOR = 10  # times what one step is expected to take, or one evaluation
LEAST_GRACE_S, MOST_GRACE_S = 20.0, 300.0  # to write a checkpoint after SIGTERM
_GRACE_FACTOR = 2  # times what is expected of the step or the evaluation under way
# A run is called stalled after this share of the silence that ends it.
_STALLED_SHARE = 0.3


@dataclass(frozen=True)
class Patience:
    """How long a trainer may be silent in the phase that it is in, in seconds.

    Attributes:
        phase: what it did at its last heartbeat; "loading" before the first.
        stalled_s: a run that is silent for longer is shown as stalled.
        stop_s: a run that is silent for longer is ended.
        usual_s: the longest silence in this phase so far; 0 where there was none.
    """

    phase: str
    stalled_s: float
    stop_s: float
    usual_s: float


def patience(
    heartbeat: Heartbeat | None, estimated: Mapping[str, float], stop_minutes: float
) -> Patience:
    """How long a trainer may be silent now.

    Args:
        heartbeat: its last; None before its first, while its program is loaded.
        estimated: likely seconds of each phase of the whole run, as submit estimated them.
        stop_minutes: the setting `stop_stalled_minutes`: the shortest silence in minutes that ends
            a trainer, in phases that are not quiet by nature. With 0 no silence ends it, and
            `DEFAULT_STOP_MINUTES` decides when it is shown as stalled.
    """
    phase = heartbeat.phase if heartbeat is not None else "loading"
    work = heartbeat.work.get(phase, Work()) if heartbeat is not None else Work()
    floor_s = 60 * (stop_minutes or DEFAULT_STOP_MINUTES)
    if phase in _QUIET_PHASES:
        floor_s *= _QUIET_FACTOR
    limit_s = max(
        floor_s,
        _USUAL_FACTOR * work.longest_silence_s,
        _EXPECTED_FACTOR * _expected_s(phase, heartbeat, estimated),
    )
    return Patience(
        phase,
        stalled_s=_STALLED_SHARE * limit_s,
        stop_s=limit_s,
        usual_s=work.longest_silence_s,
    )


def stop_grace_s(heartbeat: Heartbeat | None, estimated: Mapping[str, float]) -> float:
    """Seconds that a trainer may take to stop after it was asked to: it ends its step or its
    evaluation first and then writes a checkpoint, so a slow one is given longer.

    Args:
        heartbeat: its last; None before its first.
        estimated: likely seconds of each phase of the whole run, as submit estimated them.
    """
    if heartbeat is None:
        return LEAST_GRACE_S
    expected_s = _expected_s(heartbeat.phase, heartbeat, estimated)
    return min(MOST_GRACE_S, LEAST_GRACE_S + _GRACE_FACTOR * expected_s)


def _phases_of_work(phase: str) -> tuple[str, Sequence[str]]:
    """Where the time of a phase's work stands: (the phase under which its units are counted, the
    phases of the estimate)."""
    if phase in ("training", "sampling"):
        return "training", ("training", "rollouts", "rewards")
    if phase == "checkpoint":
        return "checkpoint", ("checkpoints",)
    return phase, ("evaluation",)


def _expected_s(phase: str, heartbeat: Heartbeat | None, estimated: Mapping[str, float]) -> float:
    """Seconds that the work of a phase is expected to take that may pass without a heartbeat: the
    start, one step with its sampling, one checkpoint, or all answers of one evaluation.

    As this attempt has measured it; before it has, as it was estimated (`estimated` has the seconds
    of each phase of the whole run); 0 without an estimate.
    """
    if heartbeat is None or phase == "loading":
        return estimated.get("startup", 0.0)
    counted, estimated_phases = _phases_of_work(phase)
    # How many units (steps, checkpoints or answers) may pass without a heartbeat.
    units = 1 if counted in ("training", "checkpoint") else heartbeat.of or 1
    work = heartbeat.work.get(counted, Work())
    if work.done:
        measured_s = work.seconds
        if counted == "training":  # sampling is timed apart and belongs to the step
            measured_s += heartbeat.work.get("sampling", Work()).seconds
        return measured_s / work.done * units
    estimated_s = sum(estimated.get(name, 0.0) for name in estimated_phases)
    share_of_work = min(1.0, units / max(1, work.planned))
    return estimated_s * share_of_work
