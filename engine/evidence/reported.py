"""The one number to report of a trained model, measured on tasks that did not choose its
checkpoint.

A run has several held-out numbers. Its curve is measured on the tasks that chose the checkpoint,
which flatters the checkpoint. Its verdict, and later evaluations of that checkpoint on the same
version of the environment, are measured on tasks that chose nothing. Of those, the number to report
is the one on the most tasks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.core.files import read_object
from engine.core.reply import Reply
from engine.evidence.stats.results import Level, Measure, level, measure_of, show
from engine.evidence.verdict.side_notes import ConstantAnswer, audit_risk, constant_answer
from engine.evidence.verdict.sides import evaluated_models, is_same_checkpoint, training_sides
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.known_settings import KnownSettings
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import EvaluateConfig, RunConfig, TrainConfig

_LOOK_BACK = 300  # newest evaluation runs that are searched for the model
_OF = "held-out tasks that did not choose the checkpoint"


@dataclass(frozen=True)
class ReportedNumber:
    """The number to report of a training run's result.

    Attributes:
        model: the checkpoint, such as "r-1@best".
        level: the mean over tasks with its 95 % interval.
        measured_in: id of the run whose answers were scored: the training run, or an evaluation.
        curve: the score on the tasks that chose the checkpoint; None if it is not known.
        audit: "risk" if the reward audit of the environment failed, else "".
        answers: the answers that were scored.
        config: the training run's.
    """

    model: str
    level: Level
    measured_in: str
    curve: float | None
    audit: str
    answers: Sequence[EvaluationRow] = field(repr=False)
    config: TrainConfig = field(repr=False)

    @cached_property
    def constant(self) -> ConstantAnswer | None:
        """The one answer to all tasks that would do as well; None if the model beats it. Read from
        the file of tasks, which may be large, so only for what shows it."""
        success = self.level if self.measure == "success" else None
        return constant_answer(self.answers, success, self.config)

    @property
    def measure(self) -> Measure:
        """What was measured: "success", "reward" or "loss"."""
        return self.level.measure

    @property
    def sentence(self) -> str:
        """The number in words, such as "Report of r-1@best: success 14.0 % (95 % interval 8.5 % to
        22.1 %) on 100 held-out tasks that did not choose the checkpoint (curve 22.0 %: chose the
        checkpoint)."."""
        level = show(self.level.value, self.measure)
        low, high = show(self.level.low, self.measure), show(self.level.high, self.measure)
        curve = ""
        if self.curve is not None:
            curve = f" (curve {show(self.curve, self.measure)}: chose the checkpoint)"
        risk = "; the reward audit says risk: a score may not mean right" if self.audit else ""
        rival = f" {self.constant.sentence}" if self.constant else ""
        return (
            f"Report of {self.model}: {self.measure} {level} (95 % interval {low} to {high}) on "
            f"{self.level.tasks} {_OF}{curve}{risk}.{rival}"
        )

    def to_json(self) -> Reply:
        """The number as a JSON object, with the tasks that it was measured on. `groups`, `curve`,
        `audit` and `constant_answer` are left out if there are none."""
        body: Reply = {
            "model": self.model,
            "metric": self.measure,
            "value": self.level.rounded_value,
            "interval": self.level.interval,
            "tasks": self.level.tasks,
            "of": _OF,
            "measured_in": self.measured_in,
        }
        if self.level.groups:
            body["groups"] = self.level.groups
        if self.curve is not None:
            body["curve"] = {"value": self.curve, "of": "tasks that chose the checkpoint"}
        if self.audit:
            body["audit"] = self.audit
        if self.constant:
            body["constant_answer"] = self.constant.to_json()
        return body


def number_to_report(home: Home, store: Store, row: RunRow) -> ReportedNumber | None:
    """The number to report of a training run's result. Of the run's own final evaluation and all
    later evaluations of its checkpoint, it is the one on the most tasks.

    Returns None for a run that trains nothing, or if no checkpoint was evaluated on tasks that did
    not choose it. Raises DamagedRecord if a file of a run cannot be read; the error names it.
    """
    run = home.run(row.run_id)
    config = run.find_config()
    if not isinstance(config, TrainConfig):
        return None
    sides = training_sides(run)
    measure = measure_of(sides.before, sides.after) if sides else None
    if sides is None or measure is None or not sides.after:
        return None
    number = ReportedNumber(
        model=f"{run.id}@best",
        level=level(sides.after, measure),
        measured_in=run.id,
        curve=_score_that_chose(run, measure),
        audit=audit_risk(config),
        answers=sides.after,
        config=config,
    )
    for evaluation_id, rows in _comparable_evaluations(home, store, run, config):
        if measure_of(rows) != measure:
            continue
        later_level = level(rows, measure)
        if later_level.tasks > number.level.tasks:
            number = replace(number, level=later_level, measured_in=evaluation_id, answers=rows)
    return number


def _comparable_evaluations(
    home: Home, store: Store, run: RunDir, config: TrainConfig
) -> Iterator[tuple[str, Sequence[EvaluationRow]]]:
    """Yield (run id, rows) of the later evaluations that can be compared with a training run's own.

    Each asked the run's best checkpoint greedily (one attempt) on the held-out tasks of the run's
    environment, with the same limits on an answer as the run's own evaluations.
    """
    own_limits = _answer_limits(config, read_object(run.manifest).get("eval_sampling"))
    for row in store.list_runs(_LOOK_BACK, states=["done"], kind="evaluate"):
        if row.env_id != config.env_id:
            continue
        evaluation = home.run(row.run_id)
        evaluation_config = evaluation.find_config()
        if not isinstance(evaluation_config, EvaluateConfig) or not _is_plain(evaluation_config):
            continue
        if evaluation.deleted.exists() or _answer_limits(evaluation_config) != own_limits:
            continue
        asked_runs = {ref.partition("@")[0] for ref in evaluation_config.model_refs}
        if run.id not in asked_runs:
            continue
        for ref, rows in evaluated_models(evaluation, evaluation_config).items():
            if is_same_checkpoint(home, f"{run.id}@best", ref):
                yield row.run_id, rows


def _is_plain(config: EvaluateConfig) -> bool:
    """Whether an evaluation asked held-out tasks in their order, one attempt each. One attempt is
    sampled greedily by default."""
    return config.split == "heldout" and config.attempts == 1 and not config.task_indices


def _answer_limits(config: RunConfig, recorded: object = None) -> tuple[object, ...]:
    """What bounds an answer: (max tokens, max turns, whether the model thinks before it answers).

    `recorded` is the JSON object `eval_sampling` of the run's manifest. A limit that is missing
    there is taken from the run's settings.
    """
    settings = KnownSettings.of(config.settings)
    sampling = recorded if isinstance(recorded, dict) else {}
    max_tokens = sampling.get("max_tokens", settings.max_tokens)
    max_turns = sampling.get("max_turns", settings.max_turns)
    thinks = bool(sampling.get("thinking", settings.thinking))
    return max_tokens, max_turns, thinks


def _score_that_chose(run: RunDir, measure: Measure) -> float | None:
    """The score of the best checkpoint on the tasks that chose it, as the worker recorded it.
    Returns None if none was recorded, and for a loss, which the worker records as a negative
    number."""
    score = read_object(run.result).get("best_score")
    if measure == "loss" or not isinstance(score, int | float):
        return None
    return round(float(score), 4)
