"""What detectors read: the metrics of a run and, per step, what its answers looked like.

A `View` condenses the rollouts of one step to a few numbers, so that a run can be watched step by
step at no cost worth naming and a finished one be read at once.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.results import rounded
from engine.evidence.stats.text_metrics import alike_share, plain, repeated_share, wrapped
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.regression import KeptSkills
from engine.records.lines.answer import Answer
from engine.records.lines.curves import number
from engine.records.lines.trajectory_record import TrajectoryRecord

Line = Mapping[str, Any]  # of metrics, by name

_FORM = re.compile(r"(?:^|[^a-z])(?:pars|format|well_?formed|schema|extract)", re.I)
_JUDGE = re.compile(r"judge|rubric|llm|grader|quality|style|helpful|preference", re.I)
_CHECK = re.compile(r"exact|correct|check|test|right|solved|accura", re.I)
# What is counted or timed about a thing is not how good it is.
_COUNTED = re.compile(r"err|fail|miss|time|latency|second|cost|token|penalt|length|count", re.I)
_THINK_END = "</think>"


@dataclass(frozen=True)
class View:
    """The answers of one step. Shares and means are over its scored answers where they are about
    the reward, over all of them elsewhere; None where there was nothing to measure.

    Attributes:
        solved: share with success; None where the environment never says.
        wrong_reward, right_reward: pay of the answers without and with success.
        cut, out_of_turns: share that ended by `max_tokens`, and by `max_turns` among them;
            `cut_solved` is how many of the cut ones are right all the same.
        distinct: different texts of a group as a part of its size, mean over groups.
        repeated: mean share of repeated four-grams.
        wrapped: share in fences, quotes or courtesy; `wrapped_reward`, `bare_reward` their pay.
        form: mean of the metric that tells whether an answer could be read; `form_name` its name.
        thinking: share with a think block; `think`: the median one as a part of `max_tokens`.
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
    """Of SFT: how many rows were trained on, cut at `max_length` and dropped."""

    rows: int = 0
    truncated: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Failure:
    """How a run failed: a kind of engine/core/errors.py, and what it said of it."""

    kind: str
    message: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class StartComparison:
    """A later evaluation held against step 0, task by task.

    Attributes:
        step: of the later evaluation.
        evaluations: how many of them there are to look at in all; each is a chance to be wrong.
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
        lines: one per step in order, step 0 included.
        views: of training steps, in order, not necessarily all of them; of an evaluation one.
        exam: the last held-out answers.
        exam_tasks: tasks behind each `heldout_` value, 0 when not known.
        rows: of SFT: what became of its training rows.
        failure: of a run that failed, else None.
        comparison: what the verdict of a finished run rests on, None before it is done.
        go_on_with: the model that verdict says to go on with, else "".
        rescored: what a fresh env process said of its answers, {} when none was asked.
        exam_start: the held-out answers of step 0.
        against_start: the last evaluation against step 0, None before there is one.
        gold_tokens: what nearly all reference answers take at most.
        heldout_rows: rows of the split that is asked; None when not known.
        kept: what became of earlier skills, None where none were asked.
    """

    algorithm: str
    settings: Mapping[str, Any]
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
        """The kind of failure, "" when the run did not fail."""
        return self.failure.kind if self.failure else ""

    @property
    def early(self) -> bool:
        """Whether less than half of the steps are done and the run may still do them."""
        last, steps = (self.lines[-1]["step"] if self.lines else 0), self.settings.get("steps")
        return self.failure is None and isinstance(steps, int) and last < steps / 2

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that measured it, step 0 included."""
        points = ((line.get("step"), number(line.get(name))) for line in self.lines)
        return [
            (int(step), value) for step, value in points if step is not None and value is not None
        ]

    def series(self, name: str) -> list[float]:
        """The values of the training steps, in order."""
        return [value for step, value in self.curve(name) if step > 0]

    def of_views(self, name: str) -> list[float]:
        """A number of the views, those without it left out."""
        values = (getattr(view, name) for view in self.views)
        return [value for value in values if value is not None]

    def recent(self, name: str) -> list[float]:
        """The last window of a metric, empty while there are too few steps."""
        return window(self.series(name))

    def recent_views(self, name: str) -> list[float]:
        """The same of the views; one view is enough where a run has only one."""
        values = self.of_views(name)
        return values if self.algorithm == "evaluate" else window(values)


def window(values: Sequence[float]) -> list[float]:
    """The last `WINDOW` values, empty below `LEAST`."""
    return list(values[-limits.WINDOW :]) if len(values) >= limits.LEAST else []


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_or_none(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


@dataclass(frozen=True)
class Trend:
    """First and last third of a series, and how many standard errors lie between them."""

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
    """None for series too short to have one."""
    if len(values) < limits.TREND_STEPS:
        return None
    third = len(values) // 3
    return moved(values[:third], values[-third:])


def moved(first: Sequence[float], last: Sequence[float]) -> Trend:
    """From the mean of some values to that of as many later ones, two at least."""
    change = mean(last) - mean(first)
    noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / len(first))
    if noise == 0.0:
        return Trend(mean(first), mean(last), math.copysign(math.inf, change) if change else 0.0)
    return Trend(mean(first), mean(last), change / noise)


def stuck_at(values: Sequence[float], limit: float) -> float | None:
    """The recent level of a trouble above `limit` that training is not mending by itself.

    None below the limit, in too short a series, and where the level falls clearly.
    """
    recent = window(values)
    if not recent or (level := mean(recent)) <= limit:
        return None
    first = mean(values[: limits.WINDOW])
    halves = mean(recent[: len(recent) // 2]), mean(recent[len(recent) // 2 :])
    over_run = level <= limits.MENDING * first
    just_now = halves[1] <= limits.MENDING * halves[0]
    if (over_run or just_now) and level <= limits.TOO_MUCH_TO_WAIT:
        return None
    return level


# --- from rollouts ----------------------------------------------------------------------------


def view_of(step: int, rows: Sequence[Answer], settings: Mapping[str, Any]) -> View | None:
    """The rollouts of one step, or the answers of one evaluation, as a view."""
    if not rows:
        return None
    scored = [row for row in rows if not row.error]
    cut = [row for row in rows if row.cut]
    in_wrap = [row for row in scored if wrapped(row.completion or "")]
    bare = [row for row in scored if not wrapped(row.completion or "")]
    form_name, form = _form(scored)
    thoughts = [share for row in rows if (share := _think_share(row, settings)) is not None]
    return View(
        step=step,
        n=len(rows),
        solved=_solved(scored),
        reward=_mean_reward(scored),
        wrong_reward=_mean_reward([row for row in scored if row.success is False]),
        right_reward=_mean_reward([row for row in scored if row.success is True]),
        length=mean([float(row.tokens) for row in rows]),
        errors=1 - len(scored) / len(rows),
        cut=len(cut) / len(rows),
        out_of_turns=sum(row.stop_reason == "max_turns" for row in rows) / len(rows),
        cut_reward=_mean_reward([row for row in cut if not row.error]),
        cut_solved=_solved(cut),
        whole_reward=_mean_reward([row for row in scored if not row.cut]),
        distinct=_distinct(rows),
        repeated=mean([repeated_share(_all_text(row)) for row in rows]),
        wrapped=len(in_wrap) / len(scored) if scored else 0.0,
        wrapped_reward=_mean_reward(in_wrap),
        bare_reward=_mean_reward(bare),
        form=form,
        form_name=form_name,
        thinking=len(thoughts) / len(rows),
        think=statistics.median(thoughts) if thoughts else None,
        judge_gap=_judge_gap(scored),
        alike=alike_share(_one_per_task(rows)),
    )


def is_form_metric(name: str) -> bool:
    """Whether a metric's name says that it tells if an answer could be read."""
    return _FORM.search(name) is not None and not _COUNTED.search(name)


def is_pleased_and_wrong(row: Answer) -> bool | None:
    """A judge's metric (0..1) high and a hard check low; None for a row without either."""
    metrics = {
        name: value for name, value in (row.metrics or {}).items() if not _COUNTED.search(name)
    }
    judges = {name for name in metrics if _JUDGE.search(name)}
    judged = [metrics[name] for name in judges]
    if not judged or max(judged) > 1:  # on another scale nobody knows what is high
        return None
    hard = [metrics[name] for name in metrics.keys() - judges if _CHECK.search(name)]
    if row.success is not None:
        hard.append(float(row.success))
    if not hard:
        return None
    return max(judged) >= limits.JUDGE_HIGH and min(hard) <= limits.CHECK_LOW


def _all_text(row: Answer) -> str:
    """Everything the model wrote, its thoughts too."""
    turns = [turn for turn in row.messages or () if turn.get("role") == "assistant"]
    parts = [
        str(turn.get(name) or "") for turn in turns for name in ("reasoning_content", "content")
    ]
    return "\n".join(part for part in parts if part) or row.completion or ""


def _solved(rows: Sequence[Answer]) -> float | None:
    """Share with success, None where the environment never says."""
    return mean_or_none([float(row.success) for row in rows if row.success is not None])


def _mean_reward(rows: Sequence[Answer]) -> float | None:
    return mean_or_none([row.reward for row in rows if row.reward is not None])


def _form(rows: Sequence[Answer]) -> tuple[str, float | None]:
    """The first metric by name that tells whether answers could be read, and its mean."""
    for name in sorted({name for row in rows for name in row.metrics or {}}):
        if is_form_metric(name):
            values = [row.metrics[name] for row in rows if row.metrics and name in row.metrics]
            if values and max(values) <= 1:
                return name, mean(values)
    return "", None


def _groups(rows: Sequence[Answer]) -> list[list[Answer]]:
    groups: dict[int | str, list[Answer]] = {}
    for row in rows:
        key = row.group if isinstance(row, TrajectoryRecord) else row.task
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _distinct(rows: Sequence[Answer]) -> float | None:
    """1 when all answers of every group differ, 0 when each group says one thing."""
    shares = [
        (len({plain(_all_text(row)) for row in group}) - 1) / (len(group) - 1)
        for group in _groups(rows)
        if len(group) > 1
    ]
    return mean_or_none(shares)


def _one_per_task(rows: Sequence[Answer]) -> list[str]:
    """One answer of every task; the middle member, so that no order of a group matters."""
    by_task: dict[str, list[Answer]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return [_all_text(answers[len(answers) // 2]) for answers in by_task.values()]


def _think_share(row: Answer, settings: Mapping[str, Any]) -> float | None:
    """The think block as a part of what an answer may take; None without one."""
    text, thought = row.completion or "", ""
    last = row.messages[-1] if row.messages else {}
    if last.get("reasoning_content"):
        thought = str(last["reasoning_content"])
    elif "<think>" in text or (settings.get("thinking") and _THINK_END not in text):
        thought, text = text, ""  # never closed: all of it is thought
    budget = number(settings.get("max_tokens")) or 0.0
    if not thought or budget <= 0:
        return None
    turns = max(1, row.turns) if isinstance(row, TrajectoryRecord) else 1
    return row.tokens * len(thought) / max(1, len(thought) + len(text)) / (budget * turns)


def _judge_gap(rows: Sequence[Answer]) -> float | None:
    gaps = [gap for row in rows if (gap := is_pleased_and_wrong(row)) is not None]
    return mean_or_none([float(gap) for gap in gaps])
