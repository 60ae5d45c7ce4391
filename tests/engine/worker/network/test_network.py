"""One set of numbers, whichever way it is computed: rows alone, packed, padded, sharing a prompt,
merged or not, through our own forward or through transformers and PEFT."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from reference import Plain, Tensors, apart, gradients, leaves
from tiny_decoders import EVERY, FAMILIES, VOCAB, own, policy_on, spec, stir, tiny
from typed_settings import grpo_settings
from varlen_loop import varlen_attn

from engine.worker.core.batch import Row
from engine.worker.network.adapter import Adapter, FlatAdapter
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.network import DecoderNetwork, Network
from engine.worker.ops import attention
from engine.worker.update.schedule import apply_step, make_optimizer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CLOSE = 5e-6  # of float32 results from exact ones, relative to the norm
CPU = torch.device("cpu")


def some_rows(seed: int, *, shared: bool = True) -> list[Row]:
    """Two ragged groups (an answer of one token, turns of an environment in between) and rows
    that stand alone, of very different lengths."""
    chance = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=chance).tolist()

    def mask(count: int) -> list[int]:
        return [1, *(torch.rand(count - 1, generator=chance) < 0.6).int().tolist()]

    rows = []
    for prompt, answers in ((ids(5), (1, 9, 4)), (ids(23), (2, 1, 17, 30))):
        for length in answers:
            full = [0] * len(prompt) + mask(length)
            rows.append(Row(prompt + ids(length), full, len(prompt) if shared else 0))
    for length in (2, 12, 40):
        rows.append(Row(ids(length), [0, *mask(length - 1)]))
    return rows


def weighted(network: Network, adapter: Adapter, rows: Sequence[Row], **options: Any):
    """(log-probabilities, gradients of their weighted sum); weights differ from token to token."""
    values, _ = network.logprobs(network.collate(rows), adapter, **options)
    (values * torch.linspace(0.5, 2.0, len(values))).sum().backward()
    found = {name: g.double().clone() for name, g in adapter.gradients().items()}
    adapter.clear_gradients()
    return values.detach().double(), found


def exactly(
    model: Plain, adapter: Adapter, rows: Sequence[Row], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """(log-probabilities, entropies, gradients) in float64, one row after the other."""
    leaf = leaves(adapter.state())
    found = [
        model.logprobs(
            row.ids, row.loss_mask, leaf, adapter.spec.scale, vocab=VOCAB, temperature=temperature
        )
        for row in rows
    ]
    values = torch.cat([v for v, _ in found])
    (values * torch.linspace(0.5, 2.0, len(values)).double()).sum().backward()
    return values.detach(), torch.cat([e for _, e in found]).detach(), gradients(leaf)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def prepared(family: str = "qwen3", **changes: Any) -> tuple[Plain, Network, Adapter]:
    model = tiny(family, **changes)
    exact = Plain(model)
    network = own(model).network
    return exact, network, stir(network.new_adapter(spec(), 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_rows_have_the_exact_values_and_gradients(family: str, seed: int) -> None:
    exact, network, adapter = prepared(family, seed=seed)
    rows = some_rows(seed)
    values, found = weighted(network, adapter, rows)
    wanted, _, slopes = exactly(exact, adapter, rows)
    assert distance(values, wanted) < CLOSE
    assert apart(found, slopes) < CLOSE


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_any_rows_have_the_exact_values_and_gradients(seed: int) -> None:
    exact, network, adapter = prepared("qwen3", seed=seed)
    rows = some_rows(seed)
    wanted, _, slopes = exactly(exact, adapter, rows)
    values, found = weighted(network, adapter, rows)
    assert distance(values, wanted) < CLOSE
    assert apart(found, slopes) < CLOSE


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature_divides_the_logits_and_entropies_are_those_of_the_same(
    temperature: float,
) -> None:
    exact, network, adapter = prepared()
    rows = some_rows(3)
    wanted, entropy, slopes = exactly(exact, adapter, rows, temperature)
    values, found = weighted(network, adapter, rows, inverse_temperature=1 / temperature)
    assert distance(values, wanted) < CLOSE and apart(found, slopes) < CLOSE
    batch = network.collate(rows)
    _, measured = network.logprobs(
        batch, adapter, inverse_temperature=1 / temperature, entropies=True
    )
    assert distance(measured, entropy) < CLOSE


@pytest.fixture(params=["blocks", "rectangles"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both plans of attention: short rows on a CPU take blocks, all others rectangles."""
    if request.param == "rectangles":
        monkeypatch.setattr(attention, "_fits_blocks", lambda *_: False)


@pytest.mark.usefixtures("plan")
def test_packed_is_one_by_one_is_padded() -> None:
    _, network, adapter = prepared()
    hub = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
    other = hub.new_adapter(spec(), 1)
    other.load(adapter.state())
    rows = some_rows(4, shared=False)
    packed, slopes = weighted(network, adapter, rows)
    padded, theirs = weighted(hub, other, rows)
    alone = torch.cat([weighted(network, adapter, [row])[0] for row in rows])
    assert distance(alone, packed) < CLOSE
    assert distance(padded, packed) < CLOSE
    assert apart(theirs, slopes) < CLOSE


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_shared_prompt_changes_no_number(seed: int) -> None:
    _, network, adapter = prepared()
    values, found = weighted(network, adapter, some_rows(seed))
    repeated, wanted = weighted(network, adapter, some_rows(seed, shared=False))
    assert distance(values, repeated) < CLOSE
    assert apart(found, wanted) < CLOSE


@pytest.mark.usefixtures("plan")
def test_many_groups_of_all_lengths_share_buckets_and_nothing_else() -> None:
    _, network, adapter = prepared()
    chance = torch.Generator().manual_seed(8)
    rows, repeated = [], []
    for prompt in (1, 2, 9, 11, 30, 31, 64):
        head = torch.randint(0, VOCAB, (prompt,), generator=chance).tolist()
        for answer in (1, 2, 3, 14, 15, 48):
            ids = head + torch.randint(0, VOCAB, (answer,), generator=chance).tolist()
            mask = [0] * prompt + [1] * answer
            rows.append(Row(ids, mask, prompt))
            repeated.append(Row(ids, mask))
    values, found = weighted(network, adapter, rows)
    wanted, slopes = weighted(network, adapter, repeated)
    assert distance(values, wanted) < CLOSE and apart(found, slopes) < CLOSE


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_variable_length_kernel_and_the_rectangles_agree(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, network, adapter = prepared(family)
    rows = some_rows(9)
    values, found = weighted(network, adapter, rows)
    plain = attention.Attention.__init__

    def varlen(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options | {"varlen": True})

    monkeypatch.setattr(attention, "_varlen_kernel", lambda: (varlen_attn, True))
    monkeypatch.setattr(attention.Attention, "__init__", varlen)
    other, slopes = weighted(network, adapter, rows)
    assert not torch.equal(other, values), "the kernel was not used"
    assert distance(other, values) < CLOSE
    assert apart(slopes, found) < CLOSE


@pytest.mark.parametrize("budget", [1, 30, 64, 10_000])
@pytest.mark.parametrize("shared", [True, False])
def test_microbatches_hold_every_row_once_within_the_budget_and_change_no_gradient(
    budget: int, shared: bool
) -> None:
    from engine.worker.ops.packing import token_count

    _, network, adapter = prepared()
    rows = some_rows(10, shared=shared)
    parts = network.split(rows, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    for part in parts:
        assert len(part) == 1 or token_count([rows[i] for i in part]) <= budget
    weights = torch.linspace(0.5, 2.0, len(rows))
    whole, split = [], []
    for out, groups in ((whole, [list(range(len(rows)))]), (split, parts)):
        for part in groups:
            batch = network.collate([rows[i] for i in part])
            values, _ = network.logprobs(batch, adapter)
            (values * weights[torch.tensor(part)][batch.row]).sum().backward()
        out.append({k: v.clone() for k, v in adapter.gradients().items()})
        adapter.clear_gradients()
    assert apart(split[0], whole[0]) < CLOSE


def test_microbatches_are_as_few_as_the_budget_allows_and_of_about_the_same_size() -> None:
    _, network, _ = prepared()
    rows = [Row([1] * length, [0] * (length - 1) + [1]) for length in (41, 31, 31, 21, 21, 11)]
    parts = network.split(rows, 100)  # 150 tokens; filled one after the other: 100 and 50
    assert [sum(len(rows[i].ids) - 1 for i in part) for part in parts] == [70, 80]
    assert len(network.split(rows, 150)) == 1


def test_a_large_model_is_padded_to_less_as_its_rows_cost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.worker.ops import matmul

    monkeypatch.setattr(matmul, "_onednn", lambda: object())
    assert [matmul.padding_multiple(count, 2**20) for count in (255, 256)] == [1, 64]
    assert [matmul.padding_multiple(count, 2**27) for count in (63, 64, 256)] == [1, 16, 16]
    monkeypatch.setattr(matmul, "_onednn", lambda: None)
    assert matmul.padding_multiple(256, 2**27) == 1


# -- adapters ----------------------------------------------------------------------------------

SUBSETS = [*((t,) for t in EVERY), ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj"), ()]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("targets", SUBSETS, ids=lambda t: "+".join(t) or "all-linear")
def test_values_and_gradients_of_every_target_are_pefts(
    targets: tuple[str, ...], merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = own(tiny("qwen2")).network
    assert isinstance(network, DecoderNetwork)
    if not merged:
        monkeypatch.setattr(type(network.decoder), "weight_bytes", 10**18)
    adapter = stir(network.new_adapter(spec(*targets), 1))
    assert network.decoder.weights(adapter).merging is merged
    hub = HubNetwork(tiny("qwen2"), VOCAB, "asked for")
    other = hub.new_adapter(spec(*targets), 1)
    other.load(adapter.state())
    rows = some_rows(11, shared=False)
    values, found = weighted(network, adapter, rows)
    wanted, slopes = weighted(hub, other, rows)
    assert distance(values, wanted) < CLOSE
    assert apart(found, slopes) < CLOSE
    projections = {name.split(".")[-3] for name in found}
    assert projections == set(targets or EVERY)


@pytest.mark.parametrize("targets", [(), ("q_proj",), ("v_proj", "down_proj")])
def test_a_new_adapter_is_pefts_bit_for_bit(targets: tuple[str, ...]) -> None:
    adapter = own(tiny("qwen3")).network.new_adapter(spec(*targets), 17)
    torch.manual_seed(17)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=list(targets) or "all-linear")
    config.task_type = "CAUSAL_LM"
    peft = get_peft_model(tiny("qwen3", seed=3), config)
    torch.manual_seed(17)
    peft = get_peft_model(tiny("qwen3"), config)
    # The model's own weights come out of the same stream: the seed counts from here.
    peft.delete_adapter("default")
    torch.manual_seed(17)
    peft.add_adapter("fresh", config)
    state = get_peft_model_state_dict(peft, adapter_name="fresh", save_embedding_layers=False)
    ours = adapter.state()
    assert ours.keys() == state.keys()
    assert all(torch.equal(ours[name], state[name]) for name in state)


@pytest.mark.parametrize("merged", [True, False])
def test_weights_follow_the_adapter_after_a_step_and_after_loading(
    merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, network, adapter = prepared()
    assert isinstance(network, DecoderNetwork) and isinstance(adapter, FlatAdapter)
    if not merged:
        monkeypatch.setattr(type(network.decoder), "weight_bytes", 10**18)
    rows = some_rows(12)
    before, _ = weighted(network, adapter, rows)
    start = adapter.state()
    optimizer = make_optimizer(adapter.parameters(), grpo_settings({"learning_rate": 0.02}))
    values, _ = network.logprobs(network.collate(rows), adapter)
    values.sum().backward()
    apply_step(optimizer, adapter, 0.02, 0.0)
    after, _ = weighted(network, adapter, rows)
    wanted, _, _ = exactly(exact, adapter, rows)
    assert distance(after, before) > 1e-3
    assert distance(after, wanted) < CLOSE
    adapter.load(start)
    assert torch.equal(weighted(network, adapter, rows)[0], before)


def test_merging_again_and_again_does_not_drift() -> None:
    exact, network, adapter = prepared()
    rows = some_rows(13)
    first = exactly(exact, adapter, rows)[0]
    state = adapter.state()
    for number in range(50):
        stir(adapter, number)
        network.logprobs(network.collate(rows[:1]), adapter)
    adapter.load(state)
    assert distance(weighted(network, adapter, rows)[0], first) < CLOSE


def test_two_adapters_on_one_base_do_not_mix_and_the_base_stays_itself() -> None:
    exact, network, first = prepared()
    second = stir(network.new_adapter(spec("q_proj", "up_proj", rank=2, alpha=3), 4), 5)
    rows = some_rows(14)
    plain = torch.cat([exact.logprobs(r.ids, r.loss_mask, vocab=VOCAB)[0] for r in rows])
    for adapter in (first, second, first):
        values, found = weighted(network, adapter, rows)
        wanted, _, slopes = exactly(exact, adapter, rows)
        assert distance(values, wanted) < CLOSE and apart(found, slopes) < CLOSE
        base, _ = network.logprobs(network.collate(rows), None)
        assert distance(base, plain) < CLOSE and not base.requires_grad


def test_dropout_changes_training_alone_and_leaves_the_expectation_close() -> None:
    _, network, still = prepared()
    adapter = network.new_adapter(spec(dropout=0.2), 1)
    adapter.load(still.state())
    rows = some_rows(15)
    calm, wanted = weighted(network, still, rows)
    assert torch.equal(weighted(network, adapter, rows)[0], calm)
    torch.manual_seed(0)
    draws = [weighted(network, adapter, rows, training=True) for _ in range(40)]
    assert not torch.equal(draws[0][0], draws[1][0])
    torch.manual_seed(0)
    again = weighted(network, adapter, rows, training=True)
    assert torch.equal(again[0], draws[0][0]) and apart(again[1], draws[0][1]) == 0
    mean = torch.stack([v for v, _ in draws]).mean(0)
    alone = torch.stack([(v - calm) for v, _ in draws]).norm(dim=1).mean()
    assert (mean - calm).norm() < 0.5 * alone
    for name, slope in wanted.items():  # on average the same direction
        average = torch.stack([found[name] for _, found in draws]).mean(0)
        cosine = float((average * slope).sum() / (average.norm() * slope.norm()))
        assert cosine > 0.8, (name, cosine)


def test_dropout_of_one_layer_zeroes_its_share_of_the_adapters_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = own(tiny("qwen3")).network
    adapter = stir(network.new_adapter(spec(dropout=0.25), 1))
    seen: list[float] = []
    real = torch.nn.functional.dropout

    def spy(x: torch.Tensor, p: float, *rest: Any) -> torch.Tensor:
        out = real(x, p, *rest)
        kept = out != 0
        torch.testing.assert_close(out[kept], x[kept] / 0.75)
        seen.append(1 - float(kept.float().mean()))
        return out

    monkeypatch.setattr(torch.nn.functional, "dropout", spy)
    network.logprobs(network.collate(some_rows(16)), adapter, training=True)
    assert len(seen) == 8 and math.isclose(sum(seen) / 8, 0.25, abs_tol=0.02)


def test_dropout_never_touches_the_frozen_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, network, still = prepared()
    adapter = network.new_adapter(spec(dropout=0.25), 1)
    adapter.load(still.state())
    batch = network.collate(some_rows(16))
    base, _ = network.logprobs(batch, None)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: torch.zeros_like(x))
    values, _ = network.logprobs(batch, adapter, training=True)
    assert distance(values.detach(), base) < 1e-6  # nothing was left for the adapter to read


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_layers_changes_no_number(dropout: float) -> None:
    _, network, still = prepared()
    adapter = network.new_adapter(spec(dropout=dropout), 1)
    adapter.load(still.state())
    rows = some_rows(17)
    runs = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        runs.append(weighted(network, adapter, rows, checkpointing=checkpointing, training=True))
    assert distance(runs[1][0], runs[0][0]) < 1e-7
    assert apart(runs[1][1], runs[0][1]) < 1e-6


def test_a_bfloat16_base_gathers_float32_gradients_close_to_the_exact_ones() -> None:
    model = tiny("qwen3", initializer_range=0.1).bfloat16()
    exact = Plain(model)  # of the rounded weights
    network = own(model).network
    adapter = stir(network.new_adapter(spec(), 1), size=0.05)
    assert isinstance(network, DecoderNetwork) and not network.decoder.weights(adapter).merging
    rows = some_rows(18)
    values, found = weighted(network, adapter, rows)
    wanted, _, slopes = exactly(exact, adapter, rows)
    assert values.isfinite().all() and distance(values, wanted) < 0.01
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}
    assert apart(found, slopes) < 0.1
    # Small gradients must not vanish beside large ones: they are gathered in float32.
    for _ in range(3):
        network.logprobs(network.collate(rows), adapter)[0].sum().backward()
    triple = {k: v.clone() for k, v in adapter.gradients().items()}
    adapter.clear_gradients()
    network.logprobs(network.collate(rows), adapter)[0].sum().backward()
    single = {k: 3 * v for k, v in adapter.gradients().items()}
    assert apart(triple, single) < 1e-6


def test_ids_without_a_token_have_no_probability() -> None:
    model = tiny("qwen3")
    exact, network = Plain(model), own(model, vocab=50).network
    rows = [Row([3, 4, 5, 6], [0, 1, 1, 1])]
    values, _ = network.logprobs(network.collate(rows), None)
    wanted, _ = exact.logprobs(rows[0].ids, rows[0].loss_mask, vocab=50)
    assert distance(values, wanted) < CLOSE


def test_tokens_after_the_last_trained_one_and_untrained_ones_get_no_gradient() -> None:
    policy = policy_on(own(tiny("qwen3")))
    network, adapter = policy.base.network, policy.adapter
    first = [Row([10, 20, 30, 40, 50], [0, 0, 1, 0, 0], 2)]
    changed = [Row([10, 20, 30, 59, 58], [0, 0, 1, 0, 0], 2)]
    one = weighted(network, adapter, first)
    two = weighted(network, adapter, changed)
    assert distance(two[0], one[0]) < 1e-6 and apart(two[1], one[1]) < 1e-6
