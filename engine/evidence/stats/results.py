"""Turns evaluation rows, as they are stored, into sides that can be compared.

One row is one attempt at one task (engine/records/lines/evaluation_row.py). The rows are compared
by `success` if every scored row has it, else by `reward`, else by `loss` (datasets without a
scorer).
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.core.files import read_lines
from engine.core.format import counted, percent, significant
from engine.core.split import prompt_key
from engine.evidence.stats.any_of_k import pass_at_each_k
from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.bootstrap import paired_bootstrap
from engine.evidence.stats.inference import NEGLIGIBLE, Interval, Side, wilson
from engine.home.run_dir import RunDir
from engine.records.lines.answer import Answer
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.line_record import Line
from envs.json_types import ChatMessage

Measure = Literal["success", "reward", "loss"]
HIGHER_IS_BETTER: dict[Measure, bool] = {"success": True, "reward": True, "loss": False}
_MOST_METRICS = 8  # of an environment that get an interval: each takes a bootstrap
# The halves of a run's held-out tasks, as their rows name them (engine/home/halves.py).
VALIDATION, TEST = "select", "report"


def load_rows(path: Path) -> list[Line]:
    """Every complete line of a file as a JSON object. Returns [] if there is no file.

    This is for callers that write the rows again with all their keys. To only read rows, use
    `read_evaluation`, which returns records.
    """
    rows: list[Line] = []
    cursor = 0
    while True:
        # In parts, to bound the memory. At the end of the file the cursor does not move any more.
        new_rows, next_cursor = read_lines(path, cursor, max_bytes=4_000_000)
        rows += new_rows
        if next_cursor <= cursor:
            return rows
        cursor = next_cursor


def damaged_answers_warning(run: RunDir, steps: Iterable[int] | None = None) -> list[str]:
    """A warning that lines of the run's stored answers cannot be read, as a list of one. Returns []
    if all can be read.

    Only the evaluations at `steps` are read; all evaluations if it is None.
    """
    if steps is None:
        files = sorted(run.evals_dir.glob("*.jsonl"))
    else:
        files = [run.evals(step) for step in sorted(set(steps))]
    line_count = sum(EvaluationRow.read_file(file).skipped for file in files)
    if not line_count:
        return []
    return [
        f"{counted(line_count, 'damaged line')} among the stored answers of {run.id} could not be "
        "read: those answers count for nothing here"
    ]


def in_half(rows: Iterable[EvaluationRow], half: str) -> list[EvaluationRow]:
    """The rows of one half of the held-out tasks, `VALIDATION` or `TEST`."""
    return [row for row in rows if row.half == half]


def measure_of(*row_sets: Sequence[EvaluationRow]) -> Measure | None:
    """The measure that all these rows have in common; rows whose scoring failed are ignored.

    Success if every row reports it, else reward, else loss. Returns None if no row was scored, or
    if the rows have no measure in common.
    """
    rows = [row for rows in row_sets for row in rows if not row.error]
    if not rows:
        return None
    if all(row.success is not None for row in rows):
        return "success"
    all_have_reward = all(row.reward is not None for row in rows)
    all_have_loss = all(row.loss is not None for row in rows)
    # Rows of a dataset without a scorer may have a meaningless reward of 0 beside their loss.
    reward_means_nothing = all_have_loss and all(row.reward == 0 for row in rows)
    if all_have_reward and not reward_means_nothing:
        return "reward"
    return "loss" if all_have_loss else None


def value_of(row: EvaluationRow, measure: Measure) -> float | None:
    """The value of one row by a measure; success is 0 or 1.

    Returns None if the row's scoring failed, or if it lacks that measure.
    """
    if row.error:
        return None
    values = {"success": row.success, "reward": row.reward, "loss": row.loss}
    value = values[measure]
    return None if value is None else float(value)


def with_one_id_per_prompt(*row_sets: Iterable[EvaluationRow]) -> list[list[EvaluationRow]]:
    """The same rows, with one common task id for all tasks that have the same prompt.

    Such tasks ask one question, so their answers count as several attempts at one task. The common
    id is the smallest of their ids. Returns one list per argument, in the same order.
    """
    row_lists = [list(rows) for rows in row_sets]
    all_rows = list(itertools.chain.from_iterable(row_lists))
    # If the environment also writes later messages, tasks with the same prompt may differ in those,
    # so every task keeps its id.
    if any(_has_messages_of_environment(row) for row in all_rows):
        return row_lists
    common_ids = _common_ids(all_rows)
    if not common_ids:
        return row_lists

    def with_common_id(row: EvaluationRow) -> EvaluationRow:
        """A copy of the row with the common id of its task, if the task has one."""
        return row.model_copy(update={"task": common_ids.get(row.task, row.task)})

    return [[with_common_id(row) for row in rows] for rows in row_lists]


def _common_ids(rows: Sequence[EvaluationRow]) -> dict[str, str]:
    """The smallest id of all tasks with the same prompt, for each task id.

    Returns {} if every task has its own prompt. Tasks whose rows record no prompt are left out.
    """
    prompt_of_task: dict[str, str] = {}
    for row in rows:
        if row.prompt and row.task not in prompt_of_task:
            prompt_of_task[row.task] = prompt_key(row.prompt)
    smallest_id: dict[str, str] = {}  # prompt -> the smallest id of its tasks
    for task in sorted(prompt_of_task):  # the smallest id of a prompt comes first
        smallest_id.setdefault(prompt_of_task[task], task)
    if len(smallest_id) == len(prompt_of_task):
        return {}
    return {task: smallest_id[prompt] for task, prompt in prompt_of_task.items()}


def _has_messages_of_environment(row: EvaluationRow) -> bool:
    """Whether the environment wrote messages after the prompt, such as results of tools: messages
    of another role than assistant."""
    return any(message.get("role") != "assistant" for message in row.messages or ())


def side(
    rows: Iterable[EvaluationRow], measure: Measure, value_of_failure: float | None = None
) -> Side:
    """One model's values by task, for a comparison.

    An attempt whose scoring failed gets `value_of_failure`; if that is None (the default), the
    attempt is left out of the values and counted in `errors`.
    """
    values: dict[str, list[float]] = {}
    groups: dict[str, str] = {}
    attempts = errors = 0
    for row in rows:
        attempts += 1
        if row.task_group:
            groups.setdefault(row.task, row.task_group)
        value = value_of(row, measure)
        if value is None:
            value = value_of_failure
        if value is None:
            errors += 1
        else:
            values.setdefault(row.task, []).append(value)
    return Side(values, attempts, errors, groups)


@dataclass(frozen=True)
class Level:
    """How well one model does: its mean over tasks with a 95 % interval.

    Attributes:
        measure: what the value is.
        value, low, high: None if no task was scored.
        tasks: how many tasks have at least one scored attempt.
        groups: how many groups the tasks form; 0 if all tasks are independent.
        attempts: how many attempts there were; the scoring of `errors` of them failed.
        value_with_errors: the mean over attempts with failed scorings counted as not solved; None
            for a loss, or if there is no value.
        successes: the success of each attempt, for pass@k; None for a reward or a loss.
    """

    measure: Measure
    value: float | None
    low: float | None
    high: float | None
    tasks: int
    attempts: int
    errors: int
    value_with_errors: float | None
    successes: Side | None = None
    groups: int = 0

    @property
    def rounded_value(self) -> float | None:
        """The mean, rounded for display; None if there is none."""
        return rounded(self.value)

    @property
    def interval(self) -> list[float | None]:
        """The low and the high end, rounded for display; both are None if there is no value."""
        return [rounded(self.low), rounded(self.high)]

    def to_json(self) -> dict[str, object]:
        """The numbers as a JSON object: value, interval, counts of tasks, attempts and errors.

        "pass_at_k" is included only if tasks were asked several times. The measure is not included.
        """
        body: dict[str, object] = {
            "value": self.rounded_value,
            "interval": self.interval,
            "tasks": self.tasks,
            "attempts": self.attempts,
            "errors": self.errors,
            "value_with_errors": rounded(self.value_with_errors),
        }
        if self.groups:
            body["groups"] = self.groups
        # Computed only when it is shown, because each k takes a bootstrap.
        pass_rates = pass_at_each_k(self.successes) if self.successes is not None else []
        if pass_rates:  # empty if each task was tried once
            body["pass_at_k"] = [pass_rate.to_json() for pass_rate in pass_rates]
        return body


def level(rows: Sequence[EvaluationRow], measure: Measure) -> Level:
    """How well one model does on these rows by `measure`: mean over tasks and 95 % interval.

    Tasks with the same prompt count as one. The interval is Wilson's if each task is either solved
    or not, else a bootstrap over tasks (over groups, if tasks have them). The numbers are None if
    nothing was scored.
    """
    # One list of rows is passed, so a list of one list comes back.
    (rows_by_prompt,) = with_one_id_per_prompt(rows)
    results = side(rows_by_prompt, measure)  # the values of each task
    means = {task: math.fsum(values) / len(values) for task, values in results.values.items()}
    level_without_value = Level(
        measure,
        value=None,
        low=None,
        high=None,
        tasks=len(means),
        attempts=results.attempts,
        errors=results.errors,  # attempts whose scoring failed
        value_with_errors=None,
    )
    if not means:
        return level_without_value
    clusters = Clusters.from_groups(means, results.groups)
    interval = _interval_of_means(means, measure, clusters)
    return replace(
        level_without_value,
        value=math.fsum(means.values()) / len(means),
        low=interval.low,
        high=interval.high,
        value_with_errors=None if measure == "loss" else _value_with_errors(results),
        successes=results if measure == "success" else None,
        groups=clusters.count if clusters else 0,
    )


def by_metric(rows: Iterable[EvaluationRow], metric: str) -> list[EvaluationRow]:
    """The rows with the environment's metric of this name in place of the reward, and without
    success and loss, so that a comparison of them compares the metric.

    A row without the metric is left out: a metric that only some tasks have is absent on the
    others. A row whose scoring failed stays, because it might have had the metric.
    """
    judged_rows = []
    for row in rows:
        metrics = row.metrics or {}
        if row.error or metric in metrics:
            measures = {"reward": metrics.get(metric), "success": None, "loss": None}
            judged_rows.append(row.model_copy(update=measures))
    return judged_rows


def levels_of_metrics(rows: Sequence[EvaluationRow]) -> dict[str, Level]:
    """The level of each of the environment's own metrics, by name; only the first
    `_MOST_METRICS`."""
    names = sorted({name for row in rows for name in row.metrics or {}})
    return {name: level(by_metric(rows, name), "reward") for name in names[:_MOST_METRICS]}


def _interval_of_means(
    means: Mapping[str, float], measure: Measure, clusters: Clusters | None
) -> Interval:
    """The 95 % interval of the mean over tasks; `means` maps a task id to its mean value.

    The interval is Wilson's if each task is either solved or not, else a bootstrap over tasks. With
    `clusters`, groups are counted instead of tasks.
    """
    all_certain = all(mean in (0.0, 1.0) for mean in means.values())
    if measure == "success" and all_certain:
        solved_count = round(math.fsum(means.values()))  # each mean is 0 or 1
        effect = clusters.design_effect(means) if clusters else 1.0
        return wilson(solved_count / effect, len(means) / effect)
    values = {task: [mean] for task, mean in means.items()}
    bootstrap = paired_bootstrap(values, clusters=clusters)
    return Interval(bootstrap.low, bootstrap.high)


def _value_with_errors(results: Side) -> float:
    """The mean over all attempts; an attempt whose scoring failed has the value 0."""
    total = math.fsum(itertools.chain.from_iterable(results.values.values()))
    return total / results.attempts


def best_step(run_dir: RunDir, steps: Iterable[int] | None = None) -> int | None:
    """The step whose checkpoint did best on the half of the held-out tasks that chooses the
    checkpoint.

    `steps` are the steps to choose from; None means every evaluated step. Step 0 (before training)
    is never chosen. Returns None if no step was evaluated on that half.
    """
    candidates = run_dir.eval_steps() if steps is None else steps
    scores: dict[int, tuple[float, float]] = {}
    for step in candidates:
        if step > 0:
            score = selection_score(in_half(read_evaluation(run_dir.evals(step)), VALIDATION))
            if score is not None:
                scores[step] = score
    if not scores:
        return None
    # Of equal scores take the earlier step: its model has drifted less from the start.
    best_score = max(scores.values())
    return min(step for step, score in scores.items() if score == best_score)


def selection_score(rows: Sequence[EvaluationRow]) -> tuple[float, float] | None:
    """The pair of numbers by which checkpoints are ranked; the larger pair is better.

    The first number is the mean success (else the mean reward, else the negated mean loss). The
    second is the mean reward, which breaks ties; 0 for a loss. Returns None if nothing was scored.
    """
    measure = measure_of(rows)
    if measure is None:
        return None
    if measure == "loss":
        return _negated_loss(rows), 0.0
    # A failed scoring counts as 0, so that a model gains nothing by breaking the scorer.
    mean_value = math.fsum(value_of(row, measure) or 0.0 for row in rows) / len(rows)
    mean_reward = math.fsum(row.reward or 0.0 for row in rows) / len(rows)
    return mean_value, mean_reward


def _negated_loss(rows: Sequence[EvaluationRow]) -> float:
    """Minus the mean loss of the rows that have one. At least one row must have a loss."""
    losses = [value_of(row, "loss") for row in rows]
    known_losses = [loss for loss in losses if loss is not None]
    return -math.fsum(known_losses) / len(known_losses)


def text_of(messages: str | Sequence[ChatMessage] | None) -> str:
    """Messages as readable text, such as "[user] 2 + 2?\\n[assistant] 4".

    A single message comes without its role. A text is returned as it is; "" for None or no
    messages.
    """
    if isinstance(messages, str):
        return messages
    if not messages:
        return ""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n".join(f"[{turn.get('role', '?')}] {content_of(turn)}" for turn in messages)


def content_of(message: ChatMessage) -> str:
    """The text of one message, followed by a line for each of its tool calls.

    Such a line reads "→ search({"query": "rain"})"; "?" stands for a missing name.
    """
    content = message.get("content")
    text = content if isinstance(content, str) else _joined_parts(content)
    for call in message.get("tool_calls") or []:
        # Name and arguments stand under "function", or in the call itself.
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name, arguments = function.get("name", "?"), function.get("arguments", "")
        if not isinstance(arguments, str):  # an object, not yet as JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        text += f"\n→ {name}({arguments})"
    return text.strip("\n")


def answer_text(row: Answer) -> str:
    """What the model answered, as text: its completion, or, after several turns, the messages of
    the whole conversation. A row without a completion has its one message instead.

    `row.messages` holds what came after the prompt.
    """
    if row.messages and len(row.messages) > 1:
        return text_of(row.messages)
    return row.completion or text_of(row.messages)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """`value` rounded for display, with `digits` digits after the point. Returns None for None,
    infinity and NaN.

    A value below 1 that would be rounded to 1 gets more digits, so that a rate with errors never
    looks like 100 %.
    """
    if value is None or not math.isfinite(value):
        return None
    while round(value, digits) == 1.0 and 0.0 < value < 1.0 - NEGLIGIBLE:
        digits += 1
    return round(value, digits)


def rounded_ends(low: float | None, high: float | None) -> list[float | None]:
    """The ends of an interval, rounded for display; None for an unknown end.

    An end that is not 0 is never rounded to 0, because the reader must see whether the interval
    contains 0.
    """
    ends: list[float | None] = []
    for end in (low, high):
        rounded_end = rounded(end)
        if rounded_end == 0 and end is not None and abs(end) > NEGLIGIBLE:
            rounded_end = float(f"{end:.1g}")  # the first digit that is not 0
        ends.append(rounded_end)
    return ends


def _joined_parts(content: Any) -> str:
    """The text of a message's content that is not a string: the joined texts of a list of parts, ""
    for None, and str(content) for anything else."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def show(value: float | None, measure: Measure, digits: int = 1) -> str:
    """A level as text: success in percent with `digits` decimals, such as "41.2 %", reward and loss
    with three digits, such as "0.412", None as "?"."""
    if value is None:
        return "?"
    return percent(value, digits=digits) if measure == "success" else significant(value)


def show_change(value: float | None, measure: Measure) -> str:
    """A difference as text, with its sign; "?" for None.

    Success in points without the unit, such as "+3.1"; reward and loss with three digits, such as
    "-0.042". A difference up to `NEGLIGIBLE`, which is a rounding error, is shown as 0; a larger
    one never is.
    """
    if value is None:
        return "?"
    is_negligible = abs(value) <= NEGLIGIBLE
    if measure != "success":
        return f"{0.0 if is_negligible else value:+.3g}"
    if is_negligible:
        return "+0.0"
    if abs(value) < 0.0005:  # below 0.05 points one decimal would show 0
        return f"{100 * value:+.1g}"
    sign = "-" if value < 0 else "+"
    return sign + percent(abs(value), unit="")
