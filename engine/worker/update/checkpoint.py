"""Checkpoints: complete or absent.

A checkpoint is a folder in PEFT's own format plus what training needs to go on as if it had never
stopped. It is written aside, synced, given a manifest with every file's SHA-256 last, and renamed
into place; a folder without a manifest that matches is no checkpoint. Randomness is not stored:
every draw is seeded from (seed, step), so the step number restores it.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.core.files import read_json, sync_folder, write_json
from engine.home.run_dir import RunDir
from engine.worker.core.failures import WorkerFailure, is_full_or_read_only, not_written
from engine.worker.core.job import LoopState
from engine.worker.network.adapter import read_adapter, save_adapter
from engine.worker.network.policy import Policy
from engine.worker.update.optimizer import AdamW

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class Progress:
    """Where training stands: `step` optimizer steps are done; `state` is the loop's own."""

    step: int
    state: LoopState


def save(
    run: RunDir,
    policy: Policy,
    optimizer: AdamW,
    progress: Progress,
    *,
    base_ref: str,
    base_weights: dict[str, str] | None = None,
) -> Path:
    """Write `checkpoints/step_NNNNNN`; a complete one of the same step is left as it is.

    Args:
        base_ref, base_weights: the base's name and the SHA-256 of its weight files, so that the
            adapter is never put on another model of the same shape.

    Raises:
        WorkerFailure: kind infra, when the disk has no room; nothing of it stays then.
    """
    final = run.checkpoint(progress.step)
    if (final / MANIFEST).exists():
        return final
    sweep(run)
    aside = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        _write(aside, run, policy, optimizer, progress, base_ref, base_weights or {})
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one of an earlier attempt
        os.replace(aside, final)
        sync_folder(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        if is_full_or_read_only(error):
            raise not_written(final, error) from error
        raise
    return final


def _write(
    aside: Path,
    run: RunDir,
    policy: Policy,
    optimizer: AdamW,
    progress: Progress,
    base_ref: str,
    base_weights: dict[str, str],
) -> None:
    """Every file of a checkpoint, the manifest last, each one synced."""
    save_adapter(policy.adapter, aside, base_ref)
    save_file(_optimizer_tensors(policy, optimizer), aside / OPTIMIZER)
    (aside / STATE).write_text(json.dumps({"step": progress.step, **progress.state}))
    for file in sorted(aside.iterdir()):
        _sync(file)
    manifest = {
        "run": run.id,
        "step": progress.step,
        "base": base_ref,
        "base_weights": base_weights,
        "files": {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in _files(aside)},
    }
    write_json(aside / MANIFEST, manifest)


def sweep(run: RunDir) -> None:
    """Clear away what an attempt that died while saving or tidying left behind; nobody else
    writes here."""
    unfinished = [p for p in run.checkpoints.glob("step_*") if not (p / MANIFEST).exists()]
    for left in [*run.checkpoints.glob(".step_*"), *run.checkpoints.glob(".best.*"), *unfinished]:
        if left.is_symlink():
            left.unlink()
        else:
            shutil.rmtree(left, ignore_errors=True)


def restore(folder: Path, policy: Policy, optimizer: AdamW) -> Progress:
    """Put a checkpoint's weights and optimizer state in place.

    Raises:
        WorkerFailure: kind infra, when a file differs from the manifest.
    """
    verify(folder)
    policy.adapter.load(read_adapter(folder))
    _load_optimizer(policy, optimizer, load_file(folder / OPTIMIZER))
    state = json.loads((folder / STATE).read_text())
    return Progress(state.pop("step"), state)


def verify(folder: Path) -> None:
    """Hold every file against the manifest.

    Raises:
        WorkerFailure: kind infra, naming the first file that is missing or differs.
    """
    damage = _damage(folder)
    if damage:
        raise WorkerFailure(
            "infra",
            f"The checkpoint {folder.name} is damaged.",
            evidence=damage,
            hint="Resume: the checkpoint before it is used.",
        )


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is none any more; returns where it is now."""
    aside = folder.with_name(f"damaged_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    os.replace(folder, aside)
    sync_folder(folder.parent)
    return aside


def _damage(folder: Path) -> str:
    """What is wrong with the first file that is not as the manifest says, "" where all are."""
    try:
        files = {
            name: facts["sha256"] for name, facts in read_json(folder / MANIFEST)["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, wanted in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if digest(folder / name) != wanted:
            return f"{name} does not match its manifest"
    return ""


def require_base(folder: Path, base_weights: dict[str, str]) -> None:
    """Hold the base an adapter was trained on against the one it is about to be put on.

    A folder without a manifest comes from elsewhere and says nothing about its base.

    Raises:
        WorkerFailure: kind config, when both are known and differ.
    """
    try:
        trained_on = read_json(folder / MANIFEST).get("base_weights") or {}
    except FileNotFoundError:
        return
    if trained_on and base_weights and trained_on != base_weights:
        raise WorkerFailure(
            "config",
            "The adapter was trained on other weights than this base model has now.",
            evidence=", ".join(sorted(trained_on)),
            hint="Train again on the model as it is, or put the old weights back.",
        )


def mark_best(run: RunDir, step: int) -> None:
    """Point `checkpoints/best` at a step; swapped in one rename."""
    aside = run.best.with_name(f".best.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(run.checkpoint(step).name)
    os.replace(aside, run.best)


def prune(run: RunDir, keep: int, pinned: set[int]) -> None:
    """Delete all but the last `keep` checkpoints and the pinned steps."""
    steps = run.checkpoint_steps()
    for step in steps[: max(0, len(steps) - keep)]:
        if step not in pinned:
            # First what makes it one: a checkpoint that is half deleted must not look whole.
            (run.checkpoint(step) / MANIFEST).unlink()
            shutil.rmtree(run.checkpoint(step), ignore_errors=True)


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _optimizer_tensors(policy: Policy, optimizer: AdamW) -> dict[str, torch.Tensor]:
    tensors = {}
    for index, parameter in enumerate(policy.parameters()):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{index}.{name}"] = value.detach().cpu().clone().contiguous()
    return tensors


def _load_optimizer(policy: Policy, optimizer: AdamW, tensors: dict[str, torch.Tensor]) -> None:
    for index, parameter in enumerate(policy.parameters()):
        prefix = f"{index}."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not state:
            continue
        optimizer.state[parameter] = {
            name: value.to(parameter.device) for name, value in state.items()
        }


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name != MANIFEST)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
