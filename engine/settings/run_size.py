"""What of a run has to fit into a device, from its settings: the same for estimate and worker."""

from dataclasses import replace

from engine.environments.env_facts import EnvFacts
from engine.models.model_files import ModelFacts
from engine.records.settings import GRPOSettings, RolloutSettings, TrainSettings
from engine.settings.defaults import SamplingLimits
from engine.sizing.layers import LoadedModel, trained_adapter_bytes
from engine.sizing.plan import Job
from engine.sizing.ranks import training_devices

BETWEEN_TURNS = 32  # tokens that an environment says between two turns, as a guess


def longest_sequence(limits: SamplingLimits, env: EnvFacts) -> int:
    """Return the tokens of the longest sequence that is sampled with these limits.

    It is the longest prompt, and every turn as long as it may get.
    """
    turns = limits.max_turns if env.multi_turn else 1
    sampled_tokens = turns * limits.max_tokens + BETWEEN_TURNS * (turns - 1)
    longest_prompt = env.longest_prompt or limits.max_length  # 0: no rows were counted
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
    """Over how many devices the layers of the base are cut; 1 where each has all of it."""
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
        settings: those of the run.
        loaded: the model with its adapter.
        kind, memory: of the device: "cpu" or "cuda", and the bytes that may be used.
        longest: tokens of the longest sequence that is sampled.
        teacher: the local model that teaches a distillation; None for every other run.
        shares_base: whether nothing but an adapter is loaded for the teacher.
    """
    adapter_bytes = trained_adapter_bytes(loaded, kind)
    float32_copy_bytes = loaded.adapter * 4
    beside = sampling_gpus(settings)
    if isinstance(settings, GRPOSettings) and settings.async_sampling and not beside:
        adapter_bytes += float32_copy_bytes  # the one that samples while the other is trained
    teacher_weights = 0.0
    if teacher is not None:
        adapter_bytes += float32_copy_bytes  # the teacher's, taken to be of the same shape
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
        sampling_gpus=beside,
    )


def wants_server(settings: TrainSettings) -> bool:
    """Whether the settings name a vLLM server as the sampler."""
    return isinstance(settings, RolloutSettings) and settings.sampler == "vllm"


def roles(settings: TrainSettings) -> dict[str, object]:
    """What the devices of a run do, as an estimate shows it; {} where all do the same."""
    beside = sampling_gpus(settings)
    shown: dict[str, object] = {"sampling": beside} if beside else {}
    return shown | ({"shard_base": True} if settings.shard_base else {})


def sampling_gpus(settings: TrainSettings) -> int:
    """How many of a run's devices do nothing but sample; 0 where those that train sample too."""
    beside = isinstance(settings, GRPOSettings) and settings.async_sampling
    return settings.gpus - training_devices(settings.gpus, beside=beside)
