"""How much an attempt of a training run still does: steps, answers of evaluations, checkpoints.

The forecast of the run's end multiplies these by what each has taken so far
(engine/pace/forecast.py).
"""

from dataclasses import dataclass

from engine.pace.heartbeat import Phase
from engine.records.settings import STOP_EARLY_PATIENCE, CommonSettings


@dataclass(frozen=True)
class Exam:
    """What the exams of a run ask.

    Attributes:
        choosing: answers and losses of one evaluation on the way, which chooses the checkpoint.
        reported: those of the other half, asked before the first step and at the end.
        questions: of the skill check, asked before the first step and at the end.
    """

    choosing: int = 0
    reported: int = 0
    questions: int = 0


def work_ahead(
    settings: CommonSettings, steps_done: int, total_steps: int, exam: Exam, *, resumed: bool
) -> dict[Phase, int]:
    """Return the units of each phase that an attempt does from now on, as `pulse.plan` takes them.

    Args:
        settings: those of the run.
        steps_done: steps that earlier attempts have done, of `total_steps`.
        exam: how many answers and questions an evaluation asks.
        resumed: whether the attempt goes on from a checkpoint: then nothing is asked before its
            first step.
    """
    evaluations = _due_between(steps_done, total_steps, settings.eval_every)  # steps
    saves = _due_between(steps_done, total_steps, settings.save_every)  # steps
    steps = total_steps - steps_done
    has_exam = exam.choosing + exam.reported > 0
    if not has_exam:
        return {"training": steps, "evaluation": 0, "skill check": 0, "checkpoint": len(saves)}
    answers = exam.choosing * len(evaluations) + exam.reported
    questions = exam.questions  # at the end
    if not resumed:  # all are also asked before the first step
        answers += exam.choosing + exam.reported
        questions += exam.questions
    return {
        "training": steps,
        "evaluation": answers,
        "skill check": questions,
        # An evaluation saves a checkpoint where it is the best so far: at most each of them.
        "checkpoint": len(saves | evaluations),
    }


def earliest_end(
    settings: CommonSettings, steps_done: int, total_steps: int, evaluations_without_progress: int
) -> int | None:
    """Return the step at which `stop_early=heldout` ends a run at the earliest.

    That is so if no evaluation brings progress from now on. None where the run does all its steps
    in any case.
    """
    if settings.stop_early != "heldout":
        return None
    evaluations_to_come = max(1, STOP_EARLY_PATIENCE - evaluations_without_progress)
    evaluations_so_far = steps_done // settings.eval_every
    step = (evaluations_so_far + evaluations_to_come) * settings.eval_every
    return step if step < total_steps else None


def _due_between(done: int, total: int, every: int) -> set[int]:
    """The steps after `done` that are due, once every `every` steps and at the last one."""
    first = (done // every + 1) * every
    return {*range(first, total + 1, every), total} if done < total else set()
