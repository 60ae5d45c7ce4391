"""What several devices do for the time of a run, and how many of them pay. Nothing of it is
measured on GPUs yet: the shares are those of data parallel training with small exchanges.
"""

from collections.abc import Mapping

# Phases whose work all ranks share; scores, checkpoints and the start stay with the first.
SHARED_PHASES = ("training", "rollouts", "evaluation")
# Of a shared phase, what does not shrink: ranks wait for the one with the longest rows, gradients
# are added up, prompts that a group shares are read on more than one.
SERIAL_SHARE = 0.05
START_S = 5.0  # that more processes add to the start
MOST_EXTRA = 1.25  # device hours on several devices, as a multiple of those on one, that still pay
LEAST_SAVED_S = 600.0  # seconds that more devices must save


def seconds_on(seconds: Mapping[str, float], gpus: int) -> dict[str, float]:
    """The seconds of each phase on so many devices, from those on one."""
    if gpus == 1:
        return dict(seconds)
    left = SERIAL_SHARE + (1 - SERIAL_SHARE) / gpus
    return {
        phase: each * left if phase in SHARED_PHASES else each + START_S * (phase == "startup")
        for phase, each in seconds.items()
    }


def paying(seconds_by_gpus: Mapping[int, float]) -> int:
    """How many devices to take: the most that save `LEAST_SAVED_S` and cost no more than
    `MOST_EXTRA` times the device hours of one.

    Args:
        seconds_by_gpus: of the whole run, for 1 and for other numbers of devices.
    """
    alone = seconds_by_gpus[1]
    return max(
        gpus
        for gpus, seconds in seconds_by_gpus.items()
        if gpus == 1 or (alone - seconds >= LEAST_SAVED_S and gpus * seconds <= MOST_EXTRA * alone)
    )
