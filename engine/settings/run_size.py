"""The parts of a run that have to fit into a device, from its settings.

The estimate and the worker both use these functions, so that they agree.
"""

from dataclasses import replace

from engine.environments.env_facts import EnvFacts
from engine.models.model_files import ModelFacts
from engine.models.sizing.layers import LoadedModel, trained_adapter_bytes
from engine.models.sizing.plan import Job
from engine.models.sizing.ranks import training_devices
from engine.records.settings import GRPOSettings, RolloutSettings, TrainSettings
from engine.settings.defaults import SamplingLimits

BETWEEN_TURNS = 32  # assumed tokens of an environment's reply between two turns of the model


def longest_sequence(limits: SamplingLimits, env: EnvFacts) -> int:
    """Return the tokens of the longest sequence that is sampled with these limits.

    Such a sequence has the longest prompt, and every turn is as long as the limits allow.
    """
    turns = limits.max_turns if env.multi_turn else 1
    sampled_tokens = turns * limits.max_tokens + BETWEEN_TURNS * (turns - 1)
    # 0 tokens: no rows were counted, so a prompt may be as long as a sequence.
    longest_prompt = env.longest_prompt or limits.max_length
    return min(limits.max_length, longest_prompt + sampled_tokens)


def loaded_model(settings: TrainSettings, model: ModelFacts) -> LoadedModel:
    """Describe the model with its adapter, as the settings load it."""
    return LoadedModel(
        model,
        precision=settings.precision,
        quantization=settings.quantization,
        lora_rank=settings.lora_rank,
        lora_targets=settings.lora_targets,
        shards=shards(settings),
    )


def shards(settings: TrainSettings) -> int:
    """Return over how many devices the layers of the base model are cut.

    Returns 1 if every device holds the whole base model.
    """
    return settings.gpus - sampling_gpus(settings) if settings.shard_base else 1


def training_job(
    settings: TrainSettings,
    loaded: LoadedModel,
    *,
    kind: str,
    memory: int,
    longest: int,
    teacher: ModelFacts | None = None,
    shares_base: bool = False,
) -> Job:
    """Describe what of a training run has to fit into a device.

    Args:
        settings: the settings of the run.
        loaded: the model with its adapter.
        kind: the kind of the device, "cpu" or "cuda".
        memory: bytes of the device that may be used.
        longest: tokens of the longest sequence that is sampled.
        teacher: the local model that teaches a distillation; None for every other run.
        shares_base: whether the teacher has the same base model, so that only an adapter is loaded.
    """
    adapter_bytes = trained_adapter_bytes(loaded, kind)
    float32_copy_bytes = loaded.adapter * 4  # `adapter` is its number of parameters
    sampling_only = sampling_gpus(settings)
    if isinstance(settings, GRPOSettings) and settings.async_sampling and not sampling_only:
        adapter_bytes += float32_copy_bytes  # a second adapter samples while the first is trained
    teacher_weights = 0.0
    if teacher is not None:
        adapter_bytes += float32_copy_bytes  # the teacher's adapter, assumed to have the same shape
        if not shares_base:
            teacher_weights = replace(loaded, model=teacher).weights
    return Job(
        loaded,
        kind=kind,
        memory=memory,
        longest=min(longest, loaded.model.max_positions),
        recomputes=settings.gradient_checkpointing,
        adapter_bytes=adapter_bytes,
        other_weights=teacher_weights,
        wants_server=wants_server(settings),
        sampling_gpus=sampling_only,
    )


def wants_server(settings: TrainSettings) -> bool:
    """Return whether the settings choose a vLLM server as the sampler."""
    return isinstance(settings, RolloutSettings) and settings.sampler == "vllm"


def roles(settings: TrainSettings) -> dict[str, object]:
    """Return what the devices of a run do, as fields of an estimate.

    `sampling` is how many devices only sample, `shard_base` that the base model is cut over the
    devices. Returns {} if every device samples and trains with the whole model.
    """
    sampling_only = sampling_gpus(settings)
    fields: dict[str, object] = {"sampling": sampling_only} if sampling_only else {}
    if settings.shard_base:
        fields["shard_base"] = True
    return fields


def sampling_gpus(settings: TrainSettings) -> int:
    """Return how many of a run's devices do nothing but sample.

    Returns 0 if the devices that train also sample.
    """
    samples_beside = isinstance(settings, GRPOSettings) and settings.async_sampling
    return settings.gpus - training_devices(settings.gpus, beside=samples_beside)
