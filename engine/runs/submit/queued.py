"""The reply to whoever queued a run: where it stands, what it will take, what differs."""

from collections.abc import Mapping
from typing import Any

from engine.core.files import read_json
from engine.core.reply import Reply
from engine.cost import estimate
from engine.home.progress import write_status
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.processes import launcher


def start_and_reply(home: Home, row: RunRow, warnings: list[str]) -> Reply:
    """Start what can start, and say how the run that was just queued stands then."""
    with Store(home) as store:
        write_status(home.run(row.run_id), row)
        launcher.reap(home)
        return reply_of(home, store.get_run(row.run_id), warnings)


def reply_of(home: Home, row: RunRow, warnings: list[str]) -> Reply:
    """The reply about a run that was queued, now or by an earlier call."""
    run = home.run(row.run_id)
    config = read_json(run.config)
    with Store(home) as store:
        position = store.queue_position(row.run_id)
    where = f"queued at position {position}" if row.state == "queued" else row.state
    if row.state == "queued" and (missing := launcher.missing_secrets(run)):
        warnings = [*warnings, f"it waits for a server that has the secrets {', '.join(missing)}"]
    return {
        "run_id": row.run_id,
        "state": row.state,
        "queue_position": position,
        "estimate": estimate.shown(config.get("estimate") or {}),
        "settings_changed_from_parent": _changed_from_parent(home, config),
        "metrics_uri": f"run://{row.run_id}/metrics",
        "summary": f"{row.run_id} is {where}.",
        "next": [{"tool": "wait_run", "arguments": {"run_id": row.run_id}}],
        "warnings": warnings,
    }


def _changed_from_parent(home: Home, config: Mapping[str, Any]) -> Reply:
    """Settings, model, env and algorithm that differ from the parent: {"name": [its, ours]}."""
    if not config.get("parent"):
        return {}
    try:
        parent = read_json(home.run(config["parent"]).config)
    except (OSError, ValueError):
        return {}
    ours, its = dict(config["settings"]), dict(parent.get("settings") or {})
    for name in ("algorithm", "model", "env_id"):
        ours[name], its[name] = config.get(name), parent.get(name)
    names = [name for name in {**its, **ours} if its.get(name) != ours.get(name)]
    return {name: [its.get(name), ours.get(name)] for name in names}
