"""Counts the calls of this process to a judge (a model that grades), and limits them.

The env process reports the use with every reply, and every request tells it what the run still
allows (envs/host/judge_budget.py).
"""

import math
import threading
from dataclasses import asdict, dataclass, field, fields, replace


@dataclass(frozen=True)
class JudgeUse:
    """The resources that judge calls used.

    Attributes:
        calls: requests that were answered.
        retries: requests that were sent again after a failure.
        cached: verdicts that needed no request.
        refused: requests that were not sent, because the run allows no more.
        tokens: prompt and completion tokens of the answered requests, as the server counts them.
        seconds: time from each request to its answer, retries included.
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
        """Return the sum of two uses, field by field."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
        }
        return JudgeUse(**sums)

    def __sub__(self, other: "JudgeUse") -> "JudgeUse":
        """Return this use minus `other`, field by field."""
        differences = {
            field.name: getattr(self, field.name) - getattr(other, field.name)
            for field in fields(self)
        }
        return JudgeUse(**differences)

    def __bool__(self) -> bool:
        """Whether any field is not 0: something was used, or a call was refused."""
        return any(asdict(self).values())

    def to_json(self) -> dict[str, float]:
        """Return the fields that are not 0, as name -> number, the form that `from_json` reads."""
        return {name: value for name, value in asdict(self).items() if value}

    @staticmethod
    def from_json(data: object) -> "JudgeUse":
        """Read the use that an env process sent as {field: number}; user code may have forged it.

        Only known names with finite numbers of at least 0 count; everything else is ignored. Data
        that are no object give an empty use.
        """
        if not isinstance(data, dict):
            return JudgeUse()
        known_names = {field.name for field in fields(JudgeUse)}
        accepted: dict[str, float] = {}
        for name, value in data.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in known_names and is_number and math.isfinite(value) and value >= 0:
                accepted[name] = value
        return JudgeUse(**accepted)


NOTHING = JudgeUse()


@dataclass
class Meter:
    """Counts the judge calls of one process, from any of its threads.

    Attributes:
        calls_left, cost_left: how many calls and how much money the run still allows; None for no
            limit.
    """

    calls_left: float | None = None
    cost_left: float | None = None
    _use: JudgeUse = field(default_factory=JudgeUse)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allow(self, calls: float | None, cost: float | None) -> None:
        """Set how many calls and how much money are left from now on; None for no limit."""
        with self._lock:
            self.calls_left, self.cost_left = calls, cost

    def admit(self) -> bool:
        """Take one request from what is left and return True. If nothing is left, count the request
        as refused and return False."""
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
        """Add the use of a call to the total, and take its cost from the money that is left, if
        that is limited."""
        with self._lock:
            self._use = self._use + use
            if self.cost_left is not None:
                self.cost_left -= use.cost

    def take(self) -> JudgeUse:
        """Return the use since the last call of `take`, and start counting from zero."""
        with self._lock:
            use, self._use = self._use, JudgeUse()
            return use


METER = Meter()
