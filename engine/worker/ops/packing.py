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

from collections.abc import Callable, Sequence
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
        """The same microbatch with its tensors on the device; the copies may still be under way."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "positions", "source", "labels", "row")
        }
        return replace(self, **moved)


def pack(rows: Sequence[Row], grain: Callable[[int], int] = lambda count: 1) -> Packed:
    """See the module.

    Args:
        grain: what a number of tokens is made a multiple of, by a sequence that nobody sees, so
            that products come in few sizes (matmul.py).

    Raises:
        ValueError: when a row's first token is marked as trained: nothing predicts it.
    """
    prefixes = _prefixes(rows)
    size = _tokens(prefixes, rows)
    missing = -size % grain(size)
    if missing:
        prefixes.append(_Prefix([0] * missing, []))
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i].ids))
    starts: dict[int, int] = {}
    offset = 0
    for i in order:
        starts[i] = offset
        offset += len(prefixes[i].ids)
    place = {member: (rank, i) for rank, i in enumerate(order) for member in prefixes[i].members}
    with_suffix = [r for r in range(len(rows)) if rows[r].prefix_len]
    with_suffix.sort(key=lambda r: (place[r][0], len(rows[r].ids)))
    ids = [torch.tensor(prefixes[i].ids, dtype=torch.long) for i in order]
    positions = [torch.arange(len(prefixes[i].ids)) for i in order]
    suffix_starts: dict[int, int] = {}
    for r in with_suffix:
        row = rows[r]
        suffix_starts[r] = offset
        offset += len(row.ids) - 1 - row.prefix_len
        ids.append(torch.tensor(row.ids[row.prefix_len : -1], dtype=torch.long))
        positions.append(torch.arange(row.prefix_len, len(row.ids) - 1))
    source, labels, owner = [], [], []
    for r, row in enumerate(rows):
        if row.loss_mask[0]:
            raise ValueError(f"row {r}: its first token is marked as trained, nothing predicts it")
        before = torch.tensor(row.loss_mask, dtype=torch.bool).nonzero()[:, 0] - 1
        labels.append(torch.tensor(row.ids, dtype=torch.long)[before + 1])
        prefix = starts[place[r][1]]
        if row.prefix_len:
            inside = suffix_starts[r] - row.prefix_len
            source.append(torch.where(before < row.prefix_len, before + prefix, before + inside))
        else:
            source.append(before + prefix)
        owner.append(torch.full((len(before),), r))
    layout = Layout(
        tuple(len(prefixes[i].ids) for i in order),
        tuple(len(rows[r].ids) - 1 - rows[r].prefix_len for r in with_suffix),
        tuple(place[r][0] for r in with_suffix),
    )
    return Packed(
        torch.cat(ids),
        torch.cat(positions),
        layout,
        torch.cat(source),
        torch.cat(labels),
        torch.cat(owner),
    )


def token_count(rows: Sequence[Row]) -> int:
    """Tokens `pack` would run through the model."""
    return _tokens(_prefixes(rows), rows)


def _tokens(prefixes: Sequence["_Prefix"], rows: Sequence[Row]) -> int:
    return sum(len(t.ids) for t in prefixes) + sum(
        len(r.ids) - 1 - r.prefix_len for r in rows if r.prefix_len
    )


@dataclass(frozen=True)
class _Prefix:
    ids: Sequence[int]
    members: list[int]


def _prefixes(rows: Sequence[Row]) -> list[_Prefix]:
    """The sequences that stand for themselves: whole rows, and each shared prompt once."""
    prefixes: list[_Prefix] = []
    known: dict[tuple[int, ...], int] = {}
    for r, row in enumerate(rows):
        if not row.prefix_len:
            prefixes.append(_Prefix(row.ids[:-1], [r]))
            continue
        prompt = tuple(row.ids[: row.prefix_len])
        if prompt in known:
            prefixes[known[prompt]].members.append(r)
        else:
            known[prompt] = len(prefixes)
            prefixes.append(_Prefix(prompt, [r]))
    return prefixes


def prefix_buckets(layout: Layout) -> list[Bucket]:
    """Prefixes in padded buckets, for attention kernels that want rectangles."""
    return _buckets(layout.prefixes, 0)


def suffix_buckets(layout: Layout) -> list[SuffixBucket]:
    """Suffixes in padded buckets with the prefixes they need."""
    starts = _starts(layout.prefixes, 0)
    buckets: list[SuffixBucket] = []
    first = 0
    offset = sum(layout.prefixes)
    while first < len(layout.suffixes):
        last = first
        low = layout.prefixes[layout.owners[first]]
        # Prefixes stand sorted by length, so a run of suffixes has prefixes of like length.
        while last < len(layout.suffixes) and layout.prefixes[layout.owners[last]] <= (
            SLACK * low + 2 * SLACK_TOKENS
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
    """Suffixes `first` to `last` of the layout with the prefixes they see, padded to one length."""
    lengths = layout.suffixes[first:last]
    nonempty = [i for i, n in enumerate(lengths) if n]  # an answer of one token has no suffix
    used = sorted({layout.owners[first + i] for i in nonempty})
    prefix_lengths = [layout.prefixes[t] for t in used]
    own = _bucket([lengths[i] for i in nonempty], offset)
    longest = max(prefix_lengths)
    number = {t: i for i, t in enumerate(used)}
    owner = torch.tensor([number[layout.owners[first + i]] for i in nonempty])
    # [prefixes, keys]
    seen = torch.arange(longest)[None, :] < torch.tensor(prefix_lengths)[:, None]
    prompt = seen[owner][:, None, None, :].expand(-1, 1, own.length, -1)
    causal = torch.ones(own.length, own.length, dtype=torch.bool).tril()
    mask = torch.cat([prompt, causal.expand(len(nonempty), 1, -1, -1)], -1)
    rows = torch.cat([torch.arange(starts[t], starts[t] + layout.prefixes[t]) for t in used])
    return SuffixBucket(
        own, rows, len(used), longest, _padding(prefix_lengths, longest), owner, mask
    )


def _buckets(lengths: Sequence[int], offset: int) -> list[Bucket]:
    """Rows of similar length together: a bucket ends where padding would waste too much."""
    buckets, first = [], 0
    while first < len(lengths):
        last = first
        squares = 0  # of the bucket's own lengths: padding it to n costs count * n^2 of them
        while last < len(lengths):
            padded = (last + 1 - first) * lengths[last] ** 2
            squares += lengths[last] ** 2
            if padded - squares > WASTE:
                break
            last += 1
        bucket = _bucket(lengths[first:last], offset)
        buckets.append(bucket)
        offset = bucket.stop
        first = last
    return buckets


def _bucket(lengths: Sequence[int], start: int) -> Bucket:
    longest = max(lengths)
    return Bucket(start, start + sum(lengths), len(lengths), longest, _padding(lengths, longest))


def _padding(lengths: Sequence[int], longest: int) -> torch.Tensor | None:
    if all(n == longest for n in lengths):
        return None
    return torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])


def _starts(lengths: Sequence[int], offset: int) -> list[int]:
    starts = []
    for n in lengths:
        starts.append(offset)
        offset += n
    return starts
