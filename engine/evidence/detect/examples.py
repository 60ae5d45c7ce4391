"""Chooses example rollouts that show a finding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from engine.evidence.detect.baseline import references
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.views import is_pleased_and_wrong
from engine.evidence.stats.results import answer_text, text_of
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, clip
from engine.records.lines.answer import OUT_OF_TOKENS, Answer
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories
from engine.records.settings import ROW_ALGORITHMS, SAMPLING_ALGORITHMS

_EXAMPLES = 2  # per finding
_EXAMPLE_CHARS = 220  # most characters shown of an answer; of a prompt half of that
_TASK_CHARS = 80  # shown of a task's id
# The most answers that are compared with their references, and the most characters of each.
_MOST_COMPARED, _COMPARED_CHARS = 200, 400


def _ran_out_of_tokens(row: Answer) -> bool:
    """Whether a limit on tokens ended the answer."""
    return row.stop_reason in OUT_OF_TOKENS


# Finding id -> whether a rollout shows it; for a finding without an entry every rollout does.
_FILTER_OF_FINDING: Mapping[str, Callable[[Answer], bool | None]] = {
    "truncation": lambda row: row.cut,
    "overthinking": _ran_out_of_tokens,
    "reward_errors": lambda row: bool(row.error),
    "judge_pleasing": is_pleased_and_wrong,
    "too_hard": lambda row: row.success is False,
    "below_start": lambda row: row.success is not True,
    "length_grew": _ran_out_of_tokens,
    "too_short": lambda row: row.success is False,
    "unparsed": lambda row: not row.success and not row.error,
}
# Findings that are shown by the answers with the highest reward; others by those with the lowest.
_BEST_FIRST = ("reward_hacking", "judge_pleasing", "too_hard", "below_start", "too_short")


@dataclass(frozen=True)
class Example:
    """One rollout, shortened and redacted.

    Attributes:
        step: None for an answer to a held-out task.
        group, member: the number of its group in the step, and its place in the group; None for an
            answer to a held-out task.
        reference: the reference answer, if it helps to compare the two; else "".
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
        """The fields as a JSON object; None, an empty error and an empty reference are left out."""
        fields = {
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
        return {name: value for name, value in fields.items() if value is not None}


class Examples:
    """Chooses the rollouts that show a finding.

    They come from the last step of a run that samples. For an SFT or DPO run, which has no
    rollouts, they are the last held-out answers; other runs have none. `step` is the step of the
    rollouts, -1 if there are none.
    """

    def __init__(
        self, run: RunDir, algorithm: str, heldout_answers: Sequence[Answer], redact: Redactor
    ) -> None:
        """Read the rollouts to choose from.

        `heldout_answers` are those of the run's last evaluation; `redact` hides secrets.
        """
        self.run = run
        self.redact = redact
        self.step = -1
        self.rows: Sequence[Answer] = []
        steps = run.rollout_steps()
        if algorithm in SAMPLING_ALGORITHMS and steps:
            self.step = steps[-1]
            self.rows = read_trajectories(run.rollouts(self.step))
        elif algorithm in ROW_ALGORITHMS:
            self.rows = heldout_answers

    def for_finding(self, finding: Finding) -> list[Example]:
        """At most two rollouts of different tasks that show the finding; [] if none does.

        The lowest rewards come first; for the findings in `_BEST_FIRST`, the highest.
        """
        if not finding.examples:  # no rollout can show it
            return []
        has_training_rollouts = self.step >= 0  # else the rows are held-out answers
        if finding.examples == "changed" and has_training_rollouts:
            return []  # training rollouts cannot show what changed on held-out tasks
        shows_finding = _plateau_filter(finding) or _FILTER_OF_FINDING.get(finding.id)
        rows = [row for row in self.rows if shows_finding is None or shows_finding(row)]
        rows.sort(key=_reward_or_zero, reverse=finding.id in _BEST_FIRST)
        if finding.id == "too_short":
            # If a run was too short, hardly any answer is right: show how near the best one came.
            return self._nearest_to_reference(rows)
        first_by_task: dict[str, Answer] = {}
        for row in rows:
            first_by_task.setdefault(row.task, row)
        chosen_rows = list(first_by_task.values())[:_EXAMPLES]
        return [self._example(row) for row in chosen_rows]

    def _nearest_to_reference(self, rows: Sequence[Answer]) -> list[Example]:
        """One example: among the answers with the highest reward, the one most similar to its
        reference.

        `rows` are sorted by reward, highest first. Returns [] without rows.
        """
        if not rows:
            return []
        reference_by_task = references(self.run)

        def likeness_to_reference(row: Answer) -> float:
            """How similar an answer is to the reference of its task, from 0 to 1."""
            return _likeness(answer_text(row), reference_by_task.get(row.task, ""))

        highest_reward = _reward_or_zero(rows[0])
        best_rewarded = [
            row for row in rows[:_MOST_COMPARED] if _reward_or_zero(row) == highest_reward
        ]
        nearest = max(best_rewarded, key=likeness_to_reference)
        return [self._example(nearest, reference_by_task.get(nearest.task, ""))]

    def _example(self, row: Answer, reference: str = "") -> Example:
        """An answer as an example: shortened, with secrets removed.

        `reference` is the reference answer of its task; "" to show none.
        """
        rollout = row if isinstance(row, TrajectoryRecord) else None  # None: a held-out answer

        def shown(text: str, most_chars: int = _EXAMPLE_CHARS) -> str:
            """The text without secrets, shortened to `most_chars` characters."""
            return clip(self.redact.text(text), most_chars)

        return Example(
            step=self.step if self.step >= 0 else None,
            task=shown(row.task, _TASK_CHARS),
            group=rollout.group if rollout else None,
            member=rollout.member if rollout else None,
            reward=row.reward,
            stop_reason=row.stop_reason,
            prompt=shown(text_of(row.prompt), _EXAMPLE_CHARS // 2),
            answer=shown(answer_text(row)),
            error=shown(row.error or ""),
            reference=shown(reference),
        )


def _plateau_filter(finding: Finding) -> Callable[[Answer], bool] | None:
    """A function that tells whether an answer earns the reward of a plateau (many answers earn the
    same), for the finding "plateau". Returns None for any other finding."""
    if finding.id != "plateau":
        return None
    plateau_reward = finding.evidence["plateau_reward"]
    if plateau_reward is None:  # each group has its own, which is above 0
        return lambda row: _reward_or_zero(row) > 0
    return lambda row: row.reward == plateau_reward


def _likeness(answer: str, reference: str) -> float:
    """How similar an answer is to its reference, from 0 to 1; 0 if the reference is "".

    Only the first `_COMPARED_CHARS` characters of each are compared.
    """
    if not reference:
        return 0.0
    matcher = SequenceMatcher(
        isjunk=None, a=reference[:_COMPARED_CHARS], b=answer[:_COMPARED_CHARS]
    )
    return matcher.ratio()


def _reward_or_zero(row: Answer) -> float:
    """The reward of an answer; 0 if it has none."""
    return row.reward or 0.0
