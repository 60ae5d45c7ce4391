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
from engine.executors.cluster.place import Place, name_prefix, place_of_job, places
from engine.executors.slurm import commands
from engine.executors.slurm.causes import end_of, why_waiting
from engine.executors.slurm.commands import Job, SlurmDown
from engine.machine.processes import limits

# All are seconds.
_SILENT_S = 20.0  # without a sign of life before Slurm is asked
_ASK_S = (1.0, 30.0)  # at least and at most, between two questions about one job
_SETTLE_S = 15.0  # until what an ended job wrote has come through the shared file system
_COMING_S = 180.0  # that a file system may show files of another node as they were before
_MISSING_S = 60.0  # until a job that Slurm does not know and that is silent counts as lost
_STOP_S = 600.0  # that a run may take to save before its job is ended
_JOB_END_S = 10.0  # that a job may take to end after it has written how the run ended
_LOCK_S = 60.0  # to wait for another connection that submits the same launch
_NEVER = float("-inf")  # a time before all others
_LOG_CHARS = 500  # how much of a failed job's log an answer quotes
_LIVES = {"waiting": "pending", "running": "running", "ended": "exited"}


@dataclass
class _Watch:
    """What this connection knows of one launch. Times are those of the monotonic clock.

    Attributes:
        beat: the number of the last sign of life that was read.
        heard_at: when it was read first.
        began: when this connection first asked about the launch.
        asked_at: when Slurm was last asked about its job.
        job: the job as Slurm showed it then.
        silent_since: since when its files have been waited for: the job has written how the run
            ended, or Slurm says that it has ended or does not know it. None if that is not so.
    """

    beat: object = None
    heard_at: float = _NEVER
    began: float = field(default_factory=time.monotonic)
    asked_at: float = _NEVER
    job: Job | None = None
    silent_since: float | None = None


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
    """Submit a launch whose files were sent before, and return the id of its job in "job".

    A second call for it changes nothing; neither does one for a launch that has ended, was removed
    or is older than another ({} is returned). A job whose submission was cut off is found by its
    name.

    Args:
        order: what the job is to do (engine/executors/cluster/node_side.py).
        options: options of sbatch, all but the job's name and output.
        program: the beginning of a command that runs a module of this program on a node.
        secrets: environment variables for the job.
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
    """Submit the job of a launch, unless that was done before; return its id. For `options` and
    `program` see `start`."""
    submitted = read_object(place.submitted)
    if submitted.get("job"):
        return str(submitted["job"])
    if submitted:  # {"job": ""}: sbatch was called, and its answer is not known
        present = commands.named([place.job_name])
        if present:
            write_json(place.submitted, {"job": present[-1].id})
            return present[-1].id
    write_json(place.submitted, {"job": ""})
    arguments = [str(place.root), place.home_id, place.run_id, str(place.launch)]
    command = [*program, "engine.executors.cluster.node_side", *arguments]
    all_options = [*options, f"--job-name={place.job_name}", f"--output={place.output}"]
    job_id = commands.submit(_script(command), all_options)
    write_json(place.submitted, {"job": job_id})
    return job_id


def _script(command: Sequence[str]) -> str:
    """Return a batch script that runs the command. The shell is replaced by it (exec), so that the
    command itself gets the signals that Slurm sends to the script."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run for `lease_s` seconds. Return what became of the launch ("life",
    "end", "why" and others), and which of the run's files have changed."""
    place = Place(Path(root), home_id, run_id, launch)
    if not place.order.exists():
        return {"life": "gone", "launch": 0}
    limits.renew_lease(place.run, lease_s)
    # Asked before the files are listed: if the run has ended by then, the list has all its files.
    status = _status(place)
    return {"launch": launch, **status, **jobs.changes_of(place.run)}


def _status(place: Place) -> JsonObject:
    """Return what became of a launch: its "life" (pending, running, exited, unknown), its "end", or
    "why" it waits. What its job has written counts first; Slurm is asked only if it is silent."""
    watch = _watches.setdefault(place.job_name, _Watch())
    ended = read_object(place.ended)
    beat = read_object(place.beat)
    newest = ended or beat
    spent = {"spent_s": float(newest.get("spent_s", 0.0))}
    if ended:
        return {**spent, **_after_written_end(place, watch, ended)}
    now = time.monotonic()
    if beat and beat.get("beat") != watch.beat:
        watch.beat, watch.heard_at = beat.get("beat"), now
    activity = {"state": beat.get("state", ""), "device": beat.get("device", "")}
    if now - watch.heard_at < _SILENT_S and not _is_overdue(place):
        watch.silent_since = None
        return {**spent, "life": "running", **activity}
    try:
        job = _ask_slurm(place, watch)
    except SlurmDown as down:
        return {**spent, "life": "unknown", "why": str(down)}
    if job is not None and job.kind != "ended":
        watch.silent_since = None
        if _is_overdue(place):
            commands.cancel(job.id)
        if job.kind == "waiting":
            return {**spent, "life": "pending", "why": why_waiting(job)}
        return {**spent, "life": "running", **activity}
    if not read_object(place.submitted).get("job"):  # sbatch refused it, or was not called yet
        return {**spent, "life": "pending", "why": "it is not submitted yet"}
    return {**spent, **_after_silence(place, watch, job)}


def _after_written_end(place: Place, watch: _Watch, ended: JsonObject) -> JsonObject:
    """Return what became of a launch whose job has written how the run ended (`ended`, the content
    of that file). It counts as running until all its files have come through the file system."""
    still_running = {"life": "running", "state": "running"}
    if watch.silent_since is None:
        watch.silent_since = time.monotonic()
    is_patient = time.monotonic() - watch.silent_since < _COMING_S
    if is_patient and not launches.files_have_arrived(place, ended.get("sizes")):
        return still_running
    if not ended.get("taken"):
        return {"life": "exited", "end": ended.get("end")}
    # Slurm told the job to end. Only Slurm knows why, such as a time limit.
    try:
        job = _ask_slurm(place, watch)
    except SlurmDown as down:
        return {"life": "unknown", "why": str(down)}
    if job is not None and job.kind != "ended":
        return still_running
    if job is None:
        job = _accounted_job(place)
    return {"life": "exited", "end": end_of(job, is_taken=True)}


def _after_silence(place: Place, watch: _Watch, job: Job | None) -> JsonObject:
    """Return what became of a launch whose job has ended, as Slurm says, or is not known to Slurm
    (None), and has not written how the run ended."""
    now = time.monotonic()
    if watch.silent_since is None:
        watch.silent_since = now
    is_asked = place.stop.exists()
    has_run = place.claim.exists()
    if job is None:
        patience_s = _MISSING_S  # Slurm may list it again
    elif is_asked and not has_run:
        patience_s = 0.0  # it was ended before it began, so there is nothing to wait for
    else:
        patience_s = _SETTLE_S
    if now - watch.silent_since < patience_s:
        return {"life": "running", "state": ""}
    if job is None:
        job = _accounted_job(place)
    return {"life": "exited", "end": end_of(job, is_asked=is_asked)}


def _accounted_job(place: Place) -> Job | None:
    """Return the job of a launch from the cluster's accounting, which keeps ended jobs; None if it
    keeps nothing of it. Raises SlurmDown."""
    return commands.ended(str(read_object(place.submitted).get("job")))


def _is_overdue(place: Place) -> bool:
    """Tell whether a run was asked to end so long ago that Slurm is to end its job."""
    asked_s = launches.seconds_since_asked(place)
    return asked_s is not None and asked_s > _STOP_S


def _ask_slurm(place: Place, watch: _Watch) -> Job | None:
    """Return the launch's job as Slurm shows it, or showed it a while ago: the longer a launch has
    been watched, the seldomer Slurm is asked. None if Slurm does not list it. Raises SlurmDown."""
    now = time.monotonic()
    least_s, most_s = _ASK_S
    pause_s = min(max(least_s, (now - watch.began) / 10), most_s)
    if now - watch.asked_at >= pause_s:
        watch.job = _job_of(place)
        watch.asked_at = now
    return watch.job


def _job_of(place: Place) -> Job | None:
    """Return the job that runs a launch: the one that has claimed it, else the newest with its
    name. None if Slurm lists no job of that name. Raises SlurmDown."""
    present = commands.named([place.job_name])
    claiming_id = read_object(place.claim).get("job")
    for job in present:
        if job.id == claiming_id:
            return job
    return present[-1] if present else None


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end, for `reason`: by a file, and by a signal to its job. A job that
    still waits is ended at once, and so is one whose launch was removed."""
    place = Place(Path(root), home_id, run_id, launch)
    launches.ask_to_end(place, reason)
    try:
        for job in commands.named([place.job_name]):
            if job.kind == "waiting" or (job.kind == "running" and not place.order.exists()):
                commands.cancel(job.id)
            elif job.kind == "running":
                commands.cancel(job.id, signal="TERM")
    except SlurmDown:  # a running job reads the file; one that waits is ended by the next call
        pass
    if place.job_name in _watches:
        _watches[place.job_name].asked_at = _NEVER  # so that the next probe asks Slurm at once
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove the folders of all launches of a run up to this one; those that live stay. Returns in
    "removed" whether nothing of them is left. Raises SlurmDown."""
    all_places = places(Path(root), home_id, run_id)
    older = [place for place in all_places if place.launch <= launch]
    living = [place for place in older if _is_living(place)]
    for place in older:
        if place not in living:
            _let_job_end(place)
            shutil.rmtree(place.path, ignore_errors=True)
            _watches.pop(place.job_name, None)
    return {"removed": not living}


def _is_living(place: Place) -> bool:
    """Tell whether a launch has a job that waits or runs, and that has not written how the run
    ended. Raises SlurmDown."""
    present = commands.named([place.job_name])
    return not place.ended.exists() and any(job.kind != "ended" for job in present)


def _let_job_end(place: Place) -> None:
    """Wait until the job of a run that has ended has ended too; after some seconds it is ended.
    Raises SlurmDown."""
    deadline = time.monotonic() + _JOB_END_S
    while True:
        remaining = [job for job in commands.named([place.job_name]) if job.kind != "ended"]
        if not remaining:
            return
        if time.monotonic() > deadline:
            for job in remaining:
                commands.cancel(job.id)
            return
        time.sleep(0.2)


def clear(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Make room for a launch of a run: tell earlier ones to end, and remove those that have ended.

    Returns in "removed" whether nothing of them is left. If a later launch is there, nothing is
    done, and its number is returned in "there". Raises SlurmDown.
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
    """Return in "owned" every launch of a home that has a folder here, and every job without such a
    folder that waits or runs. Raises SlurmDown."""
    job_by_name = {job.name: job for job in commands.named() if job.name}
    owned = []
    for place in places(Path(root), home_id):
        job = job_by_name.pop(place.job_name, None)
        life = "exited" if job is None or place.ended.exists() else _LIVES[job.kind]
        owned.append({"run_id": place.run_id, "launch": place.launch, "life": life})
    for name, job in job_by_name.items():  # those without a folder
        place = place_of_job(Path(root), home_id, name)
        if place is not None and job.kind != "ended":
            owned.append({"run_id": place.run_id, "launch": place.launch, "life": _LIVES[job.kind]})
    return {"owned": owned}


def expect(root: str, options: Sequence[str]) -> JsonObject:
    """Return in "start" when a job with these options of sbatch would start; "" if Slurm does not
    say.

    `root` is not used: every function of this module gets it. Raises SlurmDown, or SlurmRefused if
    such a job could never start.
    """
    return {"start": commands.expected_start("#!/bin/sh\n", options)}


def describe(
    root: str, home_id: str, options: Sequence[str], program: Sequence[str], is_first: bool
) -> JsonObject:
    """Find out what a node has, by a job that ends at once. The first call (`is_first`) submits the
    job, each further call looks for its answer.

    Returns the answer in "described" once it is there; before, "why" the job waits; or how it has
    "failed". For `options` and `program` see `start`. Raises SlurmDown, or SlurmRefused if Slurm
    does not take the job.
    """
    folder = Path(root) / "homes" / "check"
    file = folder / f"{home_id}.json"  # for the answer
    name = f"{name_prefix(home_id)}check"
    log = folder / f"{home_id}.log"
    if is_first:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for earlier_job in commands.named([name]):
            if earlier_job.kind != "ended":
                commands.cancel(earlier_job.id)
        file.unlink(missing_ok=True)
        shutil.rmtree(file.with_suffix(".home"), ignore_errors=True)
        command = [*program, "engine.executors.cluster.node_side", "--describe", root, str(file)]
        all_options = [*options, f"--job-name={name}", f"--output={log}"]
        return {"why": "it is submitted", "job": commands.submit(_script(command), all_options)}
    described = read_object(file)
    if described:
        shutil.rmtree(file.with_suffix(".home"), ignore_errors=True)  # the home of its trial
        return {"described": described}
    present = commands.named([name])
    job = present[-1] if present else None
    if job is not None and job.kind != "ended":
        return {"why": why_waiting(job)}
    log_end = log.read_text("utf-8", "replace")[-_LOG_CHARS:] if log.exists() else ""
    state = f"{job.state} {job.reason}" if job is not None else "it is not known any more"
    return {"failed": f"{state} {log_end}".strip()}


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
