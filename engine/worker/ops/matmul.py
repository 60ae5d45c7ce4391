"""Matrix products on the fastest library this CPU has for them.

PyTorch takes float32 products through MKL, which keeps to AVX2 on processors that are not
Intel's; oneDNN, also part of PyTorch, uses AVX-512 there, at the same precision.
"""

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from engine.worker.core import switched_off

# For fewer multiplications, getting into oneDNN costs more than it saves.
MIN_MULTIPLICATIONS = 2**20
# The number of rows that the layout of a packed weight is optimised for; others work too.
PACKED_FOR_ROWS = 32
# Arguments of oneDNN's operator after x, weight and bias: nothing is computed with the product.
NO_ACTIVATION = ("none", [], "")
# oneDNN compiles code for every size it meets, half a millisecond and half a megabyte each. So
# training rounds large numbers of rows up to a multiple of this, and of less where the model is so
# large that a row of its layers takes as long as compiling one of their products.
GRAIN = 64
LARGE_GRAIN = 16
LARGE_WEIGHTS = 2**25  # numbers in the weights of its layers


def has_onednn() -> bool:
    """Whether oneDNN may be faster here than torch's own products, whether or not it is used."""
    return _operator_of_onednn() is not None


def _onednn() -> Any:
    """oneDNN's operator for x W^T + b, None where it is not to be used."""
    return None if switched_off.is_off("onednn_products") else _operator_of_onednn()


@cache
def _operator_of_onednn() -> Any:
    """Return oneDNN's operator for x W^T + b; None if it is not to be used.

    It is missing in some builds of torch, and is faster than torch's own only on AMD processors
    with AVX-512.
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    cpu_facts = Path("/proc/cpuinfo")
    is_amd = cpu_facts.is_file() and "AuthenticAMD" in cpu_facts.read_text(errors="replace")
    return operator.default if is_amd else None


def grain(count: int, weights: int) -> int:
    """Return the number to a multiple of which `count` rows should be padded.

    It is GRAIN or LARGE_GRAIN; 1 (no padding) if oneDNN is not used, or if padding would cost more
    than it saves. `weights`: how many numbers the weights of the model's layers have.
    """
    multiple = LARGE_GRAIN if weights >= LARGE_WEIGHTS else GRAIN
    # Four times: the padding then adds less than a quarter.
    return multiple if count >= 4 * multiple and _onednn() is not None else 1


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b [N, out], without a gradient. Large float32 products on a CPU go through oneDNN
    where that is faster.

    Args:
        x: [N, in].
        weight: [out, in], possibly a transposed view.
        bias: [out]; None for 0.
    """
    is_large = x.shape[0] * weight.numel() >= MIN_MULTIPLICATIONS
    if is_large and x.dtype == torch.float32 and not x.is_cuda:
        operator = _onednn()
        # For a slice of a larger weight oneDNN has only reference code, a thousand times slower.
        is_dense = weight.is_contiguous() or weight.t().is_contiguous()
        if operator is not None and is_dense:
            return operator(x, weight, bias, *NO_ACTIVATION)
    return F.linear(x, weight, bias)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x [N, n], some columns of a larger tensor, in the form in which products take it fastest.
    Where oneDNN is used, that is a copy without gaps. With gaps, `linear` would copy x for each
    product in which it is the input, and would not use oneDNN where it is the weight."""
    uses_onednn = x.dtype == torch.float32 and x.device.type == "cpu" and _onednn() is not None
    return x.contiguous() if uses_onednn else x


class Fixed:
    """A weight for many products. Where oneDNN is used, its layout is optimised once for all of
    them.

    Args:
        weight: [out, in]; must not change afterwards.
        pack: whether memory allows a second copy in that layout.
    """

    def __init__(self, weight: torch.Tensor, *, pack: bool) -> None:
        """Keep the weight [out, in], which must not change any more. If oneDNN is used and `pack`
        says that memory allows a second copy, make a copy in oneDNN's layout."""
        self.weight = weight
        self.packed: torch.Tensor | None = None
        self._operator: Any = None
        if pack and weight.dtype == torch.float32 and weight.device.type == "cpu":
            self._operator = _onednn()
        if self._operator is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._min_rows = MIN_MULTIPLICATIONS / weight.numel()  # from here on oneDNN is faster

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b [N, out], without a gradient. x: [N, in]; bias: [out], None for 0. Goes through
        oneDNN if the weight was packed and there are enough rows."""
        if self.packed is None:
            return linear(x, self.weight, bias)
        if x.shape[0] < self._min_rows:  # too few for oneDNN to be faster
            return F.linear(x, self.weight, bias)
        return self._operator(x, self.packed, bias, *NO_ACTIVATION)


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [N, out] in float32 out of operands of 16 bits, on a GPU. The product is summed in
    float32 there anyway; rounded to bfloat16 first, logits would lose all but three digits."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


class OutputLayer:
    """The weight of a model's output layer, which never changes, for products from both sides. The
    copies in oneDNN's layout are made when they are first needed.

    Args:
        weight: [vocab, hidden].
        pack: whether memory allows a second copy of it for either side.
    """

    def __init__(self, weight: torch.Tensor, *, pack: bool = False) -> None:
        """Keep the weight [vocab, hidden]; see the class."""
        self.weight = weight
        self.pack = pack

    @cached_property
    def logits(self) -> Fixed:
        """The product x W^T, [N, vocab] for x [N, hidden]."""
        return Fixed(self.weight, pack=self.pack)

    def float_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T, [N, vocab] float32 for x [N, hidden]."""
        is_wide = x.device.type == "cpu" or x.dtype == torch.float32
        if not is_wide and not switched_off.is_off("float32_head"):
            return float32_product(x, self.weight)
        return self.logits(x).float()

    @cached_property
    def mean_rows(self) -> Fixed:
        """The product p W, [N, hidden] for p [N, vocab]: for probabilities, the mean of W's rows
        under them."""
        return Fixed(self.weight.t(), pack=self.pack)
