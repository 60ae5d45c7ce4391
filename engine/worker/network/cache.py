"""Keys and values of the completions under way, and the decode step's attention over them.

Rows, one per completion, stand in blocks of equal width. Each block belongs to one prompt, whose
keys and values are stored once. A step takes two batched products over the prompts (the queries of
a whole block at once), two over the tokens that each row generated, and one softmax across both.

Each step writes one column of the generated tokens, the same for all rows; a row that joined later
has the earlier columns masked, and prompts are padded on the right. Rows that have ended may remain
in a block; what they compute is finite and ignored.

Every layer has tensors of its own. Where they grow or move, old and new ones exist side by side for
one layer at a time (engine/models/sizing/layers.py counts on it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.worker.network.shape import Shape

# By how many columns the window that is attended to grows. A GPU captures a graph for each window,
# so it grows in larger steps there.
WINDOW_STEP = {"cpu": 16, "cuda": 128}
# The allocated columns double up to this number, then grow by this number at a time.
MAX_COLUMNS_ADDED = 512


@dataclass(frozen=True)
class Prompts:
    """Keys and values of prompts that have been read.

    Attributes:
        keys, values: of each layer, [prompts, kv_heads, longest, dim], zero beyond each prompt.
        lengths: of each prompt, in tokens.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[int]


class StayingBlock(NamedTuple):
    """A block of a rearranged cache that is made of rows of the old one.

    Attributes:
        old_block: the number of the old block that the rows come from.
        old_rows: the numbers of these rows in the old cache: if its blocks have two rows, the
            first row of block 1 is row 2.
    """

    old_block: int
    old_rows: Sequence[int]


class Cache:
    """The keys and values of all rows being sampled, and a decode step's attention over them; see
    the module."""

    def __init__(
        self,
        shape: Shape,
        prompts: Prompts,
        width: int,
        starts: Sequence[int],
        columns_written: int,
        *,
        like: torch.Tensor,
    ) -> None:
        """Allocate columns, each for one generated token of every row, and lay out the prompts'
        keys and values.

        Args:
            shape: sizes of the model.
            prompts: one for each block. A block is `width` rows that continue the same prompt.
            starts: [blocks * width], for each row the first column that it may see: a row that
                joined after others had generated tokens must not see their columns.
            columns_written: how many columns hold tokens already; the caller copies them in.
            like: a tensor of the dtype and on the device to work in.
        """
        self.shape = shape
        self.prompts = prompts
        self.blocks, self.width = len(prompts.lengths), width
        self.starts = list(starts)
        self.columns_written = columns_written
        self.device, self.dtype = like.device, like.dtype
        self.window_step = WINDOW_STEP.get(self.device.type, 128)
        self.queries_per_key = shape.heads // shape.kv_heads
        self.scale = shape.head_dim**-0.5
        # + 1: the next step writes a column.
        columns = self._capacity(columns_written + 1)
        # Of each layer, [2, blocks, kv_heads, width, columns, dim], keys first.
        self.generated = [self._zero_columns(columns) for _ in range(shape.layers)]
        self.window = 0  # how many columns are attended to, set by `widen` before the first step
        lengths = torch.tensor(prompts.lengths, device=self.device)
        self._make_counters(lengths)
        self._make_prompt_tensors(lengths)

    def _make_counters(self, lengths: torch.Tensor) -> None:
        """Put numbers that differ between steps or rows on the device, where a captured CUDA graph
        reads them: the next column to write, and each row's first visible column and next position.

        Args:
            lengths: [blocks], of the prompts.
        """
        self.next_column = torch.tensor([self.columns_written], device=self.device)
        self.starts_on_device = torch.tensor(self.starts, device=self.device)
        # [blocks * width], the position of each row's next token: its prompt's length, and one for
        # each column since its first.
        self.positions = (
            lengths.repeat_interleave(self.width) + self.columns_written - self.starts_on_device
        )

    def _make_prompt_tensors(self, lengths: torch.Tensor) -> None:
        """Lay out the prompts' keys and values as the matrix products of a decode step read them,
        and make the bias that hides the prompts' padding. `lengths` [blocks] are those of the
        prompts, in tokens."""
        longest = self.prompts.keys[0].shape[2]
        padding = torch.arange(longest, device=self.device) >= lengths[:, None]
        # [blocks * kv_heads, 1, longest]
        bias = _hiding_bias(padding, self.dtype).repeat_interleave(self.shape.kv_heads, 0)
        self.prompt_bias = bias[:, None]
        # For each layer: [blocks * kv_heads, dim, longest] and [blocks * kv_heads, longest, dim].
        self.prompt_keys = [keys.flatten(0, 1).transpose(1, 2) for keys in self.prompts.keys]
        self.prompt_values = [values.flatten(0, 1) for values in self.prompts.values]

    @classmethod
    def for_new_rows(
        cls, shape: Shape, fresh: Prompts, blocks: Sequence[int], width: int
    ) -> "Cache":
        """Make a cache for rows that have only their prompts so far.

        Args:
            shape: sizes of the model.
            fresh: prompts that were just read; must not be used afterwards.
            blocks: for each block, the number of its prompt among `fresh`.
            width: rows of a block, which all continue the same prompt.
        """
        starts = [0] * (len(blocks) * width)  # every row sees all columns to come
        like = fresh.keys[0]
        prompts = _select_prompts(fresh, blocks)
        return cls(shape, prompts, width, starts, columns_written=0, like=like)

    def widen(self) -> bool:
        """Enlarge the window (the columns of generated tokens that are attended to, one token of
        each row per column) if it is full.

        Returns whether it was full. If so, all views are new ones, and a step that was captured as
        a CUDA graph must be captured again.
        """
        if self.columns_written < self.window:  # there is a free column
            return False
        # The least multiple of `window_step` above the columns written.
        self.window = (self.columns_written // self.window_step + 1) * self.window_step
        allocated = self.generated[0].shape[4]  # columns; a window may end before the last one
        if self.window > allocated:
            self._drop_views()  # they would keep the memory of the tensors that are replaced here
            columns = self._capacity(self.window)
            for layer, old in enumerate(self.generated):
                larger = self._zero_columns(columns)
                larger[..., :allocated, :] = old
                self.generated[layer] = larger
        self._make_views()
        self._make_bias()
        self._make_score_buffers()
        return True

    def _drop_views(self) -> None:
        """Delete the views of the generated tokens' tensors, because a view keeps the memory of its
        tensor alive."""
        self.generated_keys, self.generated_values = [], []

    def _make_views(self) -> None:
        """Make the views through which a decode step reads the keys and values of the window (the
        columns of generated tokens that are attended to)."""
        dim, columns = self.shape.head_dim, self.generated[0].shape[4]
        # Of each layer, keys and values: [2, blocks * kv_heads * width, window, dim].
        by_row = [
            keys_and_values.view(2, -1, columns, dim)[:, :, : self.window]
            for keys_and_values in self.generated
        ]
        # For each layer: [blocks * kv_heads * width, dim, window].
        self.generated_keys = [keys_and_values[0].transpose(1, 2) for keys_and_values in by_row]
        # For each layer: [blocks * kv_heads * width, window, dim].
        self.generated_values = [keys_and_values[1] for keys_and_values in by_row]

    def _make_bias(self) -> None:
        """Make the bias that is added to the attention scores over generated tokens, one column for
        each token. It hides from each row the columns before its first one, and the columns that
        are not written yet; `open_column` uncovers these one by one."""
        columns = torch.arange(self.window, device=self.device)
        hidden = (columns < self.starts_on_device[:, None]) | (columns >= self.columns_written)
        by_row = _hiding_bias(hidden, self.dtype).view(self.blocks, 1, self.width, self.window)
        # The same for every key head.
        bias = by_row.expand(-1, self.shape.kv_heads, -1, -1).reshape(-1, 1, self.window)
        self.generated_bias = bias.contiguous()  # [blocks * kv_heads * width, 1, window]

    def _make_score_buffers(self) -> None:
        """Allocate the buffer `scores` [blocks * kv_heads * width, queries per key, longest prompt
        + window]. It holds a step's attention scores over the prompt's tokens, then those over the
        generated ones, so that one softmax covers both.

        Each of the two parts has a contiguous buffer for the product that computes it, and a view
        of `scores` into which that product is then copied.
        """
        longest, queries = self.prompt_bias.shape[-1], self.queries_per_key
        rows = self.blocks * self.shape.kv_heads * self.width
        self.scores = self.generated[0].new_empty(rows, queries, longest + self.window)
        # All rows of a block have the same prompt, so one product takes them together:
        # [blocks * kv_heads, width * queries per key, longest].
        by_block = self.scores.view(-1, self.width * queries, longest + self.window)
        self.prompt_scores = by_block[..., :longest]
        self.generated_scores = self.scores[..., longest:]
        self.prompt_product = self.generated[0].new_empty(self.prompt_scores.shape)
        self.generated_product = self.generated[0].new_empty(self.generated_scores.shape)

    def open_column(self) -> None:
        """Let every row see the column that the next step writes, by setting its bias in the
        attention scores to 0; before that it is -inf."""
        columns_axis = 2
        self.generated_bias.index_fill_(columns_axis, self.next_column, 0.0)

    def advance(self) -> None:
        """Count one decode step: the next one writes the next column, and every row is one position
        further."""
        # In place, because a captured CUDA graph reads these two tensors.
        self.next_column.add_(1)
        self.positions.add_(1)
        self.columns_written += 1

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Store the keys and values of one new token per row, and compute the attention of that
        token over the row's prompt and generated tokens, itself included.

        Args:
            layer: number of the layer.
            heads: [rows, heads + 2 kv_heads, dim], the new tokens' rotated queries and keys, and
                values. The rows stand block by block: rows = blocks * width.

        Returns the attention's output, [rows, heads * dim].
        """
        shape, blocks, width = self.shape, self.blocks, self.width
        self._store(layer, heads[:, shape.heads :])
        queries = heads[:, : shape.heads].view(
            blocks, width, shape.kv_heads, self.queries_per_key, -1
        )
        # The queries of a block that share a key head stand together.
        by_key_head = queries.transpose(1, 2).reshape(blocks * shape.kv_heads, -1, shape.head_dim)
        self._write_scores(layer, by_key_head)
        # In place: `prompt_scores` and `generated_scores`, views of `scores`, are now the weights.
        torch.softmax(self.scores, -1, out=self.scores)
        return self._weighted_values(layer)

    def _store(self, layer: int, keys_and_values: torch.Tensor) -> None:
        """Write the keys and values of one new token per row, [rows, 2 kv_heads, dim] with the keys
        first, into the layer's tensor of generated tokens. They go into column `next_column`, the
        same for all rows."""
        shape = self.shape
        # [blocks, width, 2 (keys, values), kv_heads, 1 column, dim]
        one_column = keys_and_values.view(
            self.blocks, self.width, 2, shape.kv_heads, 1, shape.head_dim
        )
        # In the order of `generated`: [2, blocks, kv_heads, width, 1 column, dim].
        one_column = one_column.permute(2, 0, 3, 1, 4, 5)
        columns_axis = 4
        self.generated[layer].index_copy_(columns_axis, self.next_column, one_column)

    def _write_scores(self, layer: int, queries: torch.Tensor) -> None:
        """Write the new tokens' attention scores over prompt and generated tokens to `scores`,
        through its views `prompt_scores` and `generated_scores`.

        A score is query times key, scaled, plus the bias that hides padding and unseen columns.
        `queries`: [blocks * kv_heads, width * queries per key, dim].
        """
        # Over the prompt: one product for each block, as its rows have the same keys.
        keys = self.prompt_keys[layer]
        torch.baddbmm(self.prompt_bias, queries, keys, alpha=self.scale, out=self.prompt_product)
        self.prompt_scores.copy_(self.prompt_product)
        # Over the generated tokens: one product for each row.
        # [blocks * kv_heads * width, queries per key, dim]
        by_row = queries.view(-1, self.queries_per_key, queries.shape[2])
        keys = self.generated_keys[layer]
        product = self.generated_product
        torch.baddbmm(self.generated_bias, by_row, keys, alpha=self.scale, out=product)
        self.generated_scores.copy_(product)

    def _weighted_values(self, layer: int) -> torch.Tensor:
        """Compute the attention's output [rows, heads * dim] of a layer: the values of prompt and
        generated tokens, summed with the weights that the softmax has left in `scores` (and so in
        its views `prompt_scores` and `generated_scores`)."""
        blocks, width, queries = self.blocks, self.width, self.queries_per_key
        # Over the prompt, block by block: [blocks * kv_heads, width * queries, dim].
        out = torch.bmm(self.prompt_scores, self.prompt_values[layer])
        # The same memory row by row, to which the sum over the row's generated tokens is added.
        by_row = out.view(-1, queries, out.shape[2])
        by_row.baddbmm_(self.generated_scores, self.generated_values[layer])
        by_key_head = out.view(blocks, self.shape.kv_heads, width, queries, -1)
        return by_key_head.transpose(1, 2).reshape(blocks * width, -1)

    def rearranged(
        self,
        staying: Sequence[StayingBlock],
        fresh: Prompts | None,
        fresh_blocks: Sequence[int],
        width: int,
    ) -> "Cache":
        """Make a new cache with other blocks: first blocks made of rows of this cache, then blocks
        for prompts that join. This cache and `fresh` must not be used afterwards.

        Args:
            staying: the blocks made of rows of this cache, `width` rows each.
            fresh: prompts that join; None if none do.
            fresh_blocks: for each block that joins, the number of its prompt among `fresh`.
            width: rows of a block from now on.
        """
        rows = [row for block in staying for row in block.old_rows]
        # Columns that no remaining row can see are dropped.
        first_column = min((self.starts[row] for row in rows), default=self.columns_written)
        columns_left = self.columns_written - first_column
        starts = [self.starts[row] - first_column for row in rows]
        # Rows that join see only the columns from now on.
        starts += [columns_left] * (len(fresh_blocks) * width)
        old_blocks = [block.old_block for block in staying]
        # After this only `self.prompts` holds the old prompts, whose memory `_concatenate_prompts`
        # releases layer by layer.
        self._drop_views()
        self.prompt_keys, self.prompt_values = [], []
        prompts = _concatenate_prompts(self.prompts, old_blocks, fresh, fresh_blocks)
        new = Cache(
            self.shape, prompts, width, starts, columns_written=columns_left, like=self.generated[0]
        )
        if rows:  # otherwise no row stays, and there is nothing to copy
            self._copy_columns_to(new, rows, first_column)
        return new

    def _copy_columns_to(self, new: "Cache", rows: Sequence[int], first_column: int) -> None:
        """Copy the generated columns of these rows, from `first_column` on, to the cache `new`. The
        layers are copied one after the other, and each layer's memory in this cache is released
        before the next layer is copied."""
        for layer in range(self.shape.layers):
            new._write_first_columns(layer, self._columns_of_rows(layer, rows, first_column))
            _release(self.generated, layer)

    def _write_first_columns(self, layer: int, copied: torch.Tensor) -> None:
        """Write a layer's keys and values of generated tokens, `copied` [rows, 2, kv_heads,
        columns, dim] from another cache, into the first columns of this cache's first rows. The
        rows fill whole blocks of this cache."""
        by_block = copied.unflatten(0, (-1, self.width))  # [blocks, width, 2, ...]
        # To [2, blocks, kv_heads, width, columns, dim].
        by_block = by_block.permute(2, 0, 3, 1, 4, 5)
        blocks, columns = by_block.shape[1], by_block.shape[4]
        self.generated[layer][:, :blocks, :, :, :columns] = by_block

    def _columns_of_rows(self, layer: int, rows: Sequence[int], first_column: int) -> torch.Tensor:
        """Read a layer's keys and values of generated tokens, as [rows, 2, kv_heads, columns, dim].
        The rows are those with the numbers `rows`; the columns go from `first_column` to the last
        one written."""
        # [blocks, width, 2, kv_heads, columns, dim]
        by_place = self.generated[layer].permute(1, 3, 0, 2, 4, 5)
        by_place = by_place[..., first_column : self.columns_written, :]
        index = torch.tensor(rows, device=self.device)
        # Row number r stands in block r // width at place r % width.
        return by_place[index // self.width, index % self.width]

    def _capacity(self, needed: int) -> int:
        """Return the number of columns to allocate so that at least `needed` columns fit.
        Capacities are far apart, so that the columns are seldom copied: they double up to
        MAX_COLUMNS_ADDED, then grow by that number."""
        columns = self.window_step
        while columns < needed:
            columns += min(columns, MAX_COLUMNS_ADDED)
        return columns

    def _zero_columns(self, columns: int) -> torch.Tensor:
        """Allocate zeros for a layer's keys and values of generated tokens: [2, blocks, kv_heads,
        width, columns, dim], keys first. The memory must hold finite numbers, because a masked
        column still takes part in the products, with weight zero."""
        shape = self.shape
        return torch.zeros(
            (2, self.blocks, shape.kv_heads, self.width, columns, shape.head_dim),
            dtype=self.dtype,
            device=self.device,
        )


def _hiding_bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of the shape of `hidden` (bool) to add to attention scores: -inf where `hidden`
    is True, so that the softmax gives that place the weight 0; else 0."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, float("-inf"))


def _concatenate_prompts(
    old: Prompts, old_blocks: Sequence[int], fresh: Prompts | None, fresh_blocks: Sequence[int]
) -> Prompts:
    """Gather the prompts of a rearranged cache, one for each block: first the blocks that stay,
    then those that join. `old` and `fresh` must not be used afterwards.

    Args:
        old: the prompts of all blocks so far.
        old_blocks: the numbers of the blocks that stay.
        fresh: prompts that join; None if none do.
        fresh_blocks: for each block that joins, the number of its prompt among `fresh`.
    """
    if fresh is None:
        return _select_prompts(old, old_blocks)
    old_lengths = [old.lengths[index] for index in old_blocks]
    fresh_lengths = [fresh.lengths[index] for index in fresh_blocks]
    lengths = old_lengths + fresh_lengths
    longest = max(lengths)
    keys = _concatenate_layers(old.keys, old_blocks, fresh.keys, fresh_blocks, longest)
    values = _concatenate_layers(old.values, old_blocks, fresh.values, fresh_blocks, longest)
    return Prompts(keys, values, lengths)


def _concatenate_layers(
    old: list[torch.Tensor],
    old_numbers: Sequence[int],
    fresh: list[torch.Tensor],
    fresh_numbers: Sequence[int],
    longest: int,
) -> list[torch.Tensor]:
    """Make for each layer one tensor [prompts, kv_heads, longest, dim]: the prompts `old_numbers`
    of `old`, then the prompts `fresh_numbers` of `fresh`, zero beyond each prompt. All are keys, or
    all are values. The memory of `old` and `fresh` is released layer by layer."""
    _, kv_heads, _, dim = old[0].shape
    count = len(old_numbers)
    joined = []
    for layer in range(len(old)):
        stacked = old[layer].new_zeros(count + len(fresh_numbers), kv_heads, longest, dim)
        _copy_prompts(old[layer], old_numbers, stacked[:count])
        _copy_prompts(fresh[layer], fresh_numbers, stacked[count:])
        _release(old, layer)
        _release(fresh, layer)
        joined.append(stacked)
    return joined


def _release(tensors: list[torch.Tensor], layer: int) -> None:
    """Release the memory of a layer's tensor by putting an empty tensor in its place in the list
    `tensors`, which has one for each layer."""
    tensors[layer] = tensors[layer].new_empty(0)


def _copy_prompts(source: torch.Tensor, indices: Sequence[int], target: torch.Tensor) -> None:
    """Fill `target` with the prompts `indices[0]`, `indices[1]`, ... of `source`, in this order.

    Both are keys, or both are values, [prompts, kv_heads, tokens, dim], padded to different
    lengths. Only the shorter length is copied; beyond it there is only padding.
    """
    tokens = min(source.shape[2], target.shape[2])
    index = torch.tensor(indices, device=source.device)
    target[:, :, :tokens] = source[:, :, :tokens].index_select(0, index)


def _select_prompts(prompts: Prompts, indices: Sequence[int]) -> Prompts:
    """Pick the prompts with these numbers, in that order, padded only to the longest of them.
    `prompts` must not be used afterwards."""
    lengths = [prompts.lengths[prompt_index] for prompt_index in indices]
    longest = max(lengths)
    index_tensor = torch.tensor(indices, device=prompts.keys[0].device)

    def select(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return each layer's keys or values of the picked prompts, and release the memory of the
        others."""
        chosen = []
        for layer in range(len(tensors)):
            # [prompts, kv_heads, tokens, dim]
            chosen.append(tensors[layer][:, :, :longest].index_select(0, index_tensor))
            _release(tensors, layer)
        return chosen

    return Prompts(select(prompts.keys), select(prompts.values), lengths)
