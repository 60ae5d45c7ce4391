"""Matrix products by the fastest library that this CPU has for them.

PyTorch computes float32 products by MKL, which uses only AVX2 on processors that are not Intel's.
oneDNN, also part of PyTorch, uses AVX-512 there, at the same precision.
"""

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from engine.worker.core import switched_off

# With fewer multiplications than this, a call of oneDNN costs more than it saves.
MIN_MULTIPLICATIONS = 2**20
# The number of rows that the layout of a packed weight is optimised for; others work too.
PACKED_FOR_ROWS = 32
# Arguments of oneDNN's operator after x, weight and bias: nothing is computed with the product.
NO_ACTIVATION = ("none", [], "")
# oneDNN compiles code for every size it meets, half a millisecond and half a megabyte each. So
# training rounds large numbers of rows up to a multiple of this, and of less where the model is so
# large that a row of its layers takes as long as compiling one of their products.
PADDING_MULTIPLE = 64
LARGE_MODEL_MULTIPLE = 16
LARGE_WEIGHTS = 2**25  # numbers in the weights of its layers


def has_onednn() -> bool:
    """Whether oneDNN may be faster here than torch's own products, even if it is switched off."""
    return _operator_of_onednn() is not None


def _onednn() -> Any:
    """Return oneDNN's operator for x W^T + b; None if it is switched off, missing or not faster on
    this CPU."""
    return None if switched_off.is_off("onednn_products") else _operator_of_onednn()


@cache
def _operator_of_onednn() -> Any:
    """Return oneDNN's operator for x W^T + b; None if it is missing or not faster on this CPU.

    Some builds of torch lack it. It is faster than torch's own products only on AMD processors with
    AVX-512.
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    cpu_facts = Path("/proc/cpuinfo")
    is_amd = cpu_facts.is_file() and "AuthenticAMD" in cpu_facts.read_text(errors="replace")
    return operator.default if is_amd else None


def padding_multiple(count: int, weight_count: int) -> int:
    """Return the number that the `count` rows of a matrix should be padded to a multiple of:
    PADDING_MULTIPLE, or LARGE_MODEL_MULTIPLE for a large model. It is 1 (no padding) if oneDNN is
    not used, or if there are so few rows that padding would cost more than it saves.

    `weight_count` is how many numbers the weights of the model's layers have.
    """
    multiple = LARGE_MODEL_MULTIPLE if weight_count >= LARGE_WEIGHTS else PADDING_MULTIPLE
    # From four multiples on, padding adds less than a quarter of the rows.
    return multiple if count >= 4 * multiple and _onednn() is not None else 1


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x W^T + b, [N, out], without a gradient. Large float32 products on a CPU are computed
    by oneDNN if that is faster.

    Args:
        x: [N, in].
        weight: [out, in], possibly a transposed view.
        bias: [out]; None for 0.
    """
    is_large = x.shape[0] * weight.numel() >= MIN_MULTIPLICATIONS
    if is_large and x.dtype == torch.float32 and not x.is_cuda:
        operator = _onednn()
        # For a slice of a larger weight oneDNN has only its reference code, which is a thousand
        # times slower.
        is_dense = weight.is_contiguous() or weight.t().is_contiguous()
        if operator is not None and is_dense:
            return operator(x, weight, bias, *NO_ACTIVATION)
    return F.linear(x, weight, bias)


def contiguous_if_faster(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, n], some columns of a larger tensor, in the memory layout that products read
    fastest. If oneDNN computes them, that is a contiguous copy: without it `linear` would copy x
    for each product in which x is the input, and would not use oneDNN where x is the weight. If
    oneDNN does not, it is x itself."""
    uses_onednn = x.dtype == torch.float32 and x.device.type == "cpu" and _onednn() is not None
    return x.contiguous() if uses_onednn else x


class FixedWeight:
    """A weight that is used in many products. If oneDNN is used, the weight's memory layout is
    optimised once for all of them.

    Args:
        weight: [out, in]; must not change afterwards.
        pack: whether memory allows a second copy in that layout.
    """

    def __init__(self, weight: torch.Tensor, *, pack: bool) -> None:
        """Keep the weight [out, in], which must not change any more. If `pack` is set (memory
        allows a second copy) and oneDNN is used, also make a copy in oneDNN's layout."""
        self.weight = weight
        self.packed: torch.Tensor | None = None
        self._operator: Any = None
        if pack and weight.dtype == torch.float32 and weight.device.type == "cpu":
            self._operator = _onednn()
        if self._operator is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._min_rows = MIN_MULTIPLICATIONS / weight.numel()  # from here on oneDNN is faster

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x W^T + b, [N, out], without a gradient, for x [N, in] and bias [out] (None for
        0). oneDNN computes it if the weight was packed and there are enough rows."""
        if self.packed is None:
            return linear(x, self.weight, bias)
        if x.shape[0] < self._min_rows:  # too few for oneDNN to be faster
            return F.linear(x, self.weight, bias)
        return self._operator(x, self.packed, bias, *NO_ACTIVATION)


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x W^T, [N, out], in float32 from 16-bit operands, on a GPU. The GPU sums in float32
    anyway; rounding the result to bfloat16 would leave logits only three digits."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


class OutputLayer:
    """The weight of a model's output layer, which never changes, for products with it and with its
    transpose. The copies in oneDNN's layout are made when they are first needed.

    Args:
        weight: [vocab, hidden].
        pack: whether memory allows a second copy for each of the two products.
    """

    def __init__(self, weight: torch.Tensor, *, pack: bool = False) -> None:
        """Keep the weight [vocab, hidden], which must not change any more. `pack`: whether memory
        allows a second copy of it in a faster layout for each of the two products."""
        self.weight = weight
        self.pack = pack

    @cached_property
    def logits(self) -> FixedWeight:
        """The product x W^T, to be called with x: [N, vocab] for x [N, hidden]."""
        return FixedWeight(self.weight, pack=self.pack)

    def float_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits x W^T as float32, [N, vocab], for x [N, hidden]. On a GPU 16-bit
        operands are multiplied straight to float32, unless that is switched off."""
        is_16_bit_on_gpu = x.device.type != "cpu" and x.dtype != torch.float32
        if is_16_bit_on_gpu and not switched_off.is_off("float32_head"):
            return float32_product(x, self.weight)
        return self.logits(x).float()

    @cached_property
    def mean_rows(self) -> FixedWeight:
        """The product p W, to be called with p: [N, hidden] for p [N, vocab]. If p are
        probabilities, the result is the mean of W's rows weighted by them."""
        return FixedWeight(self.weight.t(), pack=self.pack)
