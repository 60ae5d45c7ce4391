"""Runs the detectors of `diagnose` after every step of a run, and raises alerts.

An alert is raised once its detector returned the same finding several times in a row. An alert that
rests on a held-out evaluation is raised at once, because the next steps would read the same
answers. It can be raised again only after the finding was absent for a while, so that a run does
not alert at every step.
"""

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evidence.detect.baseline import (
    against_start,
    evaluation_against_start,
    first_exam,
    gold_tokens,
)
from engine.evidence.detect.detectors import find_all
from engine.evidence.detect.findings import ORDER, Finding, edit_lever, setting_lever
from engine.evidence.detect.views import (
    Facts,
    Line,
    StartComparison,
    TrainingRows,
    View,
    view_of,
)
from engine.evidence.stats import thresholds as limits
from engine.home.run_dir import RunDir
from engine.records.known_settings import KnownSettings
from engine.records.lines.curves import load_metrics
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.event import Event, read_events
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories

# Only the first steps of a long run (trends are measured from them) and its last steps are kept.
_FIRST_STEPS, _LAST_STEPS = 40, 400
# Findings that rest on the last held-out evaluation alone: a second check would read the same
# answers again. Their p value is corrected for the number of planned evaluations instead.
_JUDGED_BY_ONE_EVALUATION = frozenset({"below_start"})
_SLACK = 100  # surplus steps that are kept before the middle is dropped, all at once


@dataclass(frozen=True)
class _Beginning:
    """What a run began with.

    Attributes:
        exam: the held-out answers of step 0 in numbers; None if none were sampled.
        gold_tokens: tokens that nearly all reference answers stay below; None if not known.
    """

    exam: View | None
    gold_tokens: float | None


class Watch:
    """Runs the detectors after every step of a training run and keeps the state of its alerts."""

    def __init__(
        self, run: RunDir, algorithm: str, settings: KnownSettings, exam_tasks: int = 0
    ) -> None:
        """Start watching at step 0; `catch_up` moves on to a later step.

        Args:
            run: the folder of the run; rollouts of earlier steps are read from there.
            algorithm: that of the trainer, such as "grpo".
            settings: the run's settings by name.
            exam_tasks: how many tasks each held-out value is measured on; 0 if not known.
        """
        self.run = run
        self.algorithm = algorithm
        self.settings = settings
        self.exam_tasks = exam_tasks
        self.lines: list[Line] = []
        self.views: list[View] = []
        self.training_rows = TrainingRows()
        # Id of the finding of a raised alert -> steps in a row without that finding, so far.
        self.active_alerts: dict[str, int] = {}
        self._steps_in_a_row: dict[str, int] = {}  # id of a finding -> steps in a row with it
        self._beginning: _Beginning | None = None
        self._against_start: StartComparison | None = None

    def catch_up(self, step: int) -> None:
        """Read the metrics, rollouts and alerts of a run that has already done `step` steps.

        Afterwards `check_step` continues as if it had seen those steps.
        """
        self.lines = [line for line in load_metrics(self.run.metrics).lines if line["step"] <= step]
        past_steps = [past_step for past_step in self.run.rollout_steps() if past_step <= step]
        # The first steps and as many of the last are enough; reading all would take long.
        steps_to_read = [*past_steps[:_FIRST_STEPS], *past_steps[-_FIRST_STEPS:]]
        for past_step in dict.fromkeys(steps_to_read):  # without repeats, in order
            self._read_view(past_step)
        self._against_start = against_start(self.run, step, planned=self._planned_evaluations())
        for event in read_events(self.run.events):
            self._restore(event, step)
        self._drop_old_steps()

    def _restore(self, event: Event, step: int) -> None:
        """Restore from a past event the counts of training rows, or an alert that was raised or
        cleared.

        Alert events after `step` are ignored, and so are all other kinds of event.
        """
        finding_id = str(event.fields.get("id"))  # of an alert event
        if event.event == "data":  # the rows are the same at every step
            self.training_rows = training_rows(event)
        elif event.step is None or event.step > step:
            return  # these steps will be repeated, and their alerts will be raised again
        elif event.event == "alert":
            self.active_alerts[finding_id] = 0  # its finding is absent since 0 steps
        elif event.event == "alert_cleared":
            self.active_alerts.pop(finding_id, None)

    def check_step(
        self,
        step: int,
        values: Mapping[str, Any],
        rollouts: Sequence[TrajectoryRecord] = (),
        evaluated: Sequence[EvaluationRow] = (),
    ) -> tuple[list[Finding], list[str]]:
        """Run the detectors after a step. Returns (alerts to raise, ids of alerts that are over).

        Args:
            values: the metrics of the step, by name.
            rollouts: of the step; empty for SFT.
            evaluated: the rows of the step's evaluation; empty if it had none.
        """
        self.lines.append({"step": step, **values})
        self._add_view(view_of(step, rollouts, self.settings))
        self._drop_old_steps()
        beginning = self._read_beginning()  # what step 0 showed
        if evaluated:
            self._against_start = evaluation_against_start(
                self.run, step, evaluated, planned=self._planned_evaluations()
            )
        # `live`: only the detectors for runs under way.
        findings = find_all(self._facts_so_far(beginning), live=True)
        return self._update_alerts({finding.id: finding for finding in findings})

    def _read_beginning(self) -> _Beginning:
        """What step 0 showed: the evaluation before training, and the lengths of the reference
        answers.

        Both are read from the run's files at the first call and kept, because they no longer
        change.
        """
        if self._beginning is None:
            exam = first_exam(self.run, self.settings)
            self._beginning = _Beginning(exam, gold_tokens(self.run))
        return self._beginning

    def _facts_so_far(self, beginning: _Beginning) -> Facts:
        """Everything that the detectors read, as far as it is known at this step."""
        return Facts(
            self.algorithm,
            self.settings,
            self.lines,
            self.views,
            exam_tasks=self.exam_tasks,
            training_rows=self.training_rows,
            exam_start=beginning.exam,
            against_start=self._against_start,
            gold_tokens=beginning.gold_tokens,
        )

    def _update_alerts(
        self, findings_now: Mapping[str, Finding]
    ) -> tuple[list[Finding], list[str]]:
        """Update the counts of every finding and alert after one more step.

        `findings_now` are the findings of this step by id. Returns (findings to raise as alerts,
        ids of alerts that are over).
        """
        active_before = set(self.active_alerts)
        cleared = self._clear_absent(findings_now)
        # A finding that is absent now is left out, so its count begins again at its next step.
        self._steps_in_a_row = {
            finding_id: self._steps_in_a_row.get(finding_id, 0) + 1 for finding_id in findings_now
        }
        # Alerts are raised for findings that were present often enough and have none yet.
        to_raise = [
            finding
            for finding_id, finding in findings_now.items()
            if self._steps_in_a_row[finding_id] >= _steps_until_raised(finding_id)
            and finding_id not in active_before
        ]
        for finding in to_raise:
            self.active_alerts[finding.id] = 0  # its finding is absent since 0 steps
        return to_raise, cleared

    def _clear_absent(self, findings_now: Mapping[str, Finding]) -> list[str]:
        """Count for how many steps the finding of each active alert is absent, and end alerts that
        are over.

        An alert is over if its finding was absent five steps in a row (`STEPS_TO_CLEAR`). Returns
        the ids of those alerts; `findings_now` are the findings of this step by id.
        """
        steps_absent = {
            finding_id: 0 if finding_id in findings_now else steps + 1
            for finding_id, steps in self.active_alerts.items()
        }
        cleared = [
            finding_id
            for finding_id, steps in steps_absent.items()
            if steps >= limits.STEPS_TO_CLEAR
        ]
        self.active_alerts = {
            finding_id: steps
            for finding_id, steps in steps_absent.items()
            if finding_id not in cleared
        }
        return cleared

    def _planned_evaluations(self) -> int:
        """How many evaluations the run will have after step 0; 0 if the settings do not say."""
        steps, eval_every = self.settings.steps, self.settings.eval_every
        if not steps or not eval_every:
            return 0
        return math.ceil(steps / eval_every)

    def _read_view(self, step: int) -> None:
        """Read the rollouts of a past step from its file and keep them in numbers (a view)."""
        rollouts = read_trajectories(self.run.rollouts(step))
        self._add_view(view_of(step, rollouts, self.settings))

    def _add_view(self, view: View | None) -> None:
        """Keep a view (the answers of a step in numbers); None stands for a step without answers
        and is not kept."""
        if view is not None:
            self.views.append(view)

    def _drop_old_steps(self) -> None:
        """Drop the middle steps of a long run, to bound memory and time."""
        _drop_middle(self.lines)
        _drop_middle(self.views)


def _steps_until_raised(finding_id: str) -> int:
    """How many steps in a row must have the finding with this id before its alert is raised."""
    return 1 if finding_id in _JUDGED_BY_ONE_EVALUATION else limits.STEPS_TO_RAISE


def _drop_middle(steps: MutableSequence[Any]) -> None:
    """Delete the middle of a list that has grown too long; its start and its end stay."""
    if len(steps) > _FIRST_STEPS + _LAST_STEPS + _SLACK:
        del steps[_FIRST_STEPS : len(steps) - _LAST_STEPS]


def training_rows(event: Event) -> TrainingRows:
    """The counts of training rows in a `data` event; a count that is missing is 0."""
    fields = event.fields
    return TrainingRows(
        rows=int(fields.get("rows") or 0),
        truncated=int(fields.get("truncated") or 0),
        dropped=int(fields.get("dropped") or 0),
    )


def open_alerts(run: RunDir) -> list[Finding]:
    """The alerts of a run that were raised and are not over, as findings.

    Events with an id that this version does not know are left out.
    """
    alerts: dict[str, Event] = {}
    for event in read_events(run.events):
        finding_id = str(event.fields.get("id"))
        if event.event == "alert" and finding_id in ORDER:
            alerts[finding_id] = event
        elif event.event == "alert_cleared":
            alerts.pop(finding_id, None)
    return [_finding_of_event(finding_id, event) for finding_id, event in alerts.items()]


def _finding_of_event(finding_id: str, event: Event) -> Finding:
    """Rebuild a finding from the `alert` event that `alert_fields` wrote of it."""
    change = event.fields.get("lever") or {}  # the one change to try
    if change.get("setting"):
        name, why = str(change["setting"]), str(change.get("why") or "")
        lever = setting_lever(name, now=change.get("now"), to=change.get("to"), why=why)
    else:
        lever = edit_lever(str(change.get("edit") or ""))
    return Finding(
        finding_id,
        what=f"Alert of step {event.step}: {event.message}",
        evidence=event.fields.get("numbers") or {},
        lever=lever,
        playbook=str(event.fields.get("playbook") or "failures"),
    )


def alert_fields(finding: Finding) -> dict[str, object]:
    """A finding as the fields of its `alert` event in the log of the run."""
    return {
        "id": finding.id,
        "severity": finding.severity,
        "numbers": finding.numbers,
        "lever": finding.lever.to_json(),
        "playbook": finding.playbook,
    }
