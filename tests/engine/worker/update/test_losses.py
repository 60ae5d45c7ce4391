"""Every loss and its gradient against float64 formulas written one trajectory at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.update import losses
from engine.worker.update.losses import Clip, Normaliser, Tokens

CLIP = Clip(0.2, 0.28)
MAX_TOKENS = 12


def batch(seed: int) -> list[dict[str, torch.Tensor]]:
    """Trajectories of different lengths, each with float64 log-probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int, scale: float) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, 9, (5,), generator=generator).tolist()
    out = []
    for n in lengths:
        old = draw(n, 1.0) - 2
        out.append(
            {
                "old": old,
                "policy": old + draw(n, 0.3),
                "sampled": old + draw(n, 0.3),
                "advantage": draw(1, 1.0)[0],
            }
        )
    return out


def formula(kind: str, rows: list[dict[str, torch.Tensor]], policy: list[torch.Tensor]):
    """The loss as its paper writes it, one trajectory after another."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(r["old"]) for r in rows)
    for r, p in zip(rows, policy, strict=True):
        a, n = r["advantage"], len(p)
        weight = torch.minimum(torch.exp(r["old"] - r["sampled"]), torch.tensor(2.0))
        ratio = torch.exp(p - r["old"])
        if kind == "gspo":
            ratio = torch.exp((p - r["old"]).mean()).expand(n)
        low, high = 1 - CLIP.low, 1 + CLIP.high
        surrogate = torch.minimum(ratio * a, ratio.clamp(low, high) * a) * weight
        if kind == "cispo":
            surrogate = ratio.detach().clamp(max=high) * a * p * weight
        match kind:
            case "grpo" | "gspo":
                total = total - surrogate.mean() / len(rows)
            case "dr_grpo":
                total = total - surrogate.sum() / (len(rows) * MAX_TOKENS)
            case "dapo" | "cispo":
                total = total - surrogate.sum() / tokens
    return total


def tokens(rows: list[dict[str, torch.Tensor]], policy: list[torch.Tensor]) -> Tokens:
    old = torch.cat([r["old"] for r in rows])
    sampled = torch.cat([r["sampled"] for r in rows])
    row = torch.cat([torch.full((len(p),), i) for i, p in enumerate(policy)])
    return Tokens(
        policy=torch.cat(policy),
        old=old,
        advantage=torch.stack([r["advantage"] for r in rows])[row],
        correction=losses.truncated_importance(old, sampled, 2.0),
        row=row,
        lengths=torch.tensor([float(len(p)) for p in policy], dtype=torch.float64),
    )


def norm(rows: list[dict[str, torch.Tensor]]) -> Normaliser:
    return Normaliser(len(rows), sum(len(r["old"]) for r in rows), MAX_TOKENS)


@pytest.mark.parametrize("kind", sorted(losses.LOSSES))
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_loss_and_gradient_equal_the_formula(kind: str, seed: int) -> None:
    rows = batch(seed)
    ours = [r["policy"].clone().requires_grad_() for r in rows]
    theirs = [r["policy"].clone().requires_grad_() for r in rows]
    loss = losses.LOSSES[kind](tokens(rows, ours), norm(rows), CLIP).sum()
    expected = formula(kind, rows, theirs)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(losses.LOSSES))
def test_splitting_into_microbatches_changes_nothing(kind: str) -> None:
    rows = batch(3)
    whole = losses.LOSSES[kind](tokens(rows, [r["policy"] for r in rows]), norm(rows), CLIP).sum()
    parts = sum(
        losses.LOSSES[kind](tokens(part, [r["policy"] for r in part]), norm(rows), CLIP).sum()
        for part in (rows[:2], rows[2:3], rows[3:])
    )
    torch.testing.assert_close(whole, parts)


def test_on_policy_every_loss_has_the_gradient_of_advantage_times_logprob() -> None:
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    row = torch.tensor([0, 0, 1])
    advantage = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    expected = {
        "grpo": [-2 / 4, -2 / 4, 1 / 2],
        "gspo": [-2 / 4, -2 / 4, 1 / 2],
        "dr_grpo": [-2 / 24, -2 / 24, 1 / 24],
        "dapo": [-2 / 3, -2 / 3, 1 / 3],
        "cispo": [-2 / 3, -2 / 3, 1 / 3],
    }
    for kind, gradient in expected.items():
        policy = old.clone().requires_grad_()
        lengths = torch.tensor([2.0, 1.0], dtype=torch.float64)
        t = Tokens(policy, old, advantage, torch.ones(3, dtype=torch.float64), row, lengths)
        losses.LOSSES[kind](t, Normaliser(2, 3, 12), CLIP).sum().backward()
        assert policy.grad is not None
        assert policy.grad.tolist() == pytest.approx(gradient), kind


def test_the_upper_clip_stops_the_gradient_of_what_is_already_likelier() -> None:
    old = torch.tensor([-1.0])
    for shift, advantage, moves in [(0.3, 1.0, False), (0.2, 1.0, True), (0.3, -1.0, True)]:
        policy = (old + shift).requires_grad_()
        one = torch.ones(1)
        t = Tokens(policy, old, advantage * one, one, torch.tensor([0]), one)
        losses.dapo(t, Normaliser(1, 1, 4), CLIP).sum().backward()
        assert policy.grad is not None
        assert bool(policy.grad.abs().item() > 0) is moves


def test_clip_share_counts_the_tokens_whose_gradient_is_stopped() -> None:
    old = torch.zeros(4)
    policy = torch.log(torch.tensor([1.5, 0.5, 1.5, 1.0]))
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    t = Tokens(policy, old, advantage, torch.ones(4), torch.tensor([0, 0, 0, 0]), torch.ones(1))
    assert losses.clipped_tokens("dapo", t, CLIP).item() == 2
    # cispo bounds the weights of both tokens above the range, whatever their advantage.
    assert losses.clipped_tokens("cispo", t, CLIP).item() == 2


def test_clip_share_of_gspo_counts_the_tokens_of_clipped_trajectories() -> None:
    policy = torch.log(torch.tensor([1.5, 1.5, 0.5, 1.0, 0.5, 1.0]))
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    row, lengths = torch.tensor([0, 0, 1, 1, 2, 2]), torch.full((3,), 2.0)
    t = Tokens(policy, torch.zeros(6), advantage, torch.ones(6), row, lengths)
    # exp(mean log ratio): 1.5 is stopped above, 0.71 below; with a positive advantage it is not.
    assert losses.clipped_tokens("gspo", t, CLIP).item() == 4


def test_kl_is_zero_only_where_policy_and_reference_agree() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    expected = [math.exp(d) - d - 1 for d in (0.0, -1.0, 0.5)]
    assert losses.kl_k3(policy, reference).tolist() == pytest.approx(expected)


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.tensor([0.0, 0.0], requires_grad=True)
    weight = losses.truncated_importance(old, torch.tensor([-5.0, 0.5]), 2.0)
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert not weight.requires_grad


@pytest.mark.parametrize("kind", sorted(losses.LOSSES))
def test_token_weights_of_a_batch_add_up_to_what_its_loss_divides_by(kind: str) -> None:
    rows = batch(5)
    weights = losses.token_weights(kind, tokens(rows, [r["policy"] for r in rows]), norm(rows))
    n = norm(rows)
    expected = n.tokens / (n.trajectories * MAX_TOKENS) if kind == "dr_grpo" else 1.0
    assert weights.sum().item() == pytest.approx(expected)
