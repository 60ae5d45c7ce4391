"""Pairs of a better and a worse answer as rows, and one pass of DPO's loss over those of a step.

Both answers of a pair go through the model in the same microbatch, because the loss compares them.
What the two conversations have in common at their beginning, the prompt and any equal first tokens
of the answers, has the same probability in both: it cancels out of the loss and its gradient, so it
is run once and not trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy
from engine.worker.rollouts.renderer import Rendered


@dataclass(frozen=True)
class Pair:
    """A better and a worse answer to one task. `prefix_len` of both rows is their common
    beginning; only what follows it is trained."""

    task_id: str
    chosen: Row
    rejected: Row

    @property
    def rows(self) -> tuple[Row, Row]:
        return self.chosen, self.rejected

    @property
    def trained_tokens(self) -> int:
        return sum(sum(row.loss_mask) for row in self.rows)


def make_pair(task_id: str, chosen: Rendered, rejected: Rendered, limit: int) -> Pair | None:
    """Cut both conversations at `limit` tokens and make them a pair. None where nothing is left to
    compare: one of them has no trained token beyond what both share."""
    answers = [(r.ids[:limit], r.loss_mask[:limit]) for r in (chosen, rejected)]
    (better_ids, _), (worse_ids, _) = answers
    shared = 0
    for better, worse in zip(better_ids, worse_ids, strict=False):
        if better != worse:
            break
        shared += 1
    rows = [Row(ids, [0] * shared + mask[shared:], prefix_len=shared) for ids, mask in answers]
    if not all(any(row.loss_mask) for row in rows):
        return None
    return Pair(task_id, *rows)


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, beta: float, pairs_in_batch: int
) -> torch.Tensor:
    """-log sigmoid(beta (chosen - rejected)) of each pair, divided by the number of pairs in the
    whole batch (arXiv 2305.18290, equation 7).

    Args:
        chosen, rejected: [pairs] float32, how much likelier the policy makes the better and the
            worse answer than the reference does: log policy(answer) - log reference(answer).
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)) / pairs_in_batch


def gains(
    policy: Policy, pairs: Sequence[Pair], *, training: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How much likelier the policy makes each answer than the reference does: the difference of
    their log-probabilities, summed over the answer's trained tokens.

    Args:
        training: whether the result is to carry gradients, and dropout acts.

    Returns (of the better answers, of the worse ones, the mean log-probability of a token of the
    better answers), each [pairs] float32.
    """
    rows = [row for pair in pairs for row in pair.rows]
    batch = policy.collate(rows).to(policy.device)
    reference = policy.reference_logprobs(batch)
    if training:
        logprobs, _ = policy.logprobs(batch)
    else:
        logprobs, _ = policy.base.network.logprobs(batch, policy.adapter)
    sums = torch.zeros(len(rows), device=policy.device)
    gained = sums.index_add(0, batch.row, logprobs - reference)
    likelihoods = sums.index_add(0, batch.row, logprobs)[0::2]
    lengths = torch.tensor([sum(pair.chosen.loss_mask) for pair in pairs], device=policy.device)
    return gained[0::2], gained[1::2], likelihoods / lengths


def split_pairs(policy: Policy, pairs: Sequence[Pair], budget: int) -> list[list[int]]:
    """Indices of `pairs` in microbatches of at most `budget` tokens; a larger pair goes alone."""
    # A pair is as long as its answers in a row. Our own forward runs their beginning once.
    shares_prompts = policy.base.network.forward == "own"
    lines = []
    for pair in pairs:
        skipped = pair.rejected.prefix_len if shares_prompts else 0
        ids = [*pair.chosen.ids, *pair.rejected.ids[skipped:]]
        lines.append(Row(ids, [0] * len(ids)))
    return policy.split(lines, budget)


@dataclass(frozen=True)
class PreferenceSums:
    """Sums over the pairs of a step.

    Attributes:
        loss: the mean loss of the step's pairs.
        correct: pairs whose better answer gained more than the worse one.
        chosen, rejected: the gains of the better and of the worse answers.
        microbatches: forward passes with gradients that it took.
    """

    loss: float = 0.0
    correct: int = 0
    chosen: float = 0.0
    rejected: float = 0.0
    microbatches: int = 0


class PreferencePass:
    """Forward and backward over the pairs of one step; a `BatchPass` (memory_retry.py)."""

    def __init__(
        self, policy: Policy, pairs: Sequence[Pair], beta: float, sft_weight: float
    ) -> None:
        """Prepare passes over `pairs`, which add to the gradients of `policy`. The other arguments
        are the settings."""
        self.policy = policy
        self.pairs = pairs
        self.beta = beta
        self.sft_weight = sft_weight

    def run(self, tokens: int) -> PreferenceSums:
        """Add the gradients of the step's loss to the adapter, in microbatches of at most `tokens`
        tokens. The loss is the mean over all pairs of the step."""
        sums = PreferenceSums()
        for members in split_pairs(self.policy, self.pairs, tokens):
            members_pairs = [self.pairs[i] for i in members]
            chosen, rejected, likelihood = gains(self.policy, members_pairs, training=True)
            loss = dpo_loss(chosen, rejected, self.beta, len(self.pairs)).sum()
            # The pairs alone are also told apart by making both answers less likely; this keeps
            # the better one likely (arXiv 2404.19733, equation 1).
            loss = loss - self.sft_weight * likelihood.sum() / len(self.pairs)
            loss.backward()
            sums = PreferenceSums(
                loss=sums.loss + loss.item(),
                correct=sums.correct + int((chosen > rejected).sum()),
                chosen=sums.chosen + float(chosen.detach().sum()),
                rejected=sums.rejected + float(rejected.detach().sum()),
                microbatches=sums.microbatches + 1,
            )
        return sums

    def is_finest(self, tokens: int) -> bool:
        """Whether in microbatches of at most `tokens` tokens every pair already goes alone, so that
        a smaller limit would change nothing."""
        return len(split_pairs(self.policy, self.pairs, tokens)) == len(self.pairs)
