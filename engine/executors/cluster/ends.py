"""The end of a run whose job wrote none: as engine/executors/jobs.py writes ends."""

from engine.core.files import JsonObject

AS_TOLD = "it ended as it was told to"


def end_record(state: str, kind: str, reason: str, hint: str = "") -> JsonObject:
    """Return the record of a run's end, for a run whose job wrote none.

    Args:
        state: "failed" or "cancelled".
        kind: the kind of failure, such as "infra" or "oom".
        reason: why it ended, as the cluster says.
        hint: what a user can do; "" for nothing.
    """
    return {
        "state": state,
        "reason_kind": kind,
        "reason": reason,
        "hint": hint,
        "verdict": "unknown",
    }


def lost_end(reason: str) -> JsonObject:
    """Return the record of the end of a run that the cluster has taken away. "is_lost" says that it
    can go on from its last checkpoint, so that it is started again."""
    return {**end_record("failed", "infra", reason), "is_lost": True}
