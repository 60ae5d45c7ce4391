"""A rank's part of a batch, for each kind of pass: what is sent to another rank (process of the
run), and the pass that the rank makes of it.

A part knows the sizes of the whole batch by which its loss is divided. So the gradients of all
parts add up to the gradients of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.records.settings import GRPOSettings
from engine.worker.core.batch import Row
from engine.worker.core.trajectory import Trajectory
from engine.worker.network.policy import Policy
from engine.worker.ranks.shares import cut
from engine.worker.update.losses import Normaliser
from engine.worker.update.policy_update import PolicyPass
from engine.worker.update.preference import Pair, PreferencePass
from engine.worker.update.supervised import SupervisedPass, SupervisedSums

# All ranks do a part of these passes. A teacher's passes run on rank 0 alone.
Shareable = SupervisedPass | PreferencePass | PolicyPass
SHAREABLE = (SupervisedPass, PreferencePass, PolicyPass)


class Part(Protocol):
    """A rank's part of a batch, in the form in which it is sent."""

    def on(self, policy: Policy) -> Shareable:
        """Make the pass over this part that adds to the gradients of `policy`."""
        ...


@dataclass(frozen=True)
class SupervisedPart:
    """Rows of an SFT step. Their loss is divided by the `supervised_tokens` (trained tokens) of the
    whole step."""

    rows: Sequence[Row]
    packing: bool
    supervised_tokens: int

    def on(self, policy: Policy) -> SupervisedPass:
        """Make the pass over these rows that adds to the gradients of `policy`."""
        return SupervisedPass(
            policy, self.rows, packing=self.packing, supervised_tokens=self.supervised_tokens
        )


@dataclass(frozen=True)
class PreferencePart:
    """Pairs of a DPO step. Their loss is divided by the number of pairs in the whole step."""

    pairs: Sequence[Pair]
    beta: float
    sft_weight: float
    pairs_in_batch: int

    def on(self, policy: Policy) -> PreferencePass:
        """Make the pass over these pairs that adds to the gradients of `policy`."""
        return PreferencePass(policy, self.pairs, self.beta, self.sft_weight, self.pairs_in_batch)


@dataclass(frozen=True)
class PolicyPart:
    """Trajectories of a GRPO step. Their loss is divided by the sizes of the whole step."""

    settings: GRPOSettings
    trajectories: Sequence[Trajectory]
    normaliser: Normaliser

    def on(self, policy: Policy) -> PolicyPass:
        """Make the pass over these trajectories that adds to the gradients of `policy`."""
        return PolicyPass(policy, self.settings, self.trajectories, self.normaliser)


def parts_of(batch_pass: Shareable, ranks: int) -> list[Part | None]:
    """Cut the batch of a pass into one part for each of `ranks` processes, of about equal numbers
    of tokens. A rank that gets nothing has None; rank 0 always gets a part."""
    if isinstance(batch_pass, SupervisedPass):
        costs = [len(row.ids) for row in batch_pass.batch]
    elif isinstance(batch_pass, PreferencePass):
        costs = [len(pair.chosen.ids) + len(pair.rejected.ids) for pair in batch_pass.pairs]
    else:
        costs = [
            len(trajectory.prompt_ids) + len(trajectory.ids)
            for trajectory in batch_pass.trajectories
        ]
    return [_make_part(batch_pass, indices) if indices else None for indices in cut(costs, ranks)]


def _make_part(batch_pass: Shareable, indices: range) -> Part:
    """Make the part of the pass that has the items (rows, pairs or trajectories) with these
    indices, in the form in which it is sent to another rank."""
    if isinstance(batch_pass, SupervisedPass):
        rows = [batch_pass.batch[index] for index in indices]
        return SupervisedPart(rows, batch_pass.packing, batch_pass.supervised_tokens)
    if isinstance(batch_pass, PreferencePass):
        return PreferencePart(
            [batch_pass.pairs[index] for index in indices],
            batch_pass.beta,
            batch_pass.sft_weight,
            batch_pass.pairs_in_batch,
        )
    trajectories = [_without_texts(batch_pass.trajectories[index]) for index in indices]
    return PolicyPart(batch_pass.settings, trajectories, batch_pass.normaliser)


def _without_texts(trajectory: Trajectory) -> Trajectory:
    """Drop the fields of the trajectory that no pass reads, so that less is sent."""
    return replace(trajectory, prompt=[], messages=[], completion="", tools=[], metrics={})


def merged(batch_pass: Shareable, results: Sequence[Any]) -> Any:
    """Merge the `results` that the passes over the parts returned (rank 0's first) into what a pass
    over the whole batch returns. The number of microbatches is rank 0's, because the ranks work at
    the same time."""
    if isinstance(batch_pass, SupervisedPass):
        return SupervisedSums(sum(loss for loss, _ in results), results[0].microbatches)
    if isinstance(batch_pass, PreferencePass):
        total = results[0]
        for sums in results[1:]:
            total = total + sums
        return replace(total, microbatches=results[0].microbatches)
    # A policy pass returns a list with the sums of each microbatch.
    return [sums for part_sums in results for sums in part_sums]
