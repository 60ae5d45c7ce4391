"""How often a key may call: a bucket each, refilled steadily."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp_server.access.keys import Key

BURST_S = 10.0  # a key that was idle may make at once the calls of this many seconds


@dataclass
class _Bucket:
    """How many calls one key may make at once.

    Attributes:
        level: the number of calls, with a fraction, as it was at `updated_at`.
        updated_at: when `level` was computed, in seconds of the clock.
    """

    level: float
    updated_at: float


class Rates:
    """How many calls each key may still make: a bucket for each, refilled steadily.

    Args:
        clock: returns the present time in seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: Key) -> float:
        """Count one call of `key`, and return 0.0 if it may be made now.

        If the call comes too early it is not counted, and the number of seconds until a call may be
        made is returned. A key without a limit may always call.
        """
        if not key.calls_per_minute:
            return 0.0
        calls_per_s = key.calls_per_minute / 60
        capacity = max(1.0, calls_per_s * BURST_S)  # at least 1, or no call could ever be made
        now = self._clock()
        bucket = self._buckets.setdefault(key.name, _Bucket(capacity, now))
        # Refilled for the time that has passed since it was computed last.
        bucket.level = min(capacity, bucket.level + (now - bucket.updated_at) * calls_per_s)
        bucket.updated_at = now
        if bucket.level < 1:
            return (1 - bucket.level) / calls_per_s
        bucket.level -= 1
        return 0.0
