"""What the judge calls of this process took, and how many more the run allows.

The env process sends what was used with every reply, and is told with every request what is left
(envs/host/judge_budget.py). So the counts leave the process, and the cap reaches it.
"""

import math
import threading
from dataclasses import asdict, dataclass, field, fields, replace


@dataclass(frozen=True)
class JudgeUse:
    """What judge calls took.

    Attributes:
        calls: requests that were answered.
        retries: requests that were sent again after a failure.
        cached: verdicts that needed no request.
        refused: requests that were not sent, because the run allows no more.
        tokens: of the answered requests, prompt and reply, as the server counts them.
        seconds: from each request to its answer, retries included.
        cost: money, by the prices that the judge was given.
    """

    calls: float = 0
    retries: float = 0
    cached: float = 0
    refused: float = 0
    tokens: float = 0
    seconds: float = 0.0
    cost: float = 0.0

    def __add__(self, other: "JudgeUse") -> "JudgeUse":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return JudgeUse(**sums)

    def __sub__(self, other: "JudgeUse") -> "JudgeUse":
        rest = {f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)}
        return JudgeUse(**rest)

    def __bool__(self) -> bool:
        """Whether anything was used or refused."""
        return any(asdict(self).values())

    def to_json(self) -> dict[str, float]:
        """What is not 0, by name."""
        return {name: value for name, value in asdict(self).items() if value}

    @staticmethod
    def from_json(data: object) -> "JudgeUse":
        """What an env process sent, which user code may have forged: anything but known names with
        finite numbers of at least 0 counts as nothing."""
        if not isinstance(data, dict):
            return JudgeUse()
        known = {f.name for f in fields(JudgeUse)}
        return JudgeUse(
            **{
                name: value
                for name, value in data.items()
                if name in known
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
                and value >= 0
            }
        )


NOTHING = JudgeUse()


@dataclass
class Meter:
    """The judge calls of one process, from any of its threads.

    Attributes:
        calls_left, cost_left: what the run still allows; None: no limit.
    """

    calls_left: float | None = None
    cost_left: float | None = None
    _use: JudgeUse = field(default_factory=JudgeUse)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allow(self, calls: float | None, cost: float | None) -> None:
        """Set what is left from now on."""
        with self._lock:
            self.calls_left, self.cost_left = calls, cost

    def admit(self) -> bool:
        """Take one request from what is left; False, and counted as refused, where nothing is."""
        with self._lock:
            no_calls = self.calls_left is not None and self.calls_left < 1
            no_money = self.cost_left is not None and self.cost_left <= 0
            if no_calls or no_money:
                self._use = replace(self._use, refused=self._use.refused + 1)
                return False
            if self.calls_left is not None:
                self.calls_left -= 1
            return True

    def count(self, use: JudgeUse) -> None:
        """Add what a call took; its money is taken from what is left."""
        with self._lock:
            self._use = self._use + use
            if self.cost_left is not None:
                self.cost_left -= use.cost

    def take(self) -> JudgeUse:
        """What was used since the last time this was asked."""
        with self._lock:
            use, self._use = self._use, JudgeUse()
            return use


METER = Meter()
