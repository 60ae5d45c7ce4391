"""Liger's kernels on a CPU, by Triton's interpreter (TRITON_INTERPRET=1 before Triton is loaded).

Two things that the compiler does and the interpreter does not: a number becomes a float32 scalar,
and CUDA's own rsqrt is there.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from engine.worker.ops import fused_ops
from engine.worker.ops.fused_ops import LayerFunctions
from engine.worker.ops.liger import Liger


def interpreted() -> LayerFunctions:
    """Liger's set of functions, for tensors on the CPU."""
    convert: Any = interpreter._implicit_cvt

    def scalar_too(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    interpreter._implicit_cvt = scalar_too
    kernels = Liger()
    for module in (kernels._rms_norm, kernels._sum_and_norm):
        module.rsqrt = lambda x: tl.math.rsqrt(x)  # looked up when it is interpreted
    return fused_ops.liger_functions(kernels)
