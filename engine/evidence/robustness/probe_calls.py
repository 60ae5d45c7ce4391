"""The call that asks a trained model in other words, for a run whose rows all share a text."""

from engine.core.hints import Call
from engine.home.run_dir import RunDir
from engine.records.manifest import read_manifest
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.wording.kinds import Kind


def shared_by_rows(run: RunDir) -> list[Kind]:
    """The texts that all training rows of a run share, by the kind of other words that would tell
    whether its model depends on them; [] for none, and where the manifest is gone."""
    try:
        return read_manifest(run.manifest).shared_texts
    except (OSError, DamagedRecord):
        return []


def probe_calls(run: RunDir, config: RunConfig | None) -> list[Call]:
    """The call that asks the run's best checkpoint in other words, as a list of one; [] for a run
    whose rows share no text."""
    kinds = shared_by_rows(run) if isinstance(config, TrainConfig) else []
    if not kinds or config is None:
        return []
    arguments = {"env_id": config.env_id, "models": [f"{run.id}@best"], "perturb": list(kinds)}
    return [Call("evaluate", arguments)]
