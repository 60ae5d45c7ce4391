"""What a reward audit has measured so far: a tally per probe, and the answers with two rewards."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.audit.audit_report import ProbeExample, Rescoring, RewardChange
from envs.audit.rescore import Scored

PAID = 0.5  # an answer counts as paid if it earns this share of what gold earns, or more
FRESH = 12  # a new process scores so many of the last answers, and as many earlier ones
ERROR_CHARS = 200
EXAMPLE_CHARS = 160


@dataclass
class Tally:
    """What one probe earned so far.

    Attributes:
        rewards: of each row.
        golds: what gold (the reference answer) earned on the same rows, where there is one.
        successes, errors, paid: on how many rows it counted as solved, failed to score, was paid.
        below: on how many rows gold earned more; a tie counts half.
        example: the first answer that was paid; None where none was.
        error: the first error; "" where scoring never failed.
    """

    rewards: list[float] = field(default_factory=list)
    golds: list[float] = field(default_factory=list)
    successes: int = 0
    errors: int = 0
    paid: int = 0
    below: float = 0.0
    example: ProbeExample | None = None
    error: str = ""

    @property
    def mean(self) -> float:
        """The mean reward over all rows; there must be at least one."""
        return math.fsum(self.rewards) / len(self.rewards)

    def count(
        self, result: Mapping[str, Any], gold: float | None, answer: Any, task_id: str
    ) -> None:
        """Add one row to the tally.

        Args:
            result: the score of `answer`: reward, success and error.
            gold: what the reference answer earned on the same row; None if it has none.
            answer: the probe's answer, a text or messages.
            task_id: the row's task.
        """
        reward = result["reward"]
        self.rewards.append(reward)
        self.successes += result["success"] is True
        if result["error"]:
            self.errors += 1
            self.error = self.error or str(result["error"])[:ERROR_CHARS]
        if gold is not None:
            self.golds.append(gold)
            self.below += 1.0 if gold > reward else 0.5 if gold == reward else 0.0  # a tie: half
        pays = result["success"] is True or reward >= PAID
        if gold is not None:  # a better measure than success or a fixed reward
            pays = gold > 0 and reward >= PAID * gold
        self.paid += pays
        if pays and self.example is None:
            self.example = {"task": task_id, "completion": shortened(answer), "reward": reward}


@dataclass
class Findings:
    """Everything that was measured.

    Attributes:
        tallies: by the probe's name.
        gold_failing: ids of tasks whose reference answer fails, of `gold_rows` tasks with one.
        unstable: answers that earned two rewards twice in a row, of `repeated` ones.
        drifted: answers that earned another reward after others were scored, of `revisited` ones.
        last: the answers scored last, the newest at the end.
        before: of each row the reference answer and one other.
        fresh: how some of them were scored by a new process; None where none was asked.
        seconds: what each score took.
        rows: rows scored.
        cut: whether the time was up in the middle of a row.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    gold_failing: list[str] = field(default_factory=list)
    gold_rows: int = 0
    repeated: int = 0
    unstable: list[RewardChange] = field(default_factory=list)
    revisited: int = 0
    drifted: list[RewardChange] = field(default_factory=list)
    last: deque[Scored] = field(default_factory=lambda: deque(maxlen=FRESH))
    before: list[Scored] = field(default_factory=list)
    fresh: Rescoring | None = None
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    cut: bool = False

    def repeat(self, task_id: str, first: float, second: float) -> None:
        """Count an answer that was scored twice in a row; keep its two rewards if they differ."""
        self.repeated += 1
        if second != first:
            self.unstable.append({"task": task_id, "first": first, "second": second})


def shortened(answer: Any) -> str:
    """The first EXAMPLE_CHARS of an answer: of its text, or of its messages joined by slashes."""
    text = answer if isinstance(answer, str) else " / ".join(m["content"] for m in answer)
    return text[:EXAMPLE_CHARS]
