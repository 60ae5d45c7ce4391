"""What a step of distillation does to the adapter, against formulas in float64."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import Plain, Tensors, apart, gradients, leaves
from tiny_decoders import VOCAB, own, policy_on, tiny
from typed_settings import distill_settings

from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.distill import LEAST_LOGPROB, as_grpo, assign, token_advantages
from engine.worker.grpo import update
from engine.worker.network.policy import Policy
from engine.worker.teachers import NetworkTeacher
from engine.worker.training import Training
from engine.worker.update.schedule import make_optimizer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

WHOLE = 100_000  # a budget that holds every batch


class Bare(Training):
    """A run reduced to what an update needs; keeps the gradient that its optimizer was given."""

    def __init__(self, policy: Policy) -> None:
        self.grpo = as_grpo(distill_settings({}))
        self.policy, self.settings = policy, self.grpo
        self.optimizer = make_optimizer(policy.parameters(), self.grpo)
        self.done, self.total, self.state, self.evaluation = 0, 10, {}, None
        self.meter: Any = SimpleNamespace(count_microbatch=lambda rows: None)  # counts operations
        self.ranks = None
        self.given: Tensors = {}

    def optimizer_step(self, step: int, pending: Any) -> tuple[Any, float, float]:
        self.given = {k: g.clone() for k, g in self.policy.adapter.gradients().items()}
        return super().optimizer_step(step, pending)


class Setting:
    """A policy, a teacher with other weights and an adapter, and both once more in float64."""

    def __init__(self) -> None:
        student, other = tiny("qwen3"), tiny("qwen3", seed=8)
        self.exact_student, self.exact_teacher = Plain(student), Plain(other)
        self.policy = policy_on(own(student))
        self.scale = self.policy.adapter.spec.scale
        taught = policy_on(own(other), seed=3)
        self.teacher = NetworkTeacher(taught.base.network, taught.adapter)
        self.teacher_state = {n: t.double() for n, t in taught.adapter.state().items()}

    def by_teacher(self, trajectory: Trajectory) -> torch.Tensor:
        ids, mask = whole(trajectory)
        state, scale = self.teacher_state, self.scale
        return self.exact_teacher.logprobs(ids, mask, state, scale, vocab=VOCAB)[0]

    def by_policy(self, trajectory: Trajectory, state: Tensors) -> torch.Tensor:
        ids, mask = whole(trajectory)
        return self.exact_student.logprobs(ids, mask, state, self.scale, vocab=VOCAB)[0]


def whole(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    prompt = trajectory.prompt_ids
    return prompt + trajectory.ids, [0] * len(prompt) + trajectory.loss_mask


def groups_of(setting: Setting) -> list[Group]:
    """Ragged groups, partly of several turns, sampled (as far as anyone can tell) by the policy."""
    chance = torch.Generator().manual_seed(2)

    def draw(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=chance).tolist()

    state = {name: t.double() for name, t in setting.policy.adapter.state().items()}
    groups = []
    for number, length in enumerate([5, 2, 11]):
        prompt, members = draw(length), []
        for member in range(2):
            t = Trajectory("t", [], prompt)
            for turn in range(1 + member):
                if turn:
                    t.add_environment(draw(3))
                ids = draw(1 + 3 * number + turn)
                t.add_completion(Completion(ids, [0.0] * len(ids), True))
            with torch.no_grad():
                drawn = iter(setting.by_policy(t, state).tolist())
            t.sampled_logprobs = [next(drawn) if trained else 0.0 for trained in t.loss_mask]
            members.append(t)
        groups.append(Group(str(number), members))
    return groups


def rate(setting: Setting, trajectories: Sequence[Trajectory], budget: int) -> dict[str, float]:
    return assign(trajectories, setting.teacher.logprobs(trajectories, budget))


def test_an_advantage_is_what_the_teacher_thinks_better_of_a_token() -> None:
    # A token that the teacher calls impossible, and one without a number of the sampler.
    by_teacher = [-0.5, -2.0, -math.inf, -1.0]
    assert token_advantages(by_teacher, [-1.5, -1.0, -1.0, math.nan]) == pytest.approx(
        [1.0, -1.0, LEAST_LOGPROB + 1.0, 0.0]
    )
    t = Trajectory("t", [], [1])
    t.add_completion(Completion([5, 6], [-1.5, -1.0], True))
    t.add_environment([7])
    t.add_completion(Completion([8], [-0.25], True))
    measured = assign([t], [[-0.5, -2.0, -0.75]])
    assert t.token_advantages == [1.0, -1.0, -0.5]
    assert t.advantage == pytest.approx(-0.5 / 3)
    assert measured == pytest.approx({"reverse_kl": 0.5 / 3, "teacher_logprob": -3.25 / 3})


@pytest.mark.parametrize("budget", [WHOLE, 30, 1])
def test_loss_and_gradient_are_those_of_the_formula_however_the_batch_is_split(
    budget: int,
) -> None:
    setting = Setting()
    groups = groups_of(setting)
    members = [t for group in groups for t in group.members]
    measured = rate(setting, members, budget)
    leaf = leaves(setting.policy.adapter.state())
    training = Bare(setting.policy)
    update(training, training.grpo, groups, 1, budget)
    tokens = sum(t.trained_tokens for t in members)
    loss = torch.zeros((), dtype=torch.float64)
    distance = 0.0
    for t in members:
        policy = setting.by_policy(t, leaf)
        advantage = (setting.by_teacher(t) - policy).detach()
        loss = loss - (advantage * policy).sum() / tokens
        distance -= float(advantage.sum()) / tokens
    loss.backward()
    assert apart(training.given, gradients(leaf)) < 3e-5
    assert measured["reverse_kl"] == pytest.approx(distance, rel=1e-5)


def test_the_expected_gradient_of_a_token_is_that_of_the_reverse_kl() -> None:
    setting = Setting()
    prompt = [3, 14, 15, 9]
    state = {name: t.double() for name, t in setting.policy.adapter.state().items()}
    leaf = leaves(setting.policy.adapter.state())
    members = []
    for token in range(VOCAB):  # every token the policy could have drawn
        t = Trajectory("t", [], prompt)
        with torch.no_grad():
            t.add_completion(Completion([token], [0.0], True))
            t.sampled_logprobs = setting.by_policy(t, state).tolist()
        members.append(t)
    rate(setting, members, WHOLE)
    for t in members:  # as often as it draws it
        t.token_advantages = [
            VOCAB * math.exp(t.sampled_logprobs[0]) * advantage for advantage in t.token_advantages
        ]
    training = Bare(setting.policy)
    update(training, training.grpo, [Group("t", members)], 1, WHOLE)
    p = torch.stack([setting.by_policy(t, leaf)[0] for t in members])
    q = torch.stack([setting.by_teacher(t)[0] for t in members]).detach()
    divergence = (torch.exp(p) * (p - q)).sum()
    divergence.backward()
    assert float(divergence.detach()) > 0.1
    assert apart(training.given, gradients(leaf)) < 3e-5


def test_a_teacher_that_agrees_moves_nothing() -> None:
    setting = Setting()
    groups = groups_of(setting)
    members = [t for group in groups for t in group.members]
    same = [
        [p for p, trained in zip(t.sampled_logprobs, t.loss_mask, strict=True) if trained]
        for t in members
    ]
    assert assign(members, same)["reverse_kl"] == 0.0
    training = Bare(setting.policy)
    before = {name: t.clone() for name, t in setting.policy.adapter.state().items()}
    assert update(training, training.grpo, groups, 1, WHOLE)["grad_norm"] == 0.0
    after = setting.policy.adapter.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_a_trajectory_that_was_scored_nothing_is_measured() -> None:
    assert assign([], []) == {}
