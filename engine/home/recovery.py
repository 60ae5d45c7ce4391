"""Builds the rows of a lost or damaged database again, from the folders of the home.

A run's folder holds nearly everything that its row held: the request (config.json), how the run
ended (exit.json), or the last state of the row (STATUS.md). A deployment's folder holds how it was
started, what it serves, and whether its process lives. Three things are lost, because only the
database had them: request ids, the cap of a resumed run, and the accuracy of earlier estimates.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, is_locked, read_lines, read_object, read_tail
from engine.core.hints import Hint
from engine.home.rows import LOCAL, STATES, TERMINAL
from engine.home.run_dir import DeployDir, Home, RunDir

if TYPE_CHECKING:
    from engine.records.run_config import RunConfig

_log = logging.getLogger("honesmith")
_ID = re.compile(r"(.+)-(\d+)")  # name and number of a run: "sums-grpo-3"
OWNERS = "owners.json"  # of an environment version: the ids of the keys that pushed it
_LOG = re.compile(r"attempt_(\d+)\.log")
_STATUS_BYTES = 100_000  # more than any STATUS.md has
# Columns about the end of a run that STATUS.md holds too.
_END_COLUMNS = ("state", "reason_kind", "reason", "hint", "verdict")
_MOST_BYTES = 100_000_000  # the most bytes of events that are read; no run writes more
# A row of the database: column name -> value. The schema is in engine/home/schema.
Columns = dict[str, Any]
# Events after which no trainer works for the run until its next attempt starts.
_END_EVENTS = ("trainer_exited", "interrupted", "supervisor_left")


def run_rows(home: Home) -> list[Columns]:
    """Build the database row of every run in the home from the run's folder, the oldest first.

    A run whose config.json cannot be read is left out, with a warning in the log.
    """
    keyed_rows: list[tuple[tuple[float, int, int], Columns]] = []  # (key for sorting, row)
    for name, number, run in _known_runs(home):
        try:
            config = run.read_config()
        except (OSError, UserError) as error:
            _log.warning("%s was left out: %s", run.id, error)
            continue
        row = {"name": name, "number": number} | _run_row(run, config)
        # The runs of a plan may have been created at equal times; they are sorted by their steps.
        step = config.plan.step if config.plan else 0
        creation_key = (row["created"], step, number)
        keyed_rows.append((creation_key, row))
    keyed_rows.sort(key=lambda key_and_row: key_and_row[0])  # rows have no order of their own
    return [row for _creation_key, row in keyed_rows]


def damaged_configs(home: Home) -> list[str]:
    """Return a sentence for every run whose config.json cannot be read: the path and the fault.

    Such a run keeps its row, but cannot be continued. If the database were lost, the row could not
    be built again. Runs of which no client knows are left out.
    """
    faults = []
    for _, _, run in _known_runs(home):
        try:
            run.read_config()
        except FileNotFoundError:
            faults.append(f"{run.config} is gone")
        except OSError as error:
            faults.append(f"{run.config} cannot be read: {error.strerror}")
        except UserError as error:
            faults.append(error.message)
    return faults


def _known_runs(home: Home) -> Iterator[tuple[str, int, RunDir]]:
    """Yield (name, number, folder) of every run whose id a client may know.

    The name of the run sums-grpo-3 is "sums-grpo", its number 3. Only runs with a STATUS.md are
    yielded: a submit writes this file before it replies, so a folder without one was left by a
    submit that died before anyone knew of the run.
    """
    folders = sorted(home.runs.iterdir()) if home.runs.is_dir() else []
    for path in folders:
        match = _ID.fullmatch(path.name)
        run = home.run(path.name)
        if match is not None and run.status_md.is_file():
            yield match[1], int(match[2]), run


def env_rows(home: Home) -> list[Columns]:
    """Build the database row of every stored environment version from its folder, the oldest push
    first.

    A folder that is not a complete version is left out, with a warning in the log.
    """
    rows = []
    for path in sorted(home.envs.glob("*/*/env.json")):
        folder = path.parent
        name, hash12 = folder.parent.name, folder.name
        if hash12.startswith("."):  # a push that did not finish leaves such a folder
            continue
        row = env_row(folder)
        if row is None:  # the env.json is damaged
            _log.warning("%s is no whole environment version and was left out", folder)
            continue
        pushed = path.stat().st_mtime
        identity = {"env_id": f"{name}@{hash12}", "name": name, "hash": hash12}
        times = {"created": pushed, "pushed": pushed}
        rows.append(identity | row | times | {"owners": env_owners(folder)})
    return sorted(rows, key=lambda row: row["pushed"])


def env_owners(folder: Path) -> list[str]:
    """Return the ids of the owners of the environment version in `folder`.

    A version without the file that names them belongs to the local user, whose id is "".
    """
    owners = read_object(folder / OWNERS).get("owners")
    return [str(owner) for owner in owners] if isinstance(owners, list) and owners else [""]


def env_row(folder: Path) -> Columns | None:
    """Read the columns `kind` and `info` of an environment version's row from its `folder`.

    Returns None if the env.json in it is missing or damaged.
    """
    # Imported late: these modules load pydantic, and a supervisor must not load it.
    from engine.records.env_version import EnvVersion  # noqa: PLC0415
    from engine.records.record import DamagedRecord  # noqa: PLC0415

    try:
        version = EnvVersion.read(folder / "env.json")
    except (OSError, DamagedRecord):
        return None
    audit = read_object(folder / "audit.json")
    info = {
        "rows": version.rows,
        "scored": version.scored,
        "tools": len(version.tools),
        "audit": str(audit.get("verdict") or ""),
        "headline": str(audit.get("headline") or ""),
    }
    return {"kind": version.kind, "info": info}


def deployment_rows(home: Home) -> list[Columns]:
    """Build the database row of every deployment from its folder, the oldest first.

    Deployments that have ended are included. A folder whose config.json names no base model is left
    out.
    """
    rows = []
    for path in home.deployments.glob("*/config.json"):
        row = _deployment_row(home.deployment(path.parent.name))
        if row is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: (row["created"], row["deployment_id"]))


def _deployment_row(folder: DeployDir) -> Columns | None:
    """Build the database row of one deployment; None if its config.json names no base model.

    If the process of the deployment lives, the state is "starting" or "ready", and the adapters are
    those that it serves. Otherwise the state is "failed" or "stopped", and there are no adapters.
    """
    config, ready = read_object(folder.config), read_object(folder.ready)  # {} if missing
    if not config.get("base_path"):
        return None
    base = str(config.get("base_name") or config["base_path"])
    is_alive = is_locked(folder.alive)
    adapters = _known_adapters(config, ready, base)
    created = folder.config.stat().st_mtime
    row: Columns = {
        "deployment_id": folder.id,
        "base_name": base,
        "base_path": str(config["base_path"]),
        "state": "ready" if ready else "starting",
        "url": str(ready.get("url") or ""),
        "adapters": adapters,
        "serve_base": not adapters,  # without adapters it was started to serve the base model
        "memory_bytes": _whole_number(config.get("memory_bytes")),
        "created": created,
        "owner": str(config.get("owner") or ""),
    }
    return row if is_alive else row | _ended_deployment_columns(folder)


def _known_adapters(config: JsonObject, ready: JsonObject, base: str) -> list[dict[str, str]]:
    """Return the adapters of a deployment: {"name", "path"} each.

    Args:
        config: the deployment's config.json.
        ready: the content of its ready.json; {} if it is not ready yet.
        base: the name of its base model.
    """
    served_models = ready.get("models")
    if isinstance(served_models, list):  # ready.json does not hold the paths
        return [{"name": str(name), "path": ""} for name in served_models if name != base]
    return configured_adapters(config)  # until it is ready, only the configured ones are known


def _ended_deployment_columns(folder: DeployDir) -> Columns:
    """Return those columns of a deployment's database row that differ if its process has ended:
    state, adapters, message and end."""
    failure = str(read_object(folder.failed).get("message") or "")
    return {
        "state": "failed" if failure else "stopped",
        "adapters": [],
        "serve_base": False,
        "message": failure or "the process ended",
        "ended": _last_written(folder),
    }


def configured_adapters(config: JsonObject) -> list[dict[str, str]]:
    """Return the adapters that a deployment's config.json names: {"name", "path"} each.

    Entries without a name are left out.
    """
    adapters = config.get("adapters")
    items = adapters if isinstance(adapters, list) else []
    entries = [item for item in items if isinstance(item, dict)]
    return [
        {"name": str(entry["name"]), "path": str(entry.get("path") or "")}
        for entry in entries
        if entry.get("name")
    ]


def _last_written(folder: DeployDir) -> float:
    """Return when the deployment's log or config was last written, in unix seconds.

    Returns 0 if neither file exists.
    """
    existing_files = [path for path in (folder.log, folder.config) if path.exists()]
    return max((path.stat().st_mtime for path in existing_files), default=0.0)


def _run_row(run: RunDir, config: "RunConfig") -> Columns:
    """Build the database row of one run.

    The columns about the request come from its config. Its state comes from the first of these
    sources that holds it:

    1. exit.json, if it is about the latest attempt;
    2. STATUS.md, if it says that the run has ended, was to stop or was queued;
    3. started.json: where it exists, the run had started and is now "interrupted";
    4. otherwise the run is "queued".
    """
    created = run.config.stat().st_mtime
    start_record = read_object(run.started_record)
    status = _read_status(run)
    earlier_hours = _earlier_hours(run)
    # Each of these files may be missing or old, so the highest number is the latest attempt.
    attempt = max(
        [1, _whole_number(start_record.get("attempt")), status.attempt, *_logged_attempts(run)]
    )
    row: Columns = {
        "run_id": run.id,
        "created": created,
        "queued": created,
        "attempt": attempt,
        **_config_columns(run, config),
        "spent_hours": max(
            status.spent_hours,
            _hours_in_events(run),
            sum(earlier_hours.values()),
        ),
        "state": "queued",
    }
    if start_record:
        # `_end_columns` below replaces this state if the files say how the run ended.
        row |= {"started": float(start_record.get("time") or created), "state": "interrupted"}
    return row | _end_columns(run, status, attempt)


def _config_columns(run: RunDir, config: "RunConfig") -> Columns:
    """Return the columns of a run's row that its config.json holds.

    `note`, `expect` and `parent` are "" unless the run is a training run.
    """
    train_config = config if config.kind == "train" else None
    earlier_hours = _earlier_hours(run)
    return {
        "kind": config.kind,
        "owner": config.owner,
        "project": config.project,
        "priority": config.priority,
        "algorithm": config.algorithm,
        "env_id": config.env_id,
        "model": ", ".join(config.model_refs),
        "note": train_config.note if train_config else "",
        "expect": train_config.expect if train_config else "",
        "parent": train_config.parent if train_config else "",
        "max_gpu_hours": config.max_gpu_hours or 0.0,
        "estimated_hours": _estimated_hours(config),
        # Some of these runs may be done already. They are removed before the run can start.
        "waits_for": ",".join(config.awaited_ids),
        "plan": config.plan.plan_id if config.plan else "",
        "gpus": _device_count(config),
        "compute": _compute_of(run, config),
        "earlier_hours": json.dumps(earlier_hours) if earlier_hours else "",
    }


def _compute_of(run: RunDir, config: "RunConfig") -> str:
    """Return where a run is to run, such as "ssh:box"; `LOCAL` unless it trains weights."""
    if config.kind != "train" or config.algorithm == "prompt":  # neither trains weights
        return LOCAL
    if run.far("launch").exists():  # another machine put the run here, so it runs here
        return LOCAL
    moved_to = read_object(run.far("place")).get("compute")  # it has left the place it was put at
    return str(moved_to or config.settings.compute)


def _earlier_hours(run: RunDir) -> dict[str, float]:
    """Return place -> hours of the places that a run has left; {} if it has left none, or if the
    record is damaged."""
    hours = read_object(run.far("place")).get("earlier_hours")
    if not isinstance(hours, dict):
        return {}
    is_sound = all(isinstance(value, int | float) for value in hours.values())
    return {str(place): float(value) for place, value in hours.items()} if is_sound else {}


def _device_count(config: "RunConfig") -> int:
    """Return how many devices a run is to have; 0 if it asks only models behind a URL."""
    if config.kind != "train" or config.algorithm == "prompt":
        return int(config.needs_device)
    if config.device == "cpu":  # one device, however many processes (`gpus`) share it
        return 1
    return config.settings.gpus


def _estimated_hours(config: "RunConfig") -> float:
    """Return the device hours that a run was expected to take; 0 if its config does not say."""
    if config.kind == "train" and config.algorithm != "prompt":
        return config.estimate.gpu_hours.likely
    return getattr(config, "estimated_hours", 0.0)  # a probe and a regrade have no estimate


@dataclass(frozen=True)
class _StatusFile:
    """The values in a run's STATUS.md, which show the run's row when the file was last written.

    A text that the file does not hold is "".
    """

    state: str
    attempt: int
    spent_hours: float
    verdict: str
    hint: str
    reason_kind: str
    reason: str


def _read_status(run: RunDir) -> _StatusFile:
    """Parse the run's STATUS.md.

    Values that are missing, or all values if there is no such file, get defaults: texts are "", the
    attempt is 1 and the hours are 0.
    """
    text = read_tail(run.status_md, _STATUS_BYTES)
    heading = re.match(r"# .*: (?P<state>\w+)\n", text)
    reason = re.search(r"^- reason \((?P<kind>\w*)\): (?P<text>.*)$", text, re.MULTILINE)

    def first_match(pattern: str) -> str:
        """Return the only group of the first match of `pattern` in the file; "" for no match."""
        match = re.search(pattern, text, re.MULTILINE)
        return match[1] if match else ""

    return _StatusFile(
        state=heading["state"] if heading and heading["state"] in STATES else "",
        attempt=int(first_match(r"^- attempt (\d+),") or 1),
        spent_hours=float(first_match(r"^- device hours spent: (\d+\.?\d*)$") or 0),
        verdict=first_match(r"^- verdict: (\w+)$"),
        hint=first_match(r"^- next: (.*)$"),
        reason_kind=reason["kind"] if reason else "",
        reason=reason["text"] if reason else "",
    )


def _end_columns(run: RunDir, status: _StatusFile, attempt: int) -> Columns:
    """Return the columns of a run's row that exit.json or STATUS.md holds about its end.

    They say how the run ended, why it was to stop, or that it was queued. Returns {} if neither
    file says so.

    Args:
        run: the folder of the run.
        status: the values of its STATUS.md.
        attempt: the number of the run's latest attempt; the end of an earlier one does not count.
    """
    exit_record = read_object(run.exit_record)
    if exit_record.get("state") in TERMINAL and exit_record.get("attempt") == attempt:
        moved_to = read_object(run.far("place")).get("compute")
        if moved_to and exit_record.get("moves_to") == moved_to:  # its place failed, not the run
            return {"state": "interrupted"}
        return _exit_columns(run, exit_record)
    if status.state == "stopping" and status.attempt == attempt:
        # The reason to stop is kept, so that a run which was being cancelled is not continued.
        return _status_columns(status, "state", "reason_kind", "reason")
    if status.state == "queued":
        return _status_columns(status, *_END_COLUMNS)
    if status.state in TERMINAL:
        columns = _status_columns(status, *_END_COLUMNS)
        return columns | {"ended": run.status_md.stat().st_mtime}
    return {}


def _exit_columns(run: RunDir, exit_record: JsonObject) -> Columns:
    """Return the columns about a run's end, from the content of its exit.json."""
    return {
        "state": str(exit_record.get("state") or ""),
        "reason_kind": str(exit_record.get("reason_kind") or ""),
        "reason": str(exit_record.get("reason") or ""),
        "hint": Hint.from_json(exit_record.get("hint")).dump(),
        "verdict": str(exit_record.get("verdict") or ""),
        # If exit.json has no time, the time of the submit is used, when the config was written.
        "ended": float(exit_record.get("time") or run.config.stat().st_mtime),
    }


def _status_columns(status: _StatusFile, *names: str) -> Columns:
    """Return the columns `names` of a run's row with the values from STATUS.md."""
    return {name: getattr(status, name) for name in names}


def _logged_attempts(run: RunDir) -> list[int]:
    """Return the numbers of the attempts that have a log file."""
    matches = (_LOG.fullmatch(path.name) for path in run.logs.glob("attempt_*"))
    return [int(match[1]) for match in matches if match]


def _hours_in_events(run: RunDir) -> float:
    """Compute the device hours of all attempts from the times of the run's events.

    An attempt lasts from "attempt_started" to one of `_END_EVENTS`, or to its last event if it has
    no such end.
    """
    events, _ = read_lines(run.events, cursor=0, max_bytes=_MOST_BYTES)
    total_s = 0.0
    started_at = None  # when the present attempt began; None between attempts
    devices = 1  # how many devices the present attempt has
    last_at = 0.0  # the time of the last event
    for event in events:
        if not isinstance(event.get("time"), int | float):  # a damaged line
            continue
        event_at = float(event["time"])
        event_name = event.get("event")
        if event_name == "attempt_started":
            # This adds an attempt without an end event; it adds 0 if there is none.
            total_s += devices * _seconds_between(started_at, last_at)
            started_at = event_at
            # e.g. "cuda:0,cuda:1"; "" for a run on no device; None if missing: counts as one
            device = event.get("device")
            if device == "":
                devices = 0
            else:
                devices = 1 + str(device or "").count(",")
        elif event_name in _END_EVENTS:
            total_s += devices * _seconds_between(started_at, event_at)
            started_at = None
        last_at = event_at
    return (total_s + devices * _seconds_between(started_at, last_at)) / 3600


def _seconds_between(start: float | None, end: float) -> float:
    """Return the seconds from `start` to `end`; 0 if `start` is None, or if `end` is earlier
    because the clock was set back."""
    return max(0.0, end - start) if start is not None else 0.0


def _whole_number(value: Any) -> int:
    """Return `value` if it is a whole number, otherwise 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
