"""The folder of a new run: config.json, adapters, contamination.

It is on the disk before the row is written, so a row never points at nothing.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.files import sync_folder, write_json
from engine.home.run_dir import Home, RunDir
from engine.models.adapters import ADAPTER_FILES
from engine.models.catalog import ModelRef
from engine.runs.submit.admission import bad_argument, check_not_deleted
from engine.runs.submit.contamination import Contamination


@dataclass(frozen=True)
class RunFiles:
    """The content of a new run's folder.

    Attributes:
        config: config.json without the run's id.
        start_adapter: the adapter a training run goes on from; the run keeps a copy of it.
        teacher_adapter: the adapter of a distillation's teacher; the run keeps a copy of it.
        model_adapters: the adapters of the models it asks, by their place in `models`.
        contamination: which held-out tasks the training rows of the run's models hold.
        needs: the run whose stored answers it reads, "" for none.
    """

    config: Mapping[str, Any]
    start_adapter: Path | None = None
    teacher_adapter: Path | None = None
    model_adapters: Mapping[int, Path] | None = None
    contamination: Contamination | None = None
    needs: str = ""

    def writer(self, home: Home) -> Callable[[str], None]:
        """Return a function that writes the run's folder, for `Store.insert_run`: it is called with
        the run's id just before the row is inserted.

        Raises UserError BAD_ARGUMENT at once where a number in the config is not finite.
        """
        try:
            json.dumps(self.config, allow_nan=False)
        except ValueError as error:
            raise bad_argument("settings", "NaN", "Numbers must be finite.") from error
        return lambda run_id: write_folder(home.run(run_id), self)


def write_folder(run: RunDir, files: RunFiles) -> None:
    """Write a new run's folder with its files, so that they survive a power cut.

    Raises UserError RUN_STATE where the run whose answers it reads (`needs`) was deleted meanwhile.
    """
    if files.needs:
        check_not_deleted(run.home.run(files.needs), field="regrade")
    run.create()
    config = {"run_id": run.id, **files.config, **_copy_adapters(run, files)}
    if files.contamination is not None:
        write_json(run.contamination, asdict(files.contamination))
    write_json(run.config, config)  # last: it names the other files
    sync_folder(run.home.runs)


def _copy_adapters(run: RunDir, files: RunFiles) -> dict[str, object]:
    """Put links to the files of all adapters, or copies of them, into the run's folder. Returns the
    keys of config.json that name adapters, with their new paths."""
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


def _with_own_adapters(
    run: RunDir, models: Sequence[Mapping[str, Any]], adapters: Mapping[int, Path]
) -> list[dict[str, object]]:
    """Put links to the files of the models' adapters, or copies of them, into the run's folder.
    Returns the entries of `models` with the new paths.

    `adapters` holds each model's adapter by the index of the model in `models`.
    """
    entries = [dict(entry) for entry in models]
    for index, source in adapters.items():
        entries[index]["adapter"] = str(_link_folder(run.home, source, run.model_adapter(index)))
    return entries


def adapters_of(models: list[ModelRef]) -> dict[int, Path]:
    """The adapter folders of the models: place in the list -> folder, for each model that has
    one."""
    return {index: model.adapter for index, model in enumerate(models) if model.adapter is not None}


def _link_folder(home: Home, source: Path, target: Path) -> Path:
    """Fill the folder `target` with links to the files of the adapter or checkpoint `source`. If
    `source` lies outside the home's runs, they are copies. Returns `target`."""
    target.mkdir(parents=True, exist_ok=True)
    if source.is_relative_to(home.runs):
        _link_files(source, target)
    else:  # copies of the adapter's files, because the owner of the source may change them
        for name in ADAPTER_FILES:
            shutil.copyfile(source / name, target / name)
    sync_folder(target)
    return target


def _link_files(source: Path, target: Path) -> None:
    """Make hard links to the files of a checkpoint of this home, or copies where links are not
    possible. Links and copies stay even if the run that wrote the checkpoint deletes it."""
    for name in os.listdir(source):
        try:
            os.link(source / name, target / name)
        except FileExistsError:
            continue  # an earlier attempt to write this folder made the link
        except OSError:  # no hard links here, or another disk
            shutil.copy2(source / name, target / name)
