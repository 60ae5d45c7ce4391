"""How often a key may call: a bucket each, refilled steadily."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp_server.access.keys import Key

BURST_S = 10.0  # a key that was idle may make the calls of so many seconds at once


@dataclass
class _Bucket:
    """How many calls a key may make at once now, as of a time in seconds."""

    level: float
    updated: float


class Rates:
    """How many calls each key may still make: a bucket for each, refilled steadily.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: Key) -> float:
        """Count one call of `key`. Returns 0.0 if it may be made now.

        Otherwise the call is refused and not counted, and the result is the number of seconds after
        which one may be made.
        """
        if not key.calls_per_minute:
            return 0.0
        rate = key.calls_per_minute / 60
        capacity = max(1.0, rate * BURST_S)
        now = self._clock()
        bucket = self._buckets.setdefault(key.name, _Bucket(capacity, now))
        bucket.level = min(capacity, bucket.level + (now - bucket.updated) * rate)
        bucket.updated = now
        if bucket.level < 1:
            return (1 - bucket.level) / rate
        bucket.level -= 1
        return 0.0
