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
    """Make the launch ready for its job (`launches.make_ready`); answers whether it still needs
    one."""
    place = Place(Path(root), home_id, run_id, launch)
    is_ready = launches.make_ready(place, order, secrets)
    return {"needs_job": is_ready and not place.claim.exists()}


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run and tell what its job has written, and which of its files changed.

    `end` is there once the last words are, and all files as they say. `is_held` says whether a
    process of the run holds its lock, wherever it runs.
    """
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"launch": 0}
    limits.renew_lease(place.run, lease_s)
    words = read_object(place.ended)  # before the files are listed: of an ended run all of them are
    beat = read_object(place.beat)
    is_whole = bool(words) and launches.are_here(place, words.get("sizes"))
    return {
        "launch": launch,
        "claim": read_object(place.claim).get("job", ""),
        "has_words": bool(words),
        "end": words.get("end") if is_whole else None,
        "is_taken": words.get("taken") is True,
        "beat": beat.get("beat"),
        "state": beat.get("state", ""),
        "device": beat.get("device", ""),
        "spent_s": float((words or beat).get("spent_s", 0.0)),
        "asked_s": launches.asked_s(place),
        "is_held": launcher.is_alive(place.run),
        **jobs.changes_of(place.run),
    }


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end; one whose job has not begun is taken back, so that it never does.

    Answers whether it was.
    """
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"taken_back": False}
    launches.ask_to_end(place, reason)
    return {"taken_back": take_back(place)}


def take_back(place: Place) -> bool:
    """Claim a launch for nobody. Returns whether it is nobody's: False where its job has it."""
    aside = place.claim.with_name(f".claim-{os.getpid()}")
    write_json(aside, {"job": TAKEN_BACK})
    with contextlib.suppress(FileExistsError):
        os.link(aside, place.claim)
    aside.unlink(missing_ok=True)
    is_nobodys = read_object(place.claim).get("job") == TAKEN_BACK
    if is_nobodys:
        place.secrets.unlink(missing_ok=True)
    return is_nobodys


def make_way(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Tell a launch to end because another takes its place. Its supervisor reads that itself, so it
    ends even where its job is gone."""
    stop(root, home_id, run_id, launch, "another launch takes its place")
    place = Place(Path(root), home_id, run_id, launch)
    if place.order.exists():
        limits.renew_lease(place.run, 0)
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove a launch that does not live; its job, where it has one yet, ends as it begins."""
    place = Place(Path(root), home_id, run_id, launch)
    if place.order.exists():
        take_back(place)
    shutil.rmtree(place.path, ignore_errors=True)
    jobs.forget_changes(run_id)
    return {}


def list_owned(root: str, home_id: str) -> JsonObject:
    """Every launch of a home that has a folder here; one that was not started yet too."""
    return {
        "owned": [
            {
                "run_id": place.run_id,
                "launch": place.launch,
                "job": place.job_name,
                "is_started": place.order.exists(),
                "is_held": launcher.is_alive(place.run),
                "has_ended": place.ended.exists()
                or read_object(place.claim).get("job") == TAKEN_BACK,
            }
            for place in places(Path(root), home_id)
        ]
    }


def described(root: str, file: str, again: bool) -> JsonObject:
    """What a job that looks at a node has written into `file`, a name below the root.

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
