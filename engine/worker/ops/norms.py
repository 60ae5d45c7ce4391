"""RMS norms (arXiv 1910.07467) with their gradients, as torch computes them: part of the set
`torch` of fused_ops.py. Norm weights are frozen, so nothing here makes a gradient for one.
"""

import torch

Tensors = tuple[torch.Tensor, ...]
Kept = tuple[torch.Tensor, Tensors]  # a result, and what its gradient needs
# A norm's weights above this can be divided out of its result again with nothing lost.
LEAST_NORM_WEIGHT = 1e-20


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) over the last dimension in x's dtype, and 1 / rms(x) in float32, [..., 1]."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    # 1 / sqrt(mean of the squares + eps)
    inverse = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return x * inverse, inverse
    return (x.float() * inverse).to(x.dtype), inverse  # rounded once, after the product


def normalise_gradient(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """The gradient of x in weight * x / rms(x): (g - n * mean(g * n)) / rms(x) for g = weight * dy,
    n = x / rms(x) (`normed`), 1 / rms(x) (`inverse`) and the gradient `dy` of the result."""
    grad = dy * weight
    # -mean(g * n)
    minus_mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1).mul_(-1 / normed.shape[-1])
    grad = grad.addcmul_(normed, minus_mean)
    return grad.mul_(inverse.to(grad.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    """(weight * x / rms(x), what `norm_gradient` needs)."""
    return _weighted(*normalise(x, eps), weight)


def _weighted(normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor) -> Kept:
    """(weight * normed, what the gradient needs). In float32 on a CPU the gradient gets the result
    itself, which the next product keeps anyway, and 1 / weight, to compute `normed` again from the
    two: an eighth of a layer's memory less. Elsewhere, and if a weight is nearly 0, it gets
    `normed`."""
    exact = normed.dtype == torch.float32 and normed.device.type == "cpu"
    if exact and weight.abs().amin() > LEAST_NORM_WEIGHT:
        y = normed.mul_(weight)
        return y, (y, inverse, weight.reciprocal())
    return normed * weight, (normed, inverse)


def _unweighted(saved: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x), 1 / rms(x)), from what `_weighted` returned for the gradient."""
    kept, inverse, *reciprocals = saved  # 1 / weight only where the result was kept
    return (kept * reciprocals[0] if reciprocals else kept), inverse


def norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of x in `norm`, from the gradient `dy` of its result."""
    normed, inverse = _unweighted(saved)
    return normalise_gradient(normed, inverse, weight, dy)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """(x + delta, weight times the RMS norm of that sum, what the gradient needs)."""
    total = x + delta
    y, saved = norm(total, weight, eps)
    return total, y, saved


def add_norm_gradient(
    saved: Tensors, weight: torch.Tensor, dtotal: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """The gradient of x in `add_norm`, which is also that of delta, from the gradients of the two
    outputs: `dtotal` of x + delta, `dy` of its norm."""
    normed, inverse = _unweighted(saved)
    return normalise_gradient(normed, inverse, weight, dy).add_(dtotal)
