"""What is in a data file: shapes, bad rows by number, duplicates, lengths in characters."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.split import UnknownSplit, prompt_key, split_rows
from envs.base import Task
from envs.config.problem import EnvProblem
from envs.dataset import BadRow, read_rows, shape_of, split_of, to_task

SHOWN = 20
SAMPLES = 2


def inspect(path: str | Path) -> dict[str, Any]:
    """Everything about a data file that can be said without a model.

    Returns a JSON object: `rows`, `bad` and the first `bad_rows` by line, `shapes`, `with_answer`,
    `with_tools`, `turns`, `duplicates` (rows, prompts), `splits`, `lengths` (characters of prompt
    and answer), `sample`, `hash`. Raises UserError DATASET_INVALID when the file as a whole cannot
    be read.
    """
    file = Path(path).expanduser()
    try:
        data = read_rows(file)
    except EnvProblem as problem:
        raise UserError(problem.code, str(problem), hint=problem.hint, field="path") from problem
    tasks: list[Task] = []
    bad = list(data.bad)
    shapes: Counter[str] = Counter()
    ids: dict[str, int] = {}
    for line, row in data.rows:
        try:
            task = to_task(row, f"{file.stem}-{line}", split_of(file))
            if task.id in ids:
                raise ValueError(f"the id {task.id!r} is also that of line {ids[task.id]}")
        except ValueError as error:
            bad.append(BadRow(line, str(error)))
            continue
        ids[task.id] = line
        shapes[shape_of(row)] += 1
        tasks.append(task)
    bad.sort(key=lambda found: found.line)
    splits, warnings = _splits(tasks)
    report = {
        "path": str(file),
        "hash": _hash(file),
        "rows": len(tasks),
        "bad": len(bad),
        "bad_rows": [{"line": found.line, "message": found.message} for found in bad[:SHOWN]],
        "shapes": dict(shapes),
        "with_answer": sum(1 for task in tasks if task.answer_messages),
        "with_tools": sum(1 for task in tasks if task.metadata.get("tools")),
        "turns": spread([sum(m.role == "assistant" for m in t.answer_messages) for t in tasks]),
        "duplicates": _duplicates(tasks),
        "splits": splits,
        "lengths": {
            "prompt": spread([_characters(task.messages) for task in tasks]),
            "answer": spread([_characters(task.answer_messages) for task in tasks]),
        },
        "sample": [_sample(task) for task in tasks[:SAMPLES]],
    }
    report["summary"] = _summary(report)
    report["warnings"] = warnings + _warnings(report)
    return report


def _splits(tasks: Sequence[Task]) -> tuple[dict[str, int], list[str]]:
    """Rows per side as a push would have them."""
    if not tasks:
        return {"train": 0, "heldout": 0}, []
    try:
        sides = split_rows([task.to_row() for task in tasks])
    except UnknownSplit as error:
        return {"train": 0, "heldout": 0}, [str(error)]
    return {side: sides.sides.count(side) for side in ("train", "heldout")}, sides.warnings


def _duplicates(tasks: Sequence[Task]) -> dict[str, int]:
    """Rows that repeat an earlier row, and rows that repeat an earlier prompt."""
    prompts: set[str] = set()
    whole: set[str] = set()
    found = {"rows": 0, "prompts": 0}
    for task in tasks:
        row = task.to_row()
        prompt = prompt_key(row["prompt"])
        everything = prompt + json.dumps(row["answer"], sort_keys=True)
        found["rows"] += everything in whole
        found["prompts"] += prompt in prompts
        whole.add(everything)
        prompts.add(prompt)
    return found


def _characters(messages: Sequence[Any]) -> int:
    return sum(len(message.content) for message in messages)


def spread(values: Sequence[int]) -> dict[str, int]:
    """min, p50, p95, max at their nearest ranks; zeros where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {"min": 0, "p50": 0, "p95": 0, "max": 0}
    last = len(ordered) - 1
    return {
        "min": ordered[0],
        "p50": ordered[round(0.5 * last)],
        "p95": ordered[round(0.95 * last)],
        "max": ordered[last],
    }


def _sample(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "prompt": task.prompt_text[:400],
        "answer": task.answer_text[:400],
        "split": task.split,
    }


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _summary(report: dict[str, Any]) -> str:
    shapes = ", ".join(f"{count} {name}" for name, count in report["shapes"].items()) or "none"
    bad = f", {report['bad']} that cannot be read" if report["bad"] else ""
    return f"{counted(report['rows'], 'row')} ({shapes}){bad}."


def _warnings(report: dict[str, Any]) -> list[str]:
    warnings = []
    without = report["rows"] - report["with_answer"]
    if without:
        warnings.append(f"{without} rows have no answer; SFT leaves them out")
    if report["duplicates"]["rows"]:
        warnings.append(f"{report['duplicates']['rows']} rows repeat an earlier one")
    if len(report["shapes"]) > 1:
        warnings.append("rows of several shapes: make sure that all of them are meant")
    if report["bad"]:
        warnings.append("a push refuses the file until the bad rows are corrected or removed")
    return warnings
