"""Group relative policy optimisation of an adapter, top to bottom.

Maximises the expected reward of sampled completions: each task is played `group_size` times, a
completion's advantage is its reward against its own group's, and the clipped loss of `loss`
(losses.py) moves the policy. Departures from the first paper (arXiv 2402.03300), each a setting:
no KL term unless `kl_coef` > 0; the mean is over tokens (`dapo`), not over trajectories; the upper
clip is wider than the lower; a truncated weight corrects for sampler and trainer disagreeing.
Groups whose members earned the same teach nothing and are not run through the model, and a
completion whose scoring failed is never trained on. A completion cut by `max_tokens` is trained
with the reward it earned; nothing is masked.

With `async_sampling` the sampler is one update behind. The ratio that is clipped stays that of the
policy to itself at the batch's first pass (`old`), and `correction` = min(old / sampled, tis_cap)
carries the weight of what the sampler was behind: the decoupled objective of arXiv 2110.00641, the
same that mends rounding when nothing is behind.

A step, in the order it is read: `BatchSource.batch` (rollouts/batch_source.py) chooses tasks,
`collect` plays them (rollouts/collect.py) into trajectories (core/trajectory.py), `assign` compares
them (rollouts/advantages.py), `PolicyPass` makes microbatches and gradients of them
(update/policy_update.py, update/losses.py), `apply_step` moves the adapter (update/schedule.py).
"""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from engine.records.run_config import DistillConfig, GRPOConfig
from engine.records.settings import GRPOSettings
from engine.worker.components import (
    Components,
    environment,
    microbatch_tokens,
    prepare,
    tasks_of,
)
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Result, require
from engine.worker.core.trajectory import Group
from engine.worker.evaluation import heldout
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.batch_metrics import batch_metrics
from engine.worker.rollouts.batch_source import BatchSource, Collector
from engine.worker.rollouts.collect import RolloutContext, fits
from engine.worker.rollouts.guard import Guard
from engine.worker.rollouts.rewording import varied_wording
from engine.worker.rollouts.rollout_file import records_of, write_rollouts
from engine.worker.rollouts.sync_check import SyncCheck
from engine.worker.rollouts.task_order import task_order
from engine.worker.sft import sample_rows
from engine.worker.training import Training
from engine.worker.update.losses import Normaliser
from engine.worker.update.policy_update import PassSums, PolicyPass, pass_metrics
from envs.json_types import TaskRow


def train(job: Job[GRPOConfig]) -> Result:
    """Train with GRPO to the end of the run: prepare everything, then step by step sample a batch,
    update the policy on it, and log both. Returns the record for result.json (`Training.finish`)
    with `failed_scores`, the number of completions that could not be scored.

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: it was asked to stop.
    """
    settings = job.config.settings
    components = prepare(job, Path(job.config.base.path))
    budget = microbatch_tokens(components)
    with (
        closing(components.sampler),
        environment(components, job) as process,
        Training(job, components, settings.steps) as training,
    ):
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing; use algorithm sft.")
        context = components.context(process, settings)
        tasks, left_out = training_tasks(job, components, context, settings)
        training.start(
            heldout.exam_tasks(components.env, settings.eval_rows),
            context=context,
            limits=settings,
            budget=budget,
        )
        guard = Guard(settings.max_reward_errors, training.state, job.run.id)
        order = task_order(tasks, settings, training.state)
        varied = varied_wording(settings, components.env, process, job.event)
        collector = Collector(tasks, order, context, components.sampler, settings, varied)
        source = BatchSource(collector, training.policy, training.total)
        sync_check = make_sync_check(training, settings)
        for step in training.steps():
            step_began = time.monotonic()
            batch = source.batch(step)
            guard.check(step, batch)
            with source.sampling_ahead(step + 1):  # beside the update, if the settings ask for it
                update_began = time.monotonic()
                measured = update(training, settings, batch.groups, step, budget)
                measured |= sync_check.metrics(step, measured)
                train_s = time.monotonic() - update_began
            records = records_of(step, batch)
            write_rollouts(job.run, step, records)
            step_s = time.monotonic() - step_began
            measured |= batch_metrics(batch, step_s)
            values = measured | {"train_s": train_s, "tasks_left_out": left_out}
            training.log(step, values, records)
        guard.close(training.done)  # notes in the state what `finish` reads
        return training.finish() | {"failed_scores": guard.failed_scores()}


def training_tasks(
    job: Job[GRPOConfig] | Job[DistillConfig],
    components: Components,
    context: RolloutContext,
    settings: GRPOSettings,
) -> tuple[Sequence[TaskRow], int]:
    """(the tasks that are trained on, at most `max_examples` of those whose prompt leaves room for
    an answer; how many leave none, which the event `tasks_left_out` says too). Raises WorkerFailure
    (kind data) if no task leaves room."""
    params = SamplingParams.drawn(settings, seed=0)  # only for `fits`: draws nothing
    every_task = tasks_of(components, "train")
    tasks = [t for t in every_task if fits(t, context, params)]
    require(tasks, "training tasks that fit into max_length", "Raise max_length.")
    if left_out := len(every_task) - len(tasks):
        text = f"{left_out} of {len(every_task)} train tasks: no room for an answer in max_length"
        job.event("tasks_left_out", text, left_out=left_out, tasks=len(every_task))
    return sample_rows(tasks, settings.max_examples, settings.seed), left_out


def update(
    training: Training, settings: GRPOSettings, groups: Sequence[Group], step: int, budget: int
) -> dict[str, float | None]:
    """Do the optimizer steps on the batch with number `step`, with at most `budget` tokens in the
    model at once. Returns metrics of the loss by name; `kl` is None without a KL term.

    The loss is divided by the size of all scored trajectories of the batch, trained or not. So the
    gradient does not depend on how the batch is split, nor on leaving out groups of equal rewards.
    If no trajectory can move the policy, there is no optimizer step: all metrics are 0, `kl` None.
    """
    # A trajectory without a sampled token has no place in a mean over tokens.
    scored = [t for g in groups for t in g.scored if t.trained_tokens]
    # With a KL term even an advantage of zero pulls towards the reference.
    trained = scored if settings.kl_coef > 0 else [t for t in scored if t.trains]
    if not trained:
        return {"grad_norm": 0.0, "lr": 0.0, "kl": None, "clip_share": 0.0, "microbatches": 0}
    normaliser = Normaliser(
        trajectories=len(scored),
        tokens=sum(t.trained_tokens for t in scored),
        max_tokens=settings.max_tokens,
    )
    policy_pass = PolicyPass(training.policy, settings, trained, normaliser)
    measured = _optimizer_steps(training, policy_pass, step, budget)
    # Without a KL term the reference is never run: None says that KL was not measured.
    return measured if settings.kl_coef > 0 else measured | {"kl": None}


def _optimizer_steps(
    training: Training, policy_pass: PolicyPass, step: int, budget: int
) -> dict[str, float | None]:
    """Do `updates_per_batch` optimizer steps on one batch, each with a new pass over it. Returns
    metrics by name: what `pass_metrics` makes of all passes, the others of the last pass."""
    pass_sums: list[PassSums] = []
    lr = grad_norm = 0.0
    for _ in range(policy_pass.settings.updates_per_batch):
        # Runs the pass, again in smaller microbatches if memory runs out.
        pass_sums += training.within_memory(step, budget, policy_pass)
        for microbatch in policy_pass.microbatches:
            training.meter.count_microbatch(microbatch.rows)
        training.require_finite(sum(sums.loss for sums in pass_sums), "loss")
        grad_norm, lr = training.optimizer_step(step)
        policy_pass.is_first_pass = False
    return {
        **pass_metrics(pass_sums),
        "grad_norm": grad_norm,
        "lr": lr,
        "microbatches": len(policy_pass.microbatches),
    }


def make_sync_check(training: Training, settings: GRPOSettings) -> SyncCheck:
    """A new `SyncCheck`, which watches that sampler and trainer give the same log-probabilities.

    It allows the rounding of the weights' format. Where the settings make the distributions differ
    (tokens left out, sampling ahead, dropout), it only watches whether their distance grows.
    """
    network = training.policy.base.network
    is_rounded = network.dtype != torch.float32 or settings.quantization != "none"
    samples_all_tokens = settings.top_p == 1 and not settings.top_k and not settings.min_p
    return SyncCheck(
        precision="bfloat16" if is_rounded else "float32",
        event=training.job.event,
        state=training.state.setdefault("sync", {}),
        exact=samples_all_tokens and not settings.async_sampling and not settings.lora_dropout,
    )
