"""Jobs of a cluster, called over a connection to its login node (engine/executors/far_side.py).

Whether a job lives is asked of its own signs of life first, and of Slurm where there are none: a
controller has many users, and one that was restarted may have forgotten a job that goes on. Only
what a job wrote, or what Slurm says of one that is silent, ends a run; a controller that does not
answer says nothing.
"""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.files import JsonObject, read_object, take_lock, write_json
from engine.executors import jobs
from engine.executors.cluster import launches
from engine.executors.cluster.place import Place, name_prefix, of_job, places
from engine.executors.slurm import commands
from engine.executors.slurm.causes import end_of, why_waiting
from engine.executors.slurm.commands import Job, SlurmDown
from engine.machine.processes import limits

_SILENT_S = 20.0  # without a sign of life before Slurm is asked
_ASK_S = (1.0, 30.0)  # between two questions about one job, at first and later
_SETTLE_S = 15.0  # until the last words of an ended job have come through the shared file system
_COMING_S = 180.0  # that a file system may show files of another node as they were before
_MISSING_S = 60.0  # until a job that Slurm does not know and that is silent counts as lost
_STOP_S = 600.0  # that a run may take to save before its job is ended
_JOB_END_S = 10.0  # that a job may take to end after its last word
_LOCK_S = 60.0
_NEVER = float("-inf")
_LIVES = {"waiting": "pending", "running": "running", "ended": "exited"}


@dataclass
class _Watch:
    """What this connection knows of one launch; times are monotonic."""

    beat: object = None
    heard_at: float = _NEVER
    began: float = field(default_factory=time.monotonic)
    asked_at: float = _NEVER
    job: Job | None = None  # as Slurm showed it last
    silent_since: float | None = None  # it has ended, or is missing, without a last word


_watches: dict[str, _Watch] = {}


def start(
    root: str,
    home_id: str,
    run_id: str,
    launch: int,
    order: JsonObject,
    options: Sequence[str],
    program: Sequence[str],
    secrets: Mapping[str, str],
) -> JsonObject:
    """Submit the launch whose files were put. The same launch again changes nothing, nor does an
    older one, which is stale; one whose submission was cut is found by its name.

    Args:
        order: what the job is to do (engine/executors/cluster/node_side.py).
        options: of sbatch, all but name and output.
        program: what runs a module of ours on a node: an interpreter and its options.
    """
    place = Place(Path(root), home_id, run_id, launch)
    _watches.pop(place.job_name, None)
    if not launches.make_ready(place, order, secrets):
        return {}
    lock = take_lock(place.submit_lock, wait_s=_LOCK_S)
    if lock is None:
        raise SlurmDown("another connection submits this run")
    try:
        return {"job": _submit_once(place, options, program)}
    finally:
        os.close(lock)


def _submit_once(place: Place, options: Sequence[str], program: Sequence[str]) -> str:
    """Submit the job unless that was done; returns its id."""
    before = read_object(place.submitted)
    if before.get("job"):
        return str(before["job"])
    if before:  # sbatch was called, and its answer is not known
        present = commands.named([place.job_name])
        if present:
            write_json(place.submitted, {"job": present[-1].id})
            return present[-1].id
    write_json(place.submitted, {"job": ""})
    of_job = [str(place.root), place.home_id, place.run_id, str(place.launch)]
    command = [*program, "engine.executors.cluster.node_side", *of_job]
    whole = [*options, f"--job-name={place.job_name}", f"--output={place.output}"]
    job = commands.submit(_script(command), whole)
    write_json(place.submitted, {"job": job})
    return job


def _script(command: Sequence[str]) -> str:
    """A batch script that becomes one program, which so gets the signals of the batch step."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run and tell what became of it, and which of its files changed."""
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"life": "gone", "launch": 0}
    limits.renew_lease(place.run, lease_s)
    standing = _standing(place)  # before the files are listed: of an ended run all of them are
    return {"launch": launch, **standing, **jobs.changes_of(place.run)}


def _standing(place: Place) -> JsonObject:
    """What became of a launch: its life, and what is known beside it."""
    watch = _watches.setdefault(place.job_name, _Watch())
    last_words = read_object(place.ended)
    beat = read_object(place.beat)
    spent = {"spent_s": float((last_words or beat).get("spent_s", 0.0))}
    if last_words:
        return {**spent, **_after_last_words(place, watch, last_words)}
    now = time.monotonic()
    if beat and beat.get("beat") != watch.beat:
        watch.beat, watch.heard_at = beat.get("beat"), now
    alive = {"state": beat.get("state", ""), "device": beat.get("device", "")}
    if now - watch.heard_at < _SILENT_S and not _is_overdue(place):
        watch.silent_since = None
        return {**spent, "life": "running", **alive}
    try:
        job = _ask(place, watch)
    except SlurmDown as down:
        return {**spent, "life": "unknown", "why": str(down)}
    if job is not None and job.kind != "ended":
        watch.silent_since = None
        if _is_overdue(place):
            commands.cancel(job.id)
        if job.kind == "waiting":
            return {**spent, "life": "pending", "why": why_waiting(job)}
        return {**spent, "life": "running", **alive}
    if not read_object(place.submitted).get("job"):  # sbatch was refused, or cut before it
        return {**spent, "life": "pending", "why": "it is not submitted yet"}
    return {**spent, **_after_silence(place, watch, job)}


def _after_last_words(place: Place, watch: _Watch, words: JsonObject) -> JsonObject:
    """The end that a job wrote, once all its files are seen here as it left them."""
    ended = {"life": "exited", "end": words.get("end")}
    waits = {"life": "running", "state": "running"}
    if watch.silent_since is None:
        watch.silent_since = time.monotonic()
    is_patient = time.monotonic() - watch.silent_since < _COMING_S
    if is_patient and not launches.are_here(place, words.get("sizes")):
        return waits
    if not words.get("taken"):
        return ended
    # Told to end by Slurm: by whom, and for what, Slurm alone knows.
    try:
        job = _ask(place, watch)
    except SlurmDown as down:
        return {"life": "unknown", "why": str(down)}
    if job is not None and job.kind != "ended":
        return waits
    if job is None:
        job = commands.ended(str(read_object(place.submitted).get("job")))
    return {"life": "exited", "end": end_of(job, is_taken=True)}


def _after_silence(place: Place, watch: _Watch, job: Job | None) -> JsonObject:
    """What became of a job that Slurm says has ended, or does not know, without a last word."""
    now = time.monotonic()
    if watch.silent_since is None:
        watch.silent_since = now
    is_asked = place.stop.exists()
    never_ran = not place.claim.exists()
    patience = _MISSING_S if job is None else (0.0 if is_asked and never_ran else _SETTLE_S)
    if now - watch.silent_since < patience:
        return {"life": "running", "state": ""}
    if job is None:
        job = commands.ended(str(read_object(place.submitted).get("job")))
    return {"life": "exited", "end": end_of(job, is_asked=is_asked)}


def _is_overdue(place: Place) -> bool:
    """Whether a run was told to end so long ago that its job is ended."""
    asked_s = launches.asked_s(place)
    return asked_s is not None and asked_s > _STOP_S


def _ask(place: Place, watch: _Watch) -> Job | None:
    """The launch's job as Slurm shows it: asked seldom, the more so the longer it waits.

    None where Slurm does not list it. Raises SlurmDown.
    """
    now = time.monotonic()
    pause_s = min(max(_ASK_S[0], (now - watch.began) / 10), _ASK_S[1])
    if now - watch.asked_at >= pause_s:
        watch.job = _job_of(place)
        watch.asked_at = now
    return watch.job


def _job_of(place: Place) -> Job | None:
    """The job that runs a launch: the one that claimed it, else the newest of its name."""
    present = commands.named([place.job_name])
    claimed = read_object(place.claim).get("job")
    return next((job for job in present if job.id == claimed), present[-1] if present else None)


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end: by a file, and by a signal to its job; one that waits ends."""
    place = Place(Path(root), home_id, run_id, launch)
    launches.ask_to_end(place, reason)
    try:
        for job in commands.named([place.job_name]):
            if job.kind == "waiting" or (job.kind == "running" and not place.order.exists()):
                commands.cancel(job.id)
            elif job.kind == "running":
                commands.cancel(job.id, signal="TERM")
    except SlurmDown:  # the job reads the file; one that waits is ended by the next call
        pass
    if place.job_name in _watches:
        _watches[place.job_name].asked_at = _NEVER
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove every launch of a run up to this one; one that lives stays. Answers whether nothing of
    them is left. Raises SlurmDown."""
    left = [p for p in places(Path(root), home_id, run_id) if p.launch <= launch]
    living = [place for place in left if _is_living(place)]
    for place in left:
        if place not in living:
            _let_job_end(place)
            shutil.rmtree(place.path, ignore_errors=True)
            _watches.pop(place.job_name, None)
    return {"removed": not living}


def _is_living(place: Place) -> bool:
    """Whether a launch has a job that waits or runs, and has not said its last word."""
    present = commands.named([place.job_name])
    return not place.ended.exists() and any(job.kind != "ended" for job in present)


def _let_job_end(place: Place) -> None:
    """Wait until the job of a run that has ended is gone too; it is ended where it takes long."""
    deadline = time.monotonic() + _JOB_END_S
    while True:
        left = [job for job in commands.named([place.job_name]) if job.kind != "ended"]
        if not left:
            return
        if time.monotonic() > deadline:
            for job in left:
                commands.cancel(job.id)
            return
        time.sleep(0.2)


def clear(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Make room for a launch of a run: older ones are told to end, and removed once they have.

    Answers whether nothing of them is left, or the number of a newer launch that is `there`, to
    which nothing is done. Raises SlurmDown.
    """
    present = places(Path(root), home_id, run_id)
    if present and present[-1].launch > launch:
        return {"there": present[-1].launch}
    for place in present:
        if place.launch < launch and _is_living(place):
            stop(root, home_id, run_id, place.launch, "another launch takes its place")
            if _is_overdue(place):
                for job in commands.named([place.job_name]):
                    commands.cancel(job.id)
    return reap(root, home_id, run_id, launch - 1)


def list_owned(root: str, home_id: str) -> JsonObject:
    """Every launch of a home that has a folder here, and every job of its name without one."""
    present = {job.name: job for job in commands.named() if job.name}
    owned = []
    for place in places(Path(root), home_id):
        job = present.pop(place.job_name, None)
        life = "exited" if job is None or place.ended.exists() else _LIVES[job.kind]
        owned.append({"run_id": place.run_id, "launch": place.launch, "life": life})
    for name, job in present.items():
        place = of_job(Path(root), home_id, name)
        if place is not None and job.kind != "ended":
            owned.append({"run_id": place.run_id, "launch": place.launch, "life": _LIVES[job.kind]})
    return {"owned": owned}


def expect(root: str, options: Sequence[str]) -> JsonObject:
    """When a job with these options would start; "" where Slurm does not say.

    Nothing below `root` is touched. Raises SlurmDown, or SlurmRefused where it never could.
    """
    return {"start": commands.expected_start("#!/bin/sh\n", options)}


def describe(
    root: str, home_id: str, options: Sequence[str], program: Sequence[str], is_first: bool
) -> JsonObject:
    """Have a node say what it has, by a job that ends at once. The first call submits it, each
    further call looks at it.

    Answers `described` once that is there, `why` it waits as long as it is not, or how it has
    `failed`. Raises SlurmDown, or SlurmRefused where it is not taken.
    """
    folder = Path(root) / "homes" / "check"
    file = folder / f"{home_id}.json"
    name = f"{name_prefix(home_id)}check"
    log = folder / f"{home_id}.log"
    if is_first:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in commands.named([name]):
            if old.kind != "ended":
                commands.cancel(old.id)
        file.unlink(missing_ok=True)
        shutil.rmtree(file.with_suffix(".home"), ignore_errors=True)
        command = [*program, "engine.executors.cluster.node_side", "--describe", root, str(file)]
        whole = [*options, f"--job-name={name}", f"--output={log}"]
        return {"why": "it is submitted", "job": commands.submit(_script(command), whole)}
    described = read_object(file)
    if described:
        shutil.rmtree(file.with_suffix(".home"), ignore_errors=True)
        return {"described": described}
    present = commands.named([name])
    if present and present[-1].kind != "ended":
        return {"why": why_waiting(present[-1])}
    text = log.read_text("utf-8", "replace")[-500:] if log.exists() else ""
    state = f"{present[-1].state} {present[-1].reason}" if present else "it is not known any more"
    return {"failed": f"{state} {text}".strip()}


CALLS: Mapping[str, Callable[..., JsonObject]] = {
    "start": start,
    "look": look,
    "stop": stop,
    "reap": reap,
    "clear": clear,
    "list_owned": list_owned,
    "expect": expect,
    "describe": describe,
}
