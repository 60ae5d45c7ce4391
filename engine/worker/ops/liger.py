"""The kernels of the package liger-kernel (Triton), as the functions between matrix products;
fused_ops.py describes their arguments and results.

Casting is Llama's, as in transformers: statistics in float32, and the normalised row is rounded
before it is multiplied with the weight. The offset that Gemma adds to weights is 0. Weights are
frozen, so no kernel is asked for their gradient. Some kernels can overwrite an input (`in_place`);
that is only allowed for memory that was made here.

Rotations are launched on queries and keys in the one tensor that holds both; Liger's own wrapper
would copy both first, and save nothing. Liger's fused head is not used: it computes every row of a
batch and returns their sum, while `TokenLogprobs` computes the trained rows and returns each.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from engine.worker.ops.compiled import Eps
from engine.worker.ops.norms import head_norm_weights

# Liger's number for Llama's way of casting: x / rms(x) is computed in float32 and rounded to x's
# dtype before it is multiplied with the weight.
LLAMA = 0
OFFSET = 0.0  # what Liger adds to the norms' weights; some models store them minus 1
STAGES = 2  # of the kernel's pipeline, as Liger's own autograd node sets it


class Liger:
    """The kernels of liger-kernel, imported when the object is made.

    Raises:
        ImportError: if liger-kernel or Triton is missing.
        AttributeError: if a kernel has another name than in the versions known here.
    """

    def __init__(self) -> None:
        """Import the kernels.

        Raises:
            ImportError: if liger-kernel or Triton is missing.
            AttributeError: if a kernel has another name than in the versions known here.
        """
        self.version = version("liger-kernel")
        # Imported by name and only now, because most machines lack the package and never use it.
        self._rms_norm: Any = import_module("liger_kernel.ops.rms_norm")
        self._sum_and_norm: Any = import_module("liger_kernel.ops.fused_add_rms_norm")
        swiglu: Any = import_module("liger_kernel.ops.swiglu")
        self._gate: Any = swiglu.swiglu_fused_gate_up_forward
        self._gate_gradient: Any = swiglu.swiglu_fused_gate_up_backward
        self._rope: Any = import_module("liger_kernel.ops.rope")._triton_rope
        self._launch_settings: Any = import_module("liger_kernel.ops.utils").calculate_settings
        self._next_power_of_2: Any = import_module("triton").next_power_of_2

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return (weight * x / rms(x), the tensors that the gradient needs) for x [..., width]. rms
        is the root of the mean square over the last dimension; `eps` is added to the mean square.
        `weight` is [width]; None normalises without a weight."""
        x = x.contiguous()  # as the kernel reads it
        row_mode = None  # Liger chooses between its kernels by the number of rows
        y, _, inverse, *_ = self._rms_norm.rms_norm_forward(x, weight, eps, OFFSET, LLAMA, row_mode)
        return y, (x, inverse)

    def norm_gradient(
        self, saved: tuple[torch.Tensor, ...], weight: torch.Tensor, dy: torch.Tensor
    ) -> torch.Tensor:
        """Compute the gradient of x in `norm`, from the gradient `dy` of its first result. `saved`
        is its second result."""
        return self._norm_backward(saved, weight, dy.contiguous(), in_place=False)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return (x + delta, weight times the RMS norm of that sum, the tensors that the gradient
        needs: the sum and its 1 / rms). x and delta are [N, width]; `eps` is added to the mean
        square."""
        y, total, inverse, *_ = self._sum_and_norm.fused_add_rms_norm_forward(
            x.contiguous(), delta.contiguous(), weight, eps, OFFSET, LLAMA
        )
        return total, y, (total, inverse)

    def add_norm_gradient(
        self,
        saved: tuple[torch.Tensor, ...],
        weight: torch.Tensor,
        dtotal: torch.Tensor,
        dy: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the gradient of x in `add_norm`, which is also the gradient of delta. `saved` is
        the third result of `add_norm`, `dtotal` the gradient of its first (the sum x + delta), `dy`
        that of its second (the norm of the sum)."""
        total, inverse = saved
        block, warps = self._launch_settings(total.shape[-1])
        dx, *_ = self._sum_and_norm.fused_add_rms_norm_backward(
            dy.contiguous(),
            dtotal.contiguous(),
            total,
            weight,
            inverse,
            OFFSET,
            LLAMA,
            block,
            warps,
            STAGES,
            False,  # not in place
            needs_dw=False,  # weights are frozen
        )
        return dx

    def apply_rope(
        self,
        all_heads: torch.Tensor,
        weight: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """Normalise queries and keys (unless `weight` is None) and rotate them, in place. Returns
        what the gradient needs; () if `weight` is None.

        Args:
            all_heads: [N, heads + 2 kv_heads, dim], contiguous: queries, keys, values; overwritten.
            weight: [heads + kv_heads, dim], the norm weight of each head, or None.
            cos, sin: [N, 1, at least dim / 2], of the tokens' rotation angles.
            eps: what the norms add to the mean square.
        """
        saved: tuple[torch.Tensor, ...] = ()
        if weight is not None:
            queries_and_keys = all_heads[:, : heads + kv_heads]
            # Give `norm` a copy: it saves its input for the gradient, and the product below
            # overwrites the original. `norm` itself copies only an input that is not contiguous.
            original = queries_and_keys.clone(memory_format=torch.contiguous_format)
            normed, saved = self.norm(original, weight=None, eps=eps)
            torch.mul(normed, weight, out=queries_and_keys)
        self._rotate(all_heads, heads, kv_heads, cos, sin, back=False)
        return saved

    def apply_rope_gradient(
        self,
        saved: tuple[torch.Tensor, ...],
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dout: torch.Tensor,
        heads: int,
        kv_heads: int,
    ) -> torch.Tensor:
        """Compute the gradient of `all_heads` before `apply_rope` from its gradient `dout` after
        that; both are [N, heads + 2 kv_heads, dim]. `saved` is what `apply_rope` returned; the
        other arguments are those of `apply_rope`."""
        out = dout.clone(memory_format=torch.contiguous_format)
        self._rotate(out, heads, kv_heads, cos, sin, back=True)
        if weight is not None:
            unrotated = out[:, : heads + kv_heads]
            # `apply_rope` normalised without the weight and multiplied the result with it.
            dnormed = unrotated * weight  # new memory, which the kernel may overwrite
            unrotated.copy_(self._norm_backward(saved, weight=None, dy=dnormed, in_place=True))
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [N, width], for gate_up [N, 2 width], which holds the gate in its
        first half."""
        return self._gate(gate_up.contiguous())[1]  # the first result is the input

    def gate_gradient(self, gate_up: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of gate_up [N, 2 width] in `gate`, from the gradient `dy` [N, width]
        of its result."""
        return self._gate_gradient(gate_up.contiguous(), dy.contiguous(), in_place=False)

    def _norm_backward(
        self,
        saved: tuple[torch.Tensor, ...],
        weight: torch.Tensor | None,
        dy: torch.Tensor,
        *,
        in_place: bool,
    ) -> torch.Tensor:
        """Compute the gradient of x in `norm`, from the gradient `dy` of its first result. `saved`
        is its second result, `weight` its argument; `in_place` lets the kernel overwrite `dy`."""
        x, inverse = saved
        width = x.shape[-1]
        block, warps = self._launch_settings(width)
        dx, *_ = self._rms_norm.rms_norm_backward(
            dy,
            x.view(-1, width),
            weight,
            inverse,
            OFFSET,
            LLAMA,
            block,
            warps,
            in_place,
            None,  # row mode: Liger chooses between its kernels by the number of rows
            needs_dw=False,  # weights are frozen
        )
        return dx

    def _rotate(
        self,
        all_heads: torch.Tensor,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        back: bool,
    ) -> None:
        """Rotate queries and keys by their positions, in place; with `back` in the opposite
        direction, as the backward pass does.

        Args:
            all_heads: [N, heads + 2 kv_heads, dim]: queries, keys, values.
            cos, sin: [N, 1, at least dim / 2], of the tokens' rotation angles.
        """
        count, _, dim = all_heads.shape
        # Triton's blocks must have sizes that are powers of two.
        padded_heads, padded_kv = self._next_power_of_2(heads), self._next_power_of_2(kv_heads)
        padded_dim = self._next_power_of_2(dim)
        stride = all_heads.stride(0)  # from one token to the next
        # The kernel takes all but the last two arguments by position alone.
        self._rope[(count,)](
            all_heads,  # begins with the queries
            stride,
            all_heads[:, heads:],  # begins with the keys
            stride,
            cos,
            cos.stride(0),
            sin,
            sin.stride(0),
            count,
            1,  # batches of rows
            1,  # batches of angles
            heads,
            kv_heads,
            dim,
            padded_heads,
            padded_kv,
            padded_dim,
            padded_dim,
            dim,
            BLOCK_SIZE=max(padded_heads, padded_kv),
            BACKWARD_PASS=back,
        )


class LigerFunctions:
    """Liger's kernels with the arguments that `LayerFunctions` describes, for those kernels that
    take others."""

    def __init__(self, kernels: Liger) -> None:
        """Call the kernels of `kernels`."""
        self.kernels = kernels

    def apply_rope(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """Normalise (if there are weights) and rotate the queries and keys within qkv [N, (heads +
        2 kv_heads) * dim], in place; `LayerFunctions.apply_rope` describes the arguments. Returns
        what the gradient needs: the kernel's tensors, then the weight of each head; () if heads are
        not normalised."""
        all_heads = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
        weight = head_norm_weights(q_weight, k_weight, heads, kv_heads)
        saved = self.kernels.apply_rope(all_heads, weight, heads, kv_heads, cos, sin, eps)
        return saved if weight is None else (*saved, weight)

    def apply_rope_gradient(
        self,
        saved: tuple[torch.Tensor, ...],
        cos: torch.Tensor,
        sin: torch.Tensor,
        dqkv: torch.Tensor,
        heads: int,
        kv_heads: int,
    ) -> torch.Tensor:
        """Compute the gradient of qkv before `apply_rope` from its gradient `dqkv` after that, both
        [N, (heads + 2 kv_heads) * dim]. `saved` is what `apply_rope` returned: the kernel's tensors
        and the weight of each head, or ()."""
        by_head = dqkv.reshape(dqkv.shape[0], heads + 2 * kv_heads, -1)
        weight = saved[-1] if saved else None  # nothing was saved if heads have no norm
        gradient = self.kernels.apply_rope_gradient(
            saved[:-1], weight, cos, sin, by_head, heads, kv_heads
        )
        return gradient.view_as(dqkv)

    def gate_again(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (silu(gate) * up, None) for gate_up [N, 2 width], gate first. The None says that
        nothing is saved for `gate_gradient`, because Liger's kernel computes silu(gate) again."""
        return self.kernels.gate(gate_up), None

    def gate_gradient(
        self, gate_up: torch.Tensor, _saved: torch.Tensor | None, dy: torch.Tensor
    ) -> torch.Tensor:
        """Compute the gradient of gate_up [N, 2 width] from the gradient `dy` [N, width] of
        silu(gate) * up. Nothing has been saved for it."""
        return self.kernels.gate_gradient(gate_up, dy)

    def plain_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: Eps) -> torch.Tensor:
        """Return weight * x / rms(x) over the last dimension. What the kernel saves for a gradient
        is dropped, because none is needed."""
        return self.kernels.norm(x, weight, eps.number)[0]

    def plain_apply_rope(
        self,
        all_heads: torch.Tensor,
        weight: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: Eps,
    ) -> None:
        """Normalise (unless `weight` [heads + kv_heads, dim] is None) and rotate the queries and
        keys in `all_heads` [N, heads + 2 kv_heads, dim], in place. What the kernel returns for a
        gradient is dropped, because none is needed."""
        self.kernels.apply_rope(all_heads, weight, heads, kv_heads, cos, sin, eps.number)
