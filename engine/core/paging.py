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
    """Lines in file order. Older ones lie before `start`, newer ones from `end` on."""

    lines: list[Line]
    start: int
    end: int
    scanned: int


def size_of(path: Path) -> int:
    """The size of the file, 0 when it is missing."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def page_before(
    path: Path, end: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """The last `limit` matching lines that lie before byte `end` (the start of a line, or EOF).

    `start` of the page is where to go on towards older lines, 0 at the head of the file.
    """
    lines: list[Line] = []
    try:
        file = open(path, "rb")  # noqa: SIM115  the with below closes it
    except FileNotFoundError:
        return Page([], 0, 0, 0)
    with file:
        end = min(end, os.fstat(file.fileno()).st_size)
        reached, block = end, _BLOCK
        while reached > 0 and len(lines) < limit and end - reached < budget:
            start = max(0, reached - block)
            file.seek(start)
            data = file.read(reached - start)
            # The newline at the very end closes the last line, it does not start one.
            first = data.find(b"\n", 0, len(data) - 1) + 1 if start else 0
            if start and not first and block < _LONGEST_LINE:
                block = min(block * 4, _LONGEST_LINE)
                continue
            reached, block = start + first, _BLOCK
            for line in reversed(_split(data[first:], reached)):
                if match is None or match(line.text):
                    lines.append(line)
                    if len(lines) == limit:
                        reached = line.start
                        break
    lines.reverse()
    return Page(lines, reached, end, end - reached)


def page_after(
    path: Path, start: int, limit: int, match: Match | None = None, budget: int = BUDGET
) -> Page:
    """The first `limit` matching complete lines from byte `start` on.

    `end` of the page is where to go on; a torn last line stays for the next call.
    """
    lines: list[Line] = []
    try:
        file = open(path, "rb")  # noqa: SIM115  the with below closes it
    except FileNotFoundError:
        return Page([], 0, 0, 0)
    with file:
        start = _line_start(file, min(max(start, 0), os.fstat(file.fileno()).st_size))
        file.seek(start)
        position = start
        while len(lines) < limit and position - start < budget:
            raw = file.readline(_LONGEST_LINE)
            if not raw or (not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE):
                break
            line = Line(position, position + len(raw), _text(raw))
            position += len(raw)
            if match is None or match(line.text):
                lines.append(line)
    return Page(lines, start, position, position - start)


def torn_tail(path: Path) -> str:
    """What follows the last newline: a line still being written, such as a progress bar."""
    size = size_of(path)
    if size == 0:
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, size - _BLOCK))
        data = file.read(_BLOCK)
    return _text(data[data.rfind(b"\n") + 1 :])


def complete_size(path: Path) -> int:
    """The byte after the last newline, looking back at most one longest line."""
    size = size_of(path)
    if size == 0:
        return 0
    with open(path, "rb") as file:
        floor = max(0, size - _LONGEST_LINE)
        position = size
        while position > floor:
            start = max(floor, position - _BLOCK)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
    return floor


def _line_start(file: BinaryIO, offset: int) -> int:
    """`offset`, or the start of the next line when it lies inside one."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(file.readline(_LONGEST_LINE))


def _split(data: bytes, offset: int) -> list[Line]:
    lines = []
    for raw in io.BytesIO(data):  # on newlines alone: bytes.splitlines would split on returns too
        lines.append(Line(offset, offset + len(raw), _text(raw)))
        offset += len(raw)
    return lines


def _text(raw: bytes) -> str:
    """The line as a terminal would leave it: of a rewritten line the last version."""
    return raw.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1]
