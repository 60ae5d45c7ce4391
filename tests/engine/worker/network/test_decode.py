"""The fast sampler against transformers' own generation, against float64, and against itself in
other company."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from reference import Plain
from tiny_decoders import VOCAB, own, spec, stir, tiny
from transformers import GenerationConfig

from engine.worker.core.batch import Row
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import FlatAdapter
from engine.worker.network.decode import DecoderSampler
from engine.worker.network.decoder import Decoder
from engine.worker.network.hub_sampler import HubSampler
from engine.worker.network.sampler import (
    SamplerNeeds,
    SamplingParams,
    draw,
    pick,
    row_key,
    uniforms,
)
from engine.worker.network.weights import Weights
from engine.worker.ops.packing import pack

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

STOP = 7
PROMPTS = [
    [(11 * i * i + 5 * i + k) % VOCAB for i in range(n)] for k, n in enumerate((9, 3, 21, 6))
]


def letters(ids: Sequence[int]) -> str:
    """Two letters for each id, so that a stop string can lie across two tokens."""
    return "".join(chr(97 + i % 26) + chr(65 + i // 26) for i in ids)


def needs(stop_ids: Sequence[int] = (STOP,), max_rows: int = 256) -> SamplerNeeds:
    return SamplerNeeds(0, stop_ids, letters, max_rows)


def fast(decoder: Decoder, *, vocab: int = VOCAB, **needed: Any) -> DecoderSampler:
    return DecoderSampler(decoder, needs(**needed), vocab)


def ids_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.ids for c in group] for group in groups]


def furthest(
    plain: Plain,
    groups: list[list[Completion]],
    params: SamplingParams,
    adapter: FlatAdapter | None = None,
) -> float:
    """The largest error of a sampled log-probability, against float64."""
    lora = None if adapter is None else {k: t.double() for k, t in adapter.state().items()}
    scale = adapter.spec.scale if adapter is not None else 0.0
    worst, seen = 0.0, 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            logits = plain.logits(prompt + c.ids, lora, scale)[len(prompt) - 1 : -1]
            for z, token, logprob in zip(logits, c.ids, c.logprobs, strict=True):
                p = torch.softmax(z / (params.temperature or 1.0), -1)
                kept, mass = [], 0.0
                for i in p.argsort(descending=True).tolist():
                    if mass >= params.top_p:
                        break
                    kept.append(i)
                    mass += float(p[i])
                assert token in kept
                worst = max(worst, abs(float((p[token] / mass).log()) - logprob))
                seen += 1
    assert seen > 60
    return worst


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    model = tiny(family)
    plan = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=STOP, pad_token_id=0)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plan)  # pyright: ignore
        wanted.append([out[0, len(prompt) :].tolist()] * 3)
    got = fast(Decoder.from_transformers(model)).generate(PROMPTS, 3, SamplingParams(24, 0.0))
    assert ids_of(got) == wanted


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.6, 1.0), (1.5, 1.0), (0.9, 0.7)])
def test_logprobs_are_of_the_distribution_sampled_from(
    family: str, temperature: float, top_p: float
) -> None:
    model = tiny(family)
    plain = Plain(model)
    params = SamplingParams(12, temperature, top_p, seed=3)
    groups = fast(Decoder.from_transformers(model), stop_ids=()).generate(PROMPTS, 4, params)
    assert furthest(plain, groups, params) < 1e-4


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_is_sampled_from_merged_or_not(merge: bool) -> None:
    model = tiny("qwen2")
    plain = Plain(model)
    decoder = Decoder.from_transformers(model)
    for targets in ((), ("q_proj", "v_proj", "down_proj")):
        adapter = stir(decoder.new_adapter(spec(*targets), 0))
        adapter.applied = Weights(decoder.layers, adapter, merge=merge)
        sampler = fast(decoder, stop_ids=())
        sampler.load(adapter)
        params = SamplingParams(12, 1.0, seed=5)
        groups = sampler.generate(PROMPTS, 4, params)
        assert furthest(plain, groups, params, adapter) < 1e-4
        assert furthest(plain, groups, params) > 0.01


def test_a_changed_adapter_is_sampled_from_as_it_is_now() -> None:
    model = tiny("qwen3")
    plain = Plain(model)
    decoder = Decoder.from_transformers(model)
    sampler = fast(decoder, stop_ids=())
    params = SamplingParams(12, 1.0, seed=5)
    base = ids_of(sampler.generate(PROMPTS, 4, params))
    adapter = decoder.new_adapter(spec(), 0)
    sampler.load(adapter)
    assert ids_of(sampler.generate(PROMPTS, 4, params)) == base  # B is zero
    with torch.no_grad():
        adapter.flat.add_(0.1)
    sampler.load(adapter)
    changed = sampler.generate(PROMPTS, 4, params)
    assert furthest(plain, changed, params, adapter) < 1e-4
    assert ids_of(changed) != base
    sampler.load(None)
    assert ids_of(sampler.generate(PROMPTS, 4, params)) == base


def test_a_completion_does_not_depend_on_what_else_is_under_way() -> None:
    sampler = fast(Decoder.from_transformers(tiny("qwen3", initializer_range=0.15)))
    params = SamplingParams(24, 1.0, seed=11)
    wanted = sampler.generate(PROMPTS, 8, params)
    assert {c.finished for group in wanted for c in group} == {True, False}
    for rows in (32, 8, 5, 1):  # 5 holds no whole group
        sampler.max_rows = rows
        got = sampler.generate(PROMPTS, 8, params)
        assert ids_of(got) == ids_of(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
                assert a.finished == b.finished
    (alone,) = sampler.generate(PROMPTS[:1], 3, params)
    assert [c.ids for c in alone] == [c.ids for c in wanted[0][:3]]


def test_equal_prompts_are_read_once_and_answered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    sampler = fast(Decoder.from_transformers(tiny("qwen3")))
    forward = sampler._current_forward(64)
    reader = forward.read
    monkeypatch.setattr(forward, "read", lambda p: read.extend(p) or reader(p))
    groups = sampler.generate([PROMPTS[0]] * 5, 1, SamplingParams(12, 1.0))
    assert read == [PROMPTS[0]]
    assert len({tuple(c.ids) for group in groups for c in group}) == 5


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_tokens_come_as_often_as_their_probability_says(top_p: float) -> None:
    model = tiny("llama")
    plain = Plain(model)
    draws = 6000
    params = SamplingParams(1, 1.3, top_p, seed=2)
    (group,) = fast(Decoder.from_transformers(model), max_rows=2000).generate(
        [PROMPTS[0]], draws, params
    )
    p = torch.softmax(plain.logits(PROMPTS[0])[-1] / 1.3, -1)
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0
    p /= p.sum()
    counts = torch.bincount(torch.tensor([c.ids[0] for c in group]), minlength=VOCAB).double()
    assert counts[p == 0].sum() == 0
    often = p * draws >= 5
    assert int(often.sum()) > 5
    chi = float(((counts - p * draws) ** 2 / (p * draws))[often].sum())
    freedom = int(often.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ({"top_k": 2}, {0: 0.4 / 0.7, 1: 0.3 / 0.7}),
        ({"top_k": 9}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
        ({"min_p": 0.6}, {0: 0.4 / 0.7, 1: 0.3 / 0.7}),
        ({"min_p": 0.45}, {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}),
        # min_p leaves three, of which top_k leaves two, of which top_p needs one.
        ({"min_p": 0.45, "top_k": 2, "top_p": 0.5}, {0: 1.0}),
        ({"top_k": 3, "top_p": 0.7}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_k": 1}, {0: 1.0}),
    ],
)
def test_only_what_top_k_and_min_p_leave_is_drawn(
    named: dict[str, Any], left: dict[int, float]
) -> None:
    draws = 4000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().add(3.0).repeat(draws, 1)
    random_numbers = torch.arange(draws, dtype=torch.float64).add(0.5).div(draws)
    ids, logprobs = draw(logits, SamplingParams(1, **named), random_numbers)
    assert set(ids.tolist()) == set(left)
    for token, probability in left.items():
        drawn = ids == token
        assert int(drawn.sum()) == pytest.approx(probability * draws, abs=2)
        assert logprobs[drawn].exp().tolist() == pytest.approx([probability] * int(drawn.sum()))


def test_wide_distributions_are_inverted_exactly() -> None:
    chance = torch.Generator().manual_seed(1)
    p = torch.rand(7, 3001, generator=chance) * (torch.rand(7, 3001, generator=chance) < 0.1)
    sums = p.double().cumsum(-1)
    for u in (0.0, 0.25, 0.77, 1 - 2.0**-52):
        at = pick(p, torch.full((7,), u, dtype=torch.float64))
        assert (p.gather(1, at[:, None]) > 0).all()
        high = sums.gather(1, at[:, None])[:, 0] / sums[:, -1]
        low = high - p.double().gather(1, at[:, None])[:, 0] / sums[:, -1]
        assert (low <= u + 1e-12).all() and (high >= u - 1e-12).all()


def test_uniform_numbers_differ_by_seed_prompt_member_and_position() -> None:
    keys = [row_key(s, p, m) for s in (0, 1, -3) for p in range(5) for m in range(5)]
    table = uniforms(torch.tensor(keys)[:, None], torch.arange(400))
    assert table.unique().numel() == table.numel()
    assert table.min() >= 0 and table.max() < 1
    assert float(table.mean()) == pytest.approx(0.5, abs=0.01)
    assert float((table[:, 1:] * table[:, :-1]).mean()) == pytest.approx(0.25, abs=0.01)
    assert float((table[1:] * table[:-1]).mean()) == pytest.approx(0.25, abs=0.01)


def test_ids_beyond_the_vocabulary_are_never_sampled() -> None:
    model = tiny("qwen3")
    plain = Plain(model)
    decoder = Decoder.from_transformers(model)
    vocab = 40
    hot = SamplingParams(12, 3.0, seed=1)
    groups = fast(decoder, vocab=vocab, stop_ids=()).generate(PROMPTS, 8, hot)
    assert max(i for group in groups for c in group for i in c.ids) < vocab
    free = fast(decoder, stop_ids=()).generate(PROMPTS, 8, hot)
    assert max(i for group in free for c in group for i in c.ids) >= vocab
    first = groups[0][0]
    p = (plain.logits(PROMPTS[0])[-1, :vocab] / 3.0).log_softmax(-1)
    assert first.logprobs[0] == pytest.approx(float(p[first.ids[0]]), abs=1e-4)


def test_a_stop_string_across_two_tokens_ends_a_completion() -> None:
    sampler = fast(Decoder.from_transformers(tiny("qwen3")), stop_ids=())
    ((free,),) = sampler.generate(PROMPTS[:1], 1, SamplingParams(16, 1.0, seed=4))
    text = letters(free.ids)
    stop = text[9:11]  # the second letter of token 4 and the first of token 5
    end = text.index(stop) + 2
    ((cut,),) = sampler.generate(PROMPTS[:1], 1, SamplingParams(16, 1.0, stop=(stop,), seed=4))
    assert cut.finished and not free.finished
    assert cut.ids == free.ids[: -(-end // 2)]


def test_every_completion_is_announced_once_when_it_ends() -> None:
    sampler = fast(Decoder.from_transformers(tiny("qwen3", initializer_range=0.15)), max_rows=6)
    told: list[tuple[int, int, Completion]] = []
    groups = sampler.generate(
        PROMPTS, 4, SamplingParams(40, 1.0, seed=1), lambda p, m, c: told.append((p, m, c))
    )
    assert sorted((p, m) for p, m, _ in told) == [(p, m) for p in range(4) for m in range(4)]
    assert all(groups[p][m] == c for p, m, c in told)
    # One wave: the order is that of the lengths.
    sampler.max_rows = 16
    told.clear()
    sampler.generate(
        PROMPTS, 4, SamplingParams(40, 1.0, seed=1), lambda p, m, c: told.append((p, m, c))
    )
    lengths = [len(c.ids) for _, _, c in told]
    assert lengths == sorted(lengths) and len(set(lengths)) > 3


def test_a_long_completion_holds_up_no_waiting_prompt() -> None:
    decoder = Decoder.from_transformers(tiny("qwen3", initializer_range=0.15))
    sampler = fast(decoder, stop_ids=range(6), max_rows=4)
    prompts = [[*PROMPTS[0], k] for k in range(16)]  # of one length, so first come, first served
    told: list[int] = []
    params = SamplingParams(60, 1.0, seed=1)
    groups = sampler.generate(prompts, 1, params, lambda p, m, c: told.append(p))
    lengths = sorted(len(group[0].ids) for group in groups)
    assert lengths[-1] > 2 * lengths[8]
    # In waves of four nobody of a later wave would end before everybody of an earlier one.
    waves = [p // 4 for p in told]
    assert waves != sorted(waves)


def test_streamed_ids_are_the_generated_ones() -> None:
    sampler = fast(Decoder.from_transformers(tiny("llama")))
    params = SamplingParams(20, 1.0, seed=9)
    ((whole,),) = sampler.generate(PROMPTS[2:3], 1, params)
    assert list(sampler.stream(PROMPTS[2], params)) == whole.ids


def test_nothing_asked_gives_nothing_and_one_token_is_possible() -> None:
    sampler = fast(Decoder.from_transformers(tiny("llama")))
    assert sampler.generate([], 4, SamplingParams(5)) == []
    groups = sampler.generate(PROMPTS, 2, SamplingParams(1, 0.0))
    assert all(len(c.ids) == 1 for group in groups for c in group)


def test_training_goes_on_after_sampling_with_the_same_tables() -> None:
    base = own(tiny("qwen3"))
    decoder: Any = base.network
    adapter = stir(decoder.new_adapter(spec(), 0))
    sampler = fast(decoder.decoder)
    sampler.load(adapter)
    (group,) = sampler.generate(PROMPTS[:1], 1, SamplingParams(10, 1.0))
    # The layout of this row is that of the prompt just read.
    row = Row([*PROMPTS[0], group[0].ids[0]], [0] * len(PROMPTS[0]) + [1])
    values, _ = base.network.logprobs(pack([row]), adapter)
    values.sum().backward()
    assert values[0].item() == pytest.approx(group[0].logprobs[0], abs=1e-4)
    assert float(adapter.flat.grad.norm()) > 0


def test_bfloat16_weights_give_bfloat16s_logprobs() -> None:
    model = tiny("qwen3", initializer_range=0.1)
    plain = Plain(model)
    decoder = Decoder.from_transformers(model.to(torch.bfloat16))
    adapter = stir(decoder.new_adapter(spec(), 0), size=0.05)
    sampler = fast(decoder, stop_ids=())
    sampler.load(adapter)
    params = SamplingParams(12, 1.0, seed=5)
    groups = sampler.generate(PROMPTS, 4, params)
    assert furthest(plain, groups, params, adapter) < 0.06


def test_the_fallback_draws_the_same_completions() -> None:
    model = tiny("qwen2", initializer_range=0.15)
    hub = HubSampler(model, needs(max_rows=8), VOCAB, lambda adapter: nullcontext())
    told: list[tuple[int, int]] = []
    params = SamplingParams(20, 0.8, 0.9, seed=6)
    theirs = hub.generate(PROMPTS, 3, params, lambda p, m, c: told.append((p, m)))
    assert sorted(told) == [(p, m) for p in range(4) for m in range(3)]
    assert list(hub.stream(PROMPTS[0], params)) == theirs[0][0].ids
    assert ids_of(fast(Decoder.from_transformers(model)).generate(PROMPTS, 3, params)) == ids_of(
        theirs
    )


def test_weights_laid_out_for_decoding_are_freed_at_once_when_the_sampler_rests() -> None:
    sampler = fast(Decoder.from_transformers(tiny("qwen3")))
    gc.disable()  # a cycle would keep them until the next collection
    try:
        first = sampler.generate(PROMPTS, 2, SamplingParams(max_tokens=4, temperature=1.0))
        laid_out = weakref.ref(sampler._forward)
        assert laid_out() is not None
        sampler.release_memory()
        assert laid_out() is None
    finally:
        gc.enable()
    again = sampler.generate(PROMPTS, 2, SamplingParams(max_tokens=4, temperature=1.0))
    assert ids_of(again) == ids_of(first)
