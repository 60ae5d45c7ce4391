"""What stands between the matrix products of a layer: norms, rotary positions, the gate, each with
its gradient. One set of functions per decoder, chosen when its model is loaded:

- `torch`: as written here; always on a CPU.
- `liger`: the Triton kernels of liger-kernel (liger.py), one launch where torch makes several.
- `compiled`: the same formulas through torch.compile (compiled.py).

Base weights are frozen, so nothing here makes a gradient for one. No function writes into what it
was given but the two that rotate queries and keys. A set is tried on the model's sizes before it is
used, forward and backward, against torch's numbers; one that fails or differs is left alone, and
the run goes on with `torch`.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn import functional as F

from engine.worker.ops import compiled
from engine.worker.ops.compiled import Eps
from engine.worker.ops.liger import Liger

Tensors = tuple[torch.Tensor, ...]

KERNELS = "HONESMITH_KERNELS"  # torch, liger or compiled; unset: liger on a GPU that has it
CHOICES = ("torch", "liger", "compiled")
# Steps from which compiling pays, reckoned and never measured on a GPU: a minute of warm-up (95 s
# for the same graphs on a slow CPU, benchmarks/RESULTS.md) over the 60 ms that 8,192 tokens of a
# 4 B model save at 3.35 TB/s, about 25 MB less to read and write for each.
COMPILE_FROM_STEPS = 1000
# Relative distance from torch's numbers; the two formats round at every operation.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Rows a set is tried on, the second so many that their heads are 32,768 rows to normalise, from
# where on Liger has another kernel.
TRIED_ROWS = {"cpu": (5, 24), "cuda": (24, 2053)}


class Sizes(NamedTuple):
    """Of the layers a set of functions is tried on; `normed`: whether heads have norms."""

    hidden: int
    intermediate: int
    heads: int
    kv: int
    head_dim: int
    normed: bool


@dataclass(frozen=True)
class Pointwise:
    """A set of functions. N rows; `saved` is what a function gives its own gradient.

    Attributes:
        name: what the manifest says was used.
        norm: (x [N, hidden], weight, eps) to (weight * x / rms(x), saved).
        norm_gradient: (saved, weight, dy) to dx.
        add_norm: (x, delta, weight, eps) to (x + delta, its norm, saved).
        add_norm_gradient: (saved, weight, dtotal, dy) to the gradient of both summands.
        apply_rope: (qkv [N, (heads + 2 kv) dim], q_weight, k_weight, cos, sin, heads, kv, eps) to
            saved; queries and keys are normalised where there are weights, and rotated, in place.
            cos, sin: [N, 1, dim / 2].
        apply_rope_gradient: (saved, cos, sin, d, heads, kv) to the gradient of qkv.
        gate: gate_up [N, 2 width] to silu(gate) * up.
        gate_again: gate_up to (silu(gate) * up, saved), where both are wanted for a gradient.
        gate_gradient: (gate_up, saved or None, dy) to the gradient of gate_up.
        plain_norm: (x [..., n], weight, Eps) to its norm, where no gradient is wanted.
        plain_apply_rope: (heads [N, heads + 2 kv, dim], weight [heads + kv, dim] or None, heads,
            kv, cos [N, 1, dim], sin [N, 1, dim / 2], Eps): `apply_rope` without gradient.
    """

    name: str
    norm: Callable[..., tuple[torch.Tensor, Tensors]]
    norm_gradient: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor, Tensors]]
    add_norm_gradient: Callable[..., torch.Tensor]
    apply_rope: Callable[..., Tensors]
    apply_rope_gradient: Callable[..., torch.Tensor]
    gate: Callable[[torch.Tensor], torch.Tensor]
    gate_again: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    gate_gradient: Callable[..., torch.Tensor]
    plain_norm: Callable[[torch.Tensor, torch.Tensor, Eps], torch.Tensor]
    plain_apply_rope: Callable[..., None]


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) in x's dtype, and 1 / rms in float32 ([..., 1])."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return x * inverse, inverse
    return (x.float() * inverse).to(x.dtype), inverse


def normalise_gradient(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """d/dx of w * x / rms(x): (g - n * mean(g n)) / rms with g = w dy, n the normalised x."""
    grad = dy * weight
    along = torch.linalg.vecdot(grad, normed).unsqueeze(-1).mul_(-1 / normed.shape[-1])
    grad = grad.addcmul_(normed, along)
    return grad.mul_(inverse.to(grad.dtype))


def per_head(q: torch.Tensor, k: torch.Tensor, heads: int, kv: int) -> torch.Tensor:
    """[heads + kv, dim]: each head's norm weight."""
    return torch.cat([q.expand(heads, -1), k.expand(kv, -1)])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate the pairs (i, i + dim/2) of every head; `out` must not be `x`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    low, high = out[..., :half], out[..., half:]
    torch.mul(first, cos, out=low)
    low.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high)
    high.addcmul_(first, sin)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    normed, inverse = normalise(x, eps)
    return normed * weight, (normed, inverse)


def _norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    normed, inverse = saved
    return normalise_gradient(normed, inverse, weight, dy)


def _add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    total = x + delta
    normed, inverse = normalise(total, eps)
    return total, normed * weight, (normed, inverse)


def _add_norm_gradient(
    saved: Tensors, weight: torch.Tensor, dtotal: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    normed, inverse = saved
    return normalise_gradient(normed, inverse, weight, dy).add_(dtotal)


def _apply_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv: int,
    eps: float,
) -> Tensors:
    """Norm and rotation of queries and keys in place; returns what the backward pass needs."""
    both = _queries_and_keys(qkv, heads, kv)
    if q_weight is None or k_weight is None:
        rotate(both.clone(), cos, sin, both)
        return ()
    normed, inverse = normalise(both, eps)
    weight = per_head(q_weight, k_weight, heads, kv)
    rotate(normed * weight, cos, sin, both)
    return normed, inverse, weight


def _turn_gradient(
    saved: Tensors, cos: torch.Tensor, sin: torch.Tensor, d: torch.Tensor, heads: int, kv: int
) -> torch.Tensor:
    """The gradient of `_apply_rope`: rotated back, then through the norm."""
    d, count = d.contiguous(), d.shape[0]
    out = torch.empty_like(d)
    width = d.shape[1] // (heads + 2 * kv)
    shaped = d.view(count, heads + 2 * kv, width)
    target = out.view(count, heads + 2 * kv, width)
    target[:, heads + kv :] = shaped[:, heads + kv :]
    if saved:
        normed, inverse, weight = saved
        back = torch.empty_like(normed)
        rotate(shaped[:, : heads + kv], cos, -sin, back)
        target[:, : heads + kv] = normalise_gradient(normed, inverse, weight, back)
    else:
        rotate(shaped[:, : heads + kv], cos, -sin, target[:, : heads + kv])
    return out


def _queries_and_keys(qkv: torch.Tensor, heads: int, kv: int) -> torch.Tensor:
    """[N, heads + kv, dim], a view."""
    every = heads + 2 * kv
    return qkv.view(qkv.shape[0], every, qkv.shape[1] // every)[:, : heads + kv]


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gate_again(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    gate, up = gate_up.chunk(2, -1)
    opened = F.silu(gate)
    return opened * up, opened


def _gate_gradient(
    gate_up: torch.Tensor, opened: torch.Tensor | None, dy: torch.Tensor
) -> torch.Tensor:
    """d/d(gate, up) of silu(gate) * up; `opened` is silu(gate)."""
    gate, up = gate_up.chunk(2, -1)
    if opened is None:
        opened = F.silu(gate)
    width = gate.shape[1]
    out = torch.empty_like(gate_up)
    torch.mul(opened, dy, out=out[:, width:])
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=out[:, :width])
    return out


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
    if x.is_cuda and weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, eps.number)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = torch.addcmul(eps.tensor, size, size, value=1 / x.shape[-1]).rsqrt_()
    normed = x * inverse
    return (normed if x.dtype == torch.float32 else normed.to(x.dtype)).mul_(weight)


def _plain_apply_rope(
    every: torch.Tensor,
    weight: torch.Tensor | None,
    heads: int,
    kv: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: Eps,
) -> None:
    """As `_apply_rope`, without anything saved for a backward pass."""
    both = every[:, : heads + kv]
    x = both.clone() if weight is None else _plain_norm(both, weight, eps)
    first, second = x.chunk(2, -1)
    low, high = torch.mul(x, cos, out=both).chunk(2, -1)
    low.addcmul_(second, sin, value=-1)
    high.addcmul_(first, sin)


TORCH = Pointwise(
    "torch",
    _norm,
    _norm_gradient,
    _add_norm,
    _add_norm_gradient,
    _apply_rope,
    _turn_gradient,
    _gate,
    _gate_again,
    _gate_gradient,
    _plain_norm,
    _plain_apply_rope,
)


def of_compiler() -> Pointwise:
    """Torch's formulas through torch.compile."""
    return Pointwise("compiled", *compiled.functions())


def of_liger(kernels: Liger) -> Pointwise:
    """Liger's kernels behind the functions of the set."""

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
        every = qkv.view(qkv.shape[0], heads + 2 * kv, -1)
        if q_weight is None or k_weight is None:
            return kernels.apply_rope(every, None, heads, kv, cos, sin, eps)
        weight = per_head(q_weight, k_weight, heads, kv)
        return *kernels.apply_rope(every, weight, heads, kv, cos, sin, eps), weight

    def apply_rope_gradient(
        saved: Tensors, cos: torch.Tensor, sin: torch.Tensor, d: torch.Tensor, heads: int, kv: int
    ) -> torch.Tensor:
        shaped = d.reshape(d.shape[0], heads + 2 * kv, -1)
        weight = saved[-1] if saved else None
        return kernels.apply_rope_gradient(saved[:-1], weight, cos, sin, shaped, heads, kv).view_as(
            d
        )

    def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
        return kernels.norm(x, weight, eps.number)[0]

    def plain_apply_rope(
        every: torch.Tensor,
        weight: torch.Tensor | None,
        heads: int,
        kv: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: Eps,
    ) -> None:
        kernels.apply_rope(every, weight, heads, kv, cos, sin, eps.number)

    return Pointwise(
        f"liger {kernels.version}",
        kernels.norm,
        kernels.norm_gradient,
        kernels.add_norm,
        kernels.add_norm_gradient,
        apply_rope,
        apply_rope_gradient,
        kernels.gate,
        lambda gate_up: (kernels.gate(gate_up), None),
        lambda gate_up, _, dy: kernels.gate_gradient(gate_up, dy),
        plain_norm,
        plain_apply_rope,
    )


@dataclass(frozen=True)
class Choice:
    """The set to use, and why it is not the one that was wanted ("" when it is)."""

    functions: Pointwise
    why: str = ""


AS_WRITTEN = Choice(TORCH)


def choose(sizes: Sizes, dtype: torch.dtype, device: torch.device, steps: int = 0) -> Choice:
    """The set of functions for a model on a device, tried on its sizes.

    Args:
        steps: optimizer steps ahead, as far as known; `compiled` is taken from
            `COMPILE_FROM_STEPS` on.
    """
    asked = os.environ.get(KERNELS, "")
    if asked and asked not in CHOICES:
        return Choice(TORCH, f"{KERNELS}={asked} is none of {', '.join(CHOICES)}")
    if device.type != "cuda" or asked == "torch":
        return AS_WRITTEN
    if asked == "compiled":
        if steps < COMPILE_FROM_STEPS:
            return Choice(TORCH, f"{steps} steps; compiling pays from {COMPILE_FROM_STEPS}")
        choice = attempt(of_compiler, sizes, dtype, device)
        if choice.functions is not TORCH:
            compiled.forgive()
        return choice
    if not asked and find_spec("liger_kernel") is None:
        return AS_WRITTEN
    return attempt(lambda: of_liger(Liger()), sizes, dtype, device)


def attempt(
    make: Callable[[], Pointwise], sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Choice:
    """What `make` gives when it works here and has torch's numbers; else torch's, and why."""
    try:
        functions = make()
        worst, where = difference(functions, sizes, dtype, device)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; torch remains
        message = " ".join(str(error).split())[:200] or "no message"
        return Choice(TORCH, f"{type(error).__name__}: {message}")
    if not worst <= CLOSE[dtype]:
        return Choice(TORCH, f"{functions.name}: {where} differs from torch's by {worst:.1e}")
    return Choice(functions)


@torch.no_grad()
def difference(
    functions: Pointwise, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[float, str]:
    """(largest relative distance from torch's results, of which function), for two numbers of
    rows: at the second a compiler makes graphs for all."""
    worst, where = 0.0, ""
    for rows in TRIED_ROWS[device.type]:
        mine = trial(functions, sizes, rows, dtype, device)
        for name, wanted in trial(TORCH, sizes, rows, dtype, device).items():
            for got, exact in zip(mine[name], wanted, strict=True):
                apart = float((got.float() - exact.float()).norm() / exact.float().norm())
                if apart > worst or math.isnan(apart):
                    worst, where = apart, name
    return worst, where


def trial(
    functions: Pointwise, sizes: Sizes, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensors]:
    """Results of every function on the same random numbers, by its name."""
    chance = torch.Generator(device).manual_seed(rows)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance, device=device).to(dtype)

    eps, every = 1e-6, sizes.heads + 2 * sizes.kv
    x, delta, dtotal, dy = (numbers(rows, sizes.hidden) for _ in range(4))
    weight = 1 + 0.1 * numbers(sizes.hidden)
    y, saved = functions.norm(x, weight, eps)
    results: dict[str, Tensors] = {"norm": (y,)}
    results["norm_gradient"] = (functions.norm_gradient(saved, weight, dy),)
    total, y, saved = functions.add_norm(x, delta, weight, eps)
    results["add_norm"] = (total, y)
    results["add_norm_gradient"] = (functions.add_norm_gradient(saved, weight, dtotal, dy),)

    q, k = (1 + 0.1 * numbers(sizes.head_dim) for _ in range(2))
    q, k = (q, k) if sizes.normed else (None, None)
    angles = numbers(rows, 1, sizes.head_dim // 2).float()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    qkv, d = numbers(rows, every * sizes.head_dim), numbers(rows, every * sizes.head_dim)
    plain = qkv.clone().view(rows, every, -1)
    saved = functions.apply_rope(qkv, q, k, cos, sin, sizes.heads, sizes.kv, eps)
    results["apply_rope"] = (qkv,)
    back = functions.apply_rope_gradient(saved, cos, sin, d, sizes.heads, sizes.kv)
    results["apply_rope_gradient"] = (back,)

    gate_up, dy = numbers(rows, 2 * sizes.intermediate), numbers(rows, sizes.intermediate)
    results["gate"] = (functions.gate(gate_up),)
    again, opened = functions.gate_again(gate_up)
    results["gate_again"] = (again,)
    results["gate_gradient"] = (functions.gate_gradient(gate_up, opened, dy),)

    number = Eps(eps, torch.full((1,), eps, device=device))
    results["plain_norm"] = (functions.plain_norm(x, weight, number),)
    both = per_head(q, k, sizes.heads, sizes.kv) if q is not None and k is not None else None
    wide = torch.cat([cos, cos], -1)
    functions.plain_apply_rope(plain, both, sizes.heads, sizes.kv, wide, sin, number)
    results["plain_apply_rope"] = (plain,)
    return results
