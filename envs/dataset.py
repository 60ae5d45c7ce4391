"""Rows of a data file become tasks; every bad line is named by its number.

Formats: JSONL, JSON, CSV, TSV and, where pyarrow is installed, parquet. What a row may look like:
`row_shapes.py`.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from envs.base import SingleTurnEnv, Task, is_scored
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject, parse_strictly, refuse_constant, unique_keys
from envs.row_shapes import shape_of, to_task

MAX_ROW_BYTES = 16 << 20
MAX_FILE_BYTES = 256 << 20
PARQUET_ROWS = 1_000  # rows of a parquet file that are decoded at once
SHOWN = 20  # bad lines named in a refusal
SHOWN_CHARS = 1700  # for all bad lines together: a push cuts error messages at 2,000
FAULT_CHARS = 200  # for one bad line
TOO_LONG = f"longer than {MAX_ROW_BYTES >> 20} MB"  # the fault of such a line
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the beginning of UTF-8 files
LINE_FORMATS = (".jsonl", ".ndjson")  # one row per line; these may be of any size
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
HELDOUT_NAMES = ("heldout", "test", "eval", "validation", "valid", "val")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read: its line (its row number in parquet) and the reason.

    Line 0 stands for the whole file.
    """

    line: int
    message: str


@dataclass
class DataFile:
    """The content of a data file: `rows` holds the readable ones as (line, row), `bad` the others.
    The functions that read a format append to both lists."""

    path: Path
    rows: list[tuple[int, JsonObject]] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)


class DatasetEnv(SingleTurnEnv):
    """Tasks read from data files. Derive from it and define `score` to make it an environment.

    Args:
        files: data files, in order. The rows of a file named heldout (or test, eval, validation) or
            dev get that split unless they name one themselves. The rows of a file named train get
            the split train only if another file is named heldout or dev. All other rows, so also
            those of a lone train.jsonl, are divided by the push.
    """

    # Rows of an unscored dataset need answers to learn from; a subclass may say otherwise.
    rows_need_answers = True

    def __init__(self, *files: str | Path) -> None:
        """Read the files. If all rows name the same tools, these become the environment's tools.

        If nothing scores, every row must have an answer, unless `rows_need_answers` is False.
        Raises EnvProblem DATASET_INVALID, naming the bad lines, if a row or a file cannot be read.
        """
        # A subclass that defines tasks() itself may add the answers there.
        adds_answers = type(self).tasks is not DatasetEnv.tasks
        needs_answer = self.rows_need_answers and not adds_answers and not is_scored(self)
        self._tasks = read_tasks(*files, require_answer=needs_answer)
        tools_by_task = [task.metadata.get("tools") for task in self._tasks]
        if tools_by_task and tools_by_task[0]:
            first_tools = tools_by_task[0]
            if all(tools == first_tools for tools in tools_by_task):
                self.tools = first_tools

    def tasks(self) -> list[Task]:
        """Return the tasks of all files, in the order of their rows."""
        return self._tasks


def data_files(folder: Path) -> list[Path]:
    """Return the data files in `folder`/datasets or, if it has none, directly in `folder`; sorted
    by name, [] if neither folder holds a file of a known format."""
    for candidate in (folder / "datasets", folder):
        if candidate.is_dir():
            files = sorted(path for path in candidate.iterdir() if path.suffix.lower() in FORMATS)
            if files:
                return files
    return []


def read_tasks(*files: str | Path, require_answer: bool = False) -> list[Task]:
    """Read every row of `files` as a task.

    With `require_answer` each row must have an answer, for SFT to learn from. Ids must be unique
    over all files.

    Raises EnvProblem DATASET_INVALID if a file cannot be read or a row is bad; the message lists up
    to 20 bad lines of all files together, by line number.
    """
    splits = splits_of([Path(name) for name in files])
    tasks: list[Task] = []
    place_of_id: dict[str, str] = {}  # such as "train.jsonl:12", to name an id that occurs twice
    data_of_files: list[DataFile] = []
    file_problems: list[EnvProblem] = []  # the errors of files that cannot be read at all
    for name, split in zip(files, splits, strict=True):
        data, problem = _read_rows_or_problem(Path(name))
        if problem is not None:
            file_problems.append(problem)
        data_of_files.append(data)
        tasks += _tasks_of_file(data, split, place_of_id, require_answer)
    _raise_for_bad_lines(data_of_files, file_problems)
    return tasks


def _raise_for_bad_lines(files: Sequence[DataFile], file_problems: Sequence[EnvProblem]) -> None:
    """Raise EnvProblem DATASET_INVALID if any of the files has bad lines.

    `file_problems`: errors of files that cannot be read at all; each is also a bad line in `files`.
    """
    faulty_files = [data for data in files if data.bad]
    if file_problems and len(faulty_files) == 1:  # this error, with its hint, says more than a list
        raise file_problems[0]
    if faulty_files:
        raise _bad_lines_error(files)


def _read_rows_or_problem(path: Path) -> tuple[DataFile, EnvProblem | None]:
    """Read a data file with `read_rows`; a file without rows counts as unusable. Returns (data,
    None), or for an unusable file (data with one bad line, the problem)."""
    try:
        data = read_rows(path)
        if not data.rows and not data.bad:
            raise _unusable_file(data.path, "the file holds no row")
    except EnvProblem as problem:
        return DataFile(path, bad=[BadRow(line=0, message=problem.message)]), problem
    return data, None


def _tasks_of_file(
    data: DataFile, split: str | None, place_of_id: dict[str, str], require_answer: bool
) -> list[Task]:
    """Return the rows of a file as tasks. A row that makes no valid task is added to `data.bad`.

    Args:
        data: the file that was read.
        split: the split of rows that name none; None leaves it undecided.
        place_of_id: id -> the place of its row in the files before, e.g. "train.jsonl:12"; the ids
            of this file are added.
        require_answer: whether each row must have an answer.
    """
    tasks: list[Task] = []
    for line, row in data.rows:
        try:
            task = to_task(row, default_id=f"{data.path.stem}-{line}", split=split)
            check_answer(task, required=require_answer)
            if task.id in place_of_id:
                raise ValueError(f"the id {task.id!r} is also that of {place_of_id[task.id]}")
        except ValueError as problem:
            data.bad.append(BadRow(line, str(problem)))
            continue
        place_of_id[task.id] = f"{data.path.name}:{line}"
        tasks.append(task)
    return tasks


def check_answer(task: Task, required: bool) -> None:
    """Raise ValueError if a task's answer has no assistant message, or is `required` and missing. A
    task with a preference needs no answer: its two answers are learnt."""
    answer = task.answer_messages
    if required and not answer and not task.preference:
        raise ValueError("has no answer to learn from")
    if answer and all(message.role != "assistant" for message in answer):
        raise ValueError("its answer has no assistant message")


def read_rows(path: Path) -> DataFile:
    """Read a data file: its rows, and the line and the fault of each row that cannot be read.

    Raises EnvProblem DATASET_INVALID if the whole file is unusable: unknown format, too large, or
    not readable.
    """
    reader = _reader_of(path)
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


def _reader_of(path: Path) -> Callable[[DataFile], None]:
    """Return the function that reads files with the suffix of `path`. Raises EnvProblem
    DATASET_INVALID for an unknown suffix."""
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
    return reader


def splits_of(files: Sequence[Path]) -> list[str | None]:
    """Return for each file of a dataset the split that its name says ("train", "dev" or "heldout"),
    or None.

    "train" counts only if another file is "heldout" or "dev". A training file alone says nothing:
    the push then holds out some of its rows.
    """
    splits = [split_of(path) for path in files]
    return splits if {"heldout", "dev"} & set(splits) else [None] * len(splits)


def split_of(path: Path) -> str | None:
    """Return the split that a file's name says: "heldout", "dev", "train", or None if it says none.

    One word of the name is enough: `my_test.csv` is held out, because "test" is in HELDOUT_NAMES.
    """
    words = path.stem.lower().replace("-", "_").split("_")
    if any(word in HELDOUT_NAMES for word in words):
        return "heldout"
    for split in ("dev", "train"):
        if split in words:
            return split
    return None


def _read_jsonl(data: DataFile) -> None:
    """Read a JSONL file. Blank lines are skipped; a line over the size limit is a bad row."""
    with data.path.open("rb") as file:
        for line, _offset, content in jsonl_lines(file):
            if content is None:
                data.bad.append(BadRow(line, TOO_LONG))
            else:
                _add_row(data, line, partial(_parse_json_bytes, content))


def jsonl_lines(
    file: BinaryIO, first_line: int = 1, end: float = math.inf
) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (line number, byte offset, content) of each line that is not blank. The content is None
    for a line longer than MAX_ROW_BYTES, which is never held in memory as a whole.

    Args:
        file: open for reading at the beginning of the line `first_line`.
        end: byte offset from which on no further line is begun.
    """
    # Read as bytes, so that a line that is not UTF-8 spoils only itself.
    line_number = first_line - 1
    offset = file.tell()
    while offset < end:
        line = file.readline(MAX_ROW_BYTES + 1)  # + 1: to notice longer ones
        if not line:  # the end of the file
            return
        line_number += 1
        start = offset
        offset += len(line)
        if len(line) > MAX_ROW_BYTES:
            if not line.endswith(b"\n"):
                offset += _skip_line(file)
            yield line_number, start, None
            continue
        if start == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            # Without the line's end, so that an error at the end gets the right column.
            yield line_number, start, line.rstrip(b"\r\n")


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the current line, in pieces. Returns how many bytes were read."""
    byte_count = 0
    piece = b" "  # not empty, so that the loop begins
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(MAX_ROW_BYTES)
        byte_count += len(piece)
    return byte_count


def parse_line(content: bytes) -> JsonObject:
    """Return the row in one line of JSONL. Raises ValueError if the line is not a JSON object."""
    try:
        row = _parse_json_bytes(content.removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise ValueError(_fault_of(error)) from error
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, got {type(row).__name__}")
    return row


def _read_json(data: DataFile) -> None:
    """Read a JSON list of objects. Each is decoded separately, so that a bad one can be named by
    line. Raises EnvProblem DATASET_INVALID if the file is not UTF-8 or does not hold a list."""
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unusable_file(data.path, f"is not UTF-8: {error}") from error
    start = len(text) - len(text.lstrip())  # behind white space at the beginning
    if not text[start:].startswith("["):
        raise _unusable_file(
            data.path, "is not a list of objects", "Write [{...}, {...}] or JSONL."
        )
    for line, value in _elements(text, start + 1, data):  # + 1: behind the opening bracket
        _add_row(data, line, lambda row=value: row)  # parsed already; `_add_row` checks its type


def _elements(text: str, position: int, data: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield each element of a JSON list as (line on which the element begins, value).

    `text` is the whole file, `position` the index of the first character behind the opening
    bracket. At the first error the reason is added to `data.bad` and reading stops.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    cursor = _Cursor(text)
    cursor.move_to(position)  # every `move_to` also skips the white space that follows
    at_end_of_list = cursor.is_before("]")  # an empty list
    while not at_end_of_list:
        try:
            value, end = decoder.raw_decode(text, cursor.position)
        except (ValueError, RecursionError) as error:
            data.bad.append(_bad_element(error, cursor.line))
            return
        yield cursor.line, value
        cursor.move_to(end)
        at_end_of_list = cursor.is_before("]")
        if not at_end_of_list:
            if not cursor.is_before(","):
                missing = "a comma or ] is missing here; the rest is not read"
                data.bad.append(BadRow(cursor.line, missing))
                return
            cursor.move_to(cursor.position + 1)
    if text[cursor.position + 1 :].strip():  # behind the closing bracket
        data.bad.append(BadRow(cursor.line, "there is text after the list"))


def _bad_element(error: ValueError | RecursionError, first_line: int) -> BadRow:
    """Return the bad row for an element of a JSON list whose decoding raised `error`.

    `first_line` is the line on which the element begins.
    """
    # Other errors than JSONDecodeError know no line, so the element's first line is named.
    fault_line = error.lineno if isinstance(error, json.JSONDecodeError) else first_line
    return BadRow(fault_line, f"{_fault_of(error)}; the rest is not read")


class _Cursor:
    """A reading position in a text: the index of a character and its line number; starts at the
    top."""

    def __init__(self, text: str) -> None:
        """Begin at the first character, on line 1."""
        self._text = text
        self.position = 0
        self.line = 1

    def move_to(self, position: int) -> None:
        """Move on to `position`, past white space there, and count the lines on the way."""
        while position < len(self._text) and self._text[position] in " \t\r\n":
            position += 1
        self.line += self._text.count("\n", self.position, position)
        self.position = position

    def is_before(self, character: str) -> bool:
        """Whether `character` is the one at this position; False at the end of the text."""
        return self._text.startswith(character, self.position)


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
    previous_limit = csv.field_size_limit(MAX_ROW_BYTES)  # a setting of the whole process
    try:
        _add_csv_rows(data, text)
    finally:
        csv.field_size_limit(previous_limit)


def _add_csv_rows(data: DataFile, text: str) -> None:
    """Append to `data` the rows of `text`, the content of a CSV or TSV file with a header line.
    Raises EnvProblem DATASET_INVALID if the header names a column twice."""
    delimiter = "\t" if data.path.suffix.lower() == ".tsv" else ","
    header: list[str] = []
    for line, cells in _csv_lines(text, delimiter, data):
        if not header:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header):
                raise _unusable_file(data.path, f"the header names a column twice: {header}")
        elif any(cell.strip() for cell in cells):  # not a blank line
            _add_row(data, line, partial(_csv_row, header, cells))


def _csv_lines(text: str, delimiter: str, data: DataFile) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line number, cells) of each row. Add a syntax error to `data.bad` and stop
    there."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1  # the first line of the next row, which may span several
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            data.bad.append(BadRow(line, f"{error}; the rest is not read"))
            return
        yield line, cells


def _csv_row(header: Sequence[str], cells: Sequence[str]) -> JsonObject:
    """Return the row in the cells of one CSV line, as column -> text or parsed JSON.

    Cells of the columns messages, conversations, tools and metadata are parsed as JSON if they
    begin with [ or {. Empty cells are left out, unless the filled ones alone make no row that can
    be read: then all are kept, so that the error can name the empty one. Raises ValueError for a
    wrong number of cells or bad JSON.
    """
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells, but the header has {len(header)}")
    row: JsonObject = dict(zip(header, cells, strict=True))
    for name in ("messages", "conversations", "tools", "metadata"):
        cell = row.get(name)
        if isinstance(cell, str) and cell.lstrip().startswith(("[", "{")):
            row[name] = parse_strictly(cell)
    filled = {name: value for name, value in row.items() if value != ""}
    has_known_shape = shape_of(filled) != ""
    return filled if has_known_shape else row


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
            "Install honesmith[data] where the server runs, or name pyarrow in requirements.txt "
            "and push with install=true, or convert to JSONL.",
        ) from error
    try:
        number = 0
        with pyarrow.parquet.ParquetFile(data.path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):  # a whole table takes far more memory
                for row in batch.to_pylist():
                    number += 1
                    _add_row(data, number, partial(_json_row_of_parquet, row))
    except (pyarrow.ArrowException, ValueError) as error:
        raise _unusable_file(data.path, f"is no readable parquet: {error}") from error


def _json_row_of_parquet(row: JsonObject) -> Any:
    """Return a parquet row as plain JSON values, without the null keys inside its values.

    In parquet every message of a column has the key `tool_calls`, null if the message makes no
    call. Raises TypeError or ValueError for a value that JSON cannot hold, such as a date or NaN.
    """
    columns = {name: _without_null(value) for name, value in row.items()}
    return json.loads(json.dumps(columns, allow_nan=False))  # there and back, to find such values


def _without_null(value: Any) -> Any:
    """Return a copy of `value` without the keys whose value is None, at every level."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _add_row(data: DataFile, line: int, parse: Callable[[], Any]) -> None:
    """Append the row that `parse` returns to `data.rows`; if it raises or returns no object, append
    the fault to `data.bad`.

    `parse` is a function, so that the errors of all formats are caught in this one place.
    """
    try:
        row = parse()
        if not isinstance(row, dict):
            raise ValueError(f"a row is an object, got {type(row).__name__}")
        data.rows.append((line, row))
    # TypeError: a value of parquet that JSON cannot hold; RecursionError: JSON nested too deep.
    except (ValueError, TypeError, RecursionError) as error:
        data.bad.append(BadRow(line, _fault_of(error)))


def _parse_json_bytes(content: bytes) -> Any:
    """Parse UTF-8 bytes as JSON. Raises ValueError if they are no UTF-8 or no JSON, or hold a
    repeated key, NaN or infinity."""
    return parse_strictly(content.decode("utf-8"))


def _fault_of(error: BaseException) -> str:
    """Return what is wrong with a row, in words, given the error that reading the row raised. For
    example "is no JSON: Expecting value (column 8)"."""
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: byte {error.start}"
    if isinstance(error, RecursionError):
        return "is nested too deep"
    return str(error)[:FAULT_CHARS]


def _bad_lines_error(files: Sequence[DataFile]) -> EnvProblem:
    """Return the error that lists the bad lines of all `files`; there must be at least one.

    For example "2 of 9 rows cannot be read: line 3: input is empty; line 7: is nested too deep". Up
    to SHOWN (20) lines are named, fewer if the text grows too long. The error's file and line are
    those of the first bad line.
    """
    faulty_files = [data for data in files if data.bad]
    faults: list[tuple[DataFile, BadRow]] = []
    for data in faulty_files:
        by_line = sorted(data.bad, key=lambda row: row.line)
        faults += [(data, row) for row in by_line]
    texts = _fault_texts(faults[:SHOWN], name_files=len(faulty_files) > 1)
    more = f"; and {len(faults) - len(texts)} more" if len(faults) > len(texts) else ""
    row_count = sum(_count_lines(data) for data in files)
    first_file, first_fault = faults[0]
    return EnvProblem(
        "DATASET_INVALID",
        f"{len(faults)} of {row_count} rows cannot be read: {'; '.join(texts)}{more}",
        hint="Correct or remove those lines.",
        file=_path_in_environment(first_file.path),
        line=first_fault.line,
    )


def _fault_texts(faults: Sequence[tuple[DataFile, BadRow]], *, name_files: bool) -> list[str]:
    """Return the faults in words, e.g. ["line 3: input is empty"]: at least one, and as many as fit
    into SHOWN_CHARS characters.

    Args:
        faults: bad rows, each with its file.
        name_files: whether each text begins with the name of the file.
    """
    texts: list[str] = []
    for data, row in faults:
        text = row.message
        if row.line:  # line 0 is a fault of the whole file, whose message names the file
            file_name = f"{data.path.name} " if name_files else ""
            text = f"{file_name}line {row.line}: {row.message}"[:FAULT_CHARS]
        texts.append(text)
        is_too_long = len("; ".join(texts) + "; ") > SHOWN_CHARS
        if is_too_long and len(texts) > 1:  # the first fault is always shown
            texts.pop()
            break
    return texts


def _count_lines(data: DataFile) -> int:
    """Return how many lines of a file hold a row, a fault, or both (a row that makes no task)."""
    return len({row.line for row in data.bad} | {line for line, _ in data.rows})


def _unusable_file(path: Path, message: str, hint: str = "") -> EnvProblem:
    """Return the error DATASET_INVALID for a file that cannot be used at all."""
    file = _path_in_environment(path)
    return EnvProblem("DATASET_INVALID", f"{path.name}: {message}", hint, file=file)


def _path_in_environment(path: Path) -> str:
    """Return a file's path relative to the environment's folder, e.g. "datasets/train.jsonl"."""
    return f"datasets/{path.name}" if path.parent.name == "datasets" else path.name
