"""Every written-out backward pass against autograd over the plain formula, in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.worker.ops.kernels import (
    AddNorm,
    FrozenLinear,
    GatedLoraLinear,
    HeadLayout,
    HeadsRope,
    LoraLinear,
    Norm,
    PickRows,
    Spread,
    SwiGLU,
    TokenLogprobs,
)
from engine.worker.ops.low_rank import JointFactors, LoraPlacement, fill_joint
from engine.worker.ops.matmul import OutputLayer

EPS = 1e-3  # large enough to be seen
SEEDS = [0, 1, 2]
pytestmark = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture(autouse=True)
def fresh(seed: int) -> None:
    torch.manual_seed(100 + seed)


def compare(
    ours: Callable[..., Sequence[torch.Tensor]],
    formula: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    close: float = 2e-6,
) -> None:
    """Values, and gradients of every input, of a random projection of the outputs."""
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().clone().requires_grad_() for x in inputs]
    got, wanted = ours(*mine), formula(*exact)
    weights = [torch.randn(w.shape) for w in wanted]
    torch.autograd.backward(got, [w.to(g.dtype) for w, g in zip(weights, got, strict=True)])
    torch.autograd.backward(wanted, [w.double() for w in weights])
    for g, w in zip(got, wanted, strict=True):
        assert apart(g, w) < close
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None and y.grad is not None
        assert apart(x.grad, y.grad) < close


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


PARTS = {
    "all of a fused layer": ((0, 5), (5, 8), (8, 11)),
    "the second and third part": ((5, 8), (8, 11)),
    "the first part": ((0, 5),),
}


@pytest.mark.parametrize("spans", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_a_frozen_layer_with_its_adapter_has_the_gradients_of_the_factors(
    merged: bool, biased: bool, spans: tuple[tuple[int, int], ...]
) -> None:
    weight, bias = torch.randn(11, 7), torch.randn(11) if biased else None
    rank, scale = 2, 1.5
    adapted = sum(stop - start for start, stop in spans)
    x, a, b = torch.randn(9, 7), torch.randn(len(spans) * rank, 7), torch.randn(adapted, rank)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows, at = [torch.zeros(11, 7, dtype=torch.float64)], 0
        for i, (start, stop) in enumerate(spans):
            part = b[at : at + stop - start] @ a[i * rank : (i + 1) * rank]
            rows.append(torch.nn.functional.pad(part, (0, 0, start, 11 - stop)))
            at += stop - start
        return torch.stack(rows).sum(0)

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        used = weight
        if merged:
            used = (weight + scale * product(a.detach().double(), b.detach().double())).float()
        return [LoraLinear.apply(x, x, a, b, used, bias, LoraPlacement(spans, scale, merged))]

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        y = x @ (weight.double() + scale * product(a, b)).T
        return [y if bias is None else y + bias.double()]

    compare(ours, formula, [x, a, b])


@pytest.mark.parametrize(
    "spans", [((0, 11),), ((3, 8),), ((0, 4), (6, 11)), ((0, 4), (4, 6), (6, 11))]
)
def test_one_product_for_all_parts_has_the_results_and_gradients_of_single_ones(
    spans: tuple[tuple[int, int], ...],
) -> None:
    weight, x, dropped = torch.randn(11, 7), torch.randn(9, 7), torch.randn(9, 7)
    rows = sum(stop - start for start, stop in spans)
    a, b = torch.randn(3 * len(spans), 7), torch.randn(rows, 3)
    joint_b = torch.zeros(11, 3 * len(spans))
    fill_joint(joint_b, b, spans)
    results = []
    for joint in (None, JointFactors(a.clone(), joint_b)):
        leaves = [each.clone().requires_grad_() for each in (x, dropped, a, b)]
        placement = LoraPlacement(spans, 0.5, False, joint)
        y = LoraLinear.apply(*leaves, weight, None, placement)
        y.square().sum().backward()
        gate_up = torch.cat([x, dropped], 1).requires_grad_()
        a_again, b_again = (each.clone().requires_grad_() for each in (a, b))
        gated = GatedLoraLinear.apply(gate_up, a_again, b_again, weight, None, placement)
        gated.square().sum().backward()
        tensors = [y, gated, *(each.grad for each in (*leaves, gate_up, a_again, b_again))]
        results.append([each.detach() for each in tensors if each is not None])
    assert len(results[0]) == 9
    for by_parts, jointly in zip(*results, strict=True):
        torch.testing.assert_close(jointly, by_parts, rtol=1e-5, atol=1e-4)


def test_parts_so_large_that_another_library_multiplies_have_the_gradients_of_the_factors() -> None:
    spans, scale = ((0, 512), (512, 1024)), 0.5
    weight, x = torch.randn(1024, 64), torch.randn(256, 64)

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [LoraLinear.apply(x, x, a, b, weight, None, LoraPlacement(spans, scale, False))]

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        product = torch.cat([b[:512] @ a[:16], b[512:] @ a[16:]])
        return [x @ (weight.double() + scale * product).T]

    compare(ours, formula, [x, torch.randn(32, 64), torch.randn(1024, 16)])


@pytest.mark.parametrize("merged", [False, True])
def test_a_gated_layer_has_the_gradients_of_gate_layer_and_factors(merged: bool) -> None:
    weight, bias, spans, scale = torch.randn(5, 7), torch.randn(5), ((1, 5),), 0.5

    def whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return weight.double() + scale * torch.nn.functional.pad(b @ a, (0, 0, 1, 0))

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        used = whole(a.detach().double(), b.detach().double()).float() if merged else weight
        return [GatedLoraLinear.apply(x, a, b, used, bias, LoraPlacement(spans, scale, merged))]

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        gate, up = x.chunk(2, -1)
        return [(gate / (1 + torch.exp(-gate)) * up) @ whole(a, b).T + bias.double()]

    compare(ours, formula, [torch.randn(9, 14), torch.randn(3, 7), torch.randn(4, 3)])


def test_dropout_reaches_the_adapter_and_never_the_frozen_layer() -> None:
    weight, mask = torch.randn(5, 7), (torch.rand(9, 7) < 0.7) / 0.7
    spans, scale = ((1, 5),), 0.5

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [
            LoraLinear.apply(x, x * mask, a, b, weight, None, LoraPlacement(spans, scale, False))
        ]

    def formula(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        low = scale * (x * mask.double()) @ a.T @ b.T
        return [x @ weight.double().T + torch.nn.functional.pad(low, (1, 0))]

    compare(ours, formula, [torch.randn(9, 7), torch.randn(3, 7), torch.randn(4, 3)])


def test_where_the_input_needs_no_gradient_the_factors_still_get_theirs() -> None:
    weight, x = torch.randn(5, 7), torch.randn(9, 7)

    def ours(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [LoraLinear.apply(x, x, a, b, weight, None, LoraPlacement(((0, 5),), 2.0, False))]

    def formula(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [x.double() @ (weight.double() + 2.0 * b @ a).T]

    compare(ours, formula, [torch.randn(3, 7), torch.randn(5, 3)])


@pytest.mark.parametrize("biased", [False, True])
def test_a_frozen_layer_passes_the_gradient_on(biased: bool) -> None:
    weight, bias = torch.randn(5, 7), torch.randn(5) if biased else None
    compare(
        lambda x: [FrozenLinear.apply(x, weight, bias)],
        lambda x: [x @ weight.double().T + (0 if bias is None else bias.double())],
        [torch.randn(4, 7)],
    )


def test_norm_has_the_gradient_of_its_formula() -> None:
    weight = torch.randn(6)
    compare(lambda x: [Norm.apply(x, weight, EPS)], lambda x: [rms(x, weight)], [torch.randn(4, 6)])


def test_add_and_norm_joins_the_gradients_of_sum_and_norm() -> None:
    weight = torch.randn(6)
    compare(
        lambda x, delta: AddNorm.apply(x, delta, weight, EPS),
        lambda x, delta: (x + delta, rms(x + delta, weight)),
        [torch.randn(4, 6), torch.randn(4, 6)],
    )


@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normalised_and_rotated_and_values_left_alone(normed: bool) -> None:
    count, heads, kv, dim = 5, 4, 2, 6
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    angle = torch.rand(count, 1, dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()

    def turned(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x if norm is None else rms(x, norm)
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        c, s = cos.double(), sin.double()
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    def formula(qkv: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = qkv.view(count, -1, dim).split([heads, kv, kv], 1)
        parts = [turned(q, norms[0]), turned(k, norms[1]), v]
        return [torch.cat(parts, 1).flatten(1)]

    def ours(qkv: torch.Tensor) -> list[torch.Tensor]:
        return [
            HeadsRope.apply(qkv * 1, *norms, cos, sin, HeadLayout(heads, kv, EPS))
        ]  # works in place

    compare(ours, formula, [torch.randn(count, (heads + 2 * kv) * dim)])


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    def formula(x: torch.Tensor) -> list[torch.Tensor]:
        gate, up = x.chunk(2, -1)
        return [gate / (1 + torch.exp(-gate)) * up]

    compare(lambda x: [SwiGLU.apply(x)], formula, [2 * torch.randn(5, 8)])


def test_rows_not_picked_get_no_gradient() -> None:
    rows = torch.tensor([4, 0, 3])
    compare(lambda x: [PickRows.apply(x, rows)], lambda x: [x[rows]], [torch.randn(6, 3)])


def test_spread_rows_stand_in_their_places_among_zeros() -> None:
    places = torch.tensor([0, 1, 4, 5, 6])

    def formula(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros(8, 3, dtype=torch.float64)
        return [out.index_copy(0, places, x)]

    compare(lambda x: [Spread.apply(x, places, 8)], formula, [torch.randn(5, 3)])


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_head_in_chunks_is_the_full_cross_entropy(temperature: float, rows: int) -> None:
    head, labels = torch.randn(13, 8), torch.randint(0, 13, (7,))
    hidden, layer = torch.randn(7, 8), OutputLayer(head)

    def logs(x: torch.Tensor) -> torch.Tensor:
        return (x @ head.double().T / temperature).log_softmax(-1)

    compare(
        lambda x: TokenLogprobs.apply(x, layer, labels, 1 / temperature, rows, False)[:1],
        lambda x: [logs(x).gather(1, labels[:, None])[:, 0]],
        [hidden],
    )
    values, entropies = TokenLogprobs.apply(
        hidden, OutputLayer(head), labels, 1 / temperature, rows, True
    )
    exact = logs(hidden.double())
    assert values.dtype == entropies.dtype == torch.float32
    assert apart(entropies, -(exact.exp() * exact).sum(-1)) < 1e-6
    assert not TokenLogprobs.apply(hidden, layer, labels, 1.0, rows, False)[1].any()


@pytest.mark.parametrize("entropies", [False, True])
def test_a_token_too_unlikely_for_float32_has_its_log_probability_and_gradient(
    entropies: bool,
) -> None:
    head, labels = torch.randn(13, 8), torch.arange(7)
    hidden = 100 * torch.randn(7, 8)
    exact = (hidden.double() @ head.double().T).log_softmax(-1)
    assert (exact.exp().float() == 0).any()

    def ours(x: torch.Tensor) -> list[torch.Tensor]:
        return [TokenLogprobs.apply(x, OutputLayer(head), labels, 1.0, 4, entropies)[0]]

    def formula(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ head.double().T).log_softmax(-1).gather(1, labels[:, None])[:, 0]]

    compare(ours, formula, [hidden])
    _, entropy = TokenLogprobs.apply(
        hidden.requires_grad_(), OutputLayer(head), labels, 1.0, 4, True
    )
    assert (entropy >= 0).all()
    assert (entropy - -(exact.exp() * exact).sum(-1)).abs().max() < 1e-4


def test_entropies_carry_no_gradient() -> None:
    hidden = torch.randn(7, 8, requires_grad=True)
    labels = torch.randint(0, 13, (7,))
    values, entropies = TokenLogprobs.apply(
        hidden, OutputLayer(torch.randn(13, 8)), labels, 1.0, 4, True
    )
    assert values.requires_grad and not entropies.requires_grad


def test_in_bfloat16_the_head_still_answers_in_float32_close_to_the_exact_value() -> None:
    head, labels = torch.randn(13, 8).bfloat16(), torch.randint(0, 13, (7,))
    hidden = torch.randn(7, 8).bfloat16()
    values, _ = TokenLogprobs.apply(hidden, OutputLayer(head), labels, 1.0, 4, False)
    exact = (hidden.double() @ head.double().T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert values.dtype == torch.float32
    assert (values.double() - exact).abs().max() < 0.05
