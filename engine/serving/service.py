"""Serves models: starts a base model with its adapters, finds it again, stops it.

There is one process per base model; its adapters are addressed by model name. The process is
detached, and ends by itself when nobody talks to it, even if our server is gone. Serving a model
that is served already returns its deployment (the process that serves it).
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_json, take_lock
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.rows import LOCAL, DeploymentRow, shown_owner, viewer_id
from engine.home.run_dir import DeployDir, Home
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.machine.processes.deployments import (
    ANYBODY,
    Asker,
    Json,
    Unreachable,
    describe,
    list_deployments,
)
from engine.models import catalog
from engine.records.known_settings import KnownSettings
from engine.records.run_config import DistillConfig, GRPOConfig, SFTConfig
from engine.serving.chat_request import OF_CLIENTS, Patience
from engine.serving.export import export
from engine.serving.starting import (
    Target,
    adapter_entry,
    compute_of,
    deploy_failed,
    host_for,
    start,
)

__all__ = ["deploy", "export", "list_deployments"]

_POLL_S = 0.05
_BLIP_S = 5.0  # how long a call waits for another machine that answered before
_LEAST_LOAD_S = 1.0  # an adapter gets at least so long to load, even if the call's time is over


def deploy(
    home: Home,
    ref: str,
    action: str = "start",
    export_format: str = "adapter",
    path: str = "",
    asker: Asker = ANYBODY,
    patience: Patience = OF_CLIENTS,
    compute: str = "",
) -> Reply:
    """Serve a model, stop serving it, or export its files (`action` is start, stop or export).

    `ref` is the model, such as "arith-7@best"; to stop it may also be the id of a deployment.
    `export_format` and `path` are those of `export`. A start counts against the quota of `asker`
    and takes no longer than `patience` allows. `compute` says where it is served: "local" or a host
    such as "ssh:box"; "" means where it is served already, or else where `serve_on` of config.toml
    says.

    Raises UserError:
        MODEL_* if there is no such model; DEVICE_BUSY or DOES_NOT_FIT if it has no room now, or
            never; DEPLOY_FAILED if it does not start (retryable while it still loads); NO_TORCH or
            NO_VLLM if what serves it is not installed; QUOTA if `asker` may start no more;
            BAD_ARGUMENT if an argument has a value that is not allowed.
    """
    if action == "export":
        return export(home, ref, export_format, path)
    if action == "stop":
        return _stop(home, ref)
    if action == "start":
        if compute not in ("", LOCAL):
            compute = host_for(home, compute).compute  # whichever of its names was given
        return _deploy(home, replace(target_of(home, ref), compute=compute), asker, patience)
    raise UserError(
        "BAD_ARGUMENT",
        f"action={action!r} does not exist",
        hint="Use start, stop or export.",
        field="action",
    )


def _deploy(home: Home, target: Target, asker: Asker, patience: Patience) -> Reply:
    """Serve the target until it is stopped or idle. Returns the reply with its address. It may take
    `patience.start_s` seconds to start; `asker` is whose quota that counts against."""
    row, _ = serve(home, target, time.monotonic() + patience.start_s, asker, by_deploy=True)
    return {
        "model": target.name,
        "base_url": row.url,
        "api_key_file": str(home.deployment(row.deployment_id).key),
        **describe(home, row),
        "summary": f"{target.name} answers at {row.url}.",
        "next": [Call("chat", {"model": target.name}, needs=("message",)).to_json()],
        "warnings": [],
    }


def target_of(home: Home, name: str) -> Target:
    """Find the model of a reference such as "arith-7@best". Raises UserError MODEL_* if there is
    none."""
    ref = catalog.resolve_model(home, name)
    if ref.adapter is None:
        return Target(ref, name=ref.base_ref, adapter="", thinking=False)
    config = home.run(ref.run_id).read_config() if ref.run_id else None
    # DPO runs, and adapters that no run of this home trained, have no setting `thinking`.
    trained = (
        config.settings if isinstance(config, SFTConfig | GRPOConfig | DistillConfig) else None
    )
    thinking = KnownSettings.of(trained).thinking is True
    return Target(ref, name=ref.ref, adapter=str(ref.adapter), thinking=thinking)


def serve(
    home: Home, target: Target, deadline: float, asker: Asker, *, by_deploy: bool = False
) -> tuple[DeploymentRow, float | None]:
    """Make sure that a deployment serves the target. If one with the same base model is running, it
    loads the target's adapter; otherwise a new one is started.

    Returns (the deployment's row, the seconds that its start took, or None if it was running
    already).

    Args:
        by_deploy: True if the target was deployed by name: the deployment then records that it is
            served until it is stopped or idle. False for a chat, which only needs the target now.

    Raises UserError:
        Those of `start` if no deployment can be started; DEPLOY_FAILED if it fails, or (retryable)
            if it is not ready at `deadline` (of time.monotonic()).
    """
    lock = take_lock(home.deploy_lock, wait_s=max(0.0, deadline - time.monotonic()))
    if lock is None:
        raise _try_again("another deployment of this home is being started")
    try:
        row, start_seconds = _serve_locked(home, target, deadline, asker)
        if by_deploy and _is_own(home, row):  # only its owner changes a deployment
            row = _keep_serving(home, row, target)
        return row, start_seconds
    finally:
        os.close(lock)


def _serve_locked(
    home: Home, target: Target, deadline: float, asker: Asker
) -> tuple[DeploymentRow, float | None]:
    """Find or start a deployment that serves the target. The caller holds the lock on starting;
    `asker` is whose quota a start counts against. Returns (its row, the seconds that its start
    took, or None if it was running already)."""
    row = _find_serving(home, target)
    if row is not None:
        row = _until_ready(home, row, deadline)  # None: its process has ended
    started_at = time.monotonic()
    start_seconds = None
    if row is None:
        row = _start_and_wait(home, target, asker, deadline)
        start_seconds = time.monotonic() - started_at
    if not _load_adapter(home, row, target, deadline):
        # The process has just ended, because it was idle or a run needed its memory. Start another.
        row = _start_and_wait(home, target, asker, deadline)
        start_seconds = time.monotonic() - started_at
        if not _load_adapter(home, row, target, deadline):
            raise _ended_meanwhile_error()
    return row, start_seconds


def _start_and_wait(home: Home, target: Target, asker: Asker, deadline: float) -> DeploymentRow:
    """Start a deployment of the target, which counts against the quota of `asker`, wait until it
    answers, and return its row. Raises UserError if it is not ready at `deadline` (of
    time.monotonic())."""
    row = _until_ready(home, start(home, target, asker), deadline)
    if row is None:  # not expected, because no earlier call can have seen the new row ready
        raise _ended_meanwhile_error()
    return row


def _find_serving(home: Home, target: Target) -> DeploymentRow | None:
    """Find a living deployment that can serve the target: one with its base model, at the place
    that the target names (if it names one) and, for an adapter, with thinking on or off as in the
    adapter's training. Returns None if there is none.

    That of another owner is taken only if it serves the target already: it gets no further model.
    """
    for row in deployments.living(home):
        folder = home.deployment(row.deployment_id)
        if row.base_path != str(target.ref.base_path):
            continue
        if target.compute and target.compute != compute_of(folder):
            continue
        if not _is_own(home, row) and target.name not in deployments.served(home, row):
            continue
        if not target.adapter:  # for a base, any deployment of it will do
            return row
        if _is_thinking(folder) == target.thinking:
            return row
    return None


def _is_own(home: Home, row: DeploymentRow) -> bool:
    """Tell whether a deployment belongs to the viewer, the person or key that uses the home."""
    return row.owner == viewer_id(home.viewer)


def _is_thinking(folder: DeployDir) -> bool:
    """Tell whether the deployment in `folder` was started with thinking on: its prompts then open a
    think block."""
    return bool(deployments.config_of(folder).get("thinking"))


def _until_ready(home: Home, row: DeploymentRow, deadline: float) -> DeploymentRow | None:
    """Wait until the deployment answers its health check, and return its new row. Returns None if
    it was ready in an earlier call and its process has ended since.

    Raises UserError DEPLOY_FAILED if it ended while starting, or, retryable, if it is still loading
    at `deadline`.
    """
    folder = home.deployment(row.deployment_id)
    blip_ends = time.monotonic() + _BLIP_S
    while True:
        if folder.ready.exists() and _healthy(folder):
            return _ready_row(home, row)
        answered_before = row.state == "ready"
        if answered_before and time.monotonic() > blip_ends and compute_of(folder) != LOCAL:
            raise _try_again(f"{compute_of(folder)} is not reached just now")
        if not deployments.is_alive(folder):
            deployments.living(home)  # this call records in the row that the process has ended
            if row.state == "ready":
                return None
            raise deploy_failed(folder, deployments.failure_message(folder))
        if time.monotonic() > deadline:
            raise _try_again(f"{row.base_name} is still being loaded")
        time.sleep(_POLL_S)


def _ready_row(home: Home, row: DeploymentRow) -> DeploymentRow:
    """Return the row of a deployment that answers. Its state "ready" and its address are recorded
    first, if they were not yet."""
    if row.state == "ready":
        return row
    url = str(read_json(home.deployment(row.deployment_id).ready)["url"])
    with Store(home) as store:
        store.update_deployment(row.deployment_id, state="ready", url=url)
        return store.get_deployment(row.deployment_id)


def _healthy(folder: DeployDir) -> bool:
    """Tell whether the server of a deployment answers its health check within two seconds."""
    try:
        status, _ = deployments.request(folder, "GET", "/health", timeout_s=2.0)
    except Unreachable:
        return False
    return status == 200


def _load_adapter(home: Home, row: DeploymentRow, target: Target, deadline: float) -> bool:
    """Make the deployment load the target's adapter; that takes next to no time if it is loaded
    already. For a base model nothing is done.

    Returns False if the deployment's process is ending, else True. Raises UserError DEPLOY_FAILED
    if it refuses the adapter, or, retryable, if it is still busy with other answers at `deadline`.
    """
    if not target.adapter:
        return True
    folder = home.deployment(row.deployment_id)
    # Even if the call has no time left, wait a moment, because the adapter may be loaded already.
    patience_s = max(_LEAST_LOAD_S, deadline - time.monotonic())
    try:
        status, reply = deployments.request(
            folder, "POST", "/admin/adapters", adapter_entry(target), timeout_s=patience_s
        )
    except Unreachable as error:
        if time.monotonic() > deadline and deployments.is_alive(folder):
            raise _try_again(f"{folder.id} is busy and has not loaded {target.name} yet") from error
        if deployments.wait_until_ended(folder):  # the process was just ending
            return False
        raise deploy_failed(folder, f"it did not take the adapter: {error}") from error
    if status != 200:
        raise deploy_failed(folder, _error_text(reply) or f"it answered {status}")
    return True


def _keep_serving(home: Home, row: DeploymentRow, target: Target) -> DeploymentRow:
    """Record in the row of a deployment that it serves the target until that is stopped, and return
    the new row."""
    if not target.adapter:
        return _set_columns(home, row, serve_base=True)
    other_adapters = [adapter for adapter in row.adapters if adapter["name"] != target.name]
    return _set_columns(home, row, adapters=[*other_adapters, adapter_entry(target)])


def _set_columns(home: Home, row: DeploymentRow, **values: Any) -> DeploymentRow:
    """Write these values (by column) into a deployment's row in the database, if any differs, and
    return the new row."""
    if all(getattr(row, name) == value for name, value in values.items()):
        return row
    with Store(home) as store:
        store.update_deployment(row.deployment_id, **values)
    return replace(row, **values)


def _stop(home: Home, ref: str) -> Reply:
    """Stop serving a model (`ref` is the name it is served by), or a deployment (`ref` is its id).

    Whoever sees the deployments of others stops these by their ids alone: a model's name stands for
    the viewer's own. The id of a run, or a model that was never served, stops nothing; the reply
    then offers the calls that stop other models of that run. Raises UserError MODEL_* if there is
    no such model, run or deployment.
    """
    still_serving = stop_models(home, ref)
    if still_serving is not None:
        return _stopped_reply(ref, still_serving)
    rows = [row for row in deployments.living(home) if ref in deployments.served(home, row)]
    if rows:  # all of other owners, because the viewer's own were stopped above
        return _not_own_reply(home, ref, rows)
    ending = _how_it_ended(home, ref)
    if ending:
        return _stop_reply(ref, "stopped", summary=f"{ref} is not served any more: {ending}.")
    if not _is_run(home, ref):
        catalog.resolve_model(home, ref)  # raises UserError if there is no such model
    return _nothing_stopped_reply(home, ref)


def _stopped_reply(ref: str, still_serving: Sequence[DeploymentRow]) -> Reply:
    """Make the reply of a call that stopped `ref`. If a deployment goes on with other models
    (`still_serving`), the reply names it, with the call that stops all of it."""
    notes = [
        f"{row.deployment_id} still serves {', '.join(_deployed_names(row))}"
        for row in still_serving
    ]
    return _stop_reply(
        ref,
        "stopped",
        summary=f"{'; '.join([f'{ref} is no longer served', *notes])}.",
        next_calls=[
            Call("deploy", {"run_id": row.deployment_id, "action": "stop"}) for row in still_serving
        ],
    )


def _not_own_reply(home: Home, ref: str, rows: Sequence[DeploymentRow]) -> Reply:
    """Make the reply of a call that stopped nothing, because only deployments of other owners
    (`rows`) serve the model `ref`. It offers the calls that stop each of them."""
    deployments_of_others = ", ".join(
        f"{row.deployment_id} of {shown_owner(home.viewer, row.owner)}" for row in rows
    )
    return _stop_reply(
        ref,
        "not_served",
        summary=f"Nothing was stopped: {ref} is served by {deployments_of_others}, and by none of "
        "yours.",
        next_calls=[
            Call("deploy", {"run_id": row.deployment_id, "action": "stop"}) for row in rows
        ],
    )


def _deployed_names(row: DeploymentRow) -> list[str]:
    """Return the names of the models that a deployment serves until somebody stops them: its base,
    if that was deployed, and its adapters."""
    base_names = [row.base_name] if row.serve_base else []
    adapter_names = [str(adapter["name"]) for adapter in row.adapters]
    return [*base_names, *adapter_names]


def _stop_reply(ref: str, state: str, *, summary: str, next_calls: Sequence[Call] = ()) -> Reply:
    """Make the reply of a call that was to stop `ref`, a model or a deployment.

    Args:
        state: the state of `ref` after the call.
        summary: what the call has done, in a sentence.
        next_calls: the calls that the reply offers.
    """
    return {
        "model": ref,
        "state": state,
        "next": [call.to_json() for call in next_calls],
        "warnings": [],
        "summary": summary,
    }


def _nothing_stopped_reply(home: Home, ref: str) -> Reply:
    """Make the reply of a call that stopped nothing, because `ref` was not being served. If `ref`
    names a run, or a model of a run, the reply offers calls that stop the served models of that
    run."""
    served_names = _served_names_of_run(home, ref)
    note = f"; {', '.join(served_names)} is" if served_names else ""
    return _stop_reply(
        ref,
        "not_served",
        summary=f"Nothing was stopped: {ref} was not being served{note}.",
        next_calls=[Call("deploy", {"run_id": name, "action": "stop"}) for name in served_names],
    )


def stop_models(home: Home, ref: str) -> list[DeploymentRow] | None:
    """Stop serving `ref`, a model's name (of the viewer's own deployments) or a deployment's id. A
    deployment's process ends once it serves nothing that was deployed.

    Returns the deployments that go on with other models, or None if `ref` was not being served.
    """
    was_served = False
    still_serving: list[DeploymentRow] = []
    for row in deployments.living(home):
        # What the deployment goes on serving: adapters, and perhaps the base model itself.
        if ref == row.deployment_id:
            adapters, serve_base = [], False
        elif _is_own(home, row) and ref in deployments.served(home, row):
            adapters = [adapter for adapter in row.adapters if adapter["name"] != ref]
            serve_base = row.serve_base and ref != row.base_name
        else:
            continue
        was_served = True
        if adapters or serve_base:
            new_row = _set_columns(home, row, adapters=adapters, serve_base=serve_base)
            still_serving.append(new_row)
        else:
            deployments.stop(home, row, "stopped on request")
    return still_serving if was_served else None


def _how_it_ended(home: Home, ref: str) -> str:
    """Return why the deployment `ref`, or the last one that served the model `ref`, ended. Returns
    "" if there was none."""
    with Store(home) as store:
        for row in store.list_deployments():  # the newest first
            if ref == row.deployment_id or ref in deployments.served(home, row):
                return row.message or "it ended"
    return ""


def _is_run(home: Home, ref: str) -> bool:
    """Tell whether `ref` is the id of a run, even of one that has no model yet."""
    with Store(home) as store, contextlib.suppress(UserError):
        return store.get_run(ref).run_id == ref
    return False


def _served_names_of_run(home: Home, ref: str) -> list[str]:
    """List the names by which models of a run are served, such as "arith-7@best". `ref` is the
    run's id, or a model of the run."""
    run_id = ref.partition("@")[0]
    names = [name for row in deployments.living(home) for name in deployments.served(home, row)]
    return [name for name in names if name.partition("@")[0] == run_id]


def _error_text(reply: Json) -> str:
    """Return the message of an error reply, which is {"error": {"message": ...}} or {"error": ...};
    "" if it has none."""
    error = reply.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _ended_meanwhile_error() -> UserError:
    """Make the retryable error for a deployment whose process ended during the call."""
    return _try_again("the process ended while it was looked at")


def _try_again(message: str) -> UserError:
    """Make the retryable error for a deployment that only needs more time."""
    return UserError(
        "DEPLOY_FAILED", message, hint="Nothing is wrong yet: call again.", retryable=True
    )
