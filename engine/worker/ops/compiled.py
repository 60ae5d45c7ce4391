"""The functions of fused_ops.py as plain formulas, which torch.compile can fuse. It cannot follow
the versions in fused_ops.py, which write results into parts of tensors to save memory and copies.

The first call of a function compiles it for that number of rows; the first call with another number
of rows compiles it for any number.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

Tensors = tuple[torch.Tensor, ...]

BACKEND: Any = "inductor"  # torch.compile's own code generator; tests take another


class Eps(NamedTuple):
    """The small number that a norm adds under its root, as a float and as a tensor [1] on the
    device."""

    number: float
    tensor: torch.Tensor


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / rms(x) in x's dtype, 1 / rms(x) in float32 [..., 1]). rms is the root of the mean
    square over the last dimension; `eps` is added to the mean square."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype), inverse


def normalise_gradient(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of x in weight * x / rms(x), in float32. The formula is (g - n * mean(g
    * n)) / rms(x) with g = weight * dy and n = x / rms(x); the mean is over the last dimension.

    Args:
        normed: n, that is x / rms(x).
        inverse: 1 / rms(x), [..., 1].
        weight: [width], the norm's weight, for x [..., width].
        dy: the gradient of the result.
    """
    grad, wide_normed = (dy * weight).float(), normed.float()
    mean_product = (grad * wide_normed).mean(-1, keepdim=True)
    return (grad - wide_normed * mean_product) * inverse


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [N, heads, dim] with each head rotated by the position of its token. Numbers i and i
    + dim / 2 of the last dimension are a pair, rotated by the angle whose cosine and sine stand at
    i in `cos` and `sin` [N, 1, dim / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    """Compute the RMS norm of x over its last dimension. Returns (weight * x / rms(x), the tensors
    that `norm_gradient` needs); `eps` is added to the mean square."""
    normed, inverse = normalise(x, eps)
    return normed * weight, (normed, inverse)


def norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of x in `norm`, from the gradient `dy` of its first result. `saved` is
    its second result, `weight` its argument."""
    normed, inverse = saved
    return normalise_gradient(normed, inverse, weight, dy).to(dy.dtype)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Return (x + delta, weight times the RMS norm of that sum, the tensors that
    `add_norm_gradient` needs). `eps` is added to the mean square."""
    total = x + delta
    y, saved = norm(total, weight, eps)
    return total, y, saved


def add_norm_gradient(
    saved: Tensors, weight: torch.Tensor, dtotal: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of x in `add_norm`, which is also the gradient of delta. `saved` is the
    third result of `add_norm`, `weight` its argument, `dtotal` the gradient of its first result
    (the sum x + delta), `dy` that of its second (the norm of the sum)."""
    normed, inverse = saved
    return (normalise_gradient(normed, inverse, weight, dy) + dtotal).to(dy.dtype)


def apply_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Tensors:
    """Normalise queries and keys per head (if there are weights) and rotate them by their
    positions, in place.

    Args:
        qkv: [N, (heads + 2 kv_heads) * dim]: queries, keys, values; overwritten.
        q_weight, k_weight: [dim], the norms' weights; None if heads are not normalised.
        cos, sin: [N, 1, dim / 2], of the rotation angles.
        heads, kv_heads: numbers of query heads, and of key and value heads.
        eps: what the norms add to the mean square.

    Returns what the gradient needs: (normalised heads, 1 / rms, weights), or () if heads are not
    normalised.
    """
    # A view: what is written into it changes `qkv`.
    queries_and_keys = qkv.unflatten(1, (heads + 2 * kv_heads, -1))[:, : heads + kv_heads]
    if q_weight is None or k_weight is None:
        queries_and_keys.copy_(rotate(queries_and_keys, cos, sin))
        return ()
    normed, inverse = normalise(queries_and_keys, eps)
    weight = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
    queries_and_keys.copy_(rotate(normed * weight, cos, sin))
    return normed, inverse, weight


def apply_rope_gradient(
    saved: Tensors,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dqkv: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """Compute the gradient of qkv before `apply_rope` from its gradient `dqkv` after that, both [N,
    (heads + 2 kv_heads) * dim]. For queries and keys `dqkv` is rotated back and taken through the
    norm, if there was one. `apply_rope` leaves values as they are, and so their gradient too.

    Args:
        saved: what `apply_rope` returned.
        cos, sin: [N, 1, dim / 2], of the rotation angles.
        heads, kv_heads: numbers of query heads, and of key and value heads.
    """
    by_head = dqkv.unflatten(1, (heads + 2 * kv_heads, -1))
    gradient = rotate(by_head[:, : heads + kv_heads], cos, -sin)  # -sin: back
    if saved:  # empty if heads were not normalised
        normed, inverse, weight = saved
        gradient = normalise_gradient(normed, inverse, weight, gradient).to(dqkv.dtype)
    return torch.cat([gradient, by_head[:, heads + kv_heads :]], 1).flatten(1)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [N, width], for gate_up [N, 2 width], which holds the gate in its
    first half."""
    gate_half, up_half = gate_up.chunk(2, -1)
    return F.silu(gate_half) * up_half


def gate_again(gate_up: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Return (silu(gate) * up, None) for a backward pass. The None stands for silu(gate), which the
    compiled gradient computes itself."""
    return gate(gate_up), None


def gate_gradient(gate_up: torch.Tensor, _: None, dy: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of gate_up [N, 2 width] (gate in the first half), from the gradient
    `dy` [N, width] of silu(gate) * up, in float32. The second argument is what `gate_again`
    saved: None."""
    gate_half, up_half = (part.float() for part in gate_up.chunk(2, -1))
    sigmoid = torch.sigmoid(gate_half)
    wide_dy = dy.float()
    # The derivative of silu at the gate.
    slope = sigmoid * (1 + gate_half * (1 - sigmoid))
    dgate = wide_dy * up_half * slope
    dup = wide_dy * gate_half * sigmoid
    return torch.cat([dgate, dup], -1).to(dy.dtype)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
    """Return weight * x / rms(x) over the last dimension, and keep nothing for a gradient. `eps` is
    what is added to the mean square."""
    return normalise(x, eps.number)[0] * weight


def plain_apply_rope(
    all_heads: torch.Tensor,
    weight: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: Eps,
) -> None:
    """Normalise (unless `weight` is None) and rotate the queries and keys of `all_heads` in place,
    and keep nothing for a gradient. The values stay as they are.

    Args:
        all_heads: [N, heads + 2 kv_heads, dim]: queries, keys, values; overwritten.
        weight: [heads + kv_heads, dim], the norm weight of each head; None for no norm.
        cos: [N, 1, at least dim / 2]; only the first dim / 2 are used. sin: [N, 1, dim / 2].
    """
    queries_and_keys = all_heads[:, : heads + kv_heads]
    inputs = queries_and_keys if weight is None else plain_norm(queries_and_keys, weight, eps)
    queries_and_keys.copy_(rotate(inputs, cos[..., : sin.shape[-1]], sin))


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    norm,
    norm_gradient,
    add_norm,
    add_norm_gradient,
    apply_rope,
    apply_rope_gradient,
    gate,
    gate_again,
    gate_gradient,
    plain_norm,
    plain_apply_rope,
)


def functions() -> list[Callable[..., Any]]:
    """Return the functions of `FUNCTIONS`, in that order, each wrapped so that torch.compile
    compiles it at its first call. Importing the compiler takes 75 MB of memory."""
    return [_compile_at_first_call(function) for function in FUNCTIONS]


def tolerate_failures() -> None:
    """From now on, let torch.compile run a function that it cannot compile uncompiled, instead of
    raising. This holds for the whole process."""
    settings: Any = import_module("torch._dynamo.config")
    settings.suppress_errors = True


def _compile_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that torch.compile compiles it at its first call, and again for other
    kinds of arguments."""
    compiled = torch.compile(function, backend=BACKEND)

    def call(*arguments: Any) -> Any:
        """Call the compiled function with tensors that require no gradient."""
        # The autograd nodes in kernels.py handle gradients; for tensors that require one
        # torch.compile would only compile a second graph.
        return compiled(*map(_without_gradients, arguments))

    return call


def _without_gradients(value: Any) -> Any:
    """Return `value` without gradients: a tensor is detached from its gradient graph. A tuple or
    list becomes a tuple in which every value is treated like this; any other value is returned as
    it is."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    # The exact type is compared, so that the named tuple `Eps` stays an `Eps`.
    if type(value) in (tuple, list):
        return tuple(map(_without_gradients, value))
    return value
