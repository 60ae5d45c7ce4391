"""One rollout of a training step: a line of `rollouts/step_NNNNNN.jsonl`."""

from pathlib import Path

from engine.records.lines.answer import Answer
from engine.records.lines.line_record import Line
from engine.records.record import Record

_FIRST_KEYS = ("step", "task", "group", "member")


class SampledIds(Record):
    """The tokens of a conversation.

    Attributes:
        prompt_ids, ids: of the prompt, and everything after it.
        loss_mask: for each of `ids` 1 where the model wrote it.
        logprobs: for each of `ids` its log-probability when it was sampled, 0 where the model did
            not write it.
    """

    prompt_ids: list[int]
    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]


class TrajectoryRecord(Answer):
    """An answer that was trained on, or was left out of its step's batch.

    Attributes:
        group, member: which group of the step, and which of its completions.
        advantage: its shaped reward against its group's.
        turns: assistant turns.
        policy_step: steps done by the policy that sampled it.
        shaped_reward: the reward less what the trainer took off it; None where nothing was.
        dropped: its group was replaced by a fresh task and not trained on.
        prompt_ids, ids, loss_mask: token ids of the prompt and after it, and 1 where the model
            wrote them; of the first few groups of a step.
        logprobs: with them, the log-probability of each of `ids` when it was sampled, 0 where the
            model did not write it.
        branch_ids: with them, the tokens of the `branches`; None where there are none.
    """

    step: int
    group: int
    member: int
    advantage: float
    turns: int
    policy_step: int = 0
    shaped_reward: float | None = None
    dropped: bool = False
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    loss_mask: list[int] | None = None
    logprobs: list[float] | None = None
    branch_ids: list[SampledIds] | None = None

    @property
    def conversations(self) -> list[SampledIds]:
        """The tokens of the rollout and of its branches; [] where they were not kept, or were kept
        without log-probabilities by an earlier version."""
        kept = (self.prompt_ids, self.ids, self.loss_mask, self.logprobs)
        if None in kept:
            return []
        first = dict(zip(SampledIds.model_fields, kept, strict=True))
        return [SampledIds.model_validate(first), *(self.branch_ids or [])]

    def to_line(self) -> Line:
        """The JSON object to append to the file. The keys that identify the rollout come first,
        which makes the file easier to read for people."""
        line = super().to_line()
        return {key: line[key] for key in _FIRST_KEYS} | line


def read_trajectories(path: Path) -> list[TrajectoryRecord]:
    """Read the rollouts of one step; [] where there is no file. Damaged lines are left out;
    `TrajectoryRecord.read_file` also counts them."""
    return TrajectoryRecord.read_all(path)
