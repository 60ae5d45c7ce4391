"""What is in a data file of any size, also in tokens of a given model."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.core.errors import UserError
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
from engine.environments.env_facts import SAMPLE, row_lengths
from engine.environments.indexed import build
from engine.environments.indexed.rows import ROWS_INDEX, IndexedRows, stored_row
from engine.home.run_dir import Home
from engine.models import catalog, tokens
from engine.models.chat_format import TemplateError
from engine.records.data_index import DataIndex, Spread
from envs.dataset import LINE_FORMATS
from envs.json_types import TaskRow

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def inspect(home: Home, path: str | Path, model: str = "") -> DataReport:
    """Check a data file and describe its rows.

    A large JSONL file is read in a process of its own, which this waits for, and what was found is
    kept in the home's cache. With `model` the report has `tokens`, counted with that model's
    tokenizer and chat template over at most SAMPLE rows, a seeded sample.

    Raises UserError DATASET_INVALID if the file cannot be read as data, or the error of
    `catalog.resolve_model`.
    """
    file = Path(path).expanduser().absolute()
    if not file.exists() and _HUB_ID.fullmatch(str(path)):
        raise hub_data_error(str(path))
    model_folder = catalog.resolve_model(home, model).base_path if model else None
    try:
        is_large = file.suffix.lower() in LINE_FORMATS and build.is_large([file])
    except OSError:  # `datasets.inspect` says what is wrong
        is_large = False
    if is_large:
        indexed = build.read_once(home, [file], file.parent, wait_s=float("inf"))
        report = _large_report(file, indexed.found)
        if model_folder is not None:
            rows = IndexedRows(indexed.found.files, indexed.folder / ROWS_INDEX)
            return replace(report, tokens=_count(rows, model, model_folder))
        return report
    report = datasets.inspect(path)
    if model_folder is not None:
        tasks = datasets.valid_tasks(file)
        rows = [stored_row(task.to_row(), "train") for task in tasks]
        return replace(report, tokens=_count(rows, model, model_folder))
    return report


def hub_data_error(name: str) -> UserError:
    """The error for the id of a dataset on the hub where a file or folder is meant."""
    return UserError(
        "DATASET_INVALID",
        f"{name!r} is no file or folder here; datasets of the hub are not fetched by name",
        hint=f"Fetch it first: hf download {name} --repo-type dataset --local-dir "
        f"{name.partition('/')[2]}, then name that folder's files. Parquet needs the extra "
        "honesmith[data].",
        field="path",
    )


def _large_report(file: Path, found: DataIndex) -> DataReport:
    """What reading a large file found, as the report of any other."""
    report = DataReport(
        path=str(file),
        hash=found.files[0].sha256[:12],
        rows=found.rows,
        bad=found.bad,
        bad_rows=[ShownBadRow(fault.line, fault.message) for fault in found.faults],
        shapes=found.shapes,
        with_answer=found.rows - found.unanswered,
        with_tools=found.with_tools,
        turns=_dict(found.turns),
        duplicates=Duplicates(found.repeated_rows, found.repeated_prompts),
        splits=found.sides,
        lengths=Lengths(_dict(found.prompt_chars), _dict(found.answer_chars)),
        sample=[SampleRow(row.id, row.prompt, row.answer, row.split) for row in found.sample],
    )
    return datasets.with_words(report, list(found.warnings))


def _dict(found: Spread) -> dict[str, int]:
    return {"min": found.min, "p50": found.p50, "p95": found.p95, "max": found.max}


def _count(rows: Sequence[TaskRow], model: str, model_folder: Path) -> TokenLengths:
    """Count the tokens of the rows, or of a seeded sample of them."""
    tokenizer = tokens.load(model_folder)
    sample = random.Random(0).sample(rows, SAMPLE) if len(rows) > SAMPLE else rows
    counted = []
    refused, refusal = 0, ""
    for row in sample:
        try:
            counted.append(row_lengths(row, row["metadata"].get("tools") or [], tokenizer))
        except TemplateError as error:
            refused += 1
            refusal = refusal or f"row {row['id']}: {error}"
    return TokenLengths(
        model=model,
        counted=len(counted),
        prompt=spread([row.prompt for row in counted]),
        answer=spread([row.answer for row in counted]),
        total=spread([row.total for row in counted]),
        refused_by_template=refused,
        refusal=refusal[:300] or None,
    )
