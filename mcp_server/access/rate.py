"""How often a key may call: a bucket each, refilled steadily."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp_server.access.keys import Key

BURST_S = 10.0  # what may be called at once, in seconds of the steady rate


@dataclass
class _Bucket:
    level: float
    updated: float


class Rates:
    """Buckets by key name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: Key) -> float:
        """Take one call of `key`: 0.0 when it may be made now, else the seconds until it may."""
        if not key.calls_per_minute:
            return 0.0
        rate = key.calls_per_minute / 60
        most = max(1.0, rate * BURST_S)
        now = self._clock()
        bucket = self._buckets.setdefault(key.name, _Bucket(most, now))
        bucket.level = min(most, bucket.level + (now - bucket.updated) * rate)
        bucket.updated = now
        if bucket.level < 1:
            return (1 - bucket.level) / rate
        bucket.level -= 1
        return 0.0
