"""Pages of lines of growing files. They are read by seeking, so long files are not slower.

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

BUDGET = 4_000_000  # the most bytes that are read for one page
_BLOCK = 65_536  # bytes that are read at once
# A longer line is returned in pieces, so that no page has to read the whole file.
_LONGEST_LINE = 1_000_000

Match = Callable[[str], bool]


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        start: the byte of the file at which the line begins.
        end: the byte after the line and its newline.
        text: the line without its newline.
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Page:
    """Lines of a file, in file order.

    Attributes:
        start: the byte at which the lines begin; older lines are before it.
        end: the byte at which newer lines begin.
        scanned: how many bytes were read to find the lines.
    """

    lines: list[Line]
    start: int
    end: int
    scanned: int


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file is missing."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def page_before(
    path: Path, end: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """Return the last `limit` matching lines before byte `end`, in file order.

    To read the page of older lines, pass the page's `start` as `end`. If `start` is 0, there are no
    older lines.

    Args:
        path: the file; a missing file gives an empty page.
        end: the start of a line, or the size of the file.
        limit: the most lines of the page.
        match: returns whether a line's text counts; None counts every line.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    file = _open_if_present(path)
    if file is None:  # no such file
        return Page([], start=0, end=0, scanned=0)
    lines: list[Line] = []  # in reverse order: the last line is the first
    with file:
        end = min(end, os.fstat(file.fileno()).st_size)
        page_start = end
        while page_start > 0 and len(lines) < limit and end - page_start < budget:
            page_start, earlier_lines = _lines_before(file, page_start)
            matching = (line for line in reversed(earlier_lines) if _matches(line, match))
            lines += itertools.islice(matching, limit - len(lines))
            if len(lines) == limit:  # the other lines of the block belong to the next page
                page_start = lines[-1].start
    lines.reverse()
    return Page(lines, page_start, end, scanned=end - page_start)


def _open_if_present(path: Path) -> BinaryIO | None:
    """Open the file at `path` for reading; return None if it is missing."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _matches(line: Line, match: Match | None) -> bool:
    """Return whether a line counts by `match`; every line counts if `match` is None."""
    return match is None or match(line.text)


def _lines_before(file: BinaryIO, end: int) -> tuple[int, list[Line]]:
    """Read the block of the file before byte `end`; return (byte of its first whole line, lines).

    The block has `_BLOCK` bytes. If no line starts in it, the block is made longer, up to
    `_LONGEST_LINE` bytes. A line that is longer than that is returned in pieces.
    """
    block_size = _BLOCK
    while True:
        start = max(0, end - block_size)
        file.seek(start)
        data = file.read(end - start)
        first_line = 0  # index in `data` at which the first whole line begins; 0 also if none does
        if start > 0:
            # The last byte is left out: a newline there ends the last line, and starts no line.
            first_line = data.find(b"\n", 0, len(data) - 1) + 1
        if start == 0 or first_line > 0 or block_size >= _LONGEST_LINE:
            return start + first_line, _lines_of(data[first_line:], start + first_line)
        block_size = min(block_size * 4, _LONGEST_LINE)


def page_after(
    path: Path, start: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """Return the first `limit` complete matching lines from byte `start` on, in file order.

    To read the page of newer lines, pass the page's `end` as `start`.

    Args:
        path: the file; a missing file gives an empty page.
        start: any byte; if it is inside a line, the page begins with the next line.
        limit: the most lines of the page.
        match: returns whether a line's text counts; None counts every line.
        budget: bytes after which reading stops, even if fewer lines matched.
    """
    file = _open_if_present(path)
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
            if line is None:  # the end of the file, or a line that is still being written
                break
            position = line.end
            if _matches(line, match):
                lines.append(line)
    return Page(lines, start, end=position, scanned=position - start)


def _complete_line(file: BinaryIO, position: int) -> Line | None:
    """Read the line at the file's current position, which is byte `position`.

    Returns None at the end of the file, and if the line is still being written: then it has no
    newline.
    """
    raw = file.readline(_LONGEST_LINE)
    # `_LONGEST_LINE` bytes without a newline are a piece of a longer line, and are returned.
    if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
        return None
    return Line(position, position + len(raw), _shown_text(raw))


def torn_tail(path: Path) -> str:
    """Return the text after the last newline of a file: a line that is still being written.

    Such a line may be a progress bar. Returns "" if the file is missing or ends with a newline, and
    only the last 64 KB of a longer line.
    """
    size = size_of(path)
    if size == 0:
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, size - _BLOCK))
        data = file.read(_BLOCK)
    line_start = data.rfind(b"\n") + 1  # 0 if there is no newline
    return _shown_text(data[line_start:])


def complete_size(path: Path) -> int:
    """Return the size of a file's complete lines: the byte after its last newline.

    Returns 0 for an empty or missing file. Only the last `_LONGEST_LINE` bytes are searched; if
    they hold no newline, the byte at which they begin is returned.
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
    """Return `offset` if a line starts at that byte, otherwise the byte at which the next line
    starts."""
    if offset == 0:
        return 0
    # If the byte before `offset` is a newline, readline reads only that byte.
    file.seek(offset - 1)
    return offset - 1 + len(file.readline(_LONGEST_LINE))


def _lines_of(data: bytes, offset: int) -> list[Line]:
    """Split `data` into lines; `offset` is the byte of the file at which `data` starts."""
    lines = []
    # BytesIO splits at newlines only; bytes.splitlines would also split at carriage returns.
    for raw in io.BytesIO(data):
        lines.append(Line(offset, offset + len(raw), _shown_text(raw)))
        offset += len(raw)
    return lines


def _shown_text(raw: bytes) -> str:
    """Return the text of a line as a terminal would show it.

    If a progress bar rewrote the line with carriage returns, this is only the last version.
    """
    return raw.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]
