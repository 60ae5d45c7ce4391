"""How many floating-point operations training a LoRA takes, by the textbook. No torch.

One multiply-add counts as two. Every formula counts useful work alone: no padding, no recomputed
activations, a prompt shared by a group once. Per token of a decoder with N weights in its linear
layers (the head apart) and a LoRA with P:

    frozen base    2 N forward + 2 N backward to the activations (no weight gradients)
    adapter        2 P forward + 4 P backward
    attention      2 H D s forward (causal: half the square), twice that backward, per layer and
                   token of a sequence of s, H heads of D
    head           2 h V forward + 2 h V backward, on the tokens that carry loss alone
"""

from collections.abc import Sequence

from benchmarks.cases import Shape


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one decoder layer."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (shape.hidden, query),
        "k_proj": (shape.hidden, key),
        "v_proj": (shape.hidden, key),
        "o_proj": (query, shape.hidden),
        "gate_proj": (shape.hidden, shape.inner),
        "up_proj": (shape.hidden, shape.inner),
        "down_proj": (shape.inner, shape.hidden),
    }


def linear_weights(shape: Shape) -> int:
    """N: weights in all linear layers, without embeddings and head."""
    return shape.layers * sum(a * b for a, b in projections(shape).values())


def adapter_weights(shape: Shape, rank: int) -> int:
    """P: weights of a LoRA on every linear layer."""
    return shape.layers * sum(rank * (a + b) for a, b in projections(shape).values())


def model_weights(shape: Shape) -> int:
    """All parameters of the model, a tied head counted once."""
    norms = shape.layers * (2 * shape.hidden + 2 * shape.head_dim) + shape.hidden
    heads = 1 if shape.tied else 2
    return linear_weights(shape) + heads * shape.hidden * shape.vocab + norms


def sft_step(shape: Shape, rank: int, lengths: Sequence[int], supervised: int) -> float:
    """FLOPs of one step over sequences of these lengths, `supervised` tokens carrying loss."""
    tokens = sum(lengths)
    per_token = 4 * linear_weights(shape) + 6 * adapter_weights(shape, rank)
    head = 4 * shape.hidden * shape.vocab * supervised
    return tokens * per_token + attention(shape, lengths, 3) + head


def attention(shape: Shape, lengths: Sequence[int], passes: int) -> float:
    """Causal attention over whole sequences; `passes` is 1 forward, 3 with the backward."""
    width = shape.heads * shape.head_dim * shape.layers
    return float(passes * 2 * width * sum(length**2 for length in lengths))


def grpo_rollout(shape: Shape, prompts: Sequence[int], group: int, new: int) -> float:
    """FLOPs of sampling `group` completions of `new` tokens for each prompt, read once each, on
    merged weights."""
    completions = len(prompts) * group * new
    tokens = sum(prompts) + completions
    width = shape.heads * shape.head_dim * shape.layers
    # A new token attends to the prompt and, on average, to half of the completion.
    decode = sum(4 * width * group * new * (prompt + new / 2) for prompt in prompts)
    head = 2 * shape.hidden * shape.vocab * completions
    return 2 * linear_weights(shape) * tokens + attention(shape, prompts, 1) + decode + head


def grpo_update(shape: Shape, rank: int, prompts: Sequence[int], group: int, new: int) -> float:
    """FLOPs of one update on those completions, each prompt run once for its group."""
    completions = len(prompts) * group * new
    tokens = sum(prompts) + completions
    per_token = 4 * linear_weights(shape) + 6 * adapter_weights(shape, rank)
    width = shape.heads * shape.head_dim * shape.layers
    own = sum(3 * 4 * width * group * new * (prompt + new / 2) for prompt in prompts)
    head = 4 * shape.hidden * shape.vocab * completions
    return tokens * per_token + attention(shape, prompts, 3) + own + head


def kv_bytes_per_token(shape: Shape, width: int) -> int:
    """Bytes of the key-value cache one token takes; `width` bytes per number."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width


def decode_floor_s(
    shape: Shape, rows: int, context: float, bandwidth: float, width: int = 2
) -> float:
    """Least seconds for one decoding step of `rows` sequences: weights and cache read once.

    Args:
        context: mean tokens already in a row's cache.
        bandwidth: bytes per second that memory was measured to give.
    """
    moved = model_weights(shape) * width + rows * context * kv_bytes_per_token(shape, width)
    return moved / bandwidth
