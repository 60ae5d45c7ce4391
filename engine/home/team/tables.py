"""The SQL that selects what a viewer may see, and the queued runs that could start.

Every row that a caller can name is read through these selections (engine/home), so what
belongs to somebody else is not there: no list, no prefix and no error knows of it.
"""

from collections.abc import Mapping
from typing import Literal

from engine.home.team.owners import EVERYONE, Viewer

# The runs that could start now, in three queues: for a device here, for none, for another machine.
# Each has an index of its own, which is named because SQLite does not choose it by itself.
Queue = Literal["here", "without_device", "elsewhere"]
READY = "WHERE state = 'queued' AND waits_for = '' AND"
QUEUES: Mapping[Queue, str] = {
    "here": f"INDEXED BY queued_here {READY} gpus > 0 AND compute = 'local'",
    "without_device": f"INDEXED BY queued_without_device {READY} gpus = 0",
    "elsewhere": f"INDEXED BY queued_elsewhere {READY} compute != 'local' AND compute = ?",
}
# What a call does with something -> what it must be shared for.
_SUFFICIENT = {"read": "'read', 'use'", "use": "'use'"}
# One version of an environment for each of its owners.
ENVS = (
    "(SELECT envs.rowid AS version, envs.env_id, name, hash, kind, created, env_owners.pushed, "
    "info, owner FROM envs JOIN env_owners ON env_owners.env_id = envs.env_id) AS owned"
)


def seen_runs(viewer: Viewer | None) -> tuple[str, tuple[str, ...]]:
    """Return (SQL, values) to read the runs that `viewer` sees: what stands after FROM, and the
    values of its question marks. None sees all."""
    if viewer is None or viewer.sees_all:
        return "runs", ()
    shared = _shared(viewer, "run")
    condition = "owner = ?"
    values = (viewer.owner,)
    if shared:
        condition += f" OR run_id IN ({shared}) OR (plan != '' AND plan IN ({shared}))"
        values += (viewer.owner, viewer.owner)
    return f"(SELECT * FROM runs WHERE {condition}) AS runs", values


def seen_deployments(viewer: Viewer | None) -> tuple[str, tuple[str, ...]]:
    """Return (SQL, values) to read the deployments that `viewer` sees: what stands after FROM, and
    the values of its question marks. None sees all."""
    if viewer is None or viewer.sees_all:
        return "deployments", ()
    shared = _shared(viewer, "deployment")
    if not shared:
        return "(SELECT rowid, * FROM deployments WHERE owner = ?)", (viewer.owner,)
    condition = f"owner = ? OR deployment_id IN ({shared})"
    return f"(SELECT rowid, * FROM deployments WHERE {condition})", (viewer.owner, viewer.owner)


def seen_envs(viewer: Viewer | None) -> tuple[str, tuple[str, ...]]:
    """Return (SQL, values) to read the versions of environments that `viewer` sees, one row for
    each owner: what stands after FROM, and the values of its question marks. None sees all."""
    if viewer is None or viewer.sees_all:
        return ENVS, ()
    condition = "owner = ?"
    values = (viewer.owner,)
    if viewer.may in _SUFFICIENT:
        condition += (
            " OR EXISTS (SELECT 1 FROM shares WHERE shares.kind = 'env'"
            " AND shares.owner = owned.owner AND shares.name IN (owned.name, owned.env_id)"
            f" AND grantee IN (?, '{EVERYONE}') AND may IN ({_SUFFICIENT[viewer.may]}))"
        )
        values += (viewer.owner,)
    return f"(SELECT * FROM {ENVS} WHERE {condition})", values


def _shared(viewer: Viewer, kind: str) -> str:
    """Return the SELECT of the names of what is shared with `viewer` for what its call does.

    `kind` is "run" or "deployment". The value of its one question mark is the viewer's id. Returns
    "" if sharing does not suffice, because the call changes something.
    """
    if viewer.may not in _SUFFICIENT:  # only the owner may change something
        return ""
    return (
        f"SELECT name FROM shares WHERE kind = '{kind}' AND grantee IN (?, '{EVERYONE}') "
        f"AND may IN ({_SUFFICIENT[viewer.may]})"
    )
