"""Did the run get better? One word per run, computed from the files it left.

Before is step 0: the starting point, evaluated on the same tasks in the same way. After is the
best checkpoint, chosen on the validation half of the held-out tasks; the verdict is computed on
the test half only, so the choice cannot flatter it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.hints import Call
from engine.evidence.bases.bases import base_warnings
from engine.evidence.judges.trust import judge_refusal, judge_sentences
from engine.evidence.robustness.probe_calls import probe_calls
from engine.evidence.robustness.robustness import Robustness, remarks_on, robustness_of
from engine.evidence.stats.inference import PairedVerdict
from engine.evidence.stats.results import (
    Level,
    Measure,
    damaged_answers_warning,
    level,
    levels_of_metrics,
    measure_of,
    show,
)
from engine.evidence.verdict.comparison import (
    Comparison,
    calls_for_errors,
    compare_rows,
    correct_for_many,
    notes_on_counting,
    sentence,
    without_evidence,
)
from engine.evidence.verdict.contamination import contamination_warnings, taught_tasks
from engine.evidence.verdict.flips import Flips, flips_of
from engine.evidence.verdict.fresh_scores import warnings as rescored_warnings
from engine.evidence.verdict.holdout_reuse import (
    HoldoutUse,
    evaluations_of_pair,
    holdout_use,
    pair_warnings,
    reuse_warning,
)
from engine.evidence.verdict.lineage import better_start
from engine.evidence.verdict.regression import (
    KeptSkills,
    calls_with_larger_keep,
    kept_skills,
    loss_sentences,
    skill_sentences,
)
from engine.evidence.verdict.side_notes import (
    ConstantAnswer,
    audit_sentences,
    calls_to_go_on,
    constant_answer,
    expectation_of,
    missing_score_sentences,
    no_halves_warning,
    note_on_tasks_needed,
    rival_constant,
    sentences_on,
    target_sentences,
    tie_sentences,
)
from engine.evidence.verdict.sides import (
    Sides,
    evaluated_models,
    reason_for_missing_rows,
    tasks_left_out_sentence,
    training_sides,
)
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, redactor_for
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import AskingConfig, LearningConfig, RunConfig

_MOST_COMPARISONS = 8  # that a result shows, in the order of the models


@dataclass(frozen=True)
class LevelAt:
    """How a training run did at a step.

    `step` is None if no step was evaluated; `level` is None if nothing was scored there.
    """

    step: int | None
    level: Level | None

    def to_json(self) -> dict[str, object]:
        """The step and the fields of its level as one JSON object."""
        return {"step": self.step} | (self.level.to_json() if self.level else {})


@dataclass(frozen=True)
class TrainingFacts:
    """What the verdict of a training run says beside its comparison.

    Attributes:
        half: which half of the held-out tasks is compared; "all" if they have no halves.
        before, after: the levels at step 0 and at the result.
        checkpoints_compared: how many steps after step 0 were evaluated.
        expected: the verdict or target expected at submit; "" if none was.
        as_expected: whether that came true; None without an expectation or a decided verdict.
        go_on_with: the model to continue from if the run did not beat its start, else "".
        holdout_use: how often the held-out tasks were used so far.
        kept_skills: what became of earlier skills; None if they were not asked.
        constant: the one answer to all tasks that would do as well; None if the model beats it.
    """

    half: str
    before: LevelAt
    after: LevelAt
    checkpoints_compared: int
    flips: Flips
    expected: str
    as_expected: bool | None
    go_on_with: str
    holdout_use: HoldoutUse
    kept_skills: KeptSkills | None
    constant: ConstantAnswer | None = None


@dataclass(frozen=True)
class ModelLevel:
    """One model of an evaluation. `level` is None if nothing was scored.

    `metrics` has the levels of the environment's own metrics, each over the tasks that have it.
    """

    model: str
    level: Level | None
    metrics: Mapping[str, Level] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The model with its level and its metrics as a JSON object."""
        body: dict[str, object] = {"model": self.model}
        if self.level:
            body |= self.level.to_json()
        if self.metrics:
            body["metrics"] = {
                name: {"value": level.rounded_value, "interval": level.interval, "n": level.tasks}
                for name, level in self.metrics.items()
            }
        return body


@dataclass(frozen=True)
class ModelComparison:
    """One model of an evaluation (`model`) compared with the first one (`against`)."""

    model: str
    against: str
    comparison: Comparison

    def to_json(self) -> dict[str, object]:
        """The comparison as a JSON object."""
        return {"model": self.model, "against": self.against, **self.comparison.to_json()}


@dataclass(frozen=True)
class EvaluationFacts:
    """What the verdict of an evaluation says beside its comparison.

    Attributes:
        models: the level of each model.
        comparisons: each further model compared with the first.
        main: the comparison that the verdict is about: the model furthest ahead of the first. None
            if fewer than two models were scored.
        flips: the tasks that changed in `main`; None without `main`.
        robustness: how each model did on reworded tasks; () if none were asked.
    """

    models: Sequence[ModelLevel]
    comparisons: Sequence[ModelComparison] = ()
    main: ModelComparison | None = None
    flips: Flips | None = None
    robustness: Sequence[Robustness] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, with warnings and the calls to suggest next.

    `training` is set for a training run, `evaluation` for an evaluation.
    """

    comparison: Comparison
    summary: str
    warnings: Sequence[str]
    next_calls: Sequence[Call]
    training: TrainingFacts | None = None
    evaluation: EvaluationFacts | None = None

    @property
    def word(self) -> str:
        """The verdict in a word: better, worse, no_difference, inconclusive or unknown."""
        return self.comparison.outcome.verdict

    @property
    def kept_skills(self) -> KeptSkills | None:
        """What became of the model's earlier skills; None for an evaluation, or if not measured."""
        return self.training.kept_skills if self.training else None

    @property
    def robustness(self) -> Sequence[Robustness]:
        """How each model of an evaluation did on reworded tasks; () for a training run."""
        return self.evaluation.robustness if self.evaluation else ()

    @property
    def models(self) -> Sequence[ModelLevel]:
        """The level of each model of an evaluation; () for a training run."""
        return self.evaluation.models if self.evaluation else ()

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object, as results and `result.json` hold it."""
        body = self.comparison.to_json()
        if self.training is not None:
            body |= self._training_json(self.training)
        else:
            body |= self._evaluation_json()
            body |= {"summary": self.summary, "warnings": list(self.warnings)}
        return body | {"next": [call.to_json() for call in self.next_calls]}

    def _training_json(self, facts: TrainingFacts) -> dict[str, object]:
        """The part of the result that only training runs have.

        `expected`, `go_on_with` and `kept_skills` are left out if they are empty.
        """
        body: dict[str, object] = {
            "half": facts.half,
            "before": facts.before.to_json(),
            "after": facts.after.to_json(),
            "checkpoints_compared": facts.checkpoints_compared,
            "flips": facts.flips.to_json(),
            "warnings": list(self.warnings),
        }
        if facts.expected:
            body |= {"expected": facts.expected, "as_expected": facts.as_expected}
        if facts.go_on_with:
            body["go_on_with"] = facts.go_on_with
        # "exam_use": how often the held-out tasks, the exam, were used.
        body |= {"summary": self.summary, "exam_use": facts.holdout_use.to_json()}
        if facts.kept_skills:
            body["kept_skills"] = facts.kept_skills.to_json()
        return body

    def _evaluation_json(self) -> dict[str, object]:
        """The part of the result that only evaluations have.

        If fewer than two models were scored, it holds their levels and `robustness` only.
        """
        facts = self.evaluation
        if facts is None:
            return {}
        models = [model.to_json() for model in facts.models]
        probed = [result.to_json() for result in facts.robustness]
        robustness_entry = {"robustness": probed} if probed else {}
        if facts.main is None or facts.flips is None:
            return {"models": models, **robustness_entry}
        return {
            **robustness_entry,
            "before": ModelLevel(facts.main.against, self.comparison.before).to_json(),
            "after": ModelLevel(facts.main.model, self.comparison.after).to_json(),
            "models": models,
            "comparisons": [item.to_json() for item in facts.comparisons],
            "flips": facts.flips.to_json(),
        }


def run_verdict(run_dir: RunDir) -> Verdict:
    """The verdict on a run, from its files alone.

    A training run is compared with its own starting point; an evaluation of several models compares
    each with the first. The verdict is "unknown", with the reason, until both sides were evaluated.
    Raises DamagedRecord if a file cannot be read; the error names it.
    """
    config = run_dir.find_config()  # None if it is missing: the run is judged without it
    redact = redactor_for(run_dir.home, config.env_dir if config else None)
    if isinstance(config, AskingConfig):
        verdict = _with_robustness(
            _evaluation_verdict(run_dir, config, redact),
            robustness_of(run_dir, config, redact, taught_tasks(run_dir)),
        )
    else:
        verdict = _training_verdict(run_dir, config, redact)
    return _unknown_if_judge_refused(verdict, run_dir, config, redact)


def _unknown_if_judge_refused(
    verdict: Verdict, run_dir: RunDir, config: RunConfig | None, redact: Redactor
) -> Verdict:
    """The verdict, with what is to be said of the judge (a model that scores) it rests on; the
    verdict "unknown", with the reason, if that judge may not decide."""
    measure = verdict.comparison.measure
    if config is None or not config.env_dir or verdict.word == "unknown":
        return verdict
    env_dir = Path(config.env_dir)
    refusal = redact.text(judge_refusal(run_dir.home, env_dir, str(measure)))
    if not refusal:
        warnings = map(redact.text, judge_sentences(run_dir, env_dir, str(measure)))
        return replace(verdict, warnings=[*verdict.warnings, *warnings])
    return replace(
        verdict,
        comparison=without_evidence(measure, refusal),
        summary=f"No verdict: {refusal} What it measured: {verdict.summary}",
    )


def _with_robustness(verdict: Verdict, probed: Sequence[Robustness]) -> Verdict:
    """The verdict, with the results on reworded tasks added to its summary, warnings and facts."""
    if not probed or verdict.evaluation is None:
        return verdict
    return replace(
        verdict,
        summary=" ".join([verdict.summary, *(result.sentence for result in probed)]),
        warnings=[*verdict.warnings, *remarks_on(probed)],
        evaluation=replace(verdict.evaluation, robustness=probed),
    )


def _training_verdict(run_dir: RunDir, config: LearningConfig | None, redact: Redactor) -> Verdict:
    """The verdict of a training run: its start (before) compared with its result (after).

    They are compared on held-out tasks that did not choose the checkpoint. Raises DamagedRecord if
    a file cannot be read; the error names it.
    """
    sides = training_sides(run_dir)
    comparison = _compare_sides(sides)
    facts = _training_facts(run_dir, config, sides, comparison, redact)
    # The model that the run started from, if the run is not better; else None.
    start = better_start(run_dir, config, sides.step, comparison.outcome.verdict)
    facts = replace(facts, constant=rival_constant(sides, comparison, config))
    summary_sentences = [
        sentence(comparison, measure_prefix="held-out "),
        *sentences_on(facts.constant),
        *target_sentences(facts.expected, comparison),
        *tie_sentences(sides, comparison),
        *audit_sentences(config),
    ]
    if start is not None:
        facts = replace(facts, go_on_with=start.model)
        summary_sentences.append(start.sentence)
    return Verdict(
        comparison=comparison,
        # `skill_sentences`: what of earlier skills was forgotten, or kept by replaying.
        summary=" ".join([*summary_sentences, *skill_sentences(facts.kept_skills)]),
        warnings=[
            *_warnings_about_answers(run_dir, sides, loss_sentences(facts.kept_skills)),
            *_warnings_about_comparison(sides, comparison, facts, config),
        ],
        next_calls=[
            *calls_to_go_on(run_dir, config, comparison, is_constant=facts.constant is not None),
            *calls_with_larger_keep(config, facts.kept_skills),
            *probe_calls(run_dir, config),
        ],
        training=facts,
    )


def _warnings_about_comparison(
    sides: Sides, comparison: Comparison, facts: TrainingFacts, config: LearningConfig | None
) -> list[str]:
    """One sentence for each thing that weakens the comparison by which a training run is judged."""
    outcome = comparison.outcome
    return [
        *no_halves_warning(sides.half, facts.checkpoints_compared),
        *_cautions(comparison, config, "all" if sides.dev else sides.half),
        *reuse_warning(facts.holdout_use, outcome.verdict, outcome.p),
    ]


def _training_facts(
    run_dir: RunDir,
    config: LearningConfig | None,
    sides: Sides,
    comparison: Comparison,
    redact: Redactor,
) -> TrainingFacts:
    """What the verdict of a training run says beside the comparison of its two sides.

    `go_on_with` (a model to continue from instead) is left "" for the caller to fill in.
    """
    env_id, expected = (config.env_id, config.expect) if config else ("", "")
    return TrainingFacts(
        half=sides.half,
        before=LevelAt(step=0, level=comparison.before),
        after=LevelAt(step=sides.step, level=comparison.after),
        checkpoints_compared=sum(step > 0 for step in run_dir.eval_steps()),
        flips=flips_of(comparison, sides.before, sides.after, redact),
        expected=expected,
        as_expected=expectation_of(expected, comparison),
        go_on_with="",
        holdout_use=holdout_use(run_dir.home, env_id, run_dir.id),
        kept_skills=kept_skills(run_dir),
    )


def _warnings_about_answers(run_dir: RunDir, sides: Sides, forgotten: Sequence[str]) -> list[str]:
    """One sentence for each fault of the answers by which a training run is judged.

    `forgotten` are the sentences on skills that the model lost by training.
    """
    # The answers before training are those of step 0; `sides.step` is None without later ones.
    return [
        *damaged_answers_warning(run_dir, steps=(0, sides.step or 0)),
        *base_warnings(run_dir),
        *contamination_warnings(run_dir),
        *forgotten,
        *rescored_warnings(run_dir),
    ]


def _compare_sides(sides: Sides) -> Comparison:
    """Compare the start of a training run with its result; the verdict is "unknown", with the
    reason, if either has no rows."""
    comparison = compare_rows(sides.before, sides.after)
    reason = reason_for_missing_rows(sides)
    if not reason:
        return comparison
    # This reason says more than the "nothing was scored" of the comparison.
    outcome = PairedVerdict("unknown", reason)
    return Comparison(
        measure=None, outcome=outcome, before=comparison.before, after=comparison.after
    )


def _evaluation_verdict(run_dir: RunDir, config: AskingConfig, redact: Redactor) -> Verdict:
    """The verdict of an evaluation: its first model compared with the one that scored best; of one
    model alone "unknown". Raises DamagedRecord if a file cannot be read."""
    models = evaluated_models(run_dir, config)  # model reference -> its rows
    measure = measure_of(*models.values())
    levels = []
    for ref, rows in models.items():
        mean_level = level(rows, measure) if measure else None
        levels.append(ModelLevel(ref, mean_level, levels_of_metrics(rows)))
    warnings = _warnings_about_evaluation(run_dir, config)
    if len(models) < 2 or measure is None:
        reason = _reason_for_no_comparison(run_dir, model_count=len(models))
        verdict = _verdict_on_levels(run_dir.id, levels, measure, reason, warnings)
        if len(models) == 1 and measure == "success":
            (rows,) = models.values()
            constant = constant_answer(rows, levels[0].level, config)
            verdict = _with_sentences(verdict, sentences_on(constant))
    else:
        verdict = _verdict_on_models(run_dir, config, models, levels, redact)
        verdict = replace(verdict, warnings=[*warnings, *verdict.warnings])
    return _with_sentences(verdict, audit_sentences(config))


def _with_sentences(verdict: Verdict, sentences: Sequence[str]) -> Verdict:
    """The verdict, with these sentences at the end of its summary."""
    return replace(verdict, summary=" ".join([verdict.summary, *sentences]))


def _verdict_on_models(
    run_dir: RunDir,
    config: AskingConfig,
    models: Mapping[str, Sequence[EvaluationRow]],
    levels: Sequence[ModelLevel],
    redact: Redactor,
) -> Verdict:
    """The verdict on at least two scored models: the first compared with the one furthest ahead of
    it.

    `models` maps a model's reference to its rows; `levels` are the mean results of the models. The
    warnings are only those about this comparison, not those about the whole evaluation.
    """
    evaluation_counts = _evaluation_counts(run_dir, config, list(models))
    comparisons = _comparisons_with_first(models, list(evaluation_counts.values()))
    main = max(comparisons, key=lambda item: item.comparison.lead)
    flips = flips_of(main.comparison, models[main.against], models[main.model], redact)
    return Verdict(
        comparison=main.comparison,
        summary=f"{main.model} against {main.against}: {sentence(main.comparison)}",
        warnings=[
            *pair_warnings(evaluation_counts[main.model]),
            *_cautions(main.comparison, config),
        ],
        next_calls=_next_calls_of_evaluation(run_dir.id, main.comparison),
        evaluation=EvaluationFacts(levels, comparisons[:_MOST_COMPARISONS], main=main, flips=flips),
    )


def _warnings_about_evaluation(run_dir: RunDir, config: AskingConfig) -> list[str]:
    """One sentence for each fault of an evaluation's answers, independent of what is compared."""
    warnings = [*damaged_answers_warning(run_dir), *contamination_warnings(run_dir)]
    return [*warnings, *rescored_warnings(run_dir), *tasks_left_out_sentence(run_dir, config)]


def _verdict_on_levels(
    run_id: str,
    levels: Sequence[ModelLevel],
    measure: Measure | None,
    reason: str,
    warnings: list[str],
) -> Verdict:
    """The verdict "unknown" of an evaluation in which nothing can be compared, for `reason`.

    `levels` are its models' results; `measure` is what was measured, None if nothing was scored.
    """
    return Verdict(
        comparison=without_evidence(measure, reason),
        summary=_level_sentence(levels, measure),
        warnings=warnings,
        next_calls=[Call("read_rollouts", {"run_id": run_id})],
        evaluation=EvaluationFacts(levels),
    )


def _evaluation_counts(
    run_dir: RunDir, config: AskingConfig, refs: Sequence[str]
) -> dict[str, int]:
    """How many evaluations tested each model against the first of `refs`, by the reference of that
    model (without the first)."""
    first, *others = refs
    return {
        ref: evaluations_of_pair(run_dir.home, config.env_id, (first, ref), run_ids=(run_dir.id,))
        for ref in others
    }


def _next_calls_of_evaluation(run_id: str, comparison: Comparison) -> list[Call]:
    """The calls that show more of an evaluation; calls on failed scorings come first if those
    decide."""
    error_calls = calls_for_errors(run_id) if comparison.errors_decide else []
    return [
        *error_calls,
        Call("compare_runs", {"ids": [run_id]}),
        Call("read_rollouts", {"run_id": run_id, "pick": "changed"}),
    ]


def _reason_for_no_comparison(run_dir: RunDir, *, model_count: int) -> str:
    """Why an evaluation has no two models to compare. `model_count` is the number of models with
    rows."""
    if model_count > 0:
        return "one model alone has nothing to be better than"
    if taught_tasks(run_dir):  # their rows are left out of every comparison
        return "every task that was scored stands in the training rows"
    return "nothing was scored"


def _comparisons_with_first(
    models: Mapping[str, Sequence[EvaluationRow]], evaluation_counts: Sequence[int]
) -> list[ModelComparison]:
    """Compare every further model with the first one; the p values are corrected.

    `models` maps a model's reference to its rows. `evaluation_counts` holds for each model after
    the first how many evaluations have tested it against the first.
    """
    first, *others = models
    comparisons = [compare_rows(models[first], models[ref]) for ref in others]
    corrected_comparisons = correct_for_many(comparisons, evaluation_counts)
    return [
        ModelComparison(ref, against=first, comparison=comparison)
        for ref, (comparison, _corrected_p) in zip(others, corrected_comparisons, strict=True)
    ]


def _cautions(comparison: Comparison, config: RunConfig | None, half: str = "all") -> list[str]:
    """One sentence for each thing that the reader of a comparison should keep in mind.

    `half` is the half of the held-out tasks that was compared, "all" if they have no halves.
    """
    outcome = comparison.outcome
    notes = [*missing_score_sentences(outcome), *notes_on_counting(comparison)]
    # If failed scorings decide the verdict, more tasks would not settle it.
    if outcome.verdict == "inconclusive" and not comparison.errors_decide:
        notes += note_on_tasks_needed(comparison, half)
    if isinstance(config, LearningConfig) and config.settings.accept_reward_risk:
        notes.append(
            "The reward audit of this environment failed and accept_reward_risk was set: a higher "
            "reward may not mean better answers."
        )
    return notes


def _level_sentence(levels: Sequence[ModelLevel], measure: Measure | None) -> str:
    """The level of the only model of an evaluation as a sentence, for example "pebble: success
    41.2 % on 80 tasks (95 % interval 30.9 % to 52.1 %)."."""
    first = levels[0].level if levels else None
    if measure is None or first is None:
        return "Nothing was scored yet."
    low, high = first.interval
    return (
        f"{levels[0].model}: {measure} {show(first.rounded_value, measure)} on {first.tasks} tasks "
        f"(95 % interval {show(low, measure)} to {show(high, measure)})."
    )
