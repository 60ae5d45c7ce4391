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
    """How what two trainings were told differs: `changed` by somebody, and what `followed` from it.

    Args:
        before, after: a run, a unique prefix of one, or a TOML file as `honesmith train` takes it.

    Raises UserError: RUN_NOT_FOUND, RUN_STATE (a run that trains nothing), or the errors of a TOML
    file.
    """
    first, second = _described(home, before), _described(home, after)
    result = difference(first, second)
    told = result.in_words() or "nothing"
    more = ""
    if result.chosen and result.followed:
        more = f"; {counted(len(result.followed), 'setting')} follow from it"
    return {
        "summary": f"{second.name} against {first.name}: {told}{more}.",
        "next": [],
        "warnings": _warnings(first, second),
        **result.to_json(),
    }


def _warnings(*sides: Described) -> list[str]:
    """A warning for each file whose settings could not be chosen in full."""
    return [
        f"{side.name}: its environment or model is not here; only what the file gives is compared"
        for side in sides
        if not side.is_complete
    ]


def _described(home: Home, name: str) -> Described:
    """A run or a file, as it was described."""
    if name.endswith(".toml"):
        return _described_file(home, load_toml(Path(name)), name)
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


def _described_file(home: Home, file: TrainFile, name: str) -> Described:
    """A TOML file with every setting that it would be trained with; where its environment or its
    model is not here, with those that it gives."""
    choices: dict[str, object] = {
        "model": file.model,
        "algorithm": file.algorithm,
        "env_id": file.env,
    }
    choices |= {"then": file.then} if file.then else {}
    choices |= {"vary": file.vary} if file.vary else {}
    try:
        run = planned_run(home, file.env, file.model, file.algorithm, file.settings)
    except UserError:
        given = dict(file.settings)
        return Described(name, choices, given, frozenset(given), is_complete=False)
    resolved = run.resolved
    chosen = frozenset(n for n, source in resolved.sources.items() if source in _CHOSEN)
    choices["env_id"] = run.env_id
    return Described(name, choices, resolved.settings.model_dump(), chosen)
