"""Turns the rollouts of a step into records, for the rollout file and for the alerts."""

from collections.abc import Sequence

from engine.core.files import Appender, JsonObject
from engine.home.run_dir import RunDir
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.worker.core.trajectory import Trajectory
from engine.worker.rollouts.batch_source import RolloutBatch

LOGPROB_DIGITS = 6  # decimal places of a stored log-probability
GROUPS_WITH_IDS = 4  # only the first groups keep token ids and masks, which make files large


def records_of(step: int, batch: RolloutBatch) -> list[TrajectoryRecord]:
    """Turn every trajectory of a step's batch into a record, group by group.

    Groups that were replaced come last.
    """
    return [
        _record(step, group_number, member, trajectory, dropped=group_number >= len(batch.groups))
        for group_number, group in enumerate(batch.groups + batch.dropped)
        for member, trajectory in enumerate(group.members)
    ]


def _record(
    step: int, group: int, member: int, trajectory: Trajectory, *, dropped: bool
) -> TrajectoryRecord:
    """Turn one trajectory into a record for the rollout file.

    `group` is the number of its group within the step, `member` its own number within the group,
    both from 0. `dropped` says whether its group was replaced by another. Branches are further
    conversations of the same rollout.
    """
    fields = answer_fields(trajectory) | {
        "step": step,
        "group": group,
        "member": member,
        "advantage": trajectory.advantage,
        "turns": trajectory.turns,
        "policy_step": trajectory.policy_step,
    }
    if trajectory.penalty:  # without one, the shaped reward is the reward
        fields["shaped_reward"] = trajectory.shaped_reward
    if dropped:
        fields["dropped"] = True
    if group < GROUPS_WITH_IDS:  # the ids of all groups would make the file large
        fields |= _sampled_ids(trajectory)
        if trajectory.branches:
            fields["branch_ids"] = [_sampled_ids(branch) for branch in trajectory.branches]
    return TrajectoryRecord(**fields)


def answer_fields(trajectory: Trajectory) -> JsonObject:
    """Return the fields of a trajectory that every file of answers has, for rollouts and for
    evaluations. Optional fields without a value are left out: branches, invalid calls, group of the
    task, reason and parts of the score."""
    fields: JsonObject = {
        "task": trajectory.task_id,
        "prompt": trajectory.prompt,
        "messages": trajectory.messages,
        "completion": trajectory.completion,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "metrics": trajectory.metrics,
        "error": trajectory.error,
        "stop_reason": trajectory.stop_reason,
        "tokens": trajectory.sampled_tokens,
    }
    if trajectory.branches:
        fields["branches"] = [
            {"prompt": branch.prompt, "messages": branch.messages} for branch in trajectory.branches
        ]
    if trajectory.invalid_calls:
        fields["invalid_calls"] = trajectory.invalid_calls
    if trajectory.task_group:
        fields["task_group"] = trajectory.task_group
    if trajectory.reason:
        fields["reason"] = trajectory.reason
    if trajectory.score_parts:
        fields["parts"] = trajectory.score_parts
    return fields


def _sampled_ids(trajectory: Trajectory) -> JsonObject:
    """Return the token ids of a trajectory and what belongs to each: whether it is trained, and the
    sampler's log-probability, rounded."""
    return {
        "prompt_ids": trajectory.prompt_ids,
        "ids": trajectory.ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": [round(logprob, LOGPROB_DIGITS) for logprob in trajectory.sampled_logprobs],
    }


def write_rollouts(run: RunDir, step: int, records: Sequence[TrajectoryRecord]) -> None:
    """Write the records to `rollouts/step_NNNNNN.jsonl`, replacing a file that an interrupted
    attempt left."""
    path = run.rollouts(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with Appender(path) as file:
        for record in records:
            file.append(record.to_line())
