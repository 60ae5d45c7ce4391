"""Taking a trained model elsewhere: its adapter as a PEFT folder, or merged into the base.

The files appear at their place whole or not at all. Merging needs torch, so a worker does it; a
merge that outlasts the call goes on, and the same call again returns it.
"""

import hashlib
import os
import shutil
import time
from pathlib import Path

from engine.core.agent_files import refuse_agent_place
from engine.core.errors import UserError
from engine.core.files import is_locked, read_json, read_tail, sync_folder, take_lock, write_json
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.processes import launcher, programs

FORMATS = ("adapter", "merged")
ORIGIN = "honesmith.json"  # says where exported files came from
WAIT_S = 40.0
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "README.md")


def export(home: Home, ref: str, export_format: str = "adapter", path: str = "") -> Reply:
    """Write the files of a run's checkpoint to `path` (default: the home's `exports/`).

    Raises UserError BAD_ARGUMENT, MODEL_*, DEPLOY_FAILED, NO_TORCH, DISK_FULL.
    """
    if export_format not in FORMATS:
        raise UserError(
            "BAD_ARGUMENT",
            f"format={export_format!r} is not available",
            hint=f"Available: {', '.join(FORMATS)}.",
            field="format",
        )
    model = catalog.resolve_model(home, ref)
    if model.adapter is None:
        raise UserError(
            "BAD_ARGUMENT",
            f"{ref} is a base model; there is nothing of ours to export",
            hint="Name a run, such as arith-grpo-7@best.",
            field="run_id",
        )
    name = ref.replace("@", "-") + ("-merged" if export_format == "merged" else "")
    target = Path(os.path.abspath(os.path.expanduser(path))) if path else home.exports / name
    origin = {
        "run": model.run_id,
        "checkpoint": model.adapter.name,
        "base": model.base_ref,
        "format": export_format,
    }
    if path:
        refuse_agent_place(target, "path")
    if _is_ours(target, origin):
        return _exported(model, target, export_format, "already")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if export_format == "adapter":
            _copy_adapter(model, target, origin)
        elif not _merge(home, model, target, origin):
            return _going_on(ref, target)
    except OSError as error:
        raise UserError(
            "DISK_FULL" if error.errno == 28 else "BAD_ARGUMENT",
            f"{target} cannot be written: {error.strerror or error}",
            hint="Choose another path.",
            field="path",
        ) from error
    return _exported(model, target, export_format, "now")


def _is_ours(target: Path, origin: dict[str, str]) -> bool:
    """Whether this very export is there. Raises UserError when something else is."""
    if not os.path.lexists(target) or (target.is_dir() and not os.listdir(target)):
        return False
    try:
        if read_json(target / ORIGIN) == origin:
            return True
    except (OSError, ValueError):
        pass
    raise UserError(
        "BAD_ARGUMENT",
        f"{target} exists and is not this export; nothing is overwritten",
        hint="Choose a path that does not exist.",
        field="path",
    )


def _copy_adapter(model: ModelRef, target: Path, origin: dict[str, str]) -> None:
    """Copy a PEFT adapter to `target`, its base named so that others find it."""
    source = model.adapter
    assert source is not None
    aside = _fresh_aside(target)
    for name in _ADAPTER_FILES:
        if (source / name).is_file():
            shutil.copy2(source / name, aside / name)
    config = read_json(aside / "adapter_config.json")
    if model.kind == "run" and model.base_path.is_dir():
        # A reader elsewhere knows no names of ours; a hub id it does know.
        known = "/" in model.base_ref and not os.path.isabs(model.base_ref)
        config["base_model_name_or_path"] = model.base_ref if known else str(model.base_path)
    write_json(aside / "adapter_config.json", config)
    _put(aside, target, origin)


def _merge(home: Home, model: ModelRef, target: Path, origin: dict[str, str]) -> bool:
    """Merge in a worker; False when it is still going on. Raises UserError DEPLOY_FAILED."""
    key = hashlib.sha256(f"{model.adapter} {target}".encode()).hexdigest()[:16]
    job = home.export_job(key)
    job.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{key}.aside")
    lock_path, log = job / "alive.lock", job / "export.log"
    if not is_locked(lock_path) and not _is_model(home, aside):
        _start_merge(home, model, job, aside)
    deadline = time.monotonic() + WAIT_S
    while is_locked(lock_path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    if not _is_model(home, aside):
        shutil.rmtree(aside, ignore_errors=True)
        last = " | ".join(read_tail(log, 2000).strip().splitlines()[-3:])[:400]
        raise UserError("DEPLOY_FAILED", "the merge did not finish", hint=f"Its log: {last}")
    _put(aside, target, origin)
    shutil.rmtree(job, ignore_errors=True)
    return True


def _start_merge(home: Home, model: ModelRef, job: Path, aside: Path) -> None:
    """Start the worker that merges the adapter into its base, unless one is at it."""
    python = launcher.worker_python(home)
    shutil.rmtree(aside, ignore_errors=True)
    config = {
        "base_path": str(model.base_path),
        "adapter": str(model.adapter),
        "out": str(aside),
    }
    write_json(job / "config.json", config)
    lock = take_lock(job / "alive.lock")
    if lock is None:  # another call was quicker; wait for its worker
        return
    try:
        argv = [python, "-P", *programs.command("merger"), str(job / "config.json")]
        launcher.spawn_detached(argv, job, job / "export.log", pass_fds=(lock,))
    finally:
        os.close(lock)


def _is_model(home: Home, folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        catalog.resolve_model(home, str(folder))
        return True
    except UserError:
        return False


def _fresh_aside(target: Path) -> Path:
    aside = target.with_name(f".{target.name}.{os.getpid()}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def _put(aside: Path, target: Path, origin: dict[str, str]) -> None:
    write_json(aside / ORIGIN, origin)
    sync_folder(aside)
    os.replace(aside, target)  # over an empty folder or nothing
    sync_folder(target.parent)


def _exported(model: ModelRef, target: Path, export_format: str, when: str) -> Reply:
    """The reply about an export that is there."""
    files = sorted(entry.name for entry in target.iterdir())
    was = " already" if when == "already" else ""
    return {
        "model": model.ref,
        "state": "exported",
        "path": str(target),
        "format": export_format,
        "files": files,
        "summary": f"{model.ref} is{was} exported as {export_format} to {target}.",
        "next": [],
        "warnings": [],
    }


def _going_on(ref: str, target: Path) -> Reply:
    again = {"run_id": ref, "action": "export", "format": "merged", "path": str(target)}
    return {
        "model": ref,
        "state": "exporting",
        "path": str(target),
        "summary": f"{ref} is being merged; the same call again returns the files.",
        "next": [Call("deploy", again).to_json()],
        "warnings": [],
    }
