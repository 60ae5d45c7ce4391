"""`result.json` of a run that is done: what its worker concluded, written once, last. A probe has
one of its own kind: what a model's samples say about training it by GRPO on these tasks."""

from pydantic import Field

from engine.core.files import JsonObject
from engine.records.record import Record


class Measured(Record):
    """What a training run took, for people and for later estimates.

    Attributes:
        seconds: by part: train_s, sample_s, reward_s, exam_s, save_s and others.
        peak_memory: bytes on the device.
        said_share: mean tokens of an episode in multiples of max_tokens; None where none was
            played.
        turns_mean: mean assistant turns of an episode.
        effective_share: mean share of the groups whose rewards differ; GRPO alone.
    """

    seconds: dict[str, float]
    peak_memory: float
    said_share: float | None = None
    turns_mean: float | None = None
    effective_share: float | None = None


class RunResult(Record):
    """What every reader of a result needs.

    Attributes:
        steps: of a training run alone: the optimizer steps it did; fewer than planned where it
            stopped early.
        best_step, best_score: the checkpoint that the selecting half of the held-out tasks
            prefers; of a training run alone, the score where one was played.
        measured: of a training run alone, and not in files of versions up to 0.1.0.
        evidence: what the verdict rests on, as engine.evidence.verdict spells it.
    """

    verdict: str = "unknown"
    summary: str = ""
    steps: int | None = None
    best_step: int | None = None
    best_score: float | None = None
    measured: Measured | None = None
    evidence: JsonObject | None = None


class Advice(Record):
    """One thing to change before a run: the `lever` by name, and a sentence that says how."""

    lever: str
    say: str


class FailedScores(Record):
    """How many scores failed, of how many."""

    failed: int
    of: int


class AnswerLengths(Record):
    """Tokens of the sampled answers, and how many an answer was allowed."""

    p50: int
    p95: int
    max_tokens: int


class ProbeResult(Record):
    """A group is the answers to one task. What has a default is missing in older files.

    Attributes:
        tasks, samples_per_task: how much was sampled.
        effective: share of the groups whose rewards differ: those that teach.
        too_easy, too_hard: shares of the groups with every answer right, or none.
        intervals: 95 % intervals of these three shares, [low, high].
        pass_at_k: chance that one of k answers is right, by k.
        gradient_share: expected share of groups that teach, by group size.
        solved_counts: right answers per task.
        truncated_share: of the answers, cut at max_tokens.
        error_share: of the scores, failed.
        distinct_share: different answers in a group, as a share of it.
    """

    tasks: int = 0
    samples_per_task: int = 0
    effective: float
    too_easy: float
    too_hard: float
    intervals: dict[str, list[float]] = Field(default_factory=dict)
    pass_at_k: dict[str, float]
    gradient_share: dict[str, float] = Field(default_factory=dict)
    solved_counts: list[int] = Field(default_factory=list)
    reward_mean: float | None = None
    truncated_share: float
    error_share: float
    failed_scores: FailedScores | None = None
    distinct_share: float | None = None
    length: AnswerLengths | None = None
    advice: list[Advice] = Field(default_factory=list)
    summary: str = ""


SMOKE_SAVED = "smoke_saved"  # the event after the steps, before the adapter is read back


class SmokeStep(Record):
    """One optimizer step.

    Attributes:
        loss: before the step's update; None under an algorithm that has no such metric.
        reward_mean: of the step's completions; None under an algorithm that samples none.
        grad_norm: before clipping; 0 where nothing could move the policy.
        seconds: sampling, scoring and training, without evaluations and checkpoints.
    """

    step: int
    loss: float | None = None
    reward_mean: float | None = None
    grad_norm: float
    seconds: float


class SmokeResult(Record):
    """What the two steps came to.

    Attributes:
        rows: train rows at most that were used.
        loss_before, loss_after: mean loss on the rows before the first update and after the last,
            the latter with the adapter as it was read back; None where no loss can be compared.
        peak_memory: bytes on the device.
        finite: whether every gradient was a finite number.
        updated: whether a step moved the adapter; GRPO has steps without a difference of rewards.
        adapter_bytes: of the saved weights, which were read back and put on the base again.
    """

    rows: int
    steps: list[SmokeStep]
    loss_before: float | None = None
    loss_after: float | None = None
    peak_memory: float
    finite: bool
    updated: bool
    adapter_bytes: int
