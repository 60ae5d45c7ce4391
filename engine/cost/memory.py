"""The memory that a run needs and the disk space of its files, from its settings alone."""

import math
from dataclasses import dataclass, replace

from engine.cost import run_work
from engine.cost.flops import Plan
from engine.models.sizing import layers, servers
from engine.models.sizing.plan import LEAST_ROWS, MICRO_FLOOR, Job
from engine.records.estimate import PeakMemory
from engine.records.settings import DPOSettings, RolloutSettings, RowSettings
from engine.settings.run_size import BETWEEN_TURNS

# Bytes of a checkpoint for each parameter of the adapter: the weight and the optimizer's two
# moments, 4 bytes each.
_CHECKPOINT_BYTES = 12
_CHECKPOINT_FILES = 200_000  # bytes of the other files of a checkpoint
# Bytes of a stored rollout, and of each of its tokens: about 5 bytes of text, and for some rollouts
# also ids, masks and log-probabilities.
_LINE_BYTES, _TOKEN_BYTES = 600, 12
_STEP_BYTES = 600  # bytes of the metrics and events of a step
_TRANSFORMERS_BYTES = 1.3e8  # of memory that the imported library transformers takes


def memory(plan: Plan) -> PeakMemory:
    """Return the peak bytes that a run takes on the device, by item and in total.

    The run has the rows sampled at once and the microbatches that the worker chooses for it
    (engine/models/sizing/plan.py). Training and sampling alternate, so only the larger of the two
    peaks counts in the total. The items come from both (`logits` from the larger one), so they may
    add up to more than the total. The total never gets smaller if rows, batch, rank or group get
    larger.
    """
    return _memory(plan, plan.job, plan.job.sampler_rows, plan.job.microbatch_tokens)


def least_memory(plan: Plan) -> PeakMemory:
    """Return the least peak bytes of a run; if these do not fit, the run is refused.

    They are those with the fewest rows sampled at once, the smallest microbatches, and our own
    sampler: a vLLM server is started only if there is room for it. On a CPU the worker does not
    adapt rows and microbatches, so the result is that of `memory`.
    """
    if plan.device.kind == "cpu":
        return memory(plan)
    without_server = replace(plan.job, wants_server=False)
    return _memory(plan, without_server, LEAST_ROWS["cuda"], MICRO_FLOOR)


def _memory(plan: Plan, job: Job, rows_at_once: int, microbatch_tokens: float) -> PeakMemory:
    """Return the peak bytes of a run with the given number of rows and size of microbatches.

    The peak is the larger of training and sampling, which alternate. If the run has a vLLM server,
    that sleeps while the run trains, and holds the key-value cache while it samples.

    Args:
        plan: the run.
        job: the parts of the run that have to fit into the device, with or without a vLLM server.
        rows_at_once: completions that are sampled at the same time.
        microbatch_tokens: tokens of a microbatch in training.
    """
    training = _training_peak(plan, job, microbatch_tokens)
    sampling = _sampling_peak(plan, job, rows_at_once)
    peak = training if training.total >= sampling.total else sampling
    return PeakMemory(
        weights=int(_weight_bytes(plan)),
        adapter_and_optimizer=int(job.adapters),
        activations=int(training.activations),
        logits=int(peak.logits),
        kv_cache=int(sampling.kv_cache),
        server=int(_server_bytes(job)),
        overhead=int(peak.overhead),
        total=int(peak.total),
    )


@dataclass(frozen=True)
class _Peak:
    """Bytes at the peak of training or of sampling.

    Attributes:
        total: all bytes, weights and adapters included.
        logits: bytes of the logits.
        overhead: bytes that the libraries keep beside everything else.
        activations: bytes of the activations of the largest forward pass; 0 in sampling.
        kv_cache: bytes of the keys and values of the completions; 0 in training.
    """

    total: float
    logits: float
    overhead: float
    activations: float = 0.0
    kv_cache: float = 0.0


def _training_peak(plan: Plan, job: Job, microbatch_tokens: float) -> _Peak:
    """Return the peak of training, in bytes.

    It has the weights, the adapters, the activations and logits of the largest forward pass (a
    microbatch of `microbatch_tokens` tokens), the overhead of all these, and what a sleeping vLLM
    server keeps.
    """
    pass_tokens = _largest_pass_tokens(plan, microbatch_tokens)
    activations = _activation_bytes(plan, pass_tokens)
    logits = layers.trained_logit_bytes(plan.model, plan.device.kind, pass_tokens)
    model_bytes = _weight_bytes(plan) + job.adapters + activations + logits
    overhead = _overhead_bytes(plan, model_bytes)
    total = model_bytes + overhead + job.asleep_bytes
    return _Peak(total, logits, overhead, activations=activations)


def _sampling_peak(plan: Plan, job: Job, rows_at_once: int) -> _Peak:
    """Return the peak of sampling `rows_at_once` completions, in bytes.

    The key-value cache and the logits are in this process, beside weights and adapters, or in a
    vLLM server. If the server has GPUs of its own, the peak is that of such a GPU.
    """
    longest = _longest_sampled_sequence(plan)
    kv_cache, logits = _sampling_bytes(plan, job, rows_at_once, longest)
    model_bytes = _weight_bytes(plan) + job.adapters
    server_bytes = _server_bytes(job)
    if job.has_server:
        server_bytes += kv_cache
    else:
        model_bytes = model_bytes + kv_cache + logits
    overhead = _overhead_bytes(plan, model_bytes)
    has_own_gpus = job.has_server and job.sampling_gpus
    total = server_bytes if has_own_gpus else model_bytes + overhead + server_bytes
    return _Peak(total, logits, overhead, kv_cache=kv_cache)


def _weight_bytes(plan: Plan) -> float:
    """Return the bytes of all weights in memory: the model's, two copies of them, and a teacher's.

    One copy has the adapter merged in, for training. The other has the layout for sampling, and
    stays in memory during training. If the worker makes no copies, they count 0.
    """
    return plan.loaded.weights + 2 * _weight_copy_bytes(plan) + plan.job.other_weights


def _server_bytes(job: Job) -> float:
    """Return the bytes of a vLLM server while it samples, without its keys and values.

    Returns 0 if the job has no server.
    """
    if not job.has_server:
        return 0.0
    weights = servers.weight_bytes(job.loaded) / job.server.gpus_of_model
    return weights + servers.AWAKE_BYTES


def _largest_pass_tokens(plan: Plan, microbatch_tokens: float) -> float:
    """Return the most tokens that one forward pass of training reads."""
    longest_sequence = _longest_trained_sequence(plan)
    if not plan.packed:  # each row is a forward pass of its own
        return longest_sequence
    # The rows of a step fill microbatches. A row that is longer than a microbatch has its own pass.
    largest_microbatch = max(longest_sequence, microbatch_tokens)
    return min(_batch_tokens(plan), largest_microbatch)


def _weight_copy_bytes(plan: Plan) -> float:
    """Return the bytes of one copy of the weights of all matrices; 0 if the worker makes no copies.

    On a CPU with enough memory our own forward makes two such copies, and `_weight_bytes` counts
    both. For the layers they are one with the adapter merged in, for training, and one in another
    layout, for sampling. For the output layer one serves the forward, one the backward pass.
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
    """Return the tokens that the forward passes of one optimizer step read.

    A prompt that several answers share counts once, because it is computed once.
    """
    settings = plan.settings
    if isinstance(settings, RowSettings):
        return plan.step_tokens + plan.replayed_tokens
    episode = plan.episode(_episode_level(plan))
    prompt_tokens = settings.prompts_per_step * episode.prompt
    own_tokens = prompt_tokens + plan.rows * (episode.total - episode.prompt)
    return max(own_tokens, plan.replayed_tokens)  # replayed rows have passes of their own


def _usual_length(plan: Plan) -> float:
    """Return the tokens of a typical training sequence: a row, or in GRPO and distillation an
    episode (all turns of one rollout)."""
    if isinstance(plan.settings, RowSettings):
        return plan.trained_row().total
    return plan.episode(_episode_level(plan)).total


def _episode_level(plan: Plan) -> str:
    """Return which estimate of an episode's length memory is planned for: the level "high" or
    "likely".

    The level is "likely" only if finished runs of the base model have measured how long its answers
    are.
    """
    return "high" if plan.measured.answer_length_share is None else "likely"


def _sampling_bytes(plan: Plan, job: Job, rows_at_once: int, longest: float) -> tuple[float, float]:
    """Return the bytes of the key-value cache and of the logits for all completions at once.

    Both are 0 if the run samples nothing, because it trains on rows and its `eval_rows` is 0.

    Args:
        plan: the run.
        job: the parts of the run that have to fit into the device, with or without a vLLM server.
        rows_at_once: the most completions that are sampled at the same time.
        longest: tokens of the longest completion with its prompt.
    """
    samples_anything = isinstance(plan.settings, RolloutSettings) or plan.settings.eval_rows > 0
    if not samples_anything:
        return 0.0, 0.0
    completions = min(_sampled_completions(plan), rows_at_once)
    if job.has_server:  # the server's buffers include its logits, and it never copies the cache
        cache_bytes = completions * longest * job.loaded.cache_token_bytes
        return cache_bytes / job.server.gpus_of_model, 0.0
    cache_bytes, logit_bytes = layers.sampled_row_bytes(plan.loaded, plan.device.kind, longest)
    return completions * cache_bytes, completions * logit_bytes


def _sampled_completions(plan: Plan) -> int:
    """Return the most completions that an evaluation or a step of the run needs."""
    completions = plan.settings.eval_rows
    if isinstance(plan.settings, RowSettings) and not plan.env.scored:
        # The model does not answer held-out rows, but only the batteries (questions that show what
        # it forgets).
        completions = max((battery.tasks for battery in plan.batteries), default=0)
    if isinstance(plan.settings, RolloutSettings):  # each step samples completions to train on
        completions = max(completions, plan.rows)
    practice_questions, _ = plan.practice_questions()
    return max(completions, round(practice_questions))


def _longest_trained_sequence(plan: Plan) -> float:
    """Return the tokens of the longest sequence that is trained on."""
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
    """Return the tokens of the longest sequence that is sampled.

    The sequence is assumed to have max_turns turns of max_tokens tokens each. If finished runs have
    measured the turns, 1.5 times their mean is assumed, but not more than max_turns.

    SFT and DPO on an environment without a scorer sample only short answers, to the questions that
    show what the model forgets. For them the length of the longest training sequence is returned as
    an upper bound.
    """
    if isinstance(plan.settings, RowSettings) and not plan.env.scored:
        return _longest_trained_sequence(plan)
    turns = plan.turns("high")  # max_turns
    if plan.measured.turns is not None:
        turns = min(turns, math.ceil(1.5 * plan.measured.turns))
    # The turns of the model, and the replies of the environment between them.
    sampled = turns * plan.max_tokens + BETWEEN_TURNS * (turns - 1)
    longest_prompt = plan.env.longest_prompt or plan.max_length  # 0: no rows were counted
    return min(plan.max_length, longest_prompt + sampled)


def _overhead_bytes(plan: Plan, model_bytes: float) -> float:
    """Return the bytes that libraries take beside `model_bytes`, the bytes of weights, adapter,
    activations and cache."""
    overhead = layers.overhead_bytes(plan.device.kind, model_bytes)
    if plan.device.kind == "cuda" or plan.measured.runs:
        return overhead
    # The first run of a model in a home also loads the model through transformers, to compare the
    # results of both. That takes the bytes of the library and a second copy of the weights.
    return overhead + (_TRANSFORMERS_BYTES + plan.loaded.weights)


def _activation_bytes(plan: Plan, tokens: float) -> float:
    """Return the peak bytes of activations for a microbatch of `tokens` tokens."""
    recomputes, kind = plan.settings.gradient_checkpointing, plan.device.kind
    if kind == "cuda" and not plan.job.is_own:
        return tokens * layers.foreign_token_bytes(plan.model, recomputes=recomputes)
    length = _usual_length(plan)
    return tokens * layers.trained_token_bytes(
        plan.loaded, kind, recomputes=recomputes, length=length
    )


def disk(plan: Plan) -> int:
    """Return the bytes that a run leaves on disk: checkpoints, rollouts, evaluations, metrics and
    events."""
    adapter_parameters = plan.loaded.adapter
    checkpoint_bytes = adapter_parameters * _CHECKPOINT_BYTES + _CHECKPOINT_FILES
    # A checkpoint is saved at each evaluation, and the last `keep_checkpoints` stay. Two more are
    # the best checkpoint, and the one that is being written.
    checkpoints = min(plan.settings.keep_checkpoints, plan.evaluations) + 2
    # Each answer of an evaluation and each rollout is a line; all are assumed to be long.
    tokens_per_line = plan.episode("high").total
    line_bytes = _LINE_BYTES + _TOKEN_BYTES * tokens_per_line
    lines = run_work.evaluated_rows(plan)
    if isinstance(plan.settings, RolloutSettings):
        lines += plan.rows * plan.settings.steps
    metrics_bytes = plan.settings.steps * _STEP_BYTES
    return int(checkpoints * checkpoint_bytes + lines * line_bytes + metrics_bytes)
