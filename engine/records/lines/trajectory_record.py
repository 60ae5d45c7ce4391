"""One rollout of a training step: a line of `rollouts/step_NNNNNN.jsonl`."""

from pathlib import Path

from engine.records.lines.answer import Answer
from engine.records.lines.line_record import Line
from engine.records.record import Record

_FIRST_KEYS = ("step", "task", "group", "member")


class SampledIds(Record):
    """The tokens of a conversation.

    Attributes:
        prompt_ids: the token ids of the prompt.
        ids: the token ids of everything after the prompt.
        loss_mask: for each of `ids` 1 if the model wrote it, otherwise 0.
        logprobs: for each of `ids` its log-probability when it was sampled; 0 if the model did not
            write it.
    """

    prompt_ids: list[int]
    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]


class TrajectoryRecord(Answer):
    """An answer that was trained on, or was left out of its step's batch.

    Attributes:
        group: the number of the group (the completions of one task) in the step.
        member: the number of the completion in its group.
        advantage: the shaped reward compared with the other rewards of the group.
        turns: number of assistant turns.
        policy_step: how many optimizer steps the policy had made that sampled the rollout.
        shaped_reward: the reward minus penalties of the trainer; None if there are none.
        dropped: whether the group was replaced by a new task and not trained on.
        prompt_ids, ids, loss_mask, logprobs: the tokens as in `SampledIds`; they are stored for the
            first few groups of a step only.
        branch_ids: the tokens of the `branches`; None if there are none or they are not stored.
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
        """The tokens of the rollout, then those of its branches (its further conversations).

        Empty if they were not stored, or if an earlier version stored them without
        log-probabilities.
        """
        # In the order of the fields of `SampledIds`.
        token_fields = (self.prompt_ids, self.ids, self.loss_mask, self.logprobs)
        if None in token_fields:
            return []
        main_conversation = dict(zip(SampledIds.model_fields, token_fields, strict=True))
        return [SampledIds.model_validate(main_conversation), *(self.branch_ids or [])]

    def to_line(self) -> Line:
        """Return the JSON object to append to the file.

        The keys that identify the rollout come first, so that people can read the file more easily.
        """
        line = super().to_line()
        return {key: line[key] for key in _FIRST_KEYS} | line


def read_trajectories(path: Path) -> list[TrajectoryRecord]:
    """Read the rollouts of one step; [] if there is no file.

    Damaged lines are left out; `TrajectoryRecord.read_file` also counts them.
    """
    return TrajectoryRecord.read_all(path)
