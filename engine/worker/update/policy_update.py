"""The trajectories of a step as microbatches, and one pass of the policy loss over them.

With `updates_per_batch` above 1 the batch is passed over several times. The first pass is by the
policy that sampled (or is one update ahead of it), so its log-probabilities are the `old` ones of
all passes and need no forward of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.records.settings import GRPOSettings
from engine.worker.core.batch import Row
from engine.worker.core.trajectory import Trajectory
from engine.worker.network.network import Micro
from engine.worker.network.policy import Policy
from engine.worker.update import losses


@dataclass
class Microbatch:
    """Trajectories that go through the model together.

    Attributes:
        members: which trajectories of the batch they are.
        budget: tokens it was split by.
        rows, batch: the trajectories as ids, and as tensors.
        advantage, sampled: [tokens] float32 of the trained tokens, in order; `sampled` is the
            sampler's log-probability.
        lengths: [rows] float32, trained tokens of each.
        reference: [tokens] float32, log-probabilities of the starting point; None without KL term.
        old: [tokens] float32, those of the policy at the first pass; None before it.
    """

    members: list[int]
    budget: int
    rows: list[Row]
    batch: Micro
    advantage: torch.Tensor
    sampled: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None


@dataclass(frozen=True)
class PassSums:
    """Sums over the trained tokens of one microbatch in one pass.

    Attributes:
        clipped: tokens that the clipping acts on.
        gap_sum, gap_max: distance of the trainer's log-probability from the sampler's.
        missing: tokens the sampler gave no log-probability for.
        first: whether it is the first pass over the batch; entropy and gap are of that one alone.
    """

    loss: float
    tokens: int
    entropy: float
    kl: float
    clipped: float
    gap_sum: float
    gap_max: float
    missing: int
    first: bool


class PolicyPass:
    """Passes over the batch of one step; a `BatchPass` (memory_retry.py).

    Args:
        trajectories: those that are trained.
        normaliser: what the loss is divided by, over the whole batch.

    Attributes:
        first: whether the next pass is the first of the batch; the loop clears it.
        microbatches: of the last pass.
    """

    def __init__(
        self,
        policy: Policy,
        settings: GRPOSettings,
        trajectories: Sequence[Trajectory],
        normaliser: losses.Normaliser,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.trajectories = trajectories
        self.normaliser = normaliser
        self.first = True
        self.microbatches: list[Microbatch] = []

    def run(self, tokens: int) -> list[PassSums]:
        """Gradients of the whole batch, in microbatches of at most `tokens`."""
        # Memory that ran out makes the split finer; what the first pass saw is taken on.
        if self.first:
            self.microbatches = self._split(tokens, [])
        elif self.microbatches[0].budget != tokens:
            self.microbatches = self._split(tokens, self.microbatches)
        return [self._backward(microbatch) for microbatch in self.microbatches]

    def is_finest(self, tokens: int) -> bool:
        """Whether at so many tokens every trajectory goes alone."""
        return len(self.policy.split(self._rows(), tokens)) == len(self.trajectories)

    def _rows(self) -> list[Row]:
        return [
            Row(t.prompt_ids + t.ids, [0] * len(t.prompt_ids) + t.loss_mask, len(t.prompt_ids))
            for t in self.trajectories
        ]

    def _split(self, budget: int, earlier: Sequence[Microbatch]) -> list[Microbatch]:
        """Microbatches of at most `budget` tokens. `earlier` is another split of the same
        trajectories that was passed over once: its numbers are taken on."""
        rows = self._rows()
        microbatches = []
        for members in self.policy.split(rows, budget):
            microbatch = self._collate(members, [rows[i] for i in members], budget)
            if earlier:
                _take_on(microbatch, earlier)
            if self.settings.kl_coef > 0:
                microbatch.reference = self.policy.reference_logprobs(
                    microbatch.batch, self.settings.temperature
                )
            microbatches.append(microbatch)
        return microbatches

    def _collate(self, members: list[int], rows: list[Row], budget: int) -> Microbatch:
        """The trajectories `members` as tensors on the device."""
        device = self.policy.device
        chosen = [self.trajectories[i] for i in members]
        batch = self.policy.collate(rows).to(device)
        advantage = torch.tensor([t.advantage for t in chosen], device=device)
        return Microbatch(
            members,
            budget,
            rows,
            batch,
            advantage=advantage[batch.row],
            sampled=torch.tensor(
                [
                    logprob
                    for t in chosen
                    for logprob, trained in zip(t.sampled_logprobs, t.loss_mask, strict=True)
                    if trained
                ],
                device=device,
            ),
            lengths=torch.tensor([float(t.trained_tokens) for t in chosen], device=device),
        )

    def _backward(self, micro: Microbatch) -> PassSums:
        """One microbatch forward and backward."""
        settings, first = self.settings, self.first
        policy, entropy = self.policy.logprobs(micro.batch, settings.temperature, entropies=first)
        missing = 0
        if micro.old is None:
            micro.old = policy.detach()
            # A sampler that gave no number for a token is taken to agree, and counted.
            unknown = micro.sampled.isnan()
            missing = int(unknown.sum())
            micro.sampled = torch.where(unknown, micro.old, micro.sampled)
        tokens = losses.Tokens(
            policy=policy,
            old=micro.old,
            advantage=micro.advantage,
            correction=losses.truncated_importance(micro.old, micro.sampled, settings.tis_cap),
            row=micro.batch.row,
            lengths=micro.lengths,
        )
        clip = losses.Clip(settings.clip_low, settings.clip_high)
        loss = losses.LOSSES[settings.loss](tokens, self.normaliser, clip).sum()
        kl = torch.zeros((), device=policy.device)
        if micro.reference is not None:
            divergence = losses.kl_k3(policy, micro.reference)
            # Times the ratio: then its gradient is that of the divergence, not of the estimator.
            ratio = torch.exp(policy - micro.old)
            weights = losses.token_weights(settings.loss, tokens, self.normaliser)
            loss = loss + settings.kl_coef * (ratio * divergence * weights).sum()
            kl = divergence.detach().sum()
        loss.backward()
        gap = (micro.old - micro.sampled).abs()
        return PassSums(
            loss=loss.item(),
            tokens=policy.numel(),
            entropy=float(entropy.sum()),
            kl=float(kl),
            clipped=float(losses.clip_share(settings.loss, tokens, clip)),
            gap_sum=float(gap.sum()) if first else 0.0,
            gap_max=float(gap.max()) if first else 0.0,
            missing=missing,
            first=first,
        )


def _take_on(microbatch: Microbatch, earlier: Sequence[Microbatch]) -> None:
    """What the first pass saw of the microbatch's members when they were split another way."""
    seen = {
        member: (before, before.batch.row == position)
        for before in earlier
        for position, member in enumerate(before.members)
    }
    parts = [seen[member] for member in microbatch.members]
    microbatch.sampled = torch.cat([before.sampled[tokens] for before, tokens in parts])
    microbatch.old = torch.cat(
        [before.old[tokens] for before, tokens in parts if before.old is not None]
    )


def pass_metrics(parts: Sequence[PassSums]) -> dict[str, float]:
    """Metrics of all microbatches and passes of a step (engine/core/metrics.py)."""
    tokens = sum(part.tokens for part in parts)
    first = [part for part in parts if part.first]
    sampled = sum(part.tokens for part in first)
    return {
        "entropy": sum(part.entropy for part in first) / sampled,
        "kl": sum(part.kl for part in parts) / tokens,
        "clip_share": sum(part.clipped for part in parts) / tokens,
        "sampler_gap_mean": sum(part.gap_sum for part in first) / sampled,
        "sampler_gap_max": max(part.gap_max for part in first),
        "sampler_missing": sum(part.missing for part in first),
    }
