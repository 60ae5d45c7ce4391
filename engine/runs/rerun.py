"""The request that repeats a training run: the same environment version, model, settings, seed."""

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import TrainConfig
from engine.records.settings import GivenSettings
from engine.runs.submit.requests import TrainRequest
from engine.settings.setting_checks import UNUSED_CLIPS


def rerun_request(home: Home, run_id: str, changes: GivenSettings) -> TrainRequest:
    """Make the request that repeats the training run `run_id`, with `changes` to its settings.

    The request names every setting with the value that the run had, including defaults, so that
    later changes of the defaults have no effect. It also names the run's version of the
    environment, even if a newer version was pushed. The run becomes the parent of the new one, so
    that the reply shows what differs.

    Args:
        home: the home that holds the run.
        run_id: the run's id, or the unique beginning of it.
        changes: settings that are to differ, by name.

    Raises:
        UserError: RUN_NOT_FOUND if `run_id` matches no run or more than one; RUN_STATE if the run
            is not a training run.
        DamagedRecord: the run's config.json cannot be read.
    """
    with Store(home) as store:
        run_id = store.get_run(run_id).run_id  # the whole id
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
        settings=_settings_as_given(config, changes),
        note=f"{run_id} once more",
        expect=config.expect,
        parent=run_id,
        max_gpu_hours=config.max_gpu_hours,
    )


def _settings_as_given(config: TrainConfig, changes: GivenSettings) -> GivenSettings:
    """Return the settings of a run (`config`) as a user would give them, updated with `changes`.

    Settings whose values follow from other settings are left out.
    """
    resolved = config.settings.model_dump()
    settings = {name: value for name, value in resolved.items() if value is not None}
    for name in _implied_settings(settings):
        if config.sources.get(name) != "user":
            del settings[name]
    # `steps` and `epochs` cannot both be given, because `steps` follows from `epochs` and the batch
    # size. `epochs` is kept only if a change of these two has to give a new number of steps.
    changes_step_count = not changes.keys().isdisjoint({"epochs", "batch_size"})
    if "epochs" in settings and changes_step_count and "steps" not in changes:
        settings.pop("steps", None)
    else:
        settings.pop("epochs", None)
    return settings | dict(changes)


def _implied_settings(settings: GivenSettings) -> list[str]:
    """Return the names of settings that a request may not give, because their values are implied by
    other settings or by the environment.

    `settings` holds all settings of the run by name.
    """
    names = []
    if settings.get("max_turns") == 1:  # the environment has a single turn
        names.append("max_turns")
    if settings.get("eval_rows") == 0:  # the environment has no held-out tasks
        names.append("eval_rows")
    # The clips that do not act on the loss: (setting, why, what to do).
    unused_clips = UNUSED_CLIPS.get(str(settings.get("loss")), ())
    return names + [name for name, _, _ in unused_clips]
