"""Evaluation rows as they lie on disk, turned into sides that can be compared.

One row is one attempt at one task (see `engine.home.run_dir.RunDir.evals`). What is compared is
`success` where every scored row has it, else `reward`, else (datasets without a scorer) `loss`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.core.files import read_lines
from engine.core.split import prompt_key
from engine.evidence.stats.inference import NEGLIGIBLE, Interval, Side, paired_bootstrap, wilson
from engine.home.run_dir import RunDir

Row = dict[str, Any]
Measure = Literal["success", "reward", "loss"]
HIGHER_IS_BETTER: dict[Measure, bool] = {"success": True, "reward": True, "loss": False}


def load_rows(path: Path) -> list[Row]:
    """Every complete row of an evaluation or rollout file; empty when it is missing."""
    rows: list[Row] = []
    cursor = 0
    while True:
        more, reached = read_lines(path, cursor, max_bytes=4_000_000)
        rows += more
        if reached <= cursor:
            return rows
        cursor = reached


def only_half(rows: Iterable[Row], half: str) -> list[Row]:
    """The rows of one half of the held-out tasks: `select` chooses, `report` is reported."""
    return [row for row in rows if row.get("half") == half]


def measure_of(*row_sets: Sequence[Row]) -> Measure | None:
    """What all these rows can be compared by, None when they hold nothing to compare."""
    rows = [row for rows in row_sets for row in rows if not row.get("error")]
    if not rows:
        return None
    if all(isinstance(row.get("success"), bool) for row in rows):
        return "success"
    scored = all(_number(row.get("reward")) is not None for row in rows)
    lost = all(_number(row.get("loss")) is not None for row in rows)
    # An unscored dataset may carry a placeholder reward beside its loss.
    if scored and not (lost and all(row["reward"] == 0 for row in rows)):
        return "reward"
    return "loss" if lost else None


def value_of(row: Row, measure: Measure) -> float | None:
    """The value of one row, None when scoring it failed or it has none."""
    if row.get("error"):
        return None
    value = row.get(measure)
    return float(value) if isinstance(value, bool) else _number(value)


def by_prompt(*row_sets: Iterable[Row]) -> list[list[Row]]:
    """The rows with all tasks of one prompt under one id: they are attempts, not so many tasks.

    That holds where the answer hangs on the prompt alone. Where an environment went on talking,
    what it hides may differ, and where no prompt was recorded nobody knows: there a task is an id.
    """
    sets = [list(rows) for rows in row_sets]
    asked: dict[str, str] = {}
    for row in (row for rows in sets for row in rows):
        if any(turn.get("role") != "assistant" for turn in _turns(row.get("messages"))):
            return sets
        task, prompt = str(row.get("task")), _turns(row.get("prompt"))
        if prompt and task not in asked:
            asked[task] = prompt_key(prompt)
    first: dict[str, str] = {}
    for task in sorted(asked):
        first.setdefault(asked[task], task)
    if len(first) == len(asked):
        return sets
    ids = {task: first[prompt] for task, prompt in asked.items()}
    return [[row | {"task": ids.get(str(row.get("task")), row.get("task"))} for row in rows]
            for rows in sets]  # fmt: skip


def _turns(messages: Any) -> list[Mapping[str, Any]]:
    turns = messages if isinstance(messages, list) else []
    return [turn for turn in turns if isinstance(turn, Mapping)]


def side(rows: Iterable[Row], measure: Measure, failed: float | None = None) -> Side:
    """One model's results by task; attempts that failed to score are counted apart, or with the
    value `failed` where one is given."""
    values: dict[str, list[float]] = {}
    attempts = errors = 0
    for row in rows:
        attempts += 1
        value = value_of(row, measure)
        value = failed if value is None else value
        if value is None:
            errors += 1
        else:
            values.setdefault(str(row.get("task")), []).append(value)
    return Side(values, attempts, errors)


@dataclass(frozen=True)
class Level:
    """How one model does: its mean over tasks with an interval, and what scoring cost it.

    `value_with_errors` counts failed scorings as not solved (success and reward only).
    """

    measure: Measure
    value: float | None
    low: float | None
    high: float | None
    tasks: int
    attempts: int
    errors: int
    value_with_errors: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "value": rounded(self.value),
            "interval": [rounded(self.low), rounded(self.high)],
            "tasks": self.tasks,
            "attempts": self.attempts,
            "errors": self.errors,
            "value_with_errors": rounded(self.value_with_errors),
        }


def level(rows: Sequence[Row], measure: Measure) -> Level:
    """Wilson's interval where a task is one yes or no, a bootstrap over tasks elsewhere."""
    (asked,) = by_prompt(rows)
    result = side(asked, measure)
    means = {task: math.fsum(got) / len(got) for task, got in result.values.items()}
    n = len(means)
    if n == 0:
        return Level(measure, None, None, None, 0, result.attempts, result.errors, None)
    value = math.fsum(means.values()) / n
    if measure == "success" and all(mean in (0.0, 1.0) for mean in means.values()):
        interval = wilson(round(value * n), n)
    else:
        boot = paired_bootstrap({task: [mean] for task, mean in means.items()})
        interval = Interval(boot.low, boot.high)
    counted = None
    if measure != "loss" and result.attempts:
        total = math.fsum(value for got in result.values.values() for value in got)
        counted = total / result.attempts
    return Level(
        measure, value, interval.low, interval.high, n, result.attempts, result.errors, counted
    )


def select_best(run_dir: RunDir, steps: Iterable[int] | None = None) -> int | None:
    """The step whose checkpoint did best on the `select` half; None when none was evaluated.

    Step 0 is the starting point and never chosen. Of equals the earliest wins: it has drifted
    least. A success tie is broken by the reward.
    """
    candidates = sorted(run_dir.eval_steps() if steps is None else steps)
    scores: dict[int, tuple[float, float]] = {}
    for step in candidates:
        rows = only_half(load_rows(run_dir.evals(step)), "select") if step > 0 else []
        score = selection_score(rows)
        if score is not None:
            scores[step] = score
    return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def selection_score(rows: Sequence[Row]) -> tuple[float, float] | None:
    """What checkpoints are ranked by: (success or -loss or reward, reward). Higher is better.

    Failed scorings count as not solved, so that a model gains nothing by breaking the scorer.
    """
    measure = measure_of(rows)
    if measure is None:
        return None
    if measure == "loss":
        values = [value for row in rows if (value := value_of(row, "loss")) is not None]
        return -math.fsum(values) / len(values), 0.0
    main = math.fsum(value_of(row, measure) or 0.0 for row in rows) / len(rows)
    reward = math.fsum(_number(row.get("reward")) or 0.0 for row in rows) / len(rows)
    return main, reward


def text_of(messages: Any) -> str:
    """Messages as readable text; the role is written where there is more than one."""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list):
        return ""
    turns = [turn for turn in messages if isinstance(turn, Mapping)]
    if len(turns) == 1:
        return content_of(turns[0])
    return "\n".join(f"[{turn.get('role', '?')}] {content_of(turn)}" for turn in turns)


def content_of(message: Mapping[str, Any]) -> str:
    """The text of one message, its tool calls written out."""
    content = message.get("content")
    text = content if isinstance(content, str) else _parts(content)
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        text += f"\n→ {function.get('name', '?')}({function.get('arguments', '')})"
    return text.strip("\n")


def answer_of(row: Row) -> str:
    """What the model said: the whole conversation after the prompt, or the one completion."""
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        return text_of(messages)
    return str(row.get("completion") or text_of(messages))


def rounded(value: float | None, digits: int = 4) -> float | None:
    """`value` with so many digits after the point, for people and agents."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def rounded_ends(low: float | None, high: float | None) -> list[float | None]:
    """An interval for people and agents; an end that is not 0 is never shown as 0."""
    ends: list[float | None] = []
    for end in (low, high):
        short = rounded(end)
        if short == 0 and end is not None and abs(end) > NEGLIGIBLE:
            short = float(f"{end:.1g}")
        ends.append(short)
    return ends


def _parts(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def show(value: float | None, measure: Measure) -> str:
    """A level for people: rates in percent."""
    if value is None:
        return "?"
    return f"{100 * value:.1f} %" if measure == "success" else f"{value:.3g}"


def show_change(value: float | None, measure: Measure) -> str:
    """A difference for people: rates in points. What is not 0 is never shown as 0."""
    if value is None:
        return "?"
    if measure != "success":
        return f"{0.0 if abs(value) <= NEGLIGIBLE else value:+.3g}"
    hidden = NEGLIGIBLE < abs(value) < 0.0005
    return f"{100 * value:+.1g}" if hidden else f"{100 * value:+.1f}"
