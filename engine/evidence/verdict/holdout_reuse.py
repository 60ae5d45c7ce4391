"""How often the held-out tasks of an environment version have been used to choose.

Every use is a chance to be lucky. A training run uses them with each checkpoint it evaluates (on
the validation half) and is then judged once on the test half; an evaluation uses them once per
model. Whoever keeps the best of many runs has chosen on the very tasks that are reported.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evidence.stats.inference import ALPHA
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig

MANY = 5  # runs judged on the same tasks, from which a verdict says so
_MOST_RUNS = 2000  # that are counted


@dataclass(frozen=True)
class HoldoutUse:
    """How often the held-out tasks of a version were used.

    Attributes:
        judged: training runs judged on the test half.
        checkpoints: compared on the validation half.
        evaluations: models evaluated on them.
    """

    env_id: str
    judged: int
    checkpoints: int
    evaluations: int

    @property
    def total(self) -> int:
        return self.judged + self.checkpoints + self.evaluations

    def to_json(self) -> dict[str, object]:
        return {
            "env_id": self.env_id,
            "judged": self.judged,
            "checkpoints": self.checkpoints,
            "evaluations": self.evaluations,
            "looks": self.total,
        }


# Counts by home and version, each with the state of the version's runs when they were counted.
_counted: dict[tuple[str, str], tuple[tuple[Any, ...] | None, HoldoutUse]] = {}


def holdout_use(home: Home, env_id: str, run_id: str = "") -> HoldoutUse:
    """How often the held-out tasks of `env_id` were used, up to and with `run_id`, else by all."""
    return _count(home, env_id, _runs_on(home, env_id, run_id))


def _count(home: Home, env_id: str, rows: Iterable[RunRow]) -> HoldoutUse:
    judged = checkpoints = evaluations = 0
    for row in rows:
        if row.kind == "train":
            evaluated = sum(step > 0 for step in home.run(row.run_id).eval_steps())
            checkpoints += evaluated
            judged += evaluated > 0
        elif row.kind == "evaluate":
            evaluations += _models_on_heldout(home, row)
    return HoldoutUse(env_id, judged, checkpoints, evaluations)


def use_by_env(home: Home) -> dict[str, HoldoutUse]:
    """`holdout_use` of every environment version that has runs.

    Counting opens a folder for every run, so a version's count is kept by this process until one
    of its runs changes; while one is under way it is counted each time.
    """
    with Store(home) as store:
        marks = {env_id: mark for env_id, mark in store.env_marks().items() if env_id}
        stale = {
            env_id
            for env_id, mark in marks.items()
            if mark[1] or _counted.get((str(home.root), env_id), (None,))[0] != mark
        }
        rows = store.list_runs(_MOST_RUNS) if stale else []
    for env_id in stale:
        count = _count(home, env_id, [row for row in rows if row.env_id == env_id])
        _counted[str(home.root), env_id] = marks[env_id], count
    return {env_id: _counted[str(home.root), env_id][1] for env_id in marks}


def reuse_warning(use: HoldoutUse, verdict: str, p: float | None) -> list[str]:
    """What the number of runs judged on the same tasks means for a verdict; [] while few."""
    if use.judged < MANY:
        return []
    text = f"{use.judged} runs have been judged on these held-out tasks"
    lucky = 1.0 - (1.0 - ALPHA / 2.0) ** use.judged
    if verdict == "better" and p is not None:
        if min(1.0, p * use.judged) < ALPHA:
            return []  # it survives even if the best of them all had been picked
        return [
            f"{text}: that one of so many looks better by luck has a chance of {lucky:.0%}, and "
            "this gain does not survive a correction for them. Evaluate the run on new tasks."
        ]
    return [f"{text}; the best of them looks better than it is."]


def evaluations_of_pair(home: Home, env_id: str, models: Sequence[str], upto: Sequence[str]) -> int:
    """How many different evaluations asked these models the tasks of a version's split, up to and
    with the younger of the runs `upto`; 1 where it was only that one.

    Whoever evaluates two models on more and more rows until they differ has tested as often. The
    same rows asked as often again are no new test, nor is scoring again.
    """
    rows = [row for row in _runs_on(home, env_id, "") if row.kind == "evaluate"]
    ends = [index for index, row in enumerate(rows) if row.run_id in upto]
    if not ends:
        return 1
    last = home.run(rows[ends[-1]].run_id).find_config()
    split = last.split if isinstance(last, EvaluateConfig | RegradeConfig) else "heldout"
    different: set[str] = set()
    for row in rows[: ends[-1] + 1]:
        config = home.run(row.run_id).find_config()
        if not isinstance(config, EvaluateConfig) or config.split != split:
            continue
        if set(models) <= _asked(home.run(row.run_id), config):
            seed = config.settings.seed if config.attempts != 1 else None
            different.add(f"{config.rows} {config.attempts} {seed}")
    return max(1, len(different))


def correction_factor(evaluations: int) -> int:
    """What p is multiplied by at the last of so many evaluations of two models.

    The first one had the whole of ALPHA, so dividing it by their number would be too little: the
    k-th gets a k-squared part. Two equal models on ever more rows of the same split, four
    evaluations, are then told apart in 6 of 100 cases, with k in 8, without in 14
    (tests/engine/evidence/verdict/test_holdout_reuse.py).
    """
    return evaluations * evaluations


def pair_warnings(evaluations: int) -> list[str]:
    """The warning where two models were evaluated until they differed, or may have been."""
    if evaluations < 2:
        return []
    return [
        f"These models were evaluated {evaluations} times on this environment version: each is a "
        f"chance to differ by luck, so better and worse are said only where p times "
        f"{correction_factor(evaluations)} is below {ALPHA}."
    ]


def _asked(run: RunDir, config: EvaluateConfig) -> set[str]:
    """The models of an evaluation that were played."""
    refs = enumerate(config.model_refs)
    return {ref for index, ref in refs if run.model_evals(index).exists()}


def _runs_on(home: Home, env_id: str, run_id: str) -> Iterable[RunRow]:
    """Runs on a version, oldest first, none younger than `run_id`."""
    with Store(home) as store:
        rows = [row for row in store.list_runs(_MOST_RUNS) if row.env_id == env_id][::-1]
    ids = [row.run_id for row in rows]
    return rows[: ids.index(run_id) + 1] if run_id in ids else rows


def _models_on_heldout(home: Home, row: RunRow) -> int:
    """Models an evaluation has played on the held-out split; regrading is no new use."""
    run = home.run(row.run_id)
    config = run.find_config()  # one that is damaged cannot say what it asked
    if not isinstance(config, EvaluateConfig) or config.split != "heldout":
        return 0
    return sum(run.model_evals(index).exists() for index in range(len(config.models)))
