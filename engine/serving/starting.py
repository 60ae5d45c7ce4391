"""Starts the process of a deployment: of a server on this machine, or of the one here that has
another machine serve (`far/forwarder.py`)."""

import os
import secrets
import sys
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.files import read_tail, take_lock, write_json, write_text
from engine.core.reply import Reply
from engine.executors import hosts
from engine.home.config_tables.hosts import SSH
from engine.home.rows import LOCAL, DeploymentRow, viewer_id
from engine.home.run_dir import DeployDir, Home
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes import deployments, launcher, programs
from engine.machine.processes.deployments import Asker
from engine.models.catalog import ModelRef
from engine.serving import placement


@dataclass(frozen=True)
class Target:
    """A model to serve, on its base.

    Attributes:
        name: the model name that requests give.
        adapter: folder of its adapter; "" for the base itself.
        thinking: whether it was trained with thinking on; it is then served so.
        compute: where it must be served: LOCAL or a host such as "ssh:box"; "" for wherever it is
            served already, or else where `serve_on` of config.toml says.
    """

    ref: ModelRef
    name: str
    adapter: str
    thinking: bool
    compute: str = ""


def host_for(home: Home, compute: str) -> Host:
    """Return the host that `compute` names, which can serve models.

    Raises UserError HOST_NOT_FOUND, HOST_UNUSABLE if it was never set up, or BAD_ARGUMENT if it is
    of a kind that serves nothing: those are given to a job for a time.
    """
    host = hosts.host_of(home, compute)
    if host.kind != SSH:
        raise UserError(
            "BAD_ARGUMENT",
            f"{compute} runs jobs and serves no models",
            hint='Serve on this machine (compute "local"), or on a host over SSH.',
            field="compute",
        )
    hosts.facts_of(home, host)
    return host


def compute_of(folder: DeployDir) -> str:
    """Return where a deployment's model is loaded: LOCAL or a host such as "ssh:box"."""
    return str(deployments.config_of(folder).get("compute", LOCAL))


def start(home: Home, target: Target, asker: Asker) -> DeploymentRow:
    """Start a deployment of the target: here on the device with the most room for it, or on another
    machine. Returns its row, without waiting until it answers.

    Raises UserError QUOTA if `asker` may start no more, DOES_NOT_FIT or DEVICE_BUSY if no device
    here has room, NO_VLLM or NO_TORCH if what serves here is not installed, HOST_NOT_FOUND,
    HOST_UNUSABLE or BAD_ARGUMENT for another machine that cannot serve, DEPLOY_FAILED if its folder
    is in use.
    """
    deployments.check_quota(home, asker)
    compute = target.compute or home.user_config().serve_on
    if compute != LOCAL:
        return _start_far(home, target, asker, host_for(home, compute))
    python = launcher.worker_python(home)  # raises NO_TORCH if no interpreter has torch
    chosen = placement.choose(home, target.ref, target.name)
    row = _add_row(home, target, chosen.memory_bytes)
    device = {
        "serve_with": chosen.engine,
        "device": chosen.device.id,  # its memory is counted as taken on this device
        # The share of the device's memory that vLLM may take.
        "memory_share": round(chosen.memory_bytes / chosen.device.memory_total, 3),
        "served_length": placement.served_length(home, target.ref),
        "lora_rank": target.ref.adapter_facts.rank if target.ref.adapter_facts else 0,
        "memory_bytes": chosen.memory_bytes,
    }
    folder = _write_folder(home, row, target, asker, device)
    variables = {
        "HONESMITH_DEVICE": chosen.device.id,
        "CUDA_VISIBLE_DEVICES": chosen.device.visible,
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the server may fetch nothing
        "TRANSFORMERS_OFFLINE": "1",
    }
    _spawn(home, folder, python, "server", variables)
    return row


def _start_far(home: Home, target: Target, asker: Asker, host: Host) -> DeploymentRow:
    """Start the process here that has `host` serve the target. Returns its row; it takes no memory
    of this machine."""
    row = _add_row(home, target, memory_bytes=0)
    place = {"compute": host.compute, "memory_bytes": 0}
    folder = _write_folder(home, row, target, asker, place)
    _spawn(home, folder, sys.executable, "forwarder", {})
    return row


def _add_row(home: Home, target: Target, memory_bytes: int) -> DeploymentRow:
    """Record in the database a deployment of the target's base model that is about to start, and
    return its row. `memory_bytes` is what it will take of its device."""
    with Store(home) as store:
        return store.add_deployment(
            base_name=target.ref.base_ref,
            base_path=str(target.ref.base_path),
            adapters=[],  # those that are deployed by name are added once it serves
            serve_base=False,
            memory_bytes=memory_bytes,
        )


def _write_folder(
    home: Home, row: DeploymentRow, target: Target, asker: Asker, place: Reply
) -> DeployDir:
    """Make the folder of a new deployment of the target, with its key and its config.json. `place`
    holds the part of the config that says where it is served, and in how much memory. Returns the
    folder."""
    folder = home.deployment(row.deployment_id)
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(folder.key, secrets.token_urlsafe(32) + "\n")
    config = {
        "base_path": row.base_path,
        "base_name": row.base_name,
        "adapters": [adapter_entry(target)] if target.adapter else [],
        "port": 0,  # the server picks one
        "idle_stop_minutes": home.user_config().idle_stop_minutes,
        "thinking": target.thinking,
        **place,
        "asker": asker.name,  # whose quota it counts against
        "owner": viewer_id(home.viewer),  # who may change and stop it
    }
    write_json(folder.config, config)
    return folder


def adapter_entry(target: Target) -> dict[str, str]:
    """Return the name and folder of the target's adapter, in the form that rows, configs and
    requests of deployments have."""
    return {"name": target.name, "path": target.adapter}


def _spawn(
    home: Home, folder: DeployDir, python: str, program: programs.Kind, variables: dict[str, str]
) -> None:
    """Start the process of a deployment, detached, with these environment variables. Raises
    UserError DEPLOY_FAILED if the folder is in use by another process."""
    env = {**os.environ, "HONESMITH_HOME": str(home.root), **variables}
    lock = take_lock(folder.alive)  # the process inherits it: locked means that it lives
    if lock is None:
        raise deploy_failed(folder, "its folder is in use by another process")
    try:
        argv = [python, "-P", *programs.command(program), str(folder.path)]
        pid = launcher.spawn_detached(argv, folder.path, folder.log, env, pass_fds=(lock,))
        write_json(folder.process, {"pid": pid}, fsync=False)
    finally:
        os.close(lock)


def deploy_failed(folder: DeployDir, message: str) -> UserError:
    """Make the error DEPLOY_FAILED for a deployment that failed, with the end of its log."""
    last_lines = read_tail(folder.log, max_bytes=4000).strip().splitlines()[-3:]
    log_end = " | ".join(line.strip() for line in last_lines)[:400]
    text = f"the deployment {folder.id} failed: {message}"
    if not log_end:
        return UserError("DEPLOY_FAILED", text, hint=f"Nothing is in {folder.log}.")
    text += f" (its log ends: {log_end})"
    return UserError("DEPLOY_FAILED", text, hint=f"Read {folder.log}.")
