"""For whom the home is opened during a call: the one place where a call gets its view of the home.

The guard (mcp_server/protocol/guard.py) sets it for every request, before anything is looked up.
Tools and resources take the home from `caller_view` alone; outside a request that fails. The rows
that the view holds are selected by engine/home/team/tables.py.
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
ACCESS_BY_TOOL: Mapping[str, May] = {
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


def access_of_call(tool: str, arguments: Mapping[str, Any]) -> May:
    """Return what a call of `tool` with these arguments does with the runs, environments and
    deployments that it names: "read", "use" or "change", which only their owner may do."""
    resumes_run = tool == "submit_train" and bool(arguments.get("resume"))
    stops_deployment = tool == "deploy" and arguments.get("action") == "stop"
    if resumes_run or stops_deployment:
        return "change"
    return ACCESS_BY_TOOL.get(tool, "change")  # an unlisted tool gets the strictest check


@contextlib.contextmanager
def viewing(key: Key, may: May = "read") -> Iterator[None]:
    """Context manager: while the block runs, `caller_view` returns the home as `key` sees it, also
    in threads that the block starts through anyio.

    `may` is what the block does with the things that it names: read, use or change.
    """
    token = _viewer.set(key.viewer(may))
    try:
        yield
    finally:
        _viewer.reset(token)


def caller_view(home: Home) -> Home:
    """Return the home as the caller of this request sees it. Raises LookupError outside a request,
    which is a bug: nothing is shown to a caller who is not known."""
    return replace(home, viewer=_viewer.get())
