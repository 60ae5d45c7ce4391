"""Deployments: which of them live, requests to them, and how they are stopped.

A deployment is alive while its process holds `alive.lock`, which it inherits when it is started.
This module imports nothing heavy: the supervisor stops idle deployments where a run needs their
memory.
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
from engine.home.rows import HOLDS_DEVICE, DeploymentRow
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
    """Who starts deployments, and how many of theirs may live at once (0: no limit)."""

    name: str = ""
    max_living: int = 0


ANYBODY = Asker()


class Unreachable(Exception):
    """The process did not answer, or not in time."""


def is_alive(folder: DeployDir) -> bool:
    """Whether the process of the deployment lives."""
    return is_locked(folder.alive)


def living(home: Home) -> list[DeploymentRow]:
    """List the deployments whose process lives, newest first.

    If the process of a deployment that is stored as living has ended, its end is recorded here.
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
    """List the model names that a deployment answers to, or will answer to once it has started."""
    folder = home.deployment(row.deployment_id)
    try:
        return [str(name) for name in read_json(folder.ready)["models"]]
    except (OSError, ValueError, KeyError, TypeError):
        # It is not ready. Adapters that it is started with are in its config, not yet in its row.
        adapters = [*row.adapters, *configured_adapters(config_of(folder))]
        unique_names = dict.fromkeys(adapter["name"] for adapter in adapters)
        return [row.base_name, *unique_names]


def config_of(folder: DeployDir) -> Json:
    """The settings that a deployment was started with; {} if they cannot be read."""
    return read_object(folder.config)


def check_quota(home: Home, asker: Asker) -> None:
    """Raise UserError QUOTA if `asker` has as many living deployments as it may have.

    The caller must hold the lock for starting deployments, so that none starts meanwhile.
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
    """Make the error for an asker who has as many deployments as it may have.

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
    """The living deployments as JSON: id, state, address, models served, memory."""
    return [describe(home, row) for row in living(home)]


def describe(home: Home, row: DeploymentRow) -> Reply:
    """Describe a deployment as JSON: id, state, address, models served, memory in GB (10^9)."""
    return {
        "deployment_id": row.deployment_id,
        "state": row.state,
        "base_url": row.url,
        "models": served(home, row),
        "memory_gb": round(row.memory_bytes / 1e9, 2),
    }


def failure_message(folder: DeployDir) -> str:
    """Return why a deployment did not become ready: the message it left, or that it left none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(folder.failed)["message"])
    return "the process ended before it was ready"


def request(
    folder: DeployDir, method: str, path: str, body: Json | None = None, timeout_s: float = 5.0
) -> tuple[int, Json]:
    """Send one request to a deployment, such as GET (`method`) /health (`path`).

    Returns the HTTP status and the JSON object in the reply ({} if it holds another value). `body`
    is sent as JSON; None sends no body. Raises Unreachable if the process is not ready, does not
    answer within `timeout_s` seconds, or answers something that is not JSON.
    """
    # Imported late: it costs the supervisor 30 ms, and most runs have no deployment to stop.
    import http.client  # noqa: PLC0415

    try:
        port = int(read_json(folder.ready)["port"])
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
    """The headers of a request to a deployment, with its key. Raises OSError if it has none."""
    key = folder.key.read_text().strip()
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _object_in(reply: bytes) -> Json:
    """The JSON object in a reply, {} if it holds none. Raises ValueError if it is not JSON."""
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
    """End a deployment and record `why` in its row.

    It is asked to stop first. If it has not ended after STOP_S seconds, it gets SIGTERM, then
    SIGKILL.
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
    """Stop idle deployments until the memory that the run needs is free on the device, or on each
    of those that `device_id` names with commas between them.

    Returns the ids of those that were stopped. A run without an estimate, such as an evaluation or
    a probe, is taken to need half of the device's memory.
    """
    if not any(home.deployments.iterdir()):  # the usual case, answered without the database
        return []
    stopped_ids = []
    for row in living(home):
        if all(_fits(run, each) for each in device_id.split(",")):
            break
        if row.state == "ready" and is_idle(home.deployment(row.deployment_id)):
            stop(home, row, f"stopped to make room for {run.id}")
            stopped_ids.append(row.deployment_id)
    return stopped_ids


def _fits(run: RunDir, device_id: str) -> bool:
    """Return whether the memory that a run may need is free on the device, and claimed by nobody.

    That is `_HEADROOM_FACTOR` times its expected peak. A run without an estimate is taken to need
    half of the device's memory. An unknown `device_id` means the machine's default device.
    """
    # Imported late: it loads psutil, which only a run beside a deployment needs.
    from engine.core import hardware  # noqa: PLC0415

    machine = hardware.detect(run.home.root)
    devices_by_id = {device.id: device for device in machine.devices}
    device = devices_by_id.get(device_id, machine.device)
    config = run.find_config()  # None if damaged: the trainer reports that, not we
    expected_bytes = config.peak_memory if config else None
    needed_bytes = expected_bytes or device.memory_total / 2
    return _HEADROOM_FACTOR * needed_bytes <= unclaimed_bytes(run.home, device, besides=run.id)


def unclaimed_bytes(home: Home, device: "Device", besides: str = "") -> int:
    """What of a GPU's memory is free for something new: no more than is free now without what is
    still being loaded, and no more than is left once everything of this home there has what it was
    granted, since a sampler that sleeps takes its memory back. Of a CPU the memory that is free.

    Args:
        besides: a run whose claim does not count, because the memory is for it.
    """
    if device.kind == "cpu":
        return device.memory_free
    held, loading = _claims(home, device, besides)
    return max(0, min(device.memory_free - loading, device.memory_total - held - loading))


def _claims(home: Home, device: "Device", besides: str) -> tuple[int, int]:
    """The bytes of a GPU that runs and deployments of this home were granted, without those of the
    run `besides`: (by what has taken its memory, by what is still being loaded)."""
    with Store(home) as store:
        runs = store.list_runs(limit=1000, states=HOLDS_DEVICE)
    held = loading = 0
    for run in runs:
        config = home.run(run.run_id).find_config() if device.id in run.devices else None
        if config is None or run.run_id == besides:
            continue
        if run.state == "preparing":
            loading += config.peak_memory or 0
        else:
            held += config.peak_memory or 0
    for row in living(home):
        if config_of(home.deployment(row.deployment_id)).get("device") != device.id:
            continue
        if row.state == "starting":
            loading += row.memory_bytes
        else:
            held += row.memory_bytes
    return held, loading


def wait_until_ended(folder: DeployDir, wait_s: float = STOP_S) -> bool:
    """Wait up to `wait_s` seconds for the process to end; returns whether it is gone."""
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
        # Once the process has ended, another one may have its id. A damaged id of 0 would mean our
        # own process group, 1 that of init.
        if is_alive(folder) and pid > 1:
            os.killpg(pid, signal_number)
