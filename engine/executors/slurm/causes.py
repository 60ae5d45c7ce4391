"""How a job that wrote no last word has ended, and why one waits, from what Slurm says of it."""

from engine.core.files import JsonObject
from engine.executors.cluster.ends import AS_TOLD, end_record, lost_end
from engine.executors.slurm.commands import Job

# State of a job that Slurm ended, though the run could go on elsewhere -> why, in words.
_TAKEN = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "PREEMPTED": "Slurm gave its node to another job",
    "TIMEOUT": "its job reached its time limit",
    "DEADLINE": "its job reached its deadline",
    "REVOKED": "its job was moved to another cluster",
    "LAUNCH_FAILED": "Slurm could not start it on its node",
    "RECONFIG_FAIL": "its node could not be made ready",
}
# Reason of a job that waits and will not start by itself -> what to do.
_STUCK = {
    "PartitionTimeLimit": "lower time_hours of the host to what the partition allows",
    "PartitionNodeLimit": "ask for fewer devices, or name another partition",
    "PartitionDown": "name another partition",
    "PartitionInactive": "name another partition",
    "JobHeldUser": "scontrol release lets it go",
    "JobHeldAdmin": "ask who runs the cluster",
    "launch failed requeued held": "scontrol release lets it go",
    "QOSMaxWallDurationPerJobLimit": "lower time_hours of the host to what the QOS allows",
    "AssocMaxWallDurationPerJobLimit": "lower time_hours of the host to what the account allows",
    "QOSNotAllowed": "name another qos",
    "InvalidAccount": "name another account",
    "InvalidQOS": "name another qos",
    "BadConstraints": "no node has what is asked for",
    "DependencyNeverSatisfied": "cancel it",
}


def why_waiting(job: Job) -> str:
    """Say in one line why a job waits: Slurm's reason, what to do about it, and when it may start.
    Returns "" as long as Slurm has not looked at it."""
    reason = job.reason
    if not reason and job.state != "PENDING":  # such as CONFIGURING, which says enough
        reason = job.state.lower()
    if not reason:
        return ""
    text = f"Slurm: {reason}"
    advice = _STUCK.get(reason.strip("()"), "")
    if advice:
        text += f" ({advice})"
    return f"{text}; expected to start at {job.start}" if job.start else text


def end_of(job: Job | None, *, is_asked: bool = False, is_taken: bool = False) -> JsonObject:
    """Return how a run ended whose job has not written that itself, from what Slurm says of the
    job. The record has "is_lost" if the run can go on from its last checkpoint.

    Args:
        job: the job as Slurm shows it; None if Slurm does not know it any more.
        is_asked: whether a user had told the run to end.
        is_taken: whether Slurm told the job to end, and it did.
    """
    if is_asked:
        return end_record("cancelled", "cancelled", AS_TOLD)
    if job is None:
        return lost_end("Slurm does not know its job any more")
    if job.state in _TAKEN:
        return lost_end(f"{_TAKEN[job.state]} ({_named(job)})")
    if job.state == "OUT_OF_MEMORY":
        hint = "Give its jobs more memory (memory_gb of the host), or lower batch and lengths."
        return end_record(
            "failed", "oom", f"its node ended it for its memory ({_named(job)})", hint
        )
    if job.state == "CANCELLED":
        hint = "Resume it when it is to go on."
        return end_record(
            "failed", "killed", f"its job was cancelled on the cluster ({_named(job)})", hint
        )
    if is_taken:
        return lost_end(f"Slurm ended its job, at its limit or for another one ({_named(job)})")
    return lost_end(f"its job ended without a word ({_named(job)})")


def _named(job: Job) -> str:
    """Return a job's id, state and reason as one text for a message."""
    text = f"job {job.id}: {job.state}"
    return f"{text}, {job.reason}" if job.reason else text
