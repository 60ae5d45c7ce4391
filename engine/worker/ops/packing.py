"""Packing: rows of token ids stand one after the other, without padding. A prompt that the rows of
a group (completions of one task) share stands only once.

    prefixes                              suffixes
    [prompt of group 0][prompt of 1] ...  [completion 0 of group 0][completion 1 of group 0] ...

A row that shares nothing is a prefix alone. A token of a prefix attends to the tokens before it in
that prefix; a token of a suffix attends to its whole prefix and to the tokens before it in the
suffix. These are the same tokens as if the prompt were repeated for each row. The last token of a
row predicts nothing and is left out.

Linear layers run over the packed tokens; only attention needs to know which token attends to which,
and learns it from a `Layout`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.worker.core.batch import Row
from engine.worker.core.transfer import to_device

# The most pairs of tokens that an attention bucket may compute only because of padding. Computing
# so many costs as much as one more call for another bucket.
MAX_WASTED_PAIRS = 12000
# Suffixes share a bucket while the longest of their prefixes is at most PREFIX_RATIO times the
# shortest, plus PREFIX_TOKENS.
PREFIX_RATIO = 1.25
PREFIX_TOKENS = 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, one after the other in the packed order.

    Attributes:
        start, stop: the range of their tokens in the packed order.
        rows, length: how many sequences there are, and the length of the longest.
        scatter_index: [stop - start] int64, the place of each token among the rows * length places
            of the padded bucket; None if all sequences are equally long.
    """

    start: int
    stop: int
    rows: int
    length: int
    scatter_index: torch.Tensor | None

    def to(self, device: torch.device) -> "Bucket":
        """Return the same bucket with its tensor on the device."""
        return replace(self, scatter_index=_on_device(self.scatter_index, device))


def _on_device(index: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Copy an index tensor to the device; None stays None."""
    return None if index is None else index.to(device)


@dataclass(frozen=True)
class SuffixBucket:
    """Suffixes of similar length whose prefixes are of similar length.

    Attributes:
        suffixes: their tokens, without the prefixes.
        prefix_rows: [prefix tokens] int64, the packed rows of the bucket's prefixes.
        prefix_count, prefix_length: how many prefixes there are, and the length of the longest.
        prefix_scatter_index: where each prefix token goes among the prefix_count * prefix_length
            places of the padded prefixes; None if all are equally long.
        owner: [suffixes] int64, the number of each suffix's prefix among those of the bucket.
        mask: [suffixes, 1, length, prefix_length + length] bool, True where a token attends to a
            key.
    """

    suffixes: Bucket
    prefix_rows: torch.Tensor
    prefix_count: int
    prefix_length: int
    prefix_scatter_index: torch.Tensor | None
    owner: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device) -> "SuffixBucket":
        """Return the same bucket with its tensors on the device."""
        return replace(
            self,
            suffixes=self.suffixes.to(device),
            prefix_rows=self.prefix_rows.to(device),
            prefix_scatter_index=_on_device(self.prefix_scatter_index, device),
            owner=self.owner.to(device),
            mask=self.mask.to(device),
        )


@dataclass(frozen=True)
class Continuation:
    """The suffixes of one prompt.

    Attributes:
        start, stop: where the prompt begins and ends in the packed order.
        suffixes: their tokens, without the prompt.
    """

    start: int
    stop: int
    suffixes: Bucket


@dataclass(frozen=True)
class Layout:
    """The sequences of a packed microbatch, from which follows which token attends to which.

    Attributes:
        prefix_lengths, suffix_lengths: of the sequences, in packed order.
        owners: for each suffix, the number of its prefix in that order.
    """

    prefix_lengths: tuple[int, ...]
    suffix_lengths: tuple[int, ...]
    owners: tuple[int, ...]


# The tensors of a `Packed`, by name.
_TENSORS = ("ids", "positions", "source", "labels", "row", "predicting", "predicting_of_label")


@dataclass(frozen=True)
class Packed:
    """A packed microbatch of N tokens, of which T are trained.

    Attributes:
        ids, positions: [N] int64; positions count from 0 in every row, prompt included.
        layout: which sequences there are.
        source: [T] int64, the packed token that predicts each trained token.
        labels: [T] int64, the ids of the trained tokens, row by row in the order of the rows given.
        row: [T] int64, the row that each trained token belongs to.
        predicting: [P] int64, the packed tokens in `source`, each once and in ascending order.
        predicting_of_label: [T] int64, the number of each trained token's own among `predicting`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout
    source: torch.Tensor
    labels: torch.Tensor
    row: torch.Tensor
    predicting: torch.Tensor
    predicting_of_label: torch.Tensor

    def to(self, device: torch.device) -> "Packed":
        """Return the same microbatch with its tensors copied to the device. Does not wait until the
        copies are complete; what the device computes later does."""
        moved = {name: to_device(getattr(self, name), device) for name in _TENSORS}
        return replace(self, **moved)


def pack(rows: Sequence[Row], padding_multiple: Callable[[int], int] = lambda count: 1) -> Packed:
    """Pack the token ids of a microbatch's rows one after the other, without padding. A prompt that
    rows share (a prefix) is packed once, and what follows it in each row is a suffix; a row that
    shares nothing is a prefix alone. First come all prefixes, sorted by length, then all suffixes
    in the order of their prefixes, those of one prefix by length.

    Args:
        rows: each with its ids, its loss mask and the length of the prompt it shares.
        padding_multiple: called with the number of tokens, returns the number that it should be a
            multiple of (matmul.py; 1: any number will do). One more sequence, which no row sees,
            fills the batch up to that multiple.

    Raises:
        ValueError: if a row's first token is marked as trained, since nothing predicts that token.
    """
    prefixes = _filled_prefixes(rows, padding_multiple)
    order = _PackedOrder.of_rows(rows, prefixes)
    ids, positions = _packed_ids_with_positions(rows, prefixes, order)
    sources, labels, row_numbers = _trained_tokens(rows, order)
    source = torch.cat(sources)
    # `unique` runs here, on the CPU. On a GPU it would make the host wait for the device.
    predicting, predicting_of_label = source.unique(return_inverse=True)
    return Packed(
        ids=torch.cat(ids),
        positions=torch.cat(positions),
        layout=order.layout,
        source=source,
        labels=torch.cat(labels),
        row=torch.cat(row_numbers),
        predicting=predicting,
        predicting_of_label=predicting_of_label,
    )


def _filled_prefixes(
    rows: Sequence[Row], padding_multiple: Callable[[int], int]
) -> list["_Prefix"]:
    """Collect the distinct prefixes of the rows (each shared prompt once, and each row that shares
    none), sorted by length, so that those of similar length can share a bucket. One more prefix,
    which belongs to no row, fills the packed tokens up to the multiple that `padding_multiple`
    gives for their number."""
    prefixes = _distinct_prefixes(rows)
    token_total = _packed_tokens(prefixes, rows)
    filler_length = -token_total % padding_multiple(token_total)  # up to the next multiple
    if filler_length:
        prefixes.append(_Prefix([0] * filler_length, []))
    prefixes.sort(key=lambda prefix: len(prefix.ids))
    return prefixes


@dataclass(frozen=True)
class _PackedOrder:
    """The places of prefixes and suffixes of rows in the packed order.

    Attributes:
        layout: lengths of the sequences in that order.
        prefix_of_row: for each row, the number of its prefix.
        suffix_rows: the numbers of the rows with a suffix, in the packed order of the suffixes.
    """

    layout: Layout
    prefix_of_row: dict[int, int]
    suffix_rows: list[int]

    @classmethod
    def of_rows(cls, rows: Sequence[Row], prefixes: Sequence["_Prefix"]) -> "_PackedOrder":
        """Put these rows into packed order: first every prefix (shared prompt, or whole row) once,
        as ordered in `prefixes`, then what follows a shared prompt in each row (the suffixes)."""
        prefix_of_row: dict[int, int] = {}
        for prefix_number, prefix in enumerate(prefixes):
            prefix_of_row |= dict.fromkeys(prefix.rows, prefix_number)
        suffix_rows = [number for number, row in enumerate(rows) if row.prefix_len]

        def sort_key(number: int) -> tuple[int, int]:
            """Sort suffixes so that those of one prefix stand together, with similar lengths side
            by side. `number` is that of a row."""
            return prefix_of_row[number], len(rows[number].ids)

        suffix_rows.sort(key=sort_key)
        layout = Layout(
            prefix_lengths=tuple(len(prefix.ids) for prefix in prefixes),
            suffix_lengths=tuple(_suffix_length(rows[number]) for number in suffix_rows),
            owners=tuple(prefix_of_row[number] for number in suffix_rows),
        )
        return cls(layout, prefix_of_row, suffix_rows)

    @cached_property
    def prefix_starts(self) -> list[int]:
        """The index in the packed order at which each prefix begins."""
        return start_offsets(self.layout.prefix_lengths, offset=0)

    @cached_property
    def suffix_starts(self) -> dict[int, int]:
        """The index in the packed order at which a row's suffix begins, by row number. Rows without
        a suffix are left out."""
        starts = start_offsets(self.layout.suffix_lengths, offset=sum(self.layout.prefix_lengths))
        return dict(zip(self.suffix_rows, starts, strict=True))


def _packed_ids_with_positions(
    rows: Sequence[Row], prefixes: Sequence["_Prefix"], order: _PackedOrder
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make two lists with one tensor for each prefix, then for each suffix: its ids, and their
    positions in their row. A row's last id is left out, because nothing is predicted from it."""
    prefix_lengths = order.layout.prefix_lengths
    ids = [torch.tensor(prefix.ids, dtype=torch.long) for prefix in prefixes]
    positions = [torch.arange(length) for length in prefix_lengths]
    for row_number in order.suffix_rows:
        row = rows[row_number]
        ids.append(torch.tensor(row.ids[row.prefix_len : -1], dtype=torch.long))
        positions.append(torch.arange(row.prefix_len, len(row.ids) - 1))
    return ids, positions


def rounded_up(
    tokens: torch.Tensor, token_count: int, padding_multiple: Callable[[int], int]
) -> torch.Tensor:
    """Extend `tokens`, indices of packed tokens without repetition, until their number is a
    multiple of padding_multiple(len(tokens)). The indices that are added at the end are below
    `token_count` and not among them; if there are too few such indices, all are added."""
    missing = -len(tokens) % padding_multiple(len(tokens))  # up to the next multiple
    if not missing:
        return tokens
    is_unused = torch.ones(token_count, dtype=torch.bool)
    is_unused[tokens] = False
    return torch.cat([tokens, is_unused.nonzero()[:missing, 0]])


def _suffix_length(row: Row) -> int:
    """Count the tokens of a row that are packed after its shared prompt. The last token predicts
    nothing and is not packed."""
    return len(row.ids) - 1 - row.prefix_len


def _trained_positions(row: Row, number: int) -> torch.Tensor:
    """Find the positions of a row's trained tokens in the row, [trained] int64.

    Raises ValueError if the first token is one of them, since nothing predicts that token. The
    message names the row by its `number`.
    """
    if row.loss_mask[0]:
        fault = "its first token is marked as trained, nothing predicts it"
        raise ValueError(f"row {number}: {fault}")
    return torch.tensor(row.loss_mask, dtype=torch.bool).nonzero()[:, 0]


def _trained_tokens(
    rows: Sequence[Row], order: _PackedOrder
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Find the trained tokens of each row. `order` tells where the rows' tokens are packed.

    Returns three lists with one tensor per row: the packed token that predicts each trained token,
    the id of the trained token, and the row's number.

    Raises:
        ValueError: if a row's first token is marked as trained.
    """
    source, labels, row_numbers = [], [], []
    for number, row in enumerate(rows):
        # Positions in the row; a trained token is predicted at the one before it.
        trained = _trained_positions(row, number)
        predicting = trained - 1
        source.append(_in_packed_order(predicting, row, number, order))
        labels.append(torch.tensor(row.ids, dtype=torch.long)[trained])
        row_numbers.append(torch.full((len(trained),), number))
    return source, labels, row_numbers


def _in_packed_order(
    positions: torch.Tensor, row: Row, row_number: int, order: _PackedOrder
) -> torch.Tensor:
    """Translate positions in a row, which count from its first token, into indices of the same
    tokens in the packed order. There the row's prefix (the prompt it shares) and its suffix (the
    rest) are not adjacent. `row_number` is the row's number in the microbatch."""
    if_in_prefix = order.prefix_starts[order.prefix_of_row[row_number]] + positions
    if not row.prefix_len:  # the row shares no prompt: all of it is packed as a prefix
        return if_in_prefix
    # The suffix begins at position `prefix_len` of the row.
    if_in_suffix = order.suffix_starts[row_number] + (positions - row.prefix_len)
    return torch.where(positions < row.prefix_len, if_in_prefix, if_in_suffix)


def token_count(rows: Sequence[Row]) -> int:
    """Count the tokens that `pack` would pack for these rows: a prompt that rows share counts once,
    and the last token of a row, which predicts nothing, not at all. A sequence that only fills the
    batch up is not counted."""
    return _packed_tokens(_distinct_prefixes(rows), rows)


def _packed_tokens(prefixes: Sequence["_Prefix"], rows: Sequence[Row]) -> int:
    """Count the tokens of these prefixes, and of the suffixes of those rows that share a prefix."""
    prefix_tokens = sum(len(prefix.ids) for prefix in prefixes)
    return prefix_tokens + sum(_suffix_length(row) for row in rows if row.prefix_len)


@dataclass(frozen=True)
class _Prefix:
    """A sequence that is packed once, and the numbers of the rows that begin with this sequence."""

    ids: Sequence[int]
    rows: list[int]


def _distinct_prefixes(rows: Sequence[Row]) -> list[_Prefix]:
    """Collect the prefixes of a microbatch: each shared prompt once, and each row without a shared
    prompt as a whole (without its last token, which predicts nothing)."""
    prefixes: list[_Prefix] = []
    index_of_prompt: dict[tuple[int, ...], int] = {}
    for number, row in enumerate(rows):
        if not row.prefix_len:
            prefixes.append(_Prefix(row.ids[:-1], [number]))
            continue
        prompt = tuple(row.ids[: row.prefix_len])
        if prompt in index_of_prompt:
            prefixes[index_of_prompt[prompt]].rows.append(number)
        else:
            index_of_prompt[prompt] = len(prefixes)
            prefixes.append(_Prefix(prompt, [number]))
    return prefixes


def prefix_buckets(layout: Layout) -> list[Bucket]:
    """Group the prefixes of a layout into buckets: sequences of similar length, which are padded to
    one length for attention kernels that work on rectangles."""
    return _group_into_buckets(layout.prefix_lengths, offset=0)


def continuations(layout: Layout) -> list[Continuation]:
    """Make one entry for each prompt (prefix) that rows continue, with all their continuations
    (suffixes) in one bucket, which is padded to one length. Empty suffixes are left out."""
    starts = start_offsets(layout.prefix_lengths, offset=0)
    groups: list[Continuation] = []
    offset = sum(layout.prefix_lengths)  # where the next suffix begins in the packed order
    for owner, lengths in sorted(_suffix_lengths_by_owner(layout).items()):
        bucket = _padded_bucket(lengths, offset)
        stop = starts[owner] + layout.prefix_lengths[owner]
        groups.append(Continuation(starts[owner], stop, suffixes=bucket))
        offset = bucket.stop
    return groups


def _suffix_lengths_by_owner(layout: Layout) -> dict[int, list[int]]:
    """Map the number of each prefix to the lengths of its suffixes, in packed order. Empty suffixes
    are left out, and so are prefixes without any other."""
    lengths: dict[int, list[int]] = {}
    for owner, length in zip(layout.owners, layout.suffix_lengths, strict=True):
        if length:
            lengths.setdefault(owner, []).append(length)
    return lengths


def suffix_buckets(layout: Layout) -> list[SuffixBucket]:
    """Group the suffixes of a layout (what follows a shared prompt, the prefix, in each row) into
    buckets: sequences that are padded to one length, with the prefixes that they attend to. Empty
    suffixes are left out."""
    buckets: list[SuffixBucket] = []
    offset = sum(layout.prefix_lengths)  # where the next bucket begins in the packed order
    first = 0  # the bucket's first suffix; `end` is the one after its last
    while first < len(layout.suffix_lengths):
        end = _end_of_suffix_bucket(layout, first)
        token_count = sum(layout.suffix_lengths[first:end])
        if token_count:
            buckets.append(_suffix_bucket(layout, first, end, offset))
        offset += token_count
        first = end
    return buckets


def _end_of_suffix_bucket(layout: Layout, first: int) -> int:
    """Find the end of the bucket that begins with the suffix number `first`. That is the number of
    the next suffix whose prefix (the prompt before it) is too long to be padded together with those
    of the others, or the number of all suffixes if there is none."""
    # For each suffix the length of its prefix. They rise: the first is the bucket's shortest.
    prefix_lengths = [layout.prefix_lengths[owner] for owner in layout.owners]
    longest_prefix = PREFIX_RATIO * prefix_lengths[first] + PREFIX_TOKENS
    end = first
    while end < len(prefix_lengths) and prefix_lengths[end] <= longest_prefix:
        end += 1
    return end


def _suffix_bucket(layout: Layout, first: int, end: int, offset: int) -> SuffixBucket:
    """Make the bucket of the suffixes from number `first` to `end - 1`, with the prefixes (prompts)
    that they continue. Attention pads both to one length each. At least one suffix has tokens.
    `offset` is the index at which suffix `first` begins in the packed order."""
    # A completion of one token has an empty suffix.
    nonempty_suffixes = [suffix for suffix in range(first, end) if layout.suffix_lengths[suffix]]
    suffix_lengths = [layout.suffix_lengths[suffix] for suffix in nonempty_suffixes]
    suffixes = _padded_bucket(suffix_lengths, offset)
    prefix_of_suffix = [layout.owners[suffix] for suffix in nonempty_suffixes]
    used_prefixes = sorted(set(prefix_of_suffix))
    prefix_lengths = [layout.prefix_lengths[prefix] for prefix in used_prefixes]
    index_in_bucket = {prefix: index for index, prefix in enumerate(used_prefixes)}
    owner = torch.tensor([index_in_bucket[prefix] for prefix in prefix_of_suffix])
    return SuffixBucket(
        suffixes=suffixes,
        prefix_rows=_rows_of_prefixes(layout, used_prefixes),
        prefix_count=len(used_prefixes),
        prefix_length=max(prefix_lengths),
        prefix_scatter_index=_scatter_index(prefix_lengths, max(prefix_lengths)),
        owner=owner,
        mask=_suffix_mask(suffixes, prefix_lengths, owner),
    )


def _rows_of_prefixes(layout: Layout, numbers: Sequence[int]) -> torch.Tensor:
    """List the indices of all packed tokens of the prefixes with these numbers, one prefix after
    the other: [tokens] int64."""
    starts = start_offsets(layout.prefix_lengths, offset=0)
    rows = []
    for number in numbers:
        start = starts[number]
        rows.append(torch.arange(start, start + layout.prefix_lengths[number]))
    return torch.cat(rows)


def _suffix_mask(
    suffixes: Bucket, prefix_lengths: Sequence[int], owner: torch.Tensor
) -> torch.Tensor:
    """Make the mask of `SuffixBucket`, [suffixes, 1, length, longest prefix + length] bool. A
    suffix token sees all of its prefix, and its suffix up to itself.

    `owner` [suffixes] holds for each suffix the index of its prefix in `prefix_lengths`.
    """
    longest = max(prefix_lengths)
    # [prefixes, longest]: True where a prefix has a token, False where it is padded.
    is_token = torch.arange(longest)[None, :] < torch.tensor(prefix_lengths)[:, None]
    prompt_mask = is_token[owner][:, None, None, :].expand(-1, 1, suffixes.length, -1)
    causal_mask = torch.ones(suffixes.length, suffixes.length, dtype=torch.bool).tril()
    return torch.cat([prompt_mask, causal_mask.expand(len(owner), 1, -1, -1)], -1)


def _group_into_buckets(lengths: Sequence[int], offset: int) -> list[Bucket]:
    """Group consecutive sequences into buckets. A bucket ends before the sequence that would bring
    its padding above MAX_WASTED_PAIRS.

    Args:
        lengths: of the sequences, in rising order.
        offset: the index at which the first sequence begins in the packed order.
    """
    buckets = []
    first = 0  # the bucket's first sequence; `end` is the one after its last
    while first < len(lengths):
        end = _end_of_bucket(lengths, first)
        bucket = _padded_bucket(lengths[first:end], offset)
        buckets.append(bucket)
        offset = bucket.stop
        first = end
    return buckets


def _end_of_bucket(lengths: Sequence[int], first: int) -> int:
    """Find the end of the bucket that begins with the sequence number `first`. That is the number
    of the next sequence that would bring the bucket's padding, in pairs of tokens that attention
    computes for nothing, above MAX_WASTED_PAIRS; len(lengths) if none would. `lengths` rise."""
    end = first
    unpadded_pairs = 0  # pairs of tokens in the bucket, if nothing were padded
    while end < len(lengths):
        # Rising lengths: the newest sequence is the longest, to which all are padded.
        padded_pairs = (end + 1 - first) * lengths[end] ** 2
        unpadded_pairs += lengths[end] ** 2
        if padded_pairs - unpadded_pairs > MAX_WASTED_PAIRS:
            break
        end += 1
    return end


def _padded_bucket(lengths: Sequence[int], start: int) -> Bucket:
    """Make the bucket of consecutive sequences of these lengths, which attention pads to the
    longest of them. The first begins at index `start` of the packed order."""
    longest = max(lengths)
    return Bucket(
        start=start,
        stop=start + sum(lengths),
        rows=len(lengths),
        length=longest,
        scatter_index=_scatter_index(lengths, longest),
    )


def _scatter_index(lengths: Sequence[int], longest: int) -> torch.Tensor | None:
    """Compute the place of each token, int64, after every sequence is padded to `longest`. For the
    lengths 1 and 2 that is [0, 2, 3]. Returns None if nothing has to be padded."""
    if all(length == longest for length in lengths):
        return None
    starts = [number * longest for number in range(len(lengths))]
    places = [torch.arange(length) + start for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(places)


def start_offsets(lengths: Sequence[int], offset: int) -> list[int]:
    """Compute the index at which each of consecutive sequences begins, if the first begins at
    `offset`. For the lengths 3 and 5 and offset 0: [0, 3]."""
    starts = []
    for length in lengths:
        starts.append(offset)
        offset += length
    return starts
