"""What models behind a URL have answered in a run so far, and how much they may still be asked.

Every turn (one answer of the model) is written to a file before it is used. So a run that was
interrupted asks nothing twice, and knows what it has spent. A request is admitted only if the most
that it can cost still fits below the cap, beside the requests under way. So the cap is never
passed.
"""

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.core.files import Appender
from engine.records.lines.endpoint_call import EndpointCall
from envs.json_types import JsonObject

# Tokens that a chat format may add to each message and tool, for the upper bound of a prompt's
# tokens.
_ADDED_TOKENS = 16

Turn = tuple[str, str, int, int]  # model, task, attempt, number of the turn


class OutOfBudget(Exception):
    """The caps of the run allow no further request. The text names the setting."""


@dataclass(frozen=True)
class Use:
    """How much requests took: their number, retries, tokens, money, seconds."""

    calls: int = 0
    retries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    def plus(self, call: EndpointCall) -> "Use":
        """Return the sum of this use and what one more call took."""
        return Use(
            self.calls + 1,
            self.retries + call.retries,
            self.tokens_in + call.tokens_in,
            self.tokens_out + call.tokens_out,
            self.cost + call.cost,
            self.seconds + call.seconds,
        )

    def to_json(self) -> JsonObject:
        """Return the fields by name, with money rounded to 6 and seconds to 2 decimal places."""
        rounded = {"cost": round(self.cost, 6), "seconds": round(self.seconds, 2)}
        return asdict(self) | rounded


class AnswerLedger:
    """The answered turns of one run, and its caps. May be used from any number of threads.

    Attributes:
        use: how much each model took, in all attempts of the run.
        stopped_by: the setting that allowed no further request; "" as long as none has.
    """

    def __init__(self, path: Path, max_calls: int | None, max_cost: float | None) -> None:
        """Read the turns in the file at `path`, which is created with the first turn. `max_calls`
        and `max_cost` cap the requests of the run and what they cost; None sets no cap."""
        self.use: dict[str, Use] = {}
        self.stopped_by = ""
        self._max_calls, self._max_cost = max_calls, max_cost
        self._calls_under_way, self._cost_under_way = 0, 0.0
        self._budget_freed = threading.Condition()
        self._turns: dict[Turn, EndpointCall] = {}
        for call in EndpointCall.read_all(path):
            self._add(call)
        self._file = Appender(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(self, turn: Turn, request: str) -> EndpointCall | None:
        """Return the stored answer to this turn, if it was an answer to the same `request` (a
        hash); else None."""
        call = self._turns.get(turn)
        return call if call is not None and call.request == request else None

    def admit(self, most_cost: float) -> None:
        """Wait until a request of at most `most_cost` fits below the caps, and count it as under
        way. The caller must then call `keep` or `drop`. Raises OutOfBudget if it can never fit."""
        with self._budget_freed:
            while True:
                if self.stopped_by:
                    raise OutOfBudget(self.stopped_by)
                reached_cap = self._cap_reached_by(most_cost)
                if not reached_cap:
                    self._calls_under_way += 1
                    self._cost_under_way += most_cost
                    return
                # With no request under way, no budget will be given back: waiting is useless.
                if not self._calls_under_way:
                    self.stopped_by = reached_cap
                    raise OutOfBudget(reached_cap)
                self._budget_freed.wait()

    def _cap_reached_by(self, most_cost: float) -> str:
        """Return the cap that one more request of at most `most_cost` might pass, with its value,
        such as "max_calls = 100"; "" if it passes none."""
        total = self.total
        if self._max_calls is not None and total.calls + self._calls_under_way >= self._max_calls:
            return f"max_calls = {self._max_calls}"
        highest_cost = total.cost + self._cost_under_way + most_cost
        # 1e-9: sums of money are rounded.
        if self._max_cost is not None and highest_cost > self._max_cost * (1 + 1e-9):
            return f"max_cost = {self._max_cost:g}"
        return ""

    def keep(self, call: EndpointCall, most_cost: float) -> None:
        """Write the answered turn `call` to the file, and count what it took instead of
        `most_cost`, with which its request was admitted."""
        with self._budget_freed:
            self._file.append(call.to_line())
            self._add(call)
            self._give_back(most_cost)

    def drop(self, most_cost: float) -> None:
        """Give back the budget of a request that was admitted with `most_cost` and not answered."""
        with self._budget_freed:
            self._give_back(most_cost)

    def _give_back(self, most_cost: float) -> None:
        """Count a request, which was admitted with `most_cost`, as no longer under way, and wake up
        the threads that wait for budget. The caller holds the lock."""
        self._calls_under_way -= 1
        self._cost_under_way = max(0.0, self._cost_under_way - most_cost)
        self._budget_freed.notify_all()

    def _add(self, call: EndpointCall) -> None:
        """Remember an answered turn (`call`), and add it to the use of its model."""
        self._turns[(call.model, call.task, call.attempt, call.turn)] = call
        self.use[call.model] = self.use.get(call.model, Use()).plus(call)

    @property
    def total(self) -> Use:
        """The sum of the uses of all models."""
        uses = list(self.use.values())
        sums = {name: sum(getattr(use, name) for use in uses) for name in asdict(Use())}
        return Use(**sums)


def hash_of(request: JsonObject) -> str:
    """Return a hash of a request (32 hex digits), by which the same request is recognised after an
    interruption of the run."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def most_tokens_in(request: JsonObject) -> int:
    """Compute an upper bound of the tokens of a prompt: its bytes, because no token is shorter than
    a byte, plus what the chat format may add."""
    parts = [*request["messages"], *request.get("tools", ())]
    text = json.dumps(parts, ensure_ascii=False)
    return len(text.encode("utf-8", "replace")) + _ADDED_TOKENS * (1 + len(parts))
