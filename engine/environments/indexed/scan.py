"""One pass over a large JSONL file: every row is checked, measured and hashed, but not kept.

A file is cut into parts at line ends, and several processes read the parts. The facts about a part
are small, whatever its rows hold.
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
MOST_FAULTS = 20  # bad lines that the facts of a part list
SAMPLE_ROWS = 2
_SAMPLE_CHARS = 400  # the most characters of a sample row's prompt and of its answer
_BLOCK = 1 << 20  # bytes read at once
_FIRST_READ = 1 << 14  # bytes of the first read of a line, enough for most lines
# The side that a row names: none, training or held-out.
UNSAID, TRAIN, HELDOUT = 0, 1, 2
# Large data have no dev side. Rows that name it are held out; a run then chooses its checkpoint
# with one half of the held-out rows.
_SIDES = {"train": TRAIN, "dev": HELDOUT, "heldout": HELDOUT}


@dataclass(frozen=True)
class Part:
    """A piece of a data file, from the beginning of a line to the end of one.

    Attributes:
        path: the data file.
        name: the file's path within the dataset, for messages.
        split: the side that the file's name gives to its rows, "train" or "heldout"; None: none.
        start, end: byte offsets in the file.
        first_line: number of the first line in the part, counted from 1.
    """

    path: Path
    name: str
    split: str | None
    start: int
    end: int
    first_line: int


@dataclass
class PartFacts:
    """The facts about the rows of a part. The arrays have one number per valid row, in order.

    Attributes:
        offsets, lines: byte offset and line number at which each row begins.
        prompts, rows, ids: 64-bit hashes of each row's prompt, of prompt and answer, of its id.
        sides: the side that each row names: UNSAID, TRAIN or HELDOUT.
        shapes: shape (`row_shapes.shape_of`) -> number of rows written in it.
        turns: number of assistant turns -> number of rows that have so many.
        prompt_chars, answer_chars: number of characters -> number of rows with such a prompt or
            answer.
        bad, faults: number of lines that are no valid row, and the first of them.
        unanswered, unanswered_lines: number of rows without an answer, and the first of them.
        preferences: number of rows with a better and a worse answer.
        with_tools: number of rows that name tools.
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
    """A place in a file: its byte offset, and the number of its line, counted from 1."""

    offset: int
    line: int

    def after(self, content: bytes) -> "_Place":
        """Return the place at the end of `content`, which begins at this place."""
        return _Place(self.offset + len(content), self.line + content.count(b"\n"))


def parts_of(path: Path, name: str, split: str | None) -> tuple[list[Part], str]:
    """Cut a file into parts and hash it, in one pass; its rows are not parsed.

    Returns (the parts, the SHA-256 of the file in hex).

    Args:
        path: the data file.
        name: the file's path within the dataset, for messages.
        split: the side that the file's name gives to its rows, "train" or "heldout"; None: none.
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
    """Yield the content of a file in blocks; call `add_to_hash` with each block before it is
    yielded."""
    while block := file.read(_BLOCK):
        add_to_hash(block)
        yield block


def _cuts(blocks: Iterable[bytes]) -> list[_Place]:
    """Return the places at which a file is cut: its beginning, ends of lines that are at least
    PART_BYTES apart, and its end. `blocks` is the content of the file in order."""
    block_start = _Place(offset=0, line=1)
    cuts = [block_start]
    for block in blocks:
        lines_end = block.rfind(b"\n") + 1  # end of the block's last whole line; 0: there is none
        part_bytes = block_start.offset + lines_end - cuts[-1].offset  # of a part that ends there
        if lines_end and part_bytes >= PART_BYTES:
            cuts.append(block_start.after(block[:lines_end]))
        block_start = block_start.after(block)
    file_end = block_start
    if file_end.offset > cuts[-1].offset:
        cuts.append(file_end)
    return cuts


def default_id(name: str, line: int) -> str:
    """Return the id of a row that has none of its own: "train-12" for line 12 of train.jsonl."""
    return f"{Path(name).stem}-{line}"


def scan(part: Part) -> PartFacts:
    """Read the rows of one part and return the facts about them. Lines that are no valid row are
    counted as bad.

    Raises OSError if the file is gone or cannot be read.
    """
    facts = PartFacts()
    with open(part.path, "rb") as file:
        file.seek(part.start)
        for line, offset, content in jsonl_lines(file, part.first_line, part.end):
            try:
                row, task = _read_row(content, part, line)
                side = _side_of(task)
                check_answer(task, required=False)  # the answer may be missing, but not malformed
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
    """Parse a line; return its row as it is written, and as a task.

    `content` is the line, or None if it was too long to be read; `line` is its number. Raises
    ValueError if the line is no row, is too long, or names a group: large data have no groups, so
    the rows of a group could land on different sides.
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
    """Add a line, with the `message` that says what is wrong, to `lines`, unless that has
    MOST_FAULTS lines already."""
    if len(lines) < MOST_FAULTS:
        lines.append(FaultyLine(file=file_name, line=line, message=message))


def _add_row(facts: PartFacts, task: Task, file_name: str, line: int) -> None:
    """Add the hashes and lengths of a valid row to `facts`. `file_name` and `line` say where the
    row stands."""
    # A row without a reference answer may be a preference: a better and a worse answer. The better
    # one then counts as the answer that is learnt.
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
    """Add three hashes of a row to `facts`: of its prompt, of prompt and answers, and of its id."""
    prompt_hash = prompt_key([message.to_dict() for message in task.messages])  # in hex
    facts.prompts.append(int(prompt_hash[:16], 16))  # its first 64 bits
    answer_dicts = [[message.to_dict() for message in answer] for answer in answers]
    facts.rows.append(_hash64(prompt_hash + json.dumps(answer_dicts, sort_keys=True)))
    facts.ids.append(_hash64(task.id))


def _add_lengths(facts: PartFacts, prompt: Sequence[Message], answer: Sequence[Message]) -> None:
    """Count one row in `facts` under its number of assistant turns, and under the numbers of
    characters of its prompt and of its answer."""
    turns = sum(message.role == "assistant" for message in answer)
    prompt_chars = sum(len(message.content) for message in prompt)
    answer_chars = sum(len(message.content) for message in answer)
    facts.turns[turns] += 1
    facts.prompt_chars[prompt_chars] += 1
    facts.answer_chars[answer_chars] += 1


def _sample_of(task: Task, answer: Sequence[Message]) -> IndexedSample:
    """Return a row to be shown: the beginning of its prompt and of its answer's last message."""
    last_answer = answer[-1].content if answer else ""
    return IndexedSample(
        id=task.id,
        prompt=task.prompt_text[:_SAMPLE_CHARS],
        answer=last_answer[:_SAMPLE_CHARS],
        split=task.split,
    )


def _side_of(task: Task) -> int:
    """Return the side that a task's split names: TRAIN or HELDOUT ("validation" and the like are
    held out too), UNSAID if it has no split.

    Raises ValueError for an unknown split; its message is the end of a sentence about the row.
    """
    if not task.split:
        return UNSAID
    side = NAMES.get(task.split.strip().lower())
    if side is None:
        raise ValueError(f"names the split {task.split!r}")
    return _SIDES[side]


def _hash64(text: str) -> int:
    """Return a 64-bit hash of `text` as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def read_line(descriptor: int, offset: int) -> bytes:
    """Return the line that begins at byte `offset` of an open file, without its line end."""
    content = b""
    size = _FIRST_READ  # bytes of the next read
    while b"\n" not in content:
        more = os.pread(descriptor, size, offset + len(content))
        if not more:  # the file ends without a line end
            break
        content += more
        size = _BLOCK
    return content.partition(b"\n")[0].rstrip(b"\r")


def workers() -> int:
    """Return how many processes read the parts of a file: one per core, at most four."""
    # macOS has no sched_getaffinity; two processes are a safe guess there.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return max(1, min(4, cores))
