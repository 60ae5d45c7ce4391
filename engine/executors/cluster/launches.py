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
    """Make a launch whose files were put ready for its job. Again changes nothing.

    Args:
        place: the launch.
        order: what the job is to do (node_side.py).
        secrets: variables for the job. They lie in a file of this user alone until it has begun.

    Returns False where there is nothing to run: it has ended, or is stale, because it was removed
    or a newer launch is there.
    """
    jobs.forget_changes(place.run_id)
    present = places(place.root, place.home_id, place.run_id)
    is_stale = place not in present or present[-1] != place
    if is_stale or place.ended.exists():
        return False
    limits.renew_lease(place.run, float(order["lease_s"]))
    if not place.claim.exists():  # else the job has read them
        write_json(place.secrets, dict(secrets))
    if not place.order.exists():
        place.envs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(place.envs, place.path / "envs")
        write_json(place.order, order)
    return True


def ask_to_end(place: Place, reason: str) -> None:
    """Ask a run to save and end, by a file that its job reads. Again changes nothing."""
    if place.order.exists() and not place.stop.exists():
        write_json(place.stop, {"reason": reason, "time": time.time()})


def asked_s(place: Place) -> float | None:
    """Seconds since a run was asked to end; None where it was not."""
    asked = read_object(place.stop).get("time")
    return max(0.0, time.time() - asked) if isinstance(asked, int | float) else None


def are_here(place: Place, sizes: object) -> bool:
    """Whether every file has the size here that it had on its node; a file that is opened is asked
    about anew by file systems that keep what they knew."""
    for path, size in sizes.items() if isinstance(sizes, dict) else ():
        file = place.run.path / str(path)
        try:
            with file.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < int(size):
                    return False
        except OSError:
            return False
    return True
