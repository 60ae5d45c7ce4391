"""How many env processes of a run score at once, where the user does not say."""

FAST_S = 0.02  # a score that takes less is done before the next completion is sampled
WAITING = 4  # processes per core where scores wait for the network
MOST = 32


def default_workers(score_s: float, waits: bool, cores: int) -> int:
    """The default of score_workers: 1 where scoring is fast, or its time is not known; else one for
    each core, more of them where a score is likely to wait.

    Args:
        score_s: seconds that one score takes; 0 where it is not known.
        waits: whether the environment may reach the network.
        cores: of the machine.
    """
    if score_s < FAST_S:
        return 1
    return max(1, min(MOST, cores * (WAITING if waits else 1)))
