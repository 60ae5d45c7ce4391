"""The result of a reward audit as the JSON object that it is: written to `audit.json` of a version.

The engine reads that file as `engine/records/audit.py`, which says what each key means.
"""

from collections.abc import Mapping
from typing import NotRequired, TypedDict


class ProbeExample(TypedDict):
    """An answer of a probe that was paid."""

    task: str
    completion: str
    reward: float


class ProbeLine(TypedDict):
    """What the answers of one probe earned, one line of the table."""

    probe: str
    what: str
    rows: int
    mean: float
    success: float
    paid: float
    errors: int
    verdict: str
    separated: NotRequired[float]
    error: NotRequired[str]
    example: NotRequired[ProbeExample]


class RewardChange(TypedDict):
    """An answer of `task` that earned one reward, then another."""

    task: str
    first: float
    second: float


class Saturation(TypedDict, total=False):
    """How many rewards there are, and which share of the answers earns the highest."""

    top: float
    levels: int
    gold_at_top: float | None
    others_at_top: float | None


class Rescoring(TypedDict):
    """Answers scored again by a new process (envs/audit/rescore.py). Its keys:

    asked, scored: how many answers there were, and how many of them were scored again.
    differing: how many got another reward.
    failed: on how many scoring failed this time; they are not among `differing`.
    confirmed, wavering: of the differing ones, how many a third process rewarded as the second
        did, or otherwise; where it was not asked an answer is neither.
    skipped: reason -> how many answers could not be scored again.
    examples: answers that differ or failed, confirmed ones first.
    why: the reason why the rest of the answers was left out; "" where none was.
    """

    asked: int
    scored: int
    differing: int
    failed: int
    confirmed: int
    wavering: int
    skipped: dict[str, int]
    examples: list[dict[str, object]]
    why: str


class GroupReport(TypedDict):
    """What `score_group` paid (envs/audit/groups.py): how many `groups` were scored, and ids of
    tasks with a fault."""

    groups: int
    not_ahead: list[str]
    moved: list[str]
    failed: list[str]


class AuditReport(TypedDict):
    """The whole result."""

    verdict: str
    headline: str
    risks: list[str]
    weaknesses: list[str]
    probes: list[ProbeLine]
    separability: dict[str, float]
    saturation: Saturation
    rows_scored: int
    rows: int
    share: float
    deterministic: bool
    order_dependent: bool
    fresh_process: Mapping[str, object]  # a Rescoring; {} where no new process was asked
    unstable: list[RewardChange]
    gold_failing: list[str]
    problems: list[str]
    groups: NotRequired[GroupReport]
    score_seconds_p95: float
    seed: int
    seconds: float
