"""`result.json` of a run that is done, written by its worker as the last file. The result of a
probe says what a model's samples mean for training it by GRPO on these tasks."""

from pydantic import Field

from engine.core.files import JsonObject
from engine.records.record import Record


class Measured(Record):
    """The time and memory of a training run, for people and for later estimates.

    Attributes:
        seconds: part of the run -> seconds: train_s, sample_s, reward_s, exam_s (evaluations),
            save_s and others.
        peak_memory: bytes on the device.
        said_share: mean tokens of an episode, as a multiple of max_tokens; None if no episode was
            played.
        turns_mean: mean assistant turns of an episode.
        effective_share: mean share of the groups (completions of one task) whose rewards differ;
            None unless the algorithm is GRPO.
    """

    seconds: dict[str, float]
    peak_memory: float
    said_share: float | None = None
    turns_mean: float | None = None
    effective_share: float | None = None


class RunResult(Record):
    """The fields that all readers of a result.json need.

    Attributes:
        verdict: "better", "worse", "no_difference", "inconclusive" or "unknown".
        summary: the result in a sentence.
        steps: how many optimizer steps a training run made; fewer than planned if it stopped early.
            None for any other run.
        best_step, best_score: the step and the score of the best checkpoint of a training run, by
            the held-out tasks that choose it; None if there are none.
        measured: the time and memory of a training run; None for any other run, and in files of
            versions up to 0.1.0.
        evidence: what the verdict rests on (engine.evidence.verdict).
    """

    verdict: str = "unknown"
    summary: str = ""
    steps: int | None = None
    best_step: int | None = None
    best_score: float | None = None
    measured: Measured | None = None
    evidence: JsonObject | None = None


class Advice(Record):
    """Advice on one thing to change before a run.

    Attributes:
        lever: the name of the setting or the choice to change.
        say: a sentence that says how to change it.
    """

    lever: str
    say: str


class FailedScores(Record):
    """How many scores failed (`failed`) of all scores (`of`)."""

    failed: int
    of: int


class AnswerLengths(Record):
    """The median and 95th percentile of the tokens of sampled answers, and the limit."""

    p50: int
    p95: int
    max_tokens: int


class ProbeResult(Record):
    """What a model's samples say about training it by GRPO. A group is the answers to one task.

    A field with a default is missing in older files.

    Attributes:
        tasks, samples_per_task: how many tasks were asked, and how often each.
        effective: share of the groups whose rewards differ; only such groups teach anything.
        too_easy, too_hard: share of the groups with only right answers, and with none.
        intervals: name of one of these three shares -> its 95 % interval, [low, high].
        pass_at_k: k -> chance that at least one of k answers is right.
        gradient_share: group size -> expected share of groups whose rewards differ.
        solved_counts: for each task, the number of right answers.
        truncated_share: share of the answers that were cut at max_tokens.
        error_share: share of the scores that failed.
        distinct_share: mean share of different answers in a group.
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


# The name of the event of a smoke run (a trial of two steps) that says: the steps are done, and the
# saved adapter is read back.
SMOKE_SAVED = "smoke_saved"


class SmokeStep(Record):
    """One optimizer step of a smoke run (a trial of two steps).

    Attributes:
        loss: the loss before the update; None if the algorithm has no such metric.
        reward_mean: mean reward of the step's completions; None if the algorithm samples none.
        grad_norm: norm of the gradient before clipping; 0 if nothing could change the policy.
        seconds: time for sampling, scoring and training, without evaluations and checkpoints.
    """

    step: int
    loss: float | None = None
    reward_mean: float | None = None
    grad_norm: float
    seconds: float


class SmokeResult(Record):
    """The result of a smoke run (a trial of two steps).

    Attributes:
        rows: the most train rows that were used.
        loss_before, loss_after: mean loss on these rows before the first update, and after the last
            update with the adapter as it was read back; None if losses cannot be compared.
        peak_memory: bytes on the device.
        finite: whether every gradient was a finite number.
        updated: whether a step changed the adapter. A step of GRPO may change nothing, if all
            rewards of a group are equal.
        adapter_bytes: bytes of the saved adapter, which was read back and loaded again.
    """

    rows: int
    steps: list[SmokeStep]
    loss_before: float | None = None
    loss_after: float | None = None
    peak_memory: float
    finite: bool
    updated: bool
    adapter_bytes: int
