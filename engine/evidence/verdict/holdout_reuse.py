"""How often the held-out tasks of an environment version have been used to choose.

Every use is a chance to be lucky. A training run uses these tasks for each checkpoint it evaluates
(on the validation half) and once more for its verdict (on the test half); an evaluation uses them
once per model. If a version has dev tasks, those choose the checkpoint, and only the verdict is a
use. Whoever keeps the best of many runs has chosen on the very tasks that are reported.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.format import whole_percent
from engine.evidence.stats.inference import ALPHA
from engine.evidence.stats.power import split_rows
from engine.evidence.verdict.lineage import prompt_source
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig

MANY = 5  # a verdict warns if at least this many runs were judged on the same tasks
_MOST_RUNS = 2000  # newest runs of a home that are counted: each is a folder to open


@dataclass(frozen=True)
class HoldoutUse:
    """How often the held-out tasks of an environment version were used.

    Attributes:
        env_id: the version.
        judged: how many training runs got a verdict on the test half.
        checkpoints: how many checkpoints were compared on the validation half.
        evaluations: how many times an evaluation asked a model these tasks.
    """

    env_id: str
    judged: int
    checkpoints: int
    evaluations: int

    @property
    def total(self) -> int:
        """The number of all uses."""
        return self.judged + self.checkpoints + self.evaluations

    def to_json(self) -> dict[str, object]:
        """The counts as they stand in results; `looks` is their sum."""
        return {
            "env_id": self.env_id,
            "judged": self.judged,
            "checkpoints": self.checkpoints,
            "evaluations": self.evaluations,
            "looks": self.total,
        }


@dataclass(frozen=True)
class _StoredCount:
    """A version's uses, with the fingerprint that its runs (`Store.env_marks`) had when they were
    counted."""

    fingerprint: tuple[Any, ...]
    use: HoldoutUse


_stored_counts: dict[tuple[str, str], _StoredCount] = {}  # (root of the home, env_id) -> its count

_EvaluationKey = tuple[int | None, int, int | None]  # (rows, attempts, seed)


def holdout_use(home: Home, env_id: str, run_id: str = "") -> HoldoutUse:
    """How often the held-out tasks of `env_id` were used to choose a checkpoint or to judge a
    model.

    `env_id` is one version of an environment. The runs on it up to and including `run_id` are
    counted; all of them if `run_id` is "" or did not run on this version.
    """
    return _count_uses(home, env_id, _runs_on_version(home, env_id, run_id))


def _count_uses(home: Home, env_id: str, rows: Iterable[RunRow]) -> HoldoutUse:
    """Count the uses of the held-out tasks by `rows`, runs that all ran on `env_id`.

    A training run uses the tasks once for each checkpoint it evaluated (not if dev tasks choose the
    checkpoint), and once for its verdict if it evaluated any. An evaluation uses them once for each
    model.
    """
    dev_chooses = bool(split_rows(home, env_id, "dev"))  # dev tasks choose, if there are any
    judged = checkpoints = evaluations = 0
    for row in rows:
        if row.kind == "train":
            # Step 0 is the model before training: it is evaluated but cannot be chosen.
            evaluated_count = sum(step > 0 for step in home.run(row.run_id).eval_steps())
            if not dev_chooses:
                checkpoints += evaluated_count
            if evaluated_count > 0:
                judged += 1
        elif row.kind == "evaluate":
            evaluations += _models_on_heldout(home, row)
    return HoldoutUse(env_id, judged, checkpoints, evaluations)


def use_by_env(home: Home) -> dict[str, HoldoutUse]:
    """How often the held-out tasks of each environment version were used by all runs on it, by
    env_id.

    Every version that has runs is included. Counting opens a folder for each run, so this process
    keeps the count of a version until one of its runs changes.
    """
    home = home.whole  # a use counts, whoever made it
    root = str(home.root)
    with Store(home) as store:
        # A version's fingerprint changes whenever one of its runs does. A run may have no version.
        fingerprints = {env_id: mark for env_id, mark in store.env_marks().items() if env_id}
        stale_env_ids = [
            env_id for env_id, mark in fingerprints.items() if _is_stale(home, env_id, mark)
        ]
        rows = store.list_runs(_MOST_RUNS) if stale_env_ids else []
    for env_id in stale_env_ids:
        use = _count_uses(home, env_id, [row for row in rows if row.env_id == env_id])
        _stored_counts[root, env_id] = _StoredCount(fingerprints[env_id], use)
    return {env_id: _stored_counts[root, env_id].use for env_id in fingerprints}


def _is_stale(home: Home, env_id: str, fingerprint: tuple[Any, ...]) -> bool:
    """Whether the uses of a version must be counted again. `fingerprint` is that of its runs now,
    as `Store.env_marks` gives it."""
    stored_count = _stored_counts.get((str(home.root), env_id))
    # A run under way evaluates checkpoints, which does not change the fingerprint.
    _, runs_under_way, *_ = fingerprint
    return stored_count is None or stored_count.fingerprint != fingerprint or runs_under_way > 0


def reuse_warning(use: HoldoutUse, verdict: str, p: float | None) -> list[str]:
    """A warning that many runs were judged on the same held-out tasks, as a list of one sentence.

    Returns [] if there were fewer than MANY, or if the gain is significant even after a correction
    for their number. `verdict` is that of the run which is warned, such as "better"; `p` is the p
    value of its comparison, None if there was no test.
    """
    if use.judged < MANY:
        return []
    text = f"{use.judged} runs have been judged on these held-out tasks"
    if verdict != "better" or p is None:
        return [f"{text}; the best of them looks better than it is."]
    if p * use.judged < ALPHA:  # Bonferroni: significant even as the best of all these runs
        return []
    # At level ALPHA a run without any change comes out better by luck with probability ALPHA / 2.
    chance_of_luck = 1.0 - (1.0 - ALPHA / 2.0) ** use.judged
    return [
        f"{text}: that one of so many looks better by luck has a chance of "
        f"{whole_percent(chance_of_luck)}, and this gain does not survive a correction for them. "
        "Evaluate the run on new tasks."
    ]


def evaluations_of_pair(
    home: Home, env_id: str, models: Sequence[str], run_ids: Sequence[str]
) -> int:
    """How many different evaluations have tested these models against each other; at least 1.

    Someone who evaluates two models on more and more rows until they differ makes one test with
    each evaluation. Asking the same rows again in the same way is not a new test.

    Args:
        env_id: the environment version they were evaluated on.
        models: references of the models; an evaluation counts if it asked all of them.
        run_ids: ids of evaluations. Evaluations up to and including the newest of these are
            counted, if they asked the same split of tasks as that one.
    """
    rows = _evaluations_until(home, env_id, run_ids)
    if not rows:
        return 1
    newest = rows[-1]
    split = _split_of(home.run(newest.run_id))
    keys = {_key_of_test(home.run(row.run_id), split, models) for row in rows}
    return max(1, len(keys - {None}))  # None: not a test of these models on this split


def _evaluations_until(home: Home, env_id: str, run_ids: Sequence[str]) -> list[RunRow]:
    """The evaluations on a version, oldest first, up to and including the newest of `run_ids`.
    Returns [] if none of `run_ids` is an evaluation on this version."""
    rows = [row for row in _runs_on_version(home, env_id) if row.kind == "evaluate"]
    indices = [index for index, row in enumerate(rows) if row.run_id in run_ids]
    return rows[: indices[-1] + 1] if indices else []


def _key_of_test(run: RunDir, split: str, models: Sequence[str]) -> _EvaluationKey | None:
    """The key of an evaluation that tested all of `models` on `split`; a repeated evaluation has
    the same key.

    Returns None if the run is no such evaluation. Regrading is none: it scores old answers again.
    """
    config = run.find_config()
    if not isinstance(config, EvaluateConfig) or config.split != split:
        return None
    tested_all = set(models) <= _models_with_results(run, config)
    return _evaluation_key(config) if tested_all else None


def _evaluation_key(config: EvaluateConfig) -> _EvaluationKey:
    """(rows, attempts, seed) of an evaluation: two evaluations with equal keys are one test.

    A single attempt is greedy by default, so another seed makes no new test; the seed is None then.
    """
    seed = config.settings.seed if config.attempts != 1 else None
    return config.rows, config.attempts, seed


def correction_factor(evaluations: int) -> int:
    """The factor by which p is multiplied at the last of `evaluations` evaluations of the same two
    models.

    The factor is the square of their number. The number alone would be too small, because the first
    evaluation was already tested at the full level ALPHA.
    """
    # Measured on two equal models, evaluated four times on more and more rows: they seem to
    # differ in 6 of 100 cases with the square, in 8 with the number, and in 14 without either
    # (tests/engine/evidence/verdict/test_holdout_reuse.py).
    return evaluations * evaluations


def pair_warnings(evaluations: int) -> list[str]:
    """A warning that two models were evaluated several times, as a list of one. [] for one
    evaluation."""
    if evaluations < 2:
        return []
    return [
        f"These models were evaluated {evaluations} times on this environment version: each is a "
        f"chance to differ by luck, so better and worse are said only where p times "
        f"{correction_factor(evaluations)} is below {ALPHA}."
    ]


def _split_of(evaluation: RunDir) -> str:
    """The split of tasks that an evaluation asked; "heldout" if the evaluation's config is
    damaged."""
    config = evaluation.find_config()
    return config.split if isinstance(config, EvaluateConfig | RegradeConfig) else "heldout"


def _models_with_results(run: RunDir, config: EvaluateConfig) -> set[str]:
    """References of the evaluation's models that have results."""
    return {ref for index, ref in enumerate(config.model_refs) if run.model_evals(index).exists()}


def _runs_on_version(home: Home, env_id: str, last_run: str = "") -> list[RunRow]:
    """The runs on a version, or on one that asks its tasks with another prompt, oldest first, up to
    and including the run with the id `last_run`.

    Returns all runs on the version if `last_run` is not among them.
    """
    with Store(home.whole) as store:  # a use counts, whoever made it
        newest_first = store.list_runs(_MOST_RUNS)
    name, _, _ = env_id.partition("@")
    source = prompt_source(home, env_id)  # the version whose tasks all of these ask
    versions = {env_id}
    for other_id in {row.env_id for row in newest_first}:  # each version is looked up once
        other_name, _, _ = other_id.partition("@")
        if other_name == name and prompt_source(home, other_id) == source:
            versions.add(other_id)
    rows = [row for row in reversed(newest_first) if row.env_id in versions]
    ids = [row.run_id for row in rows]
    return rows[: ids.index(last_run) + 1] if last_run in ids else rows


def _models_on_heldout(home: Home, row: RunRow) -> int:
    """How many models an evaluation has asked tasks of the held-out split.

    Returns 0 for another split, for regrading (which asks no model) and for a damaged config.
    """
    run = home.run(row.run_id)
    config = run.find_config()
    if not isinstance(config, EvaluateConfig) or config.split != "heldout":
        return 0
    return sum(run.model_evals(index).exists() for index in range(len(config.models)))
