"""What detectors read: the metrics of a run, and its answers at each step in numbers.

A `View` condenses the rollouts of one step to a few numbers, so that a run can be watched step by
step at little cost, and a finished run can be judged from all its steps.
"""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.evidence.detect.findings import Finding
from engine.evidence.signal.kinds import unsolved_shares
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.results import rounded
from engine.evidence.stats.text_metrics import (
    alike_share,
    is_wrapped,
    repeated_share,
    without_case_and_blanks,
)
from engine.evidence.stats.trends import mean, mean_or_none, recent_mean, recent_values, trend
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.regression import KeptSkills
from engine.evidence.verdict.row_facts import RowFacts
from engine.evidence.verdict.side_notes import ConstantAnswer
from engine.models.reasoning import closes_any, opens_any
from engine.records.known_settings import KnownSettings
from engine.records.lines.answer import Answer
from engine.records.lines.curves import number
from engine.records.lines.trajectory_record import TrajectoryRecord

START_STEPS = 3  # steps at the beginning of a run whose mean is the level it started from
Line = Mapping[str, Any]  # one line of metrics.jsonl: metric name -> value

# Words in the name of an environment's metric that tell what it measures: whether the form of an
# answer could be parsed, what a judge says, whether a hard check passed.
_FORM = re.compile(r"(?:^|[^a-z])(?:pars|format|well_?formed|schema|extract)", re.I)
_JUDGE = re.compile(r"judge|rubric|llm|grader|quality|style|helpful|preference", re.I)
_CHECK = re.compile(r"exact|correct|check|test|right|solved|accura", re.I)
# Words in the names of counts and times, which do not say how good an answer is.
_COUNTED = re.compile(r"err|fail|miss|time|latency|second|cost|token|penalt|length|count", re.I)


@dataclass(frozen=True)
class View:
    """The answers of one step in numbers.

    None means that there was nothing to measure. An answer is scored unless its scoring failed.

    Attributes:
        answer_count: number of answers.
        solved_share: scored answers with success; None if the environment never reports it.
        reward: mean reward of the scored answers.
        wrong_reward, right_reward: mean reward of the scored answers without and with success.
        usual_reward, usual_share: the most common reward, and the share of scored answers earning
            it.
        mean_tokens: mean length of an answer in tokens.
        error_share: answers whose scoring failed.
        cut_share: answers that ended by `max_tokens` or `max_turns`.
        out_of_turns_share: answers that ended by `max_turns`.
        cut_reward, uncut_reward: mean reward of the scored answers that were cut, and of the other
            scored ones.
        cut_solved_share: answers with success among the cut ones.
        distinct_share: how different the texts of a group are, mean over groups: 1 when all differ,
            0 when all are equal.
        repeated_share: repeated four-grams of an answer, mean over answers.
        wrapped_share: scored answers in code fences, in quotes or behind courtesy phrases.
        wrapped_reward, unwrapped_reward: mean reward of the wrapped answers, and of the other
            scored ones.
        form_metric: name of the metric that says whether an answer could be parsed; "" without one.
        form_score: mean of that metric over the scored answers.
        thinking_share: answers with a think block.
        think_size: median size of a think block, as a part of `max_tokens`.
        judge_gap: scored answers that please a judge and fail the hard check, among those that have
            both.
        alike_share: neighbouring tasks with the same answer.
    """

    step: int
    answer_count: int
    solved_share: float | None = None
    reward: float | None = None
    wrong_reward: float | None = None
    right_reward: float | None = None
    usual_reward: float | None = None
    usual_share: float | None = None
    mean_tokens: float = 0.0
    error_share: float = 0.0
    cut_share: float = 0.0
    out_of_turns_share: float = 0.0
    cut_reward: float | None = None
    cut_solved_share: float | None = None
    uncut_reward: float | None = None
    distinct_share: float | None = None
    repeated_share: float = 0.0
    wrapped_share: float = 0.0
    wrapped_reward: float | None = None
    unwrapped_reward: float | None = None
    form_score: float | None = None
    form_metric: str = ""
    thinking_share: float = 0.0
    think_size: float | None = None
    judge_gap: float | None = None
    alike_share: float | None = None


@dataclass(frozen=True)
class TrainingRows:
    """How many rows an SFT run trained on, cut at `max_length`, and dropped."""

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
        reward_before, reward_after: mean reward; None if nothing was scored.
    """

    comparison: Comparison
    step: int
    evaluations: int
    reward_before: float | None = None
    reward_after: float | None = None

    @property
    def measure(self) -> str:
        """What is compared: "success", "reward" or "loss"; "" if nothing was."""
        return self.comparison.measure or ""

    @property
    def before(self) -> float | None:
        """The mean at step 0, rounded."""
        return rounded(self.comparison.outcome.before)

    @property
    def after(self) -> float | None:
        """The mean of the later evaluation, rounded."""
        return rounded(self.comparison.outcome.after)


@dataclass(frozen=True)
class Facts:
    """One run as detectors see it.

    Attributes:
        algorithm: a trainer's, or "evaluate".
        settings: every setting by name; all unknown if the config is missing.
        lines: the metrics, one line per step in order, step 0 included.
        views: the answers of the training steps in order, not necessarily of all steps; one view
            for an evaluation.
        exam: the last held-out answers, None without any.
        exam_tasks: tasks behind each `heldout_` value, 0 when not known.
        training_rows: for SFT, how many rows were used, cut and dropped.
        failure: how the run failed; None if it did not.
        comparison: what the verdict of a finished run rests on; None before it is done.
        constant: the one answer to all tasks that would do as well; None if the model beats it.
        recommended_model: the model to continue from, by the verdict; "" if it names none.
        rescoring: the result of scoring answers again in a fresh env process, {} if none were.
        exam_start: the held-out answers of step 0, None without any.
        against_start: the last evaluation compared with step 0, None before there is one.
        gold_tokens: tokens that nearly all reference answers stay below; None when not known.
        heldout_rows: rows of the split that is evaluated; None when not known.
        dev_tasks: whether dev tasks choose the checkpoint.
        kept_skills: what became of earlier skills; None if they were not measured.
        rows: facts about the task rows of the run.
        fall_of_the_start: the checkpoint that the run began with, compared with its own start.
        alerts: alerts that the run raised and that are not over.
    """

    algorithm: str
    settings: KnownSettings
    lines: Sequence[Line] = ()
    views: Sequence[View] = ()
    exam: View | None = None
    exam_tasks: int = 0
    training_rows: TrainingRows = TrainingRows()
    failure: Failure | None = None
    comparison: Comparison | None = None
    constant: ConstantAnswer | None = None
    recommended_model: str = ""
    rescoring: Mapping[str, Any] = field(default_factory=dict)
    exam_start: View | None = None
    against_start: StartComparison | None = None
    gold_tokens: float | None = None
    heldout_rows: int | None = None
    dev_tasks: bool = False
    kept_skills: KeptSkills | None = None
    rows: RowFacts = field(default_factory=RowFacts)
    alerts: Sequence[Finding] = ()
    fall_of_the_start: StartComparison | None = None

    @property
    def failure_kind(self) -> str:
        """The kind of failure; "" for a run that did not fail."""
        return self.failure.kind if self.failure else ""

    @property
    def is_early(self) -> bool:
        """Whether less than half of the planned steps are done, and the run has not failed.

        Returns False if the planned steps are not known, and for an evaluation, which has none.
        """
        planned_steps = self.settings.steps
        if self.failure is not None or not isinstance(planned_steps, int):
            return False
        last_step = self.lines[-1]["step"] if self.lines else 0
        return last_step < planned_steps / 2

    @property
    def heldout_drop(self) -> float:
        """How far mean held-out success or reward is below that of step 0, as a positive number.
        Returns 0.0 if it is not significantly below, and for a loss."""
        start = self.against_start
        if start is None or start.measure == "loss" or start.comparison.outcome.verdict != "worse":
            return 0.0
        return max(0.0, (start.before or 0.0) - (start.after or 0.0))

    @property
    def passes_over_rows(self) -> float:
        """How often the run saw each of its training rows; 0.0 if that is not known."""
        batch_size, rows = self.settings.batch_size, self.training_rows.rows
        if not batch_size or not rows or not self.lines:
            return 0.0
        return self.lines[-1]["step"] * batch_size / rows  # of the steps that were done

    @property
    def last_answers(self) -> View | None:
        """The last held-out answers, or those of an evaluation run; None if there are none."""
        if self.exam is not None:
            return self.exam
        return self.views[-1] if self.views else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) for every step that has a number for this metric, also step 0."""
        points = []
        for line in self.lines:
            step, value = line.get("step"), number(line.get(name))
            if step is not None and value is not None:
                points.append((int(step), value))
        return points

    def curve_values(self, name: str) -> list[float]:
        """The values of a metric at all steps, also step 0, in order."""
        return [value for _, value in self.curve(name)]

    def series(self, name: str) -> list[float]:
        """The values of a metric at the training steps, in order; step 0 is left out."""
        return [value for step, value in self.curve(name) if step > 0]

    def view_values(self, name: str) -> list[float]:
        """One attribute of all views (steps in numbers), in order; None values are left out."""
        values = (getattr(view, name) for view in self.views)
        return [value for value in values if value is not None]

    def recent(self, name: str) -> list[float]:
        """The values of a metric at the last ten training steps; [] while there are too few."""
        return recent_values(self.series(name))

    def recent_view_values(self, name: str) -> list[float]:
        """One attribute of the last ten views (steps in numbers); [] while there are too few. An
        evaluation has one view only, so all of its values are returned."""
        values = self.view_values(name)
        return values if self.algorithm == "evaluate" else recent_values(values)


def is_learning(facts: Facts) -> bool:
    """Whether the share of right answers clearly rises, in training or on the held-out tasks.

    Clearly means by at least `LEARNING_GAIN`, and by more than the noise of the share.
    """
    solved_trend = trend(facts.view_values("solved_share"))
    if solved_trend and solved_trend.rose and solved_trend.change >= limits.LEARNING_GAIN:
        return True
    heldout_shares = facts.curve_values("heldout_success")
    task_count = facts.exam_tasks  # of each of these evaluations; 0 if it is not known
    if len(heldout_shares) < 2 or not task_count:
        return False
    first, last = heldout_shares[0], heldout_shares[-1]
    standard_error = (2 * first * (1 - first) / task_count) ** 0.5  # of last - first
    least_gain = max(limits.LEARNING_GAIN, limits.TREND_Z * standard_error)
    return last - first >= least_gain


def never_solved(facts: Facts) -> bool:
    """Whether hardly any answer of the last steps is right. If success is not reported: whether in
    nearly all groups all answers earn the same without being right."""
    solved_share = recent_mean(facts.view_values("solved_share"))
    if solved_share is not None:
        return solved_share <= limits.HARDLY_SOLVED_SHARE
    unsolved_share = recent_mean(unsolved_shares(facts.lines))
    return unsolved_share is not None and unsolved_share >= 1 - limits.TINY_EFFECTIVE_SHARE


# --- from rollouts ----------------------------------------------------------------------------


def view_of(step: int, rows: Sequence[Answer], settings: KnownSettings) -> View | None:
    """The rollouts of one step, or the answers of one evaluation, in the numbers that detectors
    read.

    Returns None if `rows` is empty. `settings` are the settings of the run.
    """
    if not rows:
        return None
    scored = [row for row in rows if not row.error]
    view = View(
        step=step,
        answer_count=len(rows),
        mean_tokens=mean([float(row.tokens) for row in rows]),
        error_share=1 - len(scored) / len(rows),
        distinct_share=_distinct_share(rows),
        repeated_share=mean([repeated_share(_all_text(row)) for row in rows]),
        judge_gap=_judge_gap(scored),
        alike_share=alike_share(_one_text_per_task(rows)),
    )
    view = _with_rewards(view, scored)
    view = _with_cuts(view, rows)
    view = _with_form(view, scored)
    return _with_thinking(view, rows, settings)


def _with_rewards(view: View, scored: Sequence[Answer]) -> View:
    """The view (a step in numbers) with the fields on reward and success filled in.

    `scored` are the step's answers whose scoring did not fail.
    """
    usual_reward, usual_share = _most_common_reward(scored)
    return replace(
        view,
        usual_reward=usual_reward,
        usual_share=usual_share,
        solved_share=_success_share(scored),
        reward=_mean_reward(scored),
        wrong_reward=_mean_reward([row for row in scored if row.success is False]),
        right_reward=_mean_reward([row for row in scored if row.success is True]),
    )


def _with_cuts(view: View, rows: Sequence[Answer]) -> View:
    """The view (a step in numbers) with the fields on cut answers filled in.

    `rows` are all answers of the step; a cut one was ended by a limit on tokens or turns.
    """
    cut_rows = [row for row in rows if row.cut]
    out_of_turns = [row for row in rows if row.stop_reason == "max_turns"]
    return replace(
        view,
        cut_share=len(cut_rows) / len(rows),
        out_of_turns_share=len(out_of_turns) / len(rows),
        cut_reward=_mean_reward([row for row in cut_rows if not row.error]),
        cut_solved_share=_success_share(cut_rows),
        uncut_reward=_mean_reward([row for row in rows if not row.error and not row.cut]),
    )


def _with_form(view: View, scored: Sequence[Answer]) -> View:
    """The view (a step in numbers) with the fields on parsed and wrapped answers filled in;
    `scored` are the answers whose scoring did not fail."""
    wrapped, unwrapped = _wrapped_and_unwrapped(scored)
    form_metric, form_score = _form_metric(scored)
    return replace(
        view,
        form_metric=form_metric,
        form_score=form_score,
        wrapped_share=len(wrapped) / len(scored) if scored else 0.0,
        wrapped_reward=_mean_reward(wrapped),
        unwrapped_reward=_mean_reward(unwrapped),
    )


def _with_thinking(view: View, rows: Sequence[Answer], settings: KnownSettings) -> View:
    """The view (a step in numbers) with the fields on think blocks filled in; `rows` are all
    answers of the step."""
    sizes_or_none = [_think_size(row, settings) for row in rows]
    sizes = [size for size in sizes_or_none if size is not None]
    return replace(
        view,
        thinking_share=len(sizes) / len(rows),
        think_size=statistics.median(sizes) if sizes else None,
    )


def is_form_metric(name: str) -> bool:
    """Whether a metric, by its name, measures if an answer could be parsed."""
    return _FORM.search(name) is not None and not _COUNTED.search(name)


def is_pleased_and_wrong(row: Answer) -> bool | None:
    """Whether a judge rates an answer highly that fails a hard check.

    Returns None if the answer has no judge or no check, or if a judge's metric is above 1, because
    then it is not known what is high.
    """
    judge_scores: list[float] = []
    check_scores: list[float] = []
    # Judges and hard checks are recognised by the names of the metrics.
    for name, value in (row.metrics or {}).items():
        if _COUNTED.search(name):  # a count or a time, which is no score
            continue
        if _JUDGE.search(name):
            judge_scores.append(value)
        elif _CHECK.search(name):
            check_scores.append(value)
    if row.success is not None:
        check_scores.append(float(row.success))
    if not judge_scores or max(judge_scores) > 1 or not check_scores:
        return None
    judge_is_pleased = max(judge_scores) >= limits.HIGH_JUDGE_SCORE
    a_check_fails = min(check_scores) <= limits.LOW_CHECK_SCORE
    return judge_is_pleased and a_check_fails


def _wrapped_and_unwrapped(rows: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """(answers in a code fence, in quotes or behind a polite phrase; all other answers)."""
    wrapped: list[Answer] = []
    unwrapped: list[Answer] = []
    for row in rows:
        if is_wrapped(row.completion or ""):
            wrapped.append(row)
        else:
            unwrapped.append(row)
    return wrapped, unwrapped


def _all_text(row: Answer) -> str:
    """Everything that the model wrote in an answer, also its reasoning."""
    parts: list[str] = []
    for message in row.messages or ():
        if message.get("role") == "assistant":
            parts.append(str(message.get("reasoning_content") or ""))
            parts.append(str(message.get("content") or ""))
    text = "\n".join(part for part in parts if part)
    return text or row.completion or ""  # an answer of one turn may have no messages


def _success_share(rows: Sequence[Answer]) -> float | None:
    """The share with success; None if the environment never reports it."""
    return mean_or_none([float(row.success) for row in rows if row.success is not None])


def _mean_reward(rows: Sequence[Answer]) -> float | None:
    """The mean reward of the answers that have one; None if none has."""
    return mean_or_none([row.reward for row in rows if row.reward is not None])


def _most_common_reward(rows: Sequence[Answer]) -> tuple[float | None, float | None]:
    """(the most common reward, the share of answers that earn it); (None, None) without rewards."""
    rewards = Counter(row.reward for row in rows if row.reward is not None)
    if not rewards:
        return None, None
    reward, count = rewards.most_common(1)[0]
    return reward, count / rewards.total()


def _form_metric(rows: Sequence[Answer]) -> tuple[str, float | None]:
    """(name, mean) of the metric that says whether answers could be parsed; ("", None) without one.

    Of several such metrics the first by name is taken. Metrics with values above 1 are not shares
    and are skipped.
    """
    values_by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, value in (row.metrics or {}).items():
            values_by_name.setdefault(name, []).append(value)
    for name, values in sorted(values_by_name.items()):
        if is_form_metric(name) and max(values) <= 1:
            return name, mean(values)
    return "", None


def _groups(rows: Sequence[Answer]) -> list[list[Answer]]:
    """The answers by group (those to one task in a step), or by task if they have no group."""
    groups: dict[int | str, list[Answer]] = {}
    for row in rows:
        group = row.group if isinstance(row, TrajectoryRecord) else row.task
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def _distinct_share(rows: Sequence[Answer]) -> float | None:
    """How different the texts of a group are, averaged over groups.

    1 if all texts differ, 0 if all are equal; case and blanks make no difference. Returns None if
    no group has two answers.
    """
    shares = []
    for group in _groups(rows):
        if len(group) > 1:
            texts = {without_case_and_blanks(_all_text(row)) for row in group}
            shares.append((len(texts) - 1) / (len(group) - 1))
    return mean_or_none(shares)


def _one_text_per_task(rows: Sequence[Answer]) -> list[str]:
    """The text of the middle one of each task's answers. If they are sorted by reward, the first or
    the last would be an extreme."""
    by_task: dict[str, list[Answer]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    middle_answers = [answers[len(answers) // 2] for answers in by_task.values()]
    return [_all_text(answer) for answer in middle_answers]


def _think_size(row: Answer, settings: KnownSettings) -> float | None:
    """The size of an answer's think block, as a part of the tokens that the answer may take.

    The think block of the last turn is measured. Returns None if there is none, or if `max_tokens`
    is not known.
    """
    thinking, text_after = _thinking_and_rest(row, switched_on=bool(settings.thinking))
    max_tokens = number(settings.max_tokens) or 0.0
    if not thinking or max_tokens <= 0:
        return None
    turns = max(1, row.turns) if isinstance(row, TrajectoryRecord) else 1
    allowed_tokens = max_tokens * turns  # `max_tokens` in each turn
    # Only the number of tokens of all turns together is known, so the share of thinking among them
    # is estimated by its share of the characters of the last turn.
    thinking_tokens = row.tokens * len(thinking) / max(1, len(thinking) + len(text_after))
    return thinking_tokens / allowed_tokens


def _thinking_and_rest(row: Answer, *, switched_on: bool) -> tuple[str, str]:
    """(text of the think block, text after it) of an answer's last turn; ("", text) without one.

    With `switched_on` the model was asked to think; its think block may begin without a tag.
    """
    text = row.completion or ""
    last_message = row.messages[-1] if row.messages else {}
    reasoning = last_message.get("reasoning_content")
    if reasoning:  # the parser moved a closed block there, out of the text
        return str(reasoning), text
    never_closed = opens_any(text) or (switched_on and not closes_any(text))
    return (text, "") if never_closed else ("", text)


def _judge_gap(rows: Sequence[Answer]) -> float | None:
    """The share of answers that please a judge and fail a hard check, among those that have both.
    Returns None if no answer has both."""
    pleased_and_wrong = [is_pleased_and_wrong(row) for row in rows]
    return mean_or_none([float(answer) for answer in pleased_and_wrong if answer is not None])
