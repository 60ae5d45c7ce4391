"""Writes the page docs/gpus.md: which LoRA training fits on which GPU, and how it would run there.

For every model, GPU and task the settings are chosen as for a user who gives no setting about the
machine. If such a run is refused, three changes are tried in this order: recomputation, weights of
4 bits, and both. All numbers are estimates; nothing was measured on these GPUs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.core.hardware import Device, Hardware
from engine.cost import lowering
from engine.cost import memory as footprint
from engine.cost.flops import Plan
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.models.model_files import ModelFacts
from engine.records.estimate import PeakMemory
from engine.settings import resolution

_GB = 1 << 30
_KEY_HEADS, _HEAD_SIZE = 8, 128  # of all models in the tables


def _dense_model(
    hidden: int, layers: int, heads: int, intermediate: int, vocab: int, context: int, *, tied: bool
) -> ModelFacts:
    """Describe a dense decoder of these sizes in bfloat16, with `_KEY_HEADS` key heads.

    `hidden` is the width of a layer, `intermediate` that of its feed-forward block, `vocab` the
    number of tokens, `context` the longest sequence in tokens; `tied` says whether the output
    shares the weights of the embedding. Norms and biases are not counted as parameters.
    """
    # Four matrices: queries and output, of `heads` heads each, and keys and values.
    attention = 2 * hidden * _HEAD_SIZE * (heads + _KEY_HEADS)
    feed_forward = 3 * hidden * intermediate
    embeddings = vocab * hidden * (1 if tied else 2)
    params = layers * (attention + feed_forward) + embeddings
    return ModelFacts(
        architecture="Qwen3ForCausalLM",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_KEY_HEADS,
        head_dim=_HEAD_SIZE,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        params=params,
        max_positions=context,
        dtype="bfloat16",
        weight_bytes=2 * params,
    )


MODELS = {
    "Qwen3-0.6B": _dense_model(1024, 28, 16, 3072, 151936, 40960, tied=True),
    "Qwen3-1.7B": _dense_model(2048, 28, 16, 6144, 151936, 40960, tied=True),
    "Qwen3-4B": _dense_model(2560, 36, 32, 9728, 151936, 40960, tied=True),
    "Qwen3-8B": _dense_model(4096, 36, 32, 12288, 151936, 40960, tied=False),
    "Qwen3-14B": _dense_model(5120, 40, 40, 17408, 151936, 40960, tied=False),
    "Qwen3-32B": _dense_model(5120, 64, 64, 25600, 151936, 40960, tied=False),
    "Llama-3.3-70B": _dense_model(8192, 80, 64, 28672, 128256, 131072, tied=False),
}
# Name -> memory in GiB as the driver reports it. The machine is assumed to have 1.5 times as much
# memory of its own, and at least 32 GiB.
GPUS = {
    "RTX 3060": 12,
    "RTX 4080": 16,
    "RTX 4090": 24,
    "RTX 5090": 32,
    "A100 40 GB": 40,
    "L40S": 48,
    "H100": 80,
    "RTX PRO 6000": 96,
    "H200": 140,
    "B200": 180,
    "any of this size": 192,
}


@dataclass(frozen=True)
class Task:
    """A run on rows of one length.

    Attributes:
        algorithm: the algorithm.
        given: the settings that the user gives.
        prompt, answer: tokens of the prompt and of the answer of every row.
    """

    algorithm: str
    given: Mapping[str, Any]
    prompt: int
    answer: int

    @property
    def env(self) -> EnvFacts:
        """Facts of an environment with 2,000 such rows for training and 400 held out."""
        total = self.prompt + self.answer
        answer_turn = (self.prompt, total)  # its first token and the one after it
        row = RowLengths(self.prompt, total, turns=(answer_turn,))
        return EnvFacts(
            env_id="rows@0123456789ab",
            kind="single",
            scored=True,
            train_rows=2000,
            heldout_rows=400,
            answered_rows=2000,
            lengths=(row,),
        )


TASKS = {
    "SFT, rows of 2,048": Task("sft", {"max_length": 2048, "batch_size": 16}, 1024, 1024),
    "GRPO, 16 x 8, 512 + 512": Task(
        "grpo", {"prompts_per_step": 16, "group_size": 8, "max_tokens": 512}, 512, 512
    ),
    "GRPO, 64 x 8, 512 + 1,024": Task(
        "grpo", {"prompts_per_step": 64, "group_size": 8, "max_tokens": 1024}, 512, 1024
    ),
}
# Changes of the settings that are tried in this order until a run is admitted.
_RECOMPUTED = {"gradient_checkpointing": True}
_FOUR_BITS = {"quantization": "nf4", "gradient_checkpointing": False}
CHANGES: tuple[Mapping[str, Any], ...] = ({}, _RECOMPUTED, _FOUR_BITS, _FOUR_BITS | _RECOMPUTED)

# Numbers of GPUs over which a base is sharded in the tables, and of which tasks.
SHARDS = (2, 4, 8)
SHARDED_TASKS = ("SFT, rows of 2,048", "GRPO, 16 x 8, 512 + 512")


@dataclass(frozen=True)
class Cell:
    """How a task would run: its plan, the memory it takes, and the least memory it could take."""

    plan: Plan
    memory: PeakMemory
    least: PeakMemory

    @property
    def is_admitted(self) -> bool:
        """Whether a submit would accept the run, as far as memory is concerned."""
        device = self.plan.device
        return lowering.fit_of(self.least.total, device.memory_total) != "too_big"


def machine(memory_gib: int) -> Hardware:
    """Describe a machine with one GPU of `memory_gib` GiB, all of it free, and 1.5 times as much
    memory of its own, at least 32 GiB."""
    memory = memory_gib * _GB
    device = Device(
        id="cuda:0",
        name="GPU",
        kind="cuda",
        memory_total=memory,
        memory_free=memory,
        visible="GPU-1",
        bf16=True,
    )
    ram = max(32 * _GB, memory * 3 // 2)
    return Hardware((device,), cores=16, ram_total=ram, ram_free=ram, disk_free=4000 * _GB)


def plan_task(task: Task, model: ModelFacts, hardware: Hardware, change: Mapping[str, Any]) -> Cell:
    """Plan the training of `model` on a task, on a machine where vLLM is set up.

    `change` holds settings that are added to those that the user gives, e.g. one of `CHANGES`. The
    returned cell says how the run would go and what memory it takes, whether it fits or not.
    """
    resolved = resolution.resolve(
        task.algorithm,
        {**task.given, **change},
        model=model,
        env=task.env,
        hardware=hardware,
        vllm=True,
    )
    plan = Plan(resolved.settings, model, task.env, hardware.device)
    return Cell(plan, footprint.memory(plan), footprint.least_memory(plan))


def first_admitted(task: Task, model: ModelFacts, hardware: Hardware) -> Cell | None:
    """Plan a task with the first change of `CHANGES` with which the run fits into the memory;
    return None if none does."""
    cells = (plan_task(task, model, hardware, change) for change in CHANGES)
    return next((cell for cell in cells if cell.is_admitted), None)


def fewest_shards(task: Task, model: ModelFacts, hardware: Hardware) -> Cell | None:
    """Plan a task with its base model sharded over as few of these GPUs as possible, with
    recomputation only if needed. Returns None if no number in `SHARDS` is enough."""
    for gpus in SHARDS:
        for change in ({}, _RECOMPUTED):
            cell = plan_task(task, model, hardware, {**change, "gpus": gpus, "shard_base": True})
            if cell.is_admitted:
                return cell
    return None


@cache
def page() -> str:
    """Return the page docs/gpus.md as Markdown: an introduction, a table for each task on one GPU,
    and a table for each of `SHARDED_TASKS` on several GPUs that share the base model."""
    sections = [_INTRODUCTION]
    for name, task in TASKS.items():
        sections.append(f"## {name}\n\n{_HEAD}" + "\n".join(_table_rows(task)) + "\n")
    sections.append(_SHARDED)
    for name in SHARDED_TASKS:
        lines = "\n".join(_sharded_table_rows(TASKS[name]))
        sections.append(f"### {name}, sharded\n\n{_HEAD}{lines}\n")
    return "\n".join(sections)


_INTRODUCTION = """# GPUs

What LoRA training of rank 16 on all projections fits on one GPU, and how it would run there, from
the estimate of each run: nothing on this page was measured. Settings that a user leaves out are
those of the machine; vLLM is set up. A run is refused only if its least memory is above 92 % of
the GPU: one row sampled at a time by our own sampler, and microbatches of 512 tokens or of the
longest row. It is the same on every GPU; a vLLM server is started only where there is room for it
too. Where a run as asked would be refused, the row shows the first that is not of: recomputation
(`gradient_checkpointing`), weights of 4 bits (`quantization = "nf4"`), both.

*rows* are sampled at once if so many are asked for, *microbatch* are tokens at once in training at
most. Memory is in GB (1e9 bytes). Sampling and training alternate, so the peak counts the larger of
the two; *server* is a vLLM server that samples, without its cache. *least* is what has to fit.
"""
_SHARDED = """## Several GPUs for one base

Where the weights fit one GPU, each of several (`gpus`) has all of them, and the tables above hold
for each. A model whose weights in bfloat16 fit none of these is sharded over several
(`shard_base`): each keeps a part of every layer, all train on their share of the batch, and layers
travel between them in every pass, forward and back. The rows show the fewest of 2, 4 and 8 GPUs on
which the run is admitted, with the memory of each. Without vLLM on GPUs of its own
(`async_sampling`) every drawn token moves all layers once.
"""
_HEAD = (
    "| model | GPU | weights | recomputes | sampler | rows | microbatch | weights | adapter | "
    "activations | logits | cache | server | overhead | peak | least |\n"
    "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def _table_rows(task: Task) -> Iterator[str]:
    """Yield the rows of a task's table, one for each model and GPU."""
    for model_name, model in MODELS.items():
        for gpu_name, memory_gib in GPUS.items():
            cell = first_admitted(task, model, machine(memory_gib))
            yield _table_row(model_name, f"{gpu_name}, {memory_gib}", cell)


def _sharded_table_rows(task: Task) -> Iterator[str]:
    """Yield the rows of a task's table of sharded runs: one for each model and GPU where the model
    in bfloat16 does not fit on one GPU, but does fit on several."""
    for model_name, model in MODELS.items():
        for gpu_name, memory_gib in GPUS.items():
            hardware = machine(memory_gib)
            # The first two changes keep the whole model in bfloat16 on one GPU.
            in_bfloat16 = (plan_task(task, model, hardware, change) for change in CHANGES[:2])
            if any(cell.is_admitted for cell in in_bfloat16):
                continue
            cell = fewest_shards(task, model, hardware)
            if cell is not None:
                gpus = cell.plan.settings.gpus
                yield _table_row(model_name, f"{gpus} x {gpu_name}, {memory_gib}", cell)


def _table_row(model: str, gpu: str, cell: Cell | None) -> str:
    """Return a row of a Markdown table: how a task runs with `model` on `gpu` (names), with memory
    in GB (10^9 bytes). `cell` is None if no run is admitted.
    """
    if cell is None:
        return f"| {model} | {gpu} | refused |" + " |" * 13  # the other 13 columns are empty
    settings, job, memory = cell.plan.settings, cell.plan.job, cell.memory
    own_sampler = "own" if job.is_own else "transformers"  # the one of a run without vLLM
    byte_counts = (
        memory.weights,
        memory.adapter_and_optimizer,
        memory.activations,
        memory.logits,
        memory.kv_cache,
        memory.server,
        memory.overhead,
        memory.total,
        cell.least.total,
    )
    cells = [
        model,
        gpu,
        "4 bits" if settings.quantization == "nf4" else "bf16",
        "yes" if settings.gradient_checkpointing else "no",
        "vLLM" if job.has_server else own_sampler,
        f"{job.sampler_rows}",
        f"{job.microbatch_tokens:,.0f}",
        *(f"{count / 1e9:.1f}" for count in byte_counts),
    ]
    return f"| {' | '.join(cells)} |"
