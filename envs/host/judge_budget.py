"""The budget of a run for calls to a judge (a model that grades), shared by all its env processes.

Each call of an env process borrows a share of what is left and returns what it did not use. So the
processes together never make more calls than allowed. They can exceed the money by the cost of the
calls under way, because a call's price is known only from its reply.
"""

import threading
from dataclasses import dataclass, field

from envs.json_types import JsonObject
from envs.metering.judge_calls import JudgeUse


@dataclass
class JudgeBudget:
    """How many judge calls a run may make and how much money they may cost.

    Attributes:
        max_calls, max_cost: the most requests and money; None for no limit.
        borrowers: how many env processes may borrow at once.
        used: what was used so far.
    """

    max_calls: float | None = None
    max_cost: float | None = None
    borrowers: int = 1
    used: JudgeUse = field(default_factory=JudgeUse)
    _borrowed_calls: float = 0  # calls that are borrowed and not yet settled
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spent(self) -> str:
        """The limit that is used up, e.g. "max_judge_calls = 100"; "" if none is."""
        with self._lock:
            if self.max_calls is not None and self.used.calls >= self.max_calls:
                return f"max_judge_calls = {self.max_calls:g}"
            if self.max_cost is not None and self.used.cost >= self.max_cost:
                return f"max_judge_cost = {self.max_cost:g}"
            return ""

    def borrow(self) -> JsonObject:
        """Return what one call of an env process may use: {"calls", "cost"}, each None for no
        limit.

        The calls are an equal share of those that are left, but at least 1 if any is left. The
        caller must hand the result to `settle` once the call has ended.
        """
        with self._lock:
            calls: float | None = None
            if self.max_calls is not None:
                calls_left = max(0.0, self.max_calls - self.used.calls - self._borrowed_calls)
                calls = min(calls_left, max(1.0, calls_left // self.borrowers))
                self._borrowed_calls += calls
            cost = None if self.max_cost is None else self.max_cost - self.used.cost
            return {"calls": calls, "cost": cost}

    def settle(self, borrowed: JsonObject, use: JudgeUse) -> None:
        """Count what a call used (`use`), and take back the calls that it had borrowed (`borrowed`,
        as `borrow` returned it)."""
        with self._lock:
            self._borrowed_calls -= borrowed["calls"] or 0  # None: calls are not limited
            self.used = self.used + use
