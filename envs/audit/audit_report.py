"""The types of the JSON object that a reward audit writes: `audit.json` of an environment version.

The engine reads that file as `engine/records/audit.py`, which says what each key means.
"""

from collections.abc import Mapping
from typing import NotRequired, TypedDict


class ProbeExample(TypedDict):
    """A probe's answer (wrong or degenerate) that was paid."""

    task: str
    completion: str
    reward: float


class ProbeLine(TypedDict):
    """The rewards of one probe's answers: one line of the report's table."""

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
    """An answer of `task` that earned the reward `first`, then another, `second`."""

    task: str
    first: float
    second: float


class Saturation(TypedDict, total=False):
    """Whether the highest reward separates right answers from wrong ones: how many different
    rewards there are (`levels`), and which shares of the answers earn the highest."""

    top: float
    levels: int
    gold_at_top: float | None
    others_at_top: float | None


class Rescoring(TypedDict):
    """The result of scoring answers again with a new process (envs/audit/rescore.py). Its keys:

    asked, scored: how many answers there were, and how many of them were scored again.
    differing: how many got another reward.
    failed: on how many the scoring failed this time; these do not count in `differing`.
    confirmed, wavering: in how many of the differing answers a third process gave the second
        process's reward, or another one. Answers that it was not asked about are in neither.
    skipped: reason -> how many answers could not be scored again.
    examples: answers that differ or failed, confirmed ones first.
    why: why the remaining answers were not scored again; "" if all were.
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
    """The result of the audit of `score_group` (envs/audit/groups.py): the number of `groups`
    scored, and for each kind of fault the ids of the tasks that show it."""

    groups: int
    not_ahead: list[str]
    moved: list[str]
    failed: list[str]


class AuditReport(TypedDict):
    """The whole report of a reward audit."""

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
