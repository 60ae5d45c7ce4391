"""Per-token losses. Each function returns one summand per token, already divided by the
normaliser of the whole batch, so that the sum over any split into microbatches is the same loss.

Symbols, all float32 and shaped [tokens] (the trained tokens of some trajectories, in order):

    policy     log-probabilities under the policy, with gradient
    old        log-probabilities at the time of the batch's first update, without gradient
    advantage  advantage of the trajectory that a token belongs to
    ratio      exp(policy - old), 1 on the first update

Signs: a loss is minimised, so each is the negative of the objective in its paper.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a microbatch.

    Attributes:
        policy, old, advantage, correction: [tokens] float32; `correction` is the truncated
            importance weight of the policy against the sampler.
        row: [tokens] int64, which of the microbatch's trajectories a token belongs to.
        lengths: [rows] float32, trained tokens per trajectory.
    """

    policy: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    correction: torch.Tensor
    row: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Normaliser:
    """Sizes of the whole batch: trajectories, their trained tokens, and the most tokens of one."""

    trajectories: int
    tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Clip:
    """Limits of the ratio: it is clipped to the interval [1 - low, 1 + high]."""

    low: float
    high: float


def clipped_loss(ratio: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Return -min(ratio A, clip(ratio) A) per token, with A the advantage: PPO's surrogate loss
    (arXiv 1707.06347). `ratio` is the token's probability under the policy over that before."""
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def grpo(tokens: Tokens, normaliser: Normaliser, clip: Clip) -> torch.Tensor:
    """Return each token's summand of the mean, over the batch's trajectories, of the mean clipped
    loss of a trajectory's tokens (arXiv 2402.03300)."""
    ratio = torch.exp(tokens.policy - tokens.old)
    term = clipped_loss(ratio, tokens.advantage, clip) * tokens.correction  # importance weight
    return term / (tokens.lengths[tokens.row] * normaliser.trajectories)  # its trajectory's length


def dr_grpo(tokens: Tokens, normaliser: Normaliser, clip: Clip) -> torch.Tensor:
    """Return each token's summand of the sum of all clipped losses, divided by a constant, so that
    length is not rewarded (arXiv 2503.20783)."""
    ratio = torch.exp(tokens.policy - tokens.old)
    term = clipped_loss(ratio, tokens.advantage, clip) * tokens.correction  # importance weight
    return term / (normaliser.trajectories * normaliser.max_tokens)


def dapo(tokens: Tokens, normaliser: Normaliser, clip: Clip) -> torch.Tensor:
    """Return each token's summand of the mean clipped loss of all tokens (arXiv 2503.14476)."""
    ratio = torch.exp(tokens.policy - tokens.old)
    term = clipped_loss(ratio, tokens.advantage, clip) * tokens.correction  # importance weight
    return term / normaliser.tokens


def gspo(tokens: Tokens, normaliser: Normaliser, clip: Clip) -> torch.Tensor:
    """Return each token's summand of the mean clipped loss of the batch's trajectories, each with
    one ratio, exp(mean log ratio of its tokens) (arXiv 2507.18071). Only the sum over a
    trajectory's tokens matters, so its term is divided evenly among them."""
    log_ratio = tokens.policy - tokens.old
    sums = torch.zeros_like(tokens.lengths).index_add(0, tokens.row, log_ratio)  # per trajectory
    ratio = torch.exp(sums / tokens.lengths)[tokens.row]
    term = clipped_loss(ratio, tokens.advantage, clip) * tokens.correction  # importance weight
    return term / (tokens.lengths[tokens.row] * normaliser.trajectories)  # its trajectory's length


def cispo(tokens: Tokens, normaliser: Normaliser, clip: Clip) -> torch.Tensor:
    """Return each token's summand of the mean of -weight A log p over the batch's tokens, with
    weight = min(ratio, 1 + high) without gradient: each token has a gradient (arXiv 2506.13585)."""
    weight = torch.exp(tokens.policy - tokens.old).detach().clamp(max=1 + clip.high)
    return -weight * tokens.advantage * tokens.policy * tokens.correction / normaliser.tokens


LOSSES: dict[str, Callable[[Tokens, Normaliser, Clip], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}


def token_weights(kind: str, tokens: Tokens, normaliser: Normaliser) -> torch.Tensor:
    """Return the weight of each token in the loss named `kind` (a key of LOSSES), [tokens] float32.
    A term that is added to that loss, such as the KL term, uses the same weights."""
    if kind in ("grpo", "gspo"):  # the mean over trajectories of each one's mean over its tokens
        return 1 / (tokens.lengths[tokens.row] * normaliser.trajectories)
    if kind == "dr_grpo":  # as if every trajectory had max_tokens tokens
        return torch.full_like(tokens.policy, 1 / (normaliser.trajectories * normaliser.max_tokens))
    return torch.full_like(tokens.policy, 1 / normaliser.tokens)  # dapo, cispo: mean over tokens


def kl_k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = reference - policy, per token: an unbiased estimate of
    KL(policy | reference) on samples of the policy, never negative
    (joschu.net/blog/kl-approx.html). Both arguments are log-probabilities."""
    d = reference - policy
    return torch.exp(d) - d - 1


def clipped_tokens(kind: str, tokens: Tokens, clip: Clip) -> torch.Tensor:
    """Count the tokens on which the clipping of the loss `kind` acts, in a tensor of shape [].

    In cispo these are the tokens whose weight is limited. In every other loss they are the tokens
    that get no gradient; gspo clips all tokens of a trajectory together.
    """
    log_ratio = tokens.policy.detach() - tokens.old
    if kind == "gspo":
        # One ratio for all tokens of a trajectory: the exponential of their mean log ratio.
        sums = torch.zeros_like(tokens.lengths).index_add(0, tokens.row, log_ratio)
        log_ratio = (sums / tokens.lengths)[tokens.row]
    ratio = torch.exp(log_ratio)
    if kind == "cispo":
        return (ratio > 1 + clip.high).sum()
    # `clipped_loss` takes the smaller of ratio * A and clip(ratio) * A. Only on the side to which
    # the advantage pulls is that the clipped one, which has no gradient.
    too_high = (ratio > 1 + clip.high) & (tokens.advantage > 0)
    too_low = (ratio < 1 - clip.low) & (tokens.advantage < 0)
    return (too_high | too_low).sum()


def truncated_importance(old: torch.Tensor, sampled: torch.Tensor, cap: float) -> torch.Tensor:
    """Return min(exp(old - sampled), cap) per token, without gradient: the weight that corrects for
    a sampler whose log-probabilities `sampled` differ from the trainer's `old` (truncated
    importance sampling, Ionides 2008)."""
    return torch.exp(old - sampled).clamp(max=cap).detach()


def cross_entropy(policy: torch.Tensor, tokens_in_batch: int) -> torch.Tensor:
    """Return each token's summand of SFT's loss: -log p (`policy`), over the batch's tokens."""
    return -policy / tokens_in_batch
