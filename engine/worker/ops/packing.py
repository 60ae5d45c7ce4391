"""Rows of token ids laid one after the other, without padding, prompts of a group only once.

    trunks                                branches
    [prompt of group 0][prompt of 1] ...  [completion 0 of group 0][completion 1 of group 0] ...

A row that shares nothing is a trunk alone. Tokens of a trunk see what stands before them in it;
tokens of a branch see their whole trunk and what stands before them in the branch: exactly what
they would see had the prompt been repeated for each. The last token of a row predicts nothing and
is left out.

Linear layers run over the packed tokens; only attention needs to know who sees whom, and gets it
as a `Layout`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.worker.core.batch import Row

# Pairs of tokens an attention bucket may compute for nothing: what one more call costs.
WASTE = 12000
# Branches may share a bucket while the shortest of their trunks is at least this much of it.
SLACK = 1.25
SLACK_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """Sequences of like length, one after the other in the packed order.

    Attributes:
        start, stop: their tokens.
        rows, length: how many there are, and the longest.
        places: [stop - start] int64, where each token stands in [rows * length]; None where all
            are equally long.
    """

    start: int
    stop: int
    rows: int
    length: int
    places: torch.Tensor | None

    def to(self, device: torch.device) -> "Bucket":
        return replace(self, places=None if self.places is None else self.places.to(device))


@dataclass(frozen=True)
class BranchBucket:
    """Branches of like length whose trunks are of like length.

    Attributes:
        own: the branches themselves.
        trunk_rows: [trunk tokens] int64, the packed rows of the bucket's trunks.
        trunks, trunk_length: how many, and the longest.
        trunk_places: as `Bucket.places`, for the trunks.
        owner: [branches] int64, the trunk of each.
        mask: [branches, 1, length, trunk_length + length] bool, True where a key is seen.
    """

    own: Bucket
    trunk_rows: torch.Tensor
    trunks: int
    trunk_length: int
    trunk_places: torch.Tensor | None
    owner: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device) -> "BranchBucket":
        return replace(
            self,
            own=self.own.to(device),
            trunk_rows=self.trunk_rows.to(device),
            trunk_places=None if self.trunk_places is None else self.trunk_places.to(device),
            owner=self.owner.to(device),
            mask=self.mask.to(device),
        )


@dataclass(frozen=True)
class Layout:
    """Who sees whom.

    Attributes:
        trunks, branches: lengths of the sequences in packed order.
        owners: for each branch, its trunk.
    """

    trunks: tuple[int, ...]
    branches: tuple[int, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A microbatch.

    Attributes:
        ids, positions: [N] int64; positions start at 0 in every row.
        layout: who sees whom.
        source: [T] int64, the packed token that predicts each trained token.
        labels: [T] int64, the trained tokens, row by row in the order the rows were given.
        row: [T] int64, the row each belongs to.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout
    source: torch.Tensor
    labels: torch.Tensor
    row: torch.Tensor

    def to(self, device: torch.device) -> "Packed":
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
    trunks = _trunks(rows)
    size = _tokens(trunks, rows)
    missing = -size % grain(size)
    if missing:
        trunks.append(_Trunk([0] * missing, []))
    order = sorted(range(len(trunks)), key=lambda i: len(trunks[i].ids))
    starts: dict[int, int] = {}
    at = 0
    for i in order:
        starts[i] = at
        at += len(trunks[i].ids)
    place = {member: (rank, i) for rank, i in enumerate(order) for member in trunks[i].members}
    branched = [r for r in range(len(rows)) if rows[r].shared]
    branched.sort(key=lambda r: (place[r][0], len(rows[r].ids)))
    ids = [torch.tensor(trunks[i].ids, dtype=torch.long) for i in order]
    positions = [torch.arange(len(trunks[i].ids)) for i in order]
    branch_starts: dict[int, int] = {}
    for r in branched:
        row = rows[r]
        branch_starts[r] = at
        at += len(row.ids) - 1 - row.shared
        ids.append(torch.tensor(row.ids[row.shared : -1], dtype=torch.long))
        positions.append(torch.arange(row.shared, len(row.ids) - 1))
    source, labels, owner = [], [], []
    for r, row in enumerate(rows):
        if row.loss_mask[0]:
            raise ValueError(f"row {r}: its first token is marked as trained, nothing predicts it")
        before = torch.tensor(row.loss_mask, dtype=torch.bool).nonzero()[:, 0] - 1
        labels.append(torch.tensor(row.ids, dtype=torch.long)[before + 1])
        trunk = starts[place[r][1]]
        if row.shared:
            inside = branch_starts[r] - row.shared
            source.append(torch.where(before < row.shared, before + trunk, before + inside))
        else:
            source.append(before + trunk)
        owner.append(torch.full((len(before),), r))
    layout = Layout(
        tuple(len(trunks[i].ids) for i in order),
        tuple(len(rows[r].ids) - 1 - rows[r].shared for r in branched),
        tuple(place[r][0] for r in branched),
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
    return _tokens(_trunks(rows), rows)


def _tokens(trunks: Sequence["_Trunk"], rows: Sequence[Row]) -> int:
    return sum(len(t.ids) for t in trunks) + sum(
        len(r.ids) - 1 - r.shared for r in rows if r.shared
    )


@dataclass(frozen=True)
class _Trunk:
    ids: Sequence[int]
    members: list[int]


def _trunks(rows: Sequence[Row]) -> list[_Trunk]:
    """The sequences that stand for themselves: whole rows, and each shared prompt once."""
    trunks: list[_Trunk] = []
    known: dict[tuple[int, ...], int] = {}
    for r, row in enumerate(rows):
        if not row.shared:
            trunks.append(_Trunk(row.ids[:-1], [r]))
            continue
        prompt = tuple(row.ids[: row.shared])
        if prompt in known:
            trunks[known[prompt]].members.append(r)
        else:
            known[prompt] = len(trunks)
            trunks.append(_Trunk(prompt, [r]))
    return trunks


def trunk_buckets(layout: Layout) -> list[Bucket]:
    """Trunks in padded buckets, for attention kernels that want rectangles."""
    return _buckets(layout.trunks, 0)


def branch_buckets(layout: Layout) -> list[BranchBucket]:
    """Branches in padded buckets with the trunks they need."""
    starts = _starts(layout.trunks, 0)
    found: list[BranchBucket] = []
    first = 0
    offset = sum(layout.trunks)
    while first < len(layout.branches):
        last = first
        low = layout.trunks[layout.owners[first]]
        # Trunks stand sorted by length, so a run of branches has trunks of like length.
        while last < len(layout.branches) and layout.trunks[layout.owners[last]] <= (
            SLACK * low + 2 * SLACK_TOKENS
        ):
            last += 1
        lengths = layout.branches[first:last]
        size = sum(lengths)
        if size:
            found.append(_branch_bucket(layout, starts, first, last, offset))
        offset += size
        first = last
    return found


def _branch_bucket(
    layout: Layout, starts: list[int], first: int, last: int, offset: int
) -> BranchBucket:
    lengths = layout.branches[first:last]
    kept = [i for i, n in enumerate(lengths) if n]  # an answer of one token has no branch
    used = sorted({layout.owners[first + i] for i in kept})
    trunk_lengths = [layout.trunks[t] for t in used]
    own = _bucket([lengths[i] for i in kept], offset)
    longest = max(trunk_lengths)
    number = {t: i for i, t in enumerate(used)}
    owner = torch.tensor([number[layout.owners[first + i]] for i in kept])
    seen = torch.arange(longest)[None, :] < torch.tensor(trunk_lengths)[:, None]  # [trunks, keys]
    prompt = seen[owner][:, None, None, :].expand(-1, 1, own.length, -1)
    causal = torch.ones(own.length, own.length, dtype=torch.bool).tril()
    mask = torch.cat([prompt, causal.expand(len(kept), 1, -1, -1)], -1)
    rows = torch.cat([torch.arange(starts[t], starts[t] + layout.trunks[t]) for t in used])
    return BranchBucket(
        own, rows, len(used), longest, _padding(trunk_lengths, longest), owner, mask
    )


def _buckets(lengths: Sequence[int], offset: int) -> list[Bucket]:
    found, first = [], 0
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
        found.append(bucket)
        offset = bucket.stop
        first = last
    return found


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
