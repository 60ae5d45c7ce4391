"""Packing: rows of token ids one after the other, without padding; a group's prompt only once.

    prefixes                              suffixes
    [prompt of group 0][prompt of 1] ...  [completion 0 of group 0][completion 1 of group 0] ...

A row that shares nothing is a prefix alone. A token of a prefix attends to the tokens before it in
that prefix; a token of a suffix attends to its whole prefix and to the tokens before it in the
suffix. That is what it would attend to if the prompt were repeated for each row. The last token of
a row predicts nothing and is left out.

Linear layers run over the packed tokens; only attention needs to know which token attends to which,
and learns it from a `Layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.worker.core.batch import Row

# Pairs of padding tokens that an attention bucket may compute: they cost as much as one more call.
WASTE = 12000
# Suffixes share a bucket while the longest of their prefixes is at most SLACK times the shortest,
# plus twice SLACK_TOKENS.
SLACK = 1.25
SLACK_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, one after the other in the packed order.

    Attributes:
        start, stop: where their tokens begin and end in the packed order.
        rows, length: how many sequences there are, and the length of the longest.
        scatter_index: [stop - start] int64, where each token goes among the rows * length places of
            the padded bucket; None where all sequences are equally long.
    """

    start: int
    stop: int
    rows: int
    length: int
    scatter_index: torch.Tensor | None

    def to(self, device: torch.device) -> "Bucket":
        return replace(self, scatter_index=_on_device(self.scatter_index, device))


def _on_device(index: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if index is None else index.to(device)


@dataclass(frozen=True)
class SuffixBucket:
    """Suffixes of similar length whose prefixes are of similar length.

    Attributes:
        own: the suffixes themselves.
        prefix_rows: [prefix tokens] int64, the packed rows of the bucket's prefixes.
        prefixes, prefix_length: how many prefixes there are, and the length of the longest.
        prefix_scatter_index: as `Bucket.scatter_index`, for the prefixes.
        owner: [suffixes] int64, the number of each suffix's prefix among those of the bucket.
        mask: [suffixes, 1, length, prefix_length + length] bool, True where a token attends to a
            key.
    """

    own: Bucket
    prefix_rows: torch.Tensor
    prefixes: int
    prefix_length: int
    prefix_scatter_index: torch.Tensor | None
    owner: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device) -> "SuffixBucket":
        """The same bucket with its tensors on the device."""
        return replace(
            self,
            own=self.own.to(device),
            prefix_rows=self.prefix_rows.to(device),
            prefix_scatter_index=_on_device(self.prefix_scatter_index, device),
            owner=self.owner.to(device),
            mask=self.mask.to(device),
        )


@dataclass(frozen=True)
class Layout:
    """The sequences of a packed microbatch, from which follows which token attends to which.

    Attributes:
        prefixes, suffixes: lengths of the sequences in packed order.
        owners: for each suffix, the number of its prefix in that order.
    """

    prefixes: tuple[int, ...]
    suffixes: tuple[int, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A packed microbatch of N tokens, of which T are trained.

    Attributes:
        ids, positions: [N] int64; positions count from 0 in every row, prompt included.
        layout: which sequences there are.
        source: [T] int64, the packed token that predicts each trained token.
        labels: [T] int64, the ids of the trained tokens, row by row in the order of the rows given.
        row: [T] int64, the row that each of them belongs to.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout
    source: torch.Tensor
    labels: torch.Tensor
    row: torch.Tensor

    def to(self, device: torch.device) -> "Packed":
        """The same microbatch with its tensors on the device. On a GPU the copies may still be
        under way; what is computed with them waits for them."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "positions", "source", "labels", "row")
        }
        return replace(self, **moved)


def pack(rows: Sequence[Row], grain: Callable[[int], int] = lambda count: 1) -> Packed:
    """Pack the rows of a microbatch: all prefixes, then all suffixes, without padding (see the
    module). Prefixes are sorted by length, suffixes by the order of their prefixes and then by
    length.

    Args:
        rows: each with its ids, loss mask and the length of the prompt it shares.
        grain: gives, for a number of tokens, the number of which it should be a multiple
            (matmul.py). One more sequence, which no row sees, fills the batch up to it, so that
            matrix products come in few sizes.

    Raises:
        ValueError: when a row's first token is marked as trained, since nothing predicts it.
    """
    prefixes = _distinct_prefixes(rows)
    token_total = _packed_tokens(prefixes, rows)
    filler_length = -token_total % grain(token_total)
    if filler_length:
        prefixes.append(_Prefix([0] * filler_length, []))
    # Prefixes by length, so that those of similar length can share a bucket.
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i].ids))
    starts: dict[int, int] = {}  # by index in `prefixes`
    offset = 0
    for i in order:
        starts[i] = offset
        offset += len(prefixes[i].ids)
    # For each row: the place of its prefix in the packed order, and its index in `prefixes`.
    places = {member: (rank, i) for rank, i in enumerate(order) for member in prefixes[i].members}
    # Rows with a suffix, in the order in which those come.
    suffix_rows = [r for r in range(len(rows)) if rows[r].prefix_len]
    suffix_rows.sort(key=lambda r: (places[r][0], len(rows[r].ids)))
    ids = [torch.tensor(prefixes[i].ids, dtype=torch.long) for i in order]
    positions = [torch.arange(len(prefixes[i].ids)) for i in order]
    suffix_starts: dict[int, int] = {}  # by row
    for r in suffix_rows:
        row = rows[r]
        suffix_starts[r] = offset
        offset += len(row.ids) - 1 - row.prefix_len  # without the last token
        ids.append(torch.tensor(row.ids[row.prefix_len : -1], dtype=torch.long))
        positions.append(torch.arange(row.prefix_len, len(row.ids) - 1))
    prefix_starts = [starts[places[r][1]] for r in range(len(rows))]
    source, labels, owner = _trained_tokens(rows, prefix_starts, suffix_starts)
    layout = Layout(
        tuple(len(prefixes[i].ids) for i in order),
        tuple(len(rows[r].ids) - 1 - rows[r].prefix_len for r in suffix_rows),
        tuple(places[r][0] for r in suffix_rows),
    )
    return Packed(
        torch.cat(ids),
        torch.cat(positions),
        layout,
        torch.cat(source),
        torch.cat(labels),
        torch.cat(owner),
    )


def _trained_tokens(
    rows: Sequence[Row], prefix_starts: Sequence[int], suffix_starts: Mapping[int, int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Find the trained tokens of each row. Returns (source, labels, row), each a list with one
    tensor per row; `Packed` says what they hold.

    Args:
        prefix_starts: for each row, where its prefix begins in the packed order.
        suffix_starts: the same for its suffix, only for rows that have one.

    Raises:
        ValueError: as `pack`.
    """
    source, labels, owner = [], [], []
    for r, row in enumerate(rows):
        if row.loss_mask[0]:
            raise ValueError(f"row {r}: its first token is marked as trained, nothing predicts it")
        # Within the row, the positions before the trained tokens: these predict them.
        before = torch.tensor(row.loss_mask, dtype=torch.bool).nonzero()[:, 0] - 1
        labels.append(torch.tensor(row.ids, dtype=torch.long)[before + 1])
        prefix = prefix_starts[r]
        if row.prefix_len:
            # Added to a position behind the prefix, this gives its place in the packed order.
            inside = suffix_starts[r] - row.prefix_len
            source.append(torch.where(before < row.prefix_len, before + prefix, before + inside))
        else:
            source.append(before + prefix)
        owner.append(torch.full((len(before),), r))
    return source, labels, owner


def token_count(rows: Sequence[Row]) -> int:
    """How many tokens `pack` would run through the model, without a filling sequence."""
    return _packed_tokens(_distinct_prefixes(rows), rows)


def _packed_tokens(prefixes: Sequence["_Prefix"], rows: Sequence[Row]) -> int:
    """How many tokens these prefixes and the rows' suffixes have. The last token of a row predicts
    nothing and is not packed."""
    return sum(len(prefix.ids) for prefix in prefixes) + sum(
        len(row.ids) - 1 - row.prefix_len for row in rows if row.prefix_len
    )


@dataclass(frozen=True)
class _Prefix:
    """A sequence that is packed by itself, and the rows that begin with it."""

    ids: Sequence[int]
    members: list[int]


def _distinct_prefixes(rows: Sequence[Row]) -> list[_Prefix]:
    """The prefixes of a microbatch: each shared prompt once, and every row without a shared prompt
    as a whole (without its last token, which predicts nothing)."""
    prefixes: list[_Prefix] = []
    index_of_prompt: dict[tuple[int, ...], int] = {}
    for r, row in enumerate(rows):
        if not row.prefix_len:
            prefixes.append(_Prefix(row.ids[:-1], [r]))
            continue
        prompt = tuple(row.ids[: row.prefix_len])
        if prompt in index_of_prompt:
            prefixes[index_of_prompt[prompt]].members.append(r)
        else:
            index_of_prompt[prompt] = len(prefixes)
            prefixes.append(_Prefix(prompt, [r]))
    return prefixes


def prefix_buckets(layout: Layout) -> list[Bucket]:
    """Group the prefixes into padded buckets, for attention kernels that work on rectangles."""
    return _group_into_buckets(layout.prefixes, 0)


def suffix_buckets(layout: Layout) -> list[SuffixBucket]:
    """Group the suffixes into padded buckets, each with the prefixes that its suffixes attend to.
    Empty suffixes are left out."""
    starts = _start_offsets(layout.prefixes, 0)
    buckets: list[SuffixBucket] = []
    first = 0
    offset = sum(layout.prefixes)
    while first < len(layout.suffixes):
        last = first
        shortest_prefix = layout.prefixes[layout.owners[first]]
        # Prefixes are sorted by length, so consecutive suffixes have prefixes of similar length.
        while last < len(layout.suffixes) and layout.prefixes[layout.owners[last]] <= (
            SLACK * shortest_prefix + 2 * SLACK_TOKENS
        ):
            last += 1
        lengths = layout.suffixes[first:last]
        size = sum(lengths)
        if size:
            buckets.append(_suffix_bucket(layout, starts, first, last, offset))
        offset += size
        first = last
    return buckets


def _suffix_bucket(
    layout: Layout, starts: list[int], first: int, last: int, offset: int
) -> SuffixBucket:
    """Make the bucket of the suffixes `first` to `last` (not included) of the layout.

    Args:
        starts: where each prefix begins in the packed order.
        offset: where the first of the suffixes begins.
    """
    lengths = layout.suffixes[first:last]
    # Counted from `first`; an answer of one token has an empty suffix.
    nonempty = [i for i, n in enumerate(lengths) if n]
    used_prefixes = sorted({layout.owners[first + i] for i in nonempty})
    prefix_lengths = [layout.prefixes[prefix] for prefix in used_prefixes]
    own = _padded_bucket([lengths[i] for i in nonempty], offset)
    longest = max(prefix_lengths)
    index_in_bucket = {prefix: i for i, prefix in enumerate(used_prefixes)}
    owner = torch.tensor([index_in_bucket[layout.owners[first + i]] for i in nonempty])
    # [prefixes, longest]: True where a prefix has a token, False where it is padded.
    seen = torch.arange(longest)[None, :] < torch.tensor(prefix_lengths)[:, None]
    # A suffix token sees all of its prefix, and its own suffix up to itself.
    prompt_mask = seen[owner][:, None, None, :].expand(-1, 1, own.length, -1)
    causal_mask = torch.ones(own.length, own.length, dtype=torch.bool).tril()
    mask = torch.cat([prompt_mask, causal_mask.expand(len(nonempty), 1, -1, -1)], -1)
    rows = torch.cat(
        [
            torch.arange(starts[prefix], starts[prefix] + layout.prefixes[prefix])
            for prefix in used_prefixes
        ]
    )
    return SuffixBucket(
        own, rows, len(used_prefixes), longest, _scatter_index(prefix_lengths, longest), owner, mask
    )


def _group_into_buckets(lengths: Sequence[int], offset: int) -> list[Bucket]:
    """Group consecutive sequences into buckets. A bucket ends where one more sequence would bring
    its padding above `WASTE` pairs of tokens.

    Args:
        lengths: of the sequences, in rising order.
        offset: where the first sequence begins in the packed order.
    """
    buckets = []
    first = 0  # the bucket's first sequence; `last` is the one after its last
    while first < len(lengths):
        last = first
        squares = 0  # pairs of tokens in the bucket, if nothing were padded
        while last < len(lengths):
            # Rising lengths: the newest sequence is the longest, to which all are padded.
            padded = (last + 1 - first) * lengths[last] ** 2
            squares += lengths[last] ** 2
            if padded - squares > WASTE:
                break
            last += 1
        bucket = _padded_bucket(lengths[first:last], offset)
        buckets.append(bucket)
        offset = bucket.stop
        first = last
    return buckets


def _padded_bucket(lengths: Sequence[int], start: int) -> Bucket:
    """The bucket of consecutive sequences of these lengths; the first begins at `start` in the
    packed order."""
    longest = max(lengths)
    return Bucket(
        start, start + sum(lengths), len(lengths), longest, _scatter_index(lengths, longest)
    )


def _scatter_index(lengths: Sequence[int], longest: int) -> torch.Tensor | None:
    """The place of each token, int64, when every sequence is padded to `longest`; None if nothing
    has to be padded. For the lengths 1 and 2: [0, 2, 3]."""
    if all(n == longest for n in lengths):
        return None
    return torch.cat([torch.arange(n) + number * longest for number, n in enumerate(lengths)])


def _start_offsets(lengths: Sequence[int], offset: int) -> list[int]:
    """Where each of consecutive sequences begins if the first begins at `offset`. For the lengths 3
    and 5 and offset 0: [0, 3]."""
    starts = []
    for length in lengths:
        starts.append(offset)
        offset += length
    return starts
