"""What an update of GRPO does to the adapter, against the formulas in float64: every loss with
every advantage, with KL, clipping and capped importance weights at work, over two updates."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from reference import Plain, Played, Tensors, apart, gradients, leaves
from tiny_decoders import LORA, VOCAB, own, policy_on, stir, tiny
from typed_settings import grpo_settings

from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.grpo import update
from engine.worker.network.adapter import save_adapter
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.policy import Base, Policy
from engine.worker.rollouts.advantages import ADVANTAGES, assign
from engine.worker.training import Training
from engine.worker.update.losses import LOSSES
from engine.worker.update.schedule import make_optimizer, rate

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CLOSE = 2e-5
AFTER_A_STEP = 1e-2  # AdamW's first step is a sign, which rounding turns where a slope is nothing
WHOLE = 100_000  # a budget that holds every batch
SETTINGS: dict[str, Any] = {
    "loss": "dapo",
    "advantage": "group_norm",
    "clip_low": 0.1,
    "clip_high": 0.5,
    "kl_coef": 0.3,
    "updates_per_batch": 2,
    "tis_cap": 1.1,
    "max_tokens": 16,
    "temperature": 0.8,
    "learning_rate": 0.01,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
}


class Bare(Training):
    """A run reduced to what an update needs; keeps the adapter and its gradients before each."""

    def __init__(self, policy: Policy, settings: dict[str, Any]) -> None:
        self.grpo = grpo_settings(settings)
        self.policy, self.settings = policy, self.grpo
        self.optimizer = make_optimizer(policy.parameters(), self.grpo)
        self.done, self.total, self.state, self.evaluation = 0, 10, {}, None
        self.meter: Any = SimpleNamespace(count_microbatch=lambda rows: None)  # counts operations
        self.ranks = None
        self.states: list[Tensors] = []
        self.found: list[Tensors] = []

    def optimizer_step(self, step: int, pending: Any) -> tuple[Any, float, float]:
        self.states.append(self.policy.adapter.state())
        self.found.append({k: g.clone() for k, g in self.policy.adapter.gradients().items()})
        return super().optimizer_step(step, pending)


def learn(training: Bare, groups: Sequence[Group], step: int, budget: int) -> dict[str, Any]:
    return update(training, training.grpo, groups, step, budget)


def play(model: Plain, policy: Policy, seed: int, settings: dict[str, Any]) -> list[Group]:
    """Two lively groups, ragged and partly of several turns, with members that failed; a uniform
    group; and one whose rewards differ by little."""
    chance = torch.Generator().manual_seed(seed)
    state = {name: t.double() for name, t in policy.adapter.state().items()}

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=chance).tolist()

    def member(number: int, prompt: list[int], reward: float) -> Trajectory:
        t = Trajectory("t", [], prompt, reward=reward)
        lengths = [1, 7, 3, 12][number % 4], 2 + number
        for turn in range(1 + number % 2):
            if turn:
                t.add_environment(ids(3))
            said = ids(lengths[turn])
            t.add_completion(Completion(said, [0.0] * len(said), True))
        mask = [0] * len(prompt) + t.loss_mask
        with torch.no_grad():
            exact, _ = model.logprobs(
                prompt + t.ids,
                mask,
                state,
                policy.adapter.spec.scale,
                vocab=VOCAB,
                temperature=settings["temperature"],
            )
        noise = 0.3 * torch.randn(len(exact), generator=chance)
        drawn = iter((exact + noise).tolist())
        t.sampled_logprobs = [next(drawn) if trained else 0.0 for trained in t.loss_mask]
        return t

    rewards = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.0], [0.5] * 4, [0.30, 0.33, 0.30, 0.29]]
    groups = []
    for number, given_rewards in enumerate(rewards):
        prompt = ids([4, 19, 6, 1][number])
        groups.append(
            Group(str(number), [member(i, prompt, r) for i, r in enumerate(given_rewards)])
        )
    groups[1].members[3].error = "boom"
    groups[1].members[3].reward = 99.0
    assign(groups, settings["advantage"])
    return groups


def wanted(
    model: Plain,
    groups: Sequence[Group],
    states: Sequence[Tensors],
    start: Tensors | None,
    scale: float,
    settings: dict[str, Any],
) -> list[tuple[float, Tensors, list[Played]]]:
    """(loss, gradients, what was computed) of each update, from the states before them."""
    scored = [t for g in groups for t in g.members if t.error is None]
    given_advantages: dict[int, float] = {}
    for g in groups:
        alive = [t for t in g.members if t.error is None]
        values = reference.advantages(settings["advantage"], [t.reward for t in alive])
        flat = len({t.reward for t in alive}) == 1
        given_advantages |= {id(t): 0.0 if flat else v for t, v in zip(alive, values, strict=True)}

    def logprobs(t: Trajectory, lora: Tensors | None) -> torch.Tensor:
        mask = [0] * len(t.prompt_ids) + t.loss_mask
        ids = t.prompt_ids + t.ids
        temperature = settings["temperature"]
        return model.logprobs(ids, mask, lora, scale, vocab=VOCAB, temperature=temperature)[0]

    old: list[torch.Tensor] = []
    out = []
    frozen = {k: v.double() for k, v in start.items()} if start else None
    anchors = [logprobs(t, frozen).detach() for t in scored]
    for state in states:
        leaf = leaves(state)
        now = [logprobs(t, leaf) for t in scored]
        old = old or [p.detach() for p in now]
        played = [
            Played(
                p,
                o,
                torch.tensor(
                    [x for x, m in zip(t.sampled_logprobs, t.loss_mask, strict=True) if m]
                ).double(),
                anchor,
                given_advantages[id(t)],
            )
            for t, p, o, anchor in zip(scored, now, old, anchors, strict=True)
        ]
        knobs = ("clip_low", "clip_high", "tis_cap", "kl_coef", "max_tokens")
        loss = reference.policy_loss(settings["loss"], played, **{k: settings[k] for k in knobs})
        loss.backward()
        out.append((float(loss.detach()), gradients(leaf), played))
    return out


def clipped(played: Sequence[Played], settings: dict[str, Any]) -> tuple[int, int]:
    """Ratios beyond the lower and the upper bound: of tokens, or of whole trajectories."""
    logs = [(p.policy - p.old).detach() for p in played]
    if settings["loss"] == "gspo":
        logs = [x.mean()[None] for x in logs]
    ratios = torch.exp(torch.cat(logs))
    return (
        int((ratios < 1 - settings["clip_low"]).sum()),
        int((ratios > 1 + settings["clip_high"]).sum()),
    )


CASES = [(loss, kind, 0.3) for loss in LOSSES for kind in ADVANTAGES]
CASES += [(loss, "group_norm", 0.0) for loss in LOSSES]


@pytest.mark.parametrize(("loss", "advantage", "kl_coef"), CASES)
def test_both_updates_have_the_gradient_of_the_formula(
    loss: str, advantage: str, kl_coef: float
) -> None:
    settings = SETTINGS | {"loss": loss, "advantage": advantage, "kl_coef": kl_coef}
    check(settings, seed=len(loss) + len(advantage))


@examples(deadline=None, max_examples=3)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from(sorted(LOSSES)),
    advantage=st.sampled_from(sorted(ADVANTAGES)),
    temperature=st.sampled_from([0.5, 1.0, 1.4]),
)
def test_any_batch_has_the_gradient_of_the_formula(
    seed: int, loss: str, advantage: str, temperature: float
) -> None:
    changes = {"loss": loss, "advantage": advantage, "temperature": temperature}
    # Wherever the search goes, terms that nearly cancel leave float32 fewer digits.
    check(SETTINGS | changes, seed, active=False, close=2e-4)


def check(
    settings: dict[str, Any], seed: int, *, active: bool = True, close: float = CLOSE
) -> None:
    model = tiny("qwen3", seed=seed)
    exact = Plain(model)
    policy = policy_on(own(model), seed=seed)
    groups = play(exact, policy, seed, settings)
    training = Bare(policy, settings)
    measured = learn(training, groups, 1, WHOLE)
    scale = policy.adapter.spec.scale
    expected = wanted(exact, groups, training.states, None, scale, settings)
    assert len(training.found) == len(expected) == 2
    for found, (_, slopes, _) in zip(training.found, expected, strict=True):
        assert apart(found, slopes) < close
    _, _, second = expected[1]
    if active:  # otherwise half of the formula would not have been looked at
        below, above = clipped(second, settings)
        assert below > 1 and above > 1
        weights = torch.cat([torch.exp(p.old - p.sampled) for p in second])
        assert 3 < int((weights > settings["tis_cap"]).sum()) < len(weights) - 3
    if settings["kl_coef"]:
        divergences = [
            torch.exp(d) - d - 1
            for _, _, played in expected
            for d in [torch.cat([(p.reference - p.policy).detach() for p in played])]
        ]
        assert measured["kl"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)
    else:
        assert measured["kl"] is None


def test_the_gap_to_the_sampler_and_the_entropy_are_those_of_the_first_update() -> None:
    model = tiny("qwen3")
    exact = Plain(model)
    policy = policy_on(own(model))
    settings = SETTINGS | {"kl_coef": 0.1}
    groups = play(exact, policy, 1, settings)
    state = {k: v.double() for k, v in policy.adapter.state().items()}
    measured = learn(Bare(policy, settings), groups, 1, WHOLE)
    gaps, entropies = [], []
    for t in (t for g in groups for t in g.members if t.error is None):
        mask = [0] * len(t.prompt_ids) + t.loss_mask
        values, entropy = exact.logprobs(
            t.prompt_ids + t.ids, mask, state, 7 / 3, vocab=VOCAB, temperature=0.8
        )
        sampled = [x for x, m in zip(t.sampled_logprobs, t.loss_mask, strict=True) if m]
        gaps += (values - torch.tensor(sampled).double()).abs().tolist()
        entropies += entropy.tolist()
    assert measured["sampler_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert measured["sampler_gap_max"] == pytest.approx(max(gaps), rel=1e-4)
    assert measured["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def updated(
    groups: list[Group], budget: int, policy: Policy, settings: dict[str, Any]
) -> tuple[list[Tensors], Tensors]:
    training = Bare(policy, settings)
    learn(training, groups, 1, budget)
    return training.found, policy.adapter.state()


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_size_of_microbatches_does_not_change_the_update(loss: str, kl_coef: float) -> None:
    settings = SETTINGS | {"loss": loss, "kl_coef": kl_coef}
    exact = Plain(tiny("qwen3"))
    runs = []
    for budget in (WHOLE, 40, 1):
        policy = policy_on(own(tiny("qwen3")))
        groups = play(exact, policy, 2, settings)
        runs.append(updated(groups, budget, policy, settings)[0])
    for run in runs[1:]:
        assert apart(run[0], runs[0][0]) < CLOSE
        assert apart(run[1], runs[0][1]) < AFTER_A_STEP


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_transformers_with_peft_makes_the_same_update(loss: str) -> None:
    settings = SETTINGS | {"loss": loss}
    exact = Plain(tiny("qwen3"))
    first = policy_on(own(tiny("qwen3")))
    network = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
    second = Policy(Base(network, None, [0], Path()), grpo_settings(LORA))  # pyright: ignore
    second.adapter.load(first.adapter.state())
    groups = play(exact, first, 3, settings)
    ours, _ = updated(groups, WHOLE, first, settings)
    theirs, _ = updated(groups, 200, second, settings)
    assert apart(ours[0], theirs[0]) < CLOSE
    assert apart(ours[1], theirs[1]) < AFTER_A_STEP


def test_the_reference_of_a_continued_run_is_the_adapter_it_started_from(tmp_path: Path) -> None:
    model = tiny("qwen3")
    exact = Plain(model)
    base = own(model)
    before = policy_on(base, seed=9)
    save_adapter(before.adapter, tmp_path, "tiny")
    start = before.adapter.state()
    policy = Policy(base, grpo_settings(LORA), tmp_path)
    stir(policy.adapter, 10, 0.03)  # as some steps would
    groups = play(exact, policy, 4, SETTINGS)
    training = Bare(policy, SETTINGS)
    learn(training, groups, 1, WHOLE)
    scale = policy.adapter.spec.scale
    expected = wanted(exact, groups, training.states, start, scale, SETTINGS)
    for found, (_, slopes, _) in zip(training.found, expected, strict=True):
        assert apart(found, slopes) < CLOSE
    other = wanted(exact, groups, training.states, None, scale, SETTINGS)
    assert apart(training.found[1], other[1][1]) > 0.05, "the base would have been another anchor"


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_uniform_groups_and_failed_members_give_no_gradient_at_all(loss: str) -> None:
    settings = SETTINGS | {"loss": loss, "kl_coef": 0.0}
    exact = Plain(tiny("qwen3"))
    policy = policy_on(own(tiny("qwen3")))
    groups = play(exact, policy, 5, settings)
    silent = [groups[2], Group("failed", [t for t in groups[1].members if t.error])]
    before = policy.adapter.state()
    training = Bare(policy, settings)
    measured = learn(training, silent, 1, WHOLE)
    assert not training.found and measured["grad_norm"] == 0.0
    after = policy.adapter.state()
    assert all(torch.equal(before[k], after[k]) for k in before)
    # Trained beside others they move nothing either: their own tokens have no slope.
    moved = played_slopes(exact, policy, groups, settings)
    for number, group in enumerate(groups):
        for member, t in enumerate(group.members):
            still = number == 2 or t.error is not None
            assert (moved[number, member] == 0.0) is still


def played_slopes(
    exact: Plain, policy: Policy, groups: list[Group], settings: dict[str, Any]
) -> dict[tuple[int, int], float]:
    """How far the first gradient changes when one trajectory's sampled tokens are replaced."""
    first = {k: v.clone() for k, v in policy.adapter.state().items()}
    base = gradient(policy, groups, settings)
    found = {}
    for number, group in enumerate(groups):
        for member, t in enumerate(group.members):
            kept = t.ids
            t.ids = [(i + 1) % VOCAB if m else i for i, m in zip(kept, t.loss_mask, strict=True)]
            policy.adapter.load(first)
            other = gradient(policy, groups, settings)
            t.ids = kept
            found[number, member] = max(float((other[k] - base[k]).abs().max()) for k in base)
    policy.adapter.load(first)
    return found


def gradient(policy: Policy, groups: list[Group], settings: dict[str, Any]) -> Tensors:
    start = policy.adapter.state()
    training = Bare(policy, settings | {"updates_per_batch": 1})
    learn(training, groups, 1, WHOLE)
    policy.adapter.load(start)
    return training.found[0]


def test_what_the_environment_said_is_read_and_never_trained() -> None:
    settings = SETTINGS | {"kl_coef": 0.0, "updates_per_batch": 1}
    policy = policy_on(own(tiny("qwen3")))
    network, adapter = policy.base.network, policy.adapter

    def group(said: list[int]) -> Group:
        members = []
        for reward in (1.0, 0.0):
            t = Trajectory("t", [], [5, 6, 7], reward=reward)
            t.add_completion(Completion([8, int(reward)], [-1.0, -1.0], True))
            t.add_environment(said)
            members.append(t)
        found = Group("t", members)
        assign([found], "group_center")
        return found

    # Environment tokens at the end: whatever they are, nothing is trained on them.
    one = gradient(policy, [group([30, 31, 32])], settings)
    two = gradient(policy, [group([40, 41, 42])], settings)
    without = gradient(policy, [group([])], settings)
    assert apart(one, without) < CLOSE and apart(two, without) < CLOSE
    # Between turns they are read: what comes after is predicted from them.
    between = []
    for said in ([30, 31], [40, 41]):
        found = group(said)
        for t in found.members:
            t.add_completion(Completion([9], [-1.0], True))
        between.append(gradient(policy, [found], settings))
    assert apart(between[0], between[1]) > 0.05
    assert network.forward == "own" and adapter is policy.adapter


def test_without_scored_tokens_there_is_no_update_and_no_division_by_zero() -> None:
    policy = policy_on(own(tiny("qwen3")))
    empty = Group("t", [Trajectory("t", [], [1, 2], reward=r) for r in (0.0, 1.0)])
    assign([empty], "group_center")
    training = Bare(policy, SETTINGS)
    assert learn(training, [empty], 1, WHOLE)["clip_share"] == 0.0
    assert not training.found


def test_the_updates_follow_adamw_with_clipping_and_decay() -> None:
    changes = {"weight_decay": 0.1, "max_grad_norm": 0.01, "warmup_ratio": 0.5}
    settings = SETTINGS | changes | {"lr_schedule": "cosine"}
    model = tiny("qwen3")
    exact = Plain(model)
    policy = policy_on(own(model))
    groups = play(exact, policy, 6, settings)
    training = Bare(policy, settings)
    oracle = reference.AdamW(policy.adapter.state(), weight_decay=0.1, max_grad_norm=0.01)
    learn(training, groups, 3, WHOLE)
    assert rate(3, 10, grpo_settings(settings)) == pytest.approx(0.01 * 3 / 5)
    for found in training.found:
        oracle.step(found, 0.006)
    assert apart(policy.adapter.state(), oracle.weights) < 1e-6
    assert apart(training.states[0], oracle.weights) > 1e-3
