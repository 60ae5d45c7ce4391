"""RMS norms (arXiv 1910.07467) with their gradients, as torch computes them: part of the set
`torch` of fused_ops.py. Norm weights are frozen, so nothing here makes a gradient for one.
"""

import torch

Tensors = tuple[torch.Tensor, ...]
# If all weights of a norm are above this number, its result can be divided by them again without
# loss.
LEAST_NORM_WEIGHT = 1e-20


def normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / rms(x) in x's dtype, 1 / rms(x) in float32 [..., 1]). rms is the root of the mean
    square over the last dimension; `eps` is added to the mean square."""
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
    rms(x) with g = weight * dy and n = x / rms(x); the mean is over the last dimension.

    Args:
        normed: n, that is x / rms(x).
        inverse: 1 / rms(x), [..., 1].
        weight: [width], the norm's weight, for x [..., width].
        dy: the gradient of the result.
    """
    grad = dy * weight  # g
    # -mean(g * n)
    minus_mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1).mul_(-1 / normed.shape[-1])
    grad = grad.addcmul_(normed, minus_mean)  # in place, like the next product
    return grad.mul_(inverse.to(grad.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Tensors]:
    """Compute the RMS norm of x over its last dimension. Returns (weight * x / rms(x), the tensors
    that `norm_gradient` needs); `eps` is added to the mean square."""
    normed, inverse = normalise(x, eps)
    return _apply_weight(normed, inverse, weight)


def _apply_weight(
    normed: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """Return (weight * normed, the tensors from which `_undo_weight` recovers `normed`).

    `normed` is x / rms(x), and may be overwritten; `inverse` is 1 / rms(x), which is saved too. In
    float32 on a CPU the result itself and 1 / weight are saved: their product is `normed`, and the
    next layer keeps the result in memory anyway. This saves an eighth of a layer's memory. On a
    GPU, in other formats, or if a weight is nearly 0, `normed` is saved.
    """
    exact = normed.dtype == torch.float32 and normed.device.type == "cpu"
    if exact and weight.abs().amin() > LEAST_NORM_WEIGHT:
        y = normed.mul_(weight)
        return y, (y, inverse, weight.reciprocal())
    return normed * weight, (normed, inverse)


def _undo_weight(saved: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Recover (x / rms(x), 1 / rms(x)) from the tensors that `_apply_weight` saved."""
    if len(saved) == 3:  # the norm's result was saved, and 1 / weight with it
        result, inverse, reciprocal_weight = saved
        return result * reciprocal_weight, inverse
    normed, inverse = saved
    return normed, inverse


def norm_gradient(saved: Tensors, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of x in `norm`, from the gradient `dy` of its first result. `saved` is
    its second result, `weight` its argument."""
    normed, inverse = _undo_weight(saved)
    return normalise_gradient(normed, inverse, weight, dy)


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
    """Compute the gradient of x in `add_norm`, which is also the gradient of delta.

    Args:
        saved: the third result of `add_norm`: tensors that give sum / rms(sum) and 1 / rms(sum).
        weight: the norm's weight, as it was given to `add_norm`.
        dtotal: the gradient of its first result, the sum x + delta.
        dy: the gradient of its second result, the norm of the sum.
    """
    # Where that takes 1 / weight, `saved` has it.
    normed, inverse = _undo_weight(saved)
    return normalise_gradient(normed, inverse, weight, dy).add_(dtotal)


def norm_weight_per_head(
    q: torch.Tensor, k: torch.Tensor, heads: int, kv_heads: int
) -> torch.Tensor:
    """Repeat norm weights for each head, as [heads + kv_heads, dim]: the queries' weight `q` [dim]
    once per query head, then the keys' weight `k` [dim] once per key head."""
    return torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)])


def head_norm_weights(
    q: torch.Tensor | None, k: torch.Tensor | None, heads: int, kv_heads: int
) -> torch.Tensor | None:
    """Repeat the norm weights `q` and `k` [dim] for each head, as [heads + kv_heads, dim]; None if
    heads are not normalised (`q` and `k` are None)."""
    return None if q is None or k is None else norm_weight_per_head(q, k, heads, kv_heads)
