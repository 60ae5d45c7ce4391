"""How much work an attempt of a training run still has to do: steps, answers of evaluations,
checkpoints.

The forecast of the run's end multiplies these numbers by the seconds that each unit has taken so
far (engine/machine/pace/forecast.py).
"""

from dataclasses import dataclass

from engine.machine.pace.heartbeat import Phase
from engine.records.settings import STOP_EARLY_PATIENCE, CommonSettings


@dataclass(frozen=True)
class Exam:
    """The number of questions in a run's exams (evaluations on held-out tasks).

    Attributes:
        choosing: answers and losses of one evaluation on the way, which chooses the best
            checkpoint.
        reported: answers and losses on the other half of the held-out tasks, asked before the first
            step and at the end.
        questions: questions of the skill check, asked before the first step and at the end.
    """

    choosing: int = 0
    reported: int = 0
    questions: int = 0


def work_ahead(
    settings: CommonSettings, steps_done: int, total_steps: int, exam: Exam, *, resumed: bool
) -> dict[Phase, int]:
    """Return how many units of each phase (steps, answers, questions, checkpoints) an attempt does
    from now on, in the form that `pulse.plan` takes.

    Args:
        settings: those of the run.
        steps_done: how many of the `total_steps` steps earlier attempts have done.
        exam: how many answers and questions an evaluation asks; all 0 without held-out tasks.
        resumed: whether the attempt goes on from a checkpoint. Then nothing is asked before its
            first step.
    """
    # The numbers of the steps after which an evaluation, and a checkpoint, is due.
    evaluations = _due_steps(steps_done, total_steps, settings.eval_every)
    saves = _due_steps(steps_done, total_steps, settings.save_every)
    steps = total_steps - steps_done
    has_exam = exam.choosing + exam.reported > 0
    if not has_exam:
        return {"training": steps, "evaluation": 0, "skill check": 0, "checkpoint": len(saves)}
    answers = exam.choosing * len(evaluations) + exam.reported
    questions = exam.questions  # at the end
    if not resumed:  # a run that begins asks everything before its first step too
        answers += exam.choosing + exam.reported
        questions += exam.questions
    return {
        "training": steps,
        "evaluation": answers,
        "skill check": questions,
        # An evaluation saves a checkpoint if it is the best so far. At most every one does.
        "checkpoint": len(saves | evaluations),
    }


def earliest_end(
    settings: CommonSettings, steps_done: int, total_steps: int, evaluations_without_progress: int
) -> int | None:
    """Return the earliest step at which the setting `stop_early=heldout` may end the run: the step
    at which it ends if no evaluation from now on brings progress. Returns None if the run does all
    its steps in any case. `evaluations_without_progress` counts the last ones in a row."""
    if settings.stop_early != "heldout":
        return None
    # So many evaluations in a row without progress end the run.
    evaluations_to_come = max(1, STOP_EARLY_PATIENCE - evaluations_without_progress)
    evaluations_so_far = steps_done // settings.eval_every
    step = (evaluations_so_far + evaluations_to_come) * settings.eval_every
    return step if step < total_steps else None


def _due_steps(steps_done: int, total_steps: int, every: int) -> set[int]:
    """Return the numbers of the steps after step `steps_done` at which something is due that is due
    every `every` steps, and at the last step, `total_steps`. The set is empty if all are done."""
    if steps_done >= total_steps:
        return set()
    first = (steps_done // every + 1) * every
    return {*range(first, total_steps + 1, every), total_steps}
