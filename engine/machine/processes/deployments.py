"""Deployments (processes that serve models): which of them live, requests to them, stopping them.

A deployment is alive as long as its process holds the lock file `alive.lock`, which it inherits
when it is started. This module imports nothing heavy, because the supervisor uses it to stop idle
deployments when a run needs their memory.
"""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.core.files import is_locked, read_json, read_object
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.recovery import configured_adapters
from engine.home.rows import HOLDS_DEVICE, LOCAL, DeploymentRow, shown_owner
from engine.home.run_dir import DeployDir, Home, RunDir
from engine.home.store import Store

if TYPE_CHECKING:
    from engine.core.hardware import Device

LIVING = ("starting", "ready")
_HEADROOM_FACTOR = 1.1  # this many times a run's estimated memory must be free when it starts
STOP_S = 5.0  # seconds that a server may take to end by itself

# JSON objects of a deployment: its config, and what its OpenAI-compatible server takes and answers.
Json = dict[str, Any]


@dataclass(frozen=True)
class Asker:
    """Who starts deployments: an access key.

    Attributes:
        name: the name of the key; "" for nobody in particular.
        max_living: how many of its deployments may live at once; 0 for no limit.
    """

    name: str = ""
    max_living: int = 0


ANYBODY = Asker()


class Unreachable(Exception):
    """A deployment's process did not answer, or not in time."""


def is_alive(folder: DeployDir) -> bool:
    """Return whether the process of the deployment lives."""
    return is_locked(folder.alive)


def living(home: Home) -> list[DeploymentRow]:
    """List the deployments whose process lives, newest first.

    If a deployment is stored as living but its process has ended, its end is recorded here.
    """
    with Store(home) as store:
        rows = []
        for row in store.list_deployments(states=LIVING):
            if is_alive(home.deployment(row.deployment_id)):
                rows.append(row)
            else:
                _record_end(home, store, row)
        return rows


def _record_end(home: Home, store: Store, row: DeploymentRow) -> None:
    """Record that a deployment's process has ended: as "failed" if it never became ready, else as
    "stopped"."""
    if row.state == "starting":
        state, message = "failed", failure_message(home.deployment(row.deployment_id))
    else:
        state, message = "stopped", "the process ended"
    store.update_deployment(row.deployment_id, state=state, ended=time.time(), message=message)


def served(home: Home, row: DeploymentRow) -> list[str]:
    """Return the model names that a deployment answers to, or will answer to once it is ready."""
    folder = home.deployment(row.deployment_id)
    try:
        return [str(name) for name in read_json(folder.ready)["models"]]
    except (OSError, ValueError, KeyError, TypeError):
        # It is not ready yet. The adapters it starts with are in its config, not yet in its row.
        adapters = [*row.adapters, *configured_adapters(config_of(folder))]
        unique_names = dict.fromkeys(adapter["name"] for adapter in adapters)
        return [row.base_name, *unique_names]


def config_of(folder: DeployDir) -> Json:
    """Return the settings that a deployment was started with; {} if they cannot be read."""
    return read_object(folder.config)


def check_quota(home: Home, asker: Asker) -> None:
    """Raise UserError QUOTA if `asker` already has as many living deployments as it may have.

    The caller must hold the lock for starting deployments, so that none is started meanwhile.
    """
    if not asker.max_living:  # 0: no limit
        return
    rows_of_asker = [
        row
        for row in living(home)
        if config_of(home.deployment(row.deployment_id)).get("asker") == asker.name
    ]
    if len(rows_of_asker) >= asker.max_living:
        raise _quota_error(asker, [row.deployment_id for row in rows_of_asker])


def _quota_error(asker: Asker, ids: list[str]) -> UserError:
    """Make the error QUOTA for a key (`asker`) that has as many deployments as it may have.

    `ids` are the ids of these deployments, the newest first.
    """
    oldest = ids[-1]
    return UserError(
        "QUOTA",
        f"the key {asker.name} has {len(ids)} deployments ({', '.join(ids)}) and may have "
        f"{asker.max_living}",
        hint=Hint(
            "Idle ones end by themselves. To end the oldest now, before calling again:",
            # The tool `deploy` takes the id of a deployment as `run_id`, too.
            Call("deploy", {"run_id": oldest, "action": "stop"}),
        ),
        retryable=True,
    )


def list_deployments(home: Home) -> list[Reply]:
    """Return the living deployments as JSON: id, state, address, models served, memory."""
    return [describe(home, row) for row in living(home)]


def describe(home: Home, row: DeploymentRow) -> Reply:
    """Return a deployment as JSON: id, state, address, models served, memory in GB (10^9), the host
    that serves it if that is another machine, and whose it is if it is not the viewer's own."""
    owner = shown_owner(home.viewer, row.owner)
    owner_field = {"owner": owner} if owner else {}
    compute = str(config_of(home.deployment(row.deployment_id)).get("compute", LOCAL))
    return {
        **owner_field,
        **({"compute": compute} if compute != LOCAL else {}),
        "deployment_id": row.deployment_id,
        "state": row.state,
        "base_url": row.url,
        "models": served(home, row),
        "memory_gb": round(row.memory_bytes / 1e9, 2),
    }


def failure_message(folder: DeployDir) -> str:
    """Return why a deployment did not become ready: the message that it left, or a general one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(folder.failed)["message"])
    return "the process ended before it was ready"


def request(
    folder: DeployDir, method: str, path: str, body: Json | None = None, timeout_s: float = 5.0
) -> tuple[int, Json]:
    """Send one request to a deployment, e.g. GET (`method`) /health (`path`).

    Returns the HTTP status and the JSON object in the reply ({} if it holds another value). `body`
    is sent as JSON; None sends no body. Raises Unreachable if the process is not ready, does not
    answer within `timeout_s` seconds, or answers something that is not JSON.
    """
    # Imported late: it costs the supervisor 30 ms, and most runs have no deployment to stop.
    import http.client  # noqa: PLC0415

    try:
        ready = read_json(folder.ready)
        # Models on another machine answer at `port`, and what looks after them here at another.
        port = int(ready.get("control_port", ready["port"]))
        headers = _headers(folder)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        with contextlib.closing(connection):
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, _object_in(response.read())
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error


def _headers(folder: DeployDir) -> dict[str, str]:
    """Return the headers of a request to a deployment, with its key. Raises OSError if it has no
    key."""
    key = folder.key.read_text().strip()
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _object_in(reply: bytes) -> Json:
    """Return the JSON object in a reply, {} for another value. Raises ValueError if it is not
    JSON."""
    value = json.loads(reply or b"{}")
    return value if isinstance(value, dict) else {}


def is_idle(folder: DeployDir) -> bool:
    """Return whether a deployment answers its health check and has no request in progress."""
    try:
        status, health = request(folder, "GET", "/health", timeout_s=2.0)
    except Unreachable:
        return False
    return status == 200 and not health.get("active", 0)


def stop(home: Home, row: DeploymentRow, why: str) -> None:
    """End a deployment and record `why`, a sentence for the user, in its row.

    The deployment is asked to stop first. If it still lives after STOP_S seconds, its process group
    gets SIGTERM, and after as long again SIGKILL.
    """
    folder = home.deployment(row.deployment_id)
    with contextlib.suppress(Unreachable):
        request(folder, "POST", "/admin/stop", body={})
    if not wait_until_ended(folder, STOP_S):
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            _signal(folder, signal_number)
            if wait_until_ended(folder, STOP_S):
                break
    with Store(home) as store:
        store.update_deployment(
            row.deployment_id, state="stopped", ended=time.time(), message=why, adapters=[]
        )


def make_room(home: Home, run: RunDir, device_id: str) -> list[str]:
    """Stop idle deployments, the newest first, until a run has enough free memory on its device.

    Only a deployment on a device of the run that lacks memory is stopped. `device_id` may name
    several devices, separated by commas; then each of them needs enough. Returns the ids of the
    deployments that were stopped. If the run has no estimate (an evaluation, a probe), half of the
    device's memory is assumed.
    """
    if not any(home.deployments.iterdir()):  # the usual case, answered without the database
        return []
    stopped_ids = []
    for row in living(home):
        devices = [_device_called(home, one_id) for one_id in device_id.split(",")]
        full_ids = [device.id for device in devices if not _has_room_on(run, device)]
        if not full_ids:
            break
        folder = home.deployment(row.deployment_id)
        config = config_of(folder)
        # A config that cannot be read names no device; its deployment may be on this one.
        is_here = config.get("compute", LOCAL) == LOCAL
        frees_memory = is_here and config.get("device", full_ids[0]) in full_ids
        if row.state == "ready" and frees_memory and is_idle(folder):
            stop(home, row, f"stopped to make room for {run.id}")
            stopped_ids.append(row.deployment_id)
    return stopped_ids


def _device_called(home: Home, device_id: str) -> "Device":
    """Return the device with this id, with the memory that is free on it now. An unknown id means
    the machine's default device."""
    # Imported late: it loads psutil, which only a run beside a deployment needs.
    from engine.core import hardware  # noqa: PLC0415

    machine = hardware.detect(home.root)
    devices_by_id = {device.id: device for device in machine.devices}
    return devices_by_id.get(device_id, machine.device)


def _has_room_on(run: RunDir, device: "Device") -> bool:
    """Return whether a device has the memory that a run may need, free and promised to nobody else.

    The run may need `_HEADROOM_FACTOR` times its expected peak, or half of the device's memory if
    it has no estimate.
    """
    config = run.find_config()  # None if damaged; the trainer will report that
    expected_bytes = config.peak_memory if config else None
    needed_bytes = expected_bytes or device.memory_total / 2
    return _HEADROOM_FACTOR * needed_bytes <= unclaimed_bytes(run.home, device, besides=run.id)


def unclaimed_bytes(home: Home, device: "Device", besides: str = "") -> int:
    """Return how many bytes of a device something new may use.

    On a GPU that is the smaller of two numbers: the memory that is free now, minus what starting
    runs and deployments are still going to load; and the total memory, minus everything that runs
    and deployments of this home were granted. The second matters because a sleeping sampler, whose
    memory is free now, will take it back. On a CPU it is the free memory.

    Args:
        home: the data folder of Honesmith.
        device: the device.
        besides: the id of a run whose own grant is ignored, because the memory is for that run.
    """
    if device.kind == "cpu":
        return device.memory_free
    loaded_bytes, loading_bytes = _granted_bytes(home, device, besides)
    free_after_loading = device.memory_free - loading_bytes
    not_granted = device.memory_total - loaded_bytes - loading_bytes
    return max(0, min(free_after_loading, not_granted))


def _granted_bytes(home: Home, device: "Device", besides: str) -> tuple[int, int]:
    """Return the bytes of a GPU that runs and deployments of this home were granted, except those
    of the run `besides`, as (by those that have loaded, by those that are still loading)."""
    with Store(home.whole) as store:
        runs = store.list_runs(limit=1000, states=HOLDS_DEVICE)
    loaded_bytes = loading_bytes = 0
    for run in runs:
        if device.id not in run.devices or run.run_id == besides:
            continue
        config = home.run(run.run_id).find_config()
        if config is None:  # missing or damaged
            continue
        if run.state == "preparing":
            loading_bytes += config.peak_memory or 0
        else:
            loaded_bytes += config.peak_memory or 0
    for row in living(home.whole):
        if config_of(home.deployment(row.deployment_id)).get("device") != device.id:
            continue
        if row.state == "starting":
            loading_bytes += row.memory_bytes
        else:
            loaded_bytes += row.memory_bytes
    return loaded_bytes, loading_bytes


def wait_until_ended(folder: DeployDir, wait_s: float = STOP_S) -> bool:
    """Wait up to `wait_s` seconds for a deployment's process to end; return whether it has."""
    deadline = time.monotonic() + wait_s
    while is_alive(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _signal(folder: DeployDir, signal_number: int) -> None:
    """Send a signal to the process group of a deployment.

    Nothing is sent if its process has ended, or if its process id is not recorded.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        pid = int(read_json(folder.process)["pid"])
        # An ended process's id may belong to another one now. A damaged record could hold 0, which
        # means our own process group, or 1, that of init.
        if is_alive(folder) and pid > 1:
            os.killpg(pid, signal_number)
