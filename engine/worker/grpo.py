"""Group relative policy optimisation of an adapter, top to bottom.

Maximises the expected reward of sampled completions: each task is played `group_size` times, a
completion's advantage is its reward against its own group's, and the clipped loss of `loss`
(losses.py) moves the policy. Departures from the first paper (arXiv 2402.03300), each a setting:
no KL term unless `kl_coef` > 0; the mean is over tokens (`dapo`), not over trajectories; the upper
clip is wider than the lower; a truncated weight corrects for sampler and trainer disagreeing.
Groups whose members earned the same teach nothing and are not run through the model, and a
completion whose scoring failed is never trained on.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from engine.files import Appender
from engine.metrics import curve_name
from engine.worker import heldout, losses
from engine.worker.advantages import assign
from engine.worker.batch import Batch, Row, collate, microbatches
from engine.worker.failures import WorkerFailure
from engine.worker.job import Job, require
from engine.worker.rollouts import Times, collect, fits
from engine.worker.sft import sample_rows
from engine.worker.training import Training
from engine.worker.trajectory import Group, Trajectory
from engine.worker.workbench import environment, microbatch_tokens, prepare, sampling, tasks_of

NO_SIGNAL_STEPS = 10
ERRORS_JUDGED_FROM = 32
GROUPS_WITH_IDS = 4


def train(job: Job) -> dict[str, Any]:
    """Run the job to its end; returns the result record."""
    settings = job.settings
    bench = prepare(job, job.base_path, settings)
    budget = microbatch_tokens(bench.base, checkpointing=settings["gradient_checkpointing"])
    with (
        environment(bench, job) as process,
        Training(job, bench, settings["steps"]) as training,
    ):
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing; use algorithm sft.")
        stage = bench.stage(process, settings)
        params = sampling(settings, greedy=False, seed=0)
        tasks = [t for t in tasks_of(bench, "train") if fits(t, stage, params)]
        require(tasks, "training tasks that fit into max_length", "Raise max_length.")
        tasks = sample_rows(tasks, settings)
        training.examine(
            heldout.ordered(tasks_of(bench, "heldout"), settings["eval_rows"]),
            stage=stage,
            limits=settings,
            budget=budget,
        )
        guard = Guard(settings, training.extra)
        for step in training.steps():
            chosen = [tasks[i] for i in tasks_of_step(step, len(tasks), settings)]
            seeded = sampling(settings, greedy=False, seed=settings["seed"] * 1_000_003 + step)
            groups, times = collect(chosen, settings["group_size"], stage, bench.sampler, seeded)
            assign(groups, settings["advantage"])
            guard.look(step, groups)
            began = time.monotonic()
            learned = learn(training, groups, step, budget)
            times_train = time.monotonic() - began
            write_rollouts(job, step, groups)
            training.log(step, learned | describe(groups, times, times_train))
        guard.close(training)
        return training.finish()


def tasks_of_step(step: int, count: int, settings: dict[str, Any]) -> list[int]:
    """Which tasks step `step` (from 1) plays: the seeded order of one epoch after another."""
    wanted = settings["prompts_per_step"]
    first = (step - 1) * wanted
    picked = []
    for at in range(first, first + wanted):
        epoch, index = divmod(at, count)
        picked.append(_order(count, f"{settings['seed']}-{epoch}")[index])
    return picked


@lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


@dataclass
class _Micro:
    """One microbatch of the update; `old` is kept from the first pass over it."""

    batch: Batch
    advantage: torch.Tensor  # [tokens]
    sampled: torch.Tensor  # [tokens]
    lengths: torch.Tensor  # [rows]
    reference: torch.Tensor | None = None  # [tokens]
    old: torch.Tensor | None = None  # [tokens]


def learn(training: Training, groups: Sequence[Group], step: int, budget: int) -> dict[str, Any]:
    """`updates_per_batch` optimizer steps on the groups; returns loss-side metrics.

    The loss is normalised over every scored trajectory of the batch, trained or not, so splitting
    into microbatches or leaving out uniform groups never changes the gradient.
    """
    settings = training.settings
    scored = [t for g in groups for t in g.scored if t.trained_tokens]
    # With a KL term even an advantage of zero pulls towards the reference.
    used = scored if settings["kl_coef"] > 0 else [t for t in scored if t.trains]
    if not used:
        return {"grad_norm": 0.0, "lr": 0.0, "kl": None, "clip_share": 0.0}
    normaliser = losses.Normaliser(
        trajectories=len(scored),
        tokens=sum(t.trained_tokens for t in scored),
        max_tokens=settings["max_tokens"],
    )
    micros = _split(training, used, budget)
    totals = _Totals()
    lr = grad_norm = 0.0
    for number in range(settings["updates_per_batch"]):
        for micro in micros:
            totals.add(_backward(training, micro, normaliser, first=number == 0))
        training.require_finite(totals.loss, "loss")
        grad_norm, lr = training.update(step)
    measured = totals.metrics() | {"grad_norm": grad_norm, "lr": lr}
    # Without a KL term no reference is run: not measured is not zero.
    return measured if settings["kl_coef"] > 0 else measured | {"kl": None}


def _split(training: Training, used: Sequence[Trajectory], budget: int) -> list[_Micro]:
    device = training.policy.device
    rows = [Row(t.prompt_ids + t.ids, [0] * len(t.prompt_ids) + t.loss_mask) for t in used]
    micros = []
    for members in microbatches([len(r.ids) for r in rows], budget):
        batch = collate([rows[i] for i in members], training.bench.base.pad_id).to(device)
        lengths = torch.tensor([float(used[i].trained_tokens) for i in members], device=device)
        advantage = torch.tensor([used[i].advantage for i in members], device=device)
        sampled = torch.tensor(
            [
                logprob
                for i in members
                for logprob, trained in zip(
                    used[i].sampled_logprobs, used[i].loss_mask, strict=True
                )
                if trained
            ],
            device=device,
        )
        micro = _Micro(batch, advantage[batch.row], sampled, lengths)
        if training.settings["kl_coef"] > 0:
            with training.policy.as_reference():
                micro.reference, _ = training.policy.logprobs(
                    batch, training.settings["temperature"]
                )
        micros.append(micro)
    return micros


def _backward(
    training: Training, micro: _Micro, normaliser: losses.Normaliser, *, first: bool
) -> "_Part":
    """One microbatch forward and backward. On the first pass the policy is still the one that
    sampled, so its own values are the `old` ones and no second forward is needed."""
    settings = training.settings
    policy, entropy = training.policy.logprobs(micro.batch, settings["temperature"])
    if micro.old is None:
        micro.old = policy.detach()
    tokens = losses.Tokens(
        policy=policy,
        old=micro.old,
        advantage=micro.advantage,
        correction=losses.truncated_importance(micro.old, micro.sampled, settings["tis_cap"]),
        row=micro.batch.row,
        lengths=micro.lengths,
    )
    clip = losses.Clip(settings["clip_low"], settings["clip_high"])
    loss = losses.LOSSES[settings["loss"]](tokens, normaliser, clip).sum()
    kl = torch.zeros((), device=policy.device)
    if micro.reference is not None:
        divergence = losses.kl_k3(policy, micro.reference)
        # Times the ratio: then its gradient is that of the divergence, not of the estimator.
        ratio = torch.exp(policy - micro.old)
        weights = losses.token_weights(settings["loss"], tokens, normaliser)
        loss = loss + settings["kl_coef"] * (ratio * divergence * weights).sum()
        kl = divergence.detach().sum()
    loss.backward()
    gap = (micro.old - micro.sampled).abs()
    return _Part(
        loss=loss.item(),
        tokens=policy.numel(),
        entropy=float(entropy.sum()),
        kl=float(kl),
        clipped=float(losses.clip_share(tokens, clip)),
        gap_sum=float(gap.sum()) if first else 0.0,
        gap_max=float(gap.max()) if first else 0.0,
        first=first,
    )


@dataclass(frozen=True)
class _Part:
    """Sums over one microbatch's tokens."""

    loss: float
    tokens: int
    entropy: float
    kl: float
    clipped: float
    gap_sum: float
    gap_max: float
    first: bool


class _Totals:
    """Sums over all microbatches and updates of a step."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.parts: list[_Part] = []

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.loss += part.loss

    def metrics(self) -> dict[str, float]:
        tokens = sum(p.tokens for p in self.parts)
        first = [p for p in self.parts if p.first]
        sampled = sum(p.tokens for p in first)
        return {
            "entropy": sum(p.entropy for p in first) / sampled,
            "kl": sum(p.kl for p in self.parts) / tokens,
            "clip_share": sum(p.clipped for p in self.parts) / tokens,
            "sampler_gap_mean": sum(p.gap_sum for p in first) / sampled,
            "sampler_gap_max": max(p.gap_max for p in first),
        }


def describe(groups: Sequence[Group], times: Times, train_s: float) -> dict[str, Any]:
    """Metrics of what was sampled; see engine/metrics.py for what each means."""
    members = [t for g in groups for t in g.members]
    scored = [t for t in members if t.error is None]
    lengths = sorted(t.trained_tokens for t in members)
    uniform = [g for g in groups if g.uniform]
    easy = sum(bool(g.scored) and all(_solved(t, g) for t in g.scored) for g in uniform)
    seconds = times.sample_s + times.reward_s + train_s
    rewards = [t.reward for t in scored] or [0.0]
    values: dict[str, Any] = {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "length_mean": statistics.fmean(lengths),
        "length_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "truncated_share": sum(t.stop_reason in ("length", "max_turns") for t in members)
        / len(members),
        "zero_advantage_share": sum(t.advantage == 0.0 for t in members) / len(members),
        "groups_effective": 1 - len(uniform) / len(groups),
        "groups_too_easy": easy / len(groups),
        "groups_too_hard": (len(uniform) - easy) / len(groups),
        "reward_errors": (len(members) - len(scored)) / len(members),
        "sample_s": times.sample_s,
        "reward_s": times.reward_s,
        "train_s": train_s,
        "tokens_per_s": sum(lengths) / max(1e-9, seconds),
    }
    for name in sorted({name for t in scored for name in t.metrics}):
        values[curve_name(name)] = statistics.fmean(t.metrics.get(name, 0.0) for t in scored)
    return values


def _solved(trajectory: Trajectory, group: Group) -> bool:
    """Success where the environment says so, else a positive reward (all of the group alike)."""
    return trajectory.success if trajectory.success is not None else trajectory.reward > 0


def write_rollouts(job: Job, step: int, groups: Sequence[Group]) -> None:
    """Every trajectory of the step, one line each; ids and masks for the first few groups."""
    path = job.run.rollouts(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with Appender(path) as file:
        for number, group in enumerate(groups):
            for member, t in enumerate(group.members):
                line = {
                    "step": step,
                    "task": t.task_id,
                    "group": number,
                    "member": member,
                    "prompt": t.prompt,
                    "messages": t.messages,
                    "completion": t.completion,
                    "reward": t.reward,
                    "success": t.success,
                    "metrics": t.metrics,
                    "error": t.error,
                    "advantage": t.advantage,
                    "stop_reason": t.stop_reason,
                    "tokens": t.trained_tokens,
                    "turns": t.turns,
                }
                if number < GROUPS_WITH_IDS:
                    line |= {
                        "prompt_ids": t.prompt_ids,
                        "ids": t.ids,
                        "loss_mask": t.loss_mask,
                    }
                file.append(line)


class Guard:
    """Stops a run that cannot learn: no signal for long, or too many failed rewards.

    Its counters live in `extra`, which checkpoints carry, so a resumed run counts on.
    """

    def __init__(self, settings: dict[str, Any], extra: dict[str, Any]) -> None:
        self.limit = settings["max_reward_errors"]
        self.extra = extra
        extra.setdefault("silent_steps", 0)
        extra.setdefault("played", 0)
        extra.setdefault("errors", 0)

    def look(self, step: int, groups: Sequence[Group]) -> None:
        """Raises WorkerFailure: kind reward or no_signal."""
        members = [t for g in groups for t in g.members]
        failed = [t for t in members if t.error is not None]
        self.extra["played"] += len(members)
        self.extra["errors"] += len(failed)
        share = self.extra["errors"] / self.extra["played"]
        if failed and self.extra["played"] >= ERRORS_JUDGED_FROM and share > self.limit:
            raise WorkerFailure(
                "reward",
                f"{share:.0%} of the completions could not be scored.",
                evidence=f"step {step}: {failed[0].error}",
                hint="Mend score() for this completion (read_rollouts pick=error), push again; "
                "or raise max_reward_errors.",
            )
        silent = all(t.advantage == 0.0 for t in members)
        self.extra["silent_steps"] = self.extra["silent_steps"] + 1 if silent else 0
        if self.extra["silent_steps"] >= NO_SIGNAL_STEPS:
            rewards = {t.reward for t in members}
            raise WorkerFailure(
                "no_signal",
                f"No group had rewards that differ for {NO_SIGNAL_STEPS} steps.",
                evidence=f"step {step}: rewards {sorted(rewards)[:5]}",
                hint="All alike and low: easier tasks, partial credit or SFT first. All alike and "
                "high: the tasks are learnt, use harder ones. Then submit again.",
            )

    def close(self, training: Training) -> None:
        """A run in which no step had a gradient is not blamed for unchanged weights."""
        if self.extra["silent_steps"] >= training.total:
            self.extra["no_gradient"] = True
