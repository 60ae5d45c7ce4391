"""How a job that wrote no last word has ended, and why one waits, from what Ray says of it."""

from engine.core.files import JsonObject
from engine.executors.cluster.ends import AS_TOLD, end_record, lost_end
from engine.executors.ray.jobs_api import Job

# Ray's word for a failure -> what happened, though the run could go on elsewhere.
_TAKEN = {
    "JOB_SUPERVISOR_ACTOR_DIED": "node lost: Ray does not reach the node of its job any more",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "node lost: Ray lost sight of its job",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "Ray could not start its job",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "Ray has no node for its job",
}
NOT_STARTED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"  # it waited for longer than Ray lets it
_KILLED = (137, 143, -9, -15)  # exit codes of a program that a signal has ended: SIGKILL, SIGTERM


def why_waiting(job: Job) -> str:
    """Say in one line why a job waits, in Ray's words if it has some."""
    return f"Ray: {job.message}" if job.message else "Ray has no room for it yet"


def end_of(job: Job | None, *, is_asked: bool = False) -> JsonObject:
    """Return how a run ended whose job has not written that itself, from what Ray says of the job.
    The record has "is_lost" if the run can go on from its last checkpoint.

    Args:
        job: the job as Ray shows it; None if Ray does not know it any more, or does not answer.
        is_asked: whether the run had been told to end.
    """
    if is_asked:
        return end_record("cancelled", "cancelled", AS_TOLD)
    if job is None:
        return lost_end("node lost: its job was ended, and Ray does not know it any more")
    if job.error in _TAKEN:
        return lost_end(f"{_TAKEN[job.error]} ({_named(job)})")
    if job.status == "STOPPED":
        hint = "Resume it when it is to go on."
        return end_record(
            "failed", "killed", f"its job was stopped on the cluster ({job.id})", hint
        )
    if job.exit_code in _KILLED:
        return lost_end(f"its job was killed on its node ({job.id}, exit code {job.exit_code})")
    if job.status == "FAILED":
        hint = "Mend that on the cluster's nodes, then resume it."
        return end_record("failed", "infra", f"its job failed on its node: {_named(job)}", hint)
    return lost_end(f"its job ended without a word ({_named(job)})")


def _named(job: Job) -> str:
    """Return a job's id and what Ray says of it, for a message."""
    return f"{job.id}: {job.message or job.status}"
