"""The end of a run whose job wrote none: as engine/executors/jobs.py writes ends."""

from engine.core.files import JsonObject

AS_TOLD = "it ended as it was told to"


def ended(state: str, kind: str, reason: str, hint: str = "") -> JsonObject:
    """An end, with the cause that the cluster names."""
    return {
        "state": state,
        "reason_kind": kind,
        "reason": reason,
        "hint": hint,
        "verdict": "unknown",
    }


def lost(reason: str) -> JsonObject:
    """The end of a run that could go on from its last checkpoint."""
    return {**ended("failed", "infra", reason), "is_lost": True}
