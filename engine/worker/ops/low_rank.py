"""The part of an adapter in a linear layer: scale * (x A_i^T) B_i^T for each adapted part i of the
layer's outputs, and its gradients (low-rank adaptation, arXiv 2106.09685).

There are two ways to compute it. By parts: each part has a product of its own, with the float32
factors; this way serves a CPU in float32. Jointly: one product with all B factors, with copies of
the factors in the layer's number format (`JointFactors`), which are made once per optimizer step. A
GPU would spend more time on starting the products of single parts than on computing them.

Shapes: N packed tokens, `in`/`out` features of a layer, r the adapter's rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.worker.ops.matmul import contiguous_if_faster, linear


class JointFactors(NamedTuple):
    """The factors of all parts of a layer for one product, in the layer's number format.

    Attributes:
        a: [parts * r, in], the A factors one below the other.
        b: [out, parts * r]: each part's B stands in the rows of its outputs and in columns of its
            own; everything else is zero.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class LoraPlacement:
    """Where and how an adapter joins a linear layer.

    Attributes:
        spans: (start, stop) of each adapted part among the layer's outputs.
        scale: lora_alpha / r.
        merged: whether the layer's weight already contains the adapter.
        joint: the factors for one product over all parts; None computes part by part.
    """

    spans: Sequence[tuple[int, int]]
    scale: float
    merged: bool
    joint: JointFactors | None = None


class Part(NamedTuple):
    """One adapted part of a layer's outputs.

    Attributes:
        outputs: its place among the layer's outputs.
        rows: its rows of the factor B.
        columns: its columns of the low-rank activations x A^T.
    """

    outputs: slice
    rows: slice
    columns: slice


def parts_of(spans: Sequence[tuple[int, int]], rank: int) -> list[Part]:
    """List the adapted parts at these (start, stop) spans of the outputs. In B and in the low-rank
    activations the parts follow each other without gaps: for the spans (0, 4) and (8, 10) and rank
    2, the rows of B are 0 to 4 and 4 to 6, the columns 0 to 2 and 2 to 4."""
    parts = []
    row = 0  # the first row of the next part in B
    for number, (start, stop) in enumerate(spans):
        end_row = row + stop - start
        columns = slice(number * rank, (number + 1) * rank)
        parts.append(Part(outputs=slice(start, stop), rows=slice(row, end_row), columns=columns))
        row = end_row
    return parts


@torch.no_grad()
def fill_joint(joint_b: torch.Tensor, b: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Write the B factors b [adapted outputs, r] to their places in `joint_b` [out, parts * r]: the
    part with the n-th of the (start, stop) `spans` goes to those rows and to the n-th r columns.
    Everything else in `joint_b` stays as it is."""
    for part in parts_of(spans, rank=b.shape[1]):
        joint_b[part.outputs, part.columns].copy_(b[part.rows])


def linear_with_adapter(
    x: torch.Tensor,
    adapter_input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    placement: LoraPlacement,
) -> torch.Tensor:
    """Compute x W^T + bias, [N, out], for x [N, in], plus the adapter: scale * (adapter_input
    A_i^T) B_i^T in the span of each adapted part i of the outputs. If the weight already contains
    the adapter (`placement.merged`), nothing is added.

    Args:
        adapter_input: x after the adapter's dropout, or x itself.
        a, b: the factors of all parts: those of `placement.joint`. If that is None, [parts * r, in]
            and [adapted outputs, r], one part below the other.
        weight: [out, in]; bias: [out] or None.
        placement: spans of the parts, scale, and whether the adapter is merged.
    """
    y = linear(x, weight, bias)
    if placement.merged:
        return y
    if placement.joint is not None:
        return y.addmm_(linear(adapter_input, a), b.t(), alpha=placement.scale)
    low_rank = linear(adapter_input, a.to(x.dtype))
    for part in parts_of(placement.spans, rank=b.shape[1]):
        part_of_b = b[part.rows].to(x.dtype)
        y[:, part.outputs].addmm_(low_rank[:, part.columns], part_of_b.t(), alpha=placement.scale)
    return y


def factor_gradients(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, placement: LoraPlacement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute three gradients of an adapter from the gradient `dy` [N, out] of its layer's outputs:
    those of the factors A and B, float32 [parts * r, in] and [adapted outputs, r], and that of the
    low-rank activations x A^T, [N, parts * r].

    x [N, in] is the adapter's input; a and b are the factors that `linear_with_adapter` was given.
    """
    if placement.joint is not None:
        return _joint_gradients(x, a, b, dy, placement)
    return _gradients_by_parts(x, a, b, dy, placement)


def _gradients_by_parts(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, placement: LoraPlacement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of A, of B and of x A^T from the gradient `dy` [N, out] of the layer's
    outputs, as `factor_gradients` does: here by two products for each adapted part of the outputs.
    """
    scale = placement.scale
    low_rank = linear(x, a.to(x.dtype))  # x A^T
    d_low_rank = torch.empty_like(low_rank)
    db = torch.empty_like(b)
    for part in parts_of(placement.spans, rank=b.shape[1]):
        grad = contiguous_if_faster(dy[:, part.outputs])
        d_low_rank[:, part.columns] = linear(grad, b[part.rows].to(x.dtype).t())  # dy_i B_i
        # dy_i^T (x A_i^T), as a transposed product: faster, since one side has few columns.
        db[part.rows] = linear(low_rank[:, part.columns].t(), grad.t()).t()
    db.mul_(scale)
    d_low_rank.mul_(scale)
    da = linear(d_low_rank.t(), x.t()).to(a.dtype)
    return da, db, d_low_rank


def _joint_gradients(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, placement: LoraPlacement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of A, of B and of x A^T from the gradient `dy` [N, out] of the layer's
    outputs, as `factor_gradients` does: here by one product for all parts. The small product for B
    also computes blocks in which outputs and columns belong to different parts; these are not used.
    """
    low_rank = linear(x, a)  # x A^T
    # scale * dy B. With beta 0 the uninitialised memory of `empty_like` is ignored.
    d_low_rank = torch.empty_like(low_rank).addmm_(dy, b, beta=0, alpha=placement.scale)
    products = low_rank.mul_(placement.scale).t() @ dy  # [parts * r, out]
    parts = parts_of(placement.spans, rank=a.shape[0] // len(placement.spans))
    blocks = [products[part.columns, part.outputs].t() for part in parts]
    db = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return (d_low_rank.t() @ x).float(), db.float(), d_low_rank
