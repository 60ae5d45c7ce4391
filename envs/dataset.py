"""Rows of a data file become tasks; every bad line is named by its number.

Formats: JSONL, JSON, CSV, TSV and, where pyarrow is installed, parquet. Shapes of a row:

    {"messages": [...], "tools": [...]}          a chat; its first assistant message is the target
    {"prompt": ..., "completion": ...}           text or messages; "response" and "answer" too
    {"input": ..., "output": ...}
    {"instruction": ..., "input": ..., "output": ...}
    {"question": ..., "answer": ...}

The answer may be missing where an environment scores. `id`, `split`, `system`, `metadata` are read;
any other key goes into the task's metadata.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.base import Message, SingleTurnEnv, Task, is_scored
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

MAX_ROW_BYTES = 16 << 20
MAX_FILE_BYTES = 256 << 20
SHOWN = 20
SHOWN_CHARS = 1700  # of all bad lines together: a push cuts a refusal at 2,000
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PAIRS = (
    ("prompt", ("completion", "response", "answer")),
    ("instruction", ("output", "response", "completion")),
    ("question", ("answer",)),
    ("input", ("output",)),
)
RESERVED = ("id", "split", "system", "metadata", "tools")
HELDOUT_NAMES = ("heldout", "test", "eval", "validation", "valid", "val", "dev")
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT |= {"system": "system", "tool": "tool", "function": "tool"}


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read: its line (row number in parquet) and why."""

    line: int
    message: str


@dataclass
class DataFile:
    """What a file holds: (line, row) pairs that could be read, and those that could not."""

    path: Path
    rows: list[tuple[int, JsonObject]] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)


class DatasetEnv(SingleTurnEnv):
    """Tasks read from data files. Derive from it and define `score` to make it an environment.

    Args:
        files: data files, in order; one named train or heldout (test, eval, validation) gives its
            rows that split where they do not say one.
    """

    def __init__(self, *files: str | Path) -> None:
        learnt = not is_scored(self) and type(self).tasks is DatasetEnv.tasks
        self._tasks = read_tasks(*files, learnt=learnt)
        declared = [task.metadata.get("tools") for task in self._tasks]
        if declared and declared[0] and all(tools == declared[0] for tools in declared):
            self.tools = declared[0]

    def tasks(self) -> list[Task]:
        return self._tasks


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder that has no environment.py: those in datasets/, else its own."""
    for place in (folder / "datasets", folder):
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if path.suffix.lower() in FORMATS)
            if files:
                return files
    return []


def read_tasks(*files: str | Path, learnt: bool = False) -> list[Task]:
    """Every row of `files` as a task; `learnt`: rows to learn from, each of which has an answer.

    Raises EnvProblem DATASET_INVALID with the first 20 bad lines of all files by number.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    read: list[DataFile] = []
    wholes: list[EnvProblem] = []  # files that are no good as a whole
    for name in files:
        try:
            data = read_rows(Path(name))
            if not data.rows and not data.bad:
                raise _whole(data.path, "the file holds no row")
        except EnvProblem as problem:
            wholes.append(problem)
            data = DataFile(Path(name), bad=[BadRow(0, problem.message)])
        read.append(data)
        split = split_of(data.path)
        for line, row in data.rows:
            try:
                task = to_task(row, default_id=f"{data.path.stem}-{line}", split=split)
                answer = task.answer_messages
                if learnt and not answer:
                    raise ValueError("has no answer to learn from")
                if answer and all(message.role != "assistant" for message in answer):
                    raise ValueError("its answer has no assistant message")
                if task.id in seen:
                    raise ValueError(f"the id {task.id!r} is also that of {seen[task.id]}")
            except ValueError as problem:
                data.bad.append(BadRow(line, str(problem)))
                continue
            seen[task.id] = f"{data.path.name}:{line}"
            tasks.append(task)
    faulty = [data for data in read if data.bad]
    if wholes and len(faulty) == 1:
        raise wholes[0]
    if faulty:
        raise _refusal(read)
    return tasks


def read_rows(path: Path) -> DataFile:
    """The rows of a file. Raises EnvProblem DATASET_INVALID when the file as a whole is no good."""
    readers: dict[str, Callable[[DataFile], None]] = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(FORMATS)
        raise _whole(path, f"{path.suffix or 'no suffix'} is no data format", f"Use one of {known}")
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES and reader is not _read_jsonl:
            raise _whole(path, f"{size >> 20} MB, above {MAX_FILE_BYTES >> 20}", "Use JSONL.")
        data = DataFile(path)
        reader(data)
    except OSError as error:
        raise _whole(path, f"cannot be read: {error.strerror or error}") from error
    data.bad.sort(key=lambda row: row.line)
    return data


def shape_of(row: JsonObject) -> str:
    """The name of a row's shape; "" where it has none that is known."""
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), list):
            return name
    for prompt, answers in PAIRS:
        if _given(row.get(prompt)):
            answer = next((name for name in answers if _given(row.get(name))), "")
            if answer or prompt != "input":
                return f"{prompt}/{answer}" if answer else prompt
    return ""


def to_task(row: JsonObject, default_id: str, split: str | None = None) -> Task:
    """One row as a task. Raises ValueError saying what is wrong with it."""
    shape = shape_of(row)
    if not shape:
        empty = next((key for key, _ in PAIRS if key in row and not _given(row[key])), "")
        if empty:
            raise ValueError(f"{empty} is empty")
        keys = ", ".join(sorted(row)[:8]) or "none"
        raise ValueError(f"no prompt found among its keys ({keys})")
    if shape in ("messages", "conversations"):
        prompt, answer = _chat(row[shape])
        used = {shape}
    else:
        prompt_key, _, answer_key = shape.partition("/")
        prompt, answer = _text_or_chat(row[prompt_key], prompt_key), None
        used = {prompt_key, answer_key}
        if answer_key:
            answer = _text_or_chat(row[answer_key], answer_key)
        if prompt_key == "instruction" and _given(row.get("input")):
            prompt = f"{prompt}\n\n{row['input']}"
            used.add("input")
        if _given(row.get("system")):
            messages = prompt if isinstance(prompt, list) else [Message("user", prompt)]
            prompt = [Message("system", str(row["system"])), *messages]
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"metadata is an object, got {type(metadata).__name__}")
    rest = {k: v for k, v in row.items() if k not in used and k not in RESERVED}
    if row.get("tools"):
        rest["tools"] = _tools(row["tools"])
    named_split = row.get("split") if _given(row.get("split")) else split
    ident = row["id"] if _given(row.get("id")) else default_id
    if isinstance(ident, bool) or not isinstance(ident, str | int):
        raise ValueError(f"id is a string, got {type(ident).__name__}")
    return Task(str(ident), prompt, answer, named_split, rest | (metadata or {}))


def split_of(path: Path) -> str | None:
    """The split that a file's name stands for (`train.jsonl`, `test.csv`), else None."""
    words = path.stem.lower().replace("-", "_").split("_")
    if any(word in HELDOUT_NAMES for word in words):
        return "heldout"
    return "train" if "train" in words else None


def _chat(items: list[Any]) -> tuple[list[Message], list[Message] | None]:
    """A chat as (prompt, answer): the answer begins with the first assistant message."""
    messages = []
    for item in items:
        if isinstance(item, dict) and "role" not in item and "from" in item:
            role = SHAREGPT.get(str(item["from"]))
            if role is None:
                raise ValueError(f"unknown speaker {item['from']!r}")
            item = {"role": role, "content": item.get("value")}
        messages.append(Message.from_dict(item))
    if not messages:
        raise ValueError("messages is empty")
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), None)
    if first == 0:
        raise ValueError("messages begins with the assistant; there is no prompt")
    if first is None:
        return messages, None
    if messages[-1].role != "assistant":
        raise ValueError(f"messages ends with {messages[-1].role}, not with the assistant")
    return messages[:first], messages[first:]


def _text_or_chat(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [Message.from_dict(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} is text or messages, got {type(value).__name__}")


def _tools(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("tools is a list of function schemas")
    return value


def _given(value: Any) -> bool:
    return value is not None and value != "" and value != []


def _read_jsonl(data: DataFile) -> None:
    with data.path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                data.bad.append(BadRow(number, f"longer than {MAX_ROW_BYTES >> 20} MB"))
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                # Without its end: where a line breaks off is a column of its own.
                text = line.rstrip(b"\r\n")
                _take(data, number, lambda raw=text: _loads(raw.decode("utf-8")))


def _read_json(data: DataFile) -> None:
    """A list of objects, each decoded by itself so that a bad one is named by its line."""
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _whole(data.path, f"is not UTF-8: {error}") from error
    start = len(text) - len(text.lstrip())
    if not text[start:].startswith("["):
        raise _whole(data.path, "is not a list of objects", "Write [{...}, {...}] or JSONL.")
    for line, value in _elements(text, start + 1, data):
        _take(data, line, lambda row=value: row)


def _elements(text: str, position: int, data: DataFile) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    line, counted, first = 1, 0, True
    while True:
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
        line += text.count("\n", counted, position)
        counted = position
        if position < len(text) and text[position] == "]":
            if text[position + 1 :].strip():
                data.bad.append(BadRow(line, "there is text after the list"))
            return
        if not first:
            if position >= len(text) or text[position] != ",":
                data.bad.append(BadRow(line, "a comma or ] is missing here; the rest is not read"))
                return
            position += 1
            while position < len(text) and text[position] in " \t\r\n":
                position += 1
            line += text.count("\n", counted, position)
            counted = position
        first = False
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            where = error.lineno if isinstance(error, json.JSONDecodeError) else line
            data.bad.append(BadRow(where, f"{_fault_of(error)}; the rest is not read"))
            return
        yield line, value
        position = end


def _read_csv(data: DataFile) -> None:
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.path.read_bytes()[: error.start].count(b"\n") + 1
        raise _whole(data.path, f"line {line} is not UTF-8") from error
    previous = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        delimiter = "\t" if data.path.suffix.lower() == ".tsv" else ","
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                data.bad.append(BadRow(line, f"{error}; the rest is not read"))
                return
            if not header:
                header = [name.strip() for name in cells]
                if len(set(header)) < len(header):
                    raise _whole(data.path, f"the header names a column twice: {header}")
            elif any(cell.strip() for cell in cells):
                _take(data, line, lambda cells=cells, header=header: _cells(header, cells))
    finally:
        csv.field_size_limit(previous)


def _cells(header: Sequence[str], cells: Sequence[str]) -> JsonObject:
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells, but the header has {len(header)}")
    row: JsonObject = dict(zip(header, cells, strict=True))
    for name in ("messages", "conversations", "tools", "metadata"):
        if isinstance(row.get(name), str) and row[name].lstrip()[:1] in ("[", "{"):
            row[name] = _loads(row[name])
    given = {name: value for name, value in row.items() if value != ""}
    return given if shape_of(given) else row


def _read_parquet(data: DataFile) -> None:
    try:
        import pyarrow.parquet  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise _whole(
            data.path,
            "reading parquet needs pyarrow, which is not installed",
            "Name pyarrow in requirements.txt and push with install=true, or convert to JSONL.",
        ) from error
    try:
        rows = pyarrow.parquet.read_table(data.path).to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise _whole(data.path, f"is no readable parquet: {error}") from error
    for number, row in enumerate(rows, 1):
        _take(data, number, lambda row=row: json.loads(json.dumps(row, allow_nan=False)))


def _take(data: DataFile, line: int, make: Callable[[], Any]) -> None:
    """Adds the row that `make` returns, or the reason why it cannot be read."""
    try:
        row = make()
        if not isinstance(row, dict):
            raise ValueError(f"a row is an object, got {type(row).__name__}")
        data.rows.append((line, row))
    except (ValueError, TypeError, RecursionError) as error:
        data.bad.append(BadRow(line, _fault_of(error)))


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _fault_of(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: byte {error.start}"
    if isinstance(error, RecursionError):
        return "is nested too deep"
    return str(error)[:200]


def _refusal(read: Sequence[DataFile]) -> EnvProblem:
    """The bad lines of all files, as many as an answer holds; the others are counted."""
    faulty = [data for data in read if data.bad]
    faults = [(data, row) for data in faulty for row in sorted(data.bad, key=lambda row: row.line)]
    told, room = [], SHOWN_CHARS
    for data, row in faults[:SHOWN]:
        name = "" if len(faulty) == 1 else f"{data.path.name} "
        told.append(f"{name}line {row.line}: {row.message}"[:200] if row.line else row.message)
        room -= len(told[-1]) + 2
        if room < 0 and len(told) > 1:
            told.pop()
            break
    more = f"; and {len(faults) - len(told)} more" if len(faults) > len(told) else ""
    total = sum(len({row.line for row in data.bad} | {n for n, _ in data.rows}) for data in read)
    data, first = faults[0]
    return EnvProblem(
        "DATASET_INVALID",
        f"{len(faults)} of {total} rows cannot be read: {'; '.join(told)}{more}",
        hint="Correct or remove those lines.",
        file=_short(data.path),
        line=first.line,
    )


def _whole(path: Path, message: str, hint: str = "") -> EnvProblem:
    return EnvProblem("DATASET_INVALID", f"{path.name}: {message}", hint, file=_short(path))


def _short(path: Path) -> str:
    return f"datasets/{path.name}" if path.parent.name == "datasets" else path.name
