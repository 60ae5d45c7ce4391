"""How many env processes (which run an environment's code) score at once, if the user does not
say."""

FAST_S = 0.02  # a faster score is done before the next completion is sampled
WAITING = 4  # processes per core if scores wait for the network
MOST = 32


def default_workers(score_s: float, waits: bool, cores: int) -> int:
    """Return the default of the setting score_workers, the number of processes that score at once.

    It is 1 if scoring is fast or its time is not known; else one for each core, or WAITING for each
    core if scores are likely to wait for the network; at most MOST.

    Args:
        score_s: seconds that scoring one completion takes; 0 if that is not known.
        waits: whether the environment may reach the network.
        cores: number of the machine's cores.
    """
    if score_s < FAST_S:
        return 1
    workers_per_core = WAITING if waits else 1
    return max(1, min(MOST, cores * workers_per_core))
