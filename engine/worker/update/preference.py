"""Pairs of a better and a worse answer as rows, and one pass of DPO's loss over the pairs of a
step.

Both answers of a pair go through the model in the same microbatch, because the loss compares them.
The two conversations begin with the same tokens: the prompt, and any equal first tokens of the
answers. These tokens have the same probability in both, so they cancel out of the loss and its
gradient. They are run once and not trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.worker.core.batch import Row
from engine.worker.core.transfer import floats_on
from engine.worker.network.network import PackedOrPadded
from engine.worker.network.policy import Policy
from engine.worker.rollouts.renderer import Rendered
from engine.worker.update.pending import Pending

_NUMBERS_PER_MICROBATCH = 4  # what `PreferencePass._backward` returns


@dataclass(frozen=True)
class Pair:
    """A better and a worse answer to one task, each with the conversation before it. `prefix_len`
    of both rows is the number of tokens that both begin with; only the tokens after these are
    trained."""

    task_id: str
    chosen: Row
    rejected: Row

    @property
    def rows(self) -> tuple[Row, Row]:
        """The chosen answer and the rejected one, each with its prompt."""
        return self.chosen, self.rejected

    @property
    def trained_tokens(self) -> int:
        """How many tokens of both answers are trained."""
        return sum(sum(row.loss_mask) for row in self.rows)


def make_pair(task_id: str, chosen: Rendered, rejected: Rendered, limit: int) -> Pair | None:
    """Cut both conversations (a task with its better and its worse answer) at `limit` tokens and
    make them a pair. Returns None if one of them has no trained token after the beginning that both
    share, because then there is nothing to compare."""
    shared = 0  # tokens that both begin with
    # Not strict: one conversation may be longer.
    for better_id, worse_id in zip(chosen.ids[:limit], rejected.ids[:limit], strict=False):
        if better_id != worse_id:
            break
        shared += 1
    rows = []
    for conversation in (chosen, rejected):
        # The tokens that both share cancel out of the loss and are not trained.
        loss_mask = [0] * shared + conversation.loss_mask[shared:limit]
        if not any(loss_mask):
            return None
        rows.append(Row(conversation.ids[:limit], loss_mask, prefix_len=shared))
    return Pair(task_id, *rows)


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, beta: float, pairs_in_batch: int
) -> torch.Tensor:
    """Return -log sigmoid(beta (chosen - rejected)) of each pair, divided by the number of pairs in
    the whole batch: [pairs] float32 (arXiv 2305.18290, equation 7).

    Args:
        chosen, rejected: [pairs] float32, the gains of the better and of the worse answers, log
            policy(answer) - log reference(answer).
        beta: how strongly a difference of gains counts.
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)) / pairs_in_batch


def gains(
    policy: Policy, pairs: Sequence[Pair], *, training: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gain of each answer: log policy(answer) - log reference(answer), summed over the
    answer's trained tokens. It says how much likelier the policy makes the answer than the
    reference does.

    Args:
        pairs: a better and a worse answer each; all go through the model together.
        training: whether the result carries gradients and dropout acts.

    Returns (the gains of the better answers, those of the worse answers, the mean log-probability
    of a token of each better answer), all [pairs] float32.
    """
    rows = [row for pair in pairs for row in pair.rows]  # they alternate: better, worse
    batch = policy.collate(rows).to(policy.device)
    reference = policy.reference_logprobs(batch)
    logprobs = _logprobs(policy, batch, training=training)
    row_gains = _sums_by_row(logprobs - reference, batch, len(rows))
    better_gains, worse_gains = row_gains[0::2], row_gains[1::2]  # the even rows, the odd ones
    better_logprobs = _sums_by_row(logprobs, batch, len(rows))[0::2]
    better_lengths = [sum(pair.chosen.loss_mask) for pair in pairs]
    mean_logprobs = better_logprobs / floats_on(better_lengths, policy.device)
    return better_gains, worse_gains, mean_logprobs


def _logprobs(policy: Policy, batch: PackedOrPadded, *, training: bool) -> torch.Tensor:
    """Compute the policy's log-probabilities of the trained tokens, [tokens] float32. They have
    gradients and dropout only if `training` is set."""
    if training:
        logprobs, _ = policy.logprobs(batch)
    else:  # without the dropout that `policy.logprobs` has
        logprobs, _ = policy.base.network.logprobs(batch, policy.adapter)
    return logprobs


def _sums_by_row(values: torch.Tensor, batch: PackedOrPadded, rows: int) -> torch.Tensor:
    """Sum `values`, one for each trained token of the batch ([tokens] float32), over the tokens of
    each of its `rows` rows. Returns [rows] float32."""
    return torch.zeros(rows, device=values.device).index_add(0, batch.row, values)


def split_pairs(policy: Policy, pairs: Sequence[Pair], budget: int) -> list[list[int]]:
    """Divide `pairs` into microbatches of at most `budget` tokens, both answers of a pair in the
    same one; a larger pair gets one of its own. Returns for each microbatch the indices of its
    pairs."""
    # `policy.split` divides rows by their lengths. So each pair is passed as one row, as long as
    # its two rows together. Our own forward runs their common prompt once, so it counts once there.
    shares_prompts = policy.base.network.forward == "own"
    joined_rows = []
    for pair in pairs:
        shared_length = pair.rejected.prefix_len if shares_prompts else 0
        ids = [*pair.chosen.ids, *pair.rejected.ids[shared_length:]]
        joined_rows.append(Row(ids, loss_mask=[0] * len(ids)))  # only its length matters
    return policy.split(joined_rows, budget)


@dataclass(frozen=True)
class PreferenceSums:
    """Sums over the pairs of a step, or over some of them.

    Attributes:
        loss: the sum of the pairs' losses, each divided by the number of the step's pairs. Over all
            pairs it is the mean loss.
        correct: pairs whose better answer gained more than the worse one.
        chosen, rejected: the summed gains of the better and of the worse answers.
        microbatches: number of forward passes with gradients.
    """

    loss: float = 0.0
    correct: int = 0
    chosen: float = 0.0
    rejected: float = 0.0
    microbatches: int = 0

    def __add__(self, other: "PreferenceSums") -> "PreferenceSums":
        """Add up the sums over two groups of pairs, number by number."""
        return PreferenceSums(
            loss=self.loss + other.loss,
            correct=self.correct + other.correct,
            chosen=self.chosen + other.chosen,
            rejected=self.rejected + other.rejected,
            microbatches=self.microbatches + other.microbatches,
        )


class PreferencePass:
    """Forward and backward over the pairs of one step; a `BatchPass` (memory_retry.py)."""

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[Pair],
        beta: float,
        sft_weight: float,
        pairs_in_batch: int | None = None,
    ) -> None:
        """Prepare passes over `pairs`, which add to the gradients of `policy`.

        Args:
            beta: how strongly a gain in log-probability counts in DPO's loss (see `dpo_loss`).
            sft_weight: the weight of the second term of the loss, which keeps the better answers
                likely; 0 leaves the term out.
            pairs_in_batch: what the loss is divided by if `pairs` are only a part of the batch;
                None: the number of `pairs`.
        """
        self.policy = policy
        self.pairs = pairs
        self.beta = beta
        self.sft_weight = sft_weight
        self.pairs_in_batch = len(pairs) if pairs_in_batch is None else pairs_in_batch

    def run(self, token_limit: int) -> Pending[PreferenceSums]:
        """Add the gradients of the step's loss (the mean over all its pairs) to the adapter's
        gradients, in microbatches of at most `token_limit` tokens. Returns the pending sums of the
        step."""
        numbers = []
        for pair_indices in split_pairs(self.policy, self.pairs, token_limit):
            microbatch = [self.pairs[index] for index in pair_indices]
            numbers.append(self._backward(microbatch))
        return Pending(torch.cat(numbers), _sum_of_microbatches)

    def _backward(self, microbatch: Sequence[Pair]) -> torch.Tensor:
        """Run some of the step's pairs forward and backward, which adds to the gradients. Returns
        their four sums as [4] float64, in the order that `_sum_of_microbatches` reads."""
        chosen, rejected, mean_logprobs = gains(self.policy, microbatch, training=True)
        losses = dpo_loss(chosen, rejected, self.beta, self.pairs_in_batch)
        # DPO's loss alone also falls if both answers become less likely, the worse one more so. The
        # second term keeps the better one likely (arXiv 2404.19733, equation 1).
        loss = losses.sum() - self.sft_weight * mean_logprobs.sum() / self.pairs_in_batch
        loss.backward()
        correct = (chosen > rejected).sum()
        sums = (loss.detach(), correct, chosen.detach().sum(), rejected.detach().sum())
        return torch.stack([value.double() for value in sums])

    def is_finest(self, token_limit: int) -> bool:
        """Whether `token_limit` already puts every pair into a microbatch of its own, so that a
        smaller limit would change nothing."""
        return len(split_pairs(self.policy, self.pairs, token_limit)) == len(self.pairs)


def _sum_of_microbatches(numbers: Sequence[float]) -> PreferenceSums:
    """Add up the sums of a step from `numbers`, which holds the four numbers that
    `PreferencePass._backward` returns for each of its microbatches, one after the other."""
    total = PreferenceSums()
    for start in range(0, len(numbers), _NUMBERS_PER_MICROBATCH):
        loss, correct, chosen, rejected = numbers[start : start + _NUMBERS_PER_MICROBATCH]
        total = total + PreferenceSums(loss, int(correct), chosen, rejected, microbatches=1)
    return total
