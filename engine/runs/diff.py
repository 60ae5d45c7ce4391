"""Two trainings side by side before either has a result: runs, TOML files, or one of each."""

from pathlib import Path

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.reply import Reply
from engine.cost.estimate import planned_run
from engine.evidence.compare.described import Described, described_run, difference
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.settings.train_files import TrainFile, load_toml

_CHOSEN = ("user", "parent run")  # sources of a setting that somebody chose


def diff(home: Home, before: str, after: str) -> Reply:
    """Compare the settings and choices of two trainings; return the reply about the differences.

    `changed` in the reply lists the values that somebody chose differently, `followed` the values
    that differ although nobody chose them.

    Args:
        before, after: a run's id, the beginning of an id, or a TOML file for `honesmith train`.

    Raises UserError RUN_NOT_FOUND if a name matches no run or more than one, RUN_STATE if a run
    trains nothing, BAD_ARGUMENT or SETTING_* if a file does not exist or is not valid.
    """
    first, second = _describe(home, before), _describe(home, after)
    result = difference(first, second)
    changes = result.in_words() or "nothing"
    followed_note = ""
    if result.chosen and result.followed:
        followed_note = f"; {counted(len(result.followed), 'setting')} follow from it"
    return {
        "summary": f"{second.name} against {first.name}: {changes}{followed_note}.",
        "next": [],
        "warnings": _warnings(first, second),
        **result.to_json(),
    }


def _warnings(*sides: Described) -> list[str]:
    """Return a warning for each of the compared trainings of which only the settings in its file
    are known, because its environment or model is not in this home."""
    return [
        f"{side.name}: its environment or model is not here; only what the file gives is compared"
        for side in sides
        if not side.is_complete
    ]


def _describe(home: Home, name: str) -> Described:
    """Describe the training that `name` stands for: a TOML file, a run id, or the beginning of one.

    Raises UserError RUN_NOT_FOUND if `name` matches no run or more than one, RUN_STATE if the run
    trains nothing, BAD_ARGUMENT or SETTING_* if the file does not exist or is not valid.
    """
    if name.endswith(".toml"):
        return _describe_file(home, load_toml(Path(name)), name)
    with Store(home) as store:
        run_id = store.get_run(name).run_id
    described = described_run(home, run_id)
    if described is None:
        raise UserError(
            "RUN_STATE",
            f"{run_id} trains nothing, or its config.json is gone: it has no settings",
            hint="Name a training run or a TOML file.",
            field="run_id",
        )
    return described


def _describe_file(home: Home, file: TrainFile, name: str) -> Described:
    """Describe the training of a TOML file, with the value that each setting would get now.

    If its environment or model is not in this home, the description holds only the settings that
    the file gives, and its `is_complete` is False. `name` is the name of the file.
    """
    choices: dict[str, object] = {
        "model": file.model,
        "algorithm": file.algorithm,
        "env_id": file.env,
    }
    if file.then:
        choices["then"] = file.then
    if file.vary:
        choices["vary"] = file.vary
    try:
        run = planned_run(home, file.env, file.model, file.algorithm, file.settings)
    except UserError:
        given_settings = dict(file.settings)  # without defaults, which need environment and model
        return Described(
            name, choices, given_settings, frozenset(given_settings), is_complete=False
        )
    resolved = run.resolved
    # The settings that somebody chose; the values of the others follow from defaults.
    chosen = frozenset(setting for setting, source in resolved.sources.items() if source in _CHOSEN)
    choices["env_id"] = run.env_id  # the whole id of the version that the name means now
    return Described(name, choices, resolved.settings.model_dump(), chosen)
