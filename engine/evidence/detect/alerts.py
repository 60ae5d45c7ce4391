"""The detectors of `diagnose` while a run is going on, step by step.

Each alert is raised once, when its detector has spoken twice in a row, and again only after it was
silent for a while: a run must not cry at every step.
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
from engine.evidence.detect.findings import Finding
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
from engine.records.lines.curves import load_metrics
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.event import Event, read_events
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories

# What is kept of a long run: its start, which trends are measured from, and its end.
_START, _END = 40, 400


@dataclass(frozen=True)
class _Beginning:
    """The exam of step 0, and the length of reference answers in tokens."""

    exam: View | None
    gold_tokens: float | None


class Watch:
    """Looks at a training run after every step.

    Args:
        run: its folder; those rollouts that came before are read from there.
        exam_tasks: tasks behind each `heldout_` value.
    """

    def __init__(
        self, run: RunDir, algorithm: str, settings: Mapping[str, Any], exam_tasks: int = 0
    ) -> None:
        self.run = run
        self.algorithm = algorithm
        self.settings = settings
        self.exam_tasks = exam_tasks
        self.lines: list[Line] = []
        self.views: list[View] = []
        self.rows = TrainingRows()
        self.active: dict[str, int] = {}  # id of a raised alert -> steps in a row without it
        self._present: dict[str, int] = {}  # id -> steps in a row with it
        self._beginning: _Beginning | None = None
        self._against_start: StartComparison | None = None

    def catch_up(self, step: int) -> None:
        """Take up a run that has done `step` steps, with the alerts that were raised in them."""
        self.lines = [line for line in load_metrics(self.run.metrics).lines if line["step"] <= step]
        steps = [each for each in self.run.rollout_steps() if each <= step]
        for each in dict.fromkeys([*steps[:_START], *steps[-_START:]]):
            self._view(each)
        self._against_start = against_start(self.run, step, planned=self._planned())
        for event in read_events(self.run.events):
            self._recall(event, step)
        self._trim()

    def _recall(self, event: Event, step: int) -> None:
        if event.event == "data":
            self.rows = training_rows(event)
        elif event.step is None or event.step > step:
            return  # these steps are done again, and so are their alerts
        elif event.event == "alert":
            self.active[str(event.fields.get("id"))] = 0
        elif event.event == "alert_cleared":
            self.active.pop(str(event.fields.get("id")), None)

    def look(
        self,
        step: int,
        values: Mapping[str, Any],
        rollouts: Sequence[TrajectoryRecord] = (),
        evaluated: Sequence[EvaluationRow] = (),
    ) -> tuple[list[Finding], list[str]]:
        """(alerts to raise, ids that are over) after a step with these metrics and rollouts.

        Args:
            evaluated: the rows of its evaluation, where it had one.
        """
        self.lines.append({"step": step, **values})
        self._add_view(view_of(step, rollouts, self.settings))
        self._trim()
        if self._beginning is None:  # step 0 was examined before the first step
            exam = first_exam(self.run, self.settings)
            self._beginning = _Beginning(exam, gold_tokens(self.run))
        if evaluated:
            self._against_start = evaluation_against_start(
                self.run, step, evaluated, planned=self._planned()
            )
        facts = Facts(
            self.algorithm,
            self.settings,
            self.lines,
            self.views,
            exam_tasks=self.exam_tasks,
            rows=self.rows,
            exam_start=self._beginning.exam,
            against_start=self._against_start,
            gold_tokens=self._beginning.gold_tokens,
        )
        return self._settled({finding.id: finding for finding in find_all(facts, live=True)})

    def _settled(self, present: Mapping[str, Finding]) -> tuple[list[Finding], list[str]]:
        """What of the findings of this step is to be raised, and which alerts are over."""
        self._present = {name: self._present.get(name, 0) + 1 for name in present}
        raised = [
            finding
            for name, finding in present.items()
            if name not in self.active and self._present[name] >= limits.RAISE_AFTER
        ]
        absent = {name: 0 if name in present else steps + 1 for name, steps in self.active.items()}
        cleared = [name for name, steps in absent.items() if steps >= limits.CLEAR_AFTER]
        self.active = {name: steps for name, steps in absent.items() if name not in cleared}
        self.active |= dict.fromkeys([finding.id for finding in raised], 0)
        return raised, cleared

    def _planned(self) -> int:
        """How many evaluations this run will have after step 0."""
        steps, every = self.settings.get("steps"), self.settings.get("eval_every")
        return math.ceil(steps / every) if steps and every else 0

    def _view(self, step: int) -> None:
        self._add_view(view_of(step, read_trajectories(self.run.rollouts(step)), self.settings))

    def _add_view(self, view: View | None) -> None:
        if view is not None:
            self.views.append(view)

    def _trim(self) -> None:
        _cut_middle(self.lines)
        _cut_middle(self.views)


def _cut_middle(steps: MutableSequence[Any]) -> None:
    if len(steps) > _START + _END + 100:
        del steps[_START : len(steps) - _END]


def training_rows(event: Event) -> TrainingRows:
    """The counts of a `data` event."""
    counts = [int(event.fields.get(name) or 0) for name in ("rows", "truncated", "dropped")]
    return TrainingRows(*counts)


def alert_fields(finding: Finding) -> dict[str, object]:
    """A finding as the fields of an event."""
    return {
        "id": finding.id,
        "severity": finding.severity,
        "numbers": finding.numbers,
        "lever": finding.lever.to_json(),
        "playbook": finding.playbook,
    }
