"""Columns of numbers, one per row of a dataset, kept in files and read through memory maps, so that
millions of rows take little memory."""

import math
import mmap
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

Code = Literal["B", "Q"]  # numbers of 8 and of 64 bits, as `array` names them
# Hashes are searched in portions of about this many, so that a set of them stays small.
PORTION = 500_000
_HASHES = 1 << 64  # a hash is a number below this


class Column:
    """A column in a file, written at its end and read as a whole.

    Args:
        path: of the file; made new.
        code: type code of `array`, such as "Q" for 64 bits.
    """

    def __init__(self, path: Path, code: Code) -> None:
        self.path = path
        self.code: Code = code
        path.write_bytes(b"")

    def extend(self, values: array) -> None:
        """Append the values, an array of the same type code."""
        with open(self.path, "ab") as file:
            values.tofile(file)

    def values(self) -> Sequence[int]:
        """All values, mapped from the file."""
        return mapped(self.path, self.code)


def mapped(path: Path, code: Code, first_byte: int = 0, count: int | None = None) -> Sequence[int]:
    """Map numbers of a file into memory: `count` of them from the byte `first_byte` on.

    `code` is their type, as in `array`; a `count` of None means up to the end of the file.
    """
    size = path.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        return array(code)
    with open(path, "rb") as file:
        # A length of 0 maps the whole file.
        content = memoryview(mmap.mmap(file.fileno(), length=0, access=mmap.ACCESS_READ))
    end_byte = size if count is None else first_byte + count * array(code).itemsize
    return content[first_byte:end_byte].cast(code)


def portions(count: int) -> Iterator[tuple[int, int]]:
    """Ranges (from, below) that together hold all 64-bit hashes; of `count` random hashes each
    range holds about PORTION."""
    range_count = max(1, math.ceil(count / PORTION))
    edges = [_HASHES * number // range_count for number in range(range_count + 1)]
    return pairwise(edges)


def count_distinct(hashes: Sequence[int]) -> int:
    """Count the different values among 64-bit hashes.

    It goes range by range, which takes less memory than one set of all of them.
    """
    return sum(
        len({value for value in hashes if low <= value < high})
        for low, high in portions(len(hashes))
    )


def repeated(hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Find values that occur again: yields (position, position of the first occurrence) for each.

    One range of values is searched after another, so that memory stays small. Within a range the
    pairs come in the order of positions.
    """
    for low, high in portions(len(hashes)):
        in_range = [value for value in hashes if low <= value < high]
        # Where no value occurs again, the dict below, which takes more memory than a set, is not
        # needed.
        if len(set(in_range)) == len(in_range):
            continue
        first_position: dict[int, int] = {}
        for position, value in enumerate(hashes):
            if low <= value < high:
                earlier = first_position.setdefault(value, position)
                if earlier != position:
                    yield position, earlier
