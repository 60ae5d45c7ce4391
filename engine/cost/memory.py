"""What a run holds: memory while it goes on, disk when it has ended. From the settings alone."""

import math

from engine.cost.flops import (
    ATTENTION_KEPT,
    BETWEEN_TURNS,
    CONCURRENT,
    HEAD_BYTES,
    Plan,
    microbatch_tokens,
)
from engine.records.estimate import PeakMemory
from engine.records.settings import GRPOSettings, SFTSettings


def memory(plan: Plan) -> PeakMemory:
    """Peak bytes on the device, by item and in total.

    Training and sampling alternate, so only the larger of the two counts in the total. Never
    less for a longer row, a larger batch, rank or group.
    """
    settings = plan.settings
    longest = _longest_sequence(plan)
    budget = microbatch_tokens(plan)
    batch = _batch_tokens(plan)
    packed = plan.packed
    in_batch = min(batch, max(longest, budget)) if packed else longest
    activations = _activations(plan, in_batch, _usual_length(plan))
    # A chunk of logits, its log-softmax and its gradient, float32; never less than 128 rows.
    chunk = max(128 * 4 * plan.model.vocab, HEAD_BYTES[plan.device.kind])
    logits = 3 * min(chunk, in_batch * 4 * plan.model.vocab)
    cache, sampled = _sampling_bytes(plan, _longest_episode(plan))
    laid_out = _copies(plan)
    training, sampling = activations + logits, cache + sampled
    # With the adapter merged into a copy of them, and the copy laid out for sampling, whose place
    # the C library keeps while training.
    fixed = plan.weights + 2 * laid_out
    adapter = plan.adapter * 16  # float32 weights, gradients and two moments
    if isinstance(settings, GRPOSettings) and settings.async_sampling:
        adapter += plan.adapter * 4  # the copy that samples
    overhead = _overhead(plan, fixed + adapter + max(training, sampling))
    return PeakMemory(
        weights=int(fixed),
        adapter_and_optimizer=int(adapter),
        activations=int(activations),
        logits=int(logits if training >= sampling else sampled),
        kv_cache=int(cache),
        overhead=int(overhead),
        total=int(fixed + adapter + max(training, sampling) + overhead),
    )


def _copies(plan: Plan) -> float:
    """Bytes of a second copy of the layers' weights: on a CPU with memory to spare training keeps
    one with the adapter merged in, and sampling lays another out for its products."""
    if plan.device.kind != "cpu" or 4 * plan.weights >= plan.device.memory_total:
        return 0.0
    return plan.model.linear_params * plan.width


def _batch_tokens(plan: Plan) -> float:
    """Tokens that one optimizer step runs at most, on average: a group's prompt counts once."""
    settings = plan.settings
    if isinstance(settings, SFTSettings):
        return plan.rows * max(plan.sft_row().total, 1.0)
    episode = plan.episode(_level(plan))
    prompts = settings.prompts_per_step
    return prompts * episode.prompt + plan.rows * (episode.total - episode.prompt)


def _usual_length(plan: Plan) -> float:
    if isinstance(plan.settings, SFTSettings):
        return plan.sft_row().total
    return plan.episode(_level(plan)).total


def _level(plan: Plan) -> str:
    """Memory is counted for the worst, unless it is known how much the model says."""
    return "high" if plan.seen.said is None else "likely"


def _sampling_bytes(plan: Plan, longest: float) -> tuple[float, float]:
    """(key-value cache, logits) of the completions under way at once."""
    model = plan.model
    at_once = plan.settings.eval_rows
    if not at_once:
        return 0.0, 0.0
    if isinstance(plan.settings, SFTSettings) and not plan.env.scored:
        at_once = max((battery.tasks for battery in plan.batteries), default=0)
    if isinstance(plan.settings, GRPOSettings):
        at_once = max(at_once, plan.rows)
    at_once = min(at_once, CONCURRENT[plan.device.kind])
    per_token = 2 * model.layers * model.kv_heads * model.head_dim * plan.width
    # Growing the cache copies it: one layer's old and new tensors exist together.
    copies = 1 + 1 / model.layers
    return at_once * longest * per_token * copies, at_once * model.vocab * 4 * 3


def _longest_sequence(plan: Plan) -> float:
    """Tokens of the longest sequence that is trained on."""
    if isinstance(plan.settings, GRPOSettings):
        return _longest_episode(plan)
    limit = plan.settings.max_length
    return min(limit, plan.env.longest_total or limit)


def _longest_episode(plan: Plan) -> float:
    """Tokens of the longest sequence that is sampled, in as many turns as earlier runs needed."""
    if isinstance(plan.settings, SFTSettings) and not plan.env.scored:
        return _longest_sequence(plan)  # kept skills alone are asked
    turns = plan.turns("high")
    if plan.seen.turns is not None:
        turns = min(turns, math.ceil(1.5 * plan.seen.turns))
    sampled = turns * plan.max_tokens + BETWEEN_TURNS * (turns - 1)
    return min(plan.max_length, (plan.env.longest_prompt or plan.max_length) + sampled)


def _overhead(plan: Plan, rest: float) -> float:
    """The interpreter with torch on a CPU; context, kernels and fragmentation on a GPU."""
    if plan.device.kind == "cuda":
        return 1.3e9 + 0.06 * rest
    # And the code oneDNN compiles for every size of product it meets. The first run of a model in
    # a home also loads it through transformers, to compare.
    return 3.6e8 + 0.08 * rest + (0 if plan.seen.runs else 1.3e8 + plan.weights)


def _layer_floats(plan: Plan, length: float) -> float:
    """Numbers one layer of our own forward keeps of a token for the backward pass
    (engine/worker/ops/kernels.py): norms, queries, keys and values, what goes into each projection,
    and on a CPU the attention of short rows."""
    model = plan.model
    queries = model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    kept = 4 * model.hidden + 2 * (queries + keys) + queries + keys + 2 * model.intermediate
    if plan.device.kind == "cpu":
        kept += model.heads * min(length, ATTENTION_KEPT) / 2
    return kept


def _activations(plan: Plan, tokens: float, length: float) -> float:
    """Bytes held at most for a microbatch of so many tokens in rows of a length."""
    model = plan.model
    layer = _layer_floats(plan, length)
    through = 6 * (model.hidden + model.intermediate)  # one layer's own gradients
    if plan.settings.gradient_checkpointing:
        kept = model.layers * 2 * model.hidden + layer
    else:
        kept = model.layers * layer
    return plan.width * tokens * (kept + through) + 8 * tokens * model.hidden


def disk(plan: Plan) -> int:
    """Bytes a run leaves: checkpoints kept, and rollouts and evaluations as text."""
    checkpoint = plan.adapter * 12 + 200_000  # adapter and two moments
    kept = min(plan.settings.keep_checkpoints, plan.evaluations) + 2  # best, one being written
    episode = plan.episode("high")
    # About 5 bytes of text a token, and ids, masks and log-probabilities for some.
    line = 600 + 12 * episode.total
    lines = plan.evaluated_rows
    if isinstance(plan.settings, GRPOSettings):
        lines += plan.rows * plan.settings.steps
    return int(kept * checkpoint + lines * line + plan.settings.steps * 600)
