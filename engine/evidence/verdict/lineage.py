"""Where a run's model comes from, and whether the run is worth going on from."""

from typing import Any

from engine.evidence.stats.results import load_rows, measure_of, only_half, selection_score, show
from engine.home.run_dir import Home, RunDir
from engine.records.run_config import TrainConfig

_DEEPEST = 12  # generations


def trained_by(home: Home, ref: str) -> str:
    """The training run of this home that a model reference names, "" for any other model."""
    name = ref.partition("@")[0]
    if not name or "/" in name or name in (".", ".."):  # a path or hub id is no run
        return ""
    config = home.run(name).find_config()  # of a name that is no run there is none
    return name if isinstance(config, TrainConfig) else ""


def line_of(run_dir: RunDir) -> list[RunDir]:
    """A run, the run that trained the model it began with, and so on to the first one."""
    line = [run_dir]
    while len(line) < _DEEPEST:
        parent = trained_by(run_dir.home, started_from(line[-1]))
        if not parent or parent in [run.id for run in line]:
            break
        line.append(run_dir.home.run(parent))
    return line


def started_from(run_dir: RunDir) -> str:
    """The model reference a run began with, "" where its config is gone."""
    config = run_dir.find_config()
    return config.model if isinstance(config, TrainConfig) else ""


def better_start(
    run_dir: RunDir, config: TrainConfig | None, step: int | None, verdict: str
) -> dict[str, Any]:
    """The model to go on with where a run is not `better`, and either `worse` or its best
    checkpoint, of `step`, no better than the start on the half that chooses; {} elsewhere.

    Returns `model`, and `said`: the sentence.
    """
    if verdict in ("better", "unknown"):
        return {}
    model = config.model if config else ""
    worse = {"model": model, "said": f"The start is better: go on with {model}."}
    found = _unbeaten(run_dir, model, step)
    return found or (worse if verdict == "worse" and model else {})


def _unbeaten(run_dir: RunDir, model: str, step: int | None) -> dict[str, Any]:
    """The start where no checkpoint beat it, {} where one did or nobody can tell."""
    if step is None:
        return {}
    sides = [only_half(load_rows(run_dir.evals(at)), "select") for at in (0, step)]
    scores = [selection_score(rows) for rows in sides]
    measure = measure_of(*sides)
    if scores[0] is None or scores[1] is None or measure is None or not model:
        return {}
    if {measure_of(rows) for rows in sides} != {measure} or scores[1][0] > scores[0][0]:
        return {}
    sign = -1.0 if measure == "loss" else 1.0  # a selection score is higher where it is better
    levels = [sign * score[0] for score in (scores[1], scores[0])]
    best, start = (show(v, measure) for v in levels)
    said = (
        f"No checkpoint beat the start ({best} at best against {start}, on the half that "
        f"chooses): go on with {model}."
    )
    return {"model": model, "said": said}
