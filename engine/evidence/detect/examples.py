"""Rollouts that show a finding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from engine.evidence.detect.baseline import references
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.views import is_pleased_and_wrong
from engine.evidence.stats.results import answer_text, text_of
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, clip
from engine.records.lines.answer import Answer
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories

_EXAMPLES = 2
_EXAMPLE_CHARS = 220
# Answers, and characters of each, that are compared with their references.
_MOST_COMPARED, _COMPARED_CHARS = 200, 400


def _cut_short(row: Answer) -> bool:
    return row.stop_reason == "length"


# Which rollouts show a finding; without an entry any does.
_SHOWS: Mapping[str, Callable[[Answer], bool | None]] = {
    "truncation": lambda row: row.cut,
    "overthinking": _cut_short,
    "reward_errors": lambda row: bool(row.error),
    "judge_pleasing": is_pleased_and_wrong,
    "too_hard": lambda row: row.success is False,
    "below_start": lambda row: row.success is not True,
    "length_grew": _cut_short,
    "too_short": lambda row: row.success is False,
    "unparsed": lambda row: not row.success and not row.error,
}
_BEST_FIRST = ("reward_hacking", "judge_pleasing", "too_hard", "below_start", "too_short")


@dataclass(frozen=True)
class Example:
    """One rollout, cut and redacted; what is None or "" is left out.

    Attributes:
        step: None for an answer to a held-out task.
        reference: the reference answer, where it helps to see both.
    """

    step: int | None
    task: str
    group: int | None
    member: int | None
    reward: float | None
    stop_reason: str | None
    prompt: str
    answer: str
    error: str = ""
    reference: str = ""

    def to_json(self) -> dict[str, object]:
        known = {
            "step": self.step,
            "task": self.task,
            "group": self.group,
            "member": self.member,
            "reward": self.reward,
            "stop_reason": self.stop_reason,
            "prompt": self.prompt,
            "answer": self.answer,
            "error": self.error or None,
            "reference": self.reference or None,
        }
        return {name: value for name, value in known.items() if value is not None}


class Examples:
    """The rollouts of the last step, or of an SFT run the answers of its last exam."""

    def __init__(
        self, run: RunDir, algorithm: str, exam: Sequence[Answer], redact: Redactor
    ) -> None:
        steps = run.rollout_steps()
        self.run = run
        self.redact = redact
        self.step = -1  # of the rollouts, -1 where there are none
        self.rows: Sequence[Answer] = []
        if algorithm == "grpo" and steps:
            self.step = steps[-1]
            self.rows = read_trajectories(run.rollouts(self.step))
        elif algorithm == "sft":
            self.rows = exam

    def of(self, finding: Finding) -> list[Example]:
        """At most two, of different tasks."""
        if not finding.pick or (finding.pick == "changed" and self.step >= 0):
            return []  # sampled rollouts do not show what changed on held-out tasks
        shows = _SHOWS.get(finding.id, lambda _row: True)
        rows = [row for row in self.rows if shows(row)]
        rows.sort(key=_reward, reverse=finding.id in _BEST_FIRST)
        if finding.id == "too_short":
            return self._nearest_to_reference(rows)
        by_task: dict[str, Answer] = {}
        for row in rows:
            by_task.setdefault(row.task, row)
        return [self._example(row) for row in list(by_task.values())[:_EXAMPLES]]

    def _nearest_to_reference(self, rows: Sequence[Answer]) -> list[Example]:
        """The best paid answer, of equals the one most like its reference, and that beside it.

        `rows` come best paid first.
        """
        golds = references(self.run)

        def likeness(row: Answer) -> float:
            gold, answer = golds.get(row.task, ""), answer_text(row)
            matcher = SequenceMatcher(None, gold[:_COMPARED_CHARS], answer[:_COMPARED_CHARS])
            return matcher.ratio() if gold else 0.0

        if not rows:
            return []
        best_paid = [row for row in rows[:_MOST_COMPARED] if _reward(row) == _reward(rows[0])]
        best = max(best_paid, key=likeness)
        return [self._example(best, golds.get(best.task, ""))]

    def _example(self, row: Answer, reference: str = "") -> Example:
        """A row as an example: short, without secrets."""
        trained = row if isinstance(row, TrajectoryRecord) else None
        return Example(
            step=self.step if self.step >= 0 else None,
            task=clip(self.redact.text(row.task), 80),
            group=trained.group if trained else None,
            member=trained.member if trained else None,
            reward=row.reward,
            stop_reason=row.stop_reason,
            prompt=clip(self.redact.text(text_of(row.prompt)), _EXAMPLE_CHARS // 2),
            answer=clip(self.redact.text(answer_text(row)), _EXAMPLE_CHARS),
            error=clip(self.redact.text(row.error or ""), _EXAMPLE_CHARS),
            reference=clip(self.redact.text(reference), _EXAMPLE_CHARS),
        )


def _reward(row: Answer) -> float:
    return row.reward or 0.0
