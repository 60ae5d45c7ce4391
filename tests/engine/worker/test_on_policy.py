"""Before the first update the policy that trains is the policy that sampled, to the digit."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from reference import Plain
from tiny_decoders import LORA, VOCAB, own, policy_on, stir, tiny
from typed_settings import grpo_settings

from engine.worker.core.batch import Row
from engine.worker.core.trajectory import Completion
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.policy import Base, Policy
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.update.schedule import apply_step, make_optimizer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

STOPS = [7, 11, 13]
PROMPTS = [[3], [5, 9, 2, 40, 41], [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 14, 15, 16, 17], [3, 3]]


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def hub(vocab: int = VOCAB) -> Base:
    network = HubNetwork(tiny("qwen3"), vocab, "asked for")
    return Base(network, None, [0], Path())  # pyright: ignore[reportArgumentType]


def sampler_of(base: Base, rows: int = 6) -> Sampler:
    return base.network.sampler(SamplerNeeds(0, STOPS, letters, rows))


def ready(forward: str) -> tuple[Policy, Sampler]:
    if forward == "own":
        policy = policy_on(own(tiny("qwen3")))
    else:
        policy = Policy(hub(), grpo_settings(LORA))
        stir(policy.adapter, 2, 0.03)
    sampler = sampler_of(policy.base)
    sampler.load(policy.adapter)
    return policy, sampler


def trained_on(
    policy: Policy,
    prompts: list[list[int]],
    groups: Sequence[Sequence[Completion]],
    temperature: float,
) -> torch.Tensor:
    rows = [
        Row(p + c.ids, [0] * len(p) + [1] * len(c.ids), len(p))
        for p, g in zip(prompts, groups, strict=True)
        for c in g
    ]
    with torch.no_grad():
        return policy.logprobs(policy.collate(rows), temperature)[0]


def trained(
    policy: Policy, groups: Sequence[Sequence[Completion]], temperature: float
) -> torch.Tensor:
    return trained_on(policy, PROMPTS, groups, temperature)


def sampled(groups: Sequence[Sequence[Completion]]) -> torch.Tensor:
    return torch.tensor([x for g in groups for c in g for x in c.logprobs])


@pytest.mark.parametrize("forward", ["own", "transformers"])
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.8])
@pytest.mark.parametrize("stop", [(), ("qr", "a")], ids=["ids", "strings"])
def test_logprobs_at_step_0_are_the_sampled_ones(
    forward: str, temperature: float, stop: tuple[str, ...]
) -> None:
    policy, sampler = ready(forward)
    params = SamplingParams(14, temperature, stop=stop, seed=3)
    groups = sampler.generate(PROMPTS, 3, params)
    assert len({len(c.ids) for g in groups for c in g}) > 2 or temperature == 0
    assert any(c.finished for g in groups for c in g)
    assert (trained(policy, groups, temperature) - sampled(groups)).abs().max() < 5e-5


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_every_stop_id_ends_a_completion_is_kept_and_has_its_logprob(forward: str) -> None:
    policy, sampler = ready(forward)
    groups = sampler.generate(PROMPTS, 16, SamplingParams(30, 1.6, seed=1))
    ended = [c for g in groups for c in g if c.finished]
    assert {i for c in ended for i in c.ids[-1:]} == set(STOPS)
    for c in (c for g in groups for c in g):
        assert 0 < len(c.ids) == len(c.logprobs)
        assert not set(c.ids[:-1]) & set(STOPS)
        assert c.finished == (c.ids[-1] in STOPS)
        assert c.finished or len(c.ids) == 30
    gaps = (trained(policy, groups, 1.6) - sampled(groups)).abs()
    ends = torch.tensor([len(c.ids) for g in groups for c in g]).cumsum(0) - 1
    assert gaps[ends].max() < 5e-5  # the tokens that end a turn among them


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_with_top_p_the_logprobs_are_those_of_the_nucleus(forward: str) -> None:
    policy, sampler = ready(forward)
    exact = Plain(tiny("qwen3"))
    state = {k: v.double() for k, v in policy.adapter.state().items()}
    groups = sampler.generate(PROMPTS, 4, SamplingParams(10, 1.3, top_p=0.6, seed=5))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            logits = exact.logits(prompt + c.ids, state, policy.adapter.spec.scale) / 1.3
            for at, (token, value) in enumerate(zip(c.ids, c.logprobs, strict=True)):
                logs = logits[len(prompt) + at - 1].log_softmax(-1)
                order = logs.argsort(descending=True).tolist()
                kept, mass = [], 0.0
                while mass < 0.6:
                    kept.append(order[len(kept)])
                    mass += float(logs[kept[-1]].exp())
                assert token in kept
                assert value == pytest.approx(float(logs[token]) - math.log(mass), abs=1e-4)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    policy, sampler = ready("own")
    exact = Plain(tiny("qwen3"))
    state = {k: v.double() for k, v in policy.adapter.state().items()}
    (group,) = sampler.generate([PROMPTS[1]], 4000, SamplingParams(1, 1.4, seed=9))
    counts = torch.bincount(torch.tensor([c.ids[0] for c in group]), minlength=VOCAB).double()
    chance = (exact.logits(PROMPTS[1], state, 7 / 3)[-1] / 1.4).softmax(-1)
    likely = chance > 2 / 4000
    expected = chance[likely] * 4000
    surprise = ((counts[likely] - expected) ** 2 / expected).sum() / int(likely.sum())
    assert surprise < 2  # chi-square per degree of freedom


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_after_an_update_the_sampler_follows_when_it_loads_again(forward: str) -> None:
    policy, sampler = ready(forward)
    params = SamplingParams(8, 1.0, seed=2)
    before = sampler.generate(PROMPTS, 2, params)
    optimizer = make_optimizer(policy.parameters(), grpo_settings({"learning_rate": 0.05}))
    rows = [Row(PROMPTS[2], [0] + [1] * 13)]
    policy.logprobs(policy.collate(rows))[0].sum().backward()
    apply_step(optimizer, policy.adapter, 0.05, 0.0)
    sampler.load(policy.adapter)
    after = sampler.generate(PROMPTS, 2, params)
    assert (trained(policy, before, 1.0) - sampled(before)).abs().max() > 0.01
    assert (trained(policy, after, 1.0) - sampled(after)).abs().max() < 5e-5


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_padded_ids_are_out_of_reach_of_sampler_and_trainer_alike(forward: str) -> None:
    base = own(tiny("qwen3"), vocab=40) if forward == "own" else hub(vocab=40)
    policy = Policy(base, grpo_settings(LORA))
    sampler = sampler_of(base)
    sampler.load(policy.adapter)
    prompts = [[i % 40 for i in p] for p in PROMPTS]
    groups = sampler.generate(prompts, 8, SamplingParams(12, 1.5, seed=4))
    assert max(i for g in groups for c in g for i in c.ids) < 40
    assert (trained_on(policy, prompts, groups, 1.5) - sampled(groups)).abs().max() < 5e-5


def test_the_next_turn_of_a_game_is_sampled_as_it_is_trained() -> None:
    policy, sampler = ready("own")
    first = sampler.generate(PROMPTS[:2], 2, SamplingParams(6, 1.0, seed=6))
    longer, rows, wanted = [], [], []
    for prompt, group in zip(PROMPTS, first, strict=False):
        longer += [prompt + c.ids + [20, 21] for c in group]
    second = sampler.generate(longer, 1, SamplingParams(6, 1.0, seed=7))
    turns = [c for g in first for c in g]
    for number, ((last,), whole) in enumerate(zip(second, longer, strict=True)):
        prompt, c = PROMPTS[number // 2], turns[number]
        mask = [0] * len(prompt) + [1] * len(c.ids) + [0, 0] + [1] * len(last.ids)
        rows.append(Row(whole + last.ids, mask, len(prompt)))
        wanted += c.logprobs + last.logprobs
    with torch.no_grad():
        ours, _ = policy.logprobs(policy.collate(rows), 1.0)
    assert (ours - torch.tensor(wanted)).abs().max() < 5e-5
