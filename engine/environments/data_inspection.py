"""What is in a data file of any size, also in tokens of a given model."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.environments import datasets
from engine.environments.datasets import (
    DataReport,
    Duplicates,
    Lengths,
    SampleRow,
    ShownBadRow,
    TokenLengths,
    spread,
)
from engine.environments.env_facts import SAMPLE, RowLengths, row_lengths
from engine.environments.indexed import build
from engine.environments.indexed.rows import ROWS_INDEX, IndexedRows, stored_row
from engine.environments.snapshot import resolve_inside
from engine.home.run_dir import Home
from engine.hub import data as hub_data
from engine.models import catalog, tokens
from engine.models.chat_format import TemplateError
from engine.records.data_index import DataIndex, Spread
from envs.dataset import LINE_FORMATS, data_files, split_of
from envs.json_types import TaskRow

_REFUSAL_CHARS = 300


def inspect(
    home: Home,
    path: str | Path,
    model: str = "",
    roots: Sequence[Path] | None = None,
    wait_s: float = math.inf,
) -> DataReport:
    """Check a data file and describe its rows.

    Args:
        path: the file, or the id of a dataset on the hub, whose first training file is meant.
        model: the model with whose tokenizer and chat template tokens are counted; "": they are
            not counted.
        roots: folders that the file must lie in; None: any folder.
        wait_s: how many seconds fetching and reading may take.

    Raises UserError DATASET_INVALID, DATASET_READING (not done in `wait_s`), PATH_OUTSIDE_ROOTS, or
    MODEL_* or ADAPTER_MISMATCH for a model that cannot be used.
    """
    deadline = time.monotonic() + wait_s
    places = [Path(), *(roots or [])]  # where a folder of this name would be meant
    dataset = hub_data.named_dataset(home, path, places, deadline)
    if dataset is not None:
        return _dataset_report(home, dataset, model, deadline)
    file = Path(path).expanduser().absolute()
    if roots is not None:
        file = file.resolve()  # where a link leads counts, not where it lies
        resolve_inside(file.parent, list(roots))
    return _file_report(home, file, model, deadline)


def _dataset_report(
    home: Home, dataset: hub_data.Dataset, model: str, deadline: float
) -> DataReport:
    """Describe the first training file of a fetched dataset, with a warning about the others.

    If all files are held out, the first of them is described. `deadline` is a value of
    `time.monotonic()`; `model` as in `inspect`.
    """
    files = data_files(dataset.folder)
    training_files = [file for file in files if split_of(file) not in ("heldout", "dev")]
    file = (training_files or files)[0]
    report = _file_report(home, file, model, deadline)
    other_files = [candidate.name for candidate in files if candidate != file]
    warnings = list(report.warnings)
    if other_files:
        warnings.append(f"of {len(files)} files only {file.name} is described here")
    return replace(
        report, summary=f"{report.summary} {dataset.origin.in_words()}", warnings=warnings
    )


def _file_report(home: Home, file: Path, model: str, deadline: float) -> DataReport:
    """The report of one file. Raises UserError DATASET_READING, retryable, if a large file cannot
    be read before `deadline`, a value of `time.monotonic()`."""
    model_folder = catalog.resolve_model(home, model).base_path if model else None
    rows: Sequence[TaskRow] = ()  # read only if their tokens are counted
    if _is_large(file):
        wait_s = max(0.0, deadline - time.monotonic())
        indexed = build.read_once(home, [file], file.parent, wait_s=wait_s)
        report = _large_report(file, indexed.facts)
        if model_folder is not None:
            rows = IndexedRows(indexed.facts.files, indexed.folder / ROWS_INDEX)
    else:
        report = datasets.inspect(file)
        if model_folder is not None:
            rows = _task_rows(file)
    if model_folder is None:
        return report
    return replace(report, tokens=_count_tokens(rows, model, model_folder))


def _is_large(file: Path) -> bool:
    """Whether the file is too large to be read at once; False if it cannot be opened, because then
    `datasets.inspect` says what is wrong."""
    try:
        return file.suffix.lower() in LINE_FORMATS and build.is_large([file])
    except OSError:
        return False


def _task_rows(file: Path) -> list[TaskRow]:
    """The valid rows of a data file as they would be stored."""
    return [stored_row(task.to_row(), "train") for task in datasets.valid_tasks(file)]


def _large_report(file: Path, facts: DataIndex) -> DataReport:
    """Turn the facts about a large file into the report that any other file gets."""
    report = DataReport(
        path=str(file),
        hash=facts.files[0].sha256[:12],
        rows=facts.rows,
        bad=facts.bad,
        bad_rows=[ShownBadRow(fault.line, fault.message) for fault in facts.faults],
        shapes=facts.shapes,
        with_answer=facts.rows - facts.unanswered,
        with_tools=facts.with_tools,
        turns=_as_dict(facts.turns),
        duplicates=Duplicates(facts.repeated_rows, facts.repeated_prompts),
        splits=facts.sides,
        lengths=Lengths(_as_dict(facts.prompt_chars), _as_dict(facts.answer_chars)),
        sample=[SampleRow(row.id, row.prompt, row.answer, row.split) for row in facts.sample],
    )
    return datasets.with_summary_and_warnings(report, list(facts.warnings))


def _as_dict(numbers: Spread) -> dict[str, int]:
    """The spread of some numbers as JSON: least, median, 95th percentile and largest."""
    return {"min": numbers.min, "p50": numbers.p50, "p95": numbers.p95, "max": numbers.max}


def _count_tokens(rows: Sequence[TaskRow], model: str, model_folder: Path) -> TokenLengths:
    """Count the tokens of the rows, or of a seeded sample of them. `model` is the reference that
    the user gave."""
    tokenizer = tokens.load(model_folder)
    sample = random.Random(0).sample(rows, SAMPLE) if len(rows) > SAMPLE else rows
    lengths, refusals = _row_lengths(sample, tokenizer)
    return TokenLengths(
        model=model,
        counted=len(lengths),
        prompt=spread([row.prompt for row in lengths]),
        answer=spread([row.answer for row in lengths]),
        total=spread([row.total for row in lengths]),
        refused_by_template=len(refusals),
        refusal=refusals[0][:_REFUSAL_CHARS] if refusals else None,
    )


def _row_lengths(
    rows: Sequence[TaskRow], tokenizer: tokens.ChatTokenizer
) -> tuple[list[RowLengths], list[str]]:
    """Measure the rows in tokens.

    Returns (the lengths of the rows that the chat template takes, a text for each row that it
    refuses, with the reason).
    """
    lengths: list[RowLengths] = []
    refusals: list[str] = []
    for row in rows:
        try:
            lengths.append(row_lengths(row, [], tokenizer))
        except TemplateError as error:
            refusals.append(f"row {row['id']}: {error}")
    return lengths, refusals
