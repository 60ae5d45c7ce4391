"""What the held-out tasks of a run can show, before the run: the smallest difference that would.

Half of the tasks that are asked choose the checkpoint, the verdict is read on the others; where the
environment has dev tasks, those choose, and the verdict is read on all. How many of them change
their result is taken from finished runs on the same version where there are any, else assumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.files import JsonObject
from engine.core.format import whole_percent
from engine.core.reply import Reply
from engine.environments.env_facts import EnvFacts
from engine.evidence.stats.inference import POWER, smallest_detectable_gap, tasks_needed
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.record import DamagedRecord
from engine.records.run_result import RunResult
from engine.records.settings import TrainSettings

# Share of the tasks that come out differently after a training, where no run shows it and half of
# them are solved before; where all or none are, nothing but the difference itself changes.
_CHANGED_SHARE = 0.2
_LEAST_CHANGED = 1e-3  # share of the tasks: with none no number of tasks would be needed
_LOOK_BACK = 200  # the newest training runs that are looked through
_MOST_RUNS = 10  # of them that are read


@dataclass(frozen=True)
class EarlierRuns:
    """Finished runs from the same model on the same environment version.

    Attributes:
        base: share of the tasks that the model solved before the newest of them.
        changed: mean share of the tasks that came out differently.
        gain: the largest difference that one of them made.
        best: the run that made it.
    """

    base: float
    changed: float
    gain: float
    best: str


@dataclass(frozen=True)
class Exam:
    """What a run's held-out tasks can show.

    Attributes:
        asked: held-out tasks that are asked.
        reported: those that the verdict is read on.
        gap: the smallest difference of two success rates that they show with the usual power.
        earlier: what finished runs say; None where there are none.
        dev: dev tasks that are asked to choose the checkpoint; 0 where held-out tasks choose it.
    """

    asked: int
    reported: int
    gap: float
    earlier: EarlierRuns | None
    dev: int = 0

    @property
    def is_out_of_reach(self) -> bool:
        """Whether not even a model that solves every task would be seen to be better."""
        return self.earlier is not None and self.gap > 1.0 - self.earlier.base

    @property
    def has_shown_less(self) -> bool:
        """Whether no earlier run gained as much as these tasks can show."""
        return self.earlier is not None and self.earlier.gain < self.gap

    def in_words(self) -> str:
        """What the tasks show, and which tasks choose the checkpoint, in one sentence: "100 tasks
        show a difference of 14 points or more (80 % power); the other 100 of 200 choose ..."."""
        if self.dev:
            choosing = f"{self.dev} dev tasks choose the checkpoint"
        else:
            choosing_tasks = self.asked - self.reported
            choosing = f"the other {choosing_tasks} of {self.asked} choose the checkpoint"
        text = (
            f"{self.reported} tasks show a difference of {_points(self.gap)} or more "
            f"({whole_percent(POWER)} power); {choosing}"
        )
        if self.earlier is not None:
            text += f"; {whole_percent(self.earlier.base)} are solved before"
        return text

    def to_json(self) -> Reply:
        """What the held-out tasks can show, as the fields of a reply: numbers of tasks, differences
        as shares between 0 and 1. What earlier runs gained is left out where there are none."""
        fields: Reply = {"about": self.in_words(), "asked": self.asked, "reported": self.reported}
        if self.dev:
            fields["dev"] = self.dev
        fields["smallest_gap"] = round(self.gap, 4)
        if self.earlier is not None:
            fields["base"] = round(self.earlier.base, 4)
            fields["best_so_far"] = {
                "run_id": self.earlier.best,
                "gain": round(self.earlier.gain, 4),
            }
        return fields

    def doubts(self) -> list[str]:
        """Why the run may end without a verdict, as a sentence in a list; [] where nothing says so.

        Either too few tasks are left to solve, or the earlier runs gained less than these tasks can
        show (`gap`).
        """
        earlier = self.earlier
        if earlier is None:
            return []
        if self.is_out_of_reach:
            return [
                f"out of reach: {whole_percent(earlier.base)} are solved already, so at most "
                f"{_points(1.0 - earlier.base)} can be gained and {_points(self.gap)} are needed "
                "to be seen"
            ]
        if not self.has_shown_less:
            return []
        text = (
            f"the best run so far ({earlier.best}) gained {_points(earlier.gain)}, less than these "
            "tasks can show"
        )
        if earlier.gain > 0:
            needed = tasks_needed(earlier.gain, max(earlier.changed, _LEAST_CHANGED))
            text += f"; a gain like it takes {needed:,} reported tasks"
            if not self.dev:  # half of the held-out tasks choose the checkpoint, the others report
                text += f", {2 * needed:,} held out"
        return [text]


def _points(share: float) -> str:
    """A share in percentage points, rounded up: "9 points"."""
    points = math.ceil(100 * share - 1e-9)
    return f"{points} point{'' if points == 1 else 's'}"


def exam_of(
    home: Home, env_id: str, model: str, settings: TrainSettings, facts: EnvFacts
) -> Exam | None:
    """How large a difference of success rates the held-out tasks of a run can show, before it is
    trained; None where the environment does not score or fewer than two tasks would be asked.

    `env_id` is the whole id of the version, `model` the reference that is trained.
    """
    asked = min(settings.eval_rows, facts.heldout_rows)
    if not facts.scored or asked < 2:
        return None
    dev = min(settings.eval_rows, facts.dev_rows)  # tasks that choose the checkpoint, if there are
    # Without them a half of the held-out tasks chooses, of an odd number the larger one.
    reported = asked if dev else asked // 2
    earlier = _earlier_runs(home, env_id, model)
    # The share of the tasks that will come out differently.
    changed_share = earlier.changed if earlier is not None else _CHANGED_SHARE
    gap = smallest_detectable_gap(reported, round(changed_share * reported))
    return Exam(asked, reported, gap, earlier, dev)


def _earlier_runs(home: Home, env_id: str, model: str) -> EarlierRuns | None:
    """What the newest finished runs from `model` on the environment version `env_id` say of its
    success; None without one."""
    evidence_of_run = _evidence_of_runs(home, env_id, model)
    if not evidence_of_run:
        return None
    all_evidence = list(evidence_of_run.values())
    best_id = max(evidence_of_run, key=lambda run_id: evidence_of_run[run_id].gain)
    return EarlierRuns(
        base=all_evidence[0].base,
        changed=sum(evidence.changed for evidence in all_evidence) / len(all_evidence),
        gain=evidence_of_run[best_id].gain,
        best=best_id,
    )


def _evidence_of_runs(home: Home, env_id: str, model: str) -> "dict[str, _Evidence]":
    """What the verdicts of the newest finished trainings of `model` on the environment version
    `env_id` rest on, by run id, the newest run first; {} without any."""
    if not model or not home.db.is_file():
        return {}
    with Store(home) as store:
        rows = store.list_runs(limit=_LOOK_BACK, states=("done",), kind="train")
    run_ids = [row.run_id for row in rows if row.env_id == env_id and row.model == model]
    evidence_of_run: dict[str, _Evidence] = {}
    for run_id in run_ids[:_MOST_RUNS]:
        evidence = _evidence(home, run_id)
        if evidence is not None:
            evidence_of_run[run_id] = evidence
    return evidence_of_run


@dataclass(frozen=True)
class _Evidence:
    """What the verdict of one run rests on, as shares of its tasks."""

    base: float
    changed: float
    gain: float


def _evidence(home: Home, run_id: str) -> _Evidence | None:
    """Read from a run's result what its verdict rests on, as shares of its tasks; None where the
    verdict compares no success rates, or the file is missing, damaged or of another version."""
    try:
        evidence: JsonObject = RunResult.read(home.run(run_id).result).evidence or {}
    except (OSError, DamagedRecord):
        return None
    try:
        task_count = evidence["n"]
        if evidence["metric"] != "success" or not task_count:
            return None
        changed_tasks = evidence["gained"] + evidence["lost"]
        return _Evidence(
            base=float(evidence["before"]["value"]),
            changed=float(changed_tasks / task_count),
            gain=float(evidence["difference"]),
        )
    except (KeyError, TypeError, ValueError):  # of a version that wrote it otherwise
        return None


def first_doubts(exam: Exam | None) -> Sequence[str]:
    """Why the held-out tasks may show too little, as warnings of a reply; [] where `exam` is None
    or nothing speaks against it."""
    return [f"exam: {doubt}" for doubt in exam.doubts()] if exam is not None else []
