"""How a job that wrote no last word has ended, and why one waits, from what Ray says of it."""

from engine.core.files import JsonObject
from engine.executors.cluster.ends import AS_TOLD, ended, lost
from engine.executors.ray.jobs_api import Job

# Ray's word for a failure -> what happened, though the run could go on elsewhere.
_TAKEN = {
    "JOB_SUPERVISOR_ACTOR_DIED": "node lost: Ray does not reach the node of its job any more",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "node lost: Ray lost sight of its job",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "Ray could not start its job",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "Ray has no node for its job",
}
NOT_STARTED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"  # it waited for longer than Ray lets it
_NOT_ITS_OWN = (137, 143, -9, -15)  # exit codes of a program that was killed


def why_waiting(job: Job) -> str:
    """Why a job waits, in one line."""
    return f"Ray: {job.message}" if job.message else "Ray has no room for it yet"


def end_of(job: Job | None, *, is_asked: bool = False) -> JsonObject:
    """The end of a run whose job ended without its last word, as engine/executors/jobs.py writes
    ends; with `is_lost` where it could go on from its last checkpoint.

    Args:
        job: as Ray shows it; None where Ray does not know it any more, or does not answer.
        is_asked: whether the run had been told to end.
    """
    if is_asked:
        return ended("cancelled", "cancelled", AS_TOLD)
    if job is None:
        return lost("node lost: its job was ended, and Ray does not know it any more")
    if job.error in _TAKEN:
        return lost(f"{_TAKEN[job.error]} ({_named(job)})")
    if job.status == "STOPPED":
        hint = "Resume it when it is to go on."
        return ended("failed", "killed", f"its job was stopped on the cluster ({job.id})", hint)
    if job.exit_code in _NOT_ITS_OWN:
        return lost(f"its job was killed on its node ({job.id}, exit code {job.exit_code})")
    if job.status == "FAILED":
        hint = "Mend that on the cluster's nodes, then resume it."
        return ended("failed", "infra", f"its job failed on its node: {_named(job)}", hint)
    return lost(f"its job ended without a word ({_named(job)})")


def _named(job: Job) -> str:
    """A job and what Ray says of it, for a message."""
    return f"{job.id}: {job.message or job.status}"
