"""Supervised fine-tuning of an adapter, top to bottom.

Minimises, over batches of conversations, the mean over all supervised tokens of the batch of
-log p(token | everything before it). Supervised are the assistant's turns (`loss_on`), their end
token included. Every row is seen once per epoch; the last batch of an epoch may be smaller and is
divided by its own tokens. With `packing` the rows of a step share forward passes, without it each
has one of its own; the gradient is the same.
"""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from engine.records.run_config import SFTConfig
from engine.worker.components import (
    Components,
    environment,
    evaluation_limits,
    microbatch_tokens,
    prepare,
    tasks_of,
)
from engine.worker.core.batch import Row
from engine.worker.core.job import Job, Result, require
from engine.worker.evaluation import heldout
from engine.worker.evaluation.heldout_loss import CrossEntropy, LossRow
from engine.worker.network.policy import Policy
from engine.worker.training import Training
from engine.worker.update.losses import cross_entropy
from envs.json_types import TaskRow, ToolSchema


def train(job: Job[SFTConfig]) -> Result:
    """Train with supervised fine-tuning to the end of the run: render the rows, then step by step
    update the policy on a batch of them. Returns the record for result.json (`Training.finish`).

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: it was asked to stop.
    """
    settings = job.config.settings
    components = prepare(job, Path(job.config.base.path))
    train_tasks = [t for t in tasks_of(components, "train") if t["gold"]]
    require(train_tasks, "training rows with an answer", "Give the tasks an answer to learn from.")
    rows = render(job, components, sample_rows(train_tasks, settings.max_examples, settings.seed))
    eval_tasks = heldout.ordered(tasks_of(components, "heldout"), settings.eval_rows)
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
            losses=CrossEntropy(loss_rows(job, components, eval_tasks)),
            budget=budget,
        )
        for step in training.steps():
            began = time.monotonic()  # includes neither evaluations nor checkpoints
            indices = rows_of_step(step, len(rows), settings.batch_size, settings.seed)
            batch = [rows[i] for i in indices]
            supervised_pass = SupervisedPass(training.policy, batch, packing=settings.packing)
            loss, microbatches = training.within_memory(step, budget, supervised_pass)
            training.meter.count_microbatch(batch)
            training.require_finite(loss, "loss")
            grad_norm, lr = training.optimizer_step(step)
            tokens = sum(len(row.ids) for row in batch)
            train_s = time.monotonic() - began
            training.log(
                step,
                {
                    "loss": loss,
                    "tokens": tokens,
                    "supervised_tokens": supervised_pass.supervised_tokens,
                    "grad_norm": grad_norm,
                    "lr": lr,
                    "microbatches": microbatches,
                    "train_s": train_s,
                    "tokens_per_s": tokens / train_s,
                },
            )
        return training.finish()


class SupervisedPass:
    """Forward and backward over the rows of one step; a `BatchPass` (update/memory_retry.py).

    Attributes:
        supervised_tokens: how many tokens of the batch are trained.
    """

    def __init__(self, policy: Policy, batch: Sequence[Row], *, packing: bool) -> None:
        """Prepare passes over the rows in `batch`, which add to the gradients of `policy`. With
        `packing` rows share forward passes."""
        self.policy = policy
        self.batch = batch
        self.packing = packing
        self.supervised_tokens = sum(sum(row.loss_mask) for row in batch)

    def run(self, tokens: int) -> tuple[float, int]:
        """Add the gradients of the batch's loss to the adapter, in microbatches of at most `tokens`
        tokens. The loss is the mean over all supervised tokens of the batch. Returns (loss, number
        of microbatches)."""
        loss = 0.0
        microbatches = self._split(tokens)
        for rows in microbatches:
            logprobs, _ = self.policy.logprobs(self.policy.collate(rows))
            microbatch_loss = cross_entropy(logprobs, self.supervised_tokens).sum()
            microbatch_loss.backward()
            loss += microbatch_loss.item()
        return loss, len(microbatches)

    def is_finest(self, tokens: int) -> bool:
        """Whether in microbatches of at most `tokens` tokens every row already goes alone, so that
        a smaller limit would change nothing."""
        return len(self._split(tokens)) == len(self.batch)

    def _split(self, tokens: int) -> list[list[Row]]:
        """The rows in microbatches of at most `tokens` tokens; one row each without packing."""
        if not self.packing:
            return [[row] for row in self.batch]
        groups = self.policy.split(self.batch, tokens)
        return [[self.batch[i] for i in indices] for indices in groups]


def rows_of_step(step: int, count: int, batch_size: int, seed: int) -> list[int]:
    """The indices of the rows (of `count`) that optimizer step `step` (from 1) trains on.

    Each epoch is a new shuffle of all rows. It follows from the seed and the epoch alone, so a
    resumed run trains on the same rows. The last batch of an epoch may be smaller.
    """
    per_epoch = math.ceil(count / batch_size)
    epoch, index = divmod(step - 1, per_epoch)
    order = list(range(count))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order[index * batch_size : (index + 1) * batch_size]


def sample_rows(tasks: list[TaskRow], limit: int | None, seed: int) -> list[TaskRow]:
    """Draw `limit` tasks by the seed and return them in their original order. All tasks are
    returned if `limit` is None or 0, or if there are not more."""
    if not limit or limit >= len(tasks):
        return tasks
    indices = random.Random(f"{seed}-examples").sample(range(len(tasks)), limit)
    return [tasks[i] for i in sorted(indices)]


def render(job: Job[SFTConfig], components: Components, tasks: list[TaskRow]) -> list[Row]:
    """Render each task's conversation as a row of token ids with a loss mask, cut at max_length.

    A row without a supervised token, such as one that lost them by the cut, would train nothing and
    is dropped. The event `data` says how many rows were cut and dropped.

    Raises:
        WorkerFailure: kind data, when no row is left.
    """
    rows = []
    cut_rows = dropped_rows = 0
    for task in tasks:
        row, full_length = _row_of(job, components, task)
        if not any(row.loss_mask):
            dropped_rows += 1
            continue
        if len(row.ids) < full_length:
            cut_rows += 1
        rows.append(row)
    job.event(
        "data",
        f"{len(rows)} rows, {cut_rows} cut at max_length, {dropped_rows} dropped",
        rows=len(rows),
        truncated=cut_rows,
        dropped=dropped_rows,
        tokens=sum(len(r.ids) for r in rows),
        supervised_tokens=sum(sum(r.loss_mask) for r in rows),
    )
    require(rows, "rows that fit into max_length", "Raise max_length.")
    return rows


def tools_of(components: Components, task: TaskRow) -> list[ToolSchema]:
    """The tools that a task's conversation was written with: those in its metadata, or else the
    environment's."""
    return task["metadata"].get("tools") or components.env.tools


def loss_rows(job: Job[SFTConfig], components: Components, tasks: list[TaskRow]) -> list[LossRow]:
    """Render the held-out tasks as the training rows are, so that their loss can be measured. Left
    out are tasks without an answer, and rows that have no supervised token after the cut at
    max_length."""
    rows = []
    for task in tasks:
        if not task["gold"]:
            continue
        row, _ = _row_of(job, components, task)
        if any(row.loss_mask):
            rows.append(LossRow(task["id"], row))
    return rows


def _row_of(job: Job[SFTConfig], components: Components, task: TaskRow) -> tuple[Row, int]:
    """Render a task's conversation. Returns (the row, cut at max_length; how many ids it has
    uncut)."""
    settings = job.config.settings
    conversation = components.renderer.conversation(
        task["gold"], tools_of(components, task), settings.loss_on
    )
    limit = settings.max_length
    row = Row(conversation.ids[:limit], conversation.loss_mask[:limit])
    return row, len(conversation.ids)
