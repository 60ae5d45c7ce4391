"""The memory that a run needs and the disk space of its files, from its settings alone."""

import math

from engine.cost import run_work
from engine.cost.batteries import BETWEEN_TURNS
from engine.cost.flops import (
    ATTENTION_KEPT,
    CONCURRENT,
    HEAD_BYTES,
    Plan,
    microbatch_tokens,
)
from engine.records.estimate import PeakMemory
from engine.records.settings import DPOSettings, GRPOSettings, RolloutSettings, RowSettings

_LEAST_LOGIT_ROWS = 128  # the logits of at least so many tokens are computed at once
# Bytes per parameter of the adapter: float32 weights, gradients and the two moments of AdamW.
_ADAPTER_BYTES = 16
_CHECKPOINT_BYTES = 12  # of a checkpoint for each parameter of the adapter: weights and moments
_CHECKPOINT_FILES = 200_000  # bytes of the other files of a checkpoint
# Of a stored rollout, and of each of its tokens: about 5 bytes of text, and for some rollouts also
# ids, masks and log-probabilities.
_LINE_BYTES, _TOKEN_BYTES = 600, 12
_STEP_BYTES = 600  # of the metrics and events of a step


def memory(plan: Plan) -> PeakMemory:
    """The peak bytes that a run takes on the device, by item and in total.

    Training and sampling alternate, so only the larger of the two counts in the total. The items
    show both (`logits` the larger), so they may add up to more. The total never gets smaller when
    rows, batch, rank or group get larger.
    """
    pass_tokens = _largest_pass_tokens(plan)
    activations = _activation_bytes(plan, pass_tokens, _usual_length(plan))
    logits = _trained_logit_bytes(plan, pass_tokens)
    kv_cache, sampled_logits = _sampling_bytes(plan, _longest_sampled_sequence(plan))
    training_peak = activations + logits
    sampling_peak = kv_cache + sampled_logits
    weights = _weight_bytes(plan)
    adapter = _adapter_bytes(plan)
    model_bytes = weights + adapter + max(training_peak, sampling_peak)
    overhead = _overhead_bytes(plan, model_bytes)
    logits_at_peak = logits if training_peak >= sampling_peak else sampled_logits
    return PeakMemory(
        weights=int(weights),
        adapter_and_optimizer=int(adapter),
        activations=int(activations),
        logits=int(logits_at_peak),
        kv_cache=int(kv_cache),
        overhead=int(overhead),
        total=int(model_bytes + overhead),
    )


def _weight_bytes(plan: Plan) -> float:
    """Bytes of all weights in memory: the model's, two copies of them, and a teacher's.

    One copy has the adapter merged in, for training; the other has the layout for sampling, and its
    memory is not given back during training. Where the worker makes no copies, they count 0.
    """
    return plan.loaded.weights + 2 * _weight_copy_bytes(plan) + plan.teacher_weights


def _largest_pass_tokens(plan: Plan) -> float:
    """The most tokens that one forward pass of training reads."""
    longest_sequence = _longest_trained_sequence(plan)
    if not plan.packed:  # each row is a forward pass of its own
        return longest_sequence
    # The rows of a step fill microbatches; a longer row goes alone.
    largest_microbatch = max(longest_sequence, microbatch_tokens(plan))
    return min(_batch_tokens(plan), largest_microbatch)


def _adapter_bytes(plan: Plan) -> int:
    """Bytes of the adapters: the trained one with its optimizer, and those that are only read."""
    settings = plan.settings
    adapter_bytes = plan.loaded.adapter * _ADAPTER_BYTES
    float32_copy_bytes = plan.loaded.adapter * 4
    if isinstance(settings, GRPOSettings) and settings.async_sampling:
        adapter_bytes += float32_copy_bytes  # the one that samples while the other is trained
    if plan.teacher is not None:
        adapter_bytes += float32_copy_bytes  # the teacher's adapter, taken to be of the same shape
    return adapter_bytes


def _trained_logit_bytes(plan: Plan, tokens: float) -> float:
    """Peak bytes of the logits of a microbatch of `tokens` tokens. They are computed in chunks, so
    only those of one chunk are in memory at a time."""
    token_bytes = 4 * plan.model.vocab  # float32
    chunk_bytes = max(_LEAST_LOGIT_ROWS * token_bytes, HEAD_BYTES[plan.device.kind])
    # The logits, their log-softmax and its gradient.
    return 3 * min(chunk_bytes, tokens * token_bytes)


def _weight_copy_bytes(plan: Plan) -> float:
    """Bytes of one copy of the weights of all matrices; 0 if the worker makes no copies.

    On a CPU with enough memory our own forward makes two. Of the layers it keeps one with the
    adapter merged in for training, and one in another layout for sampling; of the output layer one
    for the forward and one for the backward pass.
    """
    if not plan.model.own_forward or plan.device.kind != "cpu":
        return 0.0
    # The worker makes copies under the same condition (engine/worker/network/decoder.py).
    has_room = 4 * plan.loaded.weights < plan.device.memory_total
    if not has_room:
        return 0.0
    output_layer = plan.model.vocab * plan.model.hidden
    return (plan.model.linear_params + output_layer) * plan.loaded.width


def _batch_tokens(plan: Plan) -> float:
    """Tokens that the forward passes of one optimizer step read. A prompt that several answers
    share counts once, because it is computed once."""
    settings = plan.settings
    if isinstance(settings, RowSettings):
        return plan.step_tokens + plan.replayed_tokens
    episode = plan.episode(_episode_level(plan))
    prompt_tokens = settings.prompts_per_step * episode.prompt
    return prompt_tokens + plan.rows * (episode.total - episode.prompt)


def _usual_length(plan: Plan) -> float:
    """Tokens of a typical sequence that is trained on: a row, or in GRPO and distillation an
    episode."""
    if isinstance(plan.settings, RowSettings):
        return plan.trained_row().total
    return plan.episode(_episode_level(plan)).total


def _episode_level(plan: Plan) -> str:
    """Which estimate of an episode's length the memory is planned with, "high" or "likely".

    It is "likely" only if finished runs of the base model have measured how long its answers are.
    """
    return "high" if plan.seen.answer_length_share is None else "likely"


def _sampling_bytes(plan: Plan, longest: float) -> tuple[float, float]:
    """The bytes of memory that sampling takes, for all completions sampled at the same time.

    Returns the bytes of the key-value cache and those of the logits. Both are 0 if the run samples
    nothing: it trains on rows, and its setting `eval_rows` is 0.

    Args:
        longest: tokens of the longest completion with its prompt.
    """
    model = plan.model
    samples_anything = isinstance(plan.settings, RolloutSettings) or plan.settings.eval_rows > 0
    if not samples_anything:
        return 0.0, 0.0
    # The worker samples no more than CONCURRENT completions at the same time.
    at_once = min(_sampled_completions(plan), CONCURRENT[plan.device.kind])
    cache_per_token = model.cached_numbers * plan.loaded.width  # bytes of its keys and values
    # When the cache grows it is copied layer by layer: old and new tensors of one layer coexist.
    copies = 1 + 1 / max(1, model.attention_layers)
    cache_bytes = at_once * longest * cache_per_token * copies
    logit_bytes = at_once * model.vocab * 4 * 3  # three float32 tensors at once
    return cache_bytes, logit_bytes


def _sampled_completions(plan: Plan) -> int:
    """The most completions that the run asks for at once, in an evaluation or in a step."""
    completions = plan.settings.eval_rows
    if isinstance(plan.settings, RowSettings) and not plan.env.scored:
        # Held-out rows are not answered. Only the batteries are, the questions that show what the
        # model forgets.
        completions = max((battery.tasks for battery in plan.batteries), default=0)
    if isinstance(plan.settings, RolloutSettings):  # each step samples completions to train on
        completions = max(completions, plan.rows)
    return max(completions, round(plan.own_answers()[0]))


def _longest_trained_sequence(plan: Plan) -> float:
    """Tokens of the longest sequence that is trained on."""
    if isinstance(plan.settings, RolloutSettings):
        return _longest_sampled_sequence(plan)
    limit = plan.settings.max_length
    if isinstance(plan.settings, DPOSettings):  # both answers of a pair are one sequence
        pairs = [row.pair for row in plan.env.lengths if row.pair]
        pair_lengths = [min(better, limit) + min(worse, limit) for better, worse in pairs]
        return max(pair_lengths, default=2 * limit)
    longest_row = plan.env.longest_total or limit  # 0: no rows were counted
    return min(limit, longest_row)


def _longest_sampled_sequence(plan: Plan) -> float:
    """Tokens of the longest sequence that is sampled.

    It is assumed to have max_turns turns of max_tokens tokens each. If finished runs have measured
    the turns, 1.5 times their mean is assumed, but not more than max_turns.

    SFT and DPO on an environment that does not score sample only short answers, to the questions
    that show what the model forgets. The length of the longest sequence that is trained on is
    returned for them, as an upper bound.
    """
    if isinstance(plan.settings, RowSettings) and not plan.env.scored:
        return _longest_trained_sequence(plan)
    turns = plan.turns("high")  # max_turns
    if plan.seen.turns is not None:
        turns = min(turns, math.ceil(1.5 * plan.seen.turns))
    # What the model says, and between its turns the environment.
    sampled = turns * plan.max_tokens + BETWEEN_TURNS * (turns - 1)
    longest_prompt = plan.env.longest_prompt or plan.max_length  # 0: no rows were counted
    return min(plan.max_length, longest_prompt + sampled)


def _overhead_bytes(plan: Plan, model_bytes: float) -> float:
    """Bytes of memory beyond `model_bytes`, which are those of weights, adapter, activations and
    cache: a fixed part and a share of `model_bytes`.

    On a GPU the fixed part is its context with the kernels, on a CPU the interpreter with torch.
    The share is lost to fragmentation, and on a CPU also to the code that oneDNN compiles for every
    size of matrix product.
    """
    if plan.device.kind == "cuda":
        return 1.3e9 + 0.06 * model_bytes
    overhead = 3.6e8 + 0.08 * model_bytes
    if plan.seen.runs:
        return overhead
    # The first run of a model in a home also loads it through transformers, which takes the
    # library's own bytes and a second copy of the weights, to compare the results of both.
    return overhead + (1.3e8 + plan.loaded.weights)


def _kept_floats_per_token(plan: Plan, length: float) -> float:
    """How many numbers a layer keeps of each token for the backward pass.

    They are those of our own forward pass (engine/worker/ops/kernels.py).

    Args:
        length: tokens of a typical row.
    """
    model = plan.model
    queries = model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim  # as many as values
    # A layer has two norms. Each keeps its result, and off the CPU also the normalised numbers from
    # before its scale (ops/norms.py).
    kept_per_norm = 1 if plan.device.kind == "cpu" else 2
    norms = 2 * kept_per_norm * model.hidden
    attention = 2 * queries + 2 * keys  # queries, keys, values and the attention's output
    head_norms = queries + keys  # their normalised copies; counted though not all models have them
    mlp = 2 * model.intermediate  # gate and up
    floats = norms + attention + head_norms + mlp
    if plan.device.kind == "cpu":
        # Short rows keep the weights of attention: a token sees half of its row on average. Longer
        # rows are counted as rows of ATTENTION_KEPT tokens.
        floats += model.heads * min(length, ATTENTION_KEPT) / 2
    return floats


def _activation_bytes(plan: Plan, tokens: float, length: float) -> float:
    """Peak bytes of activations for a microbatch of `tokens` tokens, in rows of `length` tokens."""
    model = plan.model
    layer_floats = _kept_floats_per_token(plan, length)
    # The gradients inside one layer, as about six vectors of each of its two widths.
    gradient_floats = 6 * (model.hidden + model.intermediate)
    if plan.settings.gradient_checkpointing:
        # The two inputs of each layer, and all of the one layer that is recomputed.
        kept_floats = model.layers * 2 * model.hidden + layer_floats
    else:
        kept_floats = model.layers * layer_floats
    layer_bytes = plan.loaded.width * tokens * (kept_floats + gradient_floats)
    # Outside the layers, for each token: the float32 input of the output layer and its gradient.
    return layer_bytes + 8 * tokens * model.hidden


def disk(plan: Plan) -> int:
    """The bytes that a run leaves on disk: checkpoints, rollouts, evaluations, metrics, events."""
    adapter_parameters = plan.loaded.adapter
    checkpoint_bytes = adapter_parameters * _CHECKPOINT_BYTES + _CHECKPOINT_FILES
    # One is saved at each evaluation, of which the last `keep_checkpoints` stay; and two more: the
    # best one, and one that is being written.
    checkpoints = min(plan.settings.keep_checkpoints, plan.evaluations) + 2
    # Each answer of an evaluation and each rollout is stored as a line; the longest are assumed.
    tokens_per_line = plan.episode("high").total
    line_bytes = _LINE_BYTES + _TOKEN_BYTES * tokens_per_line
    lines = run_work.evaluated_rows(plan)
    if isinstance(plan.settings, RolloutSettings):
        lines += plan.rows * plan.settings.steps
    metrics_bytes = plan.settings.steps * _STEP_BYTES
    return int(checkpoints * checkpoint_bytes + lines * line_bytes + metrics_bytes)
