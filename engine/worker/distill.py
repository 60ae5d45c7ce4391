"""On-policy distillation of a teacher into an adapter, top to bottom.

The policy samples completions as in GRPO, and a teacher model reads them. The loop minimises the
divergence of the policy p from the teacher q on what the policy itself writes: the mean over tokens
of log p(token) - log q(token). This is the reverse KL of GKD (arXiv 2306.13649) on samples of the
student only. Its gradient is that of a policy gradient in which each token's advantage is log q -
log p of that very token, with a discount of 0: no token answers for those after it, and nothing is
compared within a group (thinkingmachines.ai/blog/on-policy-distillation). p is the probability that
the sampler drew with.

A step is that of GRPO (grpo.py) with another advantage: `BatchSource` samples and scores the batch,
the teacher reads it (teachers.py), and `update` of grpo.py moves the adapter, once per batch.
Rewards are recorded and evaluated, but not trained on.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from engine.core.metrics import METRICS, names
from engine.records.run_config import DistillConfig
from engine.records.settings import DistillSettings, GRPOSettings
from engine.runs.evaluation import exam
from engine.worker.components import environment, microbatch_tokens, prepare, training_tasks
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Result
from engine.worker.core.trajectory import Trajectory
from engine.worker.grpo import update
from engine.worker.rollouts.batch_metrics import batch_metrics
from engine.worker.rollouts.batch_source import BatchSource, Collector, RolloutBatch
from engine.worker.rollouts.guard import Guard
from engine.worker.rollouts.rollout_file import records_of, write_rollouts
from engine.worker.rollouts.sync_check import sync_check_of
from engine.worker.rollouts.task_order import task_order
from engine.worker.teachers import Teacher, TeacherPass, load_teacher
from engine.worker.training import Training

# In nats. A token that the teacher calls impossible counts as this unlikely, so that a single token
# cannot outweigh the rest of a batch.
LEAST_LOGPROB = -50.0


def train(job: Job[DistillConfig]) -> Result:
    """Distil to the end of the run: step by step sample a batch, have the teacher read it, update
    the policy, and log all of this. Returns the record for result.json (`Training.finish`) with
    `failed_scores`, the number of completions that could not be scored.

    Raises:
        WorkerFailure: the run cannot go on; its kind says why.
        Stopped: the run was asked to stop.
    """
    settings = as_grpo(job.config.settings)  # GRPO's code does most of the work
    components = prepare(job, Path(job.config.base.path))
    budget = microbatch_tokens(components)
    with (
        closing(components.sampler),
        closing(load_teacher(job, components)) as teacher,
        environment(components, job) as process,
        Training(job, components, settings.steps) as training,
    ):
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing; use algorithm sft.")
        context = components.context(process, settings)
        tasks, left_out = training_tasks(job, components, context, settings)
        training.start(
            exam.exam_tasks(components.env, settings.eval_rows),
            context=context,
            limits=settings,
            budget=budget,
        )
        guard = Guard(settings.max_reward_errors, training.state, job.run.id)
        order = task_order(tasks, settings, training.state)
        collector = Collector(tasks, order, context, components.sampler, settings)
        source = BatchSource(collector, training.policy, training.total)
        sync_check = sync_check_of(job, training.policy.base.network, settings, training.state)
        for step in training.steps():
            step_began = time.monotonic()
            batch = source.batch(step)
            teacher_metrics = read_by_teacher(training, teacher, batch, step, budget)
            guard.check(step, batch)  # reads the advantages, which the teacher has set now
            update_began = time.monotonic()
            measured = update(training, settings, batch.groups, step, budget)
            measured |= sync_check.metrics(step, measured)
            train_s = time.monotonic() - update_began
            records = records_of(step, batch)
            write_rollouts(job.run, step, records)
            measured |= batch_metrics(batch, time.monotonic() - step_began)
            measured |= {"tasks_left_out": left_out}
            values = own_metrics(measured) | teacher_metrics
            values |= {"train_s": train_s, "export_s": source.load_s}
            training.log(step, values, records)
        guard.close(training.done)  # notes in the state what `finish` reads
        return training.finish() | {"failed_scores": guard.failed_scores()}


def read_by_teacher(
    training: Training, teacher: Teacher, batch: RolloutBatch, step: int, budget: int
) -> dict[str, float]:
    """Have the teacher read the scored completions of the batch of `step`, at most `budget` tokens
    at once, and set the advantages of their tokens.

    Returns the metrics of `assign` by name, and `teacher_s`, the seconds that the teacher took. If
    memory runs out, `training` repeats the reading in smaller parts.
    """
    scored = [trajectory for group in batch.groups for trajectory in group.scored]
    rated = [trajectory for trajectory in scored if trajectory.trained_tokens]
    began = time.monotonic()
    by_teacher = training.within_memory(step, budget, TeacherPass(teacher, rated))
    metrics = assign(rated, by_teacher)
    return metrics | {"teacher_s": time.monotonic() - began}


def as_grpo(settings: DistillSettings) -> GRPOSettings:
    """Return the settings with which GRPO's sampler and update do distillation: sample from the
    policy's own distribution, use a batch once, and let nothing but the advantage move the
    policy."""
    shared = settings.model_dump(exclude={"teacher", "teacher_model", "teacher_key_env"})
    # Built without validation, because distillation needs only groups of one, which GRPO forbids.
    return GRPOSettings.model_construct(
        **shared,
        temperature=1.0,
        top_p=1.0,
        loss="dapo",
        advantage="group_center",  # does not matter: `assign` replaces the advantages
        # Clipping has no effect, because in the only update of a batch every ratio is 1.
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.0,
        updates_per_batch=1,
        resample_uniform=0,
        async_sampling=False,
        curriculum="none",
        vary_wording=0.0,
        thinking_length_penalty=0.0,
    )


def token_advantages(by_teacher: Sequence[float], by_policy: Sequence[float]) -> list[float]:
    """Return the advantage of each token, in nats: its log-probability under the teacher, but at
    least LEAST_LOGPROB, minus that under the policy.

    It is above 0 if the teacher finds the token likelier, and 0 if the sampler gave no
    log-probability (NaN in `by_policy`).
    """
    return [
        0.0 if math.isnan(policy) else max(teacher, LEAST_LOGPROB) - policy
        for teacher, policy in zip(by_teacher, by_policy, strict=True)
    ]


def assign(
    trajectories: Sequence[Trajectory], by_trajectory: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Set the advantages of the trajectories' tokens in place.

    Args:
        by_trajectory: for each trajectory, the teacher's log-probabilities of its trained tokens.

    Returns the metrics `reverse_kl` and `teacher_logprob`, which are means over all trained tokens
    in nats, with the teacher's values at least LEAST_LOGPROB. Returns {} without trajectories.
    """
    for trajectory, logprobs in zip(trajectories, by_trajectory, strict=True):
        trajectory.token_advantages = token_advantages(logprobs, trajectory.trained_logprobs)
        trajectory.advantage = statistics.fmean(trajectory.token_advantages)
    if not trajectories:
        return {}
    advantages: list[float] = []
    bounded_logprobs: list[float] = []
    for trajectory, logprobs in zip(trajectories, by_trajectory, strict=True):
        advantages += trajectory.token_advantages
        bounded_logprobs += [max(logprob, LEAST_LOGPROB) for logprob in logprobs]
    return {
        # An advantage is the teacher's log-probability of a token minus the policy's.
        "reverse_kl": -statistics.fmean(advantages),
        "teacher_logprob": statistics.fmean(bounded_logprobs),
    }


def own_metrics(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return those of the values that distillation reports: its own metrics, and the environment's.

    The environment's metrics are those with names outside METRICS. GRPO's other metrics compare the
    members of a group, which means nothing here.
    """
    own_names = set(names("distill"))
    kept_names = [name for name in values if name in own_names or name not in METRICS]
    return {name: values[name] for name in kept_names}
