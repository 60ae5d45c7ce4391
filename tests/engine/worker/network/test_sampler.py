"""The sampler's numbers are the trainer's numbers, whatever is padded, shared or dropped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.worker.components import make_sampler
from engine.worker.core.batch import Row
from engine.worker.network.policy import Base, Policy, load_base
from engine.worker.network.sampler import Sampler, SamplingParams, nucleus
from engine.worker.rollouts.renderer import Renderer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ASK = ["Add 3 and 4.", "Reverse planet.", "Which is larger, 12 or 80?", "Sort 9 3 71."]


def prompts(renderer: Renderer, texts: list[str]) -> list[list[int]]:
    return [renderer.prompt([{"role": "user", "content": t}]) for t in texts]


def ready(base: Base) -> tuple[Renderer, Sampler]:
    renderer = Renderer(base.tokenizer, base.stop_ids)
    return renderer, make_sampler(base, renderer)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
def test_sampled_logprobs_are_the_policys_at_the_same_temperature(
    pebble: Base, tuned: Callable[[Base], Policy], temperature: float
) -> None:
    policy = tuned(pebble)
    renderer, sampler = ready(pebble)
    sampler.load(policy.adapter)
    asked = prompts(renderer, ASK)
    groups = sampler.generate(asked, 6, SamplingParams(20, temperature, seed=4))
    rows = [
        Row(prompt + c.ids, [0] * len(prompt) + [1] * len(c.ids))
        for prompt, group in zip(asked, groups, strict=True)
        for c in group
    ]
    with torch.no_grad():
        ours, _ = policy.logprobs(pebble.network.collate(rows), temperature)
    sampled = torch.tensor([x for g in groups for c in g for x in c.logprobs])
    assert len(sampled) > 50
    assert (ours - sampled).abs().max() < 5e-5


def test_greedy_completions_do_not_depend_on_company_or_group_size(pebble: Base) -> None:
    renderer, sampler = ready(pebble)
    asked = prompts(renderer, ASK)
    together = sampler.generate(asked, 2, SamplingParams(20, 0.0))
    for prompt, group in zip(asked, together, strict=True):
        ((alone,),) = sampler.generate([prompt], 1, SamplingParams(20, 0.0))
        assert [c.ids for c in group] == [alone.ids, alone.ids]


def test_a_completion_ends_with_its_end_token_or_is_marked_as_cut(pebble: Base) -> None:
    renderer, sampler = ready(pebble)
    asked = prompts(renderer, ASK)
    for group in sampler.generate(asked, 8, SamplingParams(6, 1.0, seed=1)):
        for c in group:
            assert c.finished == (c.ids[-1] in renderer.stop_ids)
            assert not set(c.ids[:-1]) & renderer.stop_ids
            assert len(c.ids) == len(c.logprobs) <= 6
            assert c.finished or len(c.ids) == 6


def test_a_seed_repeats_and_another_seed_differs(pebble: Base) -> None:
    renderer, sampler = ready(pebble)
    asked = prompts(renderer, ASK)

    def run(seed: int) -> list[list[int]]:
        out = sampler.generate(asked, 8, SamplingParams(12, 1.0, seed=seed))
        return [c.ids for group in out for c in group]

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_a_stop_string_ends_a_completion_even_when_tokens_split_it(pebble: Base) -> None:
    renderer, sampler = ready(pebble)
    ((free,),) = sampler.generate(prompts(renderer, ["Repeat planet."]), 1, SamplingParams(24, 0.0))
    text = renderer.completion_text(free.ids)
    stop = text[1:3]
    ((cut,),) = sampler.generate(
        prompts(renderer, ["Repeat planet."]), 1, SamplingParams(24, 0.0, stop=(stop,))
    )
    assert cut.finished
    assert renderer.completion_text(cut.ids) == text[: text.index(stop) + 2]


def test_ids_without_a_token_are_never_sampled(random_model: Path) -> None:
    base = load_base(random_model, torch.device("cpu"), "float32")
    renderer, sampler = ready(base)
    assert base.vocab < base.network.shape.vocab
    groups = sampler.generate(prompts(renderer, ASK), 16, SamplingParams(20, 2.0, seed=2))
    assert max(i for g in groups for c in g for i in c.ids) < base.vocab


def test_a_nucleus_keeps_only_the_likeliest_and_renormalises() -> None:
    logprobs = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    kept, index = nucleus(logprobs, 0.7)
    assert index[0].tolist() == [1, 3, 0, 2]
    assert kept.exp()[0].tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])
    assert nucleus(logprobs, 0.45)[0].exp()[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_a_nucleus_wider_than_the_likeliest_looked_at_is_found() -> None:
    flat = torch.full((1, 1000), 1 / 1000).log()
    peaked = flat.clone()
    peaked[0, 3] = 2.0
    kept, index = nucleus(torch.cat([flat, peaked.log_softmax(-1)]), 0.8005)
    assert kept.isfinite().sum(-1).tolist() == [801, 1]
    assert int(index[1, 0]) == 3


def test_streamed_ids_are_the_generated_ones(pebble: Base) -> None:
    renderer, sampler = ready(pebble)
    (prompt,) = prompts(renderer, ["Add 5 and 9."])
    ((whole,),) = sampler.generate([prompt], 1, SamplingParams(20, 0.0))
    assert list(sampler.stream(prompt, SamplingParams(20, 0.0))) == whole.ids
