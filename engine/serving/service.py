"""Talking to models: serve a base with its adapters, ask it something, stop it.

One process per base model, adapters addressed by model name. The process is detached and ends by
itself when nobody talks to it; a server of ours may come and go meanwhile. Every start is
idempotent: what is served already is returned as it is.
"""

import contextlib
import os
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json, read_tail, take_lock, write_json, write_text
from engine.core.hardware import Device
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.progress import read_progress
from engine.home.rows import HOLDS_DEVICE, DeploymentRow
from engine.home.run_dir import DeployDir, Home
from engine.home.store import Store
from engine.install import vllm_env
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.processes import deployments, launcher, programs
from engine.processes.deployments import (
    ANYBODY,
    Asker,
    Json,
    Unreachable,
    describe,
    list_deployments,
)
from engine.records.run_config import GRPOConfig
from engine.serving.export import export

__all__ = ["chat", "deploy", "export", "list_deployments"]

START_S = 40.0  # what one call waits for a process to become ready
CALL_S = 48.0  # what one chat takes at most, starts included
_POLL_S = 0.05
# What a serving process holds beside the weights: the libraries, activations, caches.
_OVERHEAD = {
    ("torch", "cpu"): 700_000_000,
    ("torch", "cuda"): 2_500_000_000,
    ("vllm", "cpu"): 4_500_000_000,
    ("vllm", "cuda"): 8_000_000_000,
}
_WEIGHT_BYTES = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True)
class Wanted:
    """What shall be served: a model name on a base, with its adapter if it has one."""

    ref: ModelRef
    name: str
    adapter: str  # "" for the base itself
    thinking: bool


def deploy(
    home: Home,
    ref: str,
    action: str = "start",
    export_format: str = "adapter",
    path: str = "",
    asker: Asker = ANYBODY,
) -> Reply:
    """Serve a model, stop serving it, or export its files.

    Raises UserError MODEL_*, DEVICE_BUSY, DOES_NOT_FIT, DEPLOY_FAILED, DEPLOYMENT_NOT_FOUND,
    NO_TORCH, NO_VLLM, BAD_ARGUMENT, QUOTA.
    """
    if action == "export":
        return export(home, ref, export_format, path)
    if action == "stop":
        return _stop(home, ref)
    if action != "start":
        raise UserError(
            "BAD_ARGUMENT",
            f"action={action!r} does not exist",
            hint="Use start, stop or export.",
            field="action",
        )
    wanted = _wanted(home, ref)
    row, _ = _serve(home, wanted, time.monotonic() + START_S, asker, asked_for=True)
    return {
        "model": wanted.name,
        "base_url": row.url,
        "api_key_file": str(home.deployment(row.deployment_id).key),
        **describe(home, row),
        "summary": f"{wanted.name} answers at {row.url}.",
        "next": [Call("chat", {"model": wanted.name, "message": "..."}).to_json()],
        "warnings": [],
    }


def chat(
    home: Home,
    model: str,
    message: str,
    system: str = "",
    compare_to: str = "",
    max_tokens: int = 512,
    temperature: float = 0.0,
    asker: Asker = ANYBODY,
) -> Reply:
    """Ask a model, and a second one with `compare_to`; starts a deployment where none serves it.

    Each answer: model, answer, finish_reason, prompt_tokens, tokens, latency_s (its own, without
    a start). `started`: what had to be started for it, {"deployment_id", "seconds", "memory_gb"}.
    Raises UserError.
    """
    if not message.strip():
        raise UserError("BAD_ARGUMENT", "message is empty", hint="Ask something.", field="message")
    deadline = time.monotonic() + CALL_S
    names = [model] + ([compare_to] if compare_to and compare_to != model else [])
    wanted = [_wanted(home, name) for name in names]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
    started: list[Reply] = []
    answers = [_ask(home, one, body, deadline, asker, started) for one in wanted]
    seconds = sum(answer["latency_s"] for answer in answers)
    cut = [
        f"{answer['model']} was cut at {answer['tokens']} tokens"
        for answer in answers
        if answer["finish_reason"] == "length"
    ]
    idle = home.user_config().idle_stop_minutes
    left = [
        f"{one['deployment_id']} was started for this in {one['seconds']:.1f} s and holds about "
        f"{one['memory_gb']:g} GB; it stops by itself after {idle:g} idle minutes"
        for one in started
    ]
    stop = [
        Call("deploy", {"run_id": one["deployment_id"], "action": "stop"}).to_json()
        for one in started
    ]
    return {
        "answers": answers,
        **({"started": started} if started else {}),
        "summary": f"{' and '.join(names)} answered in {seconds:.1f} s.",
        "next": stop,
        "warnings": cut + left,
    }


def _wanted(home: Home, name: str) -> Wanted:
    ref = catalog.resolve_model(home, name)
    if ref.adapter is None:
        return Wanted(ref, ref.base_ref, "", False)
    config = home.run(ref.run_id).read_config()
    thinking = isinstance(config, GRPOConfig) and config.settings.thinking
    return Wanted(ref, ref.ref, str(ref.adapter), thinking)


def _serve(
    home: Home, wanted: Wanted, deadline: float, asker: Asker, *, asked_for: bool = False
) -> tuple[DeploymentRow, float | None]:
    """The living, ready deployment that serves `wanted`, started or extended where needed; and
    the seconds that starting it took, None where it was there.

    `asked_for`: it stays until it is stopped or idle; what only a chat needed holds no process.
    """
    launcher.worker_python(home)
    lock = take_lock(home.deploy_lock, wait_s=max(0.0, deadline - time.monotonic()))
    if lock is None:
        raise _not_yet("another deployment of this home is being started")
    try:
        row = _find(home, wanted)
        row = _until_ready(home, row, deadline) if row is not None else None
        took, began = None, time.monotonic()
        if row is None:
            row = _until_ready(home, _start(home, wanted, asker), deadline)
            took = time.monotonic() - began
        if row is None:
            raise _not_yet("the process ended while it was looked at")
        if wanted.adapter and not _load_adapter(home.deployment(row.deployment_id), wanted):
            # It was on its way out, idle for too long or to make room for a run.
            row = _until_ready(home, _start(home, wanted, asker), deadline)
            took = time.monotonic() - began
            if row is None or not _load_adapter(home.deployment(row.deployment_id), wanted):
                raise _not_yet("the process ended while it was looked at")
        return (_ask_for(home, row, wanted) if asked_for else row), took
    finally:
        os.close(lock)


def _find(home: Home, wanted: Wanted) -> DeploymentRow | None:
    for row in deployments.living(home):
        if row.base_path != str(wanted.ref.base_path):
            continue
        if not wanted.adapter or _thinks(home.deployment(row.deployment_id)) == wanted.thinking:
            return row
    return None


def _thinks(folder: DeployDir) -> bool:
    return bool(deployments.config_of(folder).get("thinking"))


def _start(home: Home, wanted: Wanted, asker: Asker) -> DeploymentRow:
    """Start a deployment of what is wanted, where there is room for it. Raises UserError."""
    deployments.check_number(home, asker)
    engines = {d.id: _engine(home, d) for d in hardware.detect(home.root).devices}
    device, memory = _room(home, wanted, engines)
    adapters = [{"name": wanted.name, "path": wanted.adapter}] if wanted.adapter else []
    with Store(home) as store:
        row = store.add_deployment(
            base_name=wanted.ref.base_ref,
            base_path=str(wanted.ref.base_path),
            adapters=[],
            serve_base=False,
            memory_bytes=memory,
        )
    folder = home.deployment(row.deployment_id)
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(folder.key, secrets.token_urlsafe(32) + "\n")
    write_json(
        folder.config,
        {
            "base_path": row.base_path,
            "base_name": row.base_name,
            "adapters": adapters,
            "port": 0,
            "idle_stop_minutes": home.user_config().idle_stop_minutes,
            "thinking": wanted.thinking,
            "serve_with": engines[device.id],
            "memory_share": round(memory / device.memory_total, 3),
            "lora_rank": wanted.ref.adapter_facts.rank if wanted.ref.adapter_facts else 0,
            "memory_bytes": memory,
            "asker": asker.name,
        },
    )
    _spawn(home, folder, device)
    return row


def _spawn(home: Home, folder: DeployDir, device: Device) -> None:
    """Start the server's process, detached from this one."""
    env = {
        **os.environ,
        "HONESMITH_HOME": str(home.root),
        "HONESMITH_DEVICE": device.id,
        "CUDA_VISIBLE_DEVICES": device.visible,
        "GOMP_SPINCOUNT": "10000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    alive = take_lock(folder.alive)
    if alive is None:
        raise _failed(folder, "its folder is in use by another process")
    try:
        argv = [launcher.worker_python(home), "-P", *programs.command("server"), str(folder.path)]
        pid = launcher.spawn_detached(argv, folder.path, folder.log, env, pass_fds=(alive,))
        write_json(folder.process, {"pid": pid}, fsync=False)
    finally:
        os.close(alive)


def _engine(home: Home, device: Device) -> str:
    """What answers on this device: "torch" (our own sampler) or "vllm".

    Left to itself vLLM is for GPUs: on a CPU it takes longer to start and to answer.
    Raises UserError NO_VLLM when `serve_with` asks for what is not set up.
    """
    chosen = home.user_config().serve_with
    if chosen == "vllm":
        vllm_env.require_python(home)
    elif chosen == "auto":
        here = device.kind == "cuda" and vllm_env.find_python(home) is not None
        return "vllm" if here else "torch"
    return chosen


def _room(home: Home, wanted: Wanted, engines: dict[str, str]) -> tuple[Device, int]:
    """A device with memory for the model beside what runs, and the bytes it will take."""
    devices = hardware.detect(home.root).devices
    needs = {device.id: _memory(wanted.ref, device, engines[device.id]) for device in devices}
    best = max(devices, key=lambda device: device.memory_free - needs[device.id])
    need = needs[best.id]
    if need <= best.memory_free:
        return best, need
    message = f"{wanted.name} needs about {need / 1e9:.1f} GB"
    if need > max(device.memory_total for device in devices):
        raise UserError(
            "DOES_NOT_FIT",
            f"{message}; no device of this machine has that much",
            hint="Serve a smaller model here.",
        )
    raise UserError(
        "DEVICE_BUSY",
        f"{message}; {best.memory_free / 1e9:.1f} GB of {best.id} are free{_until_free(home)}",
        hint=_free_a_device(home),
        retryable=True,
    )


def _free_a_device(home: Home) -> Hint:
    living = deployments.living(home)
    text = "Wait for what runs, or stop a deployment; then call again."
    if not living:
        return Hint(text)
    stop = {"run_id": living[-1].deployment_id, "action": "stop"}
    return Hint(text, Call("deploy", stop))


def _memory(ref: ModelRef, device: Device, engine: str) -> int:
    weights = int(ref.facts.params * _WEIGHT_BYTES[device.kind] * 1.1)
    return weights + _OVERHEAD[engine, device.kind]


def _until_free(home: Home) -> str:
    with Store(home) as store:
        for row in store.list_runs(10, states=HOLDS_DEVICE):
            left = read_progress(home.run(row.run_id), row).eta_s
            about = f", about {left:.0f} s more" if left else ""
            return f" while {row.run_id} runs{about}"
    return ""


def _until_ready(home: Home, row: DeploymentRow, deadline: float) -> DeploymentRow | None:
    """Wait until the process answers its health check; None when it was ready once and ended.

    Raises UserError DEPLOY_FAILED.
    """
    folder = home.deployment(row.deployment_id)
    while True:
        if folder.ready.exists() and _healthy(folder):
            if row.state == "ready":
                return row
            url = str(read_json(folder.ready)["url"])
            with Store(home) as store:
                store.update_deployment(row.deployment_id, state="ready", url=url)
                return store.get_deployment(row.deployment_id)
        if not deployments.is_alive(folder):
            deployments.living(home)  # closes the row
            if row.state == "ready":
                return None
            raise _failed(folder, deployments.failure_message(folder))
        if time.monotonic() > deadline:
            raise _not_yet(f"{row.base_name} is still being loaded")
        time.sleep(_POLL_S)


def _healthy(folder: DeployDir) -> bool:
    try:
        return deployments.request(folder, "GET", "/health", timeout_s=2.0)[0] == 200
    except Unreachable:
        return False


def _load_adapter(folder: DeployDir, wanted: Wanted) -> bool:
    """Add the adapter to the process; one that it has already costs nothing. False where the
    process ends instead of answering. Raises UserError DEPLOY_FAILED."""
    entry = {"name": wanted.name, "path": wanted.adapter}
    try:
        status, reply = deployments.request(folder, "POST", "/admin/adapters", entry, START_S)
    except Unreachable as error:
        if deployments.ends(folder):
            return False
        raise _failed(folder, f"it did not take the adapter: {error}") from error
    if status != 200:
        raise _failed(folder, _error_text(reply) or f"it answered {status}")
    return True


def _ask_for(home: Home, row: DeploymentRow, wanted: Wanted) -> DeploymentRow:
    if not wanted.adapter:
        return _update(home, row, serve_base=True)
    kept = [adapter for adapter in row.adapters if adapter["name"] != wanted.name]
    return _update(home, row, adapters=[*kept, {"name": wanted.name, "path": wanted.adapter}])


def _update(home: Home, row: DeploymentRow, **values: Any) -> DeploymentRow:
    if all(getattr(row, name) == value for name, value in values.items()):
        return row
    with Store(home) as store:
        store.update_deployment(row.deployment_id, **values)
    return replace(row, **values)


def _stop(home: Home, ref: str) -> Reply:
    """Stop serving a model, or a deployment by its id; the process ends with the last asked for."""
    stopped = False
    for row in deployments.living(home):
        if ref == row.deployment_id:
            left, base = [], False
        elif ref in deployments.served(home, row):
            left = [adapter for adapter in row.adapters if adapter["name"] != ref]
            base = row.serve_base and ref != row.base_name
        else:
            continue
        stopped = True
        if left or base:
            _update(home, row, adapters=left, serve_base=base)
        else:
            deployments.stop(home, row, "stopped on request")
    reply = {"model": ref, "state": "stopped", "next": [], "warnings": []}
    if stopped:
        return reply | {"summary": f"{ref} is no longer served."}
    if said := _how_it_ended(home, ref):
        return reply | {"summary": f"{ref} is not served any more: {said}."}
    if not _is_run(home, ref):
        catalog.resolve_model(home, ref)  # says so when there is no such thing at all
    others = _served_of(home, ref)
    also = f"; {', '.join(others)} is" if others else ""
    return reply | {
        "state": "not_served",
        "summary": f"Nothing was stopped: {ref} was not being served{also}.",
        "next": [Call("deploy", {"run_id": name, "action": "stop"}).to_json() for name in others],
    }


def _how_it_ended(home: Home, ref: str) -> str:
    """Why the deployment `ref`, or the last one that served it, ended; empty where none did."""
    with Store(home) as store:
        for row in store.list_deployments():
            if ref == row.deployment_id or ref in deployments.served(home, row):
                return row.message or "it ended"
    return ""


def _is_run(home: Home, ref: str) -> bool:
    """Whether `ref` is a run, be it one that left no model."""
    with Store(home) as store, contextlib.suppress(UserError):
        return store.get_run(ref).run_id == ref
    return False


def _served_of(home: Home, ref: str) -> list[str]:
    """What is served of the run of `ref`, under the other names it has."""
    run_id = ref.partition("@")[0]
    names = [name for row in deployments.living(home) for name in deployments.served(home, row)]
    return [name for name in names if name.partition("@")[0] == run_id]


def _ask(
    home: Home,
    wanted: Wanted,
    body: Json,
    deadline: float,
    asker: Asker,
    started: list[Reply],
) -> Reply:
    """One answer; what is started for it is added to `started`.

    A process that ended between the look and the question is started again once.
    """
    for last in (False, True):
        row, took = _serve(home, wanted, min(deadline, time.monotonic() + START_S), asker)
        if took is not None:
            about = {"deployment_id": row.deployment_id, "seconds": round(took, 2)}
            started.append(about | {"memory_gb": round(row.memory_bytes / 1e9, 2)})
        folder = home.deployment(row.deployment_id)
        asked = time.monotonic()
        try:
            response = httpx.post(
                f"{row.url}/chat/completions",
                json=body | {"model": wanted.name},
                headers={"Authorization": f"Bearer {folder.key.read_text().strip()}"},
                timeout=max(1.0, deadline - asked),
                trust_env=False,  # loopback: no proxy of the user's has a say
            )
        except httpx.TimeoutException as error:
            raise UserError(
                "DEPLOY_FAILED",
                f"{wanted.name} did not answer within {time.monotonic() - asked:.0f} s",
                hint="Lower max_tokens, or wait until nothing trains on this machine.",
                retryable=True,
            ) from error
        except httpx.HTTPError as error:
            if last or time.monotonic() > deadline:
                raise _failed(folder, f"it did not answer: {error}") from error
            continue
        return _answer(wanted, folder, response, time.monotonic() - asked)
    raise AssertionError("unreachable")


def _answer(wanted: Wanted, folder: DeployDir, response: httpx.Response, seconds: float) -> Reply:
    """The server's answer as a reply. Raises UserError for a refusal or a failure."""
    try:
        reply = response.json()
    except ValueError:
        reply = {}
    if response.status_code != 200:
        text = _error_text(reply) or f"it answered {response.status_code}"
        if response.status_code >= 500:
            raise _failed(folder, text)
        raise UserError(
            "BAD_ARGUMENT",
            f"{wanted.name} refused: {text}",
            hint="Shorten the message or lower max_tokens.",
        )
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    answer = {
        "model": wanted.name,
        "answer": choice["message"].get("content") or "",
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage.get("prompt_tokens"),
        "tokens": usage.get("completion_tokens"),
        "latency_s": round(seconds, 3),
    }
    if choice["message"].get("tool_calls"):
        answer["tool_calls"] = choice["message"]["tool_calls"]
    return answer


def _error_text(reply: Json) -> str:
    error = reply.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _failed(folder: DeployDir, message: str) -> UserError:
    tail = read_tail(folder.log, 4000).strip().splitlines()[-3:]
    last = " | ".join(line.strip() for line in tail)[:400]
    return UserError(
        "DEPLOY_FAILED",
        f"the deployment {folder.id} failed: {message}" + (f" (its log ends: {last})" * bool(last)),
        hint=f"Read {folder.log}." if last else f"Nothing is in {folder.log}.",
    )


def _not_yet(message: str) -> UserError:
    return UserError(
        "DEPLOY_FAILED", message, hint="Nothing is wrong yet: call again.", retryable=True
    )
