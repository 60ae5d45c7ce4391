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
_REFUSAL_CHARS = 300


def inspect(home: Home, path: str | Path, model: str = "") -> DataReport:
    """Check a data file and describe its rows.

    A large JSONL file is read in a process of its own, which this waits for, and the facts are kept
    in the home's cache. With `model` the report has `tokens`, counted with that model's tokenizer
    and chat template over at most SAMPLE rows, a seeded sample.

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
        report = _large_report(file, indexed.facts)
        if model_folder is not None:
            rows = IndexedRows(indexed.facts.files, indexed.folder / ROWS_INDEX)
            return replace(report, tokens=_count_tokens(rows, model, model_folder))
        return report
    report = datasets.inspect(path)
    if model_folder is not None:
        tasks = datasets.valid_tasks(file)
        rows = [stored_row(task.to_row(), "train") for task in tasks]
        return replace(report, tokens=_count_tokens(rows, model, model_folder))
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


def _large_report(file: Path, facts: DataIndex) -> DataReport:
    """The facts about a large file, as the report of any other."""
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
    return {"min": numbers.min, "p50": numbers.p50, "p95": numbers.p95, "max": numbers.max}


def _count_tokens(rows: Sequence[TaskRow], model: str, model_folder: Path) -> TokenLengths:
    """Count the tokens of the rows, or of a seeded sample of them; rows that the chat template
    refuses are left out. `model` is the reference that the user gave."""
    tokenizer = tokens.load(model_folder)
    sample = random.Random(0).sample(rows, SAMPLE) if len(rows) > SAMPLE else rows
    lengths = []
    refused_rows = 0
    first_refusal = ""
    for row in sample:
        try:
            lengths.append(row_lengths(row, row["metadata"].get("tools") or [], tokenizer))
        except TemplateError as error:
            refused_rows += 1
            first_refusal = first_refusal or f"row {row['id']}: {error}"
    return TokenLengths(
        model=model,
        counted=len(lengths),
        prompt=spread([row.prompt for row in lengths]),
        answer=spread([row.answer for row in lengths]),
        total=spread([row.total for row in lengths]),
        refused_by_template=refused_rows,
        refusal=first_refusal[:_REFUSAL_CHARS] or None,
    )
