"""Supervised fine-tuning of an adapter, top to bottom.

The loop minimises, over batches of conversations, the mean over all supervised tokens of a batch of
-log p(token | everything before it). Supervised tokens are those of the assistant's turns,
including their end tokens (setting `loss_on`). Every row is seen once per epoch; the last batch of
an epoch may be smaller and is divided by its own tokens. With `packing`, the rows of a step share
forward passes; the gradient is the same. With `keep`, replayed rows join every batch
(evaluation/replay.py); with `vary_wording`, some rows come in other words (rollouts/rewording.py).
"""

import math
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from engine.core.wording.asked import asked_tools, conversation
from engine.environments.indexed.rows import IndexedRows
from engine.records.run_config import SFTConfig
from engine.records.settings import SFTSettings
from engine.runs.evaluation import exam
from engine.worker.components import (
    Components,
    environment,
    evaluation_limits,
    microbatch_tokens,
    prepare,
    sample_rows,
    start_of,
    tasks_of,
)
from engine.worker.core import pulse
from engine.worker.core.batch import Row
from engine.worker.core.job import Job, Result, require
from engine.worker.core.rows_on_demand import RowsOnDemand
from engine.worker.core.varied_rows import Origin, TrainingRows, VariedRows
from engine.worker.evaluation.heldout_loss import CrossEntropy, LossRow
from engine.worker.evaluation.replay import replay_of
from engine.worker.rollouts.rewording import varied_wording
from engine.worker.training import Training
from engine.worker.update.supervised import SupervisedPass
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

RENDERED_FIRST = 50_000  # a dataset with more rows is tokenised during training, not before it


def train(job: Job[SFTConfig]) -> Result:
    """Train with supervised fine-tuning to the end of the run: render the rows, then update the
    policy on one batch of them after the other. Returns the record for result.json
    (`Training.finish`).

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: the run was asked to stop.
    """
    settings = job.config.settings
    components = prepare(job, Path(job.config.base.path))
    plain_rows = training_rows(job, components)
    eval_tasks = exam.exam_tasks(components.env, settings.eval_rows)
    limits = evaluation_limits(job, components)
    budget = microbatch_tokens(components)
    with (
        environment(components, job) as process,
        Training(job, components, settings.steps) as training,
    ):
        rows = with_varied_wording(job, components, process, plain_rows)
        # Before `start`, which may load a checkpoint: replayed answers are the starting model's.
        replay = replay_of(job, start_of(components, training.policy))
        training.replayed = replay.used if replay else None
        training.start(
            eval_tasks,
            context=components.context(process, limits) if process else None,  # nothing scores
            limits=limits,
            losses=CrossEntropy(loss_rows(job, components, eval_tasks)),
            budget=budget,
        )
        for step in training.steps():
            began = time.monotonic()
            indices = rows_of_step(step, len(rows), settings.batch_size, settings.seed)
            batch = rows.batch(step, indices)
            if replay is not None:
                batch += replay.of_step(step, len(indices), settings.batch_size)
            measured = update(training, settings, batch, step, budget)
            train_s = time.monotonic() - began  # without evaluations and checkpoints
            speed = {"train_s": train_s, "tokens_per_s": measured["tokens"] / train_s}
            training.log(step, measured | speed)
        return training.finish()


def update(
    training: Training, settings: SFTSettings, batch: Sequence[Row], step: int, budget: int
) -> dict[str, float]:
    """Do the optimizer step with number `step` on a batch of rows, with at most `budget` tokens in
    the model at once. `training` holds the policy and its optimizer. Returns metrics by name."""
    supervised_pass = SupervisedPass(training.policy, batch, packing=settings.packing)
    # Run the pass, and run it again in smaller microbatches if memory runs out.
    pending = training.within_memory(step, budget, supervised_pass)
    # The whole batch in one call: the counts of its microbatches would only be added up.
    training.meter.count_batch(batch)
    (loss, microbatches), grad_norm, lr = training.optimizer_step(step, pending)
    return {
        "loss": loss,
        "tokens": sum(len(row.ids) for row in batch),
        "supervised_tokens": supervised_pass.supervised_tokens,
        "grad_norm": grad_norm,
        "lr": lr,
        "microbatches": microbatches,
    }


def with_varied_wording(
    job: Job[SFTConfig], components: Components, process: EnvProcess | None, rows: TrainingRows
) -> TrainingRows | VariedRows:
    """Return the rows; with the setting `vary_wording`, some of them come in other words each time
    they are seen. `process` is the environment's process, or None if it scores nothing."""
    varied = varied_wording(job.config.settings, components.env, process, job.event)
    if varied is None:
        return rows
    return VariedRows(
        rows,
        in_other_words=varied.task_at,
        render=lambda task: _rows_of(job, components, task),
    )


def training_rows(job: Job[SFTConfig], components: Components) -> TrainingRows:
    """Render the rows to train on: those of at most `max_examples` tasks with an answer. Raises
    WorkerFailure (kind data) if there are none."""
    settings = job.config.settings
    tasks = tasks_with_answer(tasks_of(components, "train"))
    require(tasks, "training rows with an answer", "Give the tasks an answer to learn from.")
    return render(job, components, sample_rows(tasks, settings.max_examples, settings.seed))


def rows_of_step(step: int, count: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the rows (of `count`) that optimizer step `step` (from 1) trains on, at
    most `batch_size` of them.

    Each epoch is a new shuffle of all rows. It depends on the seed and the epoch only, so a resumed
    run trains on the same rows. The last batch of an epoch may be smaller.
    """
    batches_per_epoch = math.ceil(count / batch_size)
    epoch, batch_number = divmod(step - 1, batches_per_epoch)
    start = batch_number * batch_size
    return list(_order_of_epoch(epoch, count, seed)[start : start + batch_size])


@lru_cache(maxsize=1)
def _order_of_epoch(epoch: int, count: int, seed: int) -> "array[int]":
    """Return the indices of all `count` rows in the shuffled order of an epoch (from 0). The last
    order is cached, because millions of rows take long to shuffle."""
    order = array("Q", range(count))
    random.Random(f"{seed}-{epoch}").shuffle(order)  # type: ignore[arg-type] - swaps elements alone
    return order


def tasks_with_answer(tasks: Sequence[TaskRow]) -> Sequence[TaskRow]:
    """Return the tasks with an answer. In a dataset that is read row by row every task has one."""
    if isinstance(tasks, IndexedRows):
        return tasks
    return [task for task in tasks if task["gold"]]  # the conversation with the answer to learn


def render(job: Job[SFTConfig], components: Components, tasks: Sequence[TaskRow]) -> TrainingRows:
    """Render each task's conversation as rows of token ids with loss masks, cut at max_length, and
    write the event `data` about them.

    A dataset that is read row by row and has more than `RENDERED_FIRST` tasks is rendered only when
    a step needs its rows. If the chat template splits a conversation into several rows, only the
    last row is trained then.

    Raises:
        WorkerFailure: kind data, if no row is left.
    """
    if isinstance(tasks, IndexedRows) and len(tasks) > RENDERED_FIRST:
        message = (
            f"{len(tasks)} rows, each read when it is trained on; of a conversation that the chat "
            "template splits, the last turn"
        )
        job.event("data", message, rows=len(tasks))
        rows = RowsOnDemand(tasks, lambda task: _last_row_of(job, components, task))
        return TrainingRows(rows, origin=lambda index: (tasks[index], -1))
    rendered = _render_all(job, components, tasks)
    _report_rows(job, rendered)
    require(rendered.rows, "rows that fit into max_length", "Raise max_length.")
    return TrainingRows(rendered.rows, origin=rendered.origins.__getitem__)


@dataclass
class _RenderedRows:
    """The rows of a dataset that have something to train.

    Attributes:
        origins: what each row was rendered from.
        cut_count: how many rows were cut at max_length.
        dropped_count: how many rows were left out, since no supervised token is left in them.
        split_count: how many conversations became several rows, as the chat template writes
            earlier turns differently once more messages follow.
    """

    rows: list[Row] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    cut_count: int = 0
    dropped_count: int = 0
    split_count: int = 0


def _render_all(
    job: Job[SFTConfig], components: Components, tasks: Sequence[TaskRow]
) -> _RenderedRows:
    """Render the conversations of all tasks as rows of token ids, cut at max_length. Returns the
    rows with a token to train, and counts of what was cut, dropped or split."""
    result = _RenderedRows()
    for task in tasks:
        pulse.beat()  # a sign of life, since rendering may take minutes
        rendered = _rows_of(job, components, task)
        if len(rendered) > 1:
            result.split_count += 1
        if not rendered:  # the conversation has nothing to train, and counts as one row
            result.dropped_count += 1
        for number, (row, full_length) in enumerate(rendered):
            if not any(row.loss_mask):  # the cut at max_length left nothing to train
                result.dropped_count += 1
                continue
            if len(row.ids) < full_length:
                result.cut_count += 1
            result.rows.append(row)
            result.origins.append((task, number))
    return result


def _report_rows(job: Job[SFTConfig], rendered: _RenderedRows) -> None:
    """Write the event `data`, which says how much there is to train in the rendered rows."""
    rows = rendered.rows
    cut, dropped, split = rendered.cut_count, rendered.dropped_count, rendered.split_count
    split_note = f", {split} conversations split by the chat template" if split else ""
    job.event(
        "data",
        f"{len(rows)} rows, {cut} cut at max_length, {dropped} dropped{split_note}",
        rows=len(rows),
        truncated=cut,
        dropped=dropped,
        split=split,
        tokens=sum(len(row.ids) for row in rows),
        supervised_tokens=sum(sum(row.loss_mask) for row in rows),
    )


def loss_rows(job: Job[SFTConfig], components: Components, tasks: list[TaskRow]) -> list[LossRow]:
    """Render the held-out tasks in the same way as training rows, to measure the loss on them.

    Tasks without an answer are left out, and so are rows without a supervised token after the cut
    at max_length.
    """
    return [
        LossRow(task["id"], row)
        for task in tasks
        if task["gold"]
        for row, _uncut_length in _rows_of(job, components, task)
        if any(row.loss_mask)
    ]


def _rows_of(job: Job[SFTConfig], components: Components, task: TaskRow) -> list[tuple[Row, int]]:
    """Render a task's conversation as training rows; most have one row, but a chat template may
    split a conversation. Returns for each row (the row with at most max_length token ids, the
    number of token ids before that cut); the two numbers tell the caller which rows were cut."""
    settings, tools = job.config.settings, components.env.tools
    rendered = components.renderer.rows(
        conversation(task), asked_tools(task, tools), settings.loss_on, settings.thinking
    )
    limit = settings.max_length
    return [(Row(row.ids[:limit], row.loss_mask[:limit]), len(row.ids)) for row in rendered]


def _last_row_of(job: Job[SFTConfig], components: Components, task: TaskRow) -> Row | None:
    """Return the row that ends with the last turn of a task's conversation: the only row, unless
    the chat template splits the conversation. Returns None if it has no token to train."""
    rows = _rows_of(job, components, task)
    if not rows:
        return None
    last_row, _uncut_length = rows[-1]
    return last_row if any(last_row.loss_mask) else None
