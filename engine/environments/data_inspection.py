"""Describes a data file of any size; with a model also in tokens of that model."""

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
from engine.environments.snapshot import is_hidden, resolve_inside
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
        home: the home whose cache holds fetched datasets and indexes of large files.
        path: the file, or the id of a dataset on the hub, whose first training file is then meant.
        model: the model whose tokenizer and chat template count tokens; "": tokens are not counted.
        roots: folders that the file must lie in; None: any folder.
        wait_s: how many seconds fetching and reading may take.

    Raises UserError DATASET_INVALID if the file cannot be read as data, DATASET_READING if it is
    not read within `wait_s`, PATH_OUTSIDE_ROOTS if it lies outside `roots`, and MODEL_* or
    ADAPTER_MISMATCH if the model cannot be used.
    """
    deadline = time.monotonic() + wait_s
    # If a file or folder called `path` lies in one of these, `path` means that, not a dataset.
    local_folders = [Path(), *(roots or [])]
    dataset = hub_data.named_dataset(home, path, local_folders, deadline)
    if dataset is not None:
        return _dataset_report(home, dataset, model, deadline)
    file = Path(path).expanduser().absolute()
    if roots is not None:
        file = file.resolve()  # if it is a link, its target must lie inside `roots`
        # A viewer may not look into the home, so a file there lies in no allowed folder.
        allowed_roots = [] if is_hidden(home, file) else list(roots)
        resolve_inside(file.parent, allowed_roots)  # called for its error
    return _file_report(home, file, model, deadline)


def _dataset_report(
    home: Home, dataset: hub_data.Dataset, model: str, deadline: float
) -> DataReport:
    """Describe the first training file of a fetched dataset, with a warning about its other files.

    If all files are held out, the first of them is described.

    Args:
        home: the home whose cache holds indexes of large files.
        dataset: the fetched dataset.
        model: the model whose tokenizer counts tokens; "": tokens are not counted.
        deadline: value of `time.monotonic()` until which a large file may be read.
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
    """Describe the rows of one data file; with a `model` (not "") also in tokens of that model.

    Raises UserError DATASET_READING (retryable) if a large file is not read by `deadline`, a value
    of `time.monotonic()`.
    """
    model_folder = catalog.resolve_model(home, model).base_path if model else None
    rows: Sequence[TaskRow] = ()  # stays empty if no tokens are to be counted
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
    """Return whether a data file is so large that it is indexed and not read into memory.

    Returns False if it cannot be opened: `datasets.inspect` then raises the error for that.
    """
    try:
        return file.suffix.lower() in LINE_FORMATS and build.is_large([file])
    except OSError:
        return False


def _task_rows(file: Path) -> list[TaskRow]:
    """Return the valid rows of a data file in the form in which a push would store them."""
    return [stored_row(task.to_row(), "train") for task in datasets.valid_tasks(file)]


def _large_report(file: Path, facts: DataIndex) -> DataReport:
    """Make the report of a large file, in the same form as for any other file, from its index."""
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
    """Return a spread of numbers as {"min", "p50", "p95", "max"}."""
    return {"min": numbers.min, "p50": numbers.p50, "p95": numbers.p95, "max": numbers.max}


def _count_tokens(rows: Sequence[TaskRow], model: str, model_folder: Path) -> TokenLengths:
    """Count the tokens of the rows, or of a seeded sample if there are more than `SAMPLE` rows.

    `model` is the reference of the model as the user gave it, for the report; `model_folder` holds
    its tokenizer and chat template.
    """
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
    """Count the tokens of each row.

    Returns two lists: the lengths of the rows that the chat template accepts, and for each row that
    it refuses a text with the row's id and the reason.
    """
    lengths: list[RowLengths] = []
    refusals: list[str] = []
    for row in rows:
        try:
            lengths.append(row_lengths(row, tools=[], tokenizer=tokenizer))
        except TemplateError as error:
            refusals.append(f"row {row['id']}: {error}")
    return lengths, refusals
