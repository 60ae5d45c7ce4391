"""Estimates how several devices change the time of a run, and how many of them are worth their
cost. Nothing of this is measured on GPUs yet: the shares are those of data parallel training with
small exchanges."""

from collections.abc import Mapping

# Phases whose work all ranks (processes of a run) share. Scores, checkpoints and the start are done
# by the first rank alone.
SHARED_PHASES: tuple[str, ...] = ("training", "rollouts", "evaluation")
# The share of a shared phase that more ranks do not shorten: ranks wait for the one with the
# longest rows, gradients are added up, and a group's prompt may be read on several ranks.
SERIAL_SHARE = 0.05
# The factors by which a sharded base makes phases longer. They are guesses from the bytes of the
# layers and the rates of links between GPUs. Each token that our own sampler draws moves all layers
# once.
_SHARDED = {"training": 1.5, "rollouts": 4.0, "evaluation": 4.0}
START_S = 5.0  # seconds that further processes add to the start
# Several devices pay if their device hours are at most so many times those of the fewest.
MOST_EXTRA = 1.25
LEAST_SAVED_S = 600.0  # seconds that further devices must save to pay


def training_devices(devices: int, *, beside: bool) -> int:
    """Return how many of a run's devices train. All do, unless some only sample while others train
    (`beside`): then half of them train, and with an odd number the smaller half, because sampling
    mostly takes longer."""
    if not beside or devices <= 1:
        return devices
    return max(1, devices // 2)


def seconds_on(
    seconds: Mapping[str, float], gpus: int, *, beside: bool = False, sharded: bool = False
) -> dict[str, float]:
    """Estimate the seconds of each phase of a run on several devices, from those on one.

    Args:
        seconds: seconds of each phase on one device, by its name ("training", "rollouts", ...).
        beside: whether some devices only sample, beside those that train. Then the rollouts count
            only with the seconds for which training has to wait.
        sharded: whether the layers of the base model are cut over the devices, between which every
            pass then has to move them.
    """
    if gpus == 1:
        return dict(seconds)
    factors = _shared_factors(gpus, beside=beside, sharded=sharded)
    seconds_on_gpus = {}
    for phase, phase_s in seconds.items():
        extra_s = START_S if phase == "startup" else 0.0  # further processes make the start longer
        seconds_on_gpus[phase] = phase_s * factors.get(phase, 1.0) + extra_s
    if beside and "rollouts" in seconds_on_gpus:
        waited_s = seconds_on_gpus["rollouts"] - seconds_on_gpus.get("training", 0.0)
        seconds_on_gpus["rollouts"] = max(0.0, waited_s)
    return seconds_on_gpus


def _shared_factors(gpus: int, *, beside: bool, sharded: bool) -> dict[str, float]:
    """Compute the factors that turn the seconds of each shared phase on one device into those on
    `gpus` devices.

    Args:
        beside: whether some devices only sample, beside those that train.
        sharded: whether the layers of the base model are cut over the devices.
    """
    training = training_devices(gpus, beside=beside)
    sampling = gpus - training if beside else gpus
    factors = dict.fromkeys(SHARED_PHASES, _share_left(sampling))
    factors["training"] = _share_left(training)
    if sharded:
        factors["training"] *= _SHARDED["training"]
        if not beside:  # otherwise a server samples, from whole weights
            for phase in ("rollouts", "evaluation"):
                factors[phase] *= _SHARDED[phase]
    return factors


def _share_left(devices: int) -> float:
    """Return the time that a shared phase takes on so many devices, as a share of its time on one
    device. A part of it (`SERIAL_SHARE`) does not get shorter."""
    return 1.0 if devices == 1 else SERIAL_SHARE + (1 - SERIAL_SHARE) / devices


def paying_gpu_count(seconds_by_gpus: Mapping[int, float]) -> int:
    """Choose how many devices to take: the most that save `LEAST_SAVED_S` and cost no more than
    `MOST_EXTRA` times the device hours of the fewest.

    Args:
        seconds_by_gpus: seconds of the whole run, for the fewest devices and for other numbers of
            them.
    """
    fewest = min(seconds_by_gpus)
    longest = seconds_by_gpus[fewest]
    most_gpu_seconds = MOST_EXTRA * fewest * longest
    paying_gpus = [fewest]
    for gpus, seconds in seconds_by_gpus.items():
        saves_enough = longest - seconds >= LEAST_SAVED_S
        if saves_enough and gpus * seconds <= most_gpu_seconds:
            paying_gpus.append(gpus)
    return max(paying_gpus)
