"""`pins.json` of a run: the steps whose checkpoints the user keeps. The trainer reads it before it
removes any."""

from collections.abc import Collection

from engine.core.files import read_json, write_json
from engine.home.run_dir import RunDir


def pinned_steps(run: RunDir) -> set[int]:
    """The steps whose checkpoints are kept; none where there is no file.

    Raises ValueError where the file is damaged: nothing may be removed then.
    """
    try:
        stored = read_json(run.pins)
    except FileNotFoundError:
        return set()
    if not isinstance(stored, list) or not all(isinstance(step, int) for step in stored):
        raise ValueError(f"{run.pins} is no list of steps")
    return set(stored)


def write_pinned(run: RunDir, steps: Collection[int]) -> None:
    """Keep the checkpoints of these steps and no others."""
    write_json(run.pins, sorted(steps))
