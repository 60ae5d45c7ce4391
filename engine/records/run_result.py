"""`result.json` of a run that is done: what its worker concluded, written once, last."""

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
        best_step, best_score: the checkpoint that the selecting half of the held-out tasks
            prefers; of a training run alone, the score where one was played.
        measured: of a training run alone, and not in files of versions up to 0.1.0.
        evidence: what the verdict rests on, as engine.evidence.verdict spells it.
    """

    verdict: str = "unknown"
    summary: str = ""
    best_step: int | None = None
    best_score: float | None = None
    measured: Measured | None = None
    evidence: JsonObject | None = None
