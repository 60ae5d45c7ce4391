"""A training run once more: the same versions of environment and model, settings and seed."""

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import TrainConfig
from engine.records.settings import GivenSettings
from engine.runs.submit.requests import TrainRequest


def rerun_request(home: Home, run_id: str, changes: GivenSettings) -> TrainRequest:
    """Make the request that trains once more what the run `run_id` trained, with `changes`.

    Every setting is given as the run had it, also those that were defaults: a newer version of the
    defaults changes nothing. The version of the environment is that of the run, even where a newer
    one was pushed. The run becomes the parent, so that the answer names what differs.

    Args:
        home: the home that holds the run.
        run_id: the run, or a unique prefix.
        changes: settings that are to differ, by name.

    Raises:
        UserError: RUN_NOT_FOUND; RUN_STATE where the run did not train.
        DamagedRecord: its config.json cannot be read.
    """
    with Store(home) as store:
        run_id = store.get_run(run_id).run_id  # of a unique prefix
    config = home.run(run_id).read_config()
    if not isinstance(config, TrainConfig):
        raise UserError(
            "RUN_STATE",
            f"{run_id} trained nothing, so there is nothing to train again",
            hint="Repeat an evaluation with honesmith evaluate.",
            field="run_id",
        )
    return TrainRequest(
        env_id=config.env_id,
        model=config.model,
        algorithm=config.algorithm,
        settings=_as_given(config, changes),
        note=f"{run_id} once more",
        expect=config.expect,
        parent=run_id,
        max_gpu_hours=config.max_gpu_hours,
    )


def _as_given(config: TrainConfig, changes: GivenSettings) -> GivenSettings:
    """Return the settings of a run as a user would give them, with `changes` made.

    Settings that follow from others are left out.
    """
    resolved = config.settings.model_dump()
    settings = {name: value for name, value in resolved.items() if value is not None}
    for name in _only_filled_in(settings):
        if config.sources.get(name) != "user":
            del settings[name]
    # `steps` follow from `epochs` and the batch size; both together are refused.
    follow_from_epochs = "epochs" in settings and {"epochs", "batch_size"} & changes.keys()
    settings.pop("steps" if follow_from_epochs and "steps" not in changes else "epochs", None)
    return settings | dict(changes)


def _only_filled_in(settings: GivenSettings) -> list[str]:
    """List the settings of a run that may not be given, because their values follow from others.

    `settings` holds all settings of the run by name. Some values follow from the environment.
    """
    names = []
    if settings.get("max_turns") == 1:  # of an environment with a single turn
        names.append("max_turns")
    if settings.get("eval_rows") == 0:  # of an environment without held-out tasks
        names.append("eval_rows")
    if settings.get("loss") == "cispo":  # which clips from above only
        names.append("clip_low")
    return names
