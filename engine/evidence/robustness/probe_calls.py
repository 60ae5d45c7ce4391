"""The call that evaluates a trained model on reworded tasks, for a run whose rows all share a text;
and what earlier evaluations on reworded tasks say of a model that is to be trained."""

from engine.core.hints import Call
from engine.core.wording.kinds import Kind
from engine.evidence.robustness.robustness import reworded_better_sentences, robustness_of
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.records.manifest import read_manifest
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig

_LOOK_BACK = 100  # newest evaluations that are searched


def shared_by_rows(run: RunDir) -> list[Kind]:
    """The kinds of rewording whose texts are the same in all training rows of a run, such as
    "tools" if all rows have the same tools. The model may depend on the very words of such a text.

    Returns [] if rows share no text, or if the manifest is missing or damaged.
    """
    try:
        return read_manifest(run.manifest).shared_texts
    except (OSError, DamagedRecord):
        return []


def probe_calls(run: RunDir, config: RunConfig | None) -> list[Call]:
    """The call that evaluates the run's best checkpoint on reworded tasks, as a list of one.
    Returns [] if the run's rows share no text, or if it trains nothing."""
    kinds = shared_by_rows(run) if isinstance(config, TrainConfig) else []
    if not kinds or config is None:
        return []
    arguments = {"env_id": config.env_id, "models": [f"{run.id}@best"], "perturb": list(kinds)}
    return [Call("evaluate", arguments)]


def reworded_better(home: Home, env_id: str, model: str) -> list[str]:
    """The sentence that `model` was better on reworded tasks than on the tasks as they are, by its
    newest evaluation on the version `env_id` that reworded them; a list of one.

    Returns [] if it was not better, or if no evaluation asked it reworded tasks.
    """
    with Store(home) as store:
        rows = store.list_runs(_LOOK_BACK, states=["done"], kind="evaluate")  # the newest first
    for row in rows:
        if row.env_id != env_id:
            continue
        run = home.run(row.run_id)
        all_results = robustness_of(run, run.find_config(), redactor_for(home, None))
        results = [result for result in all_results if result.model == model]
        if results:
            return reworded_better_sentences(results)
    return []
