"""Keys and values of the completions under way, and the decode step's attention over them.

Completions stand in blocks of equal width. Each block belongs to one prompt, whose keys and values
are stored once. A step takes two batched products over the prompts (the queries of a whole block at
once), two over every row's own tokens, and one softmax across both.

All rows write the same column of their own part; a row that joined later has the earlier columns
masked, and prompts are padded on the right. Rows that have ended may remain in a block; what they
compute is finite and ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.worker.network.shape import Shape

# The window of own columns that are attended to grows by this much. A GPU captures a graph for
# each window, so it grows in larger steps there.
WINDOW = {"cpu": 16, "cuda": 128}
MOST_ADDED = 512  # columns; up to this the room doubles


@dataclass(frozen=True)
class Prompts:
    """Keys and values of prompts that have been read.

    Attributes:
        keys, values: [layers, prompts, kv, longest, dim], zero beyond each prompt.
        lengths: of each prompt, in tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: list[int]


class Cache:
    """See the module.

    Args:
        shape: of the model.
        prompts: one for each block.
        width: rows of a block.
        starts: [blocks * width] the first column of each row that it may see.
        column: columns written so far.
        like: decides dtype and device.
    """

    def __init__(
        self,
        shape: Shape,
        prompts: Prompts,
        width: int,
        starts: Sequence[int],
        column: int,
        like: torch.Tensor,
    ) -> None:
        """Make room for the own tokens of all rows, and lay out the prompts' keys and values.

        Args:
            prompts: one for each block of `width` rows.
            starts: [blocks * width], the first column of each row that it may see.
            column: how many columns are written already.
            like: a tensor of the dtype and on the device to work in.
        """
        self.shape = shape
        self.prompts = prompts
        self.blocks, self.width = len(prompts.lengths), width
        self.starts = list(starts)
        self.written = column
        self.device, self.dtype = like.device, like.dtype
        self.grain = WINDOW.get(self.device.type, 128)
        self.column = torch.tensor([column], device=self.device)
        lengths = torch.tensor(prompts.lengths, device=self.device)
        first = torch.tensor(starts, device=self.device)
        self.positions = lengths.repeat_interleave(width) + column - first  # of the next token
        self.first = first
        self.own = self._room(self._capacity(column + 1))
        self.window = 0
        kv, longest = shape.kv, prompts.keys.shape[3]
        self.repeats = shape.heads // kv
        self.scale = shape.head_dim**-0.5
        hidden = torch.arange(longest, device=self.device) >= lengths[:, None]
        # One for each block and key head.
        self.prompt_bias = _bias(hidden, self.dtype).repeat_interleave(kv, 0)[:, None]
        self.prompt_keys = [k.flatten(0, 1).transpose(1, 2) for k in prompts.keys]
        self.prompt_values = [v.flatten(0, 1) for v in prompts.values]

    @classmethod
    def for_new_rows(
        cls, shape: Shape, fresh: Prompts, blocks: Sequence[int], width: int
    ) -> "Cache":
        """A new cache for rows that have only their prompts so far.

        Args:
            fresh: prompts that were just read.
            blocks: for each block, the number of its prompt among `fresh`.
            width: rows of a block.
        """
        lengths = [fresh.lengths[i] for i in blocks]
        prompts = Prompts(*_picked(fresh, blocks, max(lengths)), lengths)
        return cls(shape, prompts, width, [0] * (len(blocks) * width), 0, fresh.keys)

    def widen(self) -> bool:
        """Enlarge the window of own columns if it is full, so that the next column fits.

        Returns whether it was full. All views are then new ones, so a step that was captured as a
        CUDA graph must be captured again.
        """
        if self.written < self.window:
            return False
        # Rounded up to a multiple of `grain`.
        self.window = -(-(self.written + 1) // self.grain) * self.grain
        if self.window > self.own.shape[5]:
            grown = self._room(self._capacity(self.window))
            grown[..., : self.own.shape[5], :] = self.own
            self.own = grown
        shape, window, columns = self.shape, self.window, self.own.shape[5]
        flat = self.own.view(2, shape.layers, -1, columns, shape.head_dim)
        keys, values = flat[..., :window, :]
        self.own_keys = [k.transpose(1, 2) for k in keys.unbind()]
        self.own_values = list(values.unbind())
        self.writable = self.own.unbind(1)
        # A row does not see columns before its first one, nor those not written yet.
        numbers = torch.arange(window, device=self.device)
        hidden = (numbers < self.first[:, None]) | (numbers >= self.written)
        bias = _bias(hidden, self.dtype).view(self.blocks, 1, self.width, window)
        bias = bias.expand(-1, shape.kv, -1, -1).reshape(-1, 1, window)
        self.own_bias = bias.contiguous()
        # One buffer of scores for a softmax over prompt and own tokens, and views of its two parts.
        longest = self.prompt_bias.shape[-1]
        rows = self.blocks * shape.kv * self.width
        self.scores = self.own.new_empty(rows, self.repeats, longest + window)
        grouped = self.scores.view(-1, self.width * self.repeats, longest + window)
        self.prompt_scores, self.own_scores = grouped[..., :longest], self.scores[..., longest:]
        self.prompt_raw = self.own.new_empty(self.prompt_scores.shape)
        self.own_raw = self.own.new_empty(self.own_scores.shape)
        return True

    def open_column(self) -> None:
        """Let every row see the column that is about to be written."""
        self.own_bias.index_fill_(2, self.column, 0.0)

    def advance(self) -> None:
        """Move on to the next column, after a step has written this one."""
        self.column.add_(1)
        self.positions.add_(1)
        self.written += 1

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Store the keys and values of one new token per row, and compute the attention of that
        token over the row's prompt and its own tokens.

        Args:
            layer: number of the layer.
            heads: [rows, heads + 2 kv, dim], rotated queries and keys, and values.

        Returns [rows, heads * dim].
        """
        shape, blocks, width = self.shape, self.blocks, self.width
        kv, dim = shape.kv, shape.head_dim
        # The new keys and values go into the column that all rows write now.
        new = heads[:, shape.heads :].view(blocks, width, 2, kv, 1, dim)
        self.writable[layer].index_copy_(4, self.column, new.permute(2, 0, 3, 1, 4, 5))
        q = heads[:, : shape.heads].view(blocks, width, kv, self.repeats, dim).transpose(1, 2)
        # Scores over the prompt: one product for each block, as its rows have the same keys.
        q = q.reshape(blocks * kv, width * self.repeats, dim)
        keys = self.prompt_keys[layer]
        torch.baddbmm(self.prompt_bias, q, keys, alpha=self.scale, out=self.prompt_raw)
        self.prompt_scores.copy_(self.prompt_raw)
        # Scores over the own tokens: one product for each row.
        q = q.view(-1, self.repeats, dim)
        keys = self.own_keys[layer]
        torch.baddbmm(self.own_bias, q, keys, alpha=self.scale, out=self.own_raw)
        self.own_scores.copy_(self.own_raw)
        # In place: the views made in `widen` are of `scores`, and the weights are read by them.
        torch.softmax(self.scores, -1, out=self.scores)
        out = torch.bmm(self.prompt_scores, self.prompt_values[layer])
        out.view(-1, self.repeats, dim).baddbmm_(self.own_scores, self.own_values[layer])
        out = out.view(blocks, kv, width, self.repeats, dim).transpose(1, 2)
        return out.reshape(blocks * width, -1)

    def rearranged(
        self,
        kept: Sequence[tuple[int, Sequence[int]]],
        fresh: Prompts | None,
        fresh_blocks: Sequence[int],
        width: int,
    ) -> "Cache":
        """A new cache with other blocks: some with rows of this one, some for prompts that join.

        Args:
            kept: for each block that stays, its old number, and the old numbers of the `width` rows
                that it has from now on.
            fresh: prompts that join; None if none do.
            fresh_blocks: for each block that joins, the number of its prompt among `fresh`.
            width: rows of a block from now on.
        """
        rows = [row for _, members in kept for row in members]
        # Columns that no remaining row can see are dropped.
        begin = min((self.starts[row] for row in rows), default=self.written)
        column = self.written - begin
        starts = [self.starts[row] - begin for row in rows]
        # Rows that join see only the columns from now on.
        starts += [column] * (len(fresh_blocks) * width)
        prompts = _joined(self.prompts, [block for block, _ in kept], fresh, fresh_blocks)
        new = Cache(self.shape, prompts, width, starts, column, self.own)
        if rows:
            # Old row number r stands in block r // width at place r % width.
            index = torch.tensor(rows, device=self.device)
            by_row = self.own.permute(2, 4, 0, 1, 3, 5, 6)[..., begin : self.written, :]
            moved = by_row[index // self.width, index % self.width]
            moved = moved.view(len(kept), width, *moved.shape[1:]).permute(2, 3, 0, 4, 1, 5, 6)
            new.own[:, :, : len(kept), :, :, :column] = moved
        return new

    def _capacity(self, needed: int) -> int:
        """How many columns to allocate so that `needed` ones fit. The room is doubled until it has
        MOST_ADDED columns, then grows by so many, so that the columns are seldom copied."""
        room = self.grain
        while room < needed:
            room += min(room, MOST_ADDED)
        return room

    def _room(self, columns: int) -> torch.Tensor:
        """Memory for the own tokens' keys and values: zeros [2, layers, blocks, kv, width, columns,
        dim], keys first. It must hold finite numbers, because a masked column still takes part in
        the products, with weight zero."""
        shape = self.shape
        return torch.zeros(
            (2, shape.layers, self.blocks, shape.kv, self.width, columns, shape.head_dim),
            dtype=self.dtype,
            device=self.device,
        )


def _bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor to add to scores: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )


def _joined(
    old: Prompts, kept: Sequence[int], fresh: Prompts | None, joining: Sequence[int]
) -> Prompts:
    """Gather one prompt for each block: first the blocks that stay, then those that join.

    Args:
        old: the prompts of all blocks so far.
        kept: the numbers of the blocks that stay.
        fresh: prompts that join; None if none do.
        joining: for each block that joins, the number of its prompt among `fresh`.
    """
    lengths = [old.lengths[i] for i in kept]
    if fresh is None:
        return Prompts(*_picked(old, kept, max(lengths)), lengths)
    lengths += [fresh.lengths[i] for i in joining]
    longest = max(lengths)
    halves = []  # the keys, then the values
    size = [len(lengths), longest]
    for before, after in ((old.keys, fresh.keys), (old.values, fresh.values)):
        layers, _, kv, _, dim = before.shape
        both = before.new_zeros(layers, size[0], kv, longest, dim)
        for part, source, blocks in (
            (both[:, : len(kept)], before, kept),
            (both[:, len(kept) :], after, joining),
        ):
            used = min(source.shape[3], longest)
            index = torch.tensor(blocks, device=source.device)
            part[:, :, :, :used] = source[:, :, :, :used].index_select(1, index)
        halves.append(both)
    return Prompts(halves[0], halves[1], lengths)


def _picked(
    prompts: Prompts, blocks: Sequence[int], longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of the prompts with the numbers `blocks`, in that order, cut at `longest`
    tokens."""
    index = torch.tensor(blocks, device=prompts.keys.device)
    keys, values = (
        half[:, :, :, :longest].index_select(1, index) for half in (prompts.keys, prompts.values)
    )
    return keys, values
