"""How much memory a process may use, and the sizes of what it has to fit into that: the same
numbers as the estimate of its run used.

The memory counted is the device's, less what others hold, and not what is free at some moment: a
resumed run then splits its batches the same way and adds up its gradients in the same order.
"""

from dataclasses import replace
from pathlib import Path

import torch

from engine.core.hardware import detect
from engine.environments.env_facts import EnvFacts, env_facts
from engine.environments.registry import EnvRecord
from engine.models.model_files import read_facts
from engine.models.sizing import plan as sizing
from engine.models.sizing.layers import LoadedModel
from engine.records.run_config import (
    DistillConfig,
    DPOConfig,
    EvaluateConfig,
    GRPOConfig,
    LocalTeacher,
    ProbeConfig,
    PromptConfig,
    RunConfig,
    SFTConfig,
)
from engine.records.settings import (
    DPOSettings,
    EvaluationSettings,
    PromptSettings,
    SFTSettings,
    TrainSettings,
)
from engine.settings import defaults, run_size
from engine.settings.defaults import SamplingLimits
from engine.worker.core.job import Job
from engine.worker.network.policy import Base

# Memory that others hold does not count up to this share of a GPU: the driver's own, a desktop's.
_NEGLIGIBLE_SHARE = 0.02


def size_of_run(job: Job[RunConfig], base: Base, env: EnvRecord, memory: int) -> sizing.Job:
    """Describe what a run has to fit into its device's memory: model, adapter and longest sequence.

    Raises ValueError for a regrade, which loads no model and so has no size.

    Args:
        job: the run, with its configuration.
        base: its base model, loaded.
        env: its environment, whose rows decide the lengths.
        memory: bytes of the device that the run may use, see `usable_bytes`.
    """
    config = job.config
    # On a CPU rows and microbatches do not depend on lengths, and need no rows to be counted.
    facts = _row_facts(job, env) if base.network.device.type == "cuda" else None
    if isinstance(config, SFTConfig | DPOConfig | GRPOConfig | DistillConfig):
        size = _training_size(config, base, facts, memory)
    elif isinstance(config, EvaluateConfig | ProbeConfig | PromptConfig):
        size = size_of_answers(base, memory, _longest_sequence(config.settings, facts, base))
    else:
        raise ValueError("stored answers are scored again without a model")
    # Which forward pass the loaded model has; without this, its family decides.
    return replace(size, own_forward=base.network.forward == "own")


def _row_facts(job: Job[RunConfig], env: EnvRecord) -> EnvFacts | None:
    """Collect facts about the environment's rows, such as their lengths in tokens of the run's
    model. Returns None for a run that loads no model."""
    home, config = job.run.home, job.config
    match config:
        case SFTConfig():
            return env_facts(home, env, Path(config.base.path), thinking=config.settings.thinking)
        case GRPOConfig() | DistillConfig():
            return env_facts(home, env, Path(config.base.path), thinking=config.settings.thinking)
        case DPOConfig():  # pairs are trained as they are written, reasoning included
            return env_facts(home, env, Path(config.base.path), thinking="keep")
        case EvaluateConfig() | ProbeConfig() | PromptConfig():
            return env_facts(home, env, Path(config.models[0].base_path))
        case _:
            return None


def _training_size(
    config: SFTConfig | DPOConfig | GRPOConfig | DistillConfig,
    base: Base,
    facts: EnvFacts | None,
    memory: int,
) -> sizing.Job:
    """Describe what a training run has to fit into its device's memory.

    `facts` are about the environment's rows, None on a CPU; `memory` is in bytes.
    """
    settings = config.settings
    teacher, shares_base = None, False
    if isinstance(config, DistillConfig) and isinstance(config.teacher, LocalTeacher):
        # A teacher on the same base needs no second copy of the weights.
        shares_base = Path(config.teacher.base_path) == base.path
        teacher = read_facts(Path(config.teacher.base_path))
    return run_size.training_job(
        settings,
        replace(
            _loaded_model(base),
            quantization=settings.quantization,
            lora_rank=settings.lora_rank,
            lora_targets=settings.lora_targets,
            shards=run_size.shards(settings),
        ),
        kind=base.network.device.type,
        memory=memory,
        longest=_longest_sequence(settings, facts, base),
        teacher=teacher,
        shares_base=shares_base,
    )


def _longest_sequence(
    settings: TrainSettings | EvaluationSettings | PromptSettings,
    facts: EnvFacts | None,
    base: Base,
) -> int:
    """Return how many tokens the longest sequence has that the run samples.

    SFT and DPO sample in the exams (evaluations on held-out tasks) alone. How long the answers of
    those may be is no setting of theirs; it is worked out from the environment. The result is the
    model's whole context if `facts` about the environment's rows is None.
    """
    context = base.network.shape.context
    if facts is None:
        return context
    if isinstance(settings, SFTSettings | DPOSettings):
        must_think = isinstance(settings, SFTSettings) and settings.thinking == "require"
        limits = defaults.exam_limits(facts, context, settings.max_length, thinking=must_think)
    else:
        limits = SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length)
    return run_size.longest_sequence(limits, facts)


def size_of_answers(base: Base, memory: int, longest: int) -> sizing.Job:
    """Describe what has to fit into the device's memory if a model only answers, with sequences of
    up to `longest` tokens. `memory` is in bytes."""
    return sizing.Job(
        _loaded_model(base),
        kind=base.network.device.type,
        memory=memory,
        longest=longest,
        trains=False,
        own_forward=base.network.forward == "own",
    )


def _loaded_model(base: Base) -> LoadedModel:
    """Describe the loaded base for the memory plan: its sizes and number format, not quantized, and
    with an adapter of the usual rank 16."""
    facts = read_facts(base.path)
    precision = "float32" if base.network.dtype == torch.float32 else "bfloat16"
    return LoadedModel(
        facts, precision, quantization="none", lora_rank=16, lora_targets=facts.targets
    )


def limit_gpu_memory(device: torch.device, memory: int) -> int:
    """Let this process take at most `memory` bytes of a GPU that other runs use too. An allocation
    beyond that fails in this process and not in theirs. Returns `memory`."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
    return memory


def usable_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that this process may use. On a CPU that is the
    machine's memory, or a container's limit; on a GPU its memory, less what other processes hold.
    Call this before the process takes any, because its own use would count as that of others."""
    machine = detect()
    if device.type != "cuda":
        return machine.ram_total
    gpu = machine.device
    if gpu.kind != "cuda":  # the driver's library does not answer; torch does
        return torch.cuda.get_device_properties(device).total_memory
    held_by_others = gpu.memory_total - gpu.memory_free
    # A small use counts as none, so that a resumed run gets exactly the same number again.
    if held_by_others <= _NEGLIGIBLE_SHARE * gpu.memory_total:
        return gpu.memory_total
    return gpu.memory_free
