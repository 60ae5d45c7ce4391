"""Which sampler a run gets, by its setting `sampler`: our own, or a vLLM server started for it."""

import os

import torch

from engine.core.hardware import detect
from engine.install import vllm_env
from engine.processes.vllm_process import Plan, VllmProcess, rank_limit
from engine.records.run_config import RunConfig
from engine.records.settings import GRPOSettings
from engine.worker.core.job import Job
from engine.worker.network.policy import Base
from engine.worker.network.sampler import Sampler, SamplerNeeds
from engine.worker.rollouts.vllm_sampler import VllmSampler

# Of the free memory of a GPU that trains too; the server sleeps while training needs the rest.
SHARED = 0.6
CPU_CACHE = 2**30  # bytes of keys and values on a CPU
LEAST_CONTEXT = 1024


def make_sampler(job: Job[RunConfig], base: Base, needs: SamplerNeeds) -> Sampler:
    """The sampler of a run. A vLLM server is started here and awaited at its first use.

    Raises:
        UserError: NO_VLLM, when it is asked for and not set up.
    """
    settings = job.config.settings
    if not isinstance(settings, GRPOSettings) or settings.sampler != "vllm":
        return base.network.sampler(needs)
    # `job.check_stop` ends the wait for a server when the run is cancelled meanwhile.
    return start_vllm(job, base, settings, needs)


def start_vllm(
    job: Job[RunConfig], base: Base, settings: GRPOSettings, needs: SamplerNeeds
) -> VllmSampler:
    """A vLLM server of this run's own, with its log among the run's."""
    process = VllmProcess(run_plan(job, base, settings, needs), job.run.vllm_log)
    return VllmSampler(
        process,
        folder=job.run.sampled_adapters,
        stop_ids=needs.stop_ids,
        vocab=base.vocab,
        model_vocab=base.network.shape.vocab,
        on_wait=job.check_stop,
    )


def run_plan(job: Job[RunConfig], base: Base, settings: GRPOSettings, needs: SamplerNeeds) -> Plan:
    """How the server of a run is to be run.

    On a CPU it computes in float32 as the trainer does: the log-probabilities of the two then
    agree to 1e-5, with bfloat16 to 0.003. On a GPU it takes the trainer's number format.
    """
    cuda = base.network.device.type == "cuda"
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[base.network.dtype]
    memory = float(CPU_CACHE)
    if cuda:
        free, total = torch.cuda.mem_get_info(base.network.device)
        memory = SHARED * free / total
    # Held-out prompts may be longer than those trained on, within the model's context.
    length = max(2 * settings.max_length, LEAST_CONTEXT)
    return Plan(
        python=vllm_env.require_python(job.run.home),
        model=base.path,
        device="cuda" if cuda else "cpu",
        dtype=dtype,
        max_length=min(base.network.shape.context, length),
        rows=needs.max_rows,
        lora_rank=rank_limit(settings.lora_rank),
        sleeps=cuda,
        memory=memory,
        threads=cpu_threads(),
    )


def cpu_threads() -> int:
    """Threads of a CPU server: OMP_NUM_THREADS where the user set it, else the cores there are."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) > 0 else max(1, detect().cores)
