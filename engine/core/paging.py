"""Pages of files that only grow, read by seeking: the millionth line costs what the tenth does.

A position is a byte offset at the start of a line, so it survives every restart. Reading stops
after `budget` bytes even when nothing matched; the caller learns how far it came.
"""

import io
import itertools
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
    """The last `limit` lines before byte `end` that match, in file order. Pass the page's `start`
    as `end` for the page of older lines; a `start` of 0 means that there are none.

    Args:
        end: the start of a line, or the size of the file.
        match: returns whether a line's text counts; None counts every line.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    file = _opened(path)
    if file is None:  # no such file
        return Page([], start=0, end=0, scanned=0)
    lines: list[Line] = []  # from the last to the first
    with file:
        end = min(end, os.fstat(file.fileno()).st_size)
        page_start = end
        while page_start > 0 and len(lines) < limit and end - page_start < budget:
            page_start, earlier_lines = _lines_before(file, page_start)
            matching = (line for line in reversed(earlier_lines) if _matches(line, match))
            lines += itertools.islice(matching, limit - len(lines))
            if len(lines) == limit:  # earlier lines of the block are for the next page
                page_start = lines[-1].start
    lines.reverse()
    return Page(lines, page_start, end, scanned=end - page_start)


def _opened(path: Path) -> BinaryIO | None:
    """The file at `path`, opened for reading; None if it is missing."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _matches(line: Line, match: Match | None) -> bool:
    """Whether the text of a line counts; where `match` is None, that of every line does."""
    return match is None or match(line.text)


def _lines_before(file: BinaryIO, end: int) -> tuple[int, list[Line]]:
    """Read the block of the file before byte `end`. Returns the byte at which its first whole line
    starts, and its whole lines.

    The block has `_BLOCK` bytes, or as many more as it needs for a line to start in it, but at most
    `_LONGEST_LINE`: a longer line is returned in pieces.
    """
    block_size = _BLOCK
    while True:
        start = max(0, end - block_size)
        file.seek(start)
        data = file.read(end - start)
        first_line = 0  # where the first whole line begins in `data`; 0 also if none does
        if start > 0:
            # The newline at the very end closes the last line, it does not start one.
            first_line = data.find(b"\n", 0, len(data) - 1) + 1
        if start == 0 or first_line > 0 or block_size >= _LONGEST_LINE:
            return start + first_line, _lines_of(data[first_line:], start + first_line)
        block_size = min(block_size * 4, _LONGEST_LINE)


def page_after(
    path: Path, start: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """The first `limit` complete lines from byte `start` on that match, in file order. Pass the
    page's `end` as `start` for the page of newer lines.

    Args:
        start: any byte; inside a line it moves to the start of the next line.
        match: returns whether a line's text counts; None counts every line.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    file = _opened(path)
    if file is None:  # no such file
        return Page([], start=0, end=0, scanned=0)
    lines: list[Line] = []
    with file:
        size = os.fstat(file.fileno()).st_size
        start = _next_line_start(file, offset=min(max(start, 0), size))
        file.seek(start)
        position = start
        while len(lines) < limit and position - start < budget:
            line = _complete_line(file, position)
            if line is None:  # at the end, or still being written
                break
            position = line.end
            if _matches(line, match):
                lines.append(line)
    return Page(lines, start, end=position, scanned=position - start)


def _complete_line(file: BinaryIO, position: int) -> Line | None:
    """Read the line that begins at byte `position`, where the file is; None if it is not complete:
    at the end of the file, or in a line that is still being written."""
    raw = file.readline(_LONGEST_LINE)
    # A line as long as the longest allowed is a piece of an even longer one, and counts.
    if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
        return None
    return Line(position, position + len(raw), _shown_text(raw))


def torn_tail(path: Path) -> str:
    """The text after the last newline of the file: a line still being written, such as a progress
    bar. "" where the file is missing or ends with a newline. Of a line longer than 64 KB only the
    end is returned."""
    size = size_of(path)
    if size == 0:
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, size - _BLOCK))
        data = file.read(_BLOCK)
    line_start = data.rfind(b"\n") + 1  # 0 if there is no newline
    return _shown_text(data[line_start:])


def complete_size(path: Path) -> int:
    """The size of the file's complete lines: the byte after its last newline, 0 for an empty or
    missing file.

    At most the last `_LONGEST_LINE` bytes are searched; where they hold no newline, the byte at
    which they begin is returned.
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
    """Return `offset` if a line starts there, else the start of the next line, in bytes."""
    if offset == 0:
        return 0
    # If the byte before `offset` is a newline, readline reads only that byte.
    file.seek(offset - 1)
    return offset - 1 + len(file.readline(_LONGEST_LINE))


def _lines_of(data: bytes, offset: int) -> list[Line]:
    """Split `data` into lines, each with its start and end byte in the file. `offset` is the byte
    of the file at which `data` starts."""
    lines = []
    # A file of bytes is split on newlines alone; bytes.splitlines would split on returns too.
    for raw in io.BytesIO(data):
        lines.append(Line(offset, offset + len(raw), _shown_text(raw)))
        offset += len(raw)
    return lines


def _shown_text(raw: bytes) -> str:
    """The text of a line as a terminal would show it. Of a line that a progress bar rewrote with
    carriage returns, that is only its last version."""
    return raw.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]
