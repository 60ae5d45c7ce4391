"""The tools a loop works with, made ready in one place: base, renderer, environment, sampler."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from engine.core.hardware import detect
from engine.core.hints import Call, Hint
from engine.cost import flops
from engine.environments.env_facts import env_facts
from engine.environments.registry import EnvRecord, find_env, open_process, read_tasks
from engine.records.run_config import (
    EvaluateConfig,
    GRPOConfig,
    ProbeConfig,
    RegradeConfig,
    RunConfig,
    SFTConfig,
)
from engine.settings import defaults
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.core.limits import AnswerLimits, EvaluationLimits
from engine.worker.network.policy import Base, load_base, pick_device
from engine.worker.network.sampler import Sampler, SamplerNeeds
from engine.worker.rollouts import samplers
from engine.worker.rollouts.collect import RolloutContext
from engine.worker.rollouts.renderer import Renderer
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

# Completions under way at once; beyond it a CPU gains nothing and a cache only grows.
CPU_ROWS, GPU_ROWS = 256, 512


@dataclass(frozen=True)
class Components:
    """Everything that is loaded once per worker."""

    base: Base
    renderer: Renderer
    sampler: Sampler
    env: EnvRecord

    def context(self, process: EnvProcess, limits: AnswerLimits) -> RolloutContext:
        """What rollouts in the environment's `process` need."""
        return RolloutContext(
            process=process,
            renderer=self.renderer,
            multi_turn=self.env.kind == "multi",
            tools=self.env.tools,
            max_length=limits.max_length,
            max_turns=limits.max_turns,
        )


@dataclass(frozen=True)
class Loading:
    """How a base model is loaded: number format, bits, optimizer steps ahead, think blocks."""

    precision: str = "auto"
    quantization: str = "none"
    steps: int = 0
    thinking: bool = False


def loading_of(config: RunConfig) -> Loading:
    """How the run of `config` loads its base model; evaluations load it as it comes."""
    match config:
        case SFTConfig(settings=settings):
            return Loading(settings.precision, settings.quantization, settings.steps)
        case GRPOConfig(settings=settings) | ProbeConfig(settings=settings):
            return Loading(
                settings.precision, settings.quantization, settings.steps, settings.thinking
            )
        case EvaluateConfig(settings=settings):
            return Loading(thinking=settings.thinking)
        case RegradeConfig():
            raise ValueError("stored answers are scored again without a model")


def prepare(job: Job[RunConfig], base_path: Path) -> Components:
    """Load the base model and find the environment of a run.

    Raises:
        WorkerFailure: kind config when the model cannot be loaded, env_import when the
            environment is gone.
    """
    set_threads()
    device = pick_device(job.device)
    loading = loading_of(job.config)
    base = load_base(
        base_path,
        device,
        loading.precision,
        loading.quantization,
        compared=job.run.home.comparisons,
        steps=loading.steps,
    )
    if base.network.kernels_why:
        job.event(
            "kernels",
            f"torch's own functions are used: {base.network.kernels_why}",
            kernels=base.network.kernels,
        )
    renderer = Renderer(base.tokenizer, base.stop_ids, thinking=loading.thinking)
    sampler = samplers.make_sampler(job, base, sampler_needs(base, renderer))
    return Components(base, renderer, sampler, pinned_env(job))


def pinned_env(job: Job[RunConfig]) -> EnvRecord:
    return find_env(job.run.home, job.config.env_id)


def make_sampler(base: Base, renderer: Renderer) -> Sampler:
    """Our own sampler."""
    return base.network.sampler(sampler_needs(base, renderer))


def sampler_needs(base: Base, renderer: Renderer) -> SamplerNeeds:
    return SamplerNeeds(base.pad_id, base.stop_ids, renderer.completion_text, sampler_rows(base))


def sampler_rows(base: Base) -> int:
    """Completions under way at once: as many as help, while their caches, at the length a model
    of this context commonly reaches, stay within a quarter of the memory."""
    shape, device = base.network.shape, base.network.device
    width = 2 * shape.layers * shape.kv * shape.head_dim * base.network.dtype.itemsize
    cache = width * min(shape.context, 4096)
    most = GPU_ROWS if device.type == "cuda" else CPU_ROWS
    return int(max(8, min(most, 0.25 * memory(device) / cache)))


@contextmanager
def environment(components: Components, job: Job[RunConfig]) -> Iterator[EnvProcess | None]:
    """The environment's process, started, or nothing for a dataset without a scorer.

    Raises:
        WorkerFailure: kind env_import.
    """
    if not components.env.scored:
        yield None
        return
    with open_process(components.env, log=job.run.logs / "environment.log") as process:
        try:
            process.describe()
        except EnvProblem as problem:
            raise WorkerFailure(
                "env_import",
                f"The environment {components.env.env_id} could not be started.",
                evidence=str(problem),
                hint=Hint(
                    "Mend what a dry run names, push again, submit with the new id.",
                    Call("dry_run", {"env_id": components.env.env_id}),
                ),
            ) from problem
        yield process


def tasks_of(components: Components, split: str) -> list[TaskRow]:
    """The task rows of `split`, train or heldout."""
    return read_tasks(components.env, split)


def evaluation_limits(job: Job[SFTConfig], components: Components) -> EvaluationLimits:
    """How long answers may get in the evaluations of SFT (defaults.exam_limits)."""
    config, context = job.config, components.base.network.shape.context
    facts = env_facts(job.run.home, components.env, Path(config.base.path))
    limits = defaults.exam_limits(facts, context, config.settings.max_length)
    return EvaluationLimits(limits.max_tokens, limits.max_turns, limits.max_length)


def microbatch_tokens(base: Base, *, checkpointing: bool) -> int:
    """Padded tokens that go through the model at once.

    From the machine's whole memory, not what is free, so that a resumed run splits its batches
    the same way and adds its gradients up in the same order.
    """
    shape, device = base.network.shape, base.network.device
    tokens = flops.tokens_at_once(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        vocab=base.vocab,
        checkpointing=checkpointing,
        kind=device.type,
        memory=memory(device),
    )
    return int(tokens)


def memory(device: torch.device) -> int:
    """Bytes of the device, a container's limit respected."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return detect().ram_total


def quiet_libraries() -> None:
    """Keep progress bars and deprecation notes of the libraries out of the console log: what
    stands there is read for the reason of a failure."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")


def set_threads() -> None:
    """As many threads as there are cores to run on, which in a container is not cpu_count()."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
