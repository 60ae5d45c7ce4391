"""For whom the home is opened during a call: the one place where a call gets its view of the home.

The guard (mcp_server/protocol/guard.py) sets it for every request, before anything is looked up.
Tools and resources take the home from `seen` alone; outside a request that fails. The rows that
the view holds are selected by engine/home/team/tables.py.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from engine.home.run_dir import Home
from engine.home.team.owners import May, Viewer
from mcp_server.access.keys import Key

_viewer: ContextVar[Viewer | None] = ContextVar("honesmith-viewer")

# What each tool does with the things that a call names. A tool that is missing here may name only
# what the caller owns.
MAY: Mapping[str, May] = {
    "get_status": "read",
    "push_env": "use",
    "dry_run": "use",
    "estimate_cost": "use",
    "submit_train": "use",
    "wait_run": "read",
    "read_logs": "read",
    "read_rollouts": "read",
    "evaluate": "use",
    "compare_runs": "read",
    "diagnose": "read",
    "curate": "use",
    "deploy": "use",
    "chat": "use",
    "cancel_run": "change",
    "read_playbook": "read",
}


def may_of(tool: str, arguments: Mapping[str, Any]) -> May:
    """Return what a call of `tool` with these arguments does with the things that it names."""
    resumes = tool == "submit_train" and bool(arguments.get("resume"))
    stops = tool == "deploy" and arguments.get("action") == "stop"
    return "change" if resumes or stops else MAY.get(tool, "change")


@contextlib.contextmanager
def viewing(key: Key, may: May = "read") -> Iterator[None]:
    """Context manager: while the block runs, `seen` shows the home as `key` sees it. Threads that
    the block starts through anyio see the same."""
    token = _viewer.set(key.viewer(may))
    try:
        yield
    finally:
        _viewer.reset(token)


def seen(home: Home) -> Home:
    """Return the home as the caller of this request sees it. Raises LookupError outside a request,
    which is a bug: nothing is shown to a caller who is not known."""
    return replace(home, viewer=_viewer.get())
