"""The rollouts of a step as records, for its file and for the alerts."""

from collections.abc import Sequence

from engine.core.files import Appender
from engine.home.run_dir import RunDir
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.worker.core.trajectory import Trajectory
from engine.worker.rollouts.batch_source import RolloutBatch

GROUPS_WITH_IDS = 4  # token ids and masks are kept of the first few groups


def records_of(step: int, batch: RolloutBatch) -> list[TrajectoryRecord]:
    """Every trajectory of the step; groups that were replaced stand at the end."""
    return [
        _record(step, number, member, trajectory, dropped=number >= len(batch.groups))
        for number, group in enumerate(batch.groups + batch.dropped)
        for member, trajectory in enumerate(group.members)
    ]


def _record(
    step: int, group: int, member: int, t: Trajectory, *, dropped: bool
) -> TrajectoryRecord:
    """One trajectory as a line; `dropped` where its group was replaced."""
    fields = t.answer() | {
        "step": step,
        "group": group,
        "member": member,
        "advantage": t.advantage,
        "turns": t.turns,
        "policy_step": t.policy_step,
    }
    if t.penalty:
        fields["shaped_reward"] = t.shaped_reward
    if dropped:
        fields["dropped"] = True
    if group < GROUPS_WITH_IDS:
        fields |= {"prompt_ids": t.prompt_ids, "ids": t.ids, "loss_mask": t.loss_mask}
    return TrajectoryRecord(**fields)


def write_rollouts(run: RunDir, step: int, records: Sequence[TrajectoryRecord]) -> None:
    """`rollouts/step_NNNNNN.jsonl`; what an attempt that was cut short left is replaced."""
    path = run.rollouts(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with Appender(path) as file:
        for record in records:
            file.append(record.to_line())
