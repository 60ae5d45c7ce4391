"""The records of tasks that were played: completion, trajectory, group. No torch.

Worked example. Task P0 is rendered to prompt ids `[10, 11]`. The model answers A0 = `[20, 21, 2]`
(2 ends the turn), the environment replies E0 = `[30, 31]` (its message and the opening of the next
assistant turn), the model answers A1 = `[22, 2]`:

    prompt_ids        [10, 11]
    ids               [20, 21, 2, 30, 31, 22, 2]
    loss_mask         [ 1,  1, 1,  0,  0,  1, 1]
    sampled_logprobs  [-.1, -.2, -.1, 0, 0, -.3, -.1]

The sampled tokens themselves are trained; text is never tokenised again.
"""

from dataclasses import dataclass, field, replace

from engine.records.lines.answer import OUT_OF_TOKENS, StopReason
from envs.json_types import ChatMessage, ToolSchema


@dataclass(frozen=True)
class Completion:
    """Tokens of one assistant turn, with its end-of-turn token if that was sampled."""

    ids: list[int]
    logprobs: list[float]
    finished: bool  # True: the model ended the turn itself; False: a limit cut the turn


@dataclass
class Trajectory:
    """One rollout of one task. `reward` and the fields after it are set when it is scored.

    Attributes:
        reward: what the environment's score gave.
        error: why it could not be scored; None if it was scored.
        reason, score_parts: why it earned the reward (`Score` in envs/base.py).
        invalid_calls: why tool calls in it are invalid, one text each.
        token_advantages: of each trained token, if these differ within a trajectory (distillation);
            `advantage` is then their mean. [] if all have `advantage`.
        penalty: what the trainer subtracts from the reward before it compares the group.
        policy_step: optimizer steps that the policy had done when it sampled.
        task_group: name of the group that the task belongs to; "" for none.
        tools: what the model could call.
        branches: conversations of the same rollout that could not be stitched to this one
            (gateway/session.py); they are trained with its advantage.
    """

    task_id: str
    prompt: list[ChatMessage]
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    messages: list[ChatMessage] = field(default_factory=list)
    completion: str = ""
    stop_reason: StopReason = "stop"
    turns: int = 0
    invalid_calls: list[str] = field(default_factory=list)
    reward: float = 0.0
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    reason: str = ""
    score_parts: dict[str, list[float]] = field(default_factory=dict)
    penalty: float = 0.0
    advantage: float = 0.0
    token_advantages: list[float] = field(default_factory=list)
    policy_step: int = 0
    task_group: str = ""
    tools: list[ToolSchema] = field(default_factory=list)
    branches: list["Trajectory"] = field(default_factory=list)

    @property
    def parts(self) -> list["Trajectory"]:
        """All that is trained: this trajectory, and its branches with the same advantage."""
        return [self, *(replace(branch, advantage=self.advantage) for branch in self.branches)]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model wrote, those of the branches included."""
        return sum(sum(part.loss_mask) for part in (self, *self.branches))

    @property
    def shaped_reward(self) -> float:
        """The reward minus the penalty that the settings ask for, such as one for a long answer."""
        return self.reward - self.penalty

    @property
    def trained_tokens(self) -> int:
        """How many tokens of this trajectory are trained; branches are not counted."""
        return sum(self.loss_mask)

    @property
    def trained_logprobs(self) -> list[float]:
        """The sampler's log-probabilities of the trained tokens."""
        tokens = zip(self.sampled_logprobs, self.loss_mask, strict=True)
        return [logprob for logprob, is_trained in tokens if is_trained]

    @property
    def trained_advantages(self) -> list[float]:
        """The advantage of each trained token: its own, or else the trajectory's."""
        return self.token_advantages or [self.advantage] * self.trained_tokens

    @property
    def trains(self) -> bool:
        """Whether training on this trajectory would change the policy."""
        has_advantage = self.advantage != 0.0 or any(self.token_advantages)
        return self.error is None and has_advantage and self.trained_tokens > 0

    @property
    def cut(self) -> bool:
        """Whether a limit of tokens or of turns ended it."""
        return self.stop_reason in (*OUT_OF_TOKENS, "max_turns")

    def add_completion(self, completion: Completion) -> None:
        """Append the tokens of a turn that the model sampled; they are trained. The caller appends
        the turn's message to `messages`."""
        self.ids += completion.ids
        self.loss_mask += [1] * len(completion.ids)
        self.sampled_logprobs += completion.logprobs
        self.turns += 1

    def add_environment(self, ids: list[int]) -> None:
        """Append tokens that the environment wrote. The model reads them; they are never trained,
        and their log-probabilities are recorded as 0."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.sampled_logprobs += [0.0] * len(ids)


@dataclass
class Group:
    """The trajectories of one task, whose rewards are compared with each other."""

    task_id: str
    members: list[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        """The trajectories that were scored without an error."""
        return [trajectory for trajectory in self.members if trajectory.error is None]

    @property
    def rewards(self) -> list[float]:
        """The shaped rewards of the scored members, which are compared with each other."""
        return [trajectory.shaped_reward for trajectory in self.scored]

    @property
    def uniform(self) -> bool:
        """Whether all scored members earned the same, or none is scored: nothing to compare."""
        return len(set(self.rewards)) <= 1
