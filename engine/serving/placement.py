"""Decides where a deployment (a process that serves a model) runs: its device, its engine, and the
memory that it takes there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.hardware import Device
from engine.core.hints import Call, Hint
from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.fast_paths.results import why_off
from engine.machine.install import vllm_env
from engine.machine.pace.progress import read_progress
from engine.machine.processes import deployments
from engine.models.catalog import ModelRef
from engine.models.sizing import servers
from engine.models.sizing.layers import LoadedModel

_USUAL_RANK = 16  # the rank of an adapter that room is planned for


@dataclass(frozen=True)
class Placement:
    """A device for a deployment, its engine ("torch" or "vllm") and the bytes that it takes
    there."""

    device: Device
    engine: str
    memory_bytes: int


def choose(home: Home, ref: ModelRef, name: str) -> Placement:
    """Choose the device that has most memory left once the model `ref` is on it. `name` is the
    model's name in messages.

    Raises UserError DOES_NOT_FIT if no device is large enough, DEVICE_BUSY if the best one has too
    little free memory now, NO_VLLM if vLLM is asked for and not set up.
    """
    # Count as free only what nothing that runs or loads here was granted.
    devices = [
        replace(device, memory_free=deployments.unclaimed_bytes(home, device))
        for device in hardware.detect(home.root).devices
    ]
    placements = [_placement(home, ref, device) for device in devices]

    def bytes_left(placement: Placement) -> int:
        """Return the bytes that are free on the device once the model is on it."""
        return placement.device.memory_free - placement.memory_bytes

    best = max(placements, key=bytes_left)
    if best.memory_bytes > best.device.memory_free:
        raise _no_room_error(home, best, name, devices)
    return best


def served_length(home: Home, ref: ModelRef) -> int:
    """Return the most tokens of prompt and answer together that a vLLM deployment of the model
    takes: what the owner set (`served_length` in config.toml), but at most the model's context."""
    configured_length = int(home.user_config().served_length)
    return min(ref.facts.max_positions, configured_length or ref.facts.max_positions)


def _placement(home: Home, ref: ModelRef, device: Device) -> Placement:
    """Plan how the model would be served on this device: by which engine, in how many bytes. On a
    GPU, vLLM takes at least what it needs, and more for its cache if so much is free."""
    engine = engine_for(home, device)
    if engine == "vllm" and device.kind == "cuda":
        loaded = LoadedModel(
            ref.facts,
            precision="bfloat16",
            quantization="none",
            lora_rank=_USUAL_RANK,
            lora_targets=ref.facts.targets,
        )
        length = served_length(home, ref)
        least_bytes, wished_bytes = servers.deployed_bytes(loaded, length, device.memory_total)
        memory_bytes = max(least_bytes, min(wished_bytes, device.memory_free))
        return Placement(device, engine, int(memory_bytes))
    return Placement(device, engine, servers.plain_bytes(ref.facts.params, engine, device.kind))


def engine_for(home: Home, device: Device) -> str:
    """Choose the engine for deployments on this device: "torch" (our own sampler) or "vllm".

    `serve_with` = "auto" takes vLLM only on a GPU, if it is set up and its trial on this device did
    not fail: on a CPU it is slower to start and to answer. Raises UserError NO_VLLM if `serve_with`
    is "vllm" and that is not set up.
    """
    engine = home.user_config().serve_with
    if engine == "auto":
        is_set_up = device.kind == "cuda" and vllm_env.find_python(home) is not None
        return "vllm" if is_set_up and not why_off(home, device, "vllm") else "torch"
    if engine == "vllm":
        vllm_env.require_python(home)
    return engine


def _no_room_error(home: Home, best: Placement, name: str, devices: Sequence[Device]) -> UserError:
    """Make the error for a model that fits on no device now: DEVICE_BUSY if the largest device
    could hold the model, else DOES_NOT_FIT. `best` is the placement that lacks least memory."""
    message = f"{name} needs about {best.memory_bytes / 1e9:.1f} GB"
    if best.memory_bytes > max(device.memory_total for device in devices):
        return UserError(
            "DOES_NOT_FIT",
            f"{message}; no device of this machine has that much",
            hint="Serve a smaller model here.",
        )
    free_gb = best.device.memory_free / 1e9
    return UserError(
        "DEVICE_BUSY",
        f"{message}; {free_gb:.1f} GB of {best.device.id} are free{_busy_with(home)}",
        hint=_advice_to_free(home),
        retryable=True,
    )


def _advice_to_free(home: Home) -> Hint:
    """Say how to free a device, with the call that stops the oldest deployment if there is one."""
    text = "Wait for what runs, or stop a deployment; then call again."
    living = deployments.living(home)  # the newest first
    if not living:
        return Hint(text)
    return Hint(text, Call("deploy", {"run_id": living[-1].deployment_id, "action": "stop"}))


def _busy_with(home: Home) -> str:
    """Make the end of a message that names the run which holds the device, such as " while arith-7
    runs, about 90 s more"; "" if there is none."""
    with Store(home.whole) as store:
        rows = store.list_runs(limit=1, states=HOLDS_DEVICE)
    if not rows:
        return ""
    row = rows[0]
    viewer = home.viewer  # whoever asks; None sees everything
    if viewer and not viewer.sees_all and row.owner != viewer.owner:
        return " while a run of another key is under way"  # its name is not for this viewer
    seconds_left = read_progress(home.run(row.run_id), row).eta_s
    remaining = f", about {seconds_left:.0f} s more" if seconds_left else ""
    return f" while {row.run_id} runs{remaining}"
