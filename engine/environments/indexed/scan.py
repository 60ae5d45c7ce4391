"""One pass over a large JSONL file: every row is checked, measured and hashed, none is kept.

A file is cut into parts at line ends, and the parts are read by several processes; the facts about
a part are small, whatever its rows hold.
"""

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from engine.core.split import NAMES, prompt_key
from engine.records.data_index import FaultyLine, IndexedSample
from envs.base import Message, Task
from envs.dataset import TOO_LONG, check_answer, jsonl_lines, parse_line
from envs.json_types import JsonObject
from envs.row_shapes import shape_of, to_task

PART_BYTES = 32 << 20
MOST_FAULTS = 20  # bad lines that a part keeps
SAMPLE_ROWS = 2
_SAMPLE_CHARS = 400
_BLOCK = 1 << 20  # bytes read at once
_FIRST_READ = 1 << 14  # bytes, enough for most lines
# The side (training or held-out) that a row names: none, or one of the two.
UNSAID, TRAIN, HELDOUT = 0, 1, 2
# Large data has no dev side: its dev rows are held out, and half of what is held out chooses.
_SIDES = {"train": TRAIN, "dev": HELDOUT, "heldout": HELDOUT}


@dataclass(frozen=True)
class Part:
    """A piece of a data file, from the beginning of a line to the end of one.

    Attributes:
        name: the file's path in the dataset, for messages.
        split: the side of the file's rows by its name, "train" or "heldout"; None if it names none.
        start, end: byte offsets.
        first_line: number of the first line in it.
    """

    path: Path
    name: str
    split: str | None
    start: int
    end: int
    first_line: int


@dataclass
class PartFacts:
    """What a part holds. The arrays have one number per good row, in order.

    Attributes:
        offsets, lines: where each row begins, as byte and as line.
        prompts, rows, ids: 64-bit hashes of its prompt, of prompt and answer, of its id.
        sides: UNSAID, TRAIN or HELDOUT.
        shapes: how many rows are written in each way (`row_shapes.shape_of`).
        turns, prompt_chars, answer_chars: how many rows have each number of assistant turns, or of
            characters.
        bad, faults: how many lines are no valid row, and the first of them.
        unanswered, unanswered_lines: how many rows have no answer, and the first of them.
        preferences: how many rows have a better and a worse answer.
        sample: the first rows, cut short.
    """

    offsets: array = field(default_factory=lambda: array("Q"))
    lines: array = field(default_factory=lambda: array("Q"))
    prompts: array = field(default_factory=lambda: array("Q"))
    rows: array = field(default_factory=lambda: array("Q"))
    ids: array = field(default_factory=lambda: array("Q"))
    sides: array = field(default_factory=lambda: array("B"))
    shapes: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    prompt_chars: Counter[int] = field(default_factory=Counter)
    answer_chars: Counter[int] = field(default_factory=Counter)
    bad: int = 0
    faults: list[FaultyLine] = field(default_factory=list)
    unanswered: int = 0
    unanswered_lines: list[FaultyLine] = field(default_factory=list)
    preferences: int = 0
    with_tools: int = 0
    sample: list[IndexedSample] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """A place in a file: its byte offset, and the number of the line it is in, from 1."""

    offset: int
    line: int

    def after(self, content: bytes) -> "_Place":
        """The place behind `content`, which begins here."""
        return _Place(self.offset + len(content), self.line + content.count(b"\n"))


def parts_of(path: Path, name: str, split: str | None) -> tuple[list[Part], str]:
    """Read a file once, without looking into its rows, to cut it into parts and to hash it.

    Returns (its parts, its SHA-256 in hex).
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        cuts = _cuts(_hashed_blocks(file, digest.update))
    parts = [
        Part(path, name, split, start=start.offset, end=end.offset, first_line=start.line)
        for start, end in pairwise(cuts)
    ]
    return parts, digest.hexdigest()


def _hashed_blocks(file: BinaryIO, add_to_hash: Callable[[bytes], object]) -> Iterator[bytes]:
    """The content of a file in blocks; `add_to_hash` is called with each of them first."""
    while block := file.read(_BLOCK):
        add_to_hash(block)
        yield block


def _cuts(blocks: Iterable[bytes]) -> list[_Place]:
    """Where to cut a file, given as blocks in order: its beginning, ends of lines at least
    PART_BYTES apart, and its end."""
    block_start = _Place(offset=0, line=1)
    cuts = [block_start]
    for block in blocks:
        lines_end = block.rfind(b"\n") + 1  # of the last line that ends in it; 0: none does
        part_bytes = block_start.offset + lines_end - cuts[-1].offset  # if it were cut there
        if lines_end and part_bytes >= PART_BYTES:
            cuts.append(block_start.after(block[:lines_end]))
        block_start = block_start.after(block)
    file_end = block_start
    if file_end.offset > cuts[-1].offset:
        cuts.append(file_end)
    return cuts


def default_id(name: str, line: int) -> str:
    """The id of a row that names none, such as "train-12" for line 12 of train.jsonl."""
    return f"{Path(name).stem}-{line}"


def scan(part: Part) -> PartFacts:
    """Read the rows of one part of a data file; lines that are no valid row are counted as bad.

    Raises OSError if the file is gone or cannot be read.
    """
    facts = PartFacts()
    with open(part.path, "rb") as file:
        file.seek(part.start)
        for line, offset, content in jsonl_lines(file, part.first_line, part.end):
            try:
                row, task = _read_row(content, part, line)
                side = _side_of(task)
                check_answer(task, required=False)  # it may be missing, but must be valid
            except ValueError as error:
                facts.bad += 1
                _add_first(facts.faults, part.name, line, str(error))
                continue
            facts.offsets.append(offset)
            facts.lines.append(line)
            facts.sides.append(side)
            facts.shapes[shape_of(row)] += 1
            _add_row(facts, task, part.name, line)
    return facts


def _read_row(content: bytes | None, part: Part, line: int) -> tuple[JsonObject, Task]:
    """Return the row of a line, as it is written and as a task.

    `content` is the line, None if it was not read because it is too long; `line` its number. Raises
    ValueError for a line that is no row, is too long, or names a group, which would not be kept on
    one side.
    """
    if content is None:
        raise ValueError(TOO_LONG)
    row = parse_line(content)
    task = to_task(row, default_id(part.name, line), part.split)
    if task.group:
        raise ValueError(
            f"it names the group {task.group[:40]!r}, and data too large to copy have no groups: "
            "leave the key out, or push fewer rows"
        )
    return row, task


def _add_first(lines: list[FaultyLine], file_name: str, line: int, message: str) -> None:
    """Add a line to the list, which takes only the first MOST_FAULTS of them."""
    if len(lines) < MOST_FAULTS:
        lines.append(FaultyLine(file=file_name, line=line, message=message))


def _add_row(facts: PartFacts, task: Task, file_name: str, line: int) -> None:
    """Add the hashes and lengths of a good row, which stands in this line of the file."""
    # A row without an answer of its own may be a preference: a pair of a better and a worse answer.
    # Then the better one counts as the answer that is learnt.
    preference = None if task.answer_messages else task.preference
    answers = preference or (task.answer_messages,)
    learnt_answer = answers[0]
    _add_hashes(facts, task, answers)
    _add_lengths(facts, task.messages, learnt_answer)
    if task.metadata.get("tools"):
        facts.with_tools += 1
    if preference is not None:
        facts.preferences += 1
    if not learnt_answer:
        facts.unanswered += 1
        _add_first(facts.unanswered_lines, file_name, line, "has no answer to learn from")
    if len(facts.sample) < SAMPLE_ROWS:
        facts.sample.append(_sample_of(task, learnt_answer))


def _add_hashes(facts: PartFacts, task: Task, answers: Sequence[Sequence[Message]]) -> None:
    """Add the hashes of a row's prompt, of its prompt with its answers, and of its id."""
    prompt_hash = prompt_key([message.to_dict() for message in task.messages])  # in hex
    facts.prompts.append(int(prompt_hash[:16], 16))  # its first 64 bits
    answer_dicts = [[message.to_dict() for message in answer] for answer in answers]
    facts.rows.append(_hash64(prompt_hash + json.dumps(answer_dicts, sort_keys=True)))
    facts.ids.append(_hash64(task.id))


def _add_lengths(facts: PartFacts, prompt: Sequence[Message], answer: Sequence[Message]) -> None:
    """Count a row by the turns of its answer, and by the characters of its prompt and answer."""
    turns = sum(message.role == "assistant" for message in answer)
    prompt_chars = sum(len(message.content) for message in prompt)
    answer_chars = sum(len(message.content) for message in answer)
    facts.turns[turns] += 1
    facts.prompt_chars[prompt_chars] += 1
    facts.answer_chars[answer_chars] += 1


def _sample_of(task: Task, answer: Sequence[Message]) -> IndexedSample:
    """The beginning of a row's prompt and of the last message of its answer, to be shown."""
    last_answer = answer[-1].content if answer else ""
    return IndexedSample(
        id=task.id,
        prompt=task.prompt_text[:_SAMPLE_CHARS],
        answer=last_answer[:_SAMPLE_CHARS],
        split=task.split,
    )


def _side_of(task: Task) -> int:
    """The side that the row names: UNSAID, TRAIN or HELDOUT. Raises ValueError for a name that
    stands for no side."""
    if not task.split:
        return UNSAID
    side = NAMES.get(task.split.strip().lower())
    if side is None:
        raise ValueError(f"names the split {task.split!r}")
    return _SIDES[side]


def _hash64(text: str) -> int:
    """The first 64 bits of a hash of `text`, as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def read_line(descriptor: int, offset: int) -> bytes:
    """The line that begins at `offset` of an open file, without its end."""
    content = b""
    size = _FIRST_READ  # enough for most lines
    while b"\n" not in content:
        more = os.pread(descriptor, size, offset + len(content))
        if not more:  # the file ends without a line end
            break
        content += more
        size = _BLOCK
    return content.partition(b"\n")[0].rstrip(b"\r")


def workers() -> int:
    """How many processes read the parts of a file: one per core, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return max(1, min(4, cores))
