"""The trajectories of a step as microbatches, and one pass of the policy loss over them.

With `updates_per_batch` above 1 there are several passes over the batch. The first pass's policy is
the one that sampled (or one update ahead), so its log-probabilities are the `old` ones of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.records.settings import GRPOSettings
from engine.worker.core.batch import Row, rows_of
from engine.worker.core.trajectory import Trajectory
from engine.worker.core.transfer import floats_on
from engine.worker.network.network import PackedOrPadded
from engine.worker.network.policy import Policy
from engine.worker.update import losses
from engine.worker.update.pending import Pending

_NUMBERS_PER_MICROBATCH = 7  # what `PolicyPass._backward` returns


@dataclass
class Microbatch:
    """Trajectories that go through the model together.

    Attributes:
        members: indices of the trajectories within the batch.
        budget: the token limit with which the batch was split.
        rows, batch: the trajectories as token ids, and as tensors on the device.
        advantage, sampled: [tokens] float32, for the trained tokens in order; `sampled` is the
            sampler's log-probability.
        lengths: [rows] float32, trained tokens of each trajectory.
        reference: [tokens] float32, log-probabilities under the reference policy; None without a KL
            term.
        old: [tokens] float32, log-probabilities in the first pass; None before that pass.
    """

    members: list[int]
    budget: int
    rows: list[Row]
    batch: PackedOrPadded
    advantage: torch.Tensor
    sampled: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None


@dataclass(frozen=True)
class PassSums:
    """Sums over the trained tokens of one microbatch in one pass.

    Attributes:
        loss: the microbatch's share of the batch's loss, the KL term included.
        tokens: how many trained tokens there are.
        entropy, kl: sums in nats; `kl` is 0 without a KL term.
        clipped: tokens that the clipping acts on.
        gap_sum, gap_max: sum and maximum of the distances between the trainer's and the sampler's
            log-probabilities.
        missing: tokens for which the sampler gave no log-probability.
        is_first_pass: whether this was the first pass over the batch; only that pass measures
            entropy and gap.
    """

    loss: float
    tokens: int
    entropy: float
    kl: float
    clipped: float
    gap_sum: float
    gap_max: float
    missing: int
    is_first_pass: bool


class PolicyPass:
    """Passes over the batch of one step; a `BatchPass` (memory_retry.py).

    Attributes:
        is_first_pass: whether the next pass is the first of the batch; the loop clears it.
        microbatches: those of the last pass.
    """

    def __init__(
        self,
        policy: Policy,
        settings: GRPOSettings,
        trajectories: Sequence[Trajectory],
        normaliser: losses.Normaliser,
    ) -> None:
        """Prepare passes over the trained `trajectories`. Their loss is divided by the sizes in
        `normaliser`. The first pass splits them into microbatches."""
        self.policy = policy
        self.settings = settings
        self.trajectories = trajectories
        self.normaliser = normaliser
        self.clip = losses.Clip(settings.clip_low, settings.clip_high)
        self.is_first_pass = True
        self.microbatches: list[Microbatch] = []

    def run(self, token_limit: int) -> Pending[list[PassSums]]:
        """Compute the gradients of the whole batch, in microbatches of at most `token_limit`
        tokens. Returns the sums of each microbatch. The first pass splits the batch; later passes
        keep the microbatches unless the limit has changed."""
        if self.is_first_pass:
            self.microbatches = self._split(token_limit, earlier=[])
        elif self.microbatches[0].budget != token_limit:  # memory ran out, the limit is lower now
            self.microbatches = self._split(token_limit, earlier=self.microbatches)
        numbers = torch.cat([self._backward(microbatch) for microbatch in self.microbatches])
        tokens = [microbatch.sampled.numel() for microbatch in self.microbatches]
        sums_from_numbers = partial(_pass_sums, tokens=tokens, is_first_pass=self.is_first_pass)
        return Pending(numbers, sums_from_numbers, loss_of=_total_loss)

    def is_finest(self, token_limit: int) -> bool:
        """Whether `token_limit` already gives every trajectory a microbatch of its own."""
        microbatches = self.policy.split(rows_of(self.trajectories), token_limit)
        return len(microbatches) == len(self.trajectories)

    def _split(self, budget: int, earlier: Sequence[Microbatch]) -> list[Microbatch]:
        """Split the batch into microbatches of at most `budget` tokens, with the reference policy's
        log-probabilities if there is a KL term.

        Args:
            earlier: the microbatches of the first pass, whose log-probabilities are copied into the
                new ones; [] in the first pass itself.
        """
        rows = rows_of(self.trajectories)
        microbatches = []
        for members in self.policy.split(rows, budget):
            microbatch = self._collate(members, [rows[index] for index in members], budget)
            if earlier:
                _copy_first_pass_logprobs(microbatch, earlier)
            if self.settings.kl_coef > 0:
                microbatch.reference = self.policy.reference_logprobs(
                    microbatch.batch, self.settings.temperature
                )
            microbatches.append(microbatch)
        return microbatches

    def _collate(self, members: list[int], rows: list[Row], budget: int) -> Microbatch:
        """Make the microbatch of the trajectories with the indices `members`, with its tensors on
        the device. `rows` are the same trajectories; `budget` is the token limit of the split."""
        device = self.policy.device
        rollouts = [self.trajectories[index] for index in members]
        sampled = [logprob for rollout in rollouts for logprob in rollout.trained_logprobs]
        advantages = [value for rollout in rollouts for value in rollout.trained_advantages]
        lengths = [float(rollout.trained_tokens) for rollout in rollouts]
        return Microbatch(
            members=members,
            budget=budget,
            rows=rows,
            batch=self.policy.collate(rows).to(device),
            advantage=floats_on(advantages, device),
            sampled=floats_on(sampled, device),
            lengths=floats_on(lengths, device),
        )

    def _backward(self, microbatch: Microbatch) -> torch.Tensor:
        """Run one microbatch forward and backward, which adds to the gradients. Returns its seven
        sums as [7] float64, in the order that `_pass_sums` reads."""
        tokens, entropy, missing = self._forward(microbatch)
        loss, kl = self._loss(tokens, microbatch.reference)
        loss.backward()
        # How far the sampler's log-probabilities are from the trainer's.
        gap = (tokens.old - microbatch.sampled).abs()
        clipped = losses.clipped_tokens(self.settings.loss, tokens, self.clip)
        sums = [loss.detach(), entropy.sum(), kl, clipped, missing, gap.sum(), gap.max()]
        return torch.stack([value.double() for value in sums])

    def _forward(self, microbatch: Microbatch) -> tuple[losses.Tokens, torch.Tensor, torch.Tensor]:
        """Run one microbatch forward. Returns (its trained tokens, their entropies, the number of
        tokens without a log-probability from the sampler). The first pass also stores its
        log-probabilities: all in `old`, and those that the sampler did not give in `sampled`."""
        cap = self.settings.tis_cap
        logprobs, entropy = self.policy.logprobs(
            microbatch.batch, self.settings.temperature, entropies=self.is_first_pass
        )
        missing = entropy.new_zeros(())
        if microbatch.old is None:
            microbatch.old = logprobs.detach()
            missing = _fill_missing(microbatch, microbatch.old)
        tokens = losses.Tokens(
            policy=logprobs,
            old=microbatch.old,
            advantage=microbatch.advantage,
            correction=losses.truncated_importance(microbatch.old, microbatch.sampled, cap),
            row=microbatch.batch.row,
            lengths=microbatch.lengths,
        )
        return tokens, entropy, missing

    def _loss(
        self, tokens: losses.Tokens, reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the microbatch's share of the batch's loss, the KL divergence from the reference
        policy summed over the tokens). `reference` holds that policy's log-probabilities. If it is
        None, there is no KL term and the divergence is 0."""
        loss = losses.LOSSES[self.settings.loss](tokens, self.normaliser, self.clip).sum()
        if reference is None:
            return loss, torch.zeros((), device=tokens.policy.device)
        kl_loss, kl = self._kl(tokens, reference)
        return loss + self.settings.kl_coef * kl_loss, kl

    def _kl(
        self, tokens: losses.Tokens, reference: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimate the KL divergence from the reference policy, whose log-probabilities are
        `reference`. Returns (its term of the loss, with the loss's weights of tokens; for the
        metrics, the plain sum of the tokens' estimates in nats, without gradient)."""
        estimates = losses.kl_k3(tokens.policy, reference)
        # Which tokens are sampled depends on the policy too: the ratio adds that to the gradient.
        ratio = torch.exp(tokens.policy - tokens.old)
        weights = losses.token_weights(self.settings.loss, tokens, self.normaliser)
        return (ratio * estimates * weights).sum(), estimates.detach().sum()


def _total_loss(all_sums: Sequence[PassSums]) -> float:
    """Return the loss of the whole batch from the sums of its microbatches."""
    return sum(sums.loss for sums in all_sums)


def _pass_sums(
    numbers: Sequence[float], *, tokens: Sequence[int], is_first_pass: bool
) -> list[PassSums]:
    """Turn the numbers of all microbatches, seven each as `PolicyPass._backward` returns them, into
    a `PassSums` for each. `tokens` holds for each its number of trained tokens. The gap to the
    sampler is the same in every pass, so only the first pass counts it."""
    all_sums = []
    starts = range(0, len(numbers), _NUMBERS_PER_MICROBATCH)
    for start, count in zip(starts, tokens, strict=True):
        loss, entropy, kl, clipped, missing, *gap = numbers[start : start + _NUMBERS_PER_MICROBATCH]
        gap_sum, gap_max = gap if is_first_pass else (0.0, 0.0)
        counts = (clipped, gap_sum, gap_max, int(missing))
        all_sums.append(PassSums(loss, count, entropy, kl, *counts, is_first_pass=is_first_pass))
    return all_sums


def _fill_missing(microbatch: Microbatch, old: torch.Tensor) -> torch.Tensor:
    """Fill in each log-probability that the sampler did not give (NaN) from `old`, the trainer's
    own of the first pass. Returns the number of such tokens."""
    is_missing = microbatch.sampled.isnan()
    microbatch.sampled = torch.where(is_missing, old, microbatch.sampled)
    return is_missing.sum()


def _copy_first_pass_logprobs(microbatch: Microbatch, earlier: Sequence[Microbatch]) -> None:
    """Copy `sampled` and `old` of the trajectories in `microbatch` from `earlier`, the microbatches
    of the first pass, which split the batch in another way."""
    # For each trajectory: its microbatch in the first pass, and the mask of its tokens in that
    # (`batch.row` holds for each token the position of its trajectory in the microbatch).
    origins = {
        member: (source, source.batch.row == position)
        for source in earlier
        for position, member in enumerate(source.members)
    }
    parts = [origins[member] for member in microbatch.members]
    microbatch.sampled = torch.cat([source.sampled[mask] for source, mask in parts])
    old_parts = []
    for source, mask in parts:
        assert source.old is not None  # the first pass has set it
        old_parts.append(source.old[mask])
    microbatch.old = torch.cat(old_parts)


def pass_metrics(all_sums: Sequence[PassSums]) -> dict[str, float]:
    """Compute the metrics of a step, by name, from the sums of all its microbatches in all passes.
    Means are per trained token. Entropy and the gap to the sampler come from the first pass."""
    tokens = sum(sums.tokens for sums in all_sums)
    first_sums = [sums for sums in all_sums if sums.is_first_pass]
    first_tokens = sum(sums.tokens for sums in first_sums)
    return {
        "entropy": sum(sums.entropy for sums in first_sums) / first_tokens,
        "kl": sum(sums.kl for sums in all_sums) / tokens,
        "clip_share": sum(sums.clipped for sums in all_sums) / tokens,
        "sampler_gap_mean": sum(sums.gap_sum for sums in first_sums) / first_tokens,
        "sampler_gap_max": max(sums.gap_max for sums in first_sums),
        "sampler_missing": sum(sums.missing for sums in first_sums),
    }
