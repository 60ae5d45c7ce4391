"""Launches on a shared folder, called over a connection to where that is seen (far_side.py).

Ray is not asked here: whoever calls does that, and joins both.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.core.files import JsonObject, read_object, write_json
from engine.executors import jobs
from engine.executors.cluster import launches
from engine.executors.cluster.place import Place, places
from engine.machine.processes import launcher, limits

TAKEN_BACK = "taken back"  # in the place of a job's id, in the claim of a launch that never runs


def start(
    root: str,
    home_id: str,
    run_id: str,
    launch: int,
    order: JsonObject,
    secrets: Mapping[str, str],
) -> JsonObject:
    """Make the launch, whose files were sent before, ready for its job. Returns in "needs_job"
    whether Ray must still be given a job for it.

    Args:
        order: what the job is to do (cluster/node_side.py).
        secrets: environment variables for the job.
    """
    place = Place(Path(root), home_id, run_id, launch)
    is_ready = launches.make_ready(place, order, secrets)
    return {"needs_job": is_ready and not place.claim.exists()}


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run for `lease_s` seconds. Return what its job has written into the
    launch's folder, and which of the run's files have changed.

    "has_words" says whether the job has written how the run ended; "end" holds that once all files
    are as large here as they were on the node. "is_held" says whether a process of the run holds
    its lock, on whatever machine. "launch" is 0 if there is no such launch.
    """
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"launch": 0}
    limits.renew_lease(place.run, lease_s)
    # Read before the files are listed: if the run has ended by then, the list has all its files.
    ended = read_object(place.ended)
    beat = read_object(place.beat)
    is_complete = bool(ended) and launches.files_have_arrived(place, ended.get("sizes"))
    newest = ended or beat
    return {
        "launch": launch,
        "claim": read_object(place.claim).get("job", ""),
        "has_words": bool(ended),
        "end": ended.get("end") if is_complete else None,
        "is_taken": ended.get("taken") is True,
        "beat": beat.get("beat"),
        "state": beat.get("state", ""),
        "device": beat.get("device", ""),
        "spent_s": float(newest.get("spent_s", 0.0)),
        "asked_s": launches.seconds_since_asked(place),
        "is_held": launcher.is_alive(place.run),
        **jobs.changes_of(place.run),
    }


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end, for `reason`. A launch whose job has not begun is taken back, so
    that it never does. Returns in "taken_back" whether that was done."""
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"taken_back": False}
    launches.ask_to_end(place, reason)
    return {"taken_back": take_back(place)}


def take_back(place: Place) -> bool:
    """Claim a launch in place of its job, which then never begins. Returns False if its job has
    claimed it already."""
    aside = place.claim.with_name(f".claim-{os.getpid()}")
    write_json(aside, {"job": TAKEN_BACK})
    with contextlib.suppress(FileExistsError):
        os.link(aside, place.claim)  # fails if the file exists, so only one claim succeeds
    aside.unlink(missing_ok=True)
    is_taken_back = _is_taken_back(place)
    if is_taken_back:
        place.secrets.unlink(missing_ok=True)
    return is_taken_back


def _is_taken_back(place: Place) -> bool:
    """Tell whether a launch was claimed in place of its job (`take_back`)."""
    return read_object(place.claim).get("job") == TAKEN_BACK


def make_way(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Tell a launch to end because another takes its place. Its lease ends at once, which its
    supervisor reads itself, so that it ends even if its job is gone."""
    stop(root, home_id, run_id, launch, "another launch takes its place")
    place = Place(Path(root), home_id, run_id, launch)
    if place.order.exists():
        limits.renew_lease(place.run, seconds=0)
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove the folder of a launch that does not live. If its job still waits, it ends as soon as
    it begins, because the launch was taken back."""
    place = Place(Path(root), home_id, run_id, launch)
    if place.order.exists():
        take_back(place)
    shutil.rmtree(place.path, ignore_errors=True)
    jobs.forget_changes(run_id)
    return {}


def list_owned(root: str, home_id: str) -> JsonObject:
    """Return in "owned" every launch of a home that has a folder here, also those that were not
    started yet."""
    return {"owned": [_listed_launch(place) for place in places(Path(root), home_id)]}


def _listed_launch(place: Place) -> JsonObject:
    """Return a launch as `list_owned` lists it. One that was taken back counts as ended."""
    return {
        "run_id": place.run_id,
        "launch": place.launch,
        "job": place.job_name,
        "is_started": place.order.exists(),
        "is_held": launcher.is_alive(place.run),
        "has_ended": place.ended.exists() or _is_taken_back(place),
    }


def described(root: str, file: str, again: bool) -> JsonObject:
    """Return in "described" what a job that looks at a node has written into `file`, a path below
    the root, or None if it has not yet. The file is deleted when it was read.

    With `again` an older answer is removed first.
    """
    path = Path(root) / file
    if again:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    answer = read_object(path)
    if answer:
        shutil.rmtree(path.with_suffix(".home"), ignore_errors=True)
        path.unlink(missing_ok=True)
    return {"described": answer or None}


CALLS: Mapping[str, Callable[..., JsonObject]] = {
    "start": start,
    "look": look,
    "stop": stop,
    "make_way": make_way,
    "reap": reap,
    "list_owned": list_owned,
    "described": described,
}
