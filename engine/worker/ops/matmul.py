"""Matrix products on the fastest library this CPU has for them.

PyTorch takes float32 products through MKL, which keeps to AVX2 on processors that are not
Intel's; oneDNN, also part of PyTorch, uses AVX-512 there, at the same precision.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

# Multiplications below which getting into oneDNN costs more than it saves.
WORTH = 2**20
# Rows that a packed weight is laid out for; others work too.
ROWS = 32
# oneDNN compiles code for every size it meets, half a millisecond and half a megabyte each.
GRAIN = 64  # so training rounds its sizes up to a multiple of this, where there are that many


@cache
def _onednn() -> Any:
    """The operator, where it is there and faster."""
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    facts = Path("/proc/cpuinfo")
    amd = facts.is_file() and "AuthenticAMD" in facts.read_text(errors="replace")
    return operator.default if amd else None


def grain(count: int) -> int:
    """What a number of rows is to be made a multiple of."""
    return GRAIN if count >= 4 * GRAIN and _onednn() is not None else 1


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b without a gradient. x: [N, in]; weight: [out, in], or the transpose of one."""
    if x.dtype == torch.float32 and x.shape[0] * weight.numel() >= WORTH and not x.is_cuda:
        operator = _onednn()
        # Of a weight that is a cut-out oneDNN makes a thousandfold slower reference product.
        whole = weight.is_contiguous() or weight.t().is_contiguous()
        if operator is not None and whole:
            return operator(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class Fixed:
    """A weight that many products are to be made with: laid out for them once.

    Args:
        weight: [out, in]; must not change.
        pack: whether memory allows a second copy.
    """

    def __init__(self, weight: torch.Tensor, *, pack: bool) -> None:
        self.weight = weight
        self.packed: torch.Tensor | None = None
        self._operator: Any = None
        if pack and weight.dtype == torch.float32 and weight.device.type == "cpu":
            self._operator = _onednn()
        if self._operator is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._worth = WORTH / weight.numel()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed is None:
            return linear(x, self.weight, bias)
        if x.shape[0] < self._worth:
            return F.linear(x, self.weight, bias)
        return self._operator(x, self.packed, bias, "none", [], "")
