"""Names of settings in other trainers, and what to write here instead.

An unknown setting is always refused; these tables tell what to use in its place.
"""

import difflib
from collections.abc import Iterable

from engine.records.settings import ALGORITHMS, ROW_ALGORITHMS

# Another trainer's name -> our name. Two names as in "batch_size|prompts_per_step" are that of SFT
# and DPO, and that of GRPO and distillation.
FOREIGN: dict[str, str] = {
    "alpha": "lora_alpha",
    "batch": "batch_size|prompts_per_step",
    "beta": "beta|kl_coef",
    "bf16": "precision",
    "clip_eps": "clip_low",
    "clip_epsilon": "clip_low",
    "clip_grad": "max_grad_norm",
    "clip_ratio": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "context_length": "max_length",
    "cutoff_len": "max_length",
    "dropout": "lora_dropout",
    "dtype": "precision",
    "effective_batch_size": "batch_size|prompts_per_step",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "eval_interval": "eval_every",
    "eval_steps": "eval_every",
    "fp16": "precision",
    "fp32": "precision",
    "fsdp": "shard_base",
    "global_batch_size": "batch_size|prompts_per_step",
    "gradient_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "group": "group_size",
    "importance_sampling_cap": "tis_cap",
    "kl": "kl_coef",
    "kl_beta": "beta|kl_coef",
    "kl_coeff": "kl_coef",
    "kl_penalty": "kl_coef",
    "kl_penalty_coef": "kl_coef",
    "learning_rate_schedule": "lr_schedule",
    "dynamic_sampling": "resample_uniform",
    "filter_groups": "resample_uniform",
    "lora_r": "lora_rank",
    "loss_type": "loss",
    "lr": "learning_rate",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "num_gpus": "gpus",
    "teacher_model_name_or_path": "teacher",
    "max_completion_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_epochs": "epochs",
    "max_eval_rows": "eval_rows",
    "max_new_tokens": "max_tokens",
    "max_response_length": "max_tokens",
    "max_samples": "max_examples",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "max_steps": "steps",
    "mini_batches": "updates_per_batch",
    "mu": "updates_per_batch",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "num_generations": "group_size",
    "num_iterations": "updates_per_batch",
    "num_samples_per_prompt": "group_size",
    "num_steps": "steps",
    "num_train_epochs": "epochs",
    "num_turns": "max_turns",
    "per_device_train_batch_size": "batch_size|prompts_per_step",
    "ppo_epochs": "updates_per_batch",
    "pref_ftx": "sft_weight",
    "prompt_batch_size": "prompts_per_step",
    "r": "lora_rank",
    "random_seed": "seed",
    "rank": "lora_rank",
    "rollouts_per_prompt": "group_size",
    "rollouts_per_task": "group_size",
    "rpo_alpha": "sft_weight",
    "samples_per_prompt": "group_size",
    "save_at_steps": "save_every",
    "save_interval": "save_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "scheduler": "lr_schedule",
    "seeds": "seed",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "sequence_length": "max_length",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "target_modules": "lora_targets",
    "targets": "lora_targets",
    "temp": "temperature",
    "thinking_length_penalty_coef": "thinking_length_penalty",
    "total_steps": "steps",
    "train_batch_size": "batch_size|prompts_per_step",
    "training_steps": "steps",
    "vllm_importance_sampling_cap": "tis_cap",
    "warmup": "warmup_ratio",
    "warmup_steps": "warmup_ratio",
    "wd": "weight_decay",
}

# Sentences that follow our name if our setting also takes other values.
FOREIGN_NOTES: dict[str, str] = {
    "seeds": "It takes one whole number: submit one run per seed and compare them.",
    "warmup_steps": "It is a share of all steps, from 0 to below 1.",
    "save_at_steps": "It takes one whole number: a checkpoint every so many steps.",
    "bf16": 'Write precision = "bfloat16".',
    "fp16": 'Write precision = "bfloat16" or "float32".',
    "fp32": 'Write precision = "float32".',
}

# Names that are arguments of the tool, beside its argument `settings`.
ARGUMENTS = ("max_gpu_hours", "note", "parent", "request_id", "resume")
_ARGUMENT = "It is an argument of its own, beside settings."

# Names of things that are not settings here -> where they are, or what to do instead.
REFUSED: dict[str, str] = {
    "advantage_clip": "Advantages are not clipped; the ratio is, by clip_low and clip_high.",
    "arm": "Submit one run per variant and compare them.",
    "deepspeed": "gpus says how many devices train; shard_base cuts a base too large for one.",
    "disk": "An estimate says how much disk a run takes; nothing is rented.",
    "environment": "The environment is the argument env_id (in a file: env); its parameters stand "
    "in its own environment.toml.",
    "full_finetune": "Only LoRA adapters are trained.",
    "gpu": "A run leases a device of this machine; there is nothing to choose.",
    "gpu_type": "A run leases a device of this machine; there is nothing to choose.",
    "gradient_accumulation_steps": "batch_size and prompts_per_step are rows per optimizer step; "
    "micro-batches are chosen to fit memory and do not change the gradient.",
    "hf_repo": "Nothing is uploaded. An export of the run writes the files.",
    "hub_model_id": "Nothing is uploaded. An export of the run writes the files.",
    "init_from_adapter": "Give the run to continue from as the argument model: RUN or RUN@best.",
    "load_in_4bit": 'Write quantization = "nf4".',
    "max_cost": "The limit of a run is the argument max_gpu_hours.",
    "max_gpu_hours": _ARGUMENT,
    "micro_batch_size": "Micro-batches are chosen to fit memory and do not change the gradient.",
    "note": _ARGUMENT,
    "optim": "The optimizer is AdamW.",
    "optimizer": "The optimizer is AdamW.",
    "parent": _ARGUMENT,
    "params": "Parameters of an environment stand in its own environment.toml.",
    "pip": "Packages of an environment stand in its own requirements.txt.",
    "push_to_hub": "Nothing is uploaded. An export of the run writes the files.",
    "repetition_penalty": "What was sampled before changes no probability: training could not tell "
    "it. temperature, top_p, top_k and min_p shape sampling.",
    "report_to": "Metrics are in the logs of the run.",
    "request_id": _ARGUMENT,
    "resume": _ARGUMENT,
    "resume_from_checkpoint": "Give the run's id as the argument resume.",
    "secrets": "An environment names its secrets in its own environment.toml; values are read "
    "from this server's environment.",
    "train": "Training settings stand directly in settings (in a file: under [settings]).",
    "use_rslora": "The adapter is scaled by lora_alpha / lora_rank.",
    "wandb": "Metrics are in the logs of the run. Nothing is sent elsewhere.",
    "worker_env": "An environment names its secrets in its own environment.toml; values are read "
    "from this server's environment.",
}

# (algorithm, setting that it does not have) -> what to use instead.
NOT_FOR: dict[tuple[str, str], str] = {
    ("distill", "advantage"): "The teacher's log-probabilities are the advantage, token by token.",
    ("distill", "async_sampling"): "Distillation always trains on what the policy samples now.",
    ("distill", "batch_size"): "Use prompts_per_step (tasks) and group_size (completions of each).",
    ("distill", "beta"): "Nothing but the teacher pulls; a lower learning_rate moves less.",
    ("distill", "epochs"): "Distillation runs for `steps`; each takes prompts_per_step tasks.",
    ("distill", "kl_coef"): "The divergence from the teacher is all that is trained.",
    ("distill", "keep"): "SFT and GRPO replay rows; distillation trains what is sampled.",
    ("distill", "keep_env"): "SFT and GRPO replay rows; distillation trains what is sampled.",
    (
        "distill",
        "keep_answers",
    ): "SFT and GRPO replay rows; distillation trains what is sampled.",
    ("distill", "loss"): "Distillation has one loss, the reverse KL, a mean over tokens.",
    ("distill", "loss_on"): "Distillation trains the tokens the policy sampled.",
    ("distill", "temperature"): "The policy is sampled as it is, at temperature 1.",
    ("distill", "top_p"): "The policy is sampled as it is, from all tokens.",
    ("distill", "updates_per_batch"): "Each batch is used once, by the policy that sampled it.",
    ("distill", "vary_wording"): "Distillation follows its teacher in the words that are asked.",
    ("dpo", "vary_wording"): "DPO compares two answers to the same words; vary them in the rows.",
    ("dpo", "group_size"): "DPO does not sample; it learns from pairs that exist.",
    (
        "dpo",
        "keep",
    ): "SFT and GRPO replay rows; here a larger beta holds the policy to its start.",
    (
        "dpo",
        "keep_env",
    ): "SFT and GRPO replay rows; here a larger beta holds the policy to its start.",
    (
        "dpo",
        "keep_answers",
    ): "SFT and GRPO replay rows; here a larger beta holds the policy to its start.",
    ("dpo", "kl_coef"): "Here it is called beta: what holds the policy to where it started.",
    ("dpo", "loss"): "DPO has one loss.",
    ("dpo", "loss_on"): "DPO compares what the two answers of a pair do not share.",
    ("dpo", "max_tokens"): "DPO does not sample while training; max_length cuts rows.",
    ("dpo", "packing"): "DPO always lets the answers of a step share forward passes.",
    ("dpo", "prompts_per_step"): "Use batch_size (pairs per optimizer step).",
    ("dpo", "temperature"): "DPO does not sample while training.",
    ("dpo", "thinking"): "DPO compares the answers as they are, with the reasoning that they have.",
    ("grpo", "batch_size"): "Use prompts_per_step (tasks) and group_size (completions of each).",
    ("grpo", "epochs"): "GRPO runs for `steps`; each takes prompts_per_step tasks.",
    ("grpo", "loss_on"): "GRPO trains the tokens the policy sampled.",
    ("grpo", "packing"): "GRPO always lets the answers of a step share forward passes.",
    ("sft", "beta"): "SFT has no reference; use fewer epochs or a lower learning_rate.",
    ("sft", "async_sampling"): "SFT does not sample while training.",
    ("sft", "resample_uniform"): "SFT has no groups whose rewards could be equal.",
    ("sft", "thinking_length_penalty"): "SFT earns no reward; shorten the thoughts in its rows.",
    ("sft", "advantage"): "SFT imitates reference answers; nothing is compared within a group.",
    ("sft", "clip_high"): "SFT has no sampling policy to stay near.",
    ("sft", "clip_low"): "SFT has no sampling policy to stay near.",
    ("sft", "group_size"): "SFT does not sample; use batch_size (rows per optimizer step).",
    ("sft", "kl_coef"): "SFT has no reference term; use fewer epochs or a lower learning_rate.",
    ("sft", "loss"): "SFT has one loss; loss_on chooses the tokens it covers.",
    ("sft", "max_tokens"): "SFT does not sample while training; max_length cuts rows.",
    ("sft", "prompts_per_step"): "Use batch_size (rows per optimizer step).",
    ("sft", "temperature"): "SFT does not sample while training.",
}

_MOST_SIMILAR = 2  # the most names that a suggestion lists
# The least similarity (difflib) of a typo to the name of a setting, and to that of an algorithm.
_SIMILARITY, _ALGORITHM_SIMILARITY = 0.6, 0.5

# Another name of an algorithm -> our name.
_ALGORITHMS = {
    "ppo": "grpo",
    "rl": "grpo",
    "reinforce": "grpo",
    "rloo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "gepa": "prompt",
    "prompts": "prompt",
    "prompt_optimization": "prompt",
    "gkd": "distill",
    "opd": "distill",
    "distillation": "distill",
    "on_policy_distillation": "distill",
    "preference": "dpo",
    "preferences": "dpo",
    "finetune": "sft",
    "lora": "sft",
    "supervised": "sft",
}


def meant_setting(name: str, algorithm: str, known_names: Iterable[str]) -> str:
    """Return the setting that another trainer's name or a typo means: "learning_rate" for "lr".

    Returns "" if there is no such setting, or if our setting takes other values, so that the given
    value could not be kept.

    Args:
        name: the name as the user wrote it.
        algorithm: the algorithm of the run.
        known_names: names of the algorithm's settings.
    """
    normalized = _normalized(name)
    names = list(known_names)
    # REFUSED names are no settings here; our settings for FOREIGN_NOTES take other values.
    if normalized in REFUSED or normalized in FOREIGN_NOTES:
        return ""
    if normalized in names:  # the name is spelt differently, such as "Learning-Rate"
        return normalized
    if normalized in FOREIGN:  # another trainer's name for one of our settings
        target = _our_name(normalized, algorithm)
        if target in names:  # otherwise our setting belongs to another algorithm
            return target
    similar = difflib.get_close_matches(normalized, names, n=1, cutoff=_SIMILARITY)
    return similar[0] if similar else ""


def suggest(name: str, algorithm: str, known_names: Iterable[str]) -> str:
    """Return sentences that say what to use instead of the unknown setting `name`.

    Example: "Here it is called learning_rate." The text is "" if nothing is known about the name
    and it resembles no setting.

    Args:
        name: the name as the user wrote it.
        algorithm: the algorithm of the run.
        known_names: names of the algorithm's settings.
    """
    normalized = _normalized(name)
    names = list(known_names)
    if normalized in REFUSED:
        return REFUSED[normalized]
    if normalized in names:  # the name is spelt differently, such as "Learning-Rate"
        return f"Did you mean {normalized}?"
    if normalized in FOREIGN:
        target = _our_name(normalized, algorithm)
        if target in names:
            return f"Here it is called {target}. {FOREIGN_NOTES.get(normalized, '')}".strip()
    similar = difflib.get_close_matches(normalized, names, n=_MOST_SIMILAR, cutoff=_SIMILARITY)
    return f"Did you mean {' or '.join(similar)}?" if similar else ""


def other_name(name: str, algorithm: str, known_names: Iterable[str]) -> str:
    """Return the setting of `algorithm` that other trainers call `name`; "" if there is none.

    `known_names` are the names of the algorithm's settings.
    """
    normalized = _normalized(name)
    target = _our_name(normalized, algorithm) if normalized in FOREIGN else ""
    return target if target in known_names else ""


def _normalized(name: str) -> str:
    """Write a name as our settings are written: "Learning-Rate" -> "learning_rate"."""
    return name.strip().lower().replace("-", "_")


def _our_name(foreign_name: str, algorithm: str) -> str:
    """Return our name for a key of FOREIGN, as `algorithm` calls the setting."""
    # e.g. "batch_size|prompts_per_step": the first name is that of SFT and DPO, which train on
    # rows, the last that of the others. A single name is both.
    names = FOREIGN[foreign_name].split("|")
    return names[0] if algorithm in ROW_ALGORITHMS else names[-1]


def suggest_algorithm(name: str) -> str:
    """Return the algorithm that another name or a typo means, such as "grpo" for "ppo".

    Returns "" if that is unclear.
    """
    normalized = name.strip().lower()
    if normalized in _ALGORITHMS:
        return _ALGORITHMS[normalized]
    similar = difflib.get_close_matches(
        normalized, list(ALGORITHMS), n=1, cutoff=_ALGORITHM_SIMILARITY
    )
    return similar[0] if similar else ""
