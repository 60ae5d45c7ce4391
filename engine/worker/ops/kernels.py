"""The autograd nodes of our own forward. Each replaces several of torch's nodes, with its backward
pass written out. Base weights are frozen, so no node makes a gradient for them. Each node gets the
set of functions (fused_ops.py) that computes norms, rotations and gates.

Shapes: N packed tokens, `in`/`out` features of a linear layer, r the adapter's rank. Every node
works in the dtype of its input; adapters are float32 always.
"""

# once_differentiable hides the parameters of a backward from the type checker.
# pyright: reportIncompatibleMethodOverride=false

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engine.worker.ops.fused_ops import TORCH, LayerFunctions
from engine.worker.ops.low_rank import LoraPlacement, factor_gradients, linear_with_adapter
from engine.worker.ops.matmul import OutputLayer, linear


@dataclass(frozen=True)
class HeadLayout:
    """How the outputs of the joint projection of queries, keys and values divide into heads.

    Attributes:
        heads, kv_heads: numbers of query heads, and of key and value heads.
        eps: of the norm of each head.
    """

    heads: int
    kv_heads: int
    eps: float


class LoraLinear(torch.autograd.Function):
    """y = x W^T + b + scale * (x A_i^T) B_i^T for each adapted part i of the outputs.

    Args of `apply`:
        x: [N, in].
        adapter_input: x after adapter dropout, or x itself.
        a: [parts * r, in] float32; b: [adapted outputs, r] float32. The parts stand one after
            the other in both.
        weight: [out, in]; with the adapter already merged into it when `placement.merged`.
        bias: [out] or None.
        placement: where and how the adapter joins.

    Low-rank adaptation, arXiv 2106.09685. Merged or not, the gradients are those of the factors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        adapter_input: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        placement: LoraPlacement,
    ) -> torch.Tensor:
        """Compute the layer's outputs [N, out] for x [N, in]: x W^T + bias, plus the adapter's
        share. Beside the weights only `adapter_input` is saved for the backward pass.

        Args:
            adapter_input: x after the adapter's dropout; without dropout x itself.
            a, b: the adapter's factors, [parts * r, in] and [adapted outputs, r] float32.
            weight: [out, in]; contains the adapter already if `placement.merged`.
            placement: where and how the adapter joins.
        """
        ctx.placement = placement
        ctx.has_dropout = adapter_input is not x
        if placement.joint is not None:
            a, b = placement.joint  # the same factors, laid out for one product
        ctx.save_for_backward(adapter_input, a, b, weight)
        return linear_with_adapter(x, adapter_input, a, b, weight, bias, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients of x, `adapter_input`, a and b from the gradient `dy` [N, out] of
        the outputs; the other arguments get None. Without dropout x and `adapter_input` are one
        tensor: then x gets the gradient of both, and `adapter_input` gets None."""
        adapter_input, a, b, weight = ctx.saved_tensors
        da, db, d_low_rank = factor_gradients(adapter_input, a, b, dy, ctx.placement)
        dx = d_adapter_input = None
        x_needs_grad, adapter_input_needs_grad, *_ = ctx.needs_input_grad
        # The first layer's input needs no gradient, because nothing before it is trained.
        if x_needs_grad or adapter_input_needs_grad:
            # A merged weight contains the adapter, so it gives the adapter's share of dx too.
            dx = linear(dy, weight.t())
            if ctx.has_dropout:
                d_adapter_input = d_low_rank @ a.to(adapter_input.dtype)
            elif not ctx.placement.merged:
                dx.addmm_(d_low_rank, a.to(adapter_input.dtype))
        return dx, d_adapter_input, da, db, None, None, None


class GatedLoraLinear(torch.autograd.Function):
    """LoraLinear of silu(gate) * up, without dropout. That product is the second widest input of a
    layer; it is not saved, and the backward pass computes it again."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        placement: LoraPlacement,
        functions: LayerFunctions = TORCH,
    ) -> torch.Tensor:
        """Compute the layer's outputs [N, out] for silu(gate) * up, with the adapter's share.

        Args:
            gate_up: [N, 2 * in], gate, then up; the only activation saved for the backward pass.
            a, b: [parts * r, in] and [adapted outputs, r], the adapter's factors.
            weight: [out, in], contains the adapter already if `placement.merged`.
            bias: [out] or None.
            placement: where and how the adapter joins.
            functions: the set that computes silu(gate) * up and its gradient.
        """
        x = functions.gate(gate_up)
        ctx.placement, ctx.functions = placement, functions
        if placement.joint is not None:
            a, b = placement.joint  # the same factors, laid out for one product
        ctx.save_for_backward(gate_up, a, b, weight)
        # Without dropout the adapter's input is x itself.
        return linear_with_adapter(x, x, a, b, weight, bias, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients of gate_up, a and b from the gradient `dy` [N, out] of the outputs;
        the other arguments get None."""
        gate_up, a, b, weight = ctx.saved_tensors
        x, saved = ctx.functions.gate_again(gate_up)  # x = silu(gate) * up, as in the forward pass
        da, db, d_low_rank = factor_gradients(x, a, b, dy, ctx.placement)
        del x  # its memory, and its place in the processor's cache, serve the next tensors
        dx = linear(dy, weight.t())
        if not ctx.placement.merged:  # a merged weight contributed the adapter's share above
            dx.addmm_(d_low_rank, a.to(dx.dtype))
        dgate_up = ctx.functions.gate_gradient(gate_up, saved, dx)
        return dgate_up, da, db, None, None, None, None


class FrozenLinear(torch.autograd.Function):
    """y = x W^T + b with a frozen weight and bias: only x gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x W^T + bias, [N, out], for x [N, in], weight [out, in] and bias [out] or None.
        Only the weight is saved for the backward pass."""
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of x from the gradient `dy` of the outputs. Weight and bias are
        frozen and get None."""
        (weight,) = ctx.saved_tensors
        return linear(dy, weight.t()), None, None


class AddNorm(torch.autograd.Function):
    """The sum x + delta and its RMS norm (arXiv 1910.07467). The gradients of both are added in one
    step."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        functions: LayerFunctions = TORCH,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + delta, weight * RMSNorm(x + delta)). x and delta are [N, hidden], weight is
        [hidden]. The mean square is over the last dimension, in float32; `eps` is added to it.

        `functions` computes both results, and the tensors that its gradient function needs
        (`saved`).
        """
        total, y, saved = functions.add_norm(x, delta, weight, eps)
        ctx.functions = functions
        ctx.save_for_backward(weight, *saved)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: torch.Tensor, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients of x and delta, which are equal. `dtotal` is the gradient of x +
        delta, `dy` the gradient of its norm. The other arguments get None."""
        weight, *saved = ctx.saved_tensors
        dx = ctx.functions.add_norm_gradient(saved, weight, dtotal, dy)
        return dx, dx, None, None, None


class Norm(torch.autograd.Function):
    """weight * RMSNorm(x), without the sum of `AddNorm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        functions: LayerFunctions = TORCH,
    ) -> torch.Tensor:
        """Return weight * RMSNorm(x), [N, hidden] like x, for weight [hidden]; `eps` is added to
        the mean square. `functions` computes the result, and the tensors that its gradient function
        needs (`saved`)."""
        y, saved = functions.norm(x, weight, eps)
        ctx.functions = functions
        ctx.save_for_backward(weight, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of x from the gradient `dy` of the norm; the other arguments get
        None."""
        weight, *saved = ctx.saved_tensors
        return ctx.functions.norm_gradient(saved, weight, dy), None, None, None


class HeadsRope(torch.autograd.Function):
    """Normalises queries and keys per head (if there are weights) and rotates them by their
    positions, in place in `qkv`; values stay as they are. Rotary positions in the rotate-half form
    (arXiv 2104.09864)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: HeadLayout,
        functions: LayerFunctions = TORCH,
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys within `qkv` [N, (heads + 2 kv_heads) * dim], in
        place, and return that tensor.

        Args:
            q_weight, k_weight: [dim], weights of the heads' norms; None if heads are not
                normalised.
            cos, sin: [N, 1, dim / 2], of the tokens' positions.
            layout: how many heads there are, and the norms' eps.
            functions: the set that computes the result and its gradient.
        """
        heads, kv_heads, eps = layout.heads, layout.kv_heads, layout.eps
        saved = functions.apply_rope(qkv, q_weight, k_weight, cos, sin, heads, kv_heads, eps)
        ctx.mark_dirty(qkv)
        ctx.layout, ctx.functions = layout, functions
        ctx.save_for_backward(cos, sin, *saved)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of qkv before norm and rotation, from the gradient `dout` after
        them; the other arguments get None."""
        cos, sin, *saved = ctx.saved_tensors
        heads, kv_heads = ctx.layout.heads, ctx.layout.kv_heads
        dqkv = ctx.functions.apply_rope_gradient(saved, cos, sin, dout, heads, kv_heads)
        return dqkv, None, None, None, None, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up on [N, 2 * width] with the gate in the first half (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, functions: LayerFunctions = TORCH) -> torch.Tensor:
        """Return silu(gate) * up, [N, width], for gate_up [N, 2 * width], gate first. Only the
        input is saved for the backward pass."""
        ctx.functions = functions
        ctx.save_for_backward(gate_up)
        return functions.gate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of gate_up [N, 2 * width] from the gradient `dy` [N, width] of the
        product."""
        (gate_up,) = ctx.saved_tensors
        # None: the forward pass saved no silu(gate), so the gradient function computes it.
        return ctx.functions.gate_gradient(gate_up, None, dy), None


class PickRows(torch.autograd.Function):
    """Picks rows of x, each at most once. Rows that are not picked get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return x[rows] for x [N, ...] and `rows` [picked] int64, each row at most once."""
        ctx.save_for_backward(rows)
        ctx.size = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of x: `dy` at the picked rows, zero elsewhere."""
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size).index_copy_(0, rows, dy), None


class Spread(torch.autograd.Function):
    """Puts packed rows into a padded tensor of `size` rows; the padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter_index: torch.Tensor, size: int) -> torch.Tensor:
        """Return a tensor [size, ...] in which row i of x stands at row `scatter_index[i]` (int64);
        all other rows are zero."""
        ctx.save_for_backward(scatter_index)
        return x.new_zeros((size, *x.shape[1:])).index_copy_(0, scatter_index, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of x: the rows of `dy` at which x was put."""
        (scatter_index,) = ctx.saved_tensors
        return dy.index_select(0, scatter_index), None, None


class TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of given tokens, computed chunk by chunk so that few logits are in memory
    at a time.

    A token's log-probability depends on its own hidden row alone. So the forward pass already
    computes its whole gradient, (W_label - softmax(z) W) / temperature, and the backward pass only
    scales it. Any loss may follow, and no logits are saved.

    Args of `apply`:
        hidden: [T, hidden]; head: the frozen weight [vocab, hidden]; labels: [T] int64.
        inverse_temperature: multiplies the logits.
        chunk_rows: tokens per chunk.
        entropies: whether to compute entropies too.

    Returns:
        ([T], [T]) float32: log-probabilities, and entropies in nats without gradient (zeros unless
            `entropies`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: OutputLayer,
        labels: torch.Tensor,
        inverse_temperature: float,
        chunk_rows: int,
        entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (the log-probability of each label, the entropy of its distribution), both [T]
        float32; entropies are zeros unless `entropies` asks for them. Logits, multiplied by
        `inverse_temperature`, are computed for `chunk_rows` rows at a time, by the output layer
        `head`.

        If `hidden` [T, hidden] needs a gradient, `slopes` is saved in place of the logits: row t is
        the gradient of token t's log-probability with respect to row t of `hidden`.
        """
        count = hidden.shape[0]
        values = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(values)
        hidden_needs_grad, *_ = ctx.needs_input_grad
        slopes = torch.empty_like(hidden) if hidden_needs_grad else None
        for start in range(0, count, chunk_rows):
            chunk = slice(start, start + chunk_rows)
            values[chunk] = _chunk_logprobs(
                head.float_logits(hidden[chunk]),
                head,
                labels[chunk],
                inverse_temperature,
                entropy=entropy[chunk] if entropies else None,
                slopes=slopes[chunk] if slopes is not None else None,
            )
        if slopes is not None:
            if inverse_temperature != 1.0:  # the logits were multiplied by it
                slopes.mul_(inverse_temperature)
            ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropy)
        return values, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalues: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of `hidden` from the gradient `dvalues` [T] of the
        log-probabilities; the other arguments get None. Entropies have no gradient."""
        # [T, hidden]: the gradient of each log-probability with respect to its hidden row.
        (slopes,) = ctx.saved_tensors
        dhidden = slopes * dvalues[:, None].to(slopes.dtype)
        return dhidden, None, None, None, None, None


def _chunk_logprobs(
    logits: torch.Tensor,
    head: OutputLayer,
    labels: torch.Tensor,
    inverse_temperature: float,
    *,
    entropy: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the log-probability of each label, [n] float32, for one chunk of n tokens.

    Args:
        logits: [n, vocab] float32, as the head computes them; overwritten.
        head: the output layer, from which the slopes are computed.
        labels: [n] int64, an id for each row.
        inverse_temperature: factor of the logits.
        entropy: [n], filled with the entropy of each row's distribution; None if not needed.
        slopes: [n, hidden], filled with the gradient of each log-probability with respect to its
            hidden row, but without the factor `inverse_temperature`; None if not needed.
    """
    if inverse_temperature != 1.0:
        logits.mul_(inverse_temperature)
    label_logits = logits.gather(1, labels[:, None])[:, 0]
    greatest = logits.amax(-1)
    if entropy is not None:
        # The entropy below is computed from logits around 0, which are rounded least.
        logits.sub_(greatest[:, None])
    # To move fewer bytes on a CPU, the probabilities overwrite the logits. The entropy reads the
    # logits again, so then they must stay.
    in_place = entropy is None and logits.device.type == "cpu"
    probabilities = torch.softmax(logits, -1, out=logits if in_place else None)
    # The likeliest token's log-probability; any other token's is this plus (logit - greatest). Its
    # own probability may be rounded to 0, of which the logarithm would be -inf.
    likeliest = probabilities.amax(-1).log_()
    if entropy is not None:  # -(sum of p * (logit - greatest + likeliest))
        entropy.copy_(torch.linalg.vecdot(probabilities, logits).add_(likeliest).neg_())
    if slopes is not None:
        _fill_slopes(slopes, head, labels, probabilities)
    return label_logits.sub_(greatest).add_(likeliest)


def _fill_slopes(
    slopes: torch.Tensor, head: OutputLayer, labels: torch.Tensor, probabilities: torch.Tensor
) -> None:
    """Fill `slopes` [n, hidden] with the gradient of each label's log-probability with respect to
    its hidden row. That is the head's row for the label, minus the mean of all rows of the head
    weighted by their `probabilities` [n, vocab]."""
    mean_row = head.mean_rows(probabilities.to(head.weight.dtype))
    torch.sub(head.weight[labels], mean_row, out=slopes)
