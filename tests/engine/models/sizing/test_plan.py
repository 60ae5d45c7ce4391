"""Rows and microbatches on a device: as many as fit, and a run is refused only below the least."""

from dataclasses import replace

import pytest

from engine.cost import memory as footprint
from engine.dry_run.gpu_plans import (
    CHANGES,
    GPUS,
    MODELS,
    TASKS,
    Cell,
    fewest_shards,
    machine,
    plan_task,
)
from engine.models.sizing import layers
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.plan import LEAST_ROWS, MICRO_CEILING, MICRO_FLOOR, MOST_ROWS, Job

GIB = 1 << 30
EVERY = [(model, gpu) for model in MODELS for gpu in GPUS]


def loaded(model: str) -> LoadedModel:
    facts = MODELS[model]
    return LoadedModel(facts, "bfloat16", "none", 16, facts.targets)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_admitted_fits_and_what_is_refused_does_not(model: str, task: str):
    for memory in GPUS.values():
        for change in CHANGES:
            cell = plan_task(TASKS[task], MODELS[model], machine(memory), change)
            total = cell.plan.device.memory_total
            assert cell.is_admitted == (cell.least.total <= 0.92 * total)
            assert cell.least.total <= cell.memory.total
            if cell.is_admitted:  # and what the worker then does fits too
                assert cell.memory.total <= total
            else:  # it takes no more than it must
                assert cell.memory.total == cell.least.total


def itemised_minimum(cell: Cell) -> float:
    """Weights and adapter, and beside them the larger of a training pass of the longest row (or 512
    tokens) and of one sampled row; from the sizes of single layers alone."""
    plan, loaded = cell.plan, cell.plan.loaded
    longest = plan.env.lengths[0].total
    tokens = max(512, longest)
    recomputes = plan.settings.gradient_checkpointing
    if loaded.own_forward:
        token = layers.trained_token_bytes(loaded, "cuda", recomputes=recomputes, length=longest)
    else:
        token = layers.foreign_token_bytes(plan.model, recomputes=recomputes)
    trained = tokens * token + layers.trained_logit_bytes(plan.model, "cuda", tokens)
    sampled = sum(layers.sampled_row_bytes(loaded, "cuda", longest))
    held = loaded.weights + layers.trained_adapter_bytes(loaded, "cuda")
    return (
        held + max(trained, sampled) + layers.overhead_bytes("cuda", held + max(trained, sampled))
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", MODELS)
def test_the_least_memory_is_the_itemised_minimum_on_every_gpu(model: str, task: str):
    for change in CHANGES:
        cell = plan_task(
            TASKS[task], MODELS[model], machine(140), change
        )  # with vLLM, if it may be
        minimum = itemised_minimum(cell)
        for gib in GPUS.values():
            device = replace(cell.plan.device, memory_total=gib * GIB, memory_free=gib * GIB)
            on_gpu = footprint.least_memory(replace(cell.plan, device=device))
            assert on_gpu == cell.least
            assert on_gpu.total == pytest.approx(minimum, rel=1e-6)


def test_a_server_is_not_planned_where_training_has_no_room_beside_it_asleep():
    """Long rows: one fits beside the weights, but not with 2 GB less."""
    job = Job(loaded("Qwen3-4B"), "cuda", 80 * GIB, longest=16_000, wants_server=True)
    least = job._least_training_bytes()
    tight = replace(job, memory=int((least + 1e9) / 0.92))
    assert not tight.has_server and "asleep takes" in tight.server.why_not
    assert replace(job, memory=int((least + 2.1e9) / 0.92)).has_server


@pytest.mark.parametrize(
    ("model", "memory", "task"),
    [
        ("Qwen3-0.6B", 12, "GRPO, 16 x 8, 512 + 512"),
        ("Qwen3-4B", 16, "GRPO, 16 x 8, 512 + 512"),
        ("Qwen3-8B", 24, "GRPO, 64 x 8, 512 + 1,024"),
        ("Qwen3-8B", 80, "GRPO, 64 x 8, 512 + 1,024"),
        ("Qwen3-32B", 80, "SFT, rows of 2,048"),
        ("Qwen3-32B", 140, "GRPO, 64 x 8, 512 + 1,024"),
    ],
)
def test_runs_that_fit_on_a_gpu_are_not_refused(model: str, memory: int, task: str):
    cells = [plan_task(TASKS[task], MODELS[model], machine(memory), each) for each in CHANGES[:2]]
    assert any(cell.is_admitted for cell in cells)


def test_a_70b_model_is_refused_where_not_even_its_4_bits_fit():
    for change in CHANGES:
        cell = plan_task(TASKS["SFT, rows of 2,048"], MODELS["Llama-3.3-70B"], machine(40), change)
        assert not cell.is_admitted


def test_a_70b_model_is_admitted_where_its_layers_are_sharded():
    model, task = MODELS["Llama-3.3-70B"], TASKS["SFT, rows of 2,048"]
    cell = fewest_shards(task, model, machine(80))
    assert cell is not None and cell.plan.settings.gpus == 4
    share = cell.memory.weights / (2 * model.params)
    assert 0.25 < share < 0.31  # a quarter of the layers, two of them whole, and what is outside
    assert fewest_shards(task, model, machine(12)) is None


@pytest.mark.parametrize(("model", "gpu"), EVERY)
def test_rows_and_microbatches_grow_with_memory_within_their_bounds(model: str, gpu: str):
    memory = GPUS[gpu] * GIB
    job = Job(loaded(model), "cuda", memory, longest=1024)
    larger = replace(job, memory=2 * memory)
    assert LEAST_ROWS["cuda"] <= job.sampler_rows <= larger.sampler_rows <= MOST_ROWS["cuda"]
    tokens = job.microbatch_tokens
    assert MICRO_FLOOR <= tokens <= larger.microbatch_tokens <= MICRO_CEILING["cuda"]


def test_rows_follow_from_real_lengths():
    """At a fixed length of 4,096 a 4B model got 10, 35 and 62 rows on these three."""
    rows = [
        Job(loaded("Qwen3-4B"), "cuda", memory * GIB, longest=1024).sampler_rows
        for memory in (24, 80, 140)
    ]
    assert rows[0] > 50 and rows[1] > 300 and rows[2] == 512


def test_a_group_of_the_usual_size_shares_its_prompt_in_one_microbatch():
    """64 x 8 of 512 + 1,024 at 4B on an H200 was one row at a time before."""
    job = Job(loaded("Qwen3-4B"), "cuda", 140 * GIB, longest=1536, wants_server=True)
    assert job.microbatch_tokens > 2 * (512 + 8 * 1024)


def test_a_cpu_keeps_its_rows_and_microbatches():
    facts = MODELS["Qwen3-0.6B"]
    full = LoadedModel(facts, "float32", "none", 16, facts.targets)
    job = Job(full, "cpu", 16 * GIB, longest=1024)
    token_bytes = 2 * 28 * 8 * 128 * 4
    assert job.sampler_rows == max(8, int(0.25 * 16 * GIB / (token_bytes * 4096)))
    per_layer = 18 * 1024 + 5 * 3072
    per_token = 4 * (28 * per_layer + 4 * 1024) + 12 * 151936
    assert job.microbatch_tokens == max(512, min(1024, 0.25 * 16 * GIB / per_token))


def test_a_teacher_and_a_sleeping_server_leave_less():
    job = Job(loaded("Qwen3-4B"), "cuda", 24 * GIB, longest=1024)
    taught = replace(job, other_weights=4e9)
    assert taught.sampler_rows < job.sampler_rows
    assert taught.microbatch_tokens < job.microbatch_tokens
    alone, beside = (replace(job, memory=48 * GIB, wants_server=each) for each in (False, True))
    assert beside.has_server and beside.microbatch_tokens < alone.microbatch_tokens


def test_the_least_memory_is_that_of_one_row():
    cell = plan_task(TASKS["GRPO, 16 x 8, 512 + 512"], MODELS["Qwen3-8B"], machine(24), CHANGES[1])
    least = footprint.least_memory(cell.plan)
    assert least.kv_cache == pytest.approx(1024 * 147456, rel=0.05)
