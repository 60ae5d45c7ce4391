"""What a CUDA graph does, without a GPU: a step is written down, operation by operation, and run
again on the same tensors. Python is not asked again: a number of the host that a step used stays
what it was, and so does the tensor that an attribute named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    """Writes down what is computed inside the context, and what it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten.append((value, value.clone()))
        result = func(*args, **(kwargs or {}))
        self.lines.append((func, args, dict(kwargs or {}), result))
        return result


class TapedStep:
    """A step on a tape, in the place of `hub_cache.CudaGraph`. A call runs it once more."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        tape = _Tape()
        with tape:
            self.out = step()
        # A graph's capture does no work, so what the tape's has written is put back.
        for tensor, before in reversed(tape.overwritten):
            tensor.copy_(before)
        self.lines = tape.lines

    def __call__(self) -> torch.Tensor:
        for func, args, kwargs, result in self.lines:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.out
