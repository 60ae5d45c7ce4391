"""The memory that a run needs and the disk space of its files, from its settings alone."""

import math
from dataclasses import dataclass, replace

from engine.cost import run_work
from engine.cost.flops import Plan
from engine.records.estimate import PeakMemory
from engine.records.settings import DPOSettings, RolloutSettings, RowSettings
from engine.settings.run_size import BETWEEN_TURNS
from engine.sizing import layers, servers
from engine.sizing.plan import LEAST_ROWS, MICRO_FLOOR, Job

_CHECKPOINT_BYTES = 12  # of a checkpoint for each parameter of the adapter: weights and moments
_CHECKPOINT_FILES = 200_000  # bytes of the other files of a checkpoint
# Of a stored rollout, and of each of its tokens: about 5 bytes of text, and for some rollouts also
# ids, masks and log-probabilities.
_LINE_BYTES, _TOKEN_BYTES = 600, 12
_STEP_BYTES = 600  # of the metrics and events of a step


def memory(plan: Plan) -> PeakMemory:
    """The peak bytes that a run takes on the device, by item and in total, with the rows and the
    microbatches that the worker chooses for it (engine/sizing/plan.py).

    Training and sampling alternate, so only the larger of the two counts in the total. The items
    show both (`logits` the larger), so they may add up to more. The total never gets smaller when
    rows, batch, rank or group get larger.
    """
    return _memory(plan, plan.job, plan.job.sampler_rows, plan.job.microbatch_tokens)


def least_memory(plan: Plan) -> PeakMemory:
    """The peak bytes of a run with the fewest rows sampled at once, by our own sampler, and the
    smallest microbatches: what has to fit. It is the same for every GPU: a vLLM server is started
    only where there is room for it too. On a CPU, where the worker does not adapt rows and
    microbatches, the bytes of `memory`."""
    if plan.device.kind == "cpu":
        return memory(plan)
    without_server = replace(plan.job, wants_server=False)
    return _memory(plan, without_server, LEAST_ROWS["cuda"], MICRO_FLOOR)


def _memory(plan: Plan, job: Job, rows_at_once: int, microbatch_tokens: float) -> PeakMemory:
    """The peak bytes of a run that samples `rows_at_once` completions at the same time and trains
    on microbatches of `microbatch_tokens` tokens.

    The peak is the larger of training and sampling, which alternate. A vLLM server, where the run
    has one, sleeps while the run trains, and holds the key-value cache while it samples. `job`:
    what has to fit into the device, with a vLLM server or without.
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
        server=int(_awake_bytes(job)),
        overhead=int(peak.overhead),
        total=int(peak.total),
    )


@dataclass(frozen=True)
class _Peak:
    """Bytes at the peak of training or of sampling.

    Attributes:
        total: all bytes, weights and adapters included.
        logits: those of the logits.
        overhead: what the libraries keep beside all of it.
        activations: of the largest forward pass; 0 in sampling.
        kv_cache: keys and values of the completions; 0 in training.
    """

    total: float
    logits: float
    overhead: float
    activations: float = 0.0
    kv_cache: float = 0.0


def _training_peak(plan: Plan, job: Job, microbatch_tokens: float) -> _Peak:
    """The peak of training: weights, adapters, and the activations and logits of the largest
    forward pass, of `microbatch_tokens` tokens; with what a sleeping server keeps."""
    pass_tokens = _largest_pass_tokens(plan, microbatch_tokens)
    activations = _activation_bytes(plan, pass_tokens)
    logits = layers.trained_logit_bytes(plan.model, plan.device.kind, pass_tokens)
    held = _weight_bytes(plan) + job.adapters + activations + logits
    overhead = _overhead_bytes(plan, held)
    total = held + overhead + job.asleep_bytes
    return _Peak(total, logits, overhead, activations=activations)


def _sampling_peak(plan: Plan, job: Job, rows_at_once: int) -> _Peak:
    """The peak of sampling `rows_at_once` completions: their cache and logits, in this process
    beside weights and adapters, or in a server. A server on GPUs of its own is counted alone."""
    longest = _longest_sampled_sequence(plan)
    kv_cache, logits = _sampling_bytes(plan, job, rows_at_once, longest)
    held = _weight_bytes(plan) + job.adapters
    if not job.has_server:
        held = held + kv_cache + logits
    overhead = _overhead_bytes(plan, held)
    server = _awake_bytes(job) + (kv_cache if job.has_server else 0.0)
    is_alone = job.has_server and job.sampling_gpus  # of a GPU where nothing else is
    total = server if is_alone else held + overhead + server
    return _Peak(total, logits, overhead, kv_cache=kv_cache)


def _weight_bytes(plan: Plan) -> float:
    """Bytes of all weights in memory: the model's, two copies of them, and a teacher's.

    One copy has the adapter merged in, for training; the other has the layout for sampling, and its
    memory is not given back during training. Where the worker makes no copies, they count 0.
    """
    return plan.loaded.weights + 2 * _weight_copy_bytes(plan) + plan.job.other_weights


def _awake_bytes(job: Job) -> float:
    """Bytes of a vLLM server that samples, its keys and values left out; 0 without one."""
    if not job.has_server:
        return 0.0
    weights = servers.server_weights(job.loaded) / job.server.gpus_of_model
    return weights + servers.AWAKE_BYTES


def _largest_pass_tokens(plan: Plan, microbatch_tokens: float) -> float:
    """The most tokens that one forward pass of training reads."""
    longest_sequence = _longest_trained_sequence(plan)
    if not plan.packed:  # each row is a forward pass of its own
        return longest_sequence
    # The rows of a step fill microbatches; a longer row goes alone.
    largest_microbatch = max(longest_sequence, microbatch_tokens)
    return min(_batch_tokens(plan), largest_microbatch)


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
    own_tokens = prompt_tokens + plan.rows * (episode.total - episode.prompt)
    return max(own_tokens, plan.replayed_tokens)  # replayed rows have passes of their own


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


def _sampling_bytes(plan: Plan, job: Job, rows_at_once: int, longest: float) -> tuple[float, float]:
    """The bytes of memory that sampling takes, for all completions sampled at the same time.

    Returns the bytes of the key-value cache and those of the logits. Both are 0 if the run samples
    nothing: it trains on rows, and its setting `eval_rows` is 0.

    Args:
        rows_at_once: completions that are sampled at the same time, if there are so many.
        longest: tokens of the longest completion with its prompt.
    """
    samples_anything = isinstance(plan.settings, RolloutSettings) or plan.settings.eval_rows > 0
    if not samples_anything:
        return 0.0, 0.0
    at_once = min(_sampled_completions(plan), rows_at_once)
    if job.has_server:  # its logits are among its buffers, and it copies no cache
        cache_bytes = at_once * longest * job.loaded.cache_token_bytes
        return cache_bytes / job.server.gpus_of_model, 0.0
    cache_bytes, logit_bytes = layers.sampled_row_bytes(plan.loaded, plan.device.kind, longest)
    return at_once * cache_bytes, at_once * logit_bytes


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
    cache."""
    overhead = layers.overhead_bytes(plan.device.kind, model_bytes)
    if plan.device.kind == "cuda" or plan.seen.runs:
        return overhead
    # The first run of a model in a home also loads it through transformers, which takes the
    # library's own bytes and a second copy of the weights, to compare the results of both.
    return overhead + (1.3e8 + plan.loaded.weights)


def _activation_bytes(plan: Plan, tokens: float) -> float:
    """Peak bytes of activations for a microbatch of `tokens` tokens."""
    recomputes, kind = plan.settings.gradient_checkpointing, plan.device.kind
    if kind == "cuda" and not plan.job.is_own:
        return tokens * layers.foreign_token_bytes(plan.model, recomputes=recomputes)
    length = _usual_length(plan)
    return tokens * layers.trained_token_bytes(
        plan.loaded, kind, recomputes=recomputes, length=length
    )


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
