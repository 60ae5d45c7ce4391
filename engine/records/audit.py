"""`audit.json` of a stored environment version: what its scorer pays for answers that are none."""

from pydantic import Field

from engine.core.files import JsonObject
from engine.records.record import Record


class ProbeExample(Record):
    """An answer of a probe that was paid."""

    task: str
    completion: str
    reward: float


class ProbeLine(Record):
    """What the answers of one probe earned (envs/audit/probes.py describes the probes).

    Attributes:
        what: the probe in words.
        rows: on how many rows it was scored.
        mean, success, paid: mean reward, and shares of rows counted a success and paid.
        errors: rows on which scoring failed; `error` is the first.
        verdict: ok, warn, risk or info.
        separated: share of rows on which the reference answer earns more.
    """

    probe: str
    what: str
    rows: int
    mean: float
    success: float
    paid: float
    errors: int
    verdict: str
    separated: float | None = None
    error: str = ""
    example: ProbeExample | None = None


class Saturation(Record):
    """Whether the reward is saturated: how many different values it takes (`levels`), and which
    shares of the reference answers and of all others earn its highest value (`top`)."""

    top: float = 0.0
    levels: int = 0
    gold_at_top: float | None = None
    others_at_top: float | None = None


class RewardChange(Record):
    """An answer that earned two rewards."""

    task: str
    first: float
    second: float


class FreshExample(RewardChange):
    """An answer that a new env process rewarded differently."""

    probe: str = ""
    completion: str = ""
    error: str = ""


class FreshProcess(Record):
    """Answers scored again by a process that had scored nothing (envs/audit/rescore.py)."""

    asked: int = 0
    scored: int = 0
    differing: int = 0
    failed: int = 0
    confirmed: int = 0
    wavering: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)
    examples: tuple[FreshExample, ...] = ()
    why: str = ""


class Groups(Record):
    """What `score_group` paid (envs/audit/groups.py): ids of tasks with a fault, of so many."""

    groups: int = 0
    not_ahead: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class Audit(Record):
    """The reward audit (envs/audit/reward_audit.py). Defaults stand for what older releases did
    not write.

    Attributes:
        verdict: ok, warn or risk, "" where no audit was made; `headline` says it with its numbers.
        risks, weaknesses: names of probes and other faults.
        separability: near miss -> share of rows on which the reference answer earns more.
        share: of the rows that were scored, `rows_scored` of `rows`.
        gold_failing: ids of tasks whose reference answer fails.
        score_seconds_p95: seconds that one score takes.
        judge: what judges took for one score (envs/metering/judge_calls.py), mean; empty where
            none was asked.
        secrets_unset: secrets that were not set when it was made; None where it does not say.
    """

    verdict: str = ""
    headline: str = ""
    risks: tuple[str, ...] = ()
    weaknesses: tuple[str, ...] = ()
    probes: tuple[ProbeLine, ...] = ()
    separability: dict[str, float] = Field(default_factory=dict)
    saturation: Saturation = Saturation()
    rows_scored: int = 0
    rows: int = 0
    share: float = 0.0
    deterministic: bool = True
    order_dependent: bool = False
    fresh_process: FreshProcess = FreshProcess()
    unstable: tuple[RewardChange, ...] = ()
    gold_failing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    score_seconds_p95: float = 0.0
    groups: Groups = Groups()
    judge: dict[str, float] = Field(default_factory=dict)
    seed: int = 0
    seconds: float = 0.0
    secrets_unset: list[str] | None = None

    def as_written(self) -> JsonObject:
        """The JSON object as audit.json holds it: only the keys that the file has, without
        defaults for the others."""
        return self.model_dump(mode="json", exclude_unset=True)
