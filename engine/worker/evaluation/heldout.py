"""Plays and scores held-out tasks, and makes the rows that are written about them.

Which tasks are held out, in which order and in which half: engine/runs/evaluation/exam.py.
"""

from collections.abc import Iterator, Sequence

from engine.core.files import Appender
from engine.records.lines.evaluation_row import EvaluationRow
from engine.runs.evaluation.exam import TEST
from engine.worker.core.trajectory import Group
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, collect
from engine.worker.rollouts.rollout_file import answer_fields
from envs.json_types import TaskRow


def evaluate(
    tasks: Sequence[TaskRow],
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    attempts: int = 1,
) -> list[Group]:
    """Play and score each task `attempts` times. Returns one group of trajectories per task, in the
    order of `tasks`."""
    groups, _times = collect(tasks, attempts, context, sampler, params)
    return groups


def write_rows(
    file: Appender, groups: Sequence[Group], half_of_task: dict[str, str], *, model: str
) -> None:
    """Append one row for each trajectory to an evaluation file. `half_of_task` is the half
    (VALIDATION or TEST) of each task id, and `model` the model's name in the rows; see
    `rows_of`."""
    for row in rows_of(groups, half_of_task, model=model):
        file.append(row.to_line())


def rows_of(
    groups: Sequence[Group], half_of_task: dict[str, str], *, model: str, with_tools: bool = False
) -> Iterator[EvaluationRow]:
    """Yield the row of each trajectory for an evaluation file, group by group. `attempt` numbers
    the members of a group from 0.

    Args:
        half_of_task: VALIDATION or TEST for each task id. A missing task counts as TEST, so it
            chooses no checkpoint. {} if the tasks are not divided.
        model: the name of the model in the rows.
        with_tools: whether the rows also list the tools that the model could call.
    """
    for group in groups:
        for attempt, trajectory in enumerate(group.members):
            half = half_of_task.get(trajectory.task_id, TEST)
            fields = answer_fields(trajectory)
            if with_tools and trajectory.tools:
                fields["tools"] = trajectory.tools
            yield EvaluationRow(model=model, half=half, attempt=attempt, **fields)
