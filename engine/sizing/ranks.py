"""What several devices do for the time of a run, and how many of them pay. Nothing of it is
measured on GPUs yet: the shares are those of data parallel training with small exchanges.
"""

from collections.abc import Mapping

# Phases whose work all ranks share; scores, checkpoints and the start stay with the first.
SHARED_PHASES: tuple[str, ...] = ("training", "rollouts", "evaluation")
# Of a shared phase, what does not shrink: ranks wait for the one with the longest rows, gradients
# are added up, prompts that a group shares are read on more than one.
SERIAL_SHARE = 0.05
# How much longer phases take with a sharded base: guesses from the bytes of the layers and the
# rates of links between GPUs; each token that our own sampler draws moves all layers once.
_SHARDED = {"training": 1.5, "rollouts": 4.0, "evaluation": 4.0}
START_S = 5.0  # that more processes add to the start
MOST_EXTRA = 1.25  # device hours on several devices, as a multiple of those on one, that still pay
LEAST_SAVED_S = 600.0  # seconds that more devices must save


def training_devices(devices: int, *, beside: bool) -> int:
    """How many of a run's devices train. The others sample, where that is done `beside` training:
    half of them, and one more where their number is odd, since sampling mostly takes longer."""
    return max(1, devices // 2) if beside and devices > 1 else devices


def seconds_on(
    seconds: Mapping[str, float], gpus: int, *, beside: bool = False, sharded: bool = False
) -> dict[str, float]:
    """The seconds of each phase on so many devices, from those on one.

    Where some do nothing but sample `beside` training, of the rollouts only those seconds count for
    which training waits. Layers of a `sharded` base travel in every pass.
    """
    if gpus == 1:
        return dict(seconds)
    factors = _shared_factors(gpus, beside=beside, sharded=sharded)
    result = {
        phase: each * factors.get(phase, 1.0) + START_S * (phase == "startup")
        for phase, each in seconds.items()
    }
    if beside and "rollouts" in result:
        result["rollouts"] = max(0.0, result["rollouts"] - result.get("training", 0.0))
    return result


def _shared_factors(gpus: int, *, beside: bool, sharded: bool) -> dict[str, float]:
    """What the seconds of each shared phase on one device are multiplied by on so many; arguments
    as of `seconds_on`."""
    training = training_devices(gpus, beside=beside)
    factors = dict.fromkeys(SHARED_PHASES, _share_left(gpus - training if beside else gpus))
    factors["training"] = _share_left(training)
    if sharded:
        factors["training"] *= _SHARDED["training"]
        if not beside:  # otherwise a server samples, from whole weights
            factors |= {phase: factors[phase] * _SHARDED[phase] for phase in SHARED_PHASES[1:]}
    return factors


def _share_left(devices: int) -> float:
    """The share of a phase's time on one device that it takes on so many."""
    return 1.0 if devices == 1 else SERIAL_SHARE + (1 - SERIAL_SHARE) / devices


def paying(seconds_by_gpus: Mapping[int, float]) -> int:
    """How many devices to take: the most that save `LEAST_SAVED_S` and cost no more than
    `MOST_EXTRA` times the device hours of the fewest.

    Args:
        seconds_by_gpus: of the whole run, for the fewest devices and for other numbers of them.
    """
    fewest = min(seconds_by_gpus)
    longest = seconds_by_gpus[fewest]
    most_gpu_seconds = MOST_EXTRA * fewest * longest
    return max(
        gpus
        for gpus, seconds in seconds_by_gpus.items()
        if gpus == fewest
        or (longest - seconds >= LEAST_SAVED_S and gpus * seconds <= most_gpu_seconds)
    )
