"""Evaluation rows as they lie on disk, turned into sides that can be compared.

One row is one attempt at one task (engine/records/lines/evaluation_row.py). What is compared is
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
from engine.records.lines.answer import Answer
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.line_record import Line
from envs.json_types import ChatMessage

Measure = Literal["success", "reward", "loss"]
HIGHER_IS_BETTER: dict[Measure, bool] = {"success": True, "reward": True, "loss": False}
# The halves of a run's held-out tasks, as their rows name them (engine/home/halves.py).
VALIDATION, TEST = "select", "report"


def load_rows(path: Path) -> list[Line]:
    """Every complete line of a file as JSON, for callers that write the rows anew with all their
    keys; [] where there is no file. What is only read is read as records."""
    rows: list[Line] = []
    cursor = 0
    while True:
        more, reached = read_lines(path, cursor, max_bytes=4_000_000)
        rows += more
        if reached <= cursor:
            return rows
        cursor = reached


def in_half(rows: Iterable[EvaluationRow], half: str) -> list[EvaluationRow]:
    """The rows of one half of the held-out tasks, `VALIDATION` or `TEST`."""
    return [row for row in rows if row.half == half]


def measure_of(*row_sets: Sequence[EvaluationRow]) -> Measure | None:
    """What all these rows can be compared by, None when they hold nothing to compare."""
    rows = [row for rows in row_sets for row in rows if not row.error]
    if not rows:
        return None
    if all(row.success is not None for row in rows):
        return "success"
    scored = all(row.reward is not None for row in rows)
    measured = all(row.loss is not None for row in rows)
    # An unscored dataset may carry a placeholder reward beside its loss.
    if scored and not (measured and all(row.reward == 0 for row in rows)):
        return "reward"
    return "loss" if measured else None


def value_of(row: EvaluationRow, measure: Measure) -> float | None:
    """The value of one row, None when scoring it failed or it has none."""
    if row.error:
        return None
    value = {"success": row.success, "reward": row.reward, "loss": row.loss}[measure]
    return None if value is None else float(value)


def by_prompt(*row_sets: Iterable[EvaluationRow]) -> list[list[EvaluationRow]]:
    """The rows with all tasks of one prompt under one id: they are attempts, not so many tasks.

    That holds where the answer depends on the prompt alone. Where an environment went on talking,
    what it hides may differ, and where no prompt was recorded nobody knows: there every task keeps
    its id.
    """
    sets = [list(rows) for rows in row_sets]
    prompts: dict[str, str] = {}
    for row in (row for rows in sets for row in rows):
        if any(turn.get("role") != "assistant" for turn in row.messages or ()):
            return sets
        if row.prompt and row.task not in prompts:
            prompts[row.task] = prompt_key(row.prompt)
    first: dict[str, str] = {}
    for task in sorted(prompts):
        first.setdefault(prompts[task], task)
    if len(first) == len(prompts):
        return sets
    ids = {task: first[prompt] for task, prompt in prompts.items()}
    return [
        [row.model_copy(update={"task": ids.get(row.task, row.task)}) for row in rows]
        for rows in sets
    ]


def side(rows: Iterable[EvaluationRow], measure: Measure, failed: float | None = None) -> Side:
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
            values.setdefault(row.task, []).append(value)
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

    @property
    def rounded_value(self) -> float | None:
        return rounded(self.value)

    @property
    def interval(self) -> list[float | None]:
        return [rounded(self.low), rounded(self.high)]

    def to_json(self) -> dict[str, object]:
        return {
            "value": self.rounded_value,
            "interval": self.interval,
            "tasks": self.tasks,
            "attempts": self.attempts,
            "errors": self.errors,
            "value_with_errors": rounded(self.value_with_errors),
        }


def level(rows: Sequence[EvaluationRow], measure: Measure) -> Level:
    """Wilson's interval where a task is one yes or no, a bootstrap over tasks elsewhere."""
    (rows_by_prompt,) = by_prompt(rows)
    result = side(rows_by_prompt, measure)
    means = {task: math.fsum(each) / len(each) for task, each in result.values.items()}
    n = len(means)
    if n == 0:
        return Level(measure, None, None, None, 0, result.attempts, result.errors, None)
    value = math.fsum(means.values()) / n
    if measure == "success" and all(mean in (0.0, 1.0) for mean in means.values()):
        interval = wilson(round(value * n), n)
    else:
        boot = paired_bootstrap({task: [mean] for task, mean in means.items()})
        interval = Interval(boot.low, boot.high)
    with_errors = None
    if measure != "loss" and result.attempts:
        total = math.fsum(value for each in result.values.values() for value in each)
        with_errors = total / result.attempts
    return Level(
        measure, value, interval.low, interval.high, n, result.attempts, result.errors, with_errors
    )


def best_step(run_dir: RunDir, steps: Iterable[int] | None = None) -> int | None:
    """The step whose checkpoint did best on the validation half; None when none was evaluated.

    Step 0 is the starting point and never chosen. Of equals the earliest wins: it has drifted
    least. A success tie is broken by the reward.
    """
    scores: dict[int, tuple[float, float]] = {}
    for step in sorted(run_dir.eval_steps() if steps is None else steps):
        rows = in_half(read_evaluation(run_dir.evals(step)), VALIDATION) if step > 0 else []
        score = selection_score(rows)
        if score is not None:
            scores[step] = score
    return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def selection_score(rows: Sequence[EvaluationRow]) -> tuple[float, float] | None:
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
    reward = math.fsum(row.reward or 0.0 for row in rows) / len(rows)
    return main, reward


def text_of(messages: str | Sequence[ChatMessage] | None) -> str:
    """Messages as readable text; the role is written where there is more than one."""
    if isinstance(messages, str):
        return messages
    if not messages:
        return ""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n".join(f"[{turn.get('role', '?')}] {content_of(turn)}" for turn in messages)


def content_of(message: ChatMessage) -> str:
    """The text of one message, its tool calls written out."""
    content = message.get("content")
    text = content if isinstance(content, str) else _parts(content)
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        text += f"\n→ {function.get('name', '?')}({function.get('arguments', '')})"
    return text.strip("\n")


def answer_text(row: Answer) -> str:
    """What the model said: the whole conversation after the prompt, or the one completion."""
    if row.messages and len(row.messages) > 1:
        return text_of(row.messages)
    return row.completion or text_of(row.messages)


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
