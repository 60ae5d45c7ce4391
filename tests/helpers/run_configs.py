"""Settings and configs of runs that were never submitted, whole as every reader wants them."""

from typing import Any

from engine.records.settings import (
    PROJECTIONS,
    DistillSettings,
    DPOSettings,
    EvaluationSettings,
    GRPOSettings,
    SFTSettings,
)

COMMON: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "lora_targets": list(PROJECTIONS),
    "max_length": 64,
    "seed": 0,
    "eval_every": 2,
    "eval_rows": 20,
    "save_every": 2,
    "keep_checkpoints": 3,
    "max_examples": None,
    "accept_reward_risk": False,
    "gradient_checkpointing": False,
    "precision": "float32",
    "quantization": "none",
    "stop_early": "none",
    "steps": 4,
}
SFT = (
    COMMON
    | {"epochs": None, "batch_size": 8, "packing": True, "loss_on": "assistant"}
    | {"thinking": "keep"}
)
DPO = COMMON | {"epochs": None, "batch_size": 8, "beta": 0.1}
GRPO = COMMON | {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "stop": [],
    "loss": "dapo",
    "advantage": "group_norm",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_coef": 0.0,
    "tis_cap": 2.0,
    "updates_per_batch": 1,
    "resample_uniform": 0,
    "async_sampling": False,
    "thinking": False,
    "thinking_length_penalty": 0.0,
    "max_turns": 1,
    "max_reward_errors": 0.2,
    "sampler": "torch",
}
DISTILL = COMMON | {
    "prompts_per_step": 4,
    "group_size": 2,
    "max_tokens": 16,
    "stop": [],
    "tis_cap": 2.0,
    "thinking": False,
    "max_turns": 1,
    "max_reward_errors": 0.2,
    "sampler": "torch",
    "teacher": "sums-grpo-0",
    "teacher_model": "",
    "teacher_key_env": "",
}
_EVALUATION: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 0.0,
    "top_p": 1.0,
    "stop": [],
    "thinking": False,
    "max_turns": 1,
    "seed": 0,
    "max_length": 512,
}


_RANGE = {"low": 0.05, "likely": 0.1, "high": 0.2}
ESTIMATE: dict[str, Any] = {
    "steps": 4,
    "hours": _RANGE,
    "gpu_hours": _RANGE,
    "money": {"low": 0.0, "likely": 0.0, "high": 0.0},
    "gpu_hour_price": 0.0,
    "seconds": {"startup": 10.0, "training": 350.0},
    "tokens": {"trained": 1000, "generated": 1000},
    "peak_memory": {
        "weights": 100,
        "adapter_and_optimizer": 100,
        "activations": 100,
        "logits": 100,
        "kv_cache": 100,
        "overhead": 100,
        "total": 600,
    },
    "memory_available": 10_000_000_000,
    "memory_free": 10_000_000_000,
    "device": "cpu",
    "fits": True,
    "fit": "fits",
    "disk_bytes": 1000,
    "disk_fits": True,
    "lower_this": "",
    "basis": "model",
    "calibrated_on_runs": 0,
    "uncalibrated": {"seconds": {"startup": 10.0, "training": 350.0}, "memory": 600},
}
# manifest.json of a training run on the CPU.
MANIFEST: dict[str, Any] = {
    "run_id": "sums-grpo-1",
    "time": 1.5,
    "env": {"env_id": "sums@0123456789ab", "tasks_sha256": "00"},
    "model": {"ref": "pebble", "files": {"config.json": "00"}, "start_adapter": None},
    "settings_sha256": "00",
    "seed": 3,
    "parent": "",
    "note": "",
    "reward_risk_accepted": False,
    "versions": {"python": "3.11"},
    "hardware": {"device": "cpu", "threads": 2, "machine": "x86_64", "cores": 2, "ram": 1},
    "matrix_flops": 1e9,
    "quantization": "none",
    "precision": "float32",
    "forward": {"kind": "own", "why": ""},
    "kernels": {"kind": "torch", "why": ""},
    "isolation": "",
    "eval_sampling": {"max_tokens": 20, "temperature": 0.0, "top_p": 1.0, "stop": [], "seed": 3},
}


def sft_settings(**changes: Any) -> SFTSettings:
    return SFTSettings.model_validate(SFT | changes)


def dpo_settings(**changes: Any) -> DPOSettings:
    return DPOSettings.model_validate(DPO | changes)


def grpo_settings(**changes: Any) -> GRPOSettings:
    return GRPOSettings.model_validate(GRPO | changes)


def distill_settings(**changes: Any) -> DistillSettings:
    return DistillSettings.model_validate(DISTILL | changes)


def evaluation_settings(**changes: Any) -> EvaluationSettings:
    return EvaluationSettings.model_validate(_EVALUATION | changes)


def train_config(run_id: str = "sums-grpo-1", **changes: Any) -> dict[str, Any]:
    """A training run's config.json; `settings` among the changes are laid over the usual ones."""
    algorithm = changes.get("algorithm", "grpo")
    changes["estimate"] = ESTIMATE | changes.get("estimate", {})
    build = {
        "sft": sft_settings,
        "dpo": dpo_settings,
        "grpo": grpo_settings,
        "distill": distill_settings,
    }[algorithm]
    if algorithm == "distill":
        changes.setdefault("teacher", {"kind": "local", "ref": "sums-grpo-0", "base_path": "/x"})
    settings = build(**changes.pop("settings", {})).model_dump()
    return {
        "run_id": run_id,
        "kind": "train",
        "algorithm": algorithm,
        "env_id": "sums@0123456789ab",
        "env_dir": "/nowhere/envs/sums/0123456789ab",
        "model": "pebble",
        "base": {"ref": "pebble", "path": "/nowhere/pebble"},
        "start_adapter": None,
        "settings": settings,
        "sources": dict.fromkeys(settings, "recipe"),
        "note": "",
        "expect": "",
        "parent": "",
        "max_gpu_hours": 2.0,
        "estimate": ESTIMATE,
        "device": "cpu",
    } | changes


def evaluate_config(run_id: str = "sums-eval-1", **changes: Any) -> dict[str, Any]:
    """An evaluation's config.json; `models` among the changes may be references alone."""
    settings = evaluation_settings(**changes.pop("settings", {})).model_dump()
    entry = {"base_path": "/nowhere/pebble", "adapter": None}
    models = [
        entry | (model if isinstance(model, dict) else {"ref": model})
        for model in changes.pop("models", ["pebble"])
    ]
    return {
        "run_id": run_id,
        "kind": "evaluate",
        "algorithm": "evaluate",
        "env_id": "sums@0123456789ab",
        "env_dir": "/nowhere/envs/sums/0123456789ab",
        "models": models,
        "split": "heldout",
        "rows": 100,
        "attempts": 1,
        "settings": settings,
        "sources": dict.fromkeys(settings, "recipe"),
        "regrade": "",
        "wall_limit_hours": 6.0,
    } | changes
