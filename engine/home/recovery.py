"""The rows of a home read back from its folders, for a database that is lost or damaged.

A run's folder says nearly all its row did: what was asked (config.json), how it ended (exit.json)
or what its row last was (STATUS.md); a deployment's what it was started with, what it answers to
and whether its process lives. What only the database knew is gone: request ids, a new cap given
with a resume, and what estimates had come to.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, is_locked, read_lines, read_object, read_tail
from engine.core.hints import Hint
from engine.home.rows import STATES, TERMINAL
from engine.home.run_dir import DeployDir, Home, RunDir

if TYPE_CHECKING:
    from engine.records.run_config import RunConfig

_log = logging.getLogger("honesmith")
_ID = re.compile(r"(.+)-(\d+)")
_LOG = re.compile(r"attempt_(\d+)\.log")
# The columns of a row by name; which there are is the database's schema.
Columns = dict[str, Any]
_ENDS = ("trainer_exited", "interrupted", "supervisor_left")


def run_rows(home: Home) -> list[Columns]:
    """A row for every run that was ever answered with, oldest first: column name to value.

    A folder without STATUS.md is what a submit left that died before it told anyone.
    """
    rows = []
    for name, number, run in _answered_runs(home):
        try:
            config = run.read_config()
        except (OSError, UserError) as error:
            _log.warning("%s was left out: %s", run.id, error)
            continue
        rows.append({"name": name, "number": number} | _row(run, config))
    return sorted(rows, key=lambda row: (row["created"], row["number"]))


def damaged_configs(home: Home) -> list[str]:
    """What is wrong with config.json of each run that has none which can be read, by path.

    Such a run keeps its row, but it cannot go on, and where the database is lost no row is made
    of it again.
    """
    faults = []
    for _, _, run in _answered_runs(home):
        try:
            run.read_config()
        except FileNotFoundError:
            faults.append(f"{run.config} is gone")
        except OSError as error:
            faults.append(f"{run.config} cannot be read: {error.strerror}")
        except UserError as error:
            faults.append(error.message)
    return faults


def _answered_runs(home: Home) -> Iterator[tuple[str, int, RunDir]]:
    """Name, number and folder of every run that was ever answered with."""
    for path in sorted(home.runs.iterdir()) if home.runs.is_dir() else ():
        match, run = _ID.fullmatch(path.name), home.run(path.name)
        if match is not None and run.status_md.is_file():
            yield match[1], int(match[2]), run


def env_rows(home: Home) -> list[Columns]:
    """A row for every stored environment version, the oldest push first."""
    rows = []
    for path in sorted(home.envs.glob("*/*/env.json")):
        folder = path.parent
        name, hash12 = folder.parent.name, folder.name
        if hash12.startswith("."):
            continue
        row = env_row(folder)
        if row is None:
            _log.warning("%s is no whole environment version and was left out", folder)
            continue
        pushed = path.stat().st_mtime
        named = {"env_id": f"{name}@{hash12}", "name": name, "hash": hash12}
        rows.append(named | row | {"created": pushed, "pushed": pushed})
    return sorted(rows, key=lambda row: row["pushed"])


def env_row(folder: Path) -> Columns | None:
    """What the database holds of the version in `folder`: its kind and `info`; None where its
    files are not those of a version."""
    facts, audit = read_object(folder / "env.json"), read_object(folder / "audit.json")
    kind, rows, tools = facts.get("kind"), facts.get("rows"), facts.get("tools")
    if not (isinstance(kind, str) and isinstance(rows, dict) and isinstance(tools, list)):
        return None
    info = {
        "rows": rows,
        "scored": bool(facts.get("scored")),
        "tools": len(tools),
        "audit": str(audit.get("verdict") or ""),
        "headline": str(audit.get("headline") or ""),
    }
    return {"kind": kind, "info": info}


def deployment_rows(home: Home) -> list[Columns]:
    """A row for every deployment that was started, the oldest first.

    One that lives goes on being served: all it answers to counts as asked for.
    """
    folders = [home.deployment(path.parent.name) for path in home.deployments.glob("*/config.json")]
    return sorted(
        (row for folder in folders if (row := _deployment(folder))),
        key=lambda row: (row["created"], row["deployment_id"]),
    )


def _deployment(folder: DeployDir) -> Columns | None:
    """The row of one deployment, None where its config.json names no base model."""
    config, ready = read_object(folder.config), read_object(folder.ready)
    if not config.get("base_path"):
        return None
    base, alive = str(config.get("base_name") or config["base_path"]), is_locked(folder.alive)
    models = ready.get("models")
    adapters = started_with(config)  # all that is known of one that is not ready yet
    if isinstance(models, list):
        adapters = [{"name": str(name), "path": ""} for name in models if name != base]
    created = folder.config.stat().st_mtime
    row: Columns = {
        "deployment_id": folder.id,
        "base_name": base,
        "base_path": str(config["base_path"]),
        "state": "starting" if not ready else "ready",
        "url": str(ready.get("url") or ""),
        "adapters": adapters,
        "serve_base": not adapters,
        "memory_bytes": _number(config.get("memory_bytes")),
        "created": created,
    }
    if alive:
        return row
    failed = str(read_object(folder.failed).get("message") or "")
    over = {"state": "failed" if failed else "stopped", "adapters": [], "serve_base": False}
    return row | over | {"message": failed or "the process ended", "ended": _last_word(folder)}


def started_with(config: JsonObject) -> list[dict[str, str]]:
    """The adapters a deployment's config.json starts it with: name and path of each."""
    adapters = config.get("adapters")
    items = adapters if isinstance(adapters, list) else []
    named = [item for item in items if isinstance(item, dict)]
    return [
        {"name": str(item["name"]), "path": str(item.get("path") or "")}
        for item in named
        if item.get("name")
    ]


def _last_word(folder: DeployDir) -> float:
    files = (folder.log, folder.config)
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def _row(run: RunDir, config: "RunConfig") -> Columns:
    """The row of one run: what its files say of its start, its end and its hours."""
    created = run.config.stat().st_mtime
    trained = config if config.kind == "train" else None
    started, status = read_object(run.started_record), _status(run)
    attempt = max([1, _number(started.get("attempt")), status.attempt, *_attempts(run)])
    row: Columns = {
        "run_id": run.id,
        "kind": config.kind,
        "algorithm": config.algorithm,
        "created": created,
        "queued": created,
        "attempt": attempt,
        "env_id": config.env_id,
        "model": ", ".join(config.model_refs),
        "note": trained.note if trained else "",
        "expect": trained.expect if trained else "",
        "parent": trained.parent if trained else "",
        "max_gpu_hours": config.max_gpu_hours or 0.0,
        "estimated_hours": trained.estimate.gpu_hours.likely if trained else 0.0,
        "spent_hours": max(status.spent_hours, _spent_hours(run)),
        "state": "queued",
    }
    if started:
        row |= {"started": float(started.get("time") or created), "state": "interrupted"}
    end = read_object(run.exit_record)
    if end.get("state") in TERMINAL and end.get("attempt") == attempt:
        row |= {key: str(end.get(key) or "") for key in ("state", "reason_kind", "reason")}
        row["hint"] = Hint.from_json(end.get("hint")).dump()
        row |= {
            "verdict": str(end.get("verdict") or ""),
            "ended": float(end.get("time") or created),
        }
    elif status.state == "stopping" and status.attempt == attempt:
        # Why it was to stop decides what becomes of it: a cancelled run is not continued.
        row |= _columns(status, "state", "reason_kind", "reason")
    elif status.state in TERMINAL or status.state == "queued":
        row |= _columns(status, "state", "reason_kind", "reason", "hint", "verdict")
        if status.state in TERMINAL:
            row["ended"] = run.status_md.stat().st_mtime
    return row


@dataclass(frozen=True)
class _StatusFile:
    """What STATUS.md says the row was when it was last written; "" for what it does not say."""

    state: str
    attempt: int
    spent_hours: float
    verdict: str
    hint: str
    reason_kind: str
    reason: str


def _status(run: RunDir) -> _StatusFile:
    """What STATUS.md says; defaults where it is missing."""
    text = read_tail(run.status_md, 100_000)
    first = re.match(r"# .*: (\w+)\n", text)
    reason = re.search(r"^- reason \((\w*)\): (.*)$", text, re.MULTILINE)

    def first_match(pattern: str) -> str:
        match = re.search(pattern, text, re.MULTILINE)
        return match[1] if match else ""

    return _StatusFile(
        state=first[1] if first and first[1] in STATES else "",
        attempt=int(first_match(r"^- attempt (\d+),") or 1),
        spent_hours=float(first_match(r"^- device hours spent: (\d+\.?\d*)$") or 0),
        verdict=first_match(r"^- verdict: (\w+)$"),
        hint=first_match(r"^- next: (.*)$"),
        reason_kind=reason[1] if reason else "",
        reason=reason[2] if reason else "",
    )


def _columns(status: _StatusFile, *names: str) -> Columns:
    return {name: getattr(status, name) for name in names}


def _attempts(run: RunDir) -> list[int]:
    return [int(m[1]) for path in run.logs.glob("attempt_*") if (m := _LOG.fullmatch(path.name))]


def _spent_hours(run: RunDir) -> float:
    """Device hours of all attempts, from the times of their first and last events."""
    total, since, last = 0.0, None, 0.0
    for event in read_lines(run.events, 0, 100_000_000)[0]:
        if not isinstance(event.get("time"), int | float):
            continue
        now, name = float(event["time"]), event.get("event")
        if name == "attempt_started":
            total += max(0.0, last - since) if since is not None else 0.0
            since = now
        elif name in _ENDS and since is not None:
            total, since = total + max(0.0, now - since), None
        last = now
    return (total + (max(0.0, last - since) if since is not None else 0.0)) / 3600


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
