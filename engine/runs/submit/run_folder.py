"""The folder of a new run: config.json, adapters, contamination.

The folder is written before the run's row in the database, so that no row is without its folder.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import sync_folder, write_json
from engine.core.format import counted
from engine.home.owner_marks import seal_in
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes.waiting import link_checkpoint
from engine.models.adapters import ADAPTER_FILES, BASE_FILES
from engine.models.catalog import ModelRef
from engine.runs.submit.admission import bad_argument, check_not_deleted
from engine.runs.submit.contamination import Contamination

_ALL_RUNS = 100_000  # more than any home has
START = -1  # stands for a training run's start model where other models have an index in `models`


@dataclass(frozen=True)
class RunFiles:
    """The content of a new run's folder.

    Attributes:
        config: config.json without the run's id.
        start_adapter: the adapter that a training run continues from; the run keeps a copy.
        teacher_adapter: the adapter of a distillation's teacher; the run keeps a copy.
        model_adapters: the adapters of the models that are asked, by their index in `models`.
        contamination: which held-out tasks occur in the training rows of the run's models.
        needs: the id of the run whose stored answers this run reads, "" for none.
        awaited: models that other runs have yet to train, by their index in `models`, or by START
            for the start model of a training run.
    """

    config: Mapping[str, Any]
    start_adapter: Path | None = None
    teacher_adapter: Path | None = None
    model_adapters: Mapping[int, Path] | None = None
    contamination: Contamination | None = None
    needs: str = ""
    awaited: Mapping[int, ModelRef] = field(default_factory=dict)

    def writer(self, home: Home) -> Callable[[str], None]:
        """Return the function that writes the run's folder, for `Store.insert_run`.

        The store calls this function with the run's id just before it inserts the row. `writer`
        itself raises UserError BAD_ARGUMENT if a number in the config is not finite.
        """
        try:
            json.dumps(self.config, allow_nan=False)
        except ValueError as error:
            raise bad_argument("settings", "NaN", "Numbers must be finite.") from error
        config = {**self.config, **_owner_fields(home)}
        files = replace(self, config=config)
        return lambda run_id: write_folder(home.run(run_id), files)


def _owner_fields(home: Home) -> dict[str, str]:
    """Return the fields of config.json that tell for whom a run is queued: `owner`, `project` and
    `priority` of the access key on whose behalf the home is used; {} for the local user."""
    viewer = home.viewer
    if viewer is None:
        return {}
    return {"owner": viewer.owner, "project": viewer.project, "priority": viewer.priority}


def write_folder(run: RunDir, files: RunFiles) -> None:
    """Write a new run's folder with its files, and sync them to the disk.

    Raises UserError RUN_STATE if the run whose answers this one reads (`needs`) was deleted
    meanwhile, and ENV_SEALED if an evaluation asks more models than a sealed exam still allows.
    """
    if files.needs:
        check_not_deleted(run.home.run(files.needs), field="regrade")
    if files.config.get("kind") == "evaluate":
        _require_looks_left(run.home, files.config)
    run.create()
    config = {"run_id": run.id, **files.config, **_copy_adapters(run, files)}
    config |= _awaited_adapters(run, config, files.awaited)
    if files.contamination is not None:
        write_json(run.contamination, asdict(files.contamination))
    write_json(run.config, config)  # last: it names the other files
    sync_folder(run.home.runs)


def _require_looks_left(home: Home, config: Mapping[str, Any]) -> None:
    """Raise UserError ENV_SEALED if an evaluation takes more looks at a sealed exam than are left.

    A sealed exam is an environment version that only a limited number of models may be tested on; a
    look is one model in one evaluation. `config` is the evaluation's config.json. The caller holds
    the lock of the database, so two calls cannot take the same look.
    """
    seal = seal_in(Path(config["env_dir"]))
    if seal is None:
        return
    env_id = config["env_id"]
    needed_looks = len(config["models"])
    used_looks = _looks_since(home, env_id, seal.sealed)
    if used_looks + needed_looks > seal.looks:
        raise UserError(
            "ENV_SEALED",
            f"{env_id} is sealed for {counted(seal.looks, 'look')}: {used_looks} are used, and "
            f"this takes {needed_looks}",
            hint="Report what it has shown; its owner may push and seal fresh tasks.",
            field="env_id",
        )


def _looks_since(home: Home, env_id: str, since: float) -> int:
    """Count the looks at the environment version `env_id` since a time: the models of all its
    evaluations.

    `since` is in seconds since the epoch. Evaluations in every state count, because one that was
    cancelled may have shown scores too.
    """
    with Store(home) as store:
        rows = store.list_runs(limit=_ALL_RUNS, kind="evaluate")
    return sum(
        # The column `model` of an evaluation lists its models, separated by commas.
        row.model.count(",") + 1
        for row in rows
        if row.env_id == env_id and row.created >= since
    )


def _copy_adapters(run: RunDir, files: RunFiles) -> dict[str, object]:
    """Link or copy the files of all adapters into the run's folder.

    Returns the keys of config.json that name adapters, with the paths inside the folder.
    """
    home = run.home
    new_values: dict[str, object] = {}
    if files.start_adapter is not None:
        adapter = _link_folder(home, files.start_adapter, run.start_adapter)
        new_values["start_adapter"] = str(adapter)
    if files.teacher_adapter is not None:
        adapter = _link_folder(home, files.teacher_adapter, run.teacher_adapter)
        new_values["teacher"] = {**files.config["teacher"], "adapter": str(adapter)}
    if files.model_adapters:
        models = files.config["models"]
        new_values["models"] = _with_own_adapters(run, models, files.model_adapters)
    return new_values


def _awaited_adapters(
    run: RunDir, config: Mapping[str, Any], awaited: Mapping[int, ModelRef]
) -> dict[str, object]:
    """Return the keys of config.json about adapters that other runs have yet to train.

    The keys name the folders of this run into which the adapters will be put, and the runs that
    this one waits for. `config` is the config.json so far. `awaited` maps the place of a model
    (START, or its index in `config["models"]`) to the model. Returns {} if no adapter is awaited.
    """
    if not awaited:
        return {}
    waits_for = [_awaited_adapter(run, index, model) for index, model in awaited.items()]
    config_changes: dict[str, object] = {"waits_for": waits_for}
    if START in awaited:
        return config_changes | {"start_adapter": str(run.start_adapter)}
    entries = [dict(entry) for entry in config["models"]]
    for index in awaited:
        entries[index]["adapter"] = str(run.model_adapter(index))
    return config_changes | {"models": entries}


def _awaited_adapter(run: RunDir, index: int, model: ModelRef) -> Mapping[str, str]:
    """Make an entry of `waits_for` in config.json: a model that another run has yet to train.

    `index` is the model's index in `models`, or START; it decides the folder for the adapter.
    """
    folder = run.start_adapter if index == START else run.model_adapter(index)
    checkpoint = model.ref.partition("@")[2]  # e.g. "best" of "sums-sft-1@best"
    return {"run_id": model.waits_for, "checkpoint": checkpoint, "folder": str(folder)}


def awaited_of(models: Sequence[ModelRef]) -> dict[int, ModelRef]:
    """Return the models that other runs have yet to train: index in `models` -> model."""
    return {index: model for index, model in enumerate(models) if model.waits_for}


def _with_own_adapters(
    run: RunDir, models: Sequence[Mapping[str, Any]], adapters: Mapping[int, Path]
) -> list[dict[str, object]]:
    """Link or copy the files of the models' adapters into the run's folder.

    `adapters` maps the index of a model in `models` to the folder of its adapter. Returns the
    entries of `models` with the paths inside the run's folder.
    """
    entries = [dict(entry) for entry in models]
    for index, source in adapters.items():
        entries[index]["adapter"] = str(_link_folder(run.home, source, run.model_adapter(index)))
    return entries


def adapters_of(models: list[ModelRef]) -> dict[int, Path]:
    """Return the adapter folders of the models: index in `models` -> folder.

    Models without an adapter (base models, models behind a URL) are left out.
    """
    return {index: model.adapter for index, model in enumerate(models) if model.adapter is not None}


def _link_folder(home: Home, source: Path, target: Path) -> Path:
    """Fill the folder `target` with the files of the adapter or checkpoint in `source`.

    The files are linked if `source` belongs to a run of the home, and copied otherwise. Returns
    `target`.
    """
    if source.is_relative_to(home.runs):
        link_checkpoint(source, target)
        return target
    target.mkdir(parents=True, exist_ok=True)
    for name in ADAPTER_FILES:  # copies and not links: the owner of the source may change its files
        shutil.copyfile(source / name, target / name)
    for name in BASE_FILES:  # by these the trainer checks the base once more, when the run starts
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    sync_folder(target)
    return target
