"""The tools a loop works with, made ready in one place: base, renderer, environment, sampler."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.core.hardware import detect
from engine.core.hints import Call, Hint
from engine.cost import flops
from engine.environments.env_facts import env_facts
from engine.environments.registry import EnvRecord, find_env, open_process, read_tasks
from engine.settings import defaults
from engine.settings.defaults import SamplingLimits
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.network.policy import Base, load_base, pick_device
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.rollouts import samplers
from engine.worker.rollouts.collect import Stage
from engine.worker.rollouts.renderer import Renderer
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess

# Completions under way at once; beyond it a CPU gains nothing and a cache only grows.
CPU_ROWS, GPU_ROWS = 256, 512


@dataclass(frozen=True)
class Workbench:
    """Everything that is loaded once per worker."""

    base: Base
    renderer: Renderer
    sampler: Sampler
    env: EnvRecord

    def stage(self, process: EnvProcess, settings: dict[str, Any]) -> Stage:
        return Stage(
            process=process,
            renderer=self.renderer,
            multi_turn=self.env.kind == "multi",
            tools=self.env.tools,
            max_length=settings["max_length"],
            max_turns=settings.get("max_turns") or 1,
        )


def prepare(job: Job, base_path: Path, settings: dict[str, Any]) -> Workbench:
    """Load the base model and find the environment of a run.

    Raises:
        WorkerFailure: kind config when the model cannot be loaded, env_import when the
            environment is gone.
    """
    set_threads()
    device = pick_device(job.device)
    precision, four_bits = settings.get("precision", "auto"), settings.get("quantization", "none")
    base = load_base(
        base_path,
        device,
        precision,
        four_bits,
        compared=job.run.home.comparisons,
        steps=settings.get("steps") or 0,
    )
    if base.network.kernels_why:
        job.event(
            "kernels",
            f"torch's own functions are used: {base.network.kernels_why}",
            kernels=base.network.kernels,
        )
    renderer = Renderer(base.tokenizer, base.stop_ids, thinking=settings.get("thinking", False))
    sampler = samplers.make_sampler(job, base, settings, sampler_needs(base, renderer))
    return Workbench(base, renderer, sampler, pinned_env(job))


def pinned_env(job: Job) -> EnvRecord:
    return find_env(job.run.home, job.config["env_id"])


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
def environment(bench: Workbench, job: Job) -> Iterator[EnvProcess | None]:
    """The environment's process, started, or nothing for a dataset without a scorer.

    Raises:
        WorkerFailure: kind env_import.
    """
    if not bench.env.scored:
        yield None
        return
    with open_process(bench.env, log=job.run.logs / "environment.log") as process:
        try:
            process.describe()
        except EnvProblem as problem:
            raise WorkerFailure(
                "env_import",
                f"The environment {bench.env.env_id} could not be started.",
                evidence=str(problem),
                hint=Hint(
                    "Mend what a dry run names, push again, submit with the new id.",
                    Call("dry_run", {"env_id": bench.env.env_id}),
                ),
            ) from problem
        yield process


def tasks_of(bench: Workbench, split: str) -> list[dict[str, Any]]:
    return read_tasks(bench.env, split)


def sampling(settings: dict[str, Any], *, greedy: bool, seed: int) -> SamplingParams:
    """How to sample under `settings`; evaluations are greedy unless several attempts are asked."""
    return SamplingParams(
        max_tokens=settings["max_tokens"],
        temperature=0.0 if greedy else settings["temperature"],
        top_p=1.0 if greedy else settings.get("top_p", 1.0),
        stop=tuple(settings.get("stop") or ()),
        seed=seed,
    )


def exam_limits(job: Job, bench: Workbench) -> SamplingLimits:
    """How long answers may get in the exams of SFT (recipe.exam_limits)."""
    facts = env_facts(job.run.home, bench.env, job.base_path)
    return defaults.exam_limits(facts, bench.base.network.shape.context, job.settings["max_length"])


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
