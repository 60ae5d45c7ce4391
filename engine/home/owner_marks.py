"""What the owner of a home marked: checkpoints that are kept, and versions that are sealed exams.

`pins.json` of a run lists the steps of the checkpoints; the trainer reads it before it removes any.
`seal.json` of an environment version lets nobody see its tasks (engine/environments/versions.py
says what for, and writes it).
"""

from collections.abc import Collection
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.run_dir import RunDir
from engine.records.env_version import SEAL, Seal
from engine.records.run_config import RunConfig


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


def seal_in(folder: Path) -> Seal | None:
    """The seal of the version in `folder`; None where it has none.

    Raises DamagedRecord for a seal that cannot be read: the version then counts as sealed.
    """
    try:
        return Seal.read(folder / SEAL)
    except (FileNotFoundError, NotADirectoryError):
        return None


def refuse_if_sealed(folder: Path, env_id: str, request: str) -> None:
    """Raise UserError ENV_SEALED if the version in `folder` is sealed.

    `request` says what was asked of it, such as "its files cannot be read".
    """
    if seal_in(folder) is not None:
        raise UserError(
            "ENV_SEALED",
            f"{env_id} is a sealed exam: {request}",
            hint="Evaluate models on it and compare them; to read tasks or train, use another "
            "environment of the same kind.",
            field="env_id",
        )


def refuse_if_of_sealed(config: RunConfig | None, request: str) -> None:
    """Raise UserError ENV_SEALED if the run of this config asked the tasks of a sealed version.

    A run without a readable config (None) has no tasks that could be shown. `request` as for
    `refuse_if_sealed`.
    """
    if config is not None and config.env_dir:
        refuse_if_sealed(Path(config.env_dir), config.env_id, request)


def is_of_sealed(config: RunConfig | None) -> bool:
    """Whether the run of this config asked the tasks of a sealed version."""
    return config is not None and bool(config.env_dir) and seal_in(Path(config.env_dir)) is not None
