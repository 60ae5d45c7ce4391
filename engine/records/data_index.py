"""The results of reading a large dataset once: its files, its rows in numbers, its bad lines."""

from pydantic import Field

from engine.records.record import Record


class IndexedFile(Record):
    """A data file that stays where it is.

    Attributes:
        path: where it lies.
        name: its path in the folder that was pushed.
        size, mtime_ns: of the file when it was read, to see quickly whether it is the same.
        sha256: of its content.
        train: how many training rows of the version lie in it.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    sha256: str
    train: int = 0


class FaultyLine(Record):
    """A line that is no row, and why."""

    file: str
    line: int
    message: str


class Spread(Record):
    """Smallest, middle, 95th percentile and largest of some numbers."""

    min: int = 0
    p50: int = 0
    p95: int = 0
    max: int = 0


class IndexedSample(Record):
    """A row as a report shows it, with long texts cut."""

    id: str
    prompt: str
    answer: str
    split: str | None


class DataIndex(Record):
    """A dataset that was read once, row by row (engine/environments/indexed).

    Attributes:
        files: in their order.
        rows, bad: lines that are rows, and lines that are not; `faults` are the first of those.
        unanswered: rows without an answer, and `unanswered_lines` the first of them.
        preferences: rows with a chosen and a rejected answer and no other.
        sides: rows per side ("train", "heldout"); rows of a side that is too large to be asked
            about are in neither.
        distinct_prompts: how many different prompts the training rows have.
    """

    files: tuple[IndexedFile, ...]
    rows: int
    bad: int
    faults: tuple[FaultyLine, ...] = ()
    unanswered: int = 0
    unanswered_lines: tuple[FaultyLine, ...] = ()
    preferences: int = 0
    with_tools: int = 0
    shapes: dict[str, int] = Field(default_factory=dict)
    turns: Spread = Spread()
    prompt_chars: Spread = Spread()
    answer_chars: Spread = Spread()
    repeated_rows: int = 0
    repeated_prompts: int = 0
    distinct_prompts: int = 0
    sides: dict[str, int] = Field(default_factory=dict)
    split: str = ""
    warnings: tuple[str, ...] = ()
    sample: tuple[IndexedSample, ...] = ()
