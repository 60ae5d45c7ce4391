"""RMS norms (arXiv 1910.07467) with their gradients, as torch computes them: part of the set
`torch` of fused_ops.py. Norm weights are frozen, so nothing here makes a gradient for one.
"""

import torch

Tensors = tuple[torch.Tensor, ...]
Kept = tuple[torch.Tensor, Tensors]  # a result, and what its gradient needs
# If all weights of a norm are above this number, its result can be divided by them again without
# loss.
LEAST_NORM_WEIGHT = 1e-20


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / rms(x) in x's dtype, 1 / rms(x) in float32 [..., 1]). rms is the root of the mean
    square over the last dimension."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    # 1 / sqrt(mean of the squares + eps)
    inverse = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return x * inverse, inverse
    return (x.float() * inverse).to(x.dtype), inverse  # rounded once, after the product


def normalise_gradient(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of x in weight * x / rms(x). The formula is (g - n * mean(g * n)) /
    rms(x) with g = weight * dy and n = x / rms(x).

    Args:
        normed: n, that is x / rms(x).
        inverse: 1 / rms(x), [..., 1].
        dy: the gradient of the result.
    """
    grad = dy * weight
    # -mean(g * n)
    minus_mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1).mul_(-1 / normed.shape[-1])
    grad = grad.addcmul_(normed, minus_mean)
    return grad.mul_(inverse.to(grad.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    """Return (weight * x / rms(x), what `norm_gradient` needs)."""
    return _weighted(*normalise(x, eps), weight)


def _weighted(normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor) -> Kept:
    """Return (weight * normed, what the gradient needs to know `normed` again).

    In float32 on a CPU that is the result itself and 1 / weight: their product is `normed`, and the
    next layer keeps the result in memory anyway. This saves an eighth of a layer's memory. On a
    GPU, in other formats, or if a weight is nearly 0, it is `normed`.
    """
    exact = normed.dtype == torch.float32 and normed.device.type == "cpu"
    if exact and weight.abs().amin() > LEAST_NORM_WEIGHT:
        y = normed.mul_(weight)
        return y, (y, inverse, weight.reciprocal())
    return normed * weight, (normed, inverse)


def _unweighted(saved: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Recover (x / rms(x), 1 / rms(x)) from what `_weighted` returned for the gradient."""
    # `kept` is the result if 1 / weight was saved with it, else x / rms(x).
    kept, inverse, *reciprocals = saved
    normed = kept * reciprocals[0] if reciprocals else kept
    return normed, inverse


def norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of x in `norm`, from the gradient `dy` of the result. `saved` is what
    `norm` returned for it."""
    normed, inverse = _unweighted(saved)
    return normalise_gradient(normed, inverse, weight, dy)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Return (x + delta, weight times the RMS norm of that sum, what `add_norm_gradient` needs)."""
    total = x + delta
    y, saved = norm(total, weight, eps)
    return total, y, saved


def add_norm_gradient(
    saved: Tensors, weight: torch.Tensor, dtotal: torch.Tensor, dy: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of x in `add_norm`, which is also the gradient of delta. `dtotal` is the
    gradient of the sum x + delta, `dy` the gradient of its norm."""
    normed, inverse = _unweighted(saved)
    return normalise_gradient(normed, inverse, weight, dy).add_(dtotal)
