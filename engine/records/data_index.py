"""The results of reading a large dataset once: its files, its rows in numbers, its bad lines."""

from pydantic import Field

from engine.records.record import Record


class IndexedFile(Record):
    """A data file that is read in its place and not copied.

    Attributes:
        path: the path of the file.
        name: its path in the folder that was pushed.
        size, mtime_ns: bytes and modification time when it was read, to notice a change quickly.
        sha256: the hash of its content.
        train: how many training rows of the version it holds.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    sha256: str
    train: int = 0


class FaultyLine(Record):
    """A line of a data file that is no valid row, and why."""

    file: str
    line: int
    message: str


class Spread(Record):
    """The smallest, the median, the 95th percentile and the largest of some numbers."""

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
        files: the data files, in their order.
        rows, bad: number of lines that are valid rows, and of lines that are not.
        faults: the first of the lines that are no valid rows.
        unanswered, unanswered_lines: number of rows without an answer, and the first of them.
        preferences: number of rows with only a chosen and a rejected answer.
        with_tools: number of rows with tools.
        shapes: format of a row -> number of rows.
        turns, prompt_chars, answer_chars: assistant turns of a row, characters of its prompt and
            of its answer.
        sides: side ("train", "heldout") -> number of rows. Rows of a side that is too large to be
            asked about are in neither.
        distinct_prompts: how many different prompts the training rows have.
        sample: the first rows, with long texts cut.
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
