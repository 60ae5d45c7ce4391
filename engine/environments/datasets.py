"""Checks and describes a data file: shapes, bad rows by line, duplicates, lengths in characters."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.reply import SHOWN_AS_NULL, ReplyBase
from engine.core.split import UnknownSplit, prompt_key, split_rows
from envs.base import Task
from envs.config.problem import EnvProblem
from envs.dataset import BadRow, data_files, read_rows, splits_of
from envs.row_shapes import shape_of, to_task

MOST_BAD_ROWS = 20  # bad rows that a report lists, so that it stays short
SAMPLE_ROWS = 2
_SAMPLE_CHARS = 400  # the most characters of the prompt and of the answer of a sample row


@dataclass(frozen=True)
class ShownBadRow:
    """A line that could not be read as a row, and the reason."""

    line: int
    message: str


@dataclass(frozen=True)
class Duplicates:
    """How many rows repeat an earlier row, and how many repeat an earlier prompt."""

    rows: int
    prompts: int


@dataclass(frozen=True)
class Lengths:
    """Characters of prompts and of answers, each as {"min", "p50", "p95", "max"}."""

    prompt: dict[str, int]
    answer: dict[str, int]


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of rows, counted with the tokenizer and the chat template of `model`.

    Attributes:
        counted: number of rows that were counted; of many rows only a seeded sample is counted.
        prompt, answer, total: tokens as {"min", "p50", "p95", "max"}.
        refused_by_template: number of rows that the chat template refuses; `refusal` is its message
            for the first of them.
    """

    model: str
    counted: int
    prompt: dict[str, int]
    answer: dict[str, int]
    total: dict[str, int]
    refused_by_template: int = 0
    refusal: str | None = None


@dataclass(frozen=True)
class SampleRow:
    """A row as a report shows it, with long texts cut."""

    id: str
    prompt: str
    answer: str
    split: str | None = field(metadata=SHOWN_AS_NULL)  # None: a push decides


@dataclass(frozen=True)
class DataReport(ReplyBase):
    """What is in a data file.

    Attributes:
        hash: first 12 digits of the file's SHA-256.
        rows, bad: number of lines that are rows, and of those that are not; `bad_rows` are the
            first of the latter.
        shapes: shape -> number of rows (envs/row_shapes.py names the shapes).
        with_answer, with_tools: number of rows with an answer (a preference counts), with tools.
        tokens: lengths in tokens; None if no model was named.
        turns: assistant turns per row as {"min", "p50", "p95", "max"}.
        splits: number of rows per side ("train", "heldout"), as a push would assign them.
    """

    path: str
    hash: str
    rows: int
    bad: int
    bad_rows: list[ShownBadRow]
    shapes: dict[str, int]
    with_answer: int
    with_tools: int
    turns: dict[str, int]
    duplicates: Duplicates
    splits: dict[str, int]
    lengths: Lengths
    sample: list[SampleRow]
    tokens: TokenLengths | None = None
    summary: str = ""
    warnings: list[str] = field(default_factory=list)


def inspect(path: str | Path) -> DataReport:
    """Check a data file and describe its rows, without counting tokens.

    Rows that are no valid task, or repeat an id, count as bad and enter no other figure. Raises
    UserError DATASET_INVALID if the file as a whole cannot be read.
    """
    file = Path(path).expanduser()
    try:
        data = read_rows(file)
    except EnvProblem as problem:
        raise UserError(problem.code, str(problem), hint=problem.hint, field="path") from problem
    converted = _convert_to_tasks(data.rows, file)
    bad_rows = sorted([*data.bad, *converted.invalid_rows], key=lambda bad_row: bad_row.line)
    splits, warnings = _rows_per_split(converted.tasks)
    report = _report(file, converted, bad_rows, splits)
    return with_summary_and_warnings(report, warnings)


def _report(
    file: Path, converted: "_ConvertedRows", bad_rows: Sequence[BadRow], splits: dict[str, int]
) -> DataReport:
    """Make the report of a data file, without its summary and warnings.

    Args:
        file: the data file.
        converted: its valid rows as tasks.
        bad_rows: all lines that are no valid row, in order.
        splits: number of rows per split.
    """
    tasks = converted.tasks
    return DataReport(
        path=str(file),
        hash=_short_hash(file),
        rows=len(tasks),
        bad=len(bad_rows),
        bad_rows=[ShownBadRow(row.line, row.message) for row in bad_rows[:MOST_BAD_ROWS]],
        shapes=dict(converted.shapes),
        with_answer=sum(_has_answer(task) for task in tasks),
        with_tools=sum(bool(task.metadata.get("tools")) for task in tasks),
        turns=spread([_assistant_turns(task) for task in tasks]),
        duplicates=_duplicates(tasks),
        splits=splits,
        lengths=_character_lengths(tasks),
        sample=[_sample_row(task) for task in tasks[:SAMPLE_ROWS]],
    )


def _has_answer(task: Task) -> bool:
    """Return whether the task has a reference answer, or a preference (a better and a worse
    one)."""
    return bool(task.answer_messages or task.preference)


def _assistant_turns(task: Task) -> int:
    """Count the assistant turns in the reference answer of a task."""
    return sum(message.role == "assistant" for message in task.answer_messages)


def _character_lengths(tasks: Sequence[Task]) -> Lengths:
    """Return the spread of the lengths of prompts and of answers, in characters."""
    return Lengths(
        prompt=spread([_count_characters(task.messages) for task in tasks]),
        answer=spread([_count_characters(task.answer_messages) for task in tasks]),
    )


def with_summary_and_warnings(report: DataReport, warnings: list[str]) -> DataReport:
    """Return a copy of `report` with its summary, and with the given `warnings` followed by those
    about its rows."""
    return replace(report, summary=_summary(report), warnings=warnings + _warnings(report))


def valid_tasks(file: Path) -> list[Task]:
    """Return the rows of a data file that are valid tasks. Raises EnvProblem if the file as a whole
    cannot be read."""
    return _convert_to_tasks(read_rows(file).rows, file).tasks


@dataclass
class _ConvertedRows:
    """The rows of a data file, converted to tasks.

    Attributes:
        tasks: the valid rows.
        shapes: shape -> number of tasks written in it (`row_shapes.shape_of`).
        invalid_rows: rows that are no valid task or repeat the id of an earlier row.
    """

    tasks: list[Task] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    invalid_rows: list[BadRow] = field(default_factory=list)


def _convert_to_tasks(rows: Iterable[tuple[int, dict[str, Any]]], file: Path) -> _ConvertedRows:
    """Convert the rows of a data file to tasks; collect those that are no valid task as bad rows.

    `rows` are (line number, row). A row without an id gets one from its place, e.g. "train-12" for
    line 12 of train.jsonl.
    """
    converted = _ConvertedRows()
    line_by_id: dict[str, int] = {}
    split = _split_by_name(file)
    for line, row in rows:
        try:
            # The given id and split are used only if the row has none of its own.
            task = to_task(row, f"{file.stem}-{line}", split)
            _require_new_id(task.id, line_by_id)
        except ValueError as error:
            converted.invalid_rows.append(BadRow(line, str(error)))
            continue
        line_by_id[task.id] = line
        converted.shapes[shape_of(row)] += 1
        converted.tasks.append(task)
    return converted


def _require_new_id(task_id: str, line_by_id: dict[str, int]) -> None:
    """Raise ValueError if an earlier row has this id. `line_by_id` maps the id of each earlier row
    to its line number."""
    if task_id in line_by_id:
        raise ValueError(f"the id {task_id!r} is also that of line {line_by_id[task_id]}")


def _split_by_name(file: Path) -> str | None:
    """Return the split that the name of a data file stands for, e.g. "heldout" for test.jsonl; None
    if it stands for none.

    The names of the other data files in its folder matter too (`splits_of`).
    """
    other_files = [path for path in data_files(file.parent) if path.name != file.name]
    split_of_file, *_splits_of_others = splits_of([file, *other_files])
    return split_of_file


def _rows_per_split(tasks: Sequence[Task]) -> tuple[dict[str, int], list[str]]:
    """Count the rows per split, as a push would assign them.

    Returns the counts, such as {"train": 80, "heldout": 20}, and the warnings about the split. If a
    row names an unknown split, both counts are 0 and a warning says so.
    """
    if not tasks:
        return {"train": 0, "heldout": 0}, []
    try:
        split = split_rows([task.to_row() for task in tasks])
    except UnknownSplit as error:
        return {"train": 0, "heldout": 0}, [str(error)]
    return split.counts(), split.warnings


def _duplicates(tasks: Sequence[Task]) -> Duplicates:
    """Count the tasks that repeat an earlier task's prompt and answer (`rows`), and those that
    repeat its prompt (`prompts`)."""
    distinct_prompts: set[str] = set()
    distinct_rows: set[str] = set()  # prompt and answer
    for task in tasks:
        row = task.to_row()
        prompt = prompt_key(row["prompt"])
        distinct_prompts.add(prompt)
        distinct_rows.add(prompt + json.dumps(row["answer"], sort_keys=True))
    return Duplicates(
        rows=len(tasks) - len(distinct_rows), prompts=len(tasks) - len(distinct_prompts)
    )


def _count_characters(messages: Sequence[Any]) -> int:
    """Count the characters in the contents of all messages together."""
    return sum(len(message.content) for message in messages)


def spread(values: Sequence[int]) -> dict[str, int]:
    """Return minimum, median, 95th percentile and maximum of the values; zeros if there are none.

    Percentiles are taken at the nearest rank, so each is one of the values.
    """
    ordered = sorted(values)
    if not ordered:
        return {"min": 0, "p50": 0, "p95": 0, "max": 0}
    last_index = len(ordered) - 1
    return {
        "min": ordered[0],
        "p50": ordered[round(0.5 * last_index)],
        "p95": ordered[round(0.95 * last_index)],
        "max": ordered[last_index],
    }


def _sample_row(task: Task) -> SampleRow:
    """Return a task as a report shows it, with prompt and answer cut to 400 characters."""
    return SampleRow(
        id=task.id,
        prompt=task.prompt_text[:_SAMPLE_CHARS],
        answer=task.answer_text[:_SAMPLE_CHARS],
        split=task.split,
    )


def _short_hash(path: Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _summary(report: DataReport) -> str:
    """Return one sentence that sums up a report, e.g. "12 rows (10 prompt/answer, 2 messages), 1
    that cannot be read."
    """
    shapes = ", ".join(f"{count} {name}" for name, count in report.shapes.items()) or "none"
    bad = f", {report.bad} that cannot be read" if report.bad else ""
    return f"{counted(report.rows, 'row')} ({shapes}){bad}."


def _warnings(report: DataReport) -> list[str]:
    """Return warnings for the author: rows without an answer, repeated rows, rows of several shapes
    and bad rows."""
    warnings = []
    unanswered_count = report.rows - report.with_answer
    if unanswered_count:
        warnings.append(f"{unanswered_count} rows have no answer; SFT leaves them out")
    if report.duplicates.rows:
        warnings.append(f"{report.duplicates.rows} rows repeat an earlier one")
    if len(report.shapes) > 1:
        warnings.append("rows of several shapes: make sure that all of them are meant")
    if report.bad:
        warnings.append("a push refuses the file until the bad rows are corrected or removed")
    return warnings
