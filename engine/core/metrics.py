"""The one list of metric names: what each means, in which unit, for which algorithm.

A line of `metrics.jsonl` is `{"step", "time", ...}` with names from here, beside the named metrics
of the environment's own `Score`. The worker writes these names, reports and tools read them, the
playbook may use no other; a test holds that. Standard library only, so anything may import it.
"""

from dataclasses import dataclass

SFT = "sft"
DPO = "dpo"
GRPO = "grpo"
DISTILL = "distill"
PROMPT = "prompt"
ROWS = (SFT, DPO)
SAMPLED = (GRPO, DISTILL)
ALL = (SFT, DPO, GRPO, DISTILL)


@dataclass(frozen=True)
class Metric:
    """One column of `metrics.jsonl`.

    Attributes:
        name: the key in the file.
        meaning: one sentence; for a share it says of what.
        unit: `share` is a number in 0..1, `nats` are natural-log units, `1` is a plain number.
        algorithms: the trainers that write the metric.
        where: `step`: on every training step; `evaluation`: on the steps that are evaluated
            (0, every `eval_every`, the last); `gpu`: on training steps on a GPU whose driver
            measures it.
    """

    name: str
    meaning: str
    unit: str
    algorithms: tuple[str, ...]
    where: str = "step"


def _quantiles(figure: str, meaning: str) -> tuple[Metric, ...]:
    """Make the metrics p10, p50 and p90 of a figure over the groups (completions of one task) of a
    step.

    `figure` is a part of the metrics' names, `meaning` says in words what the figure is.
    """
    return tuple(
        Metric(
            f"group_{figure}_p{percent}",
            f"The {meaning}, as completions are compared: {percent} of 100 groups of the step have "
            "less.",
            "reward",
            (GRPO,),
        )
        for percent in (10, 50, 90)
    )


_LIST = (
    Metric(
        "reward_mean",
        "Mean reward of the step's completions that were scored, replaced groups included.",
        "reward",
        SAMPLED,
    ),
    Metric(
        "reward_std",
        "Standard deviation of the reward over those completions.",
        "reward",
        SAMPLED,
    ),
    Metric(
        "shaped_reward_mean",
        "Mean of what they are compared by: the reward less `thinking_length_penalty`.",
        "reward",
        (GRPO,),
    ),
    Metric("length_mean", "Mean length of a completion.", "tokens", SAMPLED),
    Metric("length_p95", "Length that 95 of 100 completions do not exceed.", "tokens", SAMPLED),
    Metric(
        "truncated_share",
        "Share of completions that were cut by `max_tokens` or `max_length`, or ran out of turns.",
        "share",
        SAMPLED,
    ),
    Metric(
        "invalid_calls",
        "Share of completions with an invalid tool call in any turn: one that cannot be read in "
        "the dialect of the chat template, names no tool there is, or breaks that tool's schema.",
        "share",
        SAMPLED,
    ),
    Metric(
        "unstitched",
        "Conversations of a rollout beyond its first: requests of a command (docs/gateway.md) that "
        "do not go on where an earlier one ended. They are trained with the rollout's advantage.",
        "conversations per rollout",
        SAMPLED,
    ),
    Metric(
        "entropy", "Mean entropy of the policy at each sampled token of the step.", "nats", SAMPLED
    ),
    Metric(
        "kl",
        "Mean divergence from the reference per token (k3); measured with `kl_coef` above 0.",
        "nats",
        (GRPO,),
    ),
    Metric(
        "replay_loss",
        "Mean loss of the replayed rows per supervised token; measured with `keep` above 0.",
        "nats",
        (GRPO,),
    ),
    Metric(
        "clip_share",
        "Share of trained tokens whose ratio to the sampling policy was clipped.",
        "share",
        (GRPO,),
    ),
    Metric(
        "sampler_gap_mean",
        "Mean distance between the log-probabilities of sampler and trainer, per trained token.",
        "nats",
        SAMPLED,
    ),
    Metric(
        "sampler_gap_max",
        "Largest distance between the log-probabilities of sampler and trainer in the step.",
        "nats",
        SAMPLED,
    ),
    Metric(
        "sampler_gap_drift",
        "What `sampler_gap_mean` is in the latest four steps above the first four (medians).",
        "nats",
        SAMPLED,
    ),
    Metric(
        "sampler_missing",
        "Tokens of the step that came without a log-probability; they are taken to agree.",
        "tokens",
        SAMPLED,
    ),
    Metric(
        "reverse_kl",
        "Mean of what the policy's log-probability of a token it sampled is above the teacher's: "
        "the divergence that distillation lowers, 0 where both agree.",
        "nats",
        (DISTILL,),
    ),
    Metric(
        "teacher_logprob",
        "Mean log-probability that the teacher gives the tokens which the policy sampled.",
        "nats",
        (DISTILL,),
    ),
    Metric("teacher_s", "Time that the teacher took to read the batch.", "seconds", (DISTILL,)),
    Metric(
        "zero_advantage_share",
        "Share of the batch's completions whose advantage is zero, so that they teach nothing.",
        "share",
        (GRPO,),
    ),
    Metric(
        "groups_effective",
        "Share of groups whose rewards differ, so that they carry a gradient.",
        "share",
        (GRPO,),
    ),
    Metric(
        "groups_too_easy",
        "Share of groups with equal rewards in which every scored completion succeeded.",
        "share",
        (GRPO,),
    ),
    Metric(
        "groups_too_hard",
        "Share of groups with equal rewards in which not every completion succeeded, and which "
        "earned nothing.",
        "share",
        (GRPO,),
    ),
    Metric(
        "groups_flat_partial",
        "Share of groups with equal rewards in which not every completion succeeded, and all "
        "earned the same partial reward. With the three above it adds up to 1.",
        "share",
        (GRPO,),
    ),
    *_quantiles("mean", "mean reward of a group"),
    *_quantiles("std", "standard deviation of the reward within a group"),
    Metric(
        "resampled_groups",
        "Groups of equal rewards that were replaced by fresh tasks (`resample_uniform`).",
        "groups",
        (GRPO,),
    ),
    Metric(
        "tasks_left_out",
        "Train tasks that are never played, as their prompt leaves no room for an answer in "
        "`max_length`; the same at every step.",
        "tasks",
        SAMPLED,
    ),
    Metric(
        "reward_errors",
        "Share of the step's completions whose scoring raised, hung or crashed (reward 0).",
        "share",
        SAMPLED,
    ),
    Metric(
        "sample_s",
        "Time spent sampling the batch; beside training with `async_sampling`.",
        "seconds",
        SAMPLED,
    ),
    Metric(
        "reward_s",
        "Time spent waiting for the environment while nothing was sampled.",
        "seconds",
        SAMPLED,
    ),
    Metric(
        "export_s",
        "Time to hand the policy's weights on to what samples the batch.",
        "seconds",
        SAMPLED,
    ),
    Metric(
        "judge_calls",
        "Requests to judges (`envs.judge`) for the batch; with a judge, as the four below.",
        "requests",
        SAMPLED,
    ),
    Metric("judge_retries", "Of those, sent again after a failure.", "requests", SAMPLED),
    Metric("judge_tokens", "Tokens of those requests and replies.", "tokens", SAMPLED),
    Metric("judge_s", "Mean time from a request to its reply.", "seconds", SAMPLED),
    Metric("judge_cost", "Money for the batch's requests, by the judges' prices.", "1", SAMPLED),
    Metric("train_s", "Time spent on loss, gradient and optimizer step.", "seconds", ALL),
    Metric("microbatches", "Forward passes that one optimizer step was split into.", "passes", ALL),
    Metric(
        "mfu",
        "Operations of the model in `train_s`, recomputation left out, over those of one large "
        "matrix product in that time (`matrix_flops` in the manifest; a step that beats it is the "
        "measure from then on).",
        "share",
        ALL,
    ),
    Metric(
        "peak_memory",
        "The most memory held so far: of the GPU, on a CPU by the worker's process.",
        "bytes",
        ALL,
    ),
    Metric(
        "gpu_utilization",
        "Share of the step's time in which a kernel ran on the GPU, however small.",
        "share",
        ALL,
        "gpu",
    ),
    Metric("gpu_temperature", "The highest temperature of the GPU in the step.", "°C", ALL, "gpu"),
    Metric("gpu_power", "Mean power that the GPU drew in the step.", "W", ALL, "gpu"),
    Metric(
        "loss",
        "Mean cross-entropy of the supervised tokens of the step; DPO: mean loss of its pairs, "
        "0.693 where the policy prefers neither answer more than its start did.",
        "nats",
        ROWS,
    ),
    Metric("tokens", "Tokens in the step's rows, prompts included.", "tokens", ROWS),
    Metric("supervised_tokens", "Tokens of the step that carry loss.", "tokens", ROWS),
    Metric(
        "preference_accuracy",
        "Share of the step's pairs whose better answer gained more over the start than the worse.",
        "share",
        (DPO,),
    ),
    Metric(
        "chosen_reward",
        "`beta` times what the better answers' log-probability gained over the start, mean.",
        "nats",
        (DPO,),
    ),
    Metric(
        "rejected_reward",
        "`beta` times what the worse answers' log-probability gained over the start, mean.",
        "nats",
        (DPO,),
    ),
    Metric("grad_norm", "Norm of the adapter's gradient before clipping.", "1", ALL),
    Metric("lr", "Learning rate of the step.", "1", ALL),
    Metric(
        "tokens_per_s",
        "Tokens of the step (SFT, DPO: rows with prompts; else completions) per second of it.",
        "tokens/s",
        ALL,
    ),
    Metric(
        "reward_before",
        "Mean reward of the round's train tasks with the prompt that was taken up.",
        "reward",
        (PROMPT,),
    ),
    Metric(
        "tried_reward",
        "Mean reward of the same tasks with the prompt that the endpoint wrote.",
        "reward",
        (PROMPT,),
    ),
    Metric(
        "chosen_reward",
        "Mean reward of the best prompt so far on the tasks that choose.",
        "reward",
        (PROMPT,),
    ),
    Metric("rollouts", "Answers of the search so far.", "rollouts", (PROMPT,)),
    Metric("reflection_calls", "Requests to the endpoint so far.", "requests", (PROMPT,)),
    Metric("reflection_cost", "Money for them, by the prices of config.toml.", "money", (PROMPT,)),
    Metric(
        "heldout_success",
        "Share of held-out tasks solved, greedy, errors counted as not solved; of the half "
        "that chooses the checkpoint (`half: select`).",
        "share",
        ALL,
        "evaluation",
    ),
    Metric(
        "heldout_reward",
        "Mean reward on those tasks, errors counted as 0.",
        "reward",
        ALL,
        "evaluation",
    ),
    Metric(
        "heldout_loss",
        "Mean cross-entropy of the supervised tokens of the held-out rows (DPO: mean loss of the "
        "held-out pairs); of the half that chooses the checkpoint.",
        "nats",
        ROWS,
        "evaluation",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _LIST}

# The two columns that are no metric: which step, and when (unix seconds).
LINE_KEYS = ("step", "time")


def names(algorithm: str) -> list[str]:
    """Return the names of the metrics that the trainer of `algorithm` writes, in the order of the
    list above."""
    return [metric.name for metric in _LIST if algorithm in metric.algorithms]


# The prefix of the columns of an evaluation.
HELDOUT = "heldout_"


def curve_name(metric: str) -> str:
    """Return the column of `metrics.jsonl` for a metric that an environment's `Score` calls
    `metric`.

    The column has the same name, unless that name, or `heldout_` plus that name, is one of the
    trainer's own metrics. Then it gets the prefix `env_`, so that an environment cannot overwrite
    the trainer's measurements: "loss" becomes "env_loss". For an evaluation the caller adds
    `heldout_` to the column.
    """
    is_taken = metric in METRICS or metric in LINE_KEYS or f"{HELDOUT}{metric}" in METRICS
    # A name that begins with `heldout_` would look like the column of an evaluation.
    if is_taken or metric.startswith(HELDOUT):
        return f"env_{metric}"
    return metric
