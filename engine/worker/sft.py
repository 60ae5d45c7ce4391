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
from dataclasses import asdict
from typing import Any

from engine.worker.components import (
    Workbench,
    environment,
    exam_limits,
    microbatch_tokens,
    prepare,
    tasks_of,
)
from engine.worker.core.batch import Row
from engine.worker.core.job import Job, require
from engine.worker.evaluation import heldout
from engine.worker.evaluation.during_training import LossRow
from engine.worker.training import Training
from engine.worker.update.losses import cross_entropy


def train(job: Job) -> dict[str, Any]:
    """Run the job to its end; returns the result record."""
    settings = job.settings
    bench = prepare(job, job.base_path, settings)
    train_tasks = [t for t in tasks_of(bench, "train") if t["gold"]]
    require(train_tasks, "training rows with an answer", "Give the tasks an answer to learn from.")
    rows = render(job, bench, sample_rows(train_tasks, settings))
    steps_per_epoch = math.ceil(len(rows) / settings["batch_size"])
    total = settings.get("steps") or steps_per_epoch * settings["epochs"]
    exam_tasks = heldout.ordered(tasks_of(bench, "heldout"), settings["eval_rows"])
    limits = settings | asdict(exam_limits(job, bench))
    budget = microbatch_tokens(bench.base, checkpointing=settings["gradient_checkpointing"])
    with environment(bench, job) as process, Training(job, bench, total) as training:
        training.examine(
            exam_tasks,
            stage=bench.stage(process, limits) if process else None,
            limits=limits,
            loss_rows=loss_rows(job, bench, exam_tasks),
            budget=budget,
        )
        for step in training.steps():
            began = time.monotonic()
            batch = [rows[i] for i in rows_of_step(step, len(rows), settings)]
            supervised = sum(sum(row.loss_mask) for row in batch)

            def attempt(
                tokens: int, batch: Sequence[Row] = batch, supervised: int = supervised
            ) -> tuple[float, int]:
                return backward(training, batch, supervised, tokens)

            def alone(tokens: int, batch: list[Row] = batch) -> bool:
                return len(split(training, batch, tokens)) == len(batch)

            loss, passes = training.within_memory(step, budget, attempt, alone)
            training.meter.ran(batch)
            training.require_finite(loss, "loss")
            grad_norm, lr = training.update(step)
            tokens = sum(len(row.ids) for row in batch)
            train_s = time.monotonic() - began
            training.log(
                step,
                {
                    "loss": loss,
                    "tokens": tokens,
                    "supervised_tokens": supervised,
                    "grad_norm": grad_norm,
                    "lr": lr,
                    "microbatches": passes,
                    "train_s": train_s,
                    "tokens_per_s": tokens / train_s,
                },
            )
        return training.finish()


def backward(
    training: Training, batch: Sequence[Row], supervised: int, tokens: int
) -> tuple[float, int]:
    """Gradients of the batch's mean loss over its `supervised` tokens, gathered over microbatches
    of at most `tokens`; returns (loss, microbatches)."""
    loss = 0.0
    micros = split(training, batch, tokens)
    for micro in micros:
        logprobs, _ = training.policy.logprobs(training.policy.collate(micro))
        part = cross_entropy(logprobs, supervised).sum()
        part.backward()
        loss += part.item()
    return loss, len(micros)


def split(training: Training, batch: Sequence[Row], budget: int) -> list[list[Row]]:
    """The rows that go through the model together."""
    if not training.settings["packing"]:
        return [[row] for row in batch]
    return [[batch[i] for i in members] for members in training.policy.split(batch, budget)]


def rows_of_step(step: int, count: int, settings: dict[str, Any]) -> list[int]:
    """Which rows optimizer step `step` (from 1) trains on: a function of the seed alone, so a
    resumed run sees the same data."""
    per_epoch = math.ceil(count / settings["batch_size"])
    epoch, at = divmod(step - 1, per_epoch)
    order = list(range(count))
    random.Random(f"{settings['seed']}-{epoch}").shuffle(order)
    return order[at * settings["batch_size"] : (at + 1) * settings["batch_size"]]


def sample_rows(tasks: list[dict[str, Any]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All tasks, or a seeded sample of `max_examples` of them, in their own order."""
    wanted = settings.get("max_examples")
    if not wanted or wanted >= len(tasks):
        return tasks
    kept = random.Random(f"{settings['seed']}-examples").sample(range(len(tasks)), wanted)
    return [tasks[i] for i in sorted(kept)]


def render(job: Job, bench: Workbench, tasks: list[dict[str, Any]]) -> list[Row]:
    """Tasks as rows of ids with a loss mask, cut at max_length.

    A row whose supervised tokens are all cut away is dropped and counted: it would train nothing.

    Raises:
        WorkerFailure: kind data, when no row is left.
    """
    settings = job.settings
    rows, cut, dropped = [], 0, 0
    for task in tasks:
        full = bench.renderer.conversation(task["gold"], tools_of(bench, task), settings["loss_on"])
        ids, mask = full.ids[: settings["max_length"]], full.loss_mask[: settings["max_length"]]
        if not any(mask):
            dropped += 1
            continue
        cut += len(ids) < len(full.ids)
        rows.append(Row(ids, mask))
    job.event(
        "data",
        f"{len(rows)} rows, {cut} cut at max_length, {dropped} dropped",
        rows=len(rows),
        truncated=cut,
        dropped=dropped,
        tokens=sum(len(r.ids) for r in rows),
        supervised_tokens=sum(sum(r.loss_mask) for r in rows),
    )
    require(rows, "rows that fit into max_length", "Raise max_length.")
    return rows


def tools_of(bench: Workbench, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools a row was written with: its own where it names some, else the environment's."""
    return task["metadata"].get("tools") or bench.env.tools


def loss_rows(job: Job, bench: Workbench, tasks: list[dict[str, Any]]) -> list[LossRow]:
    """The held-out tasks that have an answer, rendered as the training rows are."""
    out = []
    limit = job.settings["max_length"]
    for task in tasks:
        if not task["gold"]:
            continue
        full = bench.renderer.conversation(
            task["gold"], tools_of(bench, task), job.settings["loss_on"]
        )
        if any(full.loss_mask[:limit]):
            out.append(LossRow(task["id"], Row(full.ids[:limit], full.loss_mask[:limit])))
    return out
