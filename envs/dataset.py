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
SHOWN = 20  # bad lines named in a refusal
SHOWN_CHARS = 1700  # of all bad lines together: a push cuts a refusal at 2,000
FAULT_CHARS = 200  # of one bad line
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Keys of a prompt with the keys its answer may have; the first pair that fits a row is taken.
PAIRS = (
    ("prompt", ("completion", "response", "answer", "chosen")),
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
    """A row that cannot be read: its line (its row number in parquet) and the reason.

    Line 0 stands for the whole file.
    """

    line: int
    message: str


@dataclass
class DataFile:
    """What a file holds: `rows` that could be read, as (line, row), and `bad` ones that could not.

    The functions that read a format append to both.
    """

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
        """Read the files. Raises EnvProblem DATASET_INVALID naming the bad lines.

        Without a scorer every row must have an answer. If all rows name the same tools, these are
        the environment's tools.
        """
        # A class that defines tasks() may add the answers there, so its rows need none.
        needs_answer = not is_scored(self) and type(self).tasks is DatasetEnv.tasks
        self._tasks = read_tasks(*files, require_answer=needs_answer)
        tools_by_task = [task.metadata.get("tools") for task in self._tasks]
        if tools_by_task and tools_by_task[0]:
            first_tools = tools_by_task[0]
            if all(tools == first_tools for tools in tools_by_task):
                self.tools = first_tools

    def tasks(self) -> list[Task]:
        """The rows of all files, in their order."""
        return self._tasks


def data_files(folder: Path) -> list[Path]:
    """The data files in `folder`/datasets, or if there are none, those directly in `folder`.

    Sorted by name; [] if neither folder holds a file of a known format.
    """
    for place in (folder / "datasets", folder):
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if path.suffix.lower() in FORMATS)
            if files:
                return files
    return []


def read_tasks(*files: str | Path, require_answer: bool = False) -> list[Task]:
    """Read every row of `files` as a task.

    With `require_answer` each row must have an answer, because SFT is to learn from it. Ids must be
    unique over all files.

    Raises EnvProblem DATASET_INVALID if a file cannot be read or a row is bad; the message lists up
    to 20 bad lines of all files together, by line number.
    """
    tasks: list[Task] = []
    place_of_id: dict[str, str] = {}  # such as "train.jsonl:12", to name an id that occurs twice
    data_of_files: list[DataFile] = []
    file_problems: list[EnvProblem] = []  # of files that cannot be read at all
    for name in files:
        try:
            data = read_rows(Path(name))
            if not data.rows and not data.bad:
                raise _unusable_file(data.path, "the file holds no row")
        except EnvProblem as problem:
            file_problems.append(problem)
            data = DataFile(Path(name), bad=[BadRow(0, problem.message)])
        data_of_files.append(data)
        split = split_of(data.path)
        for line, row in data.rows:
            try:
                task = to_task(row, default_id=f"{data.path.stem}-{line}", split=split)
                _check_answer(task, required=require_answer)
                if task.id in place_of_id:
                    raise ValueError(f"the id {task.id!r} is also that of {place_of_id[task.id]}")
            except ValueError as problem:
                data.bad.append(BadRow(line, str(problem)))
                continue
            place_of_id[task.id] = f"{data.path.name}:{line}"
            tasks.append(task)
    faulty = [data for data in data_of_files if data.bad]
    if file_problems and len(faulty) == 1:  # its own error, with its hint, says more than a list
        raise file_problems[0]
    if faulty:
        raise _bad_lines_error(data_of_files)
    return tasks


def _check_answer(task: Task, required: bool) -> None:
    """Raises ValueError if the answer has no assistant message, or is missing and `required`."""
    answer = task.answer_messages
    if required and not answer:
        raise ValueError("has no answer to learn from")
    if answer and all(message.role != "assistant" for message in answer):
        raise ValueError("its answer has no assistant message")


def read_rows(path: Path) -> DataFile:
    """Read a data file: its rows, and for each row that cannot be read the line and the reason.

    Raises EnvProblem DATASET_INVALID if the whole file is unusable: unknown format, too large, or
    not readable.
    """
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
        formats = ", ".join(FORMATS)
        message = f"{path.suffix or 'no suffix'} is no data format"
        raise _unusable_file(path, message, f"Use one of {formats}")
    try:
        size = path.stat().st_size
        # JSONL is read line by line; every other format is held in memory as a whole.
        if size > MAX_FILE_BYTES and reader is not _read_jsonl:
            message = f"{size >> 20} MB, above {MAX_FILE_BYTES >> 20}"
            raise _unusable_file(path, message, "Use JSONL.")
        data = DataFile(path)
        reader(data)
    except OSError as error:
        raise _unusable_file(path, f"cannot be read: {error.strerror or error}") from error
    data.bad.sort(key=lambda row: row.line)
    return data


def shape_of(row: JsonObject) -> str:
    """The name of a row's shape, made of the keys that hold its prompt and its answer.

    - "messages" or "conversations": a chat under that key
    - such as "question/answer": a prompt and an answer under these keys
    - such as "question": a prompt without an answer
    - "": none of these
    """
    for chat_key in ("messages", "conversations"):
        if isinstance(row.get(chat_key), list):
            return chat_key
    for prompt_key, answer_keys in PAIRS:
        if not _has_value(row.get(prompt_key)):
            continue
        for answer_key in answer_keys:
            if _has_value(row.get(answer_key)):
                return f"{prompt_key}/{answer_key}"
        if prompt_key != "input":  # alone it may be anything; it is a prompt only beside an output
            return prompt_key
    return ""


def to_task(row: JsonObject, default_id: str, split: str | None = None) -> Task:
    """Make a task of one row.

    Keys of the row that nothing else uses become metadata; keys of the row's own `metadata` replace
    them. `default_id` and `split` apply if the row has no id or split; a `split` of None leaves it
    open.

    Raises ValueError saying what is wrong with the row.
    """
    prompt, answer, used = _prompt_and_answer(row)
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"metadata is an object, got {type(metadata).__name__}")
    unused = {key: row[key] for key in row if key not in used and key not in RESERVED}
    if row.get("tools"):
        unused["tools"] = _tools(row["tools"])
    task_split = row.get("split") if _has_value(row.get("split")) else split
    task_id = row["id"] if _has_value(row.get("id")) else default_id
    if isinstance(task_id, bool) or not isinstance(task_id, str | int):
        raise ValueError(f"id is a string, got {type(task_id).__name__}")
    return Task(str(task_id), prompt, answer, task_split, unused | (metadata or {}))


def _prompt_and_answer(row: JsonObject) -> tuple[Any, Any, set[str]]:
    """Read the prompt and the answer of a row.

    A `system` text becomes the first message of the prompt. An `input` beside an `instruction` is
    appended to it as a paragraph.

    Returns:
        The prompt (a string or messages), the answer (the same; None if the row has none), and the
        row's keys that hold the two, which therefore do not become metadata.

    Raises ValueError if there is no prompt, or it is neither text nor a chat.
    """
    shape = shape_of(row)
    if not shape:
        empty_key = next((key for key, _ in PAIRS if key in row and not _has_value(row[key])), "")
        if empty_key:
            raise ValueError(f"{empty_key} is empty")
        keys = ", ".join(sorted(row)[:8]) or "none"
        raise ValueError(f"no prompt found among its keys ({keys})")
    if shape in ("messages", "conversations"):
        prompt, answer = _chat(row[shape])
        return prompt, answer, {shape}
    prompt_key, _, answer_key = shape.partition("/")
    prompt = _text_or_chat(row[prompt_key], prompt_key)
    answer = None
    used = {prompt_key, answer_key}  # `answer_key` is "" for a prompt alone, which harms nothing
    if answer_key:
        answer = _text_or_chat(row[answer_key], answer_key)
    if prompt_key == "instruction" and _has_value(row.get("input")):
        prompt = f"{prompt}\n\n{row['input']}"
        used.add("input")
    if _has_value(row.get("system")):
        messages = prompt if isinstance(prompt, list) else [Message("user", prompt)]
        prompt = [Message("system", str(row["system"])), *messages]
    return prompt, answer, used


def split_of(path: Path) -> str | None:
    """The split that a file's name says: "train", "heldout", or None if it says neither.

    One word of the name is enough: `my_test.csv` is held out.
    """
    words = path.stem.lower().replace("-", "_").split("_")
    if any(word in HELDOUT_NAMES for word in words):
        return "heldout"
    return "train" if "train" in words else None


def _chat(items: list[Any]) -> tuple[list[Message], list[Message] | None]:
    """Split a chat into (prompt, answer) before its first assistant message.

    `items` are messages of OpenAI ("role", "content") or ShareGPT ("from", "value"). The answer is
    None if the assistant says nothing.

    Raises ValueError if the chat is empty, begins with the assistant, has an answer but does not
    end with the assistant, or holds a message that cannot be read.
    """
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
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        return messages, None
    answer_start = roles.index("assistant")
    if answer_start == 0:
        raise ValueError("messages begins with the assistant; there is no prompt")
    if roles[-1] != "assistant":
        raise ValueError(f"messages ends with {roles[-1]}, not with the assistant")
    return messages[:answer_start], messages[answer_start:]


def _text_or_chat(value: Any, key: str) -> str | list[Message]:
    """`value` as a string, or as a list of messages if it is a list. A number becomes a string.

    Raises ValueError for any other type; `key` names the value in the message.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [Message.from_dict(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} is text or messages, got {type(value).__name__}")


def _tools(value: Any) -> list[Any]:
    """Return a row's `tools`. Raises ValueError unless they are a list of objects."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("tools is a list of function schemas")
    return value


def _has_value(value: Any) -> bool:
    """Whether a value counts as given: it is not None, "" or [] (0 and False count)."""
    return value is not None and value != "" and value != []


def _read_jsonl(data: DataFile) -> None:
    """Read one object per line. Blank lines are skipped; a line that is too long is a bad row."""
    # Read as bytes, so that a line that is not UTF-8 spoils only itself.
    with data.path.open("rb") as file:
        line_number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            line_number += 1
            if len(line) > MAX_ROW_BYTES:
                data.bad.append(BadRow(line_number, f"longer than {MAX_ROW_BYTES >> 20} MB"))
                # Read on to the end of this line.
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                continue
            if line_number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of UTF-8
            if line.strip():
                # Without the line's end, so that an error at the end gets the right column.
                content = line.rstrip(b"\r\n")
                _add_row(data, line_number, lambda raw=content: _loads(raw.decode("utf-8")))


def _read_json(data: DataFile) -> None:
    """Read a JSON list of objects. Each is decoded by itself, so that a bad one has its line.

    Raises EnvProblem DATASET_INVALID if the file is not UTF-8 or does not hold a list.
    """
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unusable_file(data.path, f"is not UTF-8: {error}") from error
    start = len(text) - len(text.lstrip())
    if not text[start:].startswith("["):
        raise _unusable_file(
            data.path, "is not a list of objects", "Write [{...}, {...}] or JSONL."
        )
    for line, value in _elements(text, start + 1, data):  # + 1: behind the opening bracket
        _add_row(data, line, lambda row=value: row)  # parsed already; `_add_row` checks its type


def _elements(text: str, position: int, data: DataFile) -> Iterator[tuple[int, Any]]:
    """Yields each element of a JSON list as (line it begins on, value).

    At the first error the reason is added to `data.bad` and the rest is not read.

    Args:
        text: the whole file.
        position: of the first character behind the opening bracket.
        data: the file, for errors.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    line = 1 + text.count("\n", 0, position)
    position, line = _skip_space(text, position, line)
    is_end = text.startswith("]", position)
    while not is_end:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # Other errors know no line, so the first line of the element is named.
            fault_line = error.lineno if isinstance(error, json.JSONDecodeError) else line
            data.bad.append(BadRow(fault_line, f"{_fault_of(error)}; the rest is not read"))
            return
        yield line, value
        line += text.count("\n", position, end)
        position, line = _skip_space(text, end, line)
        is_end = text.startswith("]", position)
        if not is_end:
            if not text.startswith(",", position):
                data.bad.append(BadRow(line, "a comma or ] is missing here; the rest is not read"))
                return
            position, line = _skip_space(text, position + 1, line)
    if text[position + 1 :].strip():
        data.bad.append(BadRow(line, "there is text after the list"))


def _skip_space(text: str, position: int, line: int) -> tuple[int, int]:
    """The next position without white space, and its line; `line` is that of `position`."""
    start = position
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position, line + text.count("\n", start, position)


def _read_csv(data: DataFile) -> None:
    """Read a CSV or TSV file whose first line names the columns. Blank lines are skipped.

    After a syntax error the rest of the file is not read. Raises EnvProblem DATASET_INVALID if the
    file is not UTF-8 or names a column twice.
    """
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.path.read_bytes()[: error.start].count(b"\n") + 1
        raise _unusable_file(data.path, f"line {line} is not UTF-8") from error
    previous = csv.field_size_limit(MAX_ROW_BYTES)  # a setting of the whole process
    try:
        delimiter = "\t" if data.path.suffix.lower() == ".tsv" else ","
        header: list[str] = []
        for line, cells in _csv_lines(text, delimiter, data):
            if not header:
                header = [name.strip() for name in cells]
                if len(set(header)) < len(header):
                    raise _unusable_file(data.path, f"the header names a column twice: {header}")
            elif any(cell.strip() for cell in cells):
                _add_row(data, line, lambda cells=cells, header=header: _csv_row(header, cells))
    finally:
        csv.field_size_limit(previous)


def _csv_lines(text: str, delimiter: str, data: DataFile) -> Iterator[tuple[int, list[str]]]:
    """Yields (first line, cells) of each row; a syntax error is added to `data.bad` and ends it."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1  # a row may span lines; this is its first
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            data.bad.append(BadRow(line, f"{error}; the rest is not read"))
            return
        yield line, cells


def _csv_row(header: Sequence[str], cells: Sequence[str]) -> JsonObject:
    """Make a row of the cells of one line: column -> text, or a parsed value.

    Cells of the columns messages, conversations, tools and metadata are parsed as JSON if they
    begin like it. Empty cells are left out, unless the row has no known shape without them: an
    empty prompt then gets its own error. Raises ValueError if there are more or fewer cells than
    columns, or a cell is not valid JSON.
    """
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells, but the header has {len(header)}")
    row: JsonObject = dict(zip(header, cells, strict=True))
    for name in ("messages", "conversations", "tools", "metadata"):
        if isinstance(row.get(name), str) and row[name].lstrip()[:1] in ("[", "{"):
            row[name] = _loads(row[name])
    filled = {name: value for name, value in row.items() if value != ""}
    return filled if shape_of(filled) else row


def _read_parquet(data: DataFile) -> None:
    """Read the rows of a parquet file; the number of a row, from 1, stands for its line.

    Raises EnvProblem DATASET_INVALID if pyarrow is not installed or cannot read the file.
    """
    try:
        import pyarrow.parquet  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise _unusable_file(
            data.path,
            "reading parquet needs pyarrow, which is not installed",
            "Name pyarrow in requirements.txt and push with install=true, or convert to JSONL.",
        ) from error
    try:
        rows = pyarrow.parquet.read_table(data.path).to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise _unusable_file(data.path, f"is no readable parquet: {error}") from error
    for number, row in enumerate(rows, 1):
        # Through JSON and back: values that JSON cannot hold make a bad row.
        _add_row(data, number, lambda row=row: json.loads(json.dumps(row, allow_nan=False)))


def _add_row(data: DataFile, line: int, parse: Callable[[], Any]) -> None:
    """Append the row that `parse` returns to `data.rows`, or the reason it is bad to `data.bad`.

    A row must be an object. `parse` is a function so that its errors are caught here, for every
    format in the same way.
    """
    try:
        row = parse()
        if not isinstance(row, dict):
            raise ValueError(f"a row is an object, got {type(row).__name__}")
        data.rows.append((line, row))
    # TypeError: a value of parquet that JSON cannot hold; RecursionError: JSON nested too deep.
    except (ValueError, TypeError, RecursionError) as error:
        data.bad.append(BadRow(line, _fault_of(error)))


def _loads(text: str) -> Any:
    """The JSON value of `text`, strictly: no key twice, no NaN or infinity. Raises ValueError."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """The object of these (key, value) pairs. Raises ValueError for a key that occurs twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return row


def _no_constant(name: str) -> Any:
    """Called by the JSON decoder for NaN and the infinities; always raises ValueError."""
    raise ValueError(f"{name} is no JSON number")


def _fault_of(error: BaseException) -> str:
    """What is wrong with a row, in words, for the error that reading it raised.

    For example "is no JSON: Expecting value (column 8)".
    """
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: byte {error.start}"
    if isinstance(error, RecursionError):
        return "is nested too deep"
    return str(error)[:FAULT_CHARS]


def _bad_lines_error(files: Sequence[DataFile]) -> EnvProblem:
    """The error that lists the bad lines of all `files`, at least one of which has one.

    For example "2 of 9 rows cannot be read: line 3: input is empty; line 7: is nested too deep". It
    lists as many as fit into a reply and counts the others. Its file and line are those of the
    first.
    """
    faulty = [data for data in files if data.bad]
    faults = [(data, row) for data in faulty for row in sorted(data.bad, key=lambda row: row.line)]
    texts: list[str] = []
    for data, row in faults[:SHOWN]:
        text = row.message
        if row.line:  # 0: the message names the file itself
            file_name = "" if len(faulty) == 1 else f"{data.path.name} "
            text = f"{file_name}line {row.line}: {row.message}"[:FAULT_CHARS]
        texts.append(text)
        if len("; ".join(texts) + "; ") > SHOWN_CHARS and len(texts) > 1:
            texts.pop()
            break
    more = f"; and {len(faults) - len(texts)} more" if len(faults) > len(texts) else ""
    row_count = 0
    for data in files:
        # A line may have a row and a fault at once (a row that is no task): it is counted once.
        row_count += len({row.line for row in data.bad} | {line for line, _ in data.rows})
    data, first = faults[0]
    return EnvProblem(
        "DATASET_INVALID",
        f"{len(faults)} of {row_count} rows cannot be read: {'; '.join(texts)}{more}",
        hint="Correct or remove those lines.",
        file=_path_in_environment(data.path),
        line=first.line,
    )


def _unusable_file(path: Path, message: str, hint: str = "") -> EnvProblem:
    """The error DATASET_INVALID for a file that is unusable as a whole."""
    file = _path_in_environment(path)
    return EnvProblem("DATASET_INVALID", f"{path.name}: {message}", hint, file=file)


def _path_in_environment(path: Path) -> str:
    """A data file's path relative to the environment's folder, such as "datasets/train.jsonl"."""
    return f"datasets/{path.name}" if path.parent.name == "datasets" else path.name
