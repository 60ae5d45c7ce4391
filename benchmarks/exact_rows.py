"""Environments of rows that are drawn, each prompt with one right answer."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Draw = Callable[[random.Random], tuple[str, str]]  # a prompt and its answer
ENVIRONMENT = """
import json
from pathlib import Path
from envs import Score, SingleTurnEnv, Task

ROWS = json.loads((Path(__file__).parent / "rows.json").read_text())

class Rows(SingleTurnEnv):
    def tasks(self):
        return [Task(**row) for row in ROWS]

    def score(self, task, completion):
        right = completion.strip() == task.answer_text
        return Score(float(right), success=right)

def load_environment():
    return Rows()
"""


def unique_rows(draw: Draw, chance: random.Random, count: int) -> list[tuple[str, str]]:
    """So many rows whose prompts all differ, in the order in which they were first drawn."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        prompt, answer = draw(chance)
        rows[prompt] = answer
    return list(rows.items())


def write(folder: Path, rows: Sequence[tuple[str, str]], heldout: range) -> Path:
    """Write an environment of these rows; those whose numbers are in `heldout` are only asked.
    Returns its folder."""
    lines: list[dict[str, Any]] = [
        {
            "id": f"row-{number}",
            "prompt": prompt,
            "answer": answer,
            "split": "heldout" if number in heldout else "train",
        }
        for number, (prompt, answer) in enumerate(rows)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(lines))
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder
