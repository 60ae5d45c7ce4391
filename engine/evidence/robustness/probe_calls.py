"""The call that evaluates a trained model on reworded tasks, for a run whose rows all share a
text."""

from engine.core.hints import Call
from engine.home.run_dir import RunDir
from engine.records.manifest import read_manifest
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.wording.kinds import Kind


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
