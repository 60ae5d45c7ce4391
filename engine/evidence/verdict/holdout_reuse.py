"""How often the held-out tasks of an environment version have been used to choose.

Every look is a chance to be lucky. A training run looks with each checkpoint it examines (on the
half that chooses) and is then judged once on the other half; an evaluation looks once per model.
Whoever keeps the best of many runs has chosen on the very tasks that are reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.evidence.stats.inference import ALPHA
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig

MANY = 5  # runs judged on the same tasks, from which a verdict says so
_MOST = 2000  # runs looked through
# By home and version: what its runs were when they were counted, and the count.
_kept: dict[tuple[str, str], tuple[tuple[Any, ...] | None, dict[str, Any]]] = {}


def exam_use(home: Home, env_id: str, run_id: str = "") -> dict[str, Any]:
    """How often the held-out tasks of `env_id` were used, up to and with `run_id`, else by all.

    Returns `judged` (training runs judged on the half that is reported), `checkpoints` (compared
    on the other half), `evaluations` (models evaluated on them) and `looks`, their sum.
    """
    return _count(home, env_id, _runs_on(home, env_id, run_id))


def _count(home: Home, env_id: str, rows: Iterable[RunRow]) -> dict[str, Any]:
    judged = checkpoints = evaluations = 0
    for row in rows:
        if row.kind == "train":
            looked = sum(step > 0 for step in home.run(row.run_id).eval_steps())
            checkpoints += looked
            judged += looked > 0
        elif row.kind == "evaluate":
            evaluations += _models_on_heldout(home, row)
    looks = judged + checkpoints + evaluations
    return {
        "env_id": env_id,
        "judged": judged,
        "checkpoints": checkpoints,
        "evaluations": evaluations,
        "looks": looks,
    }


def use_by_env(home: Home) -> dict[str, dict[str, Any]]:
    """`exam_use` of every environment version that was looked at.

    Counting opens a folder for every run, so a version's count is kept by this process until one
    of its runs changes; while one is under way it is counted each time.
    """
    with Store(home) as store:
        marks = {env_id: mark for env_id, mark in store.env_marks().items() if env_id}
        stale = {
            env_id
            for env_id, mark in marks.items()
            if mark[1] or _kept.get((str(home.root), env_id), (None,))[0] != mark
        }
        rows = store.list_runs(_MOST) if stale else []
    for env_id in stale:
        count = _count(home, env_id, [row for row in rows if row.env_id == env_id])
        _kept[str(home.root), env_id] = marks[env_id], count
    return {env_id: _kept[str(home.root), env_id][1] for env_id in marks}


def caution(use: Mapping[str, Any], verdict: str, p: float | None) -> str:
    """What the number of looks means for a verdict, "" while they are few."""
    judged = int(use.get("judged") or 0)
    if judged < MANY:
        return ""
    text = f"{judged} runs have been judged on these held-out tasks"
    lucky = 1.0 - (1.0 - ALPHA / 2.0) ** judged
    if verdict == "better" and p is not None:
        if min(1.0, p * judged) < ALPHA:
            return ""  # it survives even if the best of them all had been picked
        return (
            f"{text}: that one of so many looks better by luck has a chance of {lucky:.0%}, and "
            "this gain does not survive a correction for them. Evaluate the run on new tasks."
        )
    return f"{text}; the best of them looks better than it is."


def looks_at_pair(home: Home, env_id: str, models: Sequence[str], upto: Sequence[str]) -> int:
    """How many different evaluations asked these models the tasks of a version's split, up to and
    with the younger of the runs `upto`; 1 where it was only that one.

    Whoever evaluates two models on more and more rows until they differ has looked as often. The
    same rows asked as often again are no new look, nor is scoring again.
    """
    rows = [row for row in _runs_on(home, env_id, "") if row.kind == "evaluate"]
    ends = [at for at, row in enumerate(rows) if row.run_id in upto]
    if not ends:
        return 1
    last = home.run(rows[ends[-1]].run_id).find_config()
    split = last.split if isinstance(last, EvaluateConfig | RegradeConfig) else "heldout"
    seen: set[str] = set()
    for row in rows[: ends[-1] + 1]:
        config = home.run(row.run_id).find_config()
        if not isinstance(config, EvaluateConfig) or config.split != split:
            continue
        if set(models) <= _asked(home.run(row.run_id), config):
            seed = config.settings.seed if config.attempts != 1 else None
            seen.add(f"{config.rows} {config.attempts} {seed}")
    return max(1, len(seen))


def price(looks: int) -> int:
    """What p is multiplied by at the last of so many evaluations of two models.

    The first one had the whole of ALPHA, so dividing it by their number would be too little: the
    k-th gets a k-squared part. Two equal models on ever more rows of the same split, four looks,
    are then told apart in 6 of 100 cases, with k in 8, without in 14 (test_looks.py).
    """
    return looks * looks


def _asked(run: RunDir, config: EvaluateConfig) -> set[str]:
    """The models of an evaluation that were played."""
    refs = enumerate(config.model_refs)
    return {ref for index, ref in refs if run.model_evals(index).exists()}


def _runs_on(home: Home, env_id: str, run_id: str) -> Iterable[RunRow]:
    """Runs on a version, oldest first, none younger than `run_id`."""
    with Store(home) as store:
        rows = [row for row in store.list_runs(_MOST) if row.env_id == env_id][::-1]
    ids = [row.run_id for row in rows]
    return rows[: ids.index(run_id) + 1] if run_id in ids else rows


def _models_on_heldout(home: Home, row: RunRow) -> int:
    """Models an evaluation has played on the held-out split; regrading is no new look."""
    run = home.run(row.run_id)
    config = run.find_config()  # one that is damaged cannot say what it asked
    if not isinstance(config, EvaluateConfig) or config.split != "heldout":
        return 0
    return sum(run.model_evals(index).exists() for index in range(len(config.models)))
