"""Checks that the disk has room for the next checkpoint before that is written, and deletes old
checkpoints if it has not."""

import os
from collections.abc import Callable, Collection

from engine.core.format import size
from engine.home.run_dir import RunDir
from engine.worker.core.failures import WorkerFailure
from engine.worker.update.checkpoint import prune

RESERVE = 2_000_000  # bytes that stay free for what a run writes between two checkpoints
# The adapter and the two averages of AdamW, in float32.
_BYTES_PER_PARAMETER = 3 * 4


def make_room(
    run: RunDir, parameters: int, keep: Collection[int], report: Callable[[str], None]
) -> None:
    """Check that the disk has room for another checkpoint. If it has not, delete all checkpoints
    but the newest, those of the steps in `keep` and those that the user has pinned.

    Args:
        run: the run's folder.
        parameters: the number of the adapter's parameters.
        keep: steps whose checkpoints stay, such as the best.
        report: called with a sentence that says what was deleted and why.

    Raises:
        WorkerFailure: kind infra, if there is still too little room. Nothing was written then, and
            the newest checkpoint is complete.
    """
    needed = checkpoint_bytes(run, parameters) + RESERVE
    if free_bytes(run) >= needed:
        return
    steps_before = run.checkpoint_steps()
    prune(run, keep=1, protected=set(keep))
    removed = sorted(set(steps_before) - set(run.checkpoint_steps()))
    free = free_bytes(run)
    if removed:
        steps = ", ".join(map(str, removed))
        report(f"the disk is short: checkpoints of steps {steps} removed, {size(free)} free")
    if free < needed:
        newest = run.latest_checkpoint()
        raise WorkerFailure(
            "infra",
            f"The disk has {size(free)} left, the next checkpoint needs {size(needed)}; the newest "
            f"one is {newest.name if newest else 'none'}.",
            hint="Free disk space (honesmith runs delete RUN), then resume the run.",
        )


def checkpoint_bytes(run: RunDir, parameters: int) -> int:
    """Estimate the bytes that the next checkpoint of the run will take: as many as the newest one.
    If there is none yet, `parameters` (of the adapter) times the bytes per parameter."""
    newest = run.latest_checkpoint()
    if newest is None:
        return _BYTES_PER_PARAMETER * parameters
    return sum(path.stat().st_size for path in newest.iterdir() if path.is_file())


def free_bytes(run: RunDir) -> int:
    """Return how many bytes this user may still write on the disk of the run's folder."""
    disk = os.statvfs(run.path)
    return disk.f_bavail * disk.f_frsize  # blocks that a normal user may use, times their size
