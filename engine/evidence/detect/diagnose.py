"""Why a run went as it did: the findings of all detectors on its files, ranked, each with one lever
(the change to try).

If there are no findings, the result says what was looked at. Texts in examples come from a model
and an environment; they are cleaned, and secrets in them are hidden.
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
from engine.evidence.robustness.robustness import reworded_better_sentences, robustness_of
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.power import split_rows
from engine.evidence.stats.results import VALIDATION, damaged_answers_warning, in_half
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.regression import calls_with_larger_keep
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

_CAP_KINDS = ("budget", "timeout")  # failures by which a limit on money or time ended the run
_ROLLOUT_BYTES = 24_000_000  # most bytes of rollouts that are read; beyond it steps are skipped


@dataclass(frozen=True)
class ShownFinding:
    """A finding as a result shows it: with secrets redacted, and with example rollouts."""

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
    """How much of a run the detectors read.

    Attributes:
        steps, rollouts, evaluations: counts.
        last_step: the number of the last training step; 0 without steps.
    """

    steps: int
    last_step: int
    rollouts: int
    evaluations: int

    def to_json(self) -> dict[str, object]:
        """The counts as a JSON object, by field name."""
        return {
            "steps": self.steps,
            "last_step": self.last_step,
            "rollouts": self.rollouts,
            "evaluations": self.evaluations,
        }


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, root causes first, and how much of the run was read."""

    summary: str
    run_id: str
    state: str
    findings: Sequence[ShownFinding]
    looked_at: LookedAt
    not_judged: Sequence[str]
    warnings: Sequence[str]
    next_calls: Sequence[Call]

    def to_json(self) -> Reply:
        """The diagnosis as a JSON object: the reply of the tool `diagnose`."""
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

    Each finding has `id`, `severity`, `what`, `evidence`, `lever` (the change to try), `playbook`
    (a section of the guide) and `examples` (rollouts, with how to read them in full). Examples are
    dropped if the reply would become too long. Raises UserError RUN_NOT_FOUND if there is no such
    run, and ENV_SEALED if the environment's tasks must not be shown.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return _within_limit(_diagnosis(home, home.run(row.run_id), row)).to_json()


def _diagnosis(home: Home, run: RunDir, row: RunRow) -> Diagnosis:
    """The findings on a run with all their examples, which together may be too long for a reply."""
    config = run.find_config()  # None for a damaged config: the run is diagnosed all the same
    refuse_if_of_sealed(config, "what went wrong would show its tasks")
    redact = redactor_for(run.home, config.env_dir if config else None)
    facts = facts_of(home, run, row, config)
    findings = find_all(facts)
    examples = Examples(run, facts.algorithm, last_exam(run), redact)
    return Diagnosis(
        summary=_summary(run, row, facts, findings),
        run_id=row.run_id,
        state=row.state,
        findings=[_shown_finding(finding, examples, redact) for finding in findings],
        looked_at=_looked_at(facts),
        not_judged=not_judged(facts),
        warnings=[
            *damaged_answers_warning(run),
            *_warnings(row, facts),
            *reworded_better_sentences(robustness_of(run, config, redact)),
        ],
        next_calls=_next_calls(
            row,
            findings,
            examples.step,
            retry_calls=_retry_calls_with_keep(facts, findings, config),
        ),
    )


def _retry_calls_with_keep(
    facts: Facts, findings: Sequence[Finding], config: RunConfig | None
) -> Sequence[Call]:
    """The call that trains the run again with a larger `keep` (share of replayed rows), if that is
    the change of the first finding. Returns [] otherwise."""
    if not findings or findings[0].lever.setting != "keep":
        return []
    return calls_with_larger_keep(config, facts.kept_skills)


def _within_limit(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis, shortened to the size limit of a reply.

    Examples are dropped one by one, beginning with the last example of the last finding. A
    diagnosis without examples is returned whatever its size.
    """
    while json_chars(diagnosis.to_json()) > BODY_CHARS:
        findings = list(diagnosis.findings)
        with_examples = [index for index, finding in enumerate(findings) if finding.examples]
        if not with_examples:
            break
        index = with_examples[-1]  # of the last finding that still has examples
        fewer_examples = findings[index].examples[:-1]
        findings[index] = replace(findings[index], examples=fewer_examples)
        diagnosis = replace(diagnosis, findings=findings)
    return diagnosis


def facts_of(home: Home, run: RunDir, row: RunRow, config: RunConfig | None) -> Facts:
    """Everything that the detectors read, from the files of a run.

    `config` is the run's; None if its file is damaged. Raises DamagedRecord if any other file is
    damaged.
    """
    rows_asked, split = _rows_and_split(config)
    # The number of rows is an argument of an evaluation, not a setting. It is added to the settings
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
        facts = _with_start(facts, home, run)
    return _with_verdict(facts, verdict) if verdict else facts


def _views(
    run: RunDir, config: RunConfig | None, settings: KnownSettings, *, is_training: bool
) -> list[View]:
    """The answers of a run in numbers: one view for each training step, or one for an
    evaluation."""
    if is_training:
        return _training_views(run, settings)
    return _evaluation_views(run, config, settings)


def _count_validation_tasks(rows: Sequence[EvaluationRow]) -> int:
    """How many tasks with rows belong to the half by which a run chooses its checkpoint. If the
    held-out tasks have no halves, all tasks count."""
    validation_rows = in_half(rows, VALIDATION) or rows
    return len({row.task for row in validation_rows})


def _with_start(facts: Facts, home: Home, run: RunDir) -> Facts:
    """The facts of a training run, with those about its start and its reference answers filled
    in."""
    return replace(
        facts,
        exam_start=first_exam(run, facts.settings),
        against_start=against_start(run),
        gold_tokens=gold_tokens(run),
        rows=read_row_facts(run),
        alerts=open_alerts(run),
        fall_of_the_start=fall_of_the_start(home, run),
    )


def _with_verdict(facts: Facts, verdict: Verdict) -> Facts:
    """The facts of a finished run, with those from its verdict filled in."""
    return replace(
        facts,
        comparison=verdict.comparison,
        constant=verdict.training.constant if verdict.training else None,
        recommended_model=verdict.training.go_on_with if verdict.training else "",
        kept_skills=verdict.kept_skills,
    )


def _rows_and_split(config: RunConfig | None) -> tuple[int | None, str]:
    """(how many rows an evaluation was to ask, the split of the tasks that they are from). For
    other kinds of run (None, "heldout")."""
    if isinstance(config, EvaluateConfig | RegradeConfig):
        return config.rows, config.split
    return None, "heldout"


def _failure(run: RunDir, row: RunRow) -> Failure | None:
    """How the run failed. Returns None if it did not fail."""
    if row.state != "failed":
        return None
    evidence = read_object(run.failure).get("evidence")
    return Failure(
        kind=row.reason_kind or "", message=row.reason or "", evidence=str(evidence or "")
    )


def _last_training_rows(run: RunDir) -> TrainingRows:
    """The counts of training rows in the run's last `data` event; zeros if there is none."""
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
    """The steps whose rollouts are read: the first ten, the last twenty, and in between as many as
    the limit on bytes (`_ROLLOUT_BYTES`) allows, at even distances."""
    steps = run.rollout_steps()
    # Detectors compare the last steps with the first ones, so these are always read.
    always_read = {*steps[: limits.RECENT_STEPS], *steps[-2 * limits.RECENT_STEPS :]}
    middle_steps = [step for step in steps if step not in always_read]
    if not middle_steps:
        return sorted(always_read)
    bytes_left = max(0, _ROLLOUT_BYTES - _bytes_of_steps(run, always_read))
    mean_bytes = max(1, _bytes_of_steps(run, middle_steps) // len(middle_steps))
    count = min(len(middle_steps), bytes_left // mean_bytes)
    return sorted(always_read | _evenly_chosen(middle_steps, count))


def _bytes_of_steps(run: RunDir, steps: Iterable[int]) -> int:
    """The size in bytes of the rollouts of all these steps."""
    return sum(_rollout_bytes(run, step) for step in steps)


def _evenly_chosen(steps: Sequence[int], count: int) -> set[int]:
    """Choose `count` of the steps at even distances; none if `count` is 0."""
    return {steps[i * len(steps) // count] for i in range(count)}


def _rollout_bytes(run: RunDir, step: int) -> int:
    """The size in bytes of a step's rollouts; 0 if the file is missing."""
    try:
        return run.rollouts(step).stat().st_size
    except OSError:
        return 0


def _evaluation_views(run: RunDir, config: RunConfig | None, settings: KnownSettings) -> list[View]:
    """The answers of an evaluation in numbers, as a list of one `View`: that of the last model with
    answers.

    If no model has answers, the views of the rollouts: a probe (samples taken before a run) writes
    rollouts instead.
    """
    model_count = len(config.model_refs) if config else 0
    for index in reversed(range(model_count)):  # from the last model to the first
        view = view_of(step=0, rows=read_evaluation(run.model_evals(index)), settings=settings)
        if view is not None:
            return [view]
    return _training_views(run, settings)


def last_exam(run: RunDir) -> Sequence[EvaluationRow]:
    """The answers of the last held-out evaluation (exam) after step 0. Evaluations without answers
    are skipped. Returns [] if there is none."""
    later_steps = [step for step in run.eval_steps() if step > 0]
    for step in reversed(later_steps):
        rows = read_evaluation(run.evals(step))
        # If only the loss was measured, rows have no completion.
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
        examples=examples.for_finding(finding),
    )


def _looked_at(facts: Facts) -> LookedAt:
    """Count what the detectors could read: steps, rollouts, and steps with an evaluation."""
    # A line holds the metrics of a step. Step 0 is the evaluation before training, not a step.
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
    """The findings in a sentence, or that the run's files were deleted.

    A second sentence names the model to continue from, if training did not improve on the start.
    """
    if run.deleted.exists():
        return f"{row.run_id} is {row.state}; its files were deleted."
    if findings:
        summary = _findings_sentence(row, findings)
    else:
        summary = _no_findings_sentence(row, facts)
    if facts.recommended_model:  # the verdict names one only if the start was not beaten
        summary += f" The start was not beaten: go on with {facts.recommended_model}."
    return summary


def _findings_sentence(row: RunRow, findings: Sequence[Finding]) -> str:
    """A sentence on the first finding with the change to try, then the ids of the others. There
    must be a finding."""
    first, *others = findings
    text = f"{row.run_id}: {first.id}. {first.what} Try: {first.lever.words()}."
    if others:
        other_ids = ", ".join(finding.id for finding in others)
        text += f" Also: {other_ids}."
    return text


def _no_findings_sentence(row: RunRow, facts: Facts) -> str:
    """A sentence for a run without findings: that nothing is wrong, or that nothing explains its
    failure, and how much was read."""
    looked_at = _looked_at(facts)
    step_text = counted(looked_at.steps, "step")
    extent = f"{step_text}, {counted(looked_at.rollouts, 'rollout')}"
    if facts.failure_kind in _CAP_KINDS:  # a limit on money or time ended the run
        planned = f" of {facts.settings.steps}" if facts.settings.steps else ""
        return (
            f"{row.run_id} was ended by a cap and not by a fault: {row.reason}. "
            f"{step_text}{planned} were done in {words(row.spent_hours)}; "
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
    """The warning that a run has too few steps yet for most detectors, as a list of one. []
    otherwise."""
    step_count = _looked_at(facts).steps
    if row.state in TERMINAL or not facts.lines or step_count >= limits.RECENT_STEPS:
        return []
    needed_steps = f"{limits.FEWEST_STEPS} to {limits.FEWEST_TREND_STEPS}"
    return [f"{step_count} steps are few: most detectors need {needed_steps}."]


def _next_calls(
    row: RunRow, findings: Sequence[Finding], step: int, retry_calls: Sequence[Call] = ()
) -> list[Call]:
    """The calls to suggest: `retry_calls` (the call that makes the change of the first finding, if
    any), then its rollouts, then what the playbook says about it.

    For a run under way the last call waits for more instead. `step` is the step of the example
    rollouts, -1 if there are none.
    """
    if not findings:
        return _next_calls_without_findings(row)
    first = findings[0]
    # Only three calls are shown: for a run under way, waiting takes the place of the playbook.
    last = row.wait_calls or [Call("read_playbook", {"section": first.playbook})]
    if not first.examples:  # rollouts do not show the finding
        return [*retry_calls, *last]
    return [*retry_calls, _rollouts_call(row.run_id, first, step), *last]


def _next_calls_without_findings(row: RunRow) -> list[Call]:
    """The calls to suggest for a run without findings: the one that continues it if a limit on
    money or time ended it, that reads its error if it failed otherwise, else those that wait."""
    if row.state != "failed":
        return row.wait_calls
    if row.reason_kind in _CAP_KINDS and row.hint.call:
        return [row.hint.call]
    return [Call("read_logs", {"run_id": row.run_id, "view": "error"})]


def _rollouts_call(run_id: str, finding: Finding, step: int) -> Call:
    """The call that reads the rollouts of a finding. `step` is their step, -1 if there are none."""
    arguments: dict[str, object] = {"run_id": run_id, "pick": finding.examples}
    # "changed" shows held-out answers, to which the training step and the filter do not apply.
    if finding.examples != "changed":
        if step >= 0:
            arguments["step"] = step
        if finding.where:
            arguments["where"] = finding.where
    return Call("read_rollouts", arguments)
