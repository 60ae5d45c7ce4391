"""What models behind a URL answered in a run so far, and what they may still take.

Every turn is written down before it is used, so a run that was interrupted asks nothing twice and
knows what it has spent. A request is admitted only where the most that it can cost still fits
below the cap beside those under way: the cap is not passed.
"""

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.core.files import Appender
from engine.records.lines.endpoint_call import EndpointCall
from envs.json_types import JsonObject

# Tokens that a chat format may add to a message or a tool, for the most that a prompt can hold.
_ADDED_TOKENS = 16

Turn = tuple[str, str, int, int]  # model, task, attempt, number of the turn


class OutOfBudget(Exception):
    """The run allows no further request; the text names the setting."""


@dataclass(frozen=True)
class Use:
    """What requests took: those answered, those sent again, tokens, money, seconds."""

    calls: int = 0
    retries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    def plus(self, call: EndpointCall) -> "Use":
        """This and one more call."""
        return Use(
            self.calls + 1,
            self.retries + call.retries,
            self.tokens_in + call.tokens_in,
            self.tokens_out + call.tokens_out,
            self.cost + call.cost,
            self.seconds + call.seconds,
        )

    def to_json(self) -> JsonObject:
        """By name, money and seconds rounded."""
        rounded = {"cost": round(self.cost, 6), "seconds": round(self.seconds, 2)}
        return asdict(self) | rounded


class Answered:
    """The turns of one run, and its caps. From any number of threads.

    Attributes:
        use: of each model, in all attempts of the run.
        stopped_by: the setting that allowed no further request; "" as long as none did.
    """

    def __init__(self, path: Path, max_calls: int | None, max_cost: float | None) -> None:
        """Read what the file at `path` holds; it is created with the first turn. None: no cap."""
        self.use: dict[str, Use] = {}
        self.stopped_by = ""
        self._max_calls, self._max_cost = max_calls, max_cost
        self._calls_under_way, self._cost_under_way = 0, 0.0
        self._settled = threading.Condition()
        self._turns: dict[Turn, EndpointCall] = {}
        for call in EndpointCall.read_all(path):
            self._add(call)
        self._file = Appender(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(self, turn: Turn, request: str) -> EndpointCall | None:
        """The answer to this turn, if the same request was answered; else None."""
        call = self._turns.get(turn)
        return call if call is not None and call.request == request else None

    def admit(self, most_cost: float) -> None:
        """Wait until a request of at most `most_cost` fits below the caps, and count it as under
        way. To be followed by `keep` or `drop`. Raises OutOfBudget where it never will."""
        with self._settled:
            while True:
                if self.stopped_by:
                    raise OutOfBudget(self.stopped_by)
                too_many = self._would_pass(most_cost)
                if not too_many:
                    self._calls_under_way += 1
                    self._cost_under_way += most_cost
                    return
                if not self._calls_under_way:  # nothing will give anything back
                    self.stopped_by = too_many
                    raise OutOfBudget(too_many)
                self._settled.wait()

    def _would_pass(self, most_cost: float) -> str:
        """The cap that one more request might pass, with its value; "" for none."""
        total = self.total
        if self._max_calls is not None and total.calls + self._calls_under_way >= self._max_calls:
            return f"max_calls = {self._max_calls}"
        most = total.cost + self._cost_under_way + most_cost
        if self._max_cost is not None and most > self._max_cost * (1 + 1e-9):  # of rounding
            return f"max_cost = {self._max_cost:g}"
        return ""

    def keep(self, call: EndpointCall, most_cost: float) -> None:
        """Write an answer down; it was admitted with `most_cost`."""
        with self._settled:
            self._file.append(call.to_line())
            self._add(call)
            self._give_back(most_cost)

    def drop(self, most_cost: float) -> None:
        """A request that was admitted with `most_cost` was not answered."""
        with self._settled:
            self._give_back(most_cost)

    def _give_back(self, most_cost: float) -> None:
        self._calls_under_way -= 1
        self._cost_under_way = max(0.0, self._cost_under_way - most_cost)
        self._settled.notify_all()

    def _add(self, call: EndpointCall) -> None:
        self._turns[(call.model, call.task, call.attempt, call.turn)] = call
        self.use[call.model] = self.use.get(call.model, Use()).plus(call)

    @property
    def total(self) -> Use:
        """Of all models."""
        uses = list(self.use.values())
        sums = {name: sum(getattr(use, name) for use in uses) for name in asdict(Use())}
        return Use(**sums)


def hash_of(request: JsonObject) -> str:
    """A hash of what is sent."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def most_tokens_in(request: JsonObject) -> int:
    """The most tokens that a prompt can have: no token is shorter than a byte."""
    parts = [*request["messages"], *request.get("tools", ())]
    text = json.dumps(parts, ensure_ascii=False)
    return len(text.encode("utf-8", "replace")) + _ADDED_TOKENS * (1 + len(parts))
