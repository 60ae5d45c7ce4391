"""Answers that people have labelled, to hold a judge against: JSONL, one answer a line.

    {"prompt": "...", "answer": "...", "label": 1}

`label` is true or false, or a number from 0 to 1. Two keys are optional: `reference`, the reference
answer that the judge is shown, and `author`, the name of the model that wrote the answer. `author`
shows whether the judge prefers answers of its own model; several answers to one prompt show whether
it prefers the answer that it sees first.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError

_FORM = 'one JSON object a line: {"prompt": "...", "answer": "...", "label": 1}'


@dataclass(frozen=True)
class GoldAnswer:
    """An answer with the value from 0 to 1 that people gave it."""

    prompt: str
    answer: str
    label: float
    reference: str = ""
    author: str = ""


def read_gold(path: Path) -> list[GoldAnswer]:
    """Read the gold answers of a JSONL file; blank lines are skipped.

    Raises UserError BAD_ARGUMENT if the file cannot be read, if a line is not a gold answer (the
    error names the line), or if there is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _gold_error(f"{path} cannot be read: {error}") from error
    answers = [
        _answer_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not answers:
        raise _gold_error(f"{path} holds no answers")
    return answers


def _answer_of(line: str, place: str) -> GoldAnswer:
    """Parse one line as a gold answer.

    Raises UserError BAD_ARGUMENT if it is not one; `place` names the line in the message, such as
    "gold.jsonl, line 3".
    """
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise _gold_error(f"{place} is no JSON object")
    texts = {name: row.get(name, "") for name in ("prompt", "answer", "reference", "author")}
    are_texts = all(isinstance(text, str) for text in texts.values())
    if not are_texts or not texts["prompt"]:
        raise _gold_error(f"{place}: prompt, answer, reference and author are texts")
    return GoldAnswer(**texts, label=_label(row.get("label"), place))


def _label(value: Any, place: str) -> float:
    """A label as a number: 1.0 for true, 0.0 for false.

    Raises UserError BAD_ARGUMENT if it is neither a bool nor a number from 0 to 1; `place` names
    the line in the message, such as "gold.jsonl, line 3".
    """
    if not isinstance(value, int | float) or not 0 <= value <= 1:  # a bool is an int
        raise _gold_error(
            f"{place}: label is true, false or a number from 0 to 1, got {value!r:.40}"
        )
    return float(value)


def _gold_error(message: str) -> UserError:
    """The error for a file of gold answers that cannot be used."""
    return UserError("BAD_ARGUMENT", message, hint=f"Write {_FORM}.", field="gold")
