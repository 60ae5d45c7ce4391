"""Checkpoints, which are either complete or absent.

A checkpoint is a folder in PEFT's own format, plus what training needs to go on as if it had never
stopped. It is written under a temporary name and synced; then a manifest with every file's SHA-256
is written, and the folder is renamed. A folder without a manifest that matches is no checkpoint.
Random states are not stored: every draw is seeded by (seed, step), so the step number restores
them.
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
from engine.home.hashes import then_and_now
from engine.home.owner_marks import pinned_steps
from engine.home.run_dir import RunDir
from engine.models.adapters import weights_under
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
    """How far training is: `step` steps are done, and `state` is what the training loop keeps
    beside weights and optimizer."""

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
    """Write the checkpoint `checkpoints/step_NNNNNN` of the run and return its folder. If there is
    a complete checkpoint of the same step, nothing is written.

    Args:
        policy, optimizer: whose adapter and state are saved.
        progress: the step and the loop's state.
        base_ref: the base model's name.
        base_weights: SHA-256 of the base's weight files, by file name. They are recorded, so that
            `require_base` can refuse the checkpoint on another base.

    Raises:
        WorkerFailure: kind infra, if the disk is full or read-only.
    """
    final = run.checkpoint(progress.step)
    if (final / MANIFEST).exists():  # complete, since the manifest is written last
        return final
    sweep(run)  # delete what an interrupted save has left
    # Written under another name and renamed, so that the checkpoint is complete or absent.
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write_files(temporary, run, policy, optimizer, progress, base_ref, base_weights or {})
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one of an earlier attempt
        os.replace(temporary, final)
        sync_folder(final.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own error class
        shutil.rmtree(temporary, ignore_errors=True)
        if is_full_or_read_only(error):
            raise not_written(final, error) from error
        raise
    return final


def _write_files(
    folder: Path,
    run: RunDir,
    policy: Policy,
    optimizer: AdamW,
    progress: Progress,
    base_ref: str,
    base_weights: dict[str, str],
) -> None:
    """Write every file of a checkpoint into `folder` and sync it to disk: adapter, optimizer and
    trainer state, then the manifest with the size and SHA-256 of each. The manifest comes last
    because it makes the checkpoint count as complete.

    `base_ref` is the base model's name, `base_weights` the SHA-256 of its weight files by name.
    """
    save_adapter(policy.adapter, folder, base_ref)
    save_file(_optimizer_tensors(policy, optimizer), folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps({"step": progress.step, **progress.state}))
    for file in sorted(folder.iterdir()):
        _sync_file(file)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in _described_files(folder)
    }
    manifest = {
        "run": run.id,
        "step": progress.step,
        "base": base_ref,
        "base_weights": base_weights,
        "files": files,
    }
    write_json(folder / MANIFEST, manifest)


def sweep(run: RunDir) -> None:
    """Delete temporary files of a run, and its checkpoints without a manifest. An earlier attempt
    leaves them if it dies while it saves or deletes a checkpoint. This is safe, because no other
    process writes into the folder now."""
    # These patterns match the temporary names that `save` and `mark_best` use.
    leftovers = [*run.checkpoints.glob(".step_*"), *run.checkpoints.glob(".best.*")]
    for folder in run.checkpoints.glob("step_*"):
        if not (folder / MANIFEST).exists():
            leftovers.append(folder)
    for leftover in leftovers:
        if leftover.is_symlink():  # a half-made `best`
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def restore(folder: Path, policy: Policy, optimizer: AdamW) -> Progress:
    """Load the weights and the optimizer state of the checkpoint in `folder` into `policy` and
    `optimizer`. Returns the checkpoint's step and the loop's state.

    Raises:
        WorkerFailure: kind infra, if a file is missing or differs from the manifest.
    """
    verify(folder)
    policy.adapter.load(read_adapter(folder))
    _load_optimizer(policy, optimizer, load_file(folder / OPTIMIZER))
    state = json.loads((folder / STATE).read_text())
    step = state.pop("step")
    return Progress(step, state)


def verify(folder: Path) -> None:
    """Compare every file of the checkpoint in `folder` with its manifest.

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


def mark_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint to `damaged_<name>`, so that it no longer counts as a checkpoint.
    Returns the new folder; an earlier folder with that name is deleted."""
    new_folder = folder.with_name(f"damaged_{folder.name}")
    shutil.rmtree(new_folder, ignore_errors=True)  # the same step was damaged before
    os.replace(folder, new_folder)
    sync_folder(folder.parent)
    return new_folder


def _damage(folder: Path) -> str:
    """Describe what is wrong with the checkpoint in `folder`: its manifest cannot be read, or the
    first damaged file, such as "optimizer.safetensors is missing". Returns "" if all files
    match."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        hashes = {name: facts["sha256"] for name, facts in files.items()}
    # OSError: no manifest; ValueError: it is not JSON; the others: its JSON has another shape.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if digest(folder / name) != expected:
            return f"{name} does not match its manifest"
    return ""


def require_base(folder: Path, base_weights: dict[str, str]) -> None:
    """Check that an adapter was trained on the base model that is in use now. A folder that is no
    checkpoint and no export was not made by this program, and is not checked.

    Args:
        folder: the adapter's folder.
        base_weights: SHA-256 of the present base's weight files, by file name; {} if unknown.

    Raises:
        WorkerFailure: kind config, if the folder's own files have hashes, `base_weights` is not
            empty, and the two differ.
    """
    trained_weights = weights_under(folder)
    if trained_weights and base_weights and trained_weights != base_weights:
        raise WorkerFailure(
            "config",
            "The adapter was trained on other weights than this base model has now.",
            evidence=then_and_now(trained_weights, base_weights),
            hint="Train again on the model as it is, or put the old weights back.",
        )


def mark_best(run: RunDir, step: int) -> None:
    """Make the symbolic link `checkpoints/best` point to the checkpoint of `step`. The link is
    replaced by one rename, so that it exists at every moment."""
    temporary = run.best.with_name(f".best.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.checkpoint(step).name)
    os.replace(temporary, run.best)


def prune(run: RunDir, keep: int, protected: set[int]) -> None:
    """Delete all checkpoints except the newest `keep`, those of the steps in `protected`, and those
    that the user has pinned. If the list of pins cannot be read, nothing is deleted."""
    steps = run.checkpoint_steps()
    older_steps = steps[: max(0, len(steps) - keep)]
    for step in older_steps:
        # The pins are read for each checkpoint, because the user may set one during the loop.
        if step not in protected and not _is_pinned(run, step):
            # The manifest goes first: without it a half-deleted checkpoint does not count as one.
            (run.checkpoint(step) / MANIFEST).unlink()
            shutil.rmtree(run.checkpoint(step), ignore_errors=True)


def _is_pinned(run: RunDir, step: int) -> bool:
    """Whether the user has pinned the checkpoint of `step`, so that it is never deleted. True if
    the list of pins cannot be read, so that nothing is deleted by mistake."""
    try:
        return step in pinned_steps(run)
    except (OSError, ValueError):
        return True


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _optimizer_tensors(policy: Policy, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Flatten the optimizer's state to one dict of CPU tensors, for a safetensors file. A key is
    the index of the policy's parameter and the name of the state, such as "0.exp_avg". A parameter
    that was never updated has no state and is left out."""
    tensors = {}
    for index, parameter in enumerate(policy.parameters()):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{index}.{name}"] = value.detach().cpu().clone().contiguous()
    return tensors


def _load_optimizer(policy: Policy, optimizer: AdamW, tensors: dict[str, torch.Tensor]) -> None:
    """Restore the optimizer's state from tensors whose names are a parameter's index and the name
    of the state, such as "0.exp_avg". Each tensor goes to the device of its parameter. A parameter
    without tensors keeps its state."""
    for index, parameter in enumerate(policy.parameters()):
        prefix = f"{index}."
        state = {
            key.removeprefix(prefix): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix)
        }
        if not state:
            continue
        optimizer.state[parameter] = {
            name: value.to(parameter.device) for name, value in state.items()
        }


def _described_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint that its manifest describes: all in the folder but the
    manifest itself, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.name != MANIFEST)


def _sync_file(path: Path) -> None:
    """Write the file's contents from the system's cache through to the disk, so that they survive a
    power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
