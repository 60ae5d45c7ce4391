"""A vLLM server is planned where it has room beside training; elsewhere the reason is given."""

from dataclasses import replace

import pytest

from engine.dry_run.gpu_plans import MODELS, TASKS, machine
from engine.models.sizing import servers
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.plan import Job
from engine.records.settings import GRPOSettings
from engine.settings import resolution

GIB = 1 << 30


def job(model: str, memory: int, longest: int = 1536) -> Job:
    facts = MODELS[model]
    loaded = LoadedModel(facts, "bfloat16", "none", 16, facts.targets)
    return Job(loaded, "cuda", memory * GIB, longest, wants_server=True)


@pytest.mark.parametrize(
    ("model", "memory"), [("Qwen3-4B", 24), ("Qwen3-8B", 40), ("Qwen3-32B", 140)]
)
def test_pairs_without_room_for_a_second_copy_use_our_own_sampler(model: str, memory: int):
    found = job(model, memory)
    assert not found.has_server and "once more" in found.server.why_not
    assert found.sampler_rows > 0 and found.asleep_bytes == 0


@pytest.mark.parametrize(
    ("model", "memory", "rows"),
    [("Qwen3-0.6B", 24, 80), ("Qwen3-4B", 80, 250), ("Qwen3-4B", 140, 500)],
)
def test_pairs_with_room_get_many_sequences(model: str, memory: int, rows: int):
    found = job(model, memory)
    assert found.has_server and found.sampler_rows == found.server.rows >= rows


def test_a_server_is_granted_what_training_leaves_but_for_a_reserve():
    found = job("Qwen3-4B", 80)
    held = servers.trainer_bytes(found.loaded, found.adapters)
    assert found.server.bytes == 80 * GIB - held - 3e9


@pytest.mark.parametrize(
    ("model", "memory", "gpus", "cut"),
    [
        ("Qwen3-8B", 80, 2, 1),  # a copy on each
        ("Qwen3-32B", 80, 3, 1),
        ("Llama-3.3-70B", 80, 4, 2),  # two copies, each on two
        ("Llama-3.3-70B", 80, 3, 0),  # three do not divide its 8 key heads
        ("Llama-3.3-70B", 48, 4, 4),
    ],
)
def test_a_server_with_gpus_to_itself_is_cut_over_as_few_as_hold_it(
    model: str, memory: int, gpus: int, cut: int
):
    alone = replace(job(model, memory), sampling_gpus=gpus)
    assert alone.has_server == bool(cut) and alone.asleep_bytes == 0
    assert not cut or alone.server.gpus_of_model == cut
    assert alone.server.bytes == pytest.approx(0.9 * memory * GIB)


def test_weights_that_would_not_fit_into_the_machine_asleep_are_a_reason():
    found = replace(job("Qwen3-8B", 80), ram=24 * GIB)
    assert "machine's memory" in found.server.why_not


def test_the_default_sampler_says_why_it_is_not_vllm():
    task = TASKS["GRPO, 64 x 8, 512 + 1,024"]
    for memory, sampler in ((24, "torch"), (80, "vllm")):
        found = resolution.resolve(
            "grpo",
            task.given,
            model=MODELS["Qwen3-4B"],
            env=task.env,
            hardware=machine(memory),
            vllm=True,
        )
        assert isinstance(found.settings, GRPOSettings)
        assert found.settings.sampler == sampler
        said = [warning for warning in found.warnings if "not vLLM" in warning]
        assert len(said) == (1 if sampler == "torch" else 0)
