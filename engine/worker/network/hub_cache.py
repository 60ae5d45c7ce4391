"""Keys, values and states of the rows that transformers samples: which rows and columns (token
positions) are held, where the next token is written, and steps on tensors that stay in place.

transformers' own layers copy all keys and values to append one token. The layers here have spare
columns, and write the token into the next one (`_Room`).

In fixed steps (`FixedSteps`) even the sizes stay: the model reads all columns, spare ones included,
which its mask hides. So a GPU captures one step as a CUDA graph and repeats it. Of FIXED_STEPS
steps the first is computed as it is written. It counts, because states of linear attention move
with every pass. The second is captured. What a captured step must not do, wait for numbers of the
device, is looked for in the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PretrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# How many columns are allocated at once for the tokens to come.
SPARE_COLUMNS = 64
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


class _Room:
    """A tensor of keys or values with spare columns on its right.

    Attributes:
        buffer: [rows, heads, columns, dim].
        held: the part of `buffer` that is a layer's keys or values now.
    """

    def __init__(self, held: torch.Tensor, spare: int, *, cleared: bool) -> None:
        """Copy `held` [rows, heads, columns, dim] to the left of a new tensor with `spare` more
        columns. If `cleared`, these are zero; otherwise they hold any numbers."""
        rows, heads, columns, dim = held.shape
        self.buffer = held.new_empty(rows, heads, columns + spare, dim)
        self.buffer[:, :, :columns] = held
        if cleared:
            self.buffer[:, :, columns:] = 0
        self.first, self.end = 0, columns
        self.held = self.buffer[:, :, :columns]

    @property
    def is_full(self) -> bool:
        """Whether no spare column is left."""
        return self.end == self.buffer.shape[2]

    def write(self, token: torch.Tensor) -> None:
        """Write the keys or values of one token of each row, [rows, heads, 1, dim], into the next
        spare column, which is not held yet."""
        self.buffer[:, :, self.end : self.end + 1] = token

    def take(self, most: int | None) -> torch.Tensor:
        """Hold the next spare column too, which was written before; then at most the last `most`
        columns are held (None: all). Returns what was held before and the new column."""
        self.end += 1
        all_columns = self.buffer[:, :, self.first : self.end]
        if most is not None:
            self.first = max(self.first, self.end - most)
        self.held = self.buffer[:, :, self.first : self.end]
        return all_columns


@dataclass(frozen=True)
class _Place:
    """Where a fixed step writes a layer's next token, on the device.

    Attributes:
        column: [1], the column of the layer's tensors.
        seen: [], how many columns the rows have before this token.
        offset: the number among the rows' columns of the first one that the layer holds.
    """

    column: torch.Tensor
    seen: torch.Tensor
    offset: int


class _WithRoom:
    """What a layer with spare columns does differently from transformers' layer of its kind."""

    # Defaults of the class, because `new_cache` makes these layers out of others.
    _rooms: tuple[_Room, _Room] | None = None  # of keys and values
    _place: _Place | None = None  # set while steps are fixed

    def update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, [rows, heads, tokens, dim]. Returns all that the
        tokens may see."""
        if self._place is not None:
            keys, values = (room.buffer for room in self._rooms)
            keys.index_copy_(2, self._place.column, key_states)
            values.index_copy_(2, self._place.column, value_states)
            return keys, values
        if key_states.shape[2] != 1 or self.keys is None or self.keys.ndim != 4:
            return super().update(key_states, value_states, *args, **kwargs)  # pyright: ignore
        if not self._rooms_hold_all() or self._rooms[0].is_full:
            self._make_rooms(SPARE_COLUMNS, cleared=False)
        key_room, value_room = self._rooms
        key_room.write(key_states)
        value_room.write(value_states)
        return self._take_column()

    def _rooms_hold_all(self: Any) -> bool:
        """Whether the rooms hold the layer's keys and values. They do not if rows or columns were
        selected or appended since, which makes new tensors."""
        return self._rooms is not None and self.keys is self._rooms[0].held

    def _make_rooms(self: Any, spare: int, *, cleared: bool) -> None:
        """Give the layer `spare` spare columns. Keys are copied first and values after them, so
        that only one of both exists twice."""
        self._rooms = None
        key_room = _Room(self.keys, spare, cleared=cleared)
        self.keys = key_room.held
        value_room = _Room(self.values, spare, cleared=cleared)
        self.values = value_room.held
        self._rooms = key_room, value_room

    def _take_column(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the spare column that was written last among the layer's own. Returns (keys,
        values) of all columns that its token sees."""
        most = None
        if self.is_sliding:
            most = self.sliding_window - 1  # the next token is the last that its window shows
            self.cumulative_length += 1
        key_room, value_room = self._rooms
        keys, values = key_room.take(most), value_room.take(most)
        self.keys, self.values = key_room.held, value_room.held
        return keys, values

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
        """The number of columns that a pass reads, and the number of the first one."""
        if self._place is None:
            return super().get_mask_sizes(query_length)  # pyright: ignore
        return self._rooms[0].buffer.shape[2], self._place.offset

    def get_seq_length(self: Any) -> Any:
        """The number of columns so far; while steps are fixed, a tensor on the device."""
        return super().get_seq_length() if self._place is None else self._place.seen  # pyright: ignore

    @property
    def is_compileable(self) -> bool:
        """Whether a step changes neither sizes nor places of tensors. transformers then makes the
        same mask in each, and looks at no number to make none."""
        return self._place is not None


class _Full(_WithRoom, DynamicLayer):
    """Keys and values of all columns."""


class _Sliding(_WithRoom, DynamicSlidingWindowLayer):
    """Keys and values of the last columns."""


class _LinearAndFull(_WithRoom, LinearAttentionAndFullAttentionLayer):
    """States, and keys and values of all columns."""


class _LinearAndSliding(_WithRoom, LinearAttentionAndSlidingWindowAttentionLayer):
    """States, and keys and values of the last columns."""


_WITH_ROOM: dict[type, type] = {
    DynamicLayer: _Full,
    DynamicSlidingWindowLayer: _Sliding,
    LinearAttentionAndFullAttentionLayer: _LinearAndFull,
    LinearAttentionAndSlidingWindowAttentionLayer: _LinearAndSliding,
}
# Types of layers whose rows and columns are understood here. To a cache with any other type no rows
# can be added.
_JOINABLE = (
    *_WITH_ROOM.values(),
    LinearAttentionLayer,
    # The type of layers that share another layer's keys and values. The oldest transformers that
    # is allowed does not have it.
    *(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)),
)


def new_cache(config: PretrainedConfig) -> DynamicCache:
    """Make an empty cache for a model. Its layers of the kinds that are known here get spare
    columns."""
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        kind = _WITH_ROOM.get(type(layer))
        if kind is not None:
            # Not every version makes these layers with the same arguments: they are made out of
            # transformers' own, which are used no more.
            cache.layers[number] = object.__new__(kind)
            vars(cache.layers[number]).update(vars(layer))
    return cache


def is_joinable(cache: DynamicCache) -> bool:
    """Whether rows can be added to this cache, and columns (token positions) dropped from it."""
    return all(type(layer) in _JOINABLE for layer in cache.layers)


def select_rows(cache: DynamicCache, index: torch.Tensor) -> None:
    """Replace the cache's rows by those with the numbers `index` [n] int64, in that order. A row
    may be selected several times.

    `reorder_cache` is the only way to select rows that every kind of layer has: layers with keys
    and values, and layers with states of convolutions or linear attention.
    """
    cache.reorder_cache(index)  # pyright: ignore[reportArgumentType] - any int64 tensor will do


def resize(cache: DynamicCache, columns: int) -> None:
    """Make a cache `columns` (token positions) long: drop columns on its left, or add padding
    there, which the mask must hide. A layer with a sliding window holds only the last columns, as
    many as its window lets the next token see."""
    for layer in cache.layers:
        # Other layers hold states that do not grow with the columns; None: nothing is held yet.
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            continue
        held_columns = columns
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = columns
            held_columns = min(columns, layer.sliding_window - 1)  # the next token is the last
        missing = held_columns - layer.keys.shape[-2]  # if negative, so many columns are dropped
        if missing == 0:
            continue
        # Keys and values are [rows, heads, columns, dim]: only columns are padded, on the left.
        layer.keys = F.pad(layer.keys, (0, 0, missing, 0))
        layer.values = F.pad(layer.values, (0, 0, missing, 0))


def append_rows(cache: DynamicCache, fresh: DynamicCache) -> None:
    """Append the rows of the cache `fresh` to `cache`, in place. Both have equally many columns
    (token positions)."""
    for layer, fresh_layer in zip(cache.layers, fresh.layers, strict=True):
        _append_rows_of_layer(layer, fresh_layer)


def _append_rows_of_layer(layer: object, fresh_layer: Any) -> None:
    """Append the rows of `fresh_layer` to `layer`, in place. Both are the same layer of two caches
    and have equally many columns (token positions). Keys, values and the states of convolutions and
    linear attention are appended."""
    # Not `elif` below: some layers have both keys with values, and states.
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        layer.keys = torch.cat([layer.keys, fresh_layer.keys])
        layer.values = torch.cat([layer.values, fresh_layer.values])
    if isinstance(layer, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            states: Any = getattr(layer, name)  # a layer may have several, by number
            for number, fresh_state in getattr(fresh_layer, name).items():
                if fresh_state is not None:  # None: not yet filled
                    states[number] = torch.cat([states[number], fresh_state])


def _fix(cache: DynamicCache, next_column: torch.Tensor, spare: int) -> list[torch.Tensor]:
    """Give every layer `spare` spare columns and let the next steps keep all sizes: `update` writes
    a token where a tensor on the device says, and the model reads all columns. `_unfix` ends that.

    Args:
        next_column: [1], how many columns (token positions) the rows have before a step.

    Returns other tensors [1] on the device, which must grow by one after each step, as
    `next_column` must.
    """
    columns = int(next_column)
    counters = {0: next_column}  # by the number of the first column that a layer holds
    for layer in _layers_with_room(cache):
        layer._make_rooms(spare, cleared=True)  # the model multiplies hidden columns by zero
        offset = columns - layer.keys.shape[2]
        if offset not in counters:
            counters[offset] = next_column - offset
        layer._place = _Place(counters[offset], next_column[0], offset)
    return [counter for offset, counter in counters.items() if offset]


def _unfix(cache: DynamicCache, steps: int) -> None:
    """End what `_fix` began, after so many steps. The layers hold what the steps have written."""
    for layer in _layers_with_room(cache):
        layer._place = None
        for _ in range(steps):
            layer._take_column()


def _layers_with_room(cache: DynamicCache) -> Sequence[Any]:
    """The layers that can have spare columns and hold keys and values."""
    return [
        layer for layer in cache.layers if isinstance(layer, _WithRoom) and layer.keys is not None
    ]


class _Waits(TorchDispatchMode):
    """A context in which it is noted which operations make the host wait for the device, or copy
    between both."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

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
            self.waiting.append(str(func))
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
        self._counters = [self._next_column, *_fix(cache, self._next_column, FIXED_STEPS)]
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
        _unfix(self.cache, self._steps)
        return self._mask[:, : self.columns], self._positions

    def _compute(self) -> torch.Tensor:
        """Compute a step on the tensors as they are."""
        return self.forward(self._ids, self._mask, self._positions, self.cache)

    def _first(self) -> torch.Tensor:
        """Compute the first step, and find out whether it makes the host wait."""
        waits = _Waits()
        with waits:
            logits = _beside(self._compute, self._mask.device)
        if waits.waiting:
            self.why_not = f"a step needs {waits.waiting[0]}, for which the host waits"
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
