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
"""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from engine.core.files import Appender
from engine.core.hints import Call, Hint
from engine.core.metrics import curve_name
from engine.worker.components import environment, microbatch_tokens, prepare, sampling, tasks_of
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, require
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.evaluation import heldout
from engine.worker.network.network import Micro
from engine.worker.playing import Feed, Played, Player
from engine.worker.rollouts.collect import fits
from engine.worker.rollouts.sync_check import SyncCheck
from engine.worker.sft import sample_rows
from engine.worker.training import Training
from engine.worker.update import losses

NO_SIGNAL_STEPS = 10
ERRORS_JUDGED_FROM = 32  # completions of a run; engine/records/settings.py says so
GROUPS_WITH_IDS = 4


def train(job: Job) -> dict[str, Any]:
    """Run the job to its end; returns the result record."""
    settings = job.settings
    bench = prepare(job, job.base_path, settings)
    budget = microbatch_tokens(bench.base, checkpointing=settings["gradient_checkpointing"])
    with (
        closing(bench.sampler),
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
        guard = Guard(settings, training.extra, job.run.id)
        player = Player(tasks, stage, bench.sampler, settings)
        feed = Feed(player, training.policy, training.total)
        sync = _sync_check(training)
        for step in training.steps():
            began = time.monotonic()
            played = feed.batch(step)
            guard.look(step, played)
            with feed.ahead(step + 1):
                update_began = time.monotonic()
                learned = learn(training, played.groups, step, budget)
                if "sampler_gap_mean" in learned:
                    gap = learned["sampler_gap_mean"], learned["sampler_gap_max"]
                    learned |= sync.look(step, *gap)
                train_s = time.monotonic() - update_began
            write_rollouts(job, step, played)
            seconds = time.monotonic() - began
            training.log(step, learned | describe(played, seconds) | {"train_s": train_s})
        guard.close(training)
        return training.finish() | {"failed_scores": guard.failed_scores()}


def _sync_check(training: Training) -> SyncCheck:
    settings, network = training.settings, training.bench.base.network
    rounded = network.dtype != torch.float32 or settings["quantization"] != "none"
    return SyncCheck(
        "bfloat16" if rounded else "float32",
        training.job.event,
        training.extra.setdefault("sync", {}),
        exact=settings["top_p"] == 1
        and not settings["async_sampling"]
        and not settings["lora_dropout"],
    )


@dataclass
class _Micro:
    """One microbatch of the update; `old` is kept from the first pass over it.

    `members` are the trajectories it holds, `budget` the tokens it was split by.
    """

    members: list[int]
    budget: int
    rows: list[Row]
    batch: Micro
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
        return {"grad_norm": 0.0, "lr": 0.0, "kl": None, "clip_share": 0.0, "microbatches": 0}
    normaliser = losses.Normaliser(
        trajectories=len(scored),
        tokens=sum(t.trained_tokens for t in scored),
        max_tokens=settings["max_tokens"],
    )
    micros: list[_Micro] = []
    totals = _Totals()
    lr = grad_norm = 0.0

    def alone(tokens: int) -> bool:
        return len(_split(training, used, tokens)) == len(used)

    for number in range(settings["updates_per_batch"]):

        def attempt(tokens: int, first: bool = number == 0) -> list[_Part]:
            nonlocal micros
            # Memory that ran out makes the split finer; what the first pass saw is kept.
            if first or micros[0].budget != tokens:
                micros = _split(training, used, tokens, [] if first else micros)
            parts = []
            for micro in micros:
                parts.append(_backward(training, micro, normaliser, first=first))
            return parts

        for part in training.within_memory(step, budget, attempt, alone):
            totals.add(part)
        for micro in micros:
            training.meter.ran(micro.rows)
        training.require_finite(totals.loss, "loss")
        grad_norm, lr = training.update(step)
    measured = totals.metrics() | {"grad_norm": grad_norm, "lr": lr, "microbatches": len(micros)}
    # Without a KL term no reference is run: not measured is not zero.
    return measured if settings["kl_coef"] > 0 else measured | {"kl": None}


def _split(
    training: Training, used: Sequence[Trajectory], budget: int, before: Sequence[_Micro] = ()
) -> list[_Micro]:
    """Microbatches of at most `budget` tokens. `before` is an earlier split of the same
    trajectories that was passed over once: its numbers are taken on."""
    seen = {index: (m, m.batch.row == at) for m in before for at, index in enumerate(m.members)}
    device = training.policy.device
    rows = [
        Row(t.prompt_ids + t.ids, [0] * len(t.prompt_ids) + t.loss_mask, len(t.prompt_ids))
        for t in used
    ]
    micros = []
    for members in training.policy.split(rows, budget):
        chosen = [rows[i] for i in members]
        batch = training.policy.collate(chosen).to(device)
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
        micro = _Micro(members, budget, chosen, batch, advantage[batch.row], sampled, lengths)
        if seen:
            earlier = [seen[index] for index in members]
            micro.sampled = torch.cat([m.sampled[own] for m, own in earlier])
            micro.old = torch.cat([m.old[own] for m, own in earlier if m.old is not None])
        if training.settings["kl_coef"] > 0:
            micro.reference = training.policy.reference_logprobs(
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
    policy, entropy = training.policy.logprobs(
        micro.batch, settings["temperature"], entropies=first
    )
    missing = 0
    if micro.old is None:
        micro.old = policy.detach()
        # A sampler that gave no number for a token is taken to agree, and counted.
        unknown = micro.sampled.isnan()
        missing = int(unknown.sum())
        micro.sampled = torch.where(unknown, micro.old, micro.sampled)
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
        clipped=float(losses.clip_share(settings["loss"], tokens, clip)),
        gap_sum=float(gap.sum()) if first else 0.0,
        gap_max=float(gap.max()) if first else 0.0,
        missing=missing,
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
    missing: int
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
            "sampler_missing": sum(p.missing for p in first),
        }


def describe(played: Played, seconds: float) -> dict[str, Any]:
    """Metrics of what was played; see engine/core/metrics.py for what each means.

    What completions are like is told of all that were sampled, dropped groups included; how much
    there is to learn, of the groups that are trained on.

    Args:
        seconds: the step took.
    """
    groups = played.groups
    members = [t for g in groups + played.dropped for t in g.members]
    batch = [t for g in groups for t in g.members]
    scored = [t for t in members if t.error is None]
    lengths = sorted(t.trained_tokens for t in members)
    uniform = [g for g in groups if g.uniform]
    easy = sum(bool(g.scored) and all(_solved(t, g) for t in g.scored) for g in uniform)
    rewards = [t.reward for t in scored] or [0.0]
    shaped = [t.shaped_reward for t in scored] or [0.0]
    values: dict[str, Any] = {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "shaped_reward_mean": statistics.fmean(shaped),
        "length_mean": statistics.fmean(lengths),
        "length_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "truncated_share": sum(t.stop_reason in ("length", "max_turns") for t in members)
        / len(members),
        "zero_advantage_share": sum(t.advantage == 0.0 for t in batch) / len(batch),
        "groups_effective": 1 - len(uniform) / len(groups),
        "groups_too_easy": easy / len(groups),
        "groups_too_hard": (len(uniform) - easy) / len(groups),
        "resampled_groups": len(played.dropped),
        "reward_errors": (len(members) - len(scored)) / len(members),
        "sample_s": played.times.sample_s,
        "reward_s": played.times.reward_s,
        "tokens_per_s": sum(lengths) / max(1e-9, seconds),
    }
    for name in sorted({name for t in scored for name in t.metrics}):
        values[curve_name(name)] = statistics.fmean(t.metrics.get(name, 0.0) for t in scored)
    return values


def _solved(trajectory: Trajectory, group: Group) -> bool:
    """Success where the environment says so, else a positive reward (all of the group alike)."""
    return trajectory.success if trajectory.success is not None else trajectory.reward > 0


def write_rollouts(job: Job, step: int, played: Played) -> None:
    """Every trajectory of the step, one line each; ids and masks for the first few groups.

    Groups that were replaced stand at the end, marked `dropped`.
    """
    path = job.run.rollouts(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with Appender(path) as file:
        for number, group in enumerate(played.groups + played.dropped):
            for member, t in enumerate(group.members):
                line = {
                    "step": step,
                    "task": t.task_id,
                    "group": number,
                    "member": member,
                    **t.record(),
                    "advantage": t.advantage,
                    "turns": t.turns,
                    "policy_step": t.policy_step,
                }
                if t.penalty:
                    line["shaped_reward"] = t.shaped_reward
                if number >= len(played.groups):
                    line["dropped"] = True
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

    def __init__(self, settings: dict[str, Any], extra: dict[str, Any], run_id: str) -> None:
        self.limit = settings["max_reward_errors"]
        self.run_id = run_id
        self.extra = extra
        extra.setdefault("silent_steps", 0)
        extra.setdefault("played", 0)
        extra.setdefault("errors", 0)

    def look(self, step: int, played: Played) -> None:
        """Raises WorkerFailure: kind reward or no_signal."""
        members = [t for g in played.groups + played.dropped for t in g.members]
        failed = [t for t in members if t.error is not None]
        self.extra["played"] += len(members)
        self.extra["errors"] += len(failed)
        self.extra["last_errors"] = [len(failed), len(members)]
        share = self.extra["errors"] / self.extra["played"]
        if failed and self.extra["played"] >= ERRORS_JUDGED_FROM and share > self.limit:
            raise WorkerFailure(
                "reward",
                f"{share:.0%} of the completions could not be scored.",
                evidence=f"step {step}: {failed[0].error}",
                hint=Hint(
                    "Mend score() and push again, or raise max_reward_errors. The completions, "
                    "where a step was done:",
                    Call("read_rollouts", {"run_id": self.run_id, "pick": "error"}),
                ),
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

    def failed_scores(self) -> dict[str, Any]:
        """How many completions could not be scored, in all steps and in the last one."""
        last, of = self.extra.get("last_errors", (0, 0))
        found = {"failed": self.extra["errors"], "of": self.extra["played"]}
        return found | {"last_step": {"failed": last, "of": of}}

    def close(self, training: Training) -> None:
        """A run in which no step had a gradient is not blamed for unchanged weights."""
        if self.extra["silent_steps"] >= training.done:
            self.extra["no_gradient"] = True
