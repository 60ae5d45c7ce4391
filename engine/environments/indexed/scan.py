"""One pass over a large JSONL file: every row is checked, measured and hashed, none is kept.

A file is cut into parts at line ends, and the parts are read by several processes; what a part
found is small, whatever the rows hold.
"""

import hashlib
import json
import os
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.split import NAMES, prompt_key
from engine.records.data_index import FaultyLine, IndexedSample
from envs.base import Task
from envs.dataset import TOO_LONG, check_answer, jsonl_lines, parse_line
from envs.row_shapes import shape_of, to_task

PART_BYTES = 32 << 20
MOST_FAULTS = 20  # bad lines that a part keeps
SAMPLE_ROWS = 2
_SAMPLE_CHARS = 400
_BLOCK = 1 << 20
# What a row says of its side.
UNSAID, TRAIN, HELDOUT = 0, 1, 2
_SIDES = {"train": TRAIN, "heldout": HELDOUT}


@dataclass(frozen=True)
class Part:
    """A piece of a data file, from the beginning of a line to the end of one.

    Attributes:
        name: the file's path in the dataset, for messages.
        split: what the file's name says of its rows' side; None if nothing.
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
class PartFound:
    """What a part holds. The arrays have one number per good row, in order.

    Attributes:
        offsets, lines: where each row begins, as byte and as line.
        prompts, rows, ids: 64-bit hashes of its prompt, of prompt and answer, of its id.
        sides: UNSAID, TRAIN or HELDOUT.
        turns, prompt_chars, answer_chars: how many rows have each number.
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


def parts_of(path: Path, name: str, split: str | None) -> tuple[list[Part], str]:
    """Read a file once, without looking into its rows: its parts, and its SHA-256 in hex."""
    parts: list[Part] = []
    digest = hashlib.sha256()
    start = offset = 0  # of the part, of the block
    first_line = line = 1  # of the part, of the block
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            cut = block.rfind(b"\n") + 1  # 0: no line ends in this block
            if cut and offset + cut - start >= PART_BYTES:
                end = offset + cut
                parts.append(Part(path, name, split, start, end, first_line))
                start, first_line = end, line + block.count(b"\n", 0, cut)
            line += block.count(b"\n")
            offset += len(block)
    if offset > start:
        parts.append(Part(path, name, split, start, offset, first_line))
    return parts, digest.hexdigest()


def default_id(name: str, line: int) -> str:
    """The id of a row that says none: such as "train-12" for line 12 of train.jsonl."""
    return f"{Path(name).stem}-{line}"


def scan(part: Part) -> PartFound:
    """Read the rows of a part. Raises OSError if the file is gone or cannot be read."""
    found = PartFound()
    with open(part.path, "rb") as file:
        file.seek(part.start)
        for line, offset, content in jsonl_lines(file, part.first_line, part.end):
            try:
                if content is None:
                    raise ValueError(TOO_LONG)
                row = parse_line(content)
                task = to_task(row, default_id(part.name, line), part.split)
                side = _side_of(task)
                check_answer(task, required=False)
            except ValueError as error:
                found.bad += 1
                if len(found.faults) < MOST_FAULTS:
                    found.faults.append(FaultyLine(file=part.name, line=line, message=str(error)))
                continue
            found.offsets.append(offset)
            found.lines.append(line)
            found.sides.append(side)
            found.shapes[shape_of(row)] += 1
            _measure(task, found, FaultyLine(file=part.name, line=line, message=""))
    return found


def _measure(task: Task, found: PartFound, place: FaultyLine) -> None:
    """Add the hashes and lengths of a good row; `place` is its file and line."""
    answers = task.answer_messages
    preference = None if answers else task.preference
    learnt = answers or (preference[0] if preference else [])
    prompt = task.messages
    key = prompt_key([message.to_dict() for message in prompt])
    found.prompts.append(int(key[:16], 16))
    said = [[message.to_dict() for message in chat] for chat in preference or (answers,)]
    found.rows.append(_hash64(key + json.dumps(said, sort_keys=True)))
    found.ids.append(_hash64(task.id))
    found.turns[sum(message.role == "assistant" for message in learnt)] += 1
    found.prompt_chars[sum(len(message.content) for message in prompt)] += 1
    found.answer_chars[sum(len(message.content) for message in learnt)] += 1
    found.with_tools += bool(task.metadata.get("tools"))
    found.preferences += preference is not None
    if not learnt:
        found.unanswered += 1
        if len(found.unanswered_lines) < MOST_FAULTS:
            message = "has no answer to learn from"
            found.unanswered_lines.append(place.model_copy(update={"message": message}))
    if len(found.sample) < SAMPLE_ROWS:
        answer = learnt[-1].content if learnt else ""
        shown = (task.prompt_text[:_SAMPLE_CHARS], answer[:_SAMPLE_CHARS])
        found.sample.append(
            IndexedSample(id=task.id, prompt=shown[0], answer=shown[1], split=task.split)
        )


def _side_of(task: Task) -> int:
    """What the row says of its side. Raises ValueError for a name that nobody knows."""
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
    while b"\n" not in content:
        more = os.pread(descriptor, 1 << 14 if not content else _BLOCK, offset + len(content))
        if not more:
            break
        content += more
    return content.partition(b"\n")[0].rstrip(b"\r")


def workers() -> int:
    """How many processes read the parts of a file: one per core, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return max(1, min(4, cores))
