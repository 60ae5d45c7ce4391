"""Group relative policy optimisation of an adapter, top to bottom.

The loop maximises the expected reward of sampled completions. Each task is played `group_size`
times, a completion's advantage compares its reward with those of its own group, and the clipped
loss of `loss` (losses.py) moves the policy. It departs from the first paper (arXiv 2402.03300),
each time by a setting: there is no KL term unless `kl_coef` > 0; the mean is over tokens (`dapo`),
not over trajectories; the upper clip is wider than the lower; a truncated weight corrects the
difference between sampler and trainer. Groups with equal rewards teach nothing and are not run
through the model. A completion whose scoring failed is never trained on; one cut by `max_tokens` is
trained unmasked, with the reward it earned.

With `async_sampling` the sampler is one update behind. The ratio that is clipped still compares the
policy with itself at the batch's first pass (`old`), and `correction` = min(old / sampled, tis_cap)
weighs how far the sampler was behind. This is the decoupled objective of arXiv 2110.00641; without
async_sampling the same weight corrects rounding.

A step, in the order of reading: `BatchSource.batch` (rollouts/batch_source.py) chooses tasks,
`collect` (rollouts/collect.py) plays them into trajectories (core/trajectory.py), `assign`
(rollouts/advantages.py) compares them, `PolicyPass` (update/policy_update.py, update/losses.py)
makes microbatches and gradients of them, `apply_step` (update/schedule.py) moves the adapter.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from engine.records.run_config import GRPOConfig
from engine.records.settings import GRPOSettings
from engine.runs.evaluation import exam
from engine.worker.components import (
    environment,
    microbatch_tokens,
    prepare,
    start_of,
    training_tasks,
)
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Result
from engine.worker.core.trajectory import Group
from engine.worker.evaluation.replay import Replay, replay_of
from engine.worker.rollouts.batch_metrics import batch_metrics
from engine.worker.rollouts.batch_source import BatchSource, Collector
from engine.worker.rollouts.guard import Guard
from engine.worker.rollouts.rewording import varied_wording
from engine.worker.rollouts.rollout_file import records_of, write_rollouts
from engine.worker.rollouts.sync_check import sync_check_of
from engine.worker.rollouts.task_order import task_order
from engine.worker.training import Training
from engine.worker.update.losses import Normaliser
from engine.worker.update.policy_update import PassSums, PolicyPass, pass_metrics
from engine.worker.update.replay_pass import PassWithReplay


def train(job: Job[GRPOConfig]) -> Result:
    """Train with GRPO to the end of the run: step by step sample a batch, update the policy on it,
    and log both. Returns the record for result.json (`Training.finish`) with `failed_scores`, the
    number of completions that could not be scored.

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: the run was asked to stop.
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
        replay = replay_of(job, start_of(components, training.policy))
        training.replayed = replay.used if replay else None
        exam_tasks = exam.exam_tasks(components.env, settings.eval_rows)
        training.start(exam_tasks, context=context, limits=settings, budget=budget)
        guard = Guard(settings.max_reward_errors, training.state, job.run.id)
        order = task_order(tasks, settings, training.state)
        varied = varied_wording(settings, components.env, process, job.event)
        compared = replace(context, compare=True)
        collector = Collector(tasks, order, compared, components.sampler, settings, varied)
        source = BatchSource(collector, training.policy, training.total)
        sync_check = sync_check_of(job, training.policy.base.network, settings, training.state)
        for step in training.steps():
            step_began = time.monotonic()
            batch = source.batch(step)
            guard.check(step, batch)
            with source.sampling_ahead(training.total + 1 if training.ends_now else step + 1):
                update_began = time.monotonic()
                measured = update(training, settings, batch.groups, step, budget, replay)
                measured |= sync_check.metrics(step, measured)
                train_s = time.monotonic() - update_began
            records = records_of(step, batch)
            write_rollouts(job.run, step, records)
            measured |= batch_metrics(batch, time.monotonic() - step_began)
            measured |= {"train_s": train_s, "export_s": source.load_s, "tasks_left_out": left_out}
            training.log(step, measured, records)
        guard.close(training.done)  # notes in the state what `finish` reads
        return training.finish() | {"failed_scores": guard.failed_scores()}


def update(
    training: Training,
    settings: GRPOSettings,
    groups: Sequence[Group],
    step: int,
    budget: int,
    replay: Replay | None = None,
) -> dict[str, float | None]:
    """Do the optimizer steps on the batch number `step`, with at most `budget` tokens in the model
    at once and rows of `replay` added. Returns metrics of the loss by name; `kl` is None without a
    KL term, `replay_loss` is None without replayed rows.

    The loss is divided by the size of all scored trajectories of the batch, trained or not. So the
    gradient does not depend on how the batch is split, nor on leaving out groups of equal rewards.
    If no trajectory can move the policy, there is no optimizer step: all metrics are 0 or None.
    """
    rollouts = [trajectory for group in groups for trajectory in group.scored]
    # Conversations (parts) without a sampled token have no place in a mean over tokens.
    scored = [part for rollout in rollouts for part in rollout.parts if part.trained_tokens]
    # With a KL term even an advantage of zero pulls towards the reference.
    trained = scored if settings.kl_coef > 0 else [part for part in scored if part.trains]
    if not trained:
        zeros = dict.fromkeys(("grad_norm", "lr", "clip_share", "microbatches"), 0.0)
        return zeros | {"kl": None, "replay_loss": None}
    normaliser = Normaliser(
        trajectories=len(scored),
        tokens=sum(part.trained_tokens for part in scored),
        max_tokens=settings.max_tokens,
    )
    policy_pass = PolicyPass(training.policy, settings, trained, normaliser)
    batch_pass = PassWithReplay(policy_pass, replay.of_full_step(step) if replay else [])
    measured = _optimizer_steps(training, batch_pass, step, budget)
    return measured if settings.kl_coef > 0 else measured | {"kl": None}


def _optimizer_steps(
    training: Training, batch_pass: PassWithReplay, step: int, budget: int
) -> dict[str, float | None]:
    """Do `updates_per_batch` optimizer steps on one batch, each with a new pass over it, at most
    `budget` tokens at once. Returns metrics by name: those of `pass_metrics` cover all passes, the
    others only the last pass."""
    policy_pass = batch_pass.policy_pass
    pass_sums: list[PassSums] = []
    lr = grad_norm = 0.0
    for _ in range(policy_pass.settings.updates_per_batch):
        pending = training.within_memory(step, budget, batch_pass)
        for microbatch in policy_pass.microbatches:
            training.meter.count_microbatch(microbatch.rows)
        training.meter.count_microbatch(batch_pass.replayed_rows)
        sums, grad_norm, lr = training.optimizer_step(step, pending)
        pass_sums += sums
        policy_pass.is_first_pass = False
    return {
        **pass_metrics(pass_sums),
        "replay_loss": batch_pass.replay_loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "microbatches": len(policy_pass.microbatches),
    }
