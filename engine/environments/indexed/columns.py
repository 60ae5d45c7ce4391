"""Columns: files of numbers, one number per row of a dataset. They are read through memory maps, so
that millions of rows take little memory."""

import math
import mmap
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

Code = Literal["B", "Q"]  # type codes of `array`: unsigned numbers of 8 and of 64 bits
# Hashes are searched in portions of about this many, so that a set of one portion stays small.
PORTION = 500_000
_HASHES = 1 << 64  # a hash is a number below this


class Column:
    """A file of numbers, one per row of a dataset. Numbers are appended, and read as one
    sequence."""

    def __init__(self, path: Path, code: Code) -> None:
        """Make the file at `path`, or empty it. `code` is the type of its numbers, as in `array`:
        "Q" for 64 bits, "B" for 8."""
        self.path = path
        self.code: Code = code
        path.write_bytes(b"")

    def extend(self, values: array) -> None:
        """Append `values` to the file; the array must have the type code of the column."""
        with open(self.path, "ab") as file:
            values.tofile(file)

    def values(self) -> Sequence[int]:
        """Return all numbers of the column, mapped from the file into memory."""
        return map_numbers(self.path, self.code)


def map_numbers(
    path: Path, code: Code, first_byte: int = 0, count: int | None = None
) -> Sequence[int]:
    """Map numbers of a file into memory and return them: `count` numbers from byte `first_byte` on.

    `code` is the type of the numbers, as in `array`. If `count` is None, the numbers up to the end
    of the file are returned.
    """
    size = path.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        return array(code)
    with open(path, "rb") as file:
        # A length of 0 maps the whole file.
        content = memoryview(mmap.mmap(file.fileno(), length=0, access=mmap.ACCESS_READ))
    end_byte = size if count is None else first_byte + count * array(code).itemsize
    return content[first_byte:end_byte].cast(code)


def hash_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Divide all 64-bit hashes into ranges of which each holds about PORTION of `count` random
    hashes; return an iterator over the ranges as (first hash, first hash after it)."""
    range_count = max(1, math.ceil(count / PORTION))
    edges = [_HASHES * number // range_count for number in range(range_count + 1)]
    return pairwise(edges)


def count_distinct(hashes: Sequence[int]) -> int:
    """Count the different values among 64-bit hashes.

    The values are counted range by range, which takes less memory than one set of all values.
    """
    return sum(
        len({value for value in hashes if low <= value < high})
        for low, high in hash_ranges(len(hashes))
    )


def find_repeated(hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Find values that occur more than once. For each occurrence after the first, yield (position,
    position of the first occurrence).

    One range of values is searched after another, so that memory stays small. Within a range the
    pairs come in the order of positions.
    """
    for low, high in hash_ranges(len(hashes)):
        in_range = [value for value in hashes if low <= value < high]
        # If no value of this range is repeated, skip the dict below: it takes more memory.
        if len(set(in_range)) == len(in_range):
            continue
        first_position: dict[int, int] = {}
        for position, value in enumerate(hashes):
            if low <= value < high:
                earlier = first_position.setdefault(value, position)
                if earlier != position:
                    yield position, earlier
