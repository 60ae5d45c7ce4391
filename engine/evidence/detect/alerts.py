"""The detectors of `diagnose` while a run is going on, step by step.

Each alert is raised once, when its detector has spoken twice in a row, and again only after it was
silent for a while: a run must not cry at every step.
"""

import math
from collections.abc import Mapping
from typing import Any

from engine.evidence.detect.baseline import against_start, first_exam, gold_tokens
from engine.evidence.detect.detectors import find_all
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.views import Facts, Line, View, view_of
from engine.evidence.stats import thresholds as at
from engine.evidence.stats.results import load_rows
from engine.home.curves import load_metrics
from engine.home.run_dir import RunDir

# What is kept of a long run: its start, which trends are measured from, and its end.
_START, _END = 40, 400


class Watch:
    """Looks at a training run after every step.

    Args:
        run: its folder; rollouts of a step are read from there once they are written.
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
        self.rows: Mapping[str, Any] = {}
        self.active: dict[str, int] = {}  # id -> looks in a row without it
        self._seen: dict[str, int] = {}  # id -> looks in a row with it
        self._began: tuple[View | None, float | None] | None = None  # first exam, length of gold
        self._against: Mapping[str, Any] = {}

    def catch_up(self, step: int) -> None:
        """Take up a run that has done `step` steps, with the alerts that were raised in them."""
        self.lines = [line for line in load_metrics(self.run.metrics).lines if line["step"] <= step]
        steps = [found for found in self.run.rollout_steps() if found <= step]
        for found in dict.fromkeys([*steps[:_START], *steps[-_START:]]):
            self._view(found)
        self._against = self._exam(step)
        for event in load_rows(self.run.events):
            self._recall(event, step)
        self._trim()

    def _recall(self, event: Mapping[str, Any], step: int) -> None:
        name, when = event.get("event"), event.get("step")
        if name == "data":
            self.rows = event
        elif not isinstance(when, int) or when > step:
            return  # these steps are done again, and so are their alerts
        elif name == "alert":
            self.active[str(event.get("id"))] = 0
        elif name == "alert_cleared":
            self.active.pop(str(event.get("id")), None)

    def look(self, step: int, values: Mapping[str, Any]) -> tuple[list[Finding], list[str]]:
        """(alerts to raise, ids that are over) after a step with these metrics."""
        self.lines.append({"step": step, **values})
        self._view(step)
        self._trim()
        if self._began is None:  # step 0 was examined before the first step
            self._began = first_exam(self.run, self.settings), gold_tokens(self.run)
        if any(name.startswith("heldout_") for name in values):
            self._against = self._exam(step)
        facts = Facts(
            self.algorithm,
            self.settings,
            self.lines,
            self.views,
            exam_tasks=self.exam_tasks,
            rows=self.rows,
            exam_start=self._began[0],
            against_start=self._against,
            gold_tokens=self._began[1],
        )
        found = {finding.id: finding for finding in find_all(facts, live=True)}
        self._seen = {name: self._seen.get(name, 0) + 1 for name in found}
        raised = [
            finding
            for name, finding in found.items()
            if name not in self.active and self._seen[name] >= at.RAISE_AFTER
        ]
        quiet = {name: 0 if name in found else looks + 1 for name, looks in self.active.items()}
        cleared = [name for name, looks in quiet.items() if looks >= at.CLEAR_AFTER]
        self.active = {name: looks for name, looks in quiet.items() if name not in cleared}
        self.active |= dict.fromkeys([finding.id for finding in raised], 0)
        return raised, cleared

    def _exam(self, step: int) -> Mapping[str, Any]:
        """The last exam against step 0, at the level of all that this run will be looked at by."""
        steps, every = self.settings.get("steps"), self.settings.get("eval_every")
        planned = math.ceil(steps / every) if steps and every else 0
        return against_start(self.run, step, planned=planned)

    def _view(self, step: int) -> None:
        view = view_of(step, load_rows(self.run.rollouts(step)), self.settings)
        if view is not None:
            self.views.append(view)

    def _trim(self) -> None:
        for kept in (self.lines, self.views):
            if len(kept) > _START + _END + 100:
                del kept[_START : len(kept) - _END]


def alert_fields(finding: Finding) -> dict[str, Any]:
    """A finding as the fields of an event."""
    return {
        "id": finding.id,
        "severity": finding.severity,
        "numbers": finding.numbers,
        "lever": finding.lever.as_dict(),
        "playbook": finding.playbook,
    }
