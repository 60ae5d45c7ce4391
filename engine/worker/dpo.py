"""Direct preference optimisation of an adapter, top to bottom.

A run minimises, over batches of pairs of a better and a worse answer to the same task, the mean of
-log sigmoid(beta ((log p(better) - log q(better)) - (log p(worse) - log q(worse)))). Here p is the
policy and q the reference, which is the policy that the run started from (arXiv 2305.18290). To
this it adds sft_weight times the mean of the better answers' negative log-probability per token.

The log-probability of an answer is the sum over its tokens, including its end token. If an answer
has several turns and the chat template splits it into rows, only its last turn counts. Every pair
is seen once per epoch; the last batch of an epoch may be smaller and is divided by its own number
of pairs. Nothing is sampled while training; if the environment scores answers, the evaluations
sample some.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.environments.indexed.rows import IndexedRows
from engine.environments.pairs import pair_of
from engine.records.run_config import DPOConfig
from engine.records.settings import DPOSettings
from engine.runs.evaluation import exam
from engine.worker.components import (
    Components,
    environment,
    evaluation_limits,
    microbatch_tokens,
    prepare,
    sample_rows,
    tasks_of,
)
from engine.worker.core import pulse
from engine.worker.core.job import Job, Result, require
from engine.worker.core.rows_on_demand import RowsOnDemand
from engine.worker.evaluation.heldout_loss import MeasuredLoss
from engine.worker.network.policy import Policy
from engine.worker.rollouts.renderer import Rendered
from engine.worker.sft import RENDERED_FIRST, rows_of_step
from engine.worker.training import Training
from engine.worker.update.preference import (
    Pair,
    PreferencePass,
    PreferenceSums,
    dpo_loss,
    gains,
    make_pair,
    split_pairs,
)
from envs.json_types import TaskRow
from envs.tool_schemas import tools_of


def train(job: Job[DPOConfig]) -> Result:
    """Train with direct preference optimisation to the end of the run: render the pairs, then
    update the policy on one batch of them after the other. Returns the record for result.json
    (`Training.finish`).

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: the run was asked to stop.
    """
    settings = job.config.settings
    components = prepare(job, Path(job.config.base.path))
    pairs = training_pairs(job, components)
    eval_tasks = evaluation_tasks(components, settings.eval_rows)
    eval_pairs = pairs_of(job, components, eval_tasks).pairs
    limits = evaluation_limits(job, components)
    budget = microbatch_tokens(components)
    with (
        environment(components, job) as process,
        Training(job, components, settings.steps) as training,
    ):
        training.start(
            eval_tasks,
            context=components.context(process, limits) if process else None,  # nothing scores
            limits=limits,
            losses=PairLoss(eval_pairs, settings.beta),
            budget=budget,
        )
        for step in training.steps():
            began = time.monotonic()
            indices = rows_of_step(step, len(pairs), settings.batch_size, settings.seed)
            batch = [pairs[index] for index in indices]
            measured = update(training, settings, batch, step, budget)
            train_s = time.monotonic() - began  # without evaluations and checkpoints
            speed = {"train_s": train_s, "tokens_per_s": measured["tokens"] / train_s}
            training.log(step, measured | speed)
        return training.finish()


def update(
    training: Training, settings: DPOSettings, batch: Sequence[Pair], step: int, budget: int
) -> dict[str, float]:
    """Do the optimizer step with number `step` on a batch of pairs. Returns metrics by name.

    Args:
        training: the run under way, with its policy and optimizer.
        budget: the most tokens that go through the model at once.
    """
    preference_pass = PreferencePass(training.policy, batch, settings.beta, settings.sft_weight)
    # Run the pass, and run it again in smaller microbatches if memory runs out.
    pending = training.within_memory(step, budget, preference_pass)
    rows = [row for pair in batch for row in pair.rows]
    # The whole batch in one call: the counts of its microbatches would only be added up.
    training.meter.count_batch(rows)
    sums, grad_norm, lr = training.optimizer_step(step, pending)
    return {
        **pair_metrics(sums, len(batch), settings.beta),
        "tokens": sum(len(row.ids) for row in rows),
        "supervised_tokens": sum(pair.trained_tokens for pair in batch),
        "grad_norm": grad_norm,
        "lr": lr,
        "microbatches": sums.microbatches,
    }


def training_pairs(job: Job[DPOConfig], components: Components) -> list[Pair] | RowsOnDemand[Pair]:
    """Render the pairs to train on: those of at most `max_examples` tasks that have one. Raises
    WorkerFailure (kind data) if there are none."""
    settings = job.config.settings
    tasks = tasks_with_pair(tasks_of(components, "train"))
    require(
        tasks,
        "training rows with a better and a worse answer",
        "Give rows `chosen` and `rejected`.",
    )
    return render(job, components, sample_rows(tasks, settings.max_examples, settings.seed))


def evaluation_tasks(components: Components, limit: int) -> list[TaskRow]:
    """Return the tasks of the evaluations, at most `limit` dev and `limit` held-out ones (see
    `exam.exam_tasks`).

    If the environment does not score answers, only tasks with a pair of a preferred and a rejected
    answer are returned, because nothing else can be measured.
    """
    # `bool` is true for every task, since no task is an empty object.
    is_usable = bool if components.env.scored else pair_of
    return exam.exam_tasks(components.env, limit, is_usable)


def pair_metrics(sums: PreferenceSums, count: int, beta: float) -> dict[str, float]:
    """Return the metrics of the DPO loss over a batch of `count` pairs, by name; `sums` are the
    sums over the batch.

    The rewards are means. An answer's reward is `beta` times its gain in log-probability over the
    reference.
    """
    return {
        "loss": sums.loss,  # already the mean
        "preference_accuracy": sums.correct / count,
        "chosen_reward": beta * sums.chosen / count,
        "rejected_reward": beta * sums.rejected / count,
    }


def tasks_with_pair(tasks: Sequence[TaskRow]) -> Sequence[TaskRow]:
    """Return the tasks that have a pair. Of a dataset that is read row by row, all tasks are
    returned; whether one has a pair shows only when a step reads it."""
    if isinstance(tasks, IndexedRows):
        return tasks
    return [task for task in tasks if pair_of(task)]


def render(
    job: Job[DPOConfig], components: Components, tasks: Sequence[TaskRow]
) -> list[Pair] | RowsOnDemand[Pair]:
    """Render the pairs of the tasks, and write the event `data` about them.

    A dataset that is read row by row and has more than `RENDERED_FIRST` pairs is rendered only when
    a step needs its pairs; the event then gives only its number of rows.

    Raises:
        WorkerFailure: kind data, if no pair is left.
    """
    if isinstance(tasks, IndexedRows) and len(tasks) > RENDERED_FIRST:
        message = f"{len(tasks)} pairs, each read when it is trained on"
        job.event("data", message, rows=len(tasks))

        def render_one(task: TaskRow) -> Pair | None:
            """Render the pair of one task when a step needs it; None if nothing can be compared."""
            rendered = _render_pair(job, components, task)
            return rendered.pair if rendered is not None else None

        return RowsOnDemand(tasks, render_one)
    rendered = pairs_of(job, components, tasks)
    _report_pairs(job, rendered, dropped=len(tasks) - len(rendered.pairs))
    require(rendered.pairs, "pairs that fit into max_length", "Raise max_length.")
    return rendered.pairs


def _report_pairs(job: Job[DPOConfig], rendered: "RenderedPairs", dropped: int) -> None:
    """Write the event `data`: how much there is to train in the `rendered` pairs, and how many
    pairs were dropped because the cut at max_length left nothing to compare."""
    pairs, cut, split = rendered.pairs, rendered.cut_count, rendered.split_count
    split_note = f", {split} split by the chat template" if split else ""
    job.event(
        "data",
        f"{len(pairs)} pairs, {cut} cut at max_length, {dropped} dropped{split_note}",
        rows=len(pairs),
        truncated=cut,
        dropped=dropped,
        split=split,
        tokens=sum(len(row.ids) for pair in pairs for row in pair.rows),
        supervised_tokens=sum(pair.trained_tokens for pair in pairs),
    )


@dataclass(frozen=True)
class RenderedPairs:
    """Pairs whose two answers can be compared within max_length.

    Attributes:
        cut_count: how many of the pairs were cut at max_length.
        split_count: how many have a conversation that the chat template splits into several rows.
    """

    pairs: list[Pair]
    cut_count: int
    split_count: int


def pairs_of(
    job: Job[DPOConfig], components: Components, tasks: Sequence[TaskRow]
) -> RenderedPairs:
    """Render the pairs of those tasks that have one, and count the pairs that are cut or split."""
    rendered_or_none = [_render_pair(job, components, task) for task in tasks]
    rendered = [pair for pair in rendered_or_none if pair is not None]
    return RenderedPairs(
        pairs=[pair.pair for pair in rendered],
        cut_count=sum(pair.is_cut for pair in rendered),
        split_count=sum(pair.is_split for pair in rendered),
    )


@dataclass(frozen=True)
class _RenderedPair:
    """The rendered pair of one task.

    Attributes:
        is_cut: whether the pair was cut at max_length.
        is_split: whether the chat template splits one of its conversations into several rows.
    """

    pair: Pair
    is_cut: bool
    is_split: bool


def _render_pair(
    job: Job[DPOConfig], components: Components, task: TaskRow
) -> _RenderedPair | None:
    """Render the pair of one task; None if nothing can be compared within max_length.

    A chat template that changes earlier turns splits a conversation into several rows. Only the
    last row is compared: it holds the last turn, and the beginning that both conversations share is
    not trained anyway.
    """
    chosen_rows, rejected_rows = _conversation_rows(components, task)
    if not chosen_rows or not rejected_rows:  # no pair, or nothing to train in one of them
        return None
    limit = job.config.settings.max_length
    chosen, rejected = chosen_rows[-1], rejected_rows[-1]
    pair = make_pair(task["id"], chosen, rejected, limit)
    if pair is None:
        return None
    is_cut = max(len(chosen.ids), len(rejected.ids)) > limit
    is_split = max(len(chosen_rows), len(rejected_rows)) > 1
    return _RenderedPair(pair, is_cut, is_split)


def _conversation_rows(
    components: Components, task: TaskRow
) -> tuple[list[Rendered], list[Rendered]]:
    """Render the better and the worse conversation of a task to training rows. Returns (their rows,
    its rows), or two empty lists if the task has no pair."""
    conversations = pair_of(task)
    if conversations is None:
        return [], []
    chosen, rejected = conversations
    tools = tools_of(task, components.env.tools)
    return (
        components.renderer.rows(chosen, tools, loss_on="assistant"),
        components.renderer.rows(rejected, tools, loss_on="assistant"),
    )


@dataclass(frozen=True)
class PairLoss:
    """The mean DPO loss of preference pairs. It is ln 2 at the start, when policy and reference are
    the same."""

    pairs: Sequence[Pair]
    beta: float

    @torch.no_grad()
    def measure(
        self, policy: Policy, tasks: Collection[str], budget: int
    ) -> Sequence[MeasuredLoss]:
        """Compute the loss of each pair whose task id is in `tasks`; every pair has the weight 1.

        Implements `HeldoutLoss` (evaluation/heldout_loss.py). `budget`: the most tokens of a
        microbatch.
        """
        pairs = [pair for pair in self.pairs if pair.task_id in tasks]
        measured: list[MeasuredLoss] = []
        for pair_indices in split_pairs(policy, pairs, budget):
            measured += self._losses(policy, [pairs[index] for index in pair_indices])
            pulse.beat()  # a sign of life
        return measured

    def _losses(self, policy: Policy, pairs: Sequence[Pair]) -> list[MeasuredLoss]:
        """Compute the loss of each pair in nats; all pairs go through the model together."""
        # By how much each answer's log-probability is above that under the reference.
        chosen, rejected, _ = gains(policy, pairs, training=False)
        # With pairs_in_batch=1 each value is the pair's whole loss, not its share of a mean.
        values = dpo_loss(chosen, rejected, self.beta, pairs_in_batch=1).tolist()
        return [
            MeasuredLoss(pair.task_id, loss, weight=1, tokens=pair.trained_tokens)
            for pair, loss in zip(pairs, values, strict=True)
        ]
