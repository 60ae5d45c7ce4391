"""Why a run went as it did: what all detectors find in its files, ranked, each with one lever.

Without findings the result says what was looked at. Texts in examples come from a model and an
environment; they are cleaned, and secrets in them are hidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.core.files import read_object
from engine.core.format import counted, words
from engine.core.hints import Call
from engine.core.reply import BODY_CHARS, Reply
from engine.evidence.detect.alerts import open_alerts, training_rows
from engine.evidence.detect.baseline import (
    against_start,
    fall_of_the_start,
    first_exam,
    gold_tokens,
)
from engine.evidence.detect.detectors import find_all, not_judged
from engine.evidence.detect.examples import Example, Examples
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.views import Facts, Failure, TrainingRows, View, view_of
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.power import split_rows
from engine.evidence.stats.results import VALIDATION, damaged_answers_warning, in_half
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.regression import again_with_keep
from engine.evidence.verdict.row_facts import read_row_facts
from engine.evidence.verdict.verdict import Verdict, run_verdict
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, json_chars, redactor_for
from engine.home.store import Store
from engine.records.known_settings import KnownSettings
from engine.records.lines.curves import load_metrics
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.event import read_events
from engine.records.lines.trajectory_record import read_trajectories
from engine.records.run_config import EvaluateConfig, RegradeConfig, RunConfig

_CAP_KINDS = ("budget", "timeout")  # failures that are the end of what a run may take
_ROLLOUT_BYTES = 24_000_000  # of rollouts read at most; beyond it steps are left out evenly


@dataclass(frozen=True)
class ShownFinding:
    """A finding as a result shows it: redacted, with example rollouts."""

    finding: Finding
    what: str
    evidence: Mapping[str, object]
    examples: Sequence[Example]

    def to_json(self) -> dict[str, object]:
        """The finding as a JSON object: what was observed, its numbers, the change to try next."""
        return {
            "id": self.finding.id,
            "severity": self.finding.severity,
            "what": self.what,
            "evidence": dict(self.evidence),
            "lever": self.finding.lever.to_json(),
            "playbook": self.finding.playbook,
            "examples": [example.to_json() for example in self.examples],
        }


@dataclass(frozen=True)
class LookedAt:
    """How much of a run the detectors read; `last_step` is 0 without steps.

    Except for `last_step` all are counts.
    """

    steps: int
    last_step: int
    rollouts: int
    evaluations: int

    def to_json(self) -> dict[str, object]:
        """The counts as JSON, by field name."""
        return {
            "steps": self.steps,
            "last_step": self.last_step,
            "rollouts": self.rollouts,
            "evaluations": self.evaluations,
        }


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, root causes first, and what was looked at."""

    summary: str
    run_id: str
    state: str
    findings: Sequence[ShownFinding]
    looked_at: LookedAt
    not_judged: Sequence[str]
    warnings: Sequence[str]
    next_calls: Sequence[Call]

    def to_json(self) -> Reply:
        """The diagnosis as a JSON object, which the tool replies with."""
        return {
            "summary": self.summary,
            "run_id": self.run_id,
            "state": self.state,
            "findings": [finding.to_json() for finding in self.findings],
            "looked_at": self.looked_at.to_json(),
            "not_judged": list(self.not_judged),
            "warnings": list(self.warnings),
            "next": [call.to_json() for call in self.next_calls],
        }


def diagnose(home: Home, run_id: str) -> Reply:
    """The ranked findings on a run in any state, and what could not be judged.

    Each finding has `id`, `severity`, `what`, `evidence`, `lever`, `playbook` and `examples`
    (rollouts, with how to read them in full). Examples are dropped where the reply would become too
    long. Raises UserError RUN_NOT_FOUND or ENV_SEALED.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return _within_limit(_diagnosis(home.run(row.run_id), row)).to_json()


def _diagnosis(run: RunDir, row: RunRow) -> Diagnosis:
    """The findings on a run with all their examples, which may be too long for a reply."""
    config = run.find_config()  # None for a damaged config: the run is diagnosed all the same
    refuse_if_of_sealed(config, "what went wrong would show its tasks")
    redact = redactor_for(run.home, config.env_dir if config else None)
    facts = facts_of(run, row, config)
    findings = find_all(facts)
    examples = Examples(run, facts.algorithm, last_exam(run), redact)
    return Diagnosis(
        summary=_summary(run, row, facts, findings),
        run_id=row.run_id,
        state=row.state,
        findings=[_shown_finding(finding, examples, redact) for finding in findings],
        looked_at=_looked_at(facts),
        not_judged=not_judged(facts),
        warnings=[*damaged_answers_warning(run), *_warnings(row, facts)],
        next_calls=_next_calls(row, findings, examples.step, again=_again(facts, findings, config)),
    )


def _again(facts: Facts, findings: Sequence[Finding], config: RunConfig | None) -> Sequence[Call]:
    """The call that trains the run again with `keep`, where that is the change to try first."""
    if not findings or findings[0].lever.setting != "keep":
        return []
    return again_with_keep(config, facts.kept_skills)


def _within_limit(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis within the size limit of a reply.

    Examples are dropped one by one, beginning with the last example of the last finding. A
    diagnosis without examples is returned whatever its size.
    """
    while json_chars(diagnosis.to_json()) > BODY_CHARS:
        findings = list(diagnosis.findings)
        with_examples = [index for index, finding in enumerate(findings) if finding.examples]
        if not with_examples:
            break
        last_index = with_examples[-1]
        last = findings[last_index]
        findings[last_index] = replace(last, examples=last.examples[:-1])
        diagnosis = replace(diagnosis, findings=findings)
    return diagnosis


def facts_of(run: RunDir, row: RunRow, config: RunConfig | None) -> Facts:
    """Everything the detectors read, from the files of a run.

    `config` is the run's, None where its file is damaged. Raises DamagedRecord for any other
    damaged file.
    """
    rows_asked, split = _rows_and_split(config)
    # Of an evaluation the number of rows is an argument, not a setting. It is added to the settings
    # because the advice of a finding may be to raise it.
    settings = replace(KnownSettings.of(config.settings if config else None), rows=rows_asked)
    is_training = row.kind == "train"
    views = _views(run, config, settings, is_training=is_training)
    exam_rows = last_exam(run)  # the answers of the last held-out evaluation
    verdict = run_verdict(run) if row.state == "done" else None
    facts = Facts(
        algorithm=row.algorithm if is_training else "evaluate",
        settings=settings,
        lines=load_metrics(run.metrics).lines,
        views=views,
        exam=view_of(step=0, rows=exam_rows, settings=settings),  # its step is not used
        exam_tasks=_count_validation_tasks(exam_rows),
        training_rows=_last_training_rows(run),
        failure=_failure(run, row),
        rescoring=rescored(run),
        heldout_rows=split_rows(run.home, row.env_id, split),
        dev_tasks=bool(split_rows(run.home, row.env_id, "dev")),
    )
    if is_training:
        facts = _with_start(facts, run)
    return _with_verdict(facts, verdict) if verdict else facts


def _views(
    run: RunDir, config: RunConfig | None, settings: KnownSettings, *, is_training: bool
) -> list[View]:
    """The answers of a run in numbers: a view for each training step, or one for an evaluation."""
    if is_training:
        return _training_views(run, settings)
    return _evaluation_views(run, config, settings)


def _count_validation_tasks(rows: Sequence[EvaluationRow]) -> int:
    """How many tasks have rows, of the half by which a run chooses its checkpoint.

    Without halves all tasks count.
    """
    validation_rows = in_half(rows, VALIDATION) or rows
    return len({row.task for row in validation_rows})


def _with_start(facts: Facts, run: RunDir) -> Facts:
    """The facts of a training run, with what is known of its start and its reference answers."""
    return replace(
        facts,
        exam_start=first_exam(run, facts.settings),
        against_start=against_start(run),
        gold_tokens=gold_tokens(run),
        rows=read_row_facts(run),
        alerts=open_alerts(run),
        fall_of_the_start=fall_of_the_start(run),
    )


def _with_verdict(facts: Facts, verdict: Verdict) -> Facts:
    """The facts of a finished run, with what its verdict says."""
    return replace(
        facts,
        comparison=verdict.comparison,
        recommended_model=verdict.training.go_on_with if verdict.training else "",
        kept_skills=verdict.kept_skills,
    )


def _rows_and_split(config: RunConfig | None) -> tuple[int | None, str]:
    """How many rows an evaluation was to ask, and of which split; (None, "heldout") for others."""
    if isinstance(config, EvaluateConfig | RegradeConfig):
        return config.rows, config.split
    return None, "heldout"


def _failure(run: RunDir, row: RunRow) -> Failure | None:
    """How the run failed, None in any other state."""
    if row.state != "failed":
        return None
    evidence = read_object(run.failure).get("evidence")
    return Failure(
        kind=row.reason_kind or "", message=row.reason or "", evidence=str(evidence or "")
    )


def _last_training_rows(run: RunDir) -> TrainingRows:
    """The counts of the last `data` event; zeros without one."""
    events = [event for event in read_events(run.events) if event.event == "data"]
    return training_rows(events[-1]) if events else TrainingRows()


def _training_views(run: RunDir, settings: KnownSettings) -> list[View]:
    """The views (answers in numbers) of the steps that `_chosen_steps` selects."""
    views = []
    for step in _chosen_steps(run):
        view = view_of(step, read_trajectories(run.rollouts(step)), settings)
        if view is not None:
            views.append(view)
    return views


def _chosen_steps(run: RunDir) -> list[int]:
    """The first and the last steps, and as many steps in between as the byte limit allows.

    Steps in between are chosen at even distances.
    """
    steps = run.rollout_steps()
    # Detectors compare the last steps with the first; of the last, twice as many are read.
    always_read = {*steps[: limits.WINDOW], *steps[-2 * limits.WINDOW :]}
    middle_steps = [step for step in steps if step not in always_read]
    if not middle_steps:
        return sorted(always_read)
    bytes_left = max(0, _ROLLOUT_BYTES - _bytes_of_steps(run, always_read))
    mean_bytes = max(1, _bytes_of_steps(run, middle_steps) // len(middle_steps))
    count = min(len(middle_steps), bytes_left // mean_bytes)
    return sorted(always_read | _evenly_chosen(middle_steps, count))


def _bytes_of_steps(run: RunDir, steps: Iterable[int]) -> int:
    """The bytes of the rollouts of all these steps."""
    return sum(_rollout_bytes(run, step) for step in steps)


def _evenly_chosen(steps: Sequence[int], count: int) -> set[int]:
    """`count` of the steps, at even distances; none for 0."""
    return {steps[i * len(steps) // count] for i in range(count)}


def _rollout_bytes(run: RunDir, step: int) -> int:
    """The bytes of a step's rollouts, 0 where the file is missing."""
    try:
        return run.rollouts(step).stat().st_size
    except OSError:
        return 0


def _evaluation_views(run: RunDir, config: RunConfig | None, settings: KnownSettings) -> list[View]:
    """The figures on an evaluation's answers: one `View`, of the last model that has answers.

    Where no model has any, the views of the rollouts: a probe (samples taken before a run) writes
    rollouts instead.
    """
    model_count = len(config.model_refs) if config else 0
    for index in reversed(range(model_count)):
        view = view_of(step=0, rows=read_evaluation(run.model_evals(index)), settings=settings)
        if view is not None:
            return [view]
    return _training_views(run, settings)


def last_exam(run: RunDir) -> Sequence[EvaluationRow]:
    """The answers of the last held-out evaluation after step 0 that sampled any; else empty."""
    later_steps = [step for step in run.eval_steps() if step > 0]
    for step in reversed(later_steps):
        rows = read_evaluation(run.evals(step))
        # Where only the loss was measured, rows have no completion.
        answered_rows = [row for row in rows if row.completion is not None]
        if answered_rows:
            return answered_rows
    return []


def _shown_finding(finding: Finding, examples: Examples, redact: Redactor) -> ShownFinding:
    """The finding with its texts redacted, and its examples (`examples` redacts those itself)."""
    return ShownFinding(
        finding,
        what=redact.text(finding.what),
        evidence=redact.value(finding.numbers),
        examples=examples.of(finding),
    )


def _looked_at(facts: Facts) -> LookedAt:
    """Count what the detectors could read: steps, rollouts, and steps with an evaluation.

    `last_step` is 0 before the first step.
    """
    # Step 0 is the evaluation before training, not a step.
    steps = [line["step"] for line in facts.lines if line.get("step", 0) > 0]
    evaluated_steps: set[int] = set()
    for name in ("heldout_success", "heldout_reward", "heldout_loss"):
        evaluated_steps |= {step for step, _ in facts.curve(name)}
    return LookedAt(
        steps=len(steps),
        last_step=steps[-1] if steps else 0,
        rollouts=sum(view.answer_count for view in facts.views),
        evaluations=len(evaluated_steps),
    )


def _summary(run: RunDir, row: RunRow, facts: Facts, findings: Sequence[Finding]) -> str:
    """The findings in a sentence, or that the files of the run were deleted.

    A second sentence names the model to go on with where training did not improve on the start.
    """
    if run.deleted.exists():
        return f"{row.run_id} is {row.state}; its files were deleted."
    if findings:
        summary = _findings_sentence(row, findings)
    else:
        summary = _no_findings_sentence(row, facts)
    if facts.recommended_model:  # the verdict names one only where the start was not beaten
        summary += f" The start was not beaten: go on with {facts.recommended_model}."
    return summary


def _findings_sentence(row: RunRow, findings: Sequence[Finding]) -> str:
    """The first finding with the change to try, and the ids of the others; at least one exists."""
    first, *others = findings
    text = f"{row.run_id}: {first.id}. {first.what} Try: {first.lever.words()}."
    if others:
        text += f" Also: {', '.join(finding.id for finding in others)}."
    return text


def _no_findings_sentence(row: RunRow, facts: Facts) -> str:
    """That nothing was found, or that nothing explains the failure, and how much was looked at."""
    looked_at = _looked_at(facts)
    extent = f"{counted(looked_at.steps, 'step')}, {counted(looked_at.rollouts, 'rollout')}"
    if facts.failure_kind in _CAP_KINDS:
        planned = f" of {facts.settings.steps}" if facts.settings.steps else ""
        return (
            f"{row.run_id} was ended by a cap and not by a fault: {row.reason}. "
            f"{counted(looked_at.steps, 'step')}{planned} were done in {words(row.spent_hours)}; "
            f"nothing is wrong in them ({extent} looked at)."
        )
    if facts.failure_kind:
        return (
            f"{row.run_id} failed ({facts.failure_kind}); no detector explains it "
            f"({extent} looked at): read the error."
        )
    if not looked_at.steps and not looked_at.rollouts:
        return f"{row.run_id} is {row.state} and has left nothing to diagnose yet."
    extent += f", {counted(looked_at.evaluations, 'evaluation')}"
    return f"Nothing found in {row.run_id} ({extent} looked at)."


def _warnings(row: RunRow, facts: Facts) -> list[str]:
    """A warning for a run that is going on and has too few steps for most detectors; else []."""
    step_count = _looked_at(facts).steps
    if row.state in TERMINAL or not facts.lines or step_count >= limits.WINDOW:
        return []
    return [
        f"{step_count} steps are few: most detectors need {limits.LEAST} to {limits.TREND_STEPS}."
    ]


def _next_calls(
    row: RunRow, findings: Sequence[Finding], step: int, again: Sequence[Call] = ()
) -> list[Call]:
    """The calls that make the change of the first finding where one does (`again`), show rollouts
    of it and what the playbook says about it.

    Without findings: the call that goes on with a run that a cap has ended, or reads the error of
    one that failed otherwise. Of a run that goes on the last one waits on. `step` is the step of
    the example rollouts, -1 where there are none.
    """
    if not findings and row.state == "failed" and row.reason_kind in _CAP_KINDS and row.hint.call:
        return [row.hint.call]
    if not findings:
        read_error = Call("read_logs", {"run_id": row.run_id, "view": "error"})
        return [read_error] if row.state == "failed" else row.wait_calls
    first = findings[0]
    # Three calls are shown: of a run that goes on the playbook gives way to the wait.
    last = row.wait_calls or [Call("read_playbook", {"section": first.playbook})]
    if not first.pick:  # rollouts do not show the finding
        return [*again, *last]
    return [*again, _rollouts_call(row.run_id, first, step), *last]


def _rollouts_call(run_id: str, finding: Finding, step: int) -> Call:
    """The call that reads the rollouts of a finding; `step` is theirs, -1 where there is none."""
    arguments: dict[str, object] = {"run_id": run_id, "pick": finding.pick}
    # "changed" shows held-out answers, to which the training step and the filter do not apply.
    if finding.pick != "changed":
        if step >= 0:
            arguments["step"] = step
        if finding.where:
            arguments["where"] = finding.where
    return Call("read_rollouts", arguments)
