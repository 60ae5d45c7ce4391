"""The functions between the matrix products of a layer: norms, rotary positions and the gate, each
with its gradient. A decoder has one set of them, which is chosen when its model is loaded:

- `torch`: as written here; always on a CPU.
- `liger`: the Triton kernels of liger-kernel (liger.py), which take fewer launches than torch's.
- `compiled`: the same formulas through torch.compile (compiled.py).

Base weights are frozen, so nothing here makes a gradient for one. No function writes into its
arguments, except the two that rotate queries and keys. Before a set is used, it is tried on the
model's sizes, forward and backward, and compared with torch's numbers; if it fails or differs, the
run uses `torch`.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn import functional as F

from engine.worker.core import switched_off
from engine.worker.ops import compiled, norms
from engine.worker.ops.compiled import Eps
from engine.worker.ops.liger import Liger, LigerFunctions
from engine.worker.ops.norms import (
    head_norm_weights,
    norm_weight_per_head,
    normalise,
    normalise_gradient,
)

Tensors = tuple[torch.Tensor, ...]

KERNELS = "HONESMITH_KERNELS"  # torch, liger or compiled; unset: liger on a GPU that has it
CHOICES = ("torch", "liger", "compiled")
# The number of steps from which compiling pays: a minute of warm-up, divided by the 60 ms that a
# step is estimated to save. The warm-up took 95 s on a slow CPU (benchmarks/RESULTS.md). The saving
# is about 25 MB less to read and write for each of 8,192 tokens of a 4 B model, at 3.35 TB/s.
# Neither was measured on a GPU.
COMPILE_FROM_STEPS = 1000
# Largest relative distance from torch's numbers that rounding explains, by number format.
MAX_DISTANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TRIED_EPS = 1e-6  # of the norms, when a set is tried
# Numbers of rows that a set is tried on. The second one is so large that the heads (each a row to
# normalise) are more than 32,768 rows: from that number on Liger uses another kernel.
TRIED_ROWS = {"cpu": (5, 24), "cuda": (24, 2053)}


class Sizes(NamedTuple):
    """Sizes of the layers that a set of functions is tried on. `normed` says whether queries and
    keys are normalised per head."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    normed: bool


@dataclass(frozen=True)
class LayerFunctions:
    """A set of functions. N rows; `saved` is what a function hands to its own gradient.

    Attributes:
        name: of the set, as the run's manifest records it.
        norm: (x [N, hidden], weight, eps) to (weight * x / rms(x), saved).
        norm_gradient: (saved, weight, dy) to dx.
        add_norm: (x, delta, weight, eps) to (x + delta, its norm, saved).
        add_norm_gradient: (saved, weight, dtotal, dy) to the gradient of both summands.
        apply_rope: (qkv [N, (heads + 2 kv_heads) dim], q_weight, k_weight, cos, sin, heads,
            kv_heads, eps) to saved. Queries and keys are normalised (RMS norm with `eps`), if there
            are weights, and rotated, in place. cos, sin: [N, 1, dim / 2].
        apply_rope_gradient: (saved, cos, sin, dqkv, heads, kv_heads) to the gradient of qkv before
            `apply_rope`, from its gradient `dqkv` after that.
        gate: gate_up [N, 2 width] to silu(gate) * up.
        gate_again: gate_up to (silu(gate) * up, saved), for a backward pass that needs both.
        gate_gradient: (gate_up, saved, dy) to the gradient of gate_up; `saved` may be None.
        plain_norm: (x [..., n], weight, Eps) to its norm, if no gradient is needed.
        plain_apply_rope: (heads [N, heads + 2 kv_heads, dim], weight [heads + kv_heads, dim] or
            None, heads, kv_heads, cos [N, 1, dim], sin [N, 1, dim / 2], Eps): `apply_rope`, if no
            gradient is needed.
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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate every head of x [N, heads, dim] and write the result into `out`, which must not be x.
    Numbers i and i + dim / 2 of a head are a pair, rotated by the angle whose cosine and sine stand
    at i in `cos` and `sin` [N, 1, dim / 2]."""
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)


def _apply_rope(
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
        cos, sin: [N, 1, dim / 2], of the tokens' rotation angles.
        heads, kv_heads: numbers of query heads, and of key and value heads.
        eps: what the norms add to the mean square.

    Returns what the gradient needs: (normalised heads, 1 / rms, the weight of each head), or () if
    there are no weights.
    """
    # A view: what is written into it changes `qkv`.
    queries_and_keys = _queries_and_keys_of(qkv, heads, kv_heads)
    if q_weight is None or k_weight is None:
        # Rotate a copy, because `rotate` must not write into its input.
        rotate(queries_and_keys.clone(), cos, sin, out=queries_and_keys)
        return ()
    normed, inverse = normalise(queries_and_keys, eps)
    weight = norm_weight_per_head(q_weight, k_weight, heads, kv_heads)
    rotate(normed * weight, cos, sin, out=queries_and_keys)
    return normed, inverse, weight


def _apply_rope_gradient(
    saved: Tensors,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dqkv: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> torch.Tensor:
    """Compute the gradient of qkv before `_apply_rope` from its gradient `dqkv` after that, both
    [N, (heads + 2 kv_heads) * dim]. For queries and keys `dqkv` is rotated back and taken through
    the norm, if there was one. `_apply_rope` leaves values as they are, and so their gradient too.

    Args:
        saved: what `_apply_rope` returned.
        cos, sin: [N, 1, dim / 2], of the tokens' rotation angles.
        heads, kv_heads: numbers of query heads, and of key and value heads.
    """
    dqkv = dqkv.contiguous()
    out = torch.empty_like(dqkv)
    values_width = dqkv.shape[1] * kv_heads // (heads + 2 * kv_heads)  # they stand last
    out[:, -values_width:] = dqkv[:, -values_width:]
    gradient = _queries_and_keys_of(dqkv, heads, kv_heads)
    target = _queries_and_keys_of(out, heads, kv_heads)
    if saved:  # empty if heads were not normalised
        normed, inverse, weight = saved
        unrotated = torch.empty_like(normed)
        rotate(gradient, cos, -sin, out=unrotated)  # -sin: back
        target.copy_(normalise_gradient(normed, inverse, weight, unrotated))
    else:
        rotate(gradient, cos, -sin, out=target)
    return out


def _queries_and_keys_of(qkv: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """View the queries and keys of qkv [N, (heads + 2 kv_heads) * dim] as [N, heads + kv_heads,
    dim]; the values, which stand last, are left out."""
    all_heads = heads + 2 * kv_heads
    return qkv.view(qkv.shape[0], all_heads, qkv.shape[1] // all_heads)[:, : heads + kv_heads]


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [N, width], for gate_up [N, 2 width], which holds the gate in its
    first half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gate_again(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (silu(gate) * up, silu(gate)) for gate_up [N, 2 width]. `_gate_gradient` takes the
    second value."""
    gate, up = gate_up.chunk(2, -1)
    silu = F.silu(gate)
    return silu * up, silu


def _gate_gradient(
    gate_up: torch.Tensor, silu: torch.Tensor | None, dy: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of gate_up [N, 2 width] from the gradient `dy` [N, width] of
    silu(gate) * up. `silu` is silu(gate) if `_gate_again` has computed it; if it is None, it is
    computed here."""
    gate, up = gate_up.chunk(2, -1)
    if silu is None:
        silu = F.silu(gate)
    width = gate.shape[1]
    out = torch.empty_like(gate_up)
    # The first half is the gradient of gate, the second that of up. Both are written into `out`.
    torch.mul(silu, dy, out=out[:, width:])
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=out[:, :width])
    return out


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
    """Return weight * x / rms(x) over the last dimension, and keep nothing for a gradient. `weight`
    is [n] for all rows, or [heads, n] for x [N, heads, n]; `eps` is added to the mean square."""
    # This rounds at the same places as training does (norms.py). F.rms_norm is one kernel, but
    # rounds only once: training would then see slightly other probabilities than sampling did.
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    # 1 / sqrt(eps + mean of the squares)
    inverse = torch.addcmul(eps.tensor, size, size, value=1 / x.shape[-1]).rsqrt_()
    normed = (x * inverse).to(x.dtype)  # the product is float32
    return normed.mul_(weight)


def _plain_apply_rope(
    all_heads: torch.Tensor,
    weight: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: Eps,
) -> None:
    """Normalise queries and keys per head (unless `weight` is None) and rotate them by their
    positions, in place. Nothing is kept for a gradient.

    Args:
        all_heads: [N, heads + 2 kv_heads, dim]: queries, keys, values; overwritten.
        weight: [heads + kv_heads, dim], the norm weight of each head; None for no norm.
        cos: [N, 1, dim], each value for both halves of a head; sin: [N, 1, dim / 2].
    """
    queries_and_keys = all_heads[:, : heads + kv_heads]
    if weight is None:
        inputs = queries_and_keys.clone()
    else:
        inputs = _plain_norm(queries_and_keys, weight, eps)
    # As in `rotate`, but both halves are multiplied by cos at once.
    first, second = inputs.chunk(2, -1)
    out_first, out_second = torch.mul(inputs, cos, out=queries_and_keys).chunk(2, -1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)


TORCH = LayerFunctions(
    name="torch",
    norm=norms.norm,
    norm_gradient=norms.norm_gradient,
    add_norm=norms.add_norm,
    add_norm_gradient=norms.add_norm_gradient,
    apply_rope=_apply_rope,
    apply_rope_gradient=_apply_rope_gradient,
    gate=_gate,
    gate_again=_gate_again,
    gate_gradient=_gate_gradient,
    plain_norm=_plain_norm,
    plain_apply_rope=_plain_apply_rope,
)


def compiled_functions() -> LayerFunctions:
    """Make the set named "compiled": torch's formulas, each compiled by torch.compile at its first
    call."""
    # `functions` returns them in the order of the attributes of `LayerFunctions`.
    return LayerFunctions("compiled", *compiled.functions())


def liger_functions(kernels: Liger) -> LayerFunctions:
    """Make the set of functions named "liger": the Triton kernels of liger-kernel. Kernels that
    take other arguments than the functions of the set are called through `LigerFunctions`."""
    with_other_arguments = LigerFunctions(kernels)
    return LayerFunctions(
        name=f"liger {kernels.version}",
        norm=kernels.norm,
        norm_gradient=kernels.norm_gradient,
        add_norm=kernels.add_norm,
        add_norm_gradient=kernels.add_norm_gradient,
        apply_rope=with_other_arguments.apply_rope,
        apply_rope_gradient=with_other_arguments.apply_rope_gradient,
        gate=kernels.gate,
        gate_again=with_other_arguments.gate_again,
        gate_gradient=with_other_arguments.gate_gradient,
        plain_norm=with_other_arguments.plain_norm,
        plain_apply_rope=with_other_arguments.plain_apply_rope,
    )


@dataclass(frozen=True)
class Choice:
    """The set of functions to use. `why` is the reason why it is not the set that was requested, or
    not the usual one; "" if it is."""

    functions: LayerFunctions
    why: str = ""


AS_WRITTEN = Choice(TORCH)  # the choice if no other set was to be tried


def choose(sizes: Sizes, dtype: torch.dtype, device: torch.device, steps: int = 0) -> Choice:
    """Choose the set of functions for a model on a device.

    On a CPU it is torch's set. On a GPU it is the set that the variable HONESMITH_KERNELS names; if
    that is unset, Liger's if liger-kernel is installed, else torch's. If the set cannot be used,
    torch's is chosen, with the reason; nothing is raised.

    Args:
        sizes: of the model's layers; a set is tried on tensors of these sizes.
        dtype: the number format of the model.
        steps: the number of optimizer steps ahead, as far as known; few do not pay for compiling.
    """
    requested = os.environ.get(KERNELS, "")
    if requested and requested not in CHOICES:
        return Choice(TORCH, f"{KERNELS}={requested} is none of {', '.join(CHOICES)}")
    if device.type != "cuda" or requested == "torch":
        return AS_WRITTEN
    if switched_off.is_off("fused_kernels"):
        return Choice(TORCH, switched_off.why_off("fused_kernels"))
    if requested == "compiled":
        return _compiled_if_it_pays(sizes, dtype, device, steps)
    if not requested and find_spec("liger_kernel") is None:
        return AS_WRITTEN
    return try_functions(lambda: liger_functions(Liger()), sizes, dtype, device)


def _compiled_if_it_pays(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, steps: int
) -> Choice:
    """Choose the set `compiled` if it works on the model's sizes and the `steps` optimizer steps
    ahead are enough to pay for compiling. Otherwise choose the set `TORCH`, with the reason."""
    if steps < COMPILE_FROM_STEPS:
        return Choice(TORCH, f"{steps} steps; compiling pays from {COMPILE_FROM_STEPS}")
    choice = try_functions(compiled_functions, sizes, dtype, device)
    if choice.functions is not TORCH:
        # The run compiles again for other sizes later. A failure then must not end the run.
        compiled.tolerate_failures()
    return choice


def try_functions(
    make_functions: Callable[[], LayerFunctions],
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
) -> Choice:
    """Try the set of functions that `make_functions` returns, on tensors of these sizes. It is
    chosen if it runs here and its results are within MAX_DISTANCE of the results of torch's set.
    Otherwise torch's set is chosen, with the reason."""
    try:
        functions = make_functions()
        largest_distance, function_name = largest_difference(functions, sizes, dtype, device)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; torch remains
        # One line, short enough for an event.
        message = " ".join(str(error).split())[:200] or "no message"
        return Choice(TORCH, f"{type(error).__name__}: {message}")
    if largest_distance > MAX_DISTANCE[dtype] or math.isnan(largest_distance):
        return Choice(
            TORCH,
            f"{functions.name}: {function_name} differs from torch's by {largest_distance:.1e}",
        )
    return Choice(functions)


@torch.no_grad()
def largest_difference(
    functions: LayerFunctions, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[float, str]:
    """Measure how far the results of a set of functions are from those of torch's set, on the
    same random numbers. Returns (the largest relative distance, the name of the function that
    has it); the distance is NaN if any is."""
    largest_distance = 0.0
    function_name = ""
    # At the second number of rows torch.compile generates new code, which serves any number.
    for rows in TRIED_ROWS[device.type]:
        results = results_by_function(functions, sizes, rows, dtype, device)
        expected_results = results_by_function(TORCH, sizes, rows, dtype, device)
        for name, expected_tensors in expected_results.items():
            for result, expected in zip(results[name], expected_tensors, strict=True):
                distance = _relative_distance(result, expected)
                # Once the largest distance is NaN it stays: no number compares as larger.
                if distance > largest_distance or math.isnan(distance):
                    largest_distance, function_name = distance, name
    return largest_distance, function_name


def _relative_distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute the norm of (result - expected), divided by the norm of `expected`, in float32."""
    error = (result.float() - expected.float()).norm()
    return float(error / expected.float().norm())


class _Draw:
    """Draws random tensors for a trial. Two objects with the same `rows` draw the same tensors in
    the same calls."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare to draw tensors of this dtype on this device. `rows` is the seed, and also the
        number of rows of the tensors that a trial asks for."""
        self.rows, self.dtype, self.device = rows, dtype, device
        self.generator = torch.Generator(device).manual_seed(rows)

    def __call__(self, *shape: int) -> torch.Tensor:
        """Draw a tensor of this shape from the standard normal distribution."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.to(self.dtype)


class _NormInputs(NamedTuple):
    """Random arguments for the norms of a set; `LayerFunctions` explains their names."""

    x: torch.Tensor
    delta: torch.Tensor
    dtotal: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def drawn(cls, draw: _Draw, sizes: Sizes) -> "_NormInputs":
        """Draw the arguments with `draw`: tensors [rows, hidden], and a weight [hidden] close to
        1. The order of the draws decides the numbers."""
        x, delta, dtotal, dy = (draw(draw.rows, sizes.hidden) for _ in range(4))
        return cls(x, delta, dtotal, dy, weight=1 + 0.1 * draw(sizes.hidden))


class _RopeInputs(NamedTuple):
    """Random arguments for the rotations of a set; `LayerFunctions` explains their names.
    `q_weight` and `k_weight` are None if the model does not normalise heads; `dqkv` is the gradient
    of the rotated `qkv`."""

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    qkv: torch.Tensor
    dqkv: torch.Tensor

    @classmethod
    def drawn(cls, draw: _Draw, sizes: Sizes) -> "_RopeInputs":
        """Draw the arguments with `draw`, for a model of these sizes. Weights are drawn even if
        heads have no norm, so that the numbers drawn after them are the same in both cases."""
        q_weight, k_weight = (1 + 0.1 * draw(sizes.head_dim) for _ in range(2))
        angles = draw(draw.rows, 1, sizes.head_dim // 2).float()
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        qkv, dqkv = (draw(draw.rows, width) for _ in range(2))
        return cls(
            q_weight=q_weight if sizes.normed else None,
            k_weight=k_weight if sizes.normed else None,
            cos=angles.cos().to(draw.dtype),
            sin=angles.sin().to(draw.dtype),
            qkv=qkv,
            dqkv=dqkv,
        )


def results_by_function(
    functions: LayerFunctions, sizes: Sizes, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensors]:
    """Run every function of a set on random tensors with `rows` rows, for layers of these sizes.
    Returns the results by the function's name. The random numbers are the same for every set."""
    draw = _Draw(rows, dtype, device)
    norms = _NormInputs.drawn(draw, sizes)
    rope = _RopeInputs.drawn(draw, sizes)
    return (
        _norm_results(functions, norms)
        | _rope_results(functions, rope, sizes)
        | _gate_results(functions, draw, sizes)
        | _plain_results(functions, norms, rope, sizes)
    )


def _norm_results(functions: LayerFunctions, inputs: _NormInputs) -> dict[str, Tensors]:
    """Run the norms of a set of functions and their gradients on `inputs`. Returns the results by
    the function's name."""
    x, delta, dtotal, dy, weight = inputs
    y, saved = functions.norm(x, weight, TRIED_EPS)
    dx = functions.norm_gradient(saved, weight, dy)
    total, y_of_total, saved = functions.add_norm(x, delta, weight, TRIED_EPS)
    dboth = functions.add_norm_gradient(saved, weight, dtotal, dy)
    return {
        "norm": (y,),
        "norm_gradient": (dx,),
        "add_norm": (total, y_of_total),
        "add_norm_gradient": (dboth,),
    }


def _rope_results(
    functions: LayerFunctions, inputs: _RopeInputs, sizes: Sizes
) -> dict[str, Tensors]:
    """Run the rotation of a set of functions and its gradient on `inputs`. Returns the results by
    the function's name; that of `apply_rope` is the tensor that it has changed in place."""
    q_weight, k_weight, cos, sin, qkv, dqkv = inputs
    qkv = qkv.clone()  # it is rotated in place
    heads, kv_heads = sizes.heads, sizes.kv_heads
    saved = functions.apply_rope(qkv, q_weight, k_weight, cos, sin, heads, kv_heads, TRIED_EPS)
    gradient = functions.apply_rope_gradient(saved, cos, sin, dqkv, heads, kv_heads)
    return {"apply_rope": (qkv,), "apply_rope_gradient": (gradient,)}


def _gate_results(functions: LayerFunctions, draw: _Draw, sizes: Sizes) -> dict[str, Tensors]:
    """Run the gate of a set of functions, its second computation for the backward pass, and its
    gradient, on tensors from `draw` for an MLP of these sizes. Returns the results by the
    function's name."""
    gate_up = draw(draw.rows, 2 * sizes.intermediate)
    dy = draw(draw.rows, sizes.intermediate)
    gated = functions.gate(gate_up)
    # `saved` is what the second computation keeps for `gate_gradient`.
    gated_again, saved = functions.gate_again(gate_up)
    dgate_up = functions.gate_gradient(gate_up, saved, dy)
    return {"gate": (gated,), "gate_again": (gated_again,), "gate_gradient": (dgate_up,)}


def _plain_results(
    functions: LayerFunctions, norms: _NormInputs, rope: _RopeInputs, sizes: Sizes
) -> dict[str, Tensors]:
    """Run the functions of a set that keep nothing for a gradient, on the inputs of its norms and
    its rotation. Returns the results by the function's name."""
    heads, kv_heads = sizes.heads, sizes.kv_heads
    eps = Eps(TRIED_EPS, norms.x.new_full((1,), TRIED_EPS, dtype=torch.float32))
    normed = functions.plain_norm(norms.x, norms.weight, eps)
    head_weights = head_norm_weights(rope.q_weight, rope.k_weight, heads, kv_heads)
    all_heads = rope.qkv.clone().view(len(rope.qkv), heads + 2 * kv_heads, -1)
    cos = torch.cat([rope.cos, rope.cos], -1)  # for both halves of a head
    functions.plain_apply_rope(all_heads, head_weights, heads, kv_heads, cos, rope.sin, eps)
    return {"plain_norm": (normed,), "plain_apply_rope": (all_heads,)}
