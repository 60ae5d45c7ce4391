"""Direct preference optimisation of an adapter, top to bottom.

Minimises, over batches of pairs of a better and a worse answer to one task, the mean of
-log sigmoid(beta ((log p(better) - log q(better)) - (log p(worse) - log q(worse)))), with p the
policy and q the reference, the policy that the run started from (arXiv 2305.18290), plus
sft_weight times the mean of the better answers' negative log-probability per token. The
log-probability of an answer is the sum over its tokens, its end token included; of an answer of
several turns that the chat template splits into rows, over its last turn. Every pair is seen
once per epoch; the last batch of an epoch may be smaller and is divided by its own pairs.
Nothing is sampled while training; where the environment scores, the evaluations do.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.environments.indexed.rows import IndexedRows
from engine.environments.pairs import pair_of
from engine.records.run_config import DPOConfig
from engine.worker.components import (
    Components,
    environment,
    evaluation_limits,
    microbatch_tokens,
    prepare,
    tasks_of,
)
from engine.worker.core.job import Job, Result, require
from engine.worker.core.rows_on_demand import RowsOnDemand
from engine.worker.evaluation import heldout
from engine.worker.evaluation.heldout_loss import MeasuredLoss
from engine.worker.network.policy import Policy
from engine.worker.sft import RENDERED_FIRST, rows_of_step, sample_rows, tools_of
from engine.worker.training import Training
from engine.worker.update.preference import (
    Pair,
    PreferencePass,
    dpo_loss,
    gains,
    make_pair,
    split_pairs,
)
from envs.json_types import TaskRow


def train(job: Job[DPOConfig]) -> Result:
    """Train with direct preference optimisation to the end of the run: render the pairs, then step
    by step update the policy on a batch of them. Returns the record for result.json
    (`Training.finish`).

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: it was asked to stop.
    """
    settings = job.config.settings
    components = prepare(job, Path(job.config.base.path))
    train_tasks = tasks_with_pair(tasks_of(components, "train"))
    require(
        train_tasks,
        "training rows with a better and a worse answer",
        "Give rows `chosen` and `rejected`.",
    )
    sampled_tasks = sample_rows(train_tasks, settings.max_examples, settings.seed)
    pairs = render(job, components, sampled_tasks)
    eval_tasks = tasks_of(components, "heldout")
    if not components.env.scored:  # only pairs can be measured
        eval_tasks = [task for task in eval_tasks if pair_of(task)]
    eval_tasks = heldout.ordered(eval_tasks, settings.eval_rows)
    eval_pairs, _cut_pairs, _split_pairs = pairs_of(job, components, eval_tasks)
    limits = evaluation_limits(job, components)
    budget = microbatch_tokens(components.base, checkpointing=settings.gradient_checkpointing)
    with (
        environment(components, job) as process,
        Training(job, components, settings.steps) as training,
    ):
        training.start(
            eval_tasks,
            context=components.context(process, limits) if process else None,
            limits=limits,
            losses=PairLoss(eval_pairs, settings.beta),
            budget=budget,
        )
        for step in training.steps():
            began = time.monotonic()  # includes neither evaluations nor checkpoints
            indices = rows_of_step(step, len(pairs), settings.batch_size, settings.seed)
            batch = [pairs[i] for i in indices]
            preference_pass = PreferencePass(
                training.policy, batch, settings.beta, settings.sft_weight
            )
            sums = training.within_memory(step, budget, preference_pass)
            rows = [row for pair in batch for row in pair.rows]
            training.meter.count_microbatch(rows)
            training.require_finite(sums.loss, "loss")
            grad_norm, lr = training.optimizer_step(step)
            tokens = sum(len(row.ids) for row in rows)
            train_s = time.monotonic() - began
            training.log(
                step,
                {
                    "loss": sums.loss,
                    "preference_accuracy": sums.correct / len(batch),
                    "chosen_reward": settings.beta * sums.chosen / len(batch),
                    "rejected_reward": settings.beta * sums.rejected / len(batch),
                    "tokens": tokens,
                    "supervised_tokens": sum(pair.trained_tokens for pair in batch),
                    "grad_norm": grad_norm,
                    "lr": lr,
                    "microbatches": sums.microbatches,
                    "train_s": train_s,
                    "tokens_per_s": tokens / train_s,
                },
            )
        return training.finish()


def tasks_with_pair(tasks: Sequence[TaskRow]) -> Sequence[TaskRow]:
    """The tasks with a pair. Of a dataset that is read row by row all tasks are returned: whether
    one has a pair shows when a step reads it."""
    if isinstance(tasks, IndexedRows):
        return tasks
    return [task for task in tasks if pair_of(task)]


def render(
    job: Job[DPOConfig], components: Components, tasks: Sequence[TaskRow]
) -> list[Pair] | RowsOnDemand[Pair]:
    """Render the pairs of the tasks, and write the event `data`. It counts the pairs that were cut
    at max_length, those that were dropped because the cut left nothing to compare, and those with a
    conversation that the chat template splits into several rows (see `_pair`).

    More than `RENDERED_FIRST` pairs of a dataset that is read row by row are not rendered here, but
    when a step needs them.

    Raises:
        WorkerFailure: kind data, when no pair is left.
    """
    if isinstance(tasks, IndexedRows) and len(tasks) > RENDERED_FIRST:
        message = f"{len(tasks)} pairs, each read when it is trained on"
        job.event("data", message, rows=len(tasks))

        def render_one(task: TaskRow) -> Pair | None:
            pair, _is_cut, _is_split = _pair(job, components, task)
            return pair

        return RowsOnDemand(tasks, render_one)
    pairs, cut_pairs, split_pairs = pairs_of(job, components, tasks)
    dropped_pairs = len(tasks) - len(pairs)
    split = f", {split_pairs} split by the chat template" if split_pairs else ""
    job.event(
        "data",
        f"{len(pairs)} pairs, {cut_pairs} cut at max_length, {dropped_pairs} dropped{split}",
        rows=len(pairs),
        truncated=cut_pairs,
        dropped=dropped_pairs,
        split=split_pairs,
        tokens=sum(len(row.ids) for pair in pairs for row in pair.rows),
        supervised_tokens=sum(pair.trained_tokens for pair in pairs),
    )
    require(pairs, "pairs that fit into max_length", "Raise max_length.")
    return pairs


def pairs_of(
    job: Job[DPOConfig], components: Components, tasks: Sequence[TaskRow]
) -> tuple[list[Pair], int, int]:
    """Render the pairs of those tasks that have one. Returns (the pairs that have something to
    compare within max_length; how many of them were cut there; how many have a conversation that
    the chat template splits)."""
    pairs: list[Pair] = []
    cut_pairs = split_pairs = 0
    for task in tasks:
        pair, is_cut, is_split = _pair(job, components, task)
        if pair is not None:
            pairs.append(pair)
            cut_pairs += is_cut
            split_pairs += is_split
    return pairs, cut_pairs, split_pairs


def _pair(
    job: Job[DPOConfig], components: Components, task: TaskRow
) -> tuple[Pair | None, bool, bool]:
    """Render the pair of one task. Returns (the pair, or None where there is nothing to compare;
    whether it was cut at max_length; whether the chat template splits one of its conversations).

    A chat template that changes earlier turns splits a conversation into several rows. Only the
    last row is compared: it holds the last turn, and the beginning that both conversations share is
    not trained anyway.
    """
    limit = job.config.settings.max_length
    conversations = pair_of(task)
    if conversations is None:
        return None, False, False
    tools = tools_of(components, task)
    chosen_chat, rejected_chat = conversations
    chosen_rows = components.renderer.rows(chosen_chat, tools, "assistant")
    rejected_rows = components.renderer.rows(rejected_chat, tools, "assistant")
    if not chosen_rows or not rejected_rows:  # nothing to train in one of them
        return None, False, False
    chosen, rejected = chosen_rows[-1], rejected_rows[-1]
    is_cut = max(len(chosen.ids), len(rejected.ids)) > limit
    is_split = max(len(chosen_rows), len(rejected_rows)) > 1
    return make_pair(task["id"], chosen, rejected, limit), is_cut, is_split


@dataclass(frozen=True)
class PairLoss:
    """The mean loss of preference pairs (DPO): ln 2 at the start, where the policy is its own
    reference."""

    pairs: Sequence[Pair]
    beta: float

    @torch.no_grad()
    def measure(
        self, policy: Policy, tasks: Collection[str], budget: int
    ) -> Sequence[MeasuredLoss]:
        """The loss of each pair whose task is in `tasks`; every pair has the weight 1. It is a
        `HeldoutLoss` (evaluation/heldout_loss.py). `budget`: tokens of a microbatch."""
        pairs = [pair for pair in self.pairs if pair.task_id in tasks]
        measured: list[MeasuredLoss] = []
        for members in split_pairs(policy, pairs, budget):
            chosen, rejected, _ = gains(policy, [pairs[i] for i in members], training=False)
            values = dpo_loss(chosen, rejected, self.beta, pairs_in_batch=1)
            for index, loss in zip(members, values.tolist(), strict=True):
                pair = pairs[index]
                measured.append(
                    MeasuredLoss(pair.task_id, loss, weight=1, tokens=pair.trained_tokens)
                )
        return measured
