"""The exam of a run (its held-out tasks): the smallest difference that it can show, before the run.

Half of the tasks that are asked choose the checkpoint, and the verdict rests on the others. If the
environment has dev tasks, these choose, and the verdict rests on all held-out tasks. The share of
tasks whose result will change is taken from finished runs on the same version, or else assumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.files import JsonObject
from engine.core.format import whole_percent
from engine.core.reply import Reply
from engine.environments.env_facts import EnvFacts
from engine.evidence.stats.exam_size import CHANGED_SHARE, ExamSize, points
from engine.evidence.stats.inference import tasks_needed
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.record import DamagedRecord
from engine.records.run_result import RunResult
from engine.records.settings import TrainSettings

_FEWEST_GROUPS = 10  # of reported tasks; Student's t with fewer asks for implausible differences
_LEAST_CHANGED = 1e-3  # share of the tasks: with 0 the formula would need no tasks at all
_LOOK_BACK = 200  # how many of the newest training runs are looked through
_MOST_RUNS = 10  # how many of the matching runs are read


@dataclass(frozen=True)
class EarlierRuns:
    """Finished runs from the same model on the same environment version.

    Attributes:
        base: share of the tasks that the model solved before the newest run's training.
        changed: mean share of the tasks whose result changed by the training.
        gain: the largest rise of the success rate among the runs.
        best: the run with the largest rise.
    """

    base: float
    changed: float
    gain: float
    best: str


@dataclass(frozen=True)
class Exam:
    """What a run's exam (its evaluation on held-out tasks) can show.

    Attributes:
        asked: number of held-out tasks that are asked.
        size: the tasks of these on which the verdict rests, and their groups.
        earlier: results of finished runs; None if there are none.
        dev: number of dev tasks that choose the checkpoint; 0 if held-out tasks choose it.
    """

    asked: int
    size: ExamSize
    earlier: EarlierRuns | None
    dev: int = 0

    @property
    def reported(self) -> int:
        """Number of tasks on which the verdict rests."""
        return self.size.tasks

    @property
    def changed(self) -> float:
        """Share of the tasks whose result is expected to change: that of earlier runs, if any."""
        return self.earlier.changed if self.earlier is not None else CHANGED_SHARE

    @property
    def gap(self) -> float:
        """The smallest difference of two success rates that the reported tasks detect with the
        usual statistical power."""
        return self.size.gap(self.changed)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether even a model that solves every task could not be shown to be better."""
        return self.earlier is not None and self.gap > 1.0 - self.earlier.base

    @property
    def has_shown_less(self) -> bool:
        """Whether every earlier run gained less than the smallest difference that can be shown."""
        return self.earlier is not None and self.earlier.gain < self.gap

    def in_words(self) -> str:
        """Say in one sentence what the tasks can show, and which tasks choose the checkpoint.

        For example "100 tasks show a difference of 14 points or more (80 % power); the other 100
        of 200 choose the checkpoint".
        """
        if self.dev:
            choosing = f"{self.dev} dev tasks choose the checkpoint"
        else:
            choosing_tasks = self.asked - self.reported
            choosing = f"the other {choosing_tasks} of {self.asked} choose the checkpoint"
        text = f"{self.size.in_words(self.changed)}; {choosing}"
        if self.earlier is not None:
            text += f"; {whole_percent(self.earlier.base)} are solved before"
        return text

    def to_json(self) -> Reply:
        """Return what the held-out tasks can show, as the fields of a reply.

        Differences are shares between 0 and 1. `base` and `best_so_far` are left out if there are
        no earlier runs.
        """
        fields: Reply = {"about": self.in_words(), "asked": self.asked, "reported": self.reported}
        if self.size.groups:
            fields["groups"] = self.size.groups
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
        """Return a list with one sentence on why the run may end without a verdict; [] if nothing
        suggests it.

        The reason is that the tasks form too few groups, that too few tasks are left to solve, or
        that all earlier runs gained less than these tasks can show (`gap`).
        """
        earlier = self.earlier
        if 0 < self.size.groups < _FEWEST_GROUPS:
            return [
                f"{self.size.groups} groups are hardly evidence, {_FEWEST_GROUPS} are the least: "
                'finer groups (Task(..., group="..."), or a key "group" in a data row), or more'
            ]
        if earlier is None:
            return []
        if self.is_out_of_reach:
            return [
                f"out of reach: {whole_percent(earlier.base)} are solved already, so at most "
                f"{points(1.0 - earlier.base)} can be gained and {points(self.gap)} are needed "
                "to be seen"
            ]
        if not self.has_shown_less:
            return []
        text = (
            f"the best run so far ({earlier.best}) gained {points(earlier.gain)}, less than these "
            "tasks can show"
        )
        if earlier.gain > 0:
            needed = tasks_needed(earlier.gain, max(earlier.changed, _LEAST_CHANGED))
            text += f"; a gain like it takes {needed:,} reported tasks"
            if not self.dev:  # half of the held-out tasks choose the checkpoint, the others report
                text += f", {2 * needed:,} held out"
        return [text]


def exam_of(
    home: Home,
    env_id: str,
    model: str,
    settings: TrainSettings,
    facts: EnvFacts,
    count_reported: Callable[[], ExamSize] | None = None,
) -> Exam | None:
    """Compute, before a run is trained, how large a difference its held-out tasks can show.

    `env_id` is the whole id of the version, `model` the reference of the model that is trained,
    `count_reported` reads the tasks that are reported and counts them; None if they are taken as
    independent. Returns None, and counts nothing, if the environment does not score, or if fewer
    than two tasks would be asked.
    """
    asked = min(settings.eval_rows, facts.heldout_rows)
    if not facts.scored or asked < 2:
        return None
    dev = min(settings.eval_rows, facts.dev_rows)  # tasks that choose the checkpoint; 0 for none
    # Without dev tasks the larger half of the held-out tasks chooses, so the smaller is reported.
    reported = asked if dev else asked // 2
    size = (
        count_reported()
        if count_reported is not None
        else ExamSize(reported, groups=0, independent=reported)
    )
    return Exam(asked, size, _earlier_runs(home, env_id, model), dev)


def _earlier_runs(home: Home, env_id: str, model: str) -> EarlierRuns | None:
    """Summarise the newest finished runs that trained `model` on the environment version `env_id`.

    Returns None if there is no such run.
    """
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
    """Return run id -> what its verdict rests on, for the newest finished trainings of `model` on
    the environment version `env_id`.

    The newest run comes first. Returns {} if there are none.
    """
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
    """What the verdict of one run rests on, as shares of its tasks.

    Attributes:
        base: share that the model solved before the training.
        changed: share whose result changed by the training.
        gain: rise of the success rate; negative if it fell.
    """

    base: float
    changed: float
    gain: float


def _evidence(home: Home, run_id: str) -> _Evidence | None:
    """Read from a run's result.json what its verdict rests on, as shares of its tasks.

    Returns None if the verdict does not compare success rates, or if the file is missing, damaged
    or was written by another version.
    """
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
    except (KeyError, TypeError, ValueError):  # written by a version with another format
        return None


def first_doubts(exam: Exam | None) -> Sequence[str]:
    """Return warnings that the held-out tasks may show too little; [] if `exam` is None or raises
    no doubts."""
    return [f"exam: {doubt}" for doubt in exam.doubts()] if exam is not None else []
