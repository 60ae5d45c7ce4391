"""Exporting a trained model: its adapter as a PEFT folder, or merged into the base, as a model
folder or as a GGUF file with a Modelfile for Ollama; beside each the model card.

The target folder appears complete or not at all. Merging needs torch, so a worker does it. A merge
that takes longer than the call goes on, and the same call again returns its result.
"""

import errno
import hashlib
import os
import shutil
import time
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
from engine.models import adapters, catalog
from engine.models.adapters import BASE_WEIGHTS, ORIGIN
from engine.models.catalog import ModelRef
from engine.processes import launcher, programs
from engine.records.manifest import Manifest
from engine.records.record import DamagedRecord
from engine.serving import modelfile

FORMATS = ("adapter", "merged", "gguf-f16", "gguf-q8_0")
_GGUF = "gguf-"  # before the kind of weights in a GGUF file
_CARD = "README.md"
WAIT_S = 40.0  # seconds that one call waits for a merge
_ADAPTER_FILES = (adapters.CONFIG, adapters.WEIGHTS)


def export(home: Home, ref: str, export_format: str = "adapter", path: str = "") -> Reply:
    """Write the files of a run's checkpoint to `path`, by default below the home's `exports/`.

    Args:
        ref: the model, such as "arith-grpo-7@best".
        export_format: "adapter", "merged" or a GGUF file of 16-bit or 8-bit weights: "gguf-f16",
            "gguf-q8_0".

    The reply's `state` is "exported", or "exporting" while a merge goes on: the same call again
    returns its result. Nothing is overwritten. Raises UserError BAD_ARGUMENT, MODEL_*,
    DEPLOY_FAILED (the merge failed), NO_TORCH, DISK_FULL.
    """
    if export_format not in FORMATS:
        raise UserError(
            "BAD_ARGUMENT",
            f"format={export_format!r} is not available",
            hint=f"Available: {', '.join(FORMATS)}.",
            field="format",
        )
    model = _model_with_adapter(home, ref)
    assert model.adapter is not None  # others were refused
    target = _target_folder(home, model, export_format, path)
    origin = {
        "run": model.run_id,
        "checkpoint": model.adapter.name,
        "base": model.base_ref,
        "format": export_format,
    }
    if _is_this_export(target, origin):
        return _export_reply(model, target, export_format, was_there=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if export_format == "adapter":
            weights = _base_weights(home.run(model.run_id)) if model.run_id else {}
            _copy_adapter(home, model, target, origin | weights)
        elif not _merge(home, model, target, origin):
            return _still_merging_reply(ref, target, export_format)
    except OSError as error:
        raise _cannot_write_error(target, error) from error
    return _export_reply(model, target, export_format, was_there=False)


def _model_with_adapter(home: Home, ref: str) -> ModelRef:
    """The model that `ref` names. Raises UserError MODEL_* for an unknown one, BAD_ARGUMENT for a
    base model."""
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
    """The error for a target folder that cannot be written: DISK_FULL or BAD_ARGUMENT."""
    code = "DISK_FULL" if error.errno == errno.ENOSPC else "BAD_ARGUMENT"
    return UserError(
        code,
        f"{target} cannot be written: {error.strerror or error}",
        hint="Choose another path.",
        field="path",
    )


def _target_folder(home: Home, model: ModelRef, export_format: str, path: str) -> Path:
    """The folder that an export is written to: `path`, or for "" one below the home's `exports/`.

    Raises UserError BAD_ARGUMENT for a `path` where coding agents keep files of their own.
    """
    if path:
        target = Path(os.path.abspath(os.path.expanduser(path)))
        refuse_folder_of_agent_files(target, "path")
        return target
    suffix = "" if export_format == "adapter" else f"-{export_format}"
    return home.exports / (_stem(model) + suffix)


def _is_this_export(target: Path, origin: dict[str, str]) -> bool:
    """Whether the folder `target` already holds this very export: its ORIGIN file holds `origin`.

    False if there is nothing at `target`, or an empty folder. Raises UserError BAD_ARGUMENT if
    there is anything else.
    """
    if not os.path.lexists(target) or (target.is_dir() and not os.listdir(target)):
        return False
    try:
        existing_origin = read_json(target / ORIGIN)
    except (OSError, ValueError):  # no readable ORIGIN file
        existing_origin = None
    if isinstance(existing_origin, dict):
        existing_origin.pop(BASE_WEIGHTS, None)
    if existing_origin == origin:
        return True
    raise UserError(
        "BAD_ARGUMENT",
        f"{target} exists and is not this export; nothing is overwritten",
        hint="Choose a path that does not exist.",
        field="path",
    )


def _base_weights(run: RunDir) -> JsonObject:
    """The entry of the ORIGIN file with the SHA-256 of each weight file the run was trained on.

    A run that continues the exported adapter must have the same base. {} where the manifest of the
    run cannot be read.
    """
    try:
        files = Manifest.read(run.manifest).model.files
    except (OSError, DamagedRecord):
        return {}
    return {BASE_WEIGHTS: {name: files[name] for name in files if name.endswith(".safetensors")}}


def _copy_adapter(home: Home, model: ModelRef, target: Path, origin: JsonObject) -> None:
    """Copy a PEFT adapter to `target`, with a name of its base model that other tools can load."""
    source = model.adapter
    assert source is not None  # `export` refuses base models
    folder = _new_folder_beside(target)
    for name in _ADAPTER_FILES:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)
    config = read_json(folder / "adapter_config.json")
    if model.kind == "run" and model.base_path.is_dir():
        # Other tools know hub ids, but not our own model names; those become a path.
        is_hub_id = "/" in model.base_ref and not os.path.isabs(model.base_ref)
        config["base_model_name_or_path"] = model.base_ref if is_hub_id else str(model.base_path)
    write_json(folder / "adapter_config.json", config)
    _add_card(home, model, folder)
    _move_into_place(folder, target, origin)


def _stem(model: ModelRef) -> str:
    """The model's name as the beginning of a file name."""
    if model.run_id or model.adapter is None:
        return model.ref.replace("@", "-")
    return model.adapter.name  # named by a path or hub id


def _add_card(home: Home, model: ModelRef, folder: Path) -> None:
    """Write the model card of the run that trained the model to `folder`, if this home lists it."""
    if not model.run_id:
        return
    try:
        card = html_report.model_card(home, model.run_id)
    except UserError as error:
        if error.code == "RUN_NOT_FOUND":  # a folder of a run that the database does not know
            return
        raise
    (folder / _CARD).write_text(card, encoding="utf-8")


def _merge(home: Home, model: ModelRef, target: Path, origin: dict[str, str]) -> bool:
    """Let a worker merge the adapter into its base, and move the result to `target`.

    The result is a folder with a complete model, or with a GGUF file and its Modelfile. Returns
    True when it is there, False if the merge is still going on after `WAIT_S` seconds.
    Raises UserError DEPLOY_FAILED, with the end of the worker's log, if the merge failed.
    """
    # The same merge to the same place has the same key, so that a later call waits for it.
    key = hashlib.sha256(f"{model.adapter} {target}".encode()).hexdigest()[:16]
    job = home.export_job(key)
    job.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{key}.aside")
    worker_lock = job / "alive.lock"
    gguf_name = _gguf_name(model, origin["format"])
    if not is_locked(worker_lock) and not _is_finished(home, aside, gguf_name):
        _start_merge(home, model, job, aside, gguf_name)
    if not _wait_for_worker(worker_lock):
        return False
    if not _is_finished(home, aside, gguf_name):
        shutil.rmtree(aside, ignore_errors=True)
        raise _unfinished_merge_error(job / "export.log")
    if gguf_name:
        modelfile_text = modelfile.text(model.base_path, gguf_name)
        (aside / "Modelfile").write_text(modelfile_text, encoding="utf-8")
    _add_card(home, model, aside)
    _move_into_place(aside, target, origin)
    shutil.rmtree(job, ignore_errors=True)
    return True


def _gguf_name(model: ModelRef, export_format: str) -> str:
    """The name of the GGUF file of an export, "" for a format without one."""
    if not export_format.startswith(_GGUF):
        return ""
    return f"{_stem(model)}.{export_format.removeprefix(_GGUF)}.gguf"


def _wait_for_worker(worker_lock: Path) -> bool:
    """Wait until no worker holds the lock, for `WAIT_S` seconds at most. Returns whether none
    does."""
    deadline = time.monotonic() + WAIT_S
    while is_locked(worker_lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _unfinished_merge_error(log: Path) -> UserError:
    """The error for a merge whose worker ended before it was done, with the end of its log."""
    last_lines = read_tail(log, 2000).strip().splitlines()[-3:]
    log_end = " | ".join(last_lines)[:400]
    return UserError("DEPLOY_FAILED", "the merge did not finish", hint=f"Its log: {log_end}")


def _start_merge(home: Home, model: ModelRef, job: Path, aside: Path, gguf_name: str) -> None:
    """Start a worker that merges the model into the folder `aside`, unless one is at work.

    `gguf_name`: of the GGUF file that it writes there; "" for a model folder. `job` holds the
    worker's config, lock and log.
    """
    python = launcher.worker_python(home)
    shutil.rmtree(aside, ignore_errors=True)
    config = {
        "base_path": str(model.base_path),
        "adapter": str(model.adapter),
        "out": str(aside),
        "gguf": gguf_name,
    }
    write_json(job / "config.json", config)
    lock = take_lock(job / "alive.lock")
    if lock is None:  # another call has just started a worker; wait for that
        return
    try:
        argv = [python, "-P", *programs.command("merger"), str(job / "config.json")]
        launcher.spawn_detached(argv, job, job / "export.log", pass_fds=(lock,))
    finally:
        os.close(lock)


def _is_finished(home: Home, folder: Path, gguf_name: str) -> bool:
    """Whether the worker has written the folder, which it does as a whole.

    Then it holds the GGUF file `gguf_name`, or, where that is "", a complete model.
    """
    if not folder.is_dir():
        return False
    if gguf_name:
        return (folder / gguf_name).is_file()
    try:
        catalog.resolve_model(home, str(folder))
        return True
    except UserError:
        return False


def _new_folder_beside(target: Path) -> Path:
    """Make an empty folder beside `target`: on the same disk, so it can be renamed to `target`."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def _move_into_place(aside: Path, target: Path, origin: JsonObject) -> None:
    """Add the ORIGIN file to the finished folder `aside` and rename it to `target`."""
    write_json(aside / ORIGIN, origin)
    sync_folder(aside)  # before the rename, so that a power failure leaves no half export
    os.replace(aside, target)  # at most an empty folder is there
    sync_folder(target.parent)


def _export_reply(model: ModelRef, target: Path, export_format: str, *, was_there: bool) -> Reply:
    """The reply about a finished export; `was_there`: an earlier call made it."""
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
    """The reply about a merge that is still going on, with the call that returns it later."""
    same_call = {"run_id": ref, "action": "export", "format": export_format, "path": str(target)}
    return {
        "model": ref,
        "state": "exporting",
        "path": str(target),
        "summary": f"{ref} is being merged; the same call again returns the files.",
        "next": [Call("deploy", same_call).to_json()],
        "warnings": [],
    }
