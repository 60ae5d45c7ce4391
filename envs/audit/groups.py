"""The audit of `score_group`: a row's reference answer (gold) and probes are scored as one group.

GRPO maximises these rewards, so the reference answer must earn more than degenerate answers, and
the order of the completions must not matter: each group is scored in two orders.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.audit.audit_report import GroupReport
from envs.audit.probes import GOLD, INFORMATIVE, NEAR
from envs.json_types import ScoreReply

MOST_GROUPS = 20
SHOWN = 5  # how many ids of tasks a report names per fault
GroupScorer = Callable[[Mapping[str, Any], Sequence[str]], list[ScoreReply]]


@dataclass
class GroupFindings:
    """The measurements on groups.

    Attributes:
        groups: how many groups were scored.
        not_ahead: tasks on which a degenerate answer earned at least as much as the reference
            answer.
        moved: tasks on which another order changed a reward.
        failed: tasks on which scoring failed; `error` is the first error.
    """

    groups: int = 0
    not_ahead: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def risks(self) -> list[str]:
        """The names of the faults that occur on more than a tenth of the groups, which make
        `score_group` a risk."""
        tasks_by_fault = {
            "group order": self.moved,
            "group without the reference ahead": self.not_ahead,
            "group fails": self.failed,
        }
        tolerated_count = self.groups * 0.1
        return [name for name, tasks in tasks_by_fault.items() if len(tasks) > tolerated_count]

    @property
    def problems(self) -> list[str]:
        """One sentence for each kind of fault that occurred, with the first tasks that show it."""
        tasks_by_sentence = {
            "score_group gives other rewards in another order": self.moved,
            "score_group pays what is no answer as much as the reference": self.not_ahead,
            f"score_group fails ({self.error})": self.failed,
        }
        return [
            f"{text} on {len(tasks)} of {self.groups} groups: {', '.join(tasks[:SHOWN])}"
            for text, tasks in tasks_by_sentence.items()
            if tasks
        ]

    def to_report(self) -> GroupReport:
        """Return the findings as they are stored: the count, and of each list of tasks the first
        SHOWN (5)."""
        return {
            "groups": self.groups,
            "not_ahead": self.not_ahead[:SHOWN],
            "moved": self.moved[:SHOWN],
            "failed": self.failed[:SHOWN],
        }


def audit_group(
    findings: GroupFindings,
    score_group: GroupScorer,
    row: Mapping[str, Any],
    answers: Mapping[str, str],
) -> None:
    """Score the answers of one row as a group, in two orders, and add the result to `findings`.

    Args:
        findings: the measurements so far.
        score_group: (row, answers) -> their scores, which may depend on one another.
        row: a stored task row.
        answers: name of the probe (a wrong or degenerate answer; GOLD is the reference answer) ->
            its text.
    """
    names, texts = list(answers), list(answers.values())
    forward = score_group(row, texts)
    backward = score_group(row, texts[::-1])[::-1]  # in the order of `texts` again
    findings.groups += 1
    task_id = str(row["id"])
    errors = [str(score["error"]) for score in (*forward, *backward) if score["error"]]
    if errors:
        findings.failed.append(task_id)
        findings.error = findings.error or errors[0][:200]
        return
    forward_rewards = [score["reward"] for score in forward]
    backward_rewards = [score["reward"] for score in backward]
    if backward_rewards != forward_rewards:
        findings.moved.append(task_id)
    rewards = dict(zip(names, forward_rewards, strict=True))
    # Near misses and probes shown for information may earn as much as the reference answer.
    degenerate_rewards = [rewards[name] for name in names if name not in NEAR | INFORMATIVE]
    if GOLD in rewards and degenerate_rewards and max(degenerate_rewards) >= rewards[GOLD]:
        findings.not_ahead.append(task_id)
