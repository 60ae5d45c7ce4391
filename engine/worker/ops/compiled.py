"""The functions of fused_ops.py as plain formulas, for torch.compile to fuse: what is quick when
every operation is a call of its own (results written into parts of tensors) it cannot read.

The first call of each makes a graph for its number of rows, the second with another number one for
all numbers.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

Tensors = tuple[torch.Tensor, ...]

BACKEND: Any = "inductor"  # what makes code of a graph


class Eps(NamedTuple):
    """What a norm adds under its root, as a number and as a tensor [1] on the device."""

    number: float
    tensor: torch.Tensor


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype), inverse


def normalise_gradient(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    grad, wide = (dy * weight).float(), normed.float()
    return (grad - wide * (grad * wide).mean(-1, keepdim=True)) * inverse


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    normed, inverse = normalise(x, eps)
    return normed * weight, (normed, inverse)


def norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    normed, inverse = saved
    return normalise_gradient(normed, inverse, weight, dy).to(dy.dtype)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    total = x + delta
    y, saved = norm(total, weight, eps)
    return total, y, saved


def add_norm_gradient(
    saved: Tensors, weight: torch.Tensor, dtotal: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    normed, inverse = saved
    return (normalise_gradient(normed, inverse, weight, dy) + dtotal).to(dy.dtype)


def apply_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv: int,
    eps: float,
) -> Tensors:
    """As `fused_ops.Pointwise.apply_rope`, in formulas that torch.compile fuses."""
    both = qkv.unflatten(1, (heads + 2 * kv, -1))[:, : heads + kv]
    if q_weight is None or k_weight is None:
        both.copy_(rotated(both, cos, sin))
        return ()
    normed, inverse = normalise(both, eps)
    weight = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv, -1)])
    both.copy_(rotated(normed * weight, cos, sin))
    return normed, inverse, weight


def apply_rope_gradient(
    saved: Tensors, cos: torch.Tensor, sin: torch.Tensor, d: torch.Tensor, heads: int, kv: int
) -> torch.Tensor:
    shaped = d.unflatten(1, (heads + 2 * kv, -1))
    back = rotated(shaped[:, : heads + kv], cos, -sin)
    if saved:
        normed, inverse, weight = saved
        back = normalise_gradient(normed, inverse, weight, back).to(d.dtype)
    return torch.cat([back, shaped[:, heads + kv :]], 1).flatten(1)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    opened, up = gate_up.chunk(2, -1)
    return F.silu(opened) * up


def gate_again(gate_up: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gate(gate_up), None


def gate_gradient(gate_up: torch.Tensor, _: None, dy: torch.Tensor) -> torch.Tensor:
    opened, up = (part.float() for part in gate_up.chunk(2, -1))
    share, wide = torch.sigmoid(opened), dy.float()
    slope = share * (1 + opened * (1 - share))
    return torch.cat([wide * up * slope, wide * opened * share], -1).to(dy.dtype)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
    return normalise(x, eps.number)[0] * weight


def plain_apply_rope(
    every: torch.Tensor,
    weight: torch.Tensor | None,
    heads: int,
    kv: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: Eps,
) -> None:
    """As `apply_rope`, without anything saved for a backward pass."""
    both = every[:, : heads + kv]
    x = both if weight is None else plain_norm(both, weight, eps)
    both.copy_(rotated(x, cos[..., : sin.shape[-1]], sin))


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
    """Each of them compiled at its first call; the compiler brings 75 MB into the process."""
    return [_compiled(function) for function in FUNCTIONS]


def forgive() -> None:
    """From now on what cannot be compiled runs as it is written instead of raising."""
    settings: Any = import_module("torch._dynamo.config")
    settings.suppress_errors = True


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made = torch.compile(function, backend=BACKEND)

    def call(*arguments: Any) -> Any:
        # Whether a gradient is wanted is the node's affair: a graph for each would be made.
        return made(*map(_bare, arguments))

    return call


def _bare(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_bare, value)) if type(value) in (tuple, list) else value
