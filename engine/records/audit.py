"""`audit.json` of an environment version: the rewards that its scorer gives degenerate answers."""

from pydantic import Field

from engine.core.files import JsonObject
from engine.records.record import Record


class ProbeExample(Record):
    """An answer of a probe (a degenerate answer that should earn nothing) that earned a reward."""

    task: str
    completion: str
    reward: float


class ProbeLine(Record):
    """What the answers of one probe earned (envs/audit/probes.py describes the probes).

    Attributes:
        probe: the name of the probe.
        what: the probe in words.
        rows: on how many rows the probe was scored.
        mean: mean reward.
        success, paid: shares of the rows on which the answer counted as a success, and on which it
            earned a reward.
        errors: number of rows on which scoring failed; `error` is the first error.
        verdict: ok, warn, risk or info.
        separated: share of the rows on which the reference answer earns more; None if there is no
            reference answer to compare with.
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
    """Whether many different answers earn the highest reward.

    Attributes:
        top: the highest reward.
        levels: how many different values the reward has.
        gold_at_top, others_at_top: shares of the reference answers, and of all other answers, that
            earn `top`.
    """

    top: float = 0.0
    levels: int = 0
    gold_at_top: float | None = None
    others_at_top: float | None = None


class RewardChange(Record):
    """An answer that earned two different rewards: `first`, then `second`."""

    task: str
    first: float
    second: float


class FreshExample(RewardChange):
    """An answer that earned another reward in a new process of the environment."""

    probe: str = ""
    completion: str = ""
    error: str = ""


class FreshProcess(Record):
    """Answers that were scored again by a process that had scored nothing (envs/audit/rescore.py).

    Attributes:
        asked, scored: how many answers there were, and how many of them were scored again.
        differing: how many answers got another reward.
        failed: how many answers failed to score this time.
        confirmed, wavering: of the differing answers, how many a third process rewarded as the
            second did, and how many it rewarded in another way.
        skipped: reason -> how many answers could not be scored again.
        examples: answers that differ or failed.
        why: why the remaining answers were left out; "" if none were.
    """

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
    """Faults of the environment's `score_group`, which scores all answers to a task together.

    Attributes (see envs/audit/groups.py):
        groups: how many groups of answers were scored.
        not_ahead: ids of tasks on which a degenerate answer earned as much as the reference answer.
        moved: ids of tasks on which another order of the answers changed a reward.
        failed: ids of tasks on which scoring failed.
    """

    groups: int = 0
    not_ahead: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class Audit(Record):
    """The reward audit of an environment version (envs/audit/reward_audit.py).

    A field with a default is missing in files of older releases.

    Attributes:
        verdict: ok, warn or risk; "" if no audit was made.
        headline: the verdict in a sentence with its numbers.
        risks, weaknesses: names of probes, and other faults.
        separability: kind of nearly right answer -> share of rows on which the reference answer
            earns more.
        rows_scored, rows, share: how many rows were scored, of how many, and that share.
        gold_failing: ids of tasks whose reference answer fails.
        score_seconds_p95: the 95th percentile of the seconds that a score takes.
        judge: mean use of judges (models that score) for one score (envs/metering/judge_calls.py);
            empty if no judge was asked.
        secrets_unset: names of secrets that were not set when the audit was made; None if the file
            does not say.
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
        """Return the JSON object of audit.json: only the keys that the file has, without defaults
        for the others."""
        return self.model_dump(mode="json", exclude_unset=True)
