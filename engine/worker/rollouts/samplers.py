"""Chooses the sampler of a run by its setting `sampler`: our own, or a vLLM server started for
it."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.core.hardware import detect
from engine.machine.install import vllm_env
from engine.machine.processes.trainer_variables import visible_devices
from engine.machine.processes.vllm_process import Plan, VllmProcess, rank_limit
from engine.models.sizing import plan as sizing
from engine.models.sizing import servers
from engine.records.run_config import RunConfig
from engine.records.settings import RolloutSettings
from engine.worker.core import switched_off
from engine.worker.core.job import Job
from engine.worker.network.policy import Base
from engine.worker.network.sampler import Sampler, SamplerNeeds
from engine.worker.rollouts.vllm_sampler import VllmSampler

CPU_CACHE_BYTES = 2**30  # memory for keys and values on a CPU
LEAST_CONTEXT = 1024  # every server is started with room for so many tokens at least


def make_sampler(job: Job[RunConfig], base: Base, needs: SamplerNeeds, size: sizing.Job) -> Sampler:
    """Make the sampler that the setting `sampler` names, `vllm` or our own; runs without that
    setting use our own. A vLLM server is started here, but only waited for when it is first used.

    Our own sampler is used, and the event `sampler` says why, if the GPU has no room for vLLM or
    vLLM was tried and failed (engine/machine/fast_paths).

    Args:
        base: the loaded base model.
        needs: what every sampler has to know, such as the ids that end a completion.
        size: the parts of the run that have to fit into the device.

    Raises:
        UserError: NO_VLLM, if vLLM is asked for and not set up.
    """
    if not wants_server(job.config) or why_no_server(job, size):
        sampler = base.network.sampler(needs)
        if why := base.network.capture_why:
            job.event("sampler", f"steps of sampling are not captured: {why}", sampler="torch")
        return sampler
    return start_vllm(job, base, needs, size)


def wants_server(config: RunConfig) -> bool:
    """Tell whether the settings of a run name a vLLM server as its sampler."""
    settings = config.settings
    return isinstance(settings, RolloutSettings) and settings.sampler == "vllm"


def why_no_server(job: Job[RunConfig], size: sizing.Job) -> str:
    """Return why the vLLM server that the settings name cannot be used: its GPU has no room beside
    the run (`size`), or it was tried there and failed (engine/machine/fast_paths). The event
    `sampler` says so too. Returns "" if it can be used."""
    why_not = size.server.why_not if size.kind == "cuda" else ""
    if switched_off.is_off("vllm"):
        why_not = f"vLLM is switched off on this device: {switched_off.why_off('vllm')}"
    if why_not:
        job.event("sampler", f"our own sampler is used: {why_not}", sampler="torch")
    return why_not


def start_vllm(
    job: Job[RunConfig],
    base: Base,
    needs: SamplerNeeds,
    size: sizing.Job,
    devices: Sequence[str] = (),
) -> VllmSampler:
    """Start a vLLM server for this run only, which logs into the run's folder. Returns at once,
    with a sampler that waits for the server at its first use; a cancelled run ends that wait.

    Args:
        base: the loaded base model, whose files the server reads itself.
        needs: what every sampler has to know, such as the ids that end a completion.
        size: the parts of the run that have to fit into the device.
        devices: ids of devices that the server has to itself; () for this process's device, which
            it shares.
    """
    rank = int(os.environ.get("HONESMITH_RANK") or 0)  # each rank has a server on its own GPU
    log = job.run.rank_vllm_log(rank) if rank else job.run.vllm_log
    folder = job.run.rank_sampled_adapters(rank) if rank else job.run.sampled_adapters
    plan = run_plan(job, base, needs, size)
    if devices and plan.device == "cuda":
        plan = plan_beside(plan, size, devices)
        job.event("sampler", f"vLLM samples on {', '.join(devices)}", sampler="vllm")
    server = VllmProcess(plan, log)
    return VllmSampler(
        server,
        folder=folder,
        stop_ids=needs.stop_ids,
        vocab=base.vocab,  # how many ids have a token
        model_vocab=base.network.shape.vocab,  # columns of its logits, padding included
        on_wait=job.check_stop,  # raises Stopped
    )


def plan_beside(plan: Plan, size: sizing.Job, devices: Sequence[str]) -> Plan:
    """Return the plan of a server that has the GPUs `devices` to itself and keeps their memory. It
    runs as many copies of the model as the GPUs have room for, each on as many GPUs as it needs
    (`size` says how many)."""
    gpus_per_copy = size.server.gpus_of_model
    return replace(
        plan,
        visible=visible_devices(",".join(devices)),
        memory=servers.ALONE_SHARE,
        sleeps=False,
        tensor_parallel=gpus_per_copy,
        data_parallel=len(devices) // gpus_per_copy,
    )


def run_plan(job: Job[RunConfig], base: Base, needs: SamplerNeeds, size: sizing.Job) -> Plan:
    """Return the settings with which a run's vLLM server is started.

    It computes in the trainer's number format. On a CPU that is float32, in which the
    log-probabilities of sampler and trainer agree to 1e-5; with bfloat16 they would agree only to
    0.003.

    Args:
        base: the model to serve.
        needs: says how many completions are sampled at once.
        size: says how much memory was planned for the server.

    Raises:
        UserError: NO_VLLM, if vLLM is not set up.
    """
    settings = job.config.settings
    assert isinstance(settings, RolloutSettings)  # no other settings name a server
    on_gpu = base.network.device.type == "cuda"
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[base.network.dtype]
    memory = _memory_share(size, base.network.device) if on_gpu else float(CPU_CACHE_BYTES)
    # Held-out prompts may be longer than those trained on, within the model's context.
    max_length = max(2 * settings.max_length, LEAST_CONTEXT)
    return Plan(
        python=vllm_env.require_python(job.run.home),
        model=base.path,
        device="cuda" if on_gpu else "cpu",
        dtype=dtype,
        max_length=min(base.network.shape.context, max_length),
        rows=needs.max_rows,
        lora_rank=rank_limit(settings.lora_rank),
        sleeps=on_gpu,  # frees the GPU's memory while the policy is updated
        memory=memory,  # on a GPU a share of its memory, else bytes
        threads=cpu_threads(),
    )


def _memory_share(size: sizing.Job, device: torch.device) -> float:
    """Return the share of a GPU's memory that vLLM may take: what was planned for it (`size`), but
    no more than is free now minus a reserve for training."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    granted = min(size.server.bytes, free_bytes - servers.TRAINER_RESERVE)
    return granted / total_bytes


def cpu_threads() -> int:
    """Return how many threads a vLLM server on a CPU uses: the value of OMP_NUM_THREADS if it is a
    positive number, otherwise one per core."""
    from_user = os.environ.get("OMP_NUM_THREADS", "")
    if from_user.isdigit() and int(from_user) > 0:
        return int(from_user)
    return max(1, detect().cores)
