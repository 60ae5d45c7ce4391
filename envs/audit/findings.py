"""The measurements of a reward audit: a tally per probe, and the answers that got two rewards."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envs.audit.audit_report import ProbeExample, Rescoring, RewardChange
from envs.audit.groups import GroupFindings
from envs.audit.rescore import Scored
from envs.json_types import JsonObject

PAID = 0.5  # an answer counts as paid if it earns at least this share of what gold earns
FRESH = 12  # a new process scores this many of the last answers, and as many earlier ones
ERROR_CHARS = 200
EXAMPLE_CHARS = 160


@dataclass
class Tally:
    """What one probe (a kind of answer that is tried) earned so far.

    Attributes:
        rewards: the reward on each row.
        golds: what gold (the reference answer) earned on the same rows, if it exists.
        successes, errors, paid: on how many rows the probe counted as solved, failed to score, was
            paid.
        below: on how many rows gold earned more; a tie counts half.
        example: the first answer that was paid; None if none was.
        error: the first error; "" if scoring never failed.
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
        """The mean reward over all rows that were scored; there must be at least one."""
        return math.fsum(self.rewards) / len(self.rewards)

    def count(
        self, result: Mapping[str, Any], gold_reward: float | None, answer: Any, task_id: str
    ) -> None:
        """Add what this probe's answer earned on one row to the tally.

        Args:
            result: the score of `answer`: reward, success and error.
            gold_reward: what gold, the reference answer, earned on the same row; None if the row
                has none.
            answer: the probe's answer, a text or messages.
            task_id: the row's task.
        """
        reward = result["reward"]
        self.rewards.append(reward)
        if result["success"] is True:
            self.successes += 1
        if result["error"]:
            self.errors += 1
            self.error = self.error or str(result["error"])[:ERROR_CHARS]  # the first one is kept
        if gold_reward is not None:
            self._compare_with_gold(reward, gold_reward)
        if not _is_paid(result, gold_reward):
            return
        self.paid += 1
        if self.example is None:
            self.example = {"task": task_id, "completion": shortened(answer), "reward": reward}

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally, of the same probe on other rows."""
        self.rewards += other.rewards
        self.golds += other.golds
        self.successes += other.successes
        self.errors += other.errors
        self.paid += other.paid
        self.below += other.below
        self.example = self.example or other.example
        self.error = self.error or other.error

    def _compare_with_gold(self, reward: float, gold_reward: float) -> None:
        """Record what gold (the reference answer) earned on a row, and whether the probe earned
        less (equal rewards count half). `reward` is what the probe earned on the same row."""
        self.golds.append(gold_reward)
        if gold_reward > reward:
            self.below += 1.0
        elif gold_reward == reward:
            self.below += 0.5


def _is_paid(result: Mapping[str, Any], gold_reward: float | None) -> bool:
    """Whether the reward that an answer got on a row counts as paid.

    `gold_reward` is what the row's reference answer earned: the answer needs the share PAID of it,
    and nothing is paid if it is 0 or less. If it is None (no reference answer), the answer needs
    success, or a reward of at least PAID.
    """
    if gold_reward is None:
        return result["success"] is True or result["reward"] >= PAID
    return gold_reward > 0 and result["reward"] >= PAID * gold_reward


@dataclass
class Findings:
    """All measurements of an audit.

    Attributes:
        tallies: name of the probe -> its tally.
        gold_failing: ids of tasks whose reference answer fails; `gold_rows` tasks have one.
        unstable: answers that earned different rewards twice in a row; `repeated` answers were
            tried.
        drifted: answers that earned another reward after others had been scored; `revisited` were
            tried.
        latest: the answers scored last, the newest at the end.
        samples: the reference answer and one other answer of each row.
        rescoring: how a new process scored some of `latest` and `samples`; None if none was
            started.
        of_groups: the audit of `score_group`; None if there is none.
        seconds: how long each call of score took.
        rows: how many rows were scored.
        stopped_in_row: whether the time ran out in the middle of a row.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    gold_failing: list[str] = field(default_factory=list)
    gold_rows: int = 0
    repeated: int = 0
    unstable: list[RewardChange] = field(default_factory=list)
    revisited: int = 0
    drifted: list[RewardChange] = field(default_factory=list)
    latest: deque[Scored] = field(default_factory=lambda: deque(maxlen=FRESH))
    samples: list[Scored] = field(default_factory=list)
    rescoring: Rescoring | None = None
    of_groups: GroupFindings | None = None
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    stopped_in_row: bool = False

    def to_json(self) -> JsonObject:
        """Return the counts as a JSON object; the answers kept to be scored again are left out."""
        return {
            "tallies": {probe: asdict(tally) for probe, tally in self.tallies.items()},
            **{name: getattr(self, name) for name in _COUNTED_FIELDS},
        }

    def count_repeated(self, task_id: str, first_reward: float, second_reward: float) -> None:
        """Count an answer that was scored twice in a row; keep its two rewards if they differ."""
        self.repeated += 1
        if second_reward != first_reward:
            change = RewardChange(task=task_id, first=first_reward, second=second_reward)
            self.unstable.append(change)

    def count_revisited(self, task_id: str, first_reward: float, later_reward: float) -> None:
        """Count an answer scored again after others; keep its two rewards if they differ."""
        self.revisited += 1
        if later_reward != first_reward:
            change = RewardChange(task=task_id, first=first_reward, second=later_reward)
            self.drifted.append(change)


# The fields besides the tallies that are stored, and added up when findings are merged.
_COUNTED_FIELDS = (
    "gold_failing",
    "gold_rows",
    "repeated",
    "unstable",
    "revisited",
    "drifted",
    "seconds",
    "rows",
)


def findings_from_json(data: JsonObject) -> Findings:
    """Read the findings that `Findings.to_json` wrote. Raises LookupError or TypeError if `data`
    has another form."""
    tallies = {name: Tally(**tally) for name, tally in data["tallies"].items()}
    return Findings(tallies=tallies, **{name: data[name] for name in _COUNTED_FIELDS})


def merged(parts: Sequence[Findings]) -> Findings:
    """Return the sum of several findings, each about other rows of the same environment. Lists are
    joined in the order of `parts`."""
    total = Findings()
    for part in parts:
        for probe, tally in part.tallies.items():
            total.tallies.setdefault(probe, Tally()).add(tally)
        for name in _COUNTED_FIELDS:  # numbers are added, lists are joined
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total


def shortened(answer: Any) -> str:
    """Return the first EXAMPLE_CHARS (160) characters of an answer: a text, or messages, whose
    texts are joined by slashes."""
    if isinstance(answer, str):
        return answer[:EXAMPLE_CHARS]
    return " / ".join(message["content"] for message in answer)[:EXAMPLE_CHARS]
