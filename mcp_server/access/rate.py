"""Limits how often each key may call, by a token bucket per key that refills steadily."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp_server.access.keys import Key

BURST_S = 10.0  # after a pause a key may make at once as many calls as otherwise in this time


@dataclass
class _Bucket:
    """The token bucket of one key.

    Attributes:
        level: how many calls the key could make at once at `updated_at`; may have a fraction.
        updated_at: when `level` was computed, in seconds of the clock.
    """

    level: float
    updated_at: float


class Rates:
    """Limits the calls of all keys: each key has a token bucket that refills steadily.

    Args:
        clock: returns the present time in seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without token buckets: each key gets a full one with its first call. `clock`
        returns the present time in seconds, from any start."""
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: Key) -> float:
        """Return 0.0 if `key` may make a call now, and count that call. Otherwise return the
        seconds until `key` may make a call; the refused call is not counted.

        A key without a limit may always call. Any other has a token bucket: each call takes one
        token, and the bucket refills steadily at `calls_per_minute`.
        """
        if not key.calls_per_minute:  # 0: no limit
            return 0.0
        calls_per_s = key.calls_per_minute / 60
        capacity = max(1.0, calls_per_s * BURST_S)  # at least 1, or no call could ever be made
        now = self._clock()
        bucket = self._buckets.setdefault(key.name, _Bucket(capacity, now))
        # Refill the bucket for the time that has passed since the last call.
        bucket.level = min(capacity, bucket.level + (now - bucket.updated_at) * calls_per_s)
        bucket.updated_at = now
        if bucket.level < 1:
            return (1 - bucket.level) / calls_per_s
        bucket.level -= 1
        return 0.0
