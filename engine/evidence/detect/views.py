"""What detectors read: the metrics of a run and, per step, what its answers looked like.

A `View` condenses the rollouts of one step to a few numbers, so that a run can be watched step by
step at little cost, and a finished one be read at once.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.results import rounded
from engine.evidence.stats.text_metrics import (
    alike_share,
    is_wrapped,
    repeated_share,
    without_case_and_blanks,
)
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.regression import KeptSkills
from engine.records.known_settings import KnownSettings
from engine.records.lines.answer import Answer
from engine.records.lines.curves import number
from engine.records.lines.trajectory_record import TrajectoryRecord

AT_START = 3  # steps at the beginning of a run whose mean is the level it started from
Line = Mapping[str, Any]  # one line of metrics.jsonl: metric name -> value

# What the name of an environment's metric says about it: readable form, a judge, a hard check.
_FORM = re.compile(r"(?:^|[^a-z])(?:pars|format|well_?formed|schema|extract)", re.I)
_JUDGE = re.compile(r"judge|rubric|llm|grader|quality|style|helpful|preference", re.I)
_CHECK = re.compile(r"exact|correct|check|test|right|solved|accura", re.I)
# Names of counts and times: they do not say how good an answer is.
_COUNTED = re.compile(r"err|fail|miss|time|latency|second|cost|token|penalt|length|count", re.I)
_THINK_END = "</think>"


@dataclass(frozen=True)
class View:
    """The answers of one step in numbers.

    Shares and means about the reward are over the scored answers, all others over all answers. None
    means that there was nothing to measure.

    Attributes:
        n: answers.
        solved: share with success; None where the environment never reports it.
        wrong_reward, right_reward: mean reward of the answers without and with success.
        length: mean tokens of an answer.
        errors: share whose scoring failed.
        cut: share that ended by `max_tokens` or `max_turns`.
        out_of_turns: share that ended by `max_turns` alone.
        cut_reward, whole_reward: mean reward of the answers that are cut, and of the others.
        cut_solved: share with success among the cut answers.
        distinct: how different the texts of a group are, mean over groups: 1 when all differ, 0
            when all are equal.
        repeated: mean share of repeated four-grams.
        wrapped: share in code fences, quotes or courtesy phrases.
        wrapped_reward, bare_reward: mean reward of those, and of the others.
        form: mean of the metric that says whether an answer could be read; `form_name` its name.
        thinking: share with a think block.
        think: the median size of a think block, as a part of `max_tokens`.
        judge_gap: share where a judge is pleased and the hard check fails.
        alike: share of neighbouring tasks with the same answer.
    """

    step: int
    n: int
    solved: float | None = None
    reward: float | None = None
    wrong_reward: float | None = None
    right_reward: float | None = None
    length: float = 0.0
    errors: float = 0.0
    cut: float = 0.0
    out_of_turns: float = 0.0
    cut_reward: float | None = None
    cut_solved: float | None = None
    whole_reward: float | None = None
    distinct: float | None = None
    repeated: float = 0.0
    wrapped: float = 0.0
    wrapped_reward: float | None = None
    bare_reward: float | None = None
    form: float | None = None
    form_name: str = ""
    thinking: float = 0.0
    think: float | None = None
    judge_gap: float | None = None
    alike: float | None = None


@dataclass(frozen=True)
class TrainingRows:
    """Of an SFT run: how many rows were trained on, were cut at `max_length`, and were dropped."""

    rows: int = 0
    truncated: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Failure:
    """How a run failed: the kind (one of engine/core/errors.py), its message and its evidence."""

    kind: str
    message: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class StartComparison:
    """A later evaluation compared with step 0, task by task.

    Attributes:
        step: of the later evaluation.
        evaluations: how many evaluations are tested in all; each is a chance to be wrong.
        reward_before, reward_after: mean reward, None where nothing was scored.
    """

    comparison: Comparison
    step: int
    evaluations: int
    reward_before: float | None = None
    reward_after: float | None = None

    @property
    def measure(self) -> str:
        return self.comparison.measure or ""

    @property
    def before(self) -> float | None:
        return rounded(self.comparison.outcome.before)

    @property
    def after(self) -> float | None:
        return rounded(self.comparison.outcome.after)


@dataclass(frozen=True)
class Facts:
    """One run as detectors see it.

    Attributes:
        algorithm: "sft", "grpo" or "evaluate".
        settings: every setting by name, {} where the config is gone.
        lines: the metrics, one line per step in order, step 0 included.
        views: the answers of the training steps in order, not necessarily of all steps; one view
            for an evaluation.
        exam: the last held-out answers, None without any.
        exam_tasks: tasks behind each `heldout_` value, 0 when not known.
        rows: of SFT, what became of its training rows.
        failure: of a run that failed, else None.
        comparison: what the verdict of a finished run rests on, None before it is done.
        go_on_with: the model that the verdict recommends to continue from, "" if it names none.
        rescored: the result of scoring answers again in a fresh env process, {} if none were.
        exam_start: the held-out answers of step 0, None without any.
        against_start: the last evaluation compared with step 0, None before there is one.
        gold_tokens: length in tokens that nearly all reference answers stay below; None when not
            known.
        heldout_rows: rows of the split that is evaluated; None when not known.
        kept: what became of earlier skills, None where they were not measured.
    """

    algorithm: str
    settings: KnownSettings
    lines: Sequence[Line] = ()
    views: Sequence[View] = ()
    exam: View | None = None
    exam_tasks: int = 0
    rows: TrainingRows = TrainingRows()
    failure: Failure | None = None
    comparison: Comparison | None = None
    go_on_with: str = ""
    rescored: Mapping[str, Any] = field(default_factory=dict)
    exam_start: View | None = None
    against_start: StartComparison | None = None
    gold_tokens: float | None = None
    heldout_rows: int | None = None
    kept: KeptSkills | None = None

    @property
    def failed(self) -> str:
        """The kind of failure, "" for a run that did not fail."""
        return self.failure.kind if self.failure else ""

    @property
    def early(self) -> bool:
        """Whether less than half of the planned steps are done, and the run has not failed."""
        last_step = self.lines[-1]["step"] if self.lines else 0
        planned_steps = self.settings.steps
        return (
            self.failure is None
            and isinstance(planned_steps, int)
            and last_step < planned_steps / 2
        )

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) for every step that has a number for this metric, step 0 included."""
        points = ((line.get("step"), number(line.get(name))) for line in self.lines)
        return [
            (int(step), value) for step, value in points if step is not None and value is not None
        ]

    def series(self, name: str) -> list[float]:
        """The values of a metric at the training steps, in order; step 0 is left out."""
        return [value for step, value in self.curve(name) if step > 0]

    def of_views(self, name: str) -> list[float]:
        """One attribute of all views, in order; None values are left out."""
        values = (getattr(view, name) for view in self.views)
        return [value for value in values if value is not None]

    def recent(self, name: str) -> list[float]:
        """The last `WINDOW` values of a metric, empty while there are fewer than `LEAST`."""
        return window(self.series(name))

    def recent_views(self, name: str) -> list[float]:
        """The last `WINDOW` values of a view attribute, empty while there are fewer than `LEAST`.

        An evaluation has one view only, so all of its values are returned.
        """
        values = self.of_views(name)
        return values if self.algorithm == "evaluate" else window(values)


def window(values: Sequence[float]) -> list[float]:
    """The last `WINDOW` values, empty where there are fewer than `LEAST`."""
    return list(values[-limits.WINDOW :]) if len(values) >= limits.LEAST else []


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def mean_or_none(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


@dataclass(frozen=True)
class Trend:
    """The means of an early and a late part of a series, and how many standard errors (`z`) lie
    between them."""

    first: float
    last: float
    z: float

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def rose(self) -> bool:
        return self.z >= limits.TREND_Z

    @property
    def fell(self) -> bool:
        return self.z <= -limits.TREND_Z


def trend(values: Sequence[float]) -> Trend | None:
    """The last third of a series compared with its first third.

    None where the series has fewer than `TREND_STEPS` values.
    """
    if len(values) < limits.TREND_STEPS:
        return None
    third = len(values) // 3
    return change_between(values[:third], values[-third:])


def change_between(early: Sequence[float], late: Sequence[float]) -> Trend:
    """The change from some values to as many later ones; each side needs at least two.

    Where neither side varies, `z` is infinite with the sign of the change, or 0 if nothing changed.
    """
    change = mean(late) - mean(early)
    noise = math.sqrt((statistics.variance(early) + statistics.variance(late)) / len(early))
    if noise == 0.0:
        return Trend(mean(early), mean(late), math.copysign(math.inf, change) if change else 0.0)
    return Trend(mean(early), mean(late), change / noise)


def stuck_at(values: Sequence[float], limit: float) -> float | None:
    """The recent level of a bad share, if it is above `limit` and training is not reducing it.

    None in these cases:
        the series is too short;
        the level is not above `limit`;
        the level clearly falls, over the whole run or recently, and is below `TOO_MUCH_TO_WAIT`.
    """
    recent = window(values)
    if not recent:
        return None
    level = mean(recent)
    if level <= limit:
        return None
    mean_at_start = mean(values[: limits.WINDOW])
    older = mean(recent[: len(recent) // 2])
    newer = mean(recent[len(recent) // 2 :])
    fell_over_run = level <= limits.MENDING * mean_at_start
    falls_now = newer <= limits.MENDING * older
    if (fell_over_run or falls_now) and level <= limits.TOO_MUCH_TO_WAIT:
        return None
    return level


# --- from rollouts ----------------------------------------------------------------------------


def view_of(step: int, rows: Sequence[Answer], settings: KnownSettings) -> View | None:
    """The view of one step's rollouts or of one evaluation's answers; None where `rows` are empty.

    `settings` are those of the run.
    """
    if not rows:
        return None
    scored = [row for row in rows if not row.error]
    cut_rows = [row for row in rows if row.cut]
    wrapped_rows = [row for row in scored if is_wrapped(row.completion or "")]
    bare_rows = [row for row in scored if not is_wrapped(row.completion or "")]
    form_name, form = _form_metric(scored)
    think_shares = [share for row in rows if (share := _think_share(row, settings)) is not None]
    return View(
        step=step,
        n=len(rows),
        solved=_success_share(scored),
        reward=_mean_reward(scored),
        wrong_reward=_mean_reward([row for row in scored if row.success is False]),
        right_reward=_mean_reward([row for row in scored if row.success is True]),
        length=mean([float(row.tokens) for row in rows]),
        errors=1 - len(scored) / len(rows),
        cut=len(cut_rows) / len(rows),
        out_of_turns=sum(row.stop_reason == "max_turns" for row in rows) / len(rows),
        cut_reward=_mean_reward([row for row in cut_rows if not row.error]),
        cut_solved=_success_share(cut_rows),
        whole_reward=_mean_reward([row for row in scored if not row.cut]),
        distinct=_distinct(rows),
        repeated=mean([repeated_share(_all_text(row)) for row in rows]),
        wrapped=len(wrapped_rows) / len(scored) if scored else 0.0,
        wrapped_reward=_mean_reward(wrapped_rows),
        bare_reward=_mean_reward(bare_rows),
        form=form,
        form_name=form_name,
        thinking=len(think_shares) / len(rows),
        think=statistics.median(think_shares) if think_shares else None,
        judge_gap=_judge_gap(scored),
        alike=alike_share(_one_per_task(rows)),
    )


def is_form_metric(name: str) -> bool:
    """Whether a metric's name says that it measures if an answer could be read."""
    return _FORM.search(name) is not None and not _COUNTED.search(name)


def is_pleased_and_wrong(row: Answer) -> bool | None:
    """Whether a judge's metric is high and a hard check of the same answer is low.

    Judges and checks are told by the names of the metrics; success counts as a hard check too. None
    where the answer has no judge or no check, or where a judge's metric is above 1, because then it
    is not known what is high.
    """
    metrics = {
        name: value for name, value in (row.metrics or {}).items() if not _COUNTED.search(name)
    }
    judge_names = {name for name in metrics if _JUDGE.search(name)}
    judge_scores = [metrics[name] for name in judge_names]
    if not judge_scores or max(judge_scores) > 1:
        return None
    check_scores = [metrics[name] for name in metrics.keys() - judge_names if _CHECK.search(name)]
    if row.success is not None:
        check_scores.append(float(row.success))
    if not check_scores:
        return None
    return max(judge_scores) >= limits.JUDGE_HIGH and min(check_scores) <= limits.CHECK_LOW


def _all_text(row: Answer) -> str:
    """Everything the model wrote in an answer, its reasoning included."""
    turns = [turn for turn in row.messages or () if turn.get("role") == "assistant"]
    parts = [
        str(turn.get(name) or "") for turn in turns for name in ("reasoning_content", "content")
    ]
    return "\n".join(part for part in parts if part) or row.completion or ""


def _success_share(rows: Sequence[Answer]) -> float | None:
    """The share with success, None where the environment never reports it."""
    return mean_or_none([float(row.success) for row in rows if row.success is not None])


def _mean_reward(rows: Sequence[Answer]) -> float | None:
    return mean_or_none([row.reward for row in rows if row.reward is not None])


def _form_metric(rows: Sequence[Answer]) -> tuple[str, float | None]:
    """(name, mean) of the metric that says whether answers could be read; ("", None) without one.

    Of several such metrics it is the first by name. Metrics with values above 1 are not shares and
    are skipped.
    """
    for name in sorted({name for row in rows for name in row.metrics or {}}):
        if is_form_metric(name):
            values = [row.metrics[name] for row in rows if row.metrics and name in row.metrics]
            if values and max(values) <= 1:
                return name, mean(values)
    return "", None


def _groups(rows: Sequence[Answer]) -> list[list[Answer]]:
    """The answers by group; answers of an evaluation, which have no group, by task."""
    groups: dict[int | str, list[Answer]] = {}
    for row in rows:
        key = row.group if isinstance(row, TrajectoryRecord) else row.task
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _distinct(rows: Sequence[Answer]) -> float | None:
    """How different the texts of a group are, as the mean over groups.

    1 when all texts differ, 0 when all are equal; case and blanks make no difference. None where no
    group has two answers.
    """
    shares = [
        (len({without_case_and_blanks(_all_text(row)) for row in group}) - 1) / (len(group) - 1)
        for group in _groups(rows)
        if len(group) > 1
    ]
    return mean_or_none(shares)


def _one_per_task(rows: Sequence[Answer]) -> list[str]:
    """The text of one answer per task: the middle one, so that sorted groups do not bias it."""
    by_task: dict[str, list[Answer]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return [_all_text(answers[len(answers) // 2]) for answers in by_task.values()]


def _think_share(row: Answer, settings: KnownSettings) -> float | None:
    """The size of the think block as a part of the tokens that an answer may take.

    The size is estimated from characters. With several turns, an answer may take several times
    `max_tokens`. None without a think block, or where `max_tokens` is not known.
    """
    text = row.completion or ""
    thinking = ""
    last_message = row.messages[-1] if row.messages else {}
    if last_message.get("reasoning_content"):
        thinking = str(last_message["reasoning_content"])
    elif "<think>" in text or (settings.thinking and _THINK_END not in text):
        thinking, text = text, ""  # the block was never closed: the whole text is thinking
    budget = number(settings.max_tokens) or 0.0
    if not thinking or budget <= 0:
        return None
    turns = max(1, row.turns) if isinstance(row, TrajectoryRecord) else 1
    # The tokens of the answer, times the share of its characters that are thinking.
    return row.tokens * len(thinking) / max(1, len(thinking) + len(text)) / (budget * turns)


def _judge_gap(rows: Sequence[Answer]) -> float | None:
    """Of the answers that have a judge and a hard check: the share where the first is pleased and
    the second fails; None without such answers."""
    gaps = [gap for row in rows if (gap := is_pleased_and_wrong(row)) is not None]
    return mean_or_none([float(gap) for gap in gaps])
