"""Steps of sampling through transformers whose tensors keep their sizes and places, so that a GPU
captures one step as a CUDA graph and repeats it.

Of FIXED_STEPS steps the first is computed as it is written. It counts, because states of linear
attention move with every pass. The second is captured. What a captured step must not do, wait for
numbers of the device, is looked for in the first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from engine.worker.network.hub_cache import fix, unfix

# Steps that share their tensors. A step reads as many columns as the last of them needs, and a
# capture takes as long as a few steps.
FIXED_STEPS = 128
# (ids [rows, 1], mask [rows, columns], positions [rows, 1], cache) to logits [rows, vocab].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DynamicCache], torch.Tensor]
# Runs a function once without its work being done, and returns what does the work, any number of
# times, with the same tensors.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
# Operations that need numbers of the device before the host can go on: a number as such, and
# results whose size depends on numbers.
WAITING = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_consecutive",
    "aten.unique_dim",
    "aten.equal",
    "aten.bincount",
    "aten.repeat_interleave.Tensor",
)
# Operations that do, if they index by a mask.
INDEXING = ("aten.index.Tensor", "aten.index_put", "aten._index_put_impl_")


class _Waits(TorchDispatchMode):
    """A context in which it is noted which operations make the host wait for the device, or copy
    between both."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what it is."""
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(WAITING) or _chooses(func, args) or _crosses(args, result):
            self.found.append(str(func))
        return result


def _chooses(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation takes the elements where a mask is True, whose number decides a size."""
    if not str(func).startswith(INDEXING):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _crosses(args: Sequence[Any], result: Any) -> bool:
    """Whether an operation copies between the machine's memory and a device."""
    tensors = [each for each in (*args, result) if isinstance(each, torch.Tensor) and each.ndim]
    return len({each.device.type for each in tensors}) > 1


class CudaGraph:
    """A step captured as a CUDA graph."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        """Capture `step`. A call reads the same tensors, with the numbers they hold by then, and
        overwrites the tensor that `step` returned."""
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph):
                self.out = step()
        finally:
            torch.cuda.set_stream(stream)  # a capture that failed may leave its own

    def __call__(self) -> torch.Tensor:
        """Run the captured step once more. Returns the tensor that `step` returned, with new values
        in it."""
        self.graph.replay()
        return self.out


class FixedSteps:
    """Up to FIXED_STEPS steps of a batch, all on the same tensors.

    Attributes:
        columns: how many columns (token positions) the rows have.
        why_not: what rules out that steps of this model are captured; "" if nothing is known to.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        cache: DynamicCache,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Prepare for the steps, without computing one.

        Args:
            forward: runs tokens through the model.
            capture: captures a step.
            cache: of the rows. It is in use until `end`.
            mask: [rows, columns], 0 where a row has padding.
            positions: [rows, 1], of each row's last token in the cache.
        """
        self.forward, self.capture, self.cache = forward, capture, cache
        self.columns = mask.shape[1]
        self.why_not = ""
        self._steps = 0
        self._mask = F.pad(mask, (0, FIXED_STEPS))  # hidden until they are written
        self._positions = positions.clone()
        self._ids = torch.zeros_like(positions)
        # 0 for a row that has ended: a later position might be beyond the model's last.
        self._moves = torch.ones_like(positions)
        self._next_column = torch.tensor([self.columns], device=mask.device)
        self._counters = [self._next_column, *fix(cache, self._next_column, FIXED_STEPS)]
        self._captured: Callable[[], torch.Tensor] | None = None

    @property
    def are_over(self) -> bool:
        """Whether no step can follow: all spare columns are written, or no step can be captured."""
        return self._steps == FIXED_STEPS or bool(self.why_not)

    def stop_rows(self, numbers: Sequence[int]) -> None:
        """Let these rows, which have ended, stay at their position. What is computed of them from
        now on is to be ignored."""
        self._moves[torch.tensor(numbers, dtype=torch.long, device=self._moves.device)] = 0

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run each row's last drawn token [rows] through the model. Returns the logits after it,
        [rows, vocab] float32, which the next step overwrites."""
        self._ids.copy_(tokens[:, None])
        self._positions += self._moves
        self._mask.index_fill_(1, self._next_column, 1)
        logits = self._first() if self._steps == 0 else self._following()
        for counter in self._counters:
            counter += 1
        self._steps += 1
        self.columns += 1
        return logits

    def end(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the cache back, with what the steps have written. Returns (mask [rows, columns],
        positions [rows, 1] of each row's last token)."""
        self._captured = None
        unfix(self.cache, self._steps)
        return self._mask[:, : self.columns], self._positions

    def _compute(self) -> torch.Tensor:
        """Compute a step on the tensors as they are."""
        return self.forward(self._ids, self._mask, self._positions, self.cache)

    def _first(self) -> torch.Tensor:
        """Compute the first step, and find out whether it makes the host wait."""
        waits = _Waits()
        with waits:
            logits = _beside(self._compute, self._mask.device)
        if waits.found:
            self.why_not = f"a step needs {waits.found[0]}, for which the host waits"
        return logits

    def _following(self) -> torch.Tensor:
        """Capture a step if none is captured yet, and run it."""
        if self._captured is None:
            try:
                self._captured = self.capture(self._compute)
            except RuntimeError as error:  # of CUDA: the step does what cannot be captured
                self.why_not = f"{type(error).__name__}: {error}"[:300]
                return self._compute()
        return self._captured()


def _beside(step: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Run `step`. On a GPU it runs on a stream of its own, as torch asks before a capture, and
    libraries set themselves up for one."""
    if device.type != "cuda":
        return step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step()
    torch.cuda.current_stream().wait_stream(stream)
    result.record_stream(torch.cuda.current_stream())
    return result
