"""Pages of files that only grow, read by seeking: the millionth line costs what the tenth does.

A position is a byte offset at the start of a line, so it survives every restart. Reading stops
after `budget` bytes even when nothing matched; the caller learns how far it came.
"""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BUDGET = 4_000_000  # bytes one page may read
_BLOCK = 65_536
_LONGEST_LINE = 1_000_000  # a longer one is taken apart: no page may need the whole file

Match = Callable[[str], bool]


@dataclass(frozen=True)
class Line:
    """One line without its end; `start` and `end` are its bytes in the file, end included."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Page:
    """Lines of a file, in file order.

    Attributes:
        start: byte at which they begin; older lines lie before it.
        end: byte at which newer lines begin.
        scanned: bytes that were read to find them.
    """

    lines: list[Line]
    start: int
    end: int
    scanned: int


def size_of(path: Path) -> int:
    """The size of the file in bytes, 0 when it is missing."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def page_before(
    path: Path, end: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """The last `limit` lines that lie before byte `end` and match, in file order.

    The page's `start` is the `end` to give for the page of older lines; it is 0 at the head of the
    file. A missing file gives an empty page.

    Args:
        end: the start of a line, or the size of the file.
        match: which lines count; None for all.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    lines: list[Line] = []
    try:
        file = open(path, "rb")  # noqa: SIM115  the with below closes it
    except FileNotFoundError:
        return Page([], 0, 0, 0)
    with file:
        end = min(end, os.fstat(file.fileno()).st_size)
        page_start = end
        while page_start > 0 and len(lines) < limit and end - page_start < budget:
            page_start, earlier_lines = _lines_before(file, page_start)
            for line in reversed(earlier_lines):
                if match is None or match(line.text):
                    lines.append(line)
                    if len(lines) == limit:
                        page_start = line.start
                        break
    lines.reverse()
    return Page(lines, page_start, end, end - page_start)


def _lines_before(file: BinaryIO, end: int) -> tuple[int, list[Line]]:
    """The whole lines of the block of the file that ends at byte `end`, and the byte at which they
    start.

    The block grows until a line starts in it. A line longer than the longest allowed is taken
    apart.
    """
    block_size = _BLOCK
    while True:
        start = max(0, end - block_size)
        file.seek(start)
        data = file.read(end - start)
        # The newline at the very end closes the last line, it does not start one.
        first_line = data.find(b"\n", 0, len(data) - 1) + 1 if start else 0
        if first_line or not start or block_size >= _LONGEST_LINE:
            return start + first_line, _lines_of(data[first_line:], start + first_line)
        block_size = min(block_size * 4, _LONGEST_LINE)


def page_after(
    path: Path, start: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """The first `limit` complete lines from byte `start` on that match, in file order.

    The page's `end` is the `start` to give for the page of newer lines; a last line without its end
    is left for it. A missing file gives an empty page.

    Args:
        start: any byte; inside a line it moves to the next one.
        match: which lines count; None for all.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    lines: list[Line] = []
    try:
        file = open(path, "rb")  # noqa: SIM115  the with below closes it
    except FileNotFoundError:
        return Page([], 0, 0, 0)
    with file:
        start = _next_line_start(file, min(max(start, 0), os.fstat(file.fileno()).st_size))
        file.seek(start)
        position = start
        while len(lines) < limit and position - start < budget:
            raw = file.readline(_LONGEST_LINE)
            if not raw or (not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE):
                break
            line = Line(position, position + len(raw), _shown_text(raw))
            position += len(raw)
            if match is None or match(line.text):
                lines.append(line)
    return Page(lines, start, position, position - start)


def torn_tail(path: Path) -> str:
    """What follows the last newline of the file: a line still being written, such as a progress
    bar. "" where nothing follows it."""
    size = size_of(path)
    if size == 0:
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, size - _BLOCK))
        data = file.read(_BLOCK)
    return _shown_text(data[data.rfind(b"\n") + 1 :])


def complete_size(path: Path) -> int:
    """The byte after the last newline of the file, 0 for an empty or missing file.

    Looks back by one longest line at most; where that holds no newline, its beginning is returned.
    """
    size = size_of(path)
    if size == 0:
        return 0
    with open(path, "rb") as file:
        earliest = max(0, size - _LONGEST_LINE)
        position = size
        while position > earliest:
            start = max(earliest, position - _BLOCK)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return earliest


def _next_line_start(file: BinaryIO, offset: int) -> int:
    """`offset`, or the start of the next line when it lies inside a line."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(file.readline(_LONGEST_LINE))


def _lines_of(data: bytes, offset: int) -> list[Line]:
    """The lines of `data`, each with its start and end byte in the file; `offset` is where `data`
    starts in the file."""
    lines = []
    # A file of bytes is split on newlines alone; bytes.splitlines would split on returns too.
    for raw in io.BytesIO(data):
        lines.append(Line(offset, offset + len(raw), _shown_text(raw)))
        offset += len(raw)
    return lines


def _shown_text(raw: bytes) -> str:
    """The text of a line as a terminal would leave it: of a line that was rewritten with carriage
    returns, such as a progress bar, only the last version."""
    return raw.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]
