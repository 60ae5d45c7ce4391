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
        """The exam in one sentence: "200 of 400 held-out tasks ..."."""
        if self.dev:
            choosing = f"{self.dev} dev tasks choose the checkpoint"
        else:
            others = self.asked - self.reported
            choosing = f"the other {others} of {self.asked} choose the checkpoint"
        text = (
            f"{self.reported} tasks show a difference of {_points(self.gap)} or more "
            f"({whole_percent(POWER)} power); {choosing}"
        )
        if self.earlier is not None:
            text += f"; {whole_percent(self.earlier.base)} are solved before"
        return text

    def to_json(self) -> Reply:
        """The exam as a JSON object."""
        fields: Reply = {
            "about": self.in_words(),
            "asked": self.asked,
            "reported": self.reported,
            **({"dev": self.dev} if self.dev else {}),
            "smallest_gap": round(self.gap, 4),
        }
        if self.earlier is not None:
            earlier = {"run_id": self.earlier.best, "gain": round(self.earlier.gain, 4)}
            fields |= {"base": round(self.earlier.base, 4), "best_so_far": earlier}
        return fields

    def doubts(self) -> list[str]:
        """Why the run may end without a verdict, in words; [] where nothing says so."""
        if self.earlier is None:
            return []
        left = 1.0 - self.earlier.base
        if self.is_out_of_reach:
            return [
                f"out of reach: {whole_percent(self.earlier.base)} are solved already, so at most "
                f"{_points(left)} can be gained and {_points(self.gap)} are needed to be seen"
            ]
        if not self.has_shown_less:
            return []
        text = (
            f"the best run so far ({self.earlier.best}) gained {_points(self.earlier.gain)}, less "
            "than these tasks can show"
        )
        if self.earlier.gain > 0:
            needed = tasks_needed(self.earlier.gain, max(self.earlier.changed, 1e-3))
            text += f"; a gain like it takes {needed:,} reported tasks"
            if not self.dev:
                text += f", {2 * needed:,} held out"
        return [text]


def _points(share: float) -> str:
    """A share in percentage points, rounded up: "9 points"."""
    points = math.ceil(100 * share - 1e-9)
    return f"{points} point{'' if points == 1 else 's'}"


def exam_of(
    home: Home, env_id: str, model: str, settings: TrainSettings, facts: EnvFacts
) -> Exam | None:
    """What the held-out tasks of a run can show; None where the environment does not score or
    fewer than two tasks would be asked.

    `env_id` is the whole id of the version, `model` the reference that is trained.
    """
    asked = min(settings.eval_rows, facts.heldout_rows)
    if not facts.scored or asked < 2:
        return None
    dev = min(settings.eval_rows, facts.dev_rows)
    reported = asked if dev else asked // 2  # of an odd number the larger half chooses
    earlier = _earlier_runs(home, env_id, model)
    if earlier is not None:
        changed_share = earlier.changed
    else:
        changed_share = _CHANGED_SHARE
    gap = smallest_detectable_gap(reported, round(changed_share * reported))
    return Exam(asked, reported, gap, earlier, dev)


def _earlier_runs(home: Home, env_id: str, model: str) -> EarlierRuns | None:
    """What finished runs from a model on a version say of its success; None without one."""
    if not model or not home.db.is_file():
        return None
    with Store(home) as store:
        rows = store.list_runs(limit=_LOOK_BACK, states=("done",), kind="train")
    ids = [row.run_id for row in rows if row.env_id == env_id and row.model == model]
    read = [(run_id, _evidence(home, run_id)) for run_id in ids[:_MOST_RUNS]]
    known = [(run_id, each) for run_id, each in read if each is not None]
    if not known:
        return None
    best_id, best = max(known, key=lambda pair: pair[1].gain)
    changed = sum(each.changed for _, each in known) / len(known)
    return EarlierRuns(known[0][1].base, changed, best.gain, best_id)


@dataclass(frozen=True)
class _Evidence:
    """What the verdict of one run rests on, as shares of its tasks."""

    base: float
    changed: float
    gain: float


def _evidence(home: Home, run_id: str) -> _Evidence | None:
    """What a run's verdict rests on; None where it is not of success rates, or not readable."""
    try:
        evidence: JsonObject = RunResult.read(home.run(run_id).result).evidence or {}
    except (OSError, DamagedRecord):
        return None
    try:
        if evidence["metric"] != "success" or not evidence["n"]:
            return None
        changed = (evidence["gained"] + evidence["lost"]) / evidence["n"]
        return _Evidence(
            float(evidence["before"]["value"]), float(changed), float(evidence["difference"])
        )
    except (KeyError, TypeError, ValueError):  # of a version that wrote it otherwise
        return None


def first_doubts(exam: Exam | None) -> Sequence[str]:
    """The doubts of an exam as warnings; [] without one."""
    return [f"exam: {doubt}" for doubt in exam.doubts()] if exam is not None else []
