"""What the judge calls of a run took in all its env processes, and what it may still spend.

Each call of an env process borrows a share of what is left and gives back what it did not use. So
the processes together never make more calls than allowed; of money they can overrun it by what the
calls under way cost, as no price is known before its reply.
"""

import threading
from dataclasses import dataclass, field

from envs.json_types import JsonObject
from envs.metering.judge_calls import JudgeUse


@dataclass
class JudgeBudget:
    """Attributes:
    max_calls, max_cost: the most requests and money; None: no limit.
    borrowers: how many env processes may borrow at once.
    used: so far.
    """

    max_calls: float | None = None
    max_cost: float | None = None
    borrowers: int = 1
    used: JudgeUse = field(default_factory=JudgeUse)
    _lent: float = 0  # calls
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spent(self) -> str:
        """Which limit is used up, with its value; "" while there is something left."""
        with self._lock:
            if self.max_calls is not None and self.used.calls >= self.max_calls:
                return f"max_judge_calls = {self.max_calls:g}"
            if self.max_cost is not None and self.used.cost >= self.max_cost:
                return f"max_judge_cost = {self.max_cost:g}"
            return ""

    def borrow(self) -> JsonObject:
        """What one call of an env process may use: `calls` and `cost`, None for no limit. To be
        given back by `settle`."""
        with self._lock:
            calls: float | None = None
            if self.max_calls is not None:
                left = max(0.0, self.max_calls - self.used.calls - self._lent)
                calls = min(left, max(1.0, left // self.borrowers))
                self._lent += calls
            cost = None if self.max_cost is None else self.max_cost - self.used.cost
            return {"calls": calls, "cost": cost}

    def settle(self, borrowed: JsonObject, use: JudgeUse) -> None:
        """Count what a call used of what it had borrowed."""
        with self._lock:
            self._lent -= borrowed["calls"] or 0
            self.used = self.used + use
