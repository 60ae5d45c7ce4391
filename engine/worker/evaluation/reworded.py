"""The tasks of an evaluation in other words.

A model that learnt its task answers the same question in other words; a model that learnt the words
does not (engine/evidence/robustness compares the two, task by task).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.wording.kinds import Kind
from engine.records.lines.reworded_kind import RewordedKind
from engine.worker.rollouts.rewording import Rewording
from envs.json_types import TaskRow

# Why a task cannot be reworded, by kind of rewording.
_CANNOT_BE_REWORDED: dict[Kind, str] = {
    "wording": "no text of a user",
    "system": "the environment keeps its system message",
    "tools": "no tools",
    "options": "no options whose right answer the environment was seen to score where it moved to",
}
_NO_ROOM = "no room for an answer"


@dataclass(frozen=True)
class RewordedExam:
    """The exam (the tasks of an evaluation) in one kind of rewording.

    Attributes:
        tasks: the reworded tasks that are asked.
        counts: how many tasks are asked and left out, in the form of the run's files.
    """

    tasks: Sequence[TaskRow]
    counts: RewordedKind

    @property
    def kind(self) -> Kind:
        """Which kind of rewording it is."""
        return self.counts.kind


def reworded_exams(
    kinds: Sequence[Kind],
    tasks: Sequence[TaskRow],
    rewording: Rewording,
    seed: int,
    fits: Callable[[TaskRow], bool],
) -> list[RewordedExam]:
    """Make one exam (the tasks of an evaluation) for each of these kinds of rewording, such as
    "wording". An exam has no tasks if none can be reworded.

    Args:
        rewording: rewords the tasks.
        seed: decides how the tasks are reworded.
        fits: tells whether the prompt of a task leaves room for an answer.
    """
    return [_reworded_exam(kind, tasks, rewording, seed, fits) for kind in kinds]


def _reworded_exam(
    kind: Kind,
    tasks: Sequence[TaskRow],
    rewording: Rewording,
    seed: int,
    fits: Callable[[TaskRow], bool],
) -> RewordedExam:
    """Make the exam of one kind of rewording; the arguments are those of `reworded_exams`.

    Tasks that cannot be reworded, or whose new prompt leaves no room for an answer, are left out.
    """
    results = [rewording.reworded(task, kind, seed) for task in tasks]
    reworded = [task for task in results if task is not None]
    fitting = [task for task in reworded if fits(task)]
    reasons = []  # why some tasks are left out
    if len(reworded) < len(tasks):
        reasons.append(_CANNOT_BE_REWORDED[kind])
    if len(fitting) < len(reworded):
        reasons.append(_NO_ROOM)
    counts = RewordedKind(
        kind=kind,
        tasks=len(fitting),
        left_out=len(tasks) - len(fitting),
        why="; ".join([*reasons, *rewording.problems]),
    )
    return RewordedExam(fitting, counts)
