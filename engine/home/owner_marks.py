"""Marks that the owner of a home sets: pinned checkpoints and sealed environment versions.

`pins.json` of a run lists the steps of the checkpoints that are kept; the trainer reads it before
it removes a checkpoint. `seal.json` makes an environment version a sealed exam: nobody may see its
tasks (engine/environments/versions.py writes it and says why).
"""

from collections.abc import Collection
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.rows import viewer_id
from engine.home.run_dir import Home, RunDir
from engine.home.team.owners import Viewer
from engine.records.env_version import SEAL, Seal
from engine.records.run_config import RunConfig


def home_of_owner(home: Home, config: RunConfig) -> Home:
    """Return the home as the owner of a run sees it, without what others share with that owner.

    It is for what the run itself makes or looks up by name: a version that it pushes then belongs
    to its owner, and no name means what somebody else has pushed. `config` is the run's.
    """
    # A viewer that may "change" sees only its own: nothing is shared for changing.
    return Home(home.root, Viewer(config.owner, may="change"))


def own_part(home: Home) -> Home:
    """Return the home in which only what belongs to its viewer is seen (to the local user, if the
    home has no viewer), without what others share."""
    # A viewer that may "change" sees only its own: nothing is shared for changing.
    return Home(home.root, Viewer(viewer_id(home.viewer), may="change"))


def pinned_steps(run: RunDir) -> set[int]:
    """Return the steps whose checkpoints the user has pinned; empty if there is no file of pins.

    Raises ValueError if the file is damaged: a caller must then remove no checkpoint.
    """
    try:
        stored = read_json(run.pins)
    except FileNotFoundError:
        return set()
    if not isinstance(stored, list) or not all(isinstance(step, int) for step in stored):
        raise ValueError(f"{run.pins} is no list of steps")
    return set(stored)


def write_pinned(run: RunDir, steps: Collection[int]) -> None:
    """Pin the checkpoints of these steps, and unpin all others of the run."""
    write_json(run.pins, sorted(steps))


def seal_in(folder: Path) -> Seal | None:
    """Return the seal of the environment version in `folder`; None if the version is not sealed.

    Raises DamagedRecord if the seal cannot be read, so that a damaged seal never opens a version.
    """
    try:
        return Seal.read(folder / SEAL)
    except (FileNotFoundError, NotADirectoryError):
        return None


def refuse_if_sealed(folder: Path, env_id: str, request: str) -> None:
    """Raise UserError ENV_SEALED if the version in `folder` is sealed (nobody may see its tasks).

    `request` says in the message what is refused, such as "its files cannot be read".
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

    Nothing is raised for None (a config that cannot be read), because no tasks of such a run can be
    shown. `request` says in the message what is refused, such as "its files cannot be read".
    """
    if config is not None and config.env_dir:
        refuse_if_sealed(Path(config.env_dir), config.env_id, request)


def is_of_sealed(config: RunConfig | None) -> bool:
    """Return whether the run of this config asked the tasks of a sealed version (an exam whose
    tasks nobody may see); False for None, and for a run without an environment."""
    if config is None or not config.env_dir:
        return False
    return seal_in(Path(config.env_dir)) is not None
