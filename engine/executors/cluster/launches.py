"""The folder of a launch, as whoever puts its job there handles it; the job is node_side.py."""

import contextlib
import os
import time
from collections.abc import Mapping

from engine.core.files import JsonObject, read_object, write_json
from engine.executors import jobs
from engine.executors.cluster.place import Place, places
from engine.machine.processes import limits


def make_ready(place: Place, order: JsonObject, secrets: Mapping[str, str]) -> bool:
    """Make a launch, whose files were sent before, ready for its job. A second call changes
    nothing.

    Args:
        place: the launch's folder.
        order: what the job is to do (node_side.py).
        secrets: environment variables for the job. They lie in a file that only this user can read,
            until the job has begun.

    Returns whether there is something to run. False means that the launch has ended, was removed,
    or that a later launch of the run is there.
    """
    jobs.forget_changes(place.run_id)
    present = places(place.root, place.home_id, place.run_id)
    is_newest = place in present and present[-1] == place
    if not is_newest or place.ended.exists():
        return False
    limits.renew_lease(place.run, float(order["lease_s"]))
    if not place.claim.exists():  # a job that has claimed the launch has read them already
        write_json(place.secrets, dict(secrets))
    if not place.order.exists():
        place.envs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # an earlier call was cut off after this
            os.symlink(place.envs, place.path / "envs")
        write_json(place.order, order)
    return True


def ask_to_end(place: Place, reason: str) -> None:
    """Ask a run to save and end, by a file that its job reads. A second call changes nothing: the
    first one's time and reason stay."""
    if place.order.exists() and not place.stop.exists():
        write_json(place.stop, {"reason": reason, "time": time.time()})


def seconds_since_asked(place: Place) -> float | None:
    """Return how many seconds ago a run was asked to end; None if it was not."""
    asked_at = read_object(place.stop).get("time")
    return max(0.0, time.time() - asked_at) if isinstance(asked_at, int | float) else None


def files_have_arrived(place: Place, sizes: object) -> bool:
    """Tell whether every file of an ended run is as large on this machine as it was on its node.
    `sizes` maps a path in the run's folder to bytes, as the job wrote it; anything but such an
    object means that there is nothing to wait for.

    The file system that both share may show changes of another machine only after some time.
    """
    for path, size in sizes.items() if isinstance(sizes, dict) else ():
        file = place.run.path / str(path)
        try:
            # Opened, not only asked for its size: on opening, a network file system asks anew.
            with file.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < int(size):
                    return False
        except OSError:
            return False
    return True
