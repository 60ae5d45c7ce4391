"""Exports a trained model: its adapter as a PEFT folder, or the adapter merged into the base, as a
model folder or as a GGUF file with a Modelfile for Ollama. The model card is written beside each.

The target folder appears complete or not at all. Merging needs torch, so a worker process does it.
A merge that takes longer than the call goes on, and the same call made again returns its result.
"""

import errno
import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from engine.core.agent_files import refuse_folder_of_agent_files
from engine.core.errors import UserError
from engine.core.files import (
    JsonObject,
    is_locked,
    read_json,
    read_tail,
    sync_folder,
    take_lock,
    write_json,
)
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.report import html_report
from engine.home.run_dir import Home, RunDir
from engine.machine.processes import launcher, programs
from engine.models import adapters, catalog
from engine.models.adapters import BASE_WEIGHTS, ORIGIN
from engine.models.catalog import ModelRef
from engine.records.manifest import Manifest
from engine.records.record import DamagedRecord
from engine.serving import modelfile

# The adapter alone, a model folder with the adapter merged in, or a GGUF file with 16-bit or 8-bit
# weights.
FORMATS = ("adapter", "merged", "gguf-f16", "gguf-q8_0")
_GGUF = "gguf-"  # a format that begins so is a GGUF file; the kind of its weights follows
_CARD = "README.md"
WAIT_S = 40.0  # seconds that one call waits for a merge
_ADAPTER_FILES = (adapters.CONFIG, adapters.WEIGHTS)


def export(home: Home, ref: str, export_format: str = "adapter", path: str = "") -> Reply:
    """Write the files of the model `ref`, such as "arith-grpo-7@best", to `path`, by default to a
    folder below the home's `exports/`. `export_format` is one of `FORMATS`. Nothing is overwritten.

    The reply's `state` is "exported", or "exporting" while a merge goes on: the same call made
    again returns its result.

    Raises UserError:
        BAD_ARGUMENT if the format does not exist, `ref` is a base model or the target cannot be
            used; MODEL_* if there is no such model; DEPLOY_FAILED if the merge failed; NO_TORCH if
            no interpreter has torch; DISK_FULL if the disk is full.
    """
    _check_format(export_format)
    model = _model_with_adapter(home, ref)
    target = _target_folder(home, model, export_format, path)
    origin = _origin(model, export_format)
    if _is_this_export(target, origin):
        return _export_reply(model, target, export_format, was_there=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        is_complete = _write_export(home, model, target, origin)
    except OSError as error:
        raise _cannot_write_error(target, error) from error
    if not is_complete:
        return _still_merging_reply(ref, target, export_format)
    return _export_reply(model, target, export_format, was_there=False)


def _check_format(export_format: str) -> None:
    """Raise UserError BAD_ARGUMENT if `export_format`, the format that the caller named, is not one
    of `FORMATS`."""
    if export_format not in FORMATS:
        raise UserError(
            "BAD_ARGUMENT",
            f"format={export_format!r} is not available",
            hint=f"Available: {', '.join(FORMATS)}.",
            field="format",
        )


def _origin(model: ModelRef, export_format: str) -> dict[str, str]:
    """Make the content of the ORIGIN file of an export in this format: which run, checkpoint and
    base it comes from. By this a later call recognises the same export."""
    assert model.adapter is not None  # `_model_with_adapter` refuses others
    return {
        "run": model.run_id,
        "checkpoint": model.adapter.name,
        "base": model.base_ref,
        "format": export_format,
    }


def _write_export(home: Home, model: ModelRef, target: Path, origin: dict[str, str]) -> bool:
    """Write the files of the export to `target`. Returns False if a merge is still going on.
    `origin` is the content of the ORIGIN file, which says where the export comes from."""
    if origin["format"] != "adapter":
        return _merge(home, model, target, origin)
    # An adapter that no run of this home trained has no record of its base's weights.
    weights = _base_weights(home.run(model.run_id)) if model.run_id else {}
    _copy_adapter(home, model, target, origin | weights)
    return True


def _model_with_adapter(home: Home, ref: str) -> ModelRef:
    """Find the model that `ref` names. Raises UserError MODEL_* if there is none, BAD_ARGUMENT if
    it is a base model."""
    model = catalog.resolve_model(home, ref)
    if model.adapter is None:
        raise UserError(
            "BAD_ARGUMENT",
            f"{ref} is a base model; there is nothing of ours to export",
            hint="Name a run, such as arith-grpo-7@best.",
            field="run_id",
        )
    return model


def _cannot_write_error(target: Path, error: OSError) -> UserError:
    """Make the error for a target folder that cannot be written: DISK_FULL if the disk is full,
    else BAD_ARGUMENT."""
    code = "DISK_FULL" if error.errno == errno.ENOSPC else "BAD_ARGUMENT"
    return UserError(
        code,
        f"{target} cannot be written: {error.strerror or error}",
        hint="Choose another path.",
        field="path",
    )


def _target_folder(home: Home, model: ModelRef, export_format: str, path: str) -> Path:
    """Return the folder that an export in this format is written to: `path`, or if that is "", one
    below the home's `exports/`. Raises UserError BAD_ARGUMENT if `path` is in a place where coding
    agents keep files of their own."""
    if path:
        target = Path(os.path.abspath(os.path.expanduser(path)))
        refuse_folder_of_agent_files(target, "path")
        return target
    suffix = "" if export_format == "adapter" else f"-{export_format}"
    return home.exports / (_file_stem(model) + suffix)


def _is_this_export(target: Path, origin: dict[str, str]) -> bool:
    """Tell whether the folder `target` already holds this very export: its ORIGIN file has the
    content `origin`. Returns False if `target` does not exist or is an empty folder. Raises
    UserError BAD_ARGUMENT if it holds anything else."""
    is_empty_folder = target.is_dir() and not os.listdir(target)
    if is_empty_folder or not os.path.lexists(target):
        return False
    try:
        existing_origin = read_json(target / ORIGIN)
    except (OSError, ValueError):  # no readable ORIGIN file
        existing_origin = None
    if isinstance(existing_origin, dict):
        existing_origin.pop(BASE_WEIGHTS, None)  # `origin` does not have them
    if existing_origin == origin:
        return True
    raise UserError(
        "BAD_ARGUMENT",
        f"{target} exists and is not this export; nothing is overwritten",
        hint="Choose a path that does not exist.",
        field="path",
    )


def _base_weights(run: RunDir) -> JsonObject:
    """Make the entry of the ORIGIN file with the SHA-256 of each weight file that the run was
    trained on. A run that continues the exported adapter must have the same base. Returns {} if the
    run's manifest cannot be read."""
    try:
        files = Manifest.read(run.manifest).model.files
    except (OSError, DamagedRecord):
        return {}
    return {BASE_WEIGHTS: {name: files[name] for name in files if name.endswith(".safetensors")}}


def _copy_adapter(home: Home, model: ModelRef, target: Path, origin: JsonObject) -> None:
    """Copy the model's PEFT adapter to the folder `target`, with a model card, and name its base
    model in a way that other tools can load. `origin` is the content of the ORIGIN file, which says
    where the export comes from."""
    source = model.adapter
    assert source is not None  # `export` refuses base models
    folder = _new_folder_beside(target)
    for name in _ADAPTER_FILES:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)
    config = read_json(folder / "adapter_config.json")
    # The adapter of a run names its base by a path in this home, which other tools cannot load.
    if model.kind == "run" and model.base_path.is_dir():
        config["base_model_name_or_path"] = _base_for_other_tools(model)
    write_json(folder / "adapter_config.json", config)
    _add_card(home, model, folder)
    _move_into_place(folder, target, origin)


def _base_for_other_tools(model: ModelRef) -> str:
    """Name the base model in a way that other tools can load. They know hub ids, but not our own
    model names; for those the path is returned."""
    is_hub_id = "/" in model.base_ref and not os.path.isabs(model.base_ref)
    return model.base_ref if is_hub_id else str(model.base_path)


def _file_stem(model: ModelRef) -> str:
    """Make the beginning of a file name from the model: its reference, such as "arith-7-best". For
    an adapter that no run of this home trained, it is the name of the adapter's folder."""
    if model.run_id or model.adapter is None:
        return model.ref.replace("@", "-")
    return model.adapter.name  # named by a path or hub id


def _add_card(home: Home, model: ModelRef, folder: Path) -> None:
    """Write the model card of the run that trained the model to `folder`, if this home knows the
    run."""
    if not model.run_id:
        return
    try:
        card = html_report.model_card(home, model.run_id)
    except UserError as error:
        if error.code == "RUN_NOT_FOUND":  # the run has a folder, but the database does not know it
            return
        raise
    (folder / _CARD).write_text(card, encoding="utf-8")


@dataclass(frozen=True)
class _Merge:
    """A merge of an adapter into its base, done by a worker process.

    Attributes:
        job: folder with the worker's config, lock and log.
        temporary_folder: folder that the worker writes to, beside the folder of the export.
        gguf_name: name of the GGUF file that the worker writes there; "" for a model folder.
    """

    job: Path
    temporary_folder: Path
    gguf_name: str

    @property
    def lock(self) -> Path:
        """The file that the worker keeps locked as long as it lives."""
        return self.job / "alive.lock"

    @property
    def log(self) -> Path:
        """The file with the worker's output."""
        return self.job / "export.log"


def _merge(home: Home, model: ModelRef, target: Path, origin: dict[str, str]) -> bool:
    """Let a worker merge the adapter into its base, and move the result to `target`: a complete
    model, or a GGUF file and its Modelfile.

    Returns False if the merge is still going on after `WAIT_S` seconds; a later call waits for it
    again. Raises UserError DEPLOY_FAILED, with the end of the worker's log, if the merge failed.
    """
    merge = _merge_to(home, model, target, origin["format"])
    merge.job.mkdir(parents=True, exist_ok=True)
    # An earlier call may have started the worker, which may be at work or done by now.
    if not is_locked(merge.lock) and not _is_finished(home, merge):
        _start_merge(home, model, merge)
    if not _wait_for_worker(merge.lock):
        return False
    if not _is_finished(home, merge):
        # What the worker has left half-written.
        shutil.rmtree(merge.temporary_folder, ignore_errors=True)
        raise _unfinished_merge_error(merge.log)
    if merge.gguf_name:
        _add_modelfile(model, merge)
    _add_card(home, model, merge.temporary_folder)
    _move_into_place(merge.temporary_folder, target, origin)
    shutil.rmtree(merge.job, ignore_errors=True)
    return True


def _add_modelfile(model: ModelRef, merge: _Merge) -> None:
    """Write the Modelfile, with which Ollama serves the model, beside the GGUF file of a finished
    merge."""
    text = modelfile.text(model.base_path, merge.gguf_name)
    (merge.temporary_folder / "Modelfile").write_text(text, encoding="utf-8")


def _merge_to(home: Home, model: ModelRef, target: Path, export_format: str) -> _Merge:
    """Describe the merge of this model to `target`: the worker writes a folder beside `target`
    (`temporary_folder`), which is then renamed. Its folders are named by a hash of model and
    target, so that a later call finds them again."""
    key = hashlib.sha256(f"{model.adapter} {target}".encode()).hexdigest()[:16]
    return _Merge(
        job=home.export_job(key),
        temporary_folder=target.with_name(f".{target.name}.{key}.aside"),
        gguf_name=_gguf_name(model, export_format),
    )


def _gguf_name(model: ModelRef, export_format: str) -> str:
    """Make the name of the GGUF file of an export; "" if the format has none."""
    if not export_format.startswith(_GGUF):
        return ""
    return f"{_file_stem(model)}.{export_format.removeprefix(_GGUF)}.gguf"


def _wait_for_worker(worker_lock: Path) -> bool:
    """Wait until no worker holds the lock file `worker_lock`, for at most `WAIT_S` seconds. Returns
    whether the lock is free, which means that the worker has ended."""
    deadline = time.monotonic() + WAIT_S
    while is_locked(worker_lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _unfinished_merge_error(log: Path) -> UserError:
    """Make the error for a merge whose worker ended before it was done, with the end of its log."""
    last_lines = read_tail(log, 2000).strip().splitlines()[-3:]
    log_end = " | ".join(last_lines)[:400]
    return UserError("DEPLOY_FAILED", "the merge did not finish", hint=f"Its log: {log_end}")


def _start_merge(home: Home, model: ModelRef, merge: _Merge) -> None:
    """Start a worker that merges the adapter into the base model, unless one is at work. `merge`
    holds the paths of the job; the worker writes its result into `merge.temporary_folder`."""
    python = launcher.worker_python(home)
    shutil.rmtree(merge.temporary_folder, ignore_errors=True)  # what a killed worker left
    config = {
        "base_path": str(model.base_path),
        "adapter": str(model.adapter),
        "out": str(merge.temporary_folder),
        "gguf": merge.gguf_name,
    }
    config_file = merge.job / "config.json"
    write_json(config_file, config)
    lock = take_lock(merge.lock)
    if lock is None:  # another call has just started a worker, for which the caller then waits
        return
    try:
        argv = [python, "-P", *programs.command("merger"), str(config_file)]
        launcher.spawn_detached(argv, merge.job, merge.log, pass_fds=(lock,))
    finally:
        os.close(lock)


def _is_finished(home: Home, merge: _Merge) -> bool:
    """Tell whether the folder that the worker of `merge` writes exists and is complete: it holds
    the GGUF file, or, if none is to be written, a model that can be loaded."""
    if not merge.temporary_folder.is_dir():
        return False
    if merge.gguf_name:
        return (merge.temporary_folder / merge.gguf_name).is_file()
    try:
        catalog.resolve_model(home, str(merge.temporary_folder))
        return True
    except UserError:
        return False


def _new_folder_beside(target: Path) -> Path:
    """Make an empty folder beside `target`. It is on the same disk, so it can be renamed to
    `target`."""
    temporary_folder = target.with_name(f".{target.name}.{os.getpid()}.aside")
    shutil.rmtree(temporary_folder, ignore_errors=True)
    temporary_folder.mkdir()
    return temporary_folder


def _move_into_place(temporary_folder: Path, target: Path, origin: JsonObject) -> None:
    """Add the ORIGIN file to the finished folder `temporary_folder` and rename it to `target`."""
    write_json(temporary_folder / ORIGIN, origin)
    # Before the rename, so that a power failure leaves no half export.
    sync_folder(temporary_folder)
    os.replace(temporary_folder, target)  # at most an empty folder is there
    sync_folder(target.parent)


def _export_reply(model: ModelRef, target: Path, export_format: str, *, was_there: bool) -> Reply:
    """Make the reply about a finished export of the model to the folder `target`, in the format
    `export_format`. `was_there` says that an earlier call made it."""
    files = sorted(entry.name for entry in target.iterdir())
    already = " already" if was_there else ""
    return {
        "model": model.ref,
        "state": "exported",
        "path": str(target),
        "format": export_format,
        "files": files,
        "summary": f"{model.ref} is{already} exported as {export_format} to {target}.",
        "next": [],
        "warnings": [],
    }


def _still_merging_reply(ref: str, target: Path, export_format: str) -> Reply:
    """Make the reply about a merge of the model `ref` that is still going on. It offers the same
    call, which returns the result later."""
    same_call = {"run_id": ref, "action": "export", "format": export_format, "path": str(target)}
    return {
        "model": ref,
        "state": "exporting",
        "path": str(target),
        "summary": f"{ref} is being merged; the same call again returns the files.",
        "next": [Call("deploy", same_call).to_json()],
        "warnings": [],
    }
