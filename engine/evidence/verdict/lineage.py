"""Which runs a run's model comes from, whether the run is worth continuing from, and for which
version another prompt was written."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.evidence.stats.results import (
    VALIDATION,
    Measure,
    in_half,
    measure_of,
    selection_score,
    show,
)
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import LearningConfig, TrainConfig

_MOST_GENERATIONS = 12  # of ancestors that are looked up


@dataclass(frozen=True)
class Start:
    """A model to continue from instead of a run's result, and the sentence that says so."""

    model: str
    sentence: str


def trained_by(home: Home, ref: str) -> str:
    """The id of the training run of this home that a model reference names: "r-1" for "r-1@step20".

    Returns "" for any other model: a path, a hub id, a run that trains nothing, or a run that is
    gone. The result may be a run that the viewer of the home does not see; `sees` tells that.
    """
    name, _, _ = ref.partition("@")
    if not name or "/" in name or name in (".", ".."):  # a path or a hub id, not a run
        return ""
    config = home.run(name).find_config()  # None if there is no run of this name
    return name if isinstance(config, TrainConfig) else ""


def sees(home: Home, run_id: str) -> bool:
    """Whether the viewer of the home (the person who asks) may see the run with this id. A home
    without a viewer shows all runs."""
    if home.viewer is None:
        return True
    # The database is asked before the run's folder is looked for: an error about the folder would
    # tell that there is such a run.
    with Store(home) as store:
        try:
            return store.sees_run(run_id)
        except UserError:  # FORBIDDEN: it is seen, and shared for less than the present call does
            return True


def prompt_source(home: Home, env_id: str) -> str:
    """The version that asks the tasks of `env_id` with another prompt, from which it was made;
    `env_id` itself where there is none."""
    name, _, hash12 = env_id.partition("@")
    if not name or not hash12:
        return env_id
    return str(read_object(home.env(name, hash12) / "env.json").get("prompt_of") or env_id)


def prompts_warning(env_ids: Iterable[str]) -> list[str]:
    """A warning that models were asked the same tasks on several versions, which have different
    prompts, as a list of one. Returns [] if `env_ids` (of the models) are all one version."""
    versions = list(dict.fromkeys(env_ids))
    if len(versions) < 2:
        return []
    return [f"The same tasks with different prompts, those of {' and '.join(versions)}."]


def ancestry(run_dir: RunDir) -> list[RunDir]:
    """The chain of runs that led to this run's model: this run, the run that trained the model it
    began with, and so on.

    The chain has at most `_MOST_GENERATIONS` runs, and ends before a run that it already contains.
    """
    runs = [run_dir]
    while len(runs) < _MOST_GENERATIONS:
        oldest = runs[-1]
        parent_id = trained_by(run_dir.home, started_from(oldest))  # "" for a base model
        if not parent_id or parent_id in [run.id for run in runs]:
            break
        runs.append(run_dir.home.run(parent_id))
    return runs


def started_from(run_dir: RunDir) -> str:
    """The reference of the model that a training run began with. Returns "" if its config is
    missing."""
    config = run_dir.find_config()
    return config.model if isinstance(config, TrainConfig) else ""


def better_start(
    run_dir: RunDir, config: LearningConfig | None, step: int | None, verdict: str
) -> Start | None:
    """The model that training started from, if the run did not improve on it; else None.

    The run did not improve if its best checkpoint (at `step`) did not beat the start on the tasks
    that chose the checkpoint, or if the `verdict` is "worse". Returns None if the verdict is
    "better" or "unknown", if the config is missing, or if no weights were trained.
    """
    model = config.model if isinstance(config, TrainConfig) else ""
    if verdict in ("better", "unknown") or not model:
        return None
    start = _start_not_beaten(run_dir, model, step)
    if start is None and verdict == "worse":
        return Start(model, f"The start is better: go on with {model}.")
    return start


def _start_not_beaten(run_dir: RunDir, model: str, best_step: int | None) -> Start | None:
    """The start `model`, if the best checkpoint did not beat it on the tasks that chose the
    checkpoint.

    Returns None if the checkpoint beat it, or if that cannot be told: `best_step` is None, one of
    the two was not scored, or they were scored by different measures.
    """
    if best_step is None:
        return None
    start_rows, best_rows = _validation_rows(run_dir, 0), _validation_rows(run_dir, best_step)
    measure = measure_of(start_rows)
    start_score, best_score = selection_score(start_rows), selection_score(best_rows)
    if measure is None or start_score is None or best_score is None:
        return None
    start_mean, _ = start_score  # the second number only breaks ties between checkpoints
    best_mean, _ = best_score
    if measure_of(best_rows) != measure or best_mean > start_mean:
        return None
    best_level, start_level = _level_text(best_mean, measure), _level_text(start_mean, measure)
    return Start(
        model,
        f"No checkpoint beat the start ({best_level} at best against {start_level}, on the half "
        f"that chooses): go on with {model}.",
    )


def _validation_rows(run_dir: RunDir, step: int) -> list[EvaluationRow]:
    """The answers of a step's model to the held-out tasks that choose the checkpoint."""
    return in_half(read_evaluation(run_dir.evals(step)), VALIDATION)


def _level_text(selection_mean: float, measure: Measure) -> str:
    """A mean as text. `selection_mean` is the first number of a selection score, which negates a
    loss."""
    sign = -1.0 if measure == "loss" else 1.0  # undo the negation
    return show(sign * selection_mean, measure)
