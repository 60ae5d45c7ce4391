"""Whether a run has been silent for longer than its own pace explains.

How long a trainer may be silent depends on what it does: reading weights of many gigabytes gives no
sign of life, a round of the sampler does every few milliseconds. So the bound is a multiple of the
longest silence that this attempt has shown in the same phase, and of what a step or an evaluation
takes, and never below a floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.home.user_config import DEFAULT_STOP_MINUTES
from engine.pace.heartbeat import Heartbeat, Work

# Phases without a loop of our own inside, in which a long silence is normal.
_QUIET_PHASES = ("loading", "finishing", "checkpoint")
_QUIET_FACTOR = 3  # times the floor of other phases, for these
_USUAL_FACTOR = 30  # times the longest silence so far
_EXPECTED_FACTOR = 10  # times what one step is expected to take, or one evaluation
# A run is called stalled after this share of the silence that ends it.
_STALLED_SHARE = 0.3


@dataclass(frozen=True)
class Patience:
    """How long a trainer may be silent in the phase that it is in, in seconds.

    Attributes:
        phase: what it was doing when it was last heard.
        stalled_s: after so long it is said to be stalled.
        stop_s: after so long it is ended.
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
        stop_minutes: the least silence in minutes that ends a trainer in a loop of ours; 0: none
            ends it, and the default says when it is called stalled.
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
    return Patience(phase, _STALLED_SHARE * limit_s, limit_s, work.longest_silence_s)


def _expected_s(phase: str, heartbeat: Heartbeat | None, estimated: Mapping[str, float]) -> float:
    """How long one unit of a phase is expected to take that may pass in silence, in seconds: the
    start, one step, one checkpoint; of an evaluation all answers that are asked at once.

    As this attempt has measured it; before it has, as it was estimated.
    """
    if heartbeat is None or phase == "loading":
        return estimated.get("startup", 0.0)
    if phase in ("training", "sampling"):
        phases, counted, at_once = ("training", "rollouts", "rewards"), "training", 1
    elif phase == "checkpoint":
        phases, counted, at_once = ("checkpoints",), "checkpoint", 1
    else:
        phases, counted, at_once = ("evaluation",), phase, heartbeat.of or 1
    work = heartbeat.work.get(counted, Work())
    if work.done:
        sampling_s = heartbeat.work.get("sampling", Work()).seconds if counted == "training" else 0
        return (work.seconds + sampling_s) / work.done * at_once
    whole_s = sum(estimated.get(name, 0.0) for name in phases)
    return whole_s * min(1.0, at_once / max(1, work.planned))
