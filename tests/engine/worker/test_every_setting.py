"""No setting is recorded and not applied: each is changed, and the run is another one."""

from typing import Any

import pytest
from loops import BASE as FOUR_STEPS
from loops import go, make_run, push, trace

from engine.home.run_dir import Home
from engine.records.settings import TRAINERS

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

# Shorter than elsewhere, because there are a hundred of these runs. Fewer than four steps over
# rows, or three over answers, do not tell one schedule of the learning rate from another.
FEWER_ROWS: dict[str, Any] = {"eval_rows": 8, "eval_every": 4, "save_every": 4}
FEWER_ANSWERS: dict[str, Any] = {
    "steps": 3,
    "prompts_per_step": 5,
    "max_tokens": 12,
    "eval_rows": 8,
    "eval_every": 3,
    "save_every": 3,
}
BASE: dict[str, dict[str, Any]] = {
    "sft": FOUR_STEPS["sft"] | FEWER_ROWS,
    "dpo": FOUR_STEPS["dpo"] | FEWER_ROWS,
    "grpo": FOUR_STEPS["grpo"] | FEWER_ANSWERS | {"group_size": 3},
    "distill": FOUR_STEPS["distill"] | FEWER_ANSWERS,
}
BOTH: dict[str, Any] = {
    "learning_rate": 0.0001,
    "warmup_ratio": 0.5,
    "weight_decay": 0.5,
    "max_grad_norm": 0.001,
    "lora_rank": 2,
    "lora_alpha": 5,
    "lora_dropout": 0.3,
    "lora_targets": ["q_proj"],
    "seed": 9,
    "eval_every": 1,
    "eval_rows": 6,
    "skill_rows": 5,
    "save_every": 1,
    "max_examples": 9,
    "accept_reward_risk": True,
    "precision": "bfloat16",
    "steps": 2,
}
CHANGES: dict[str, dict[str, Any]] = {
    "sft": BOTH
    | {
        "lr_schedule": "linear",
        "max_length": 23,
        "batch_size": 5,
        "packing": False,
        "loss_on": "all",
        "keep": 0.3,
        "vary_wording": 1.0,
    },
    "dpo": BOTH
    | {"lr_schedule": "linear", "max_length": 28, "batch_size": 5, "beta": 0.5, "sft_weight": 1.0},
    "grpo": BOTH
    | {
        "lr_schedule": "cosine",
        "prompts_per_step": 4,
        "group_size": 4,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 3,
        "min_p": 0.5,
        "stop": ["answer"],
        "loss": "gspo",
        "advantage": "rloo",
        "clip_low": 0.001,
        "clip_high": 0.001,
        "kl_coef": 0.5,
        "updates_per_batch": 1,
        "resample_uniform": 2,
        "async_sampling": True,
        "curriculum": "rollouts",
        "thinking": True,
        "keep": 0.3,
        "vary_wording": 1.0,
    },
    "distill": BOTH
    | {
        "lr_schedule": "cosine",
        "prompts_per_step": 4,
        "group_size": 3,
        "max_tokens": 4,
        "stop": ["answer"],
        "thinking": True,
    },
}
# Shown elsewhere, for a reason each.
ELSEWHERE = {
    "gradient_checkpointing": "test_policy: changes memory, must change no number",
    "quantization": "test_policy_quantization: a run on four bits",
    "thinking/sft": "test_families: reasoning in the rows is kept, dropped or required",
    "thinking_length_penalty": "test_loop_settings: the thinking penalty is compared by and shown",
    "stop_early": "test_a_run_without_progress_stops_early_when_asked; test_training_alerts",
    "gpus": "ranks/test_leader_runs: a run on several ranks has the curve of one",
    "shard_base": "ranks/test_leader_runs: a base sharded over ranks",
    "compute": "executors/test_ssh_executor: a run on a host is the run that it is here",
    "keep_checkpoints": "test_old_checkpoints_are_tidied_away",
    "epochs": "test_epochs_decide_the_number_of_steps",
    "tis_cap": "test_the_importance_cap_reaches_the_loss",
    "max_turns": "test_max_turns_ends_a_game",
    "max_reward_errors": "test_too_many_failed_rewards_end_the_run",
    "max_length/grpo": "test_tasks_that_do_not_fit_are_left_out",
    "teacher": "test_distill: the divergence from the teacher that is named falls",
    "teacher_model": "test_distill: a run with a teacher on loopback",
    "teacher_key_env": "test_distill: a run with a teacher on loopback",
    "keep_env": "test_replay: rows of a named environment are replayed",
    "keep_answers": "test_replay: the model's own right answers to an environment are replayed",
    "score_workers": "rollouts/test_scoring: several processes, the same scores in less time",
    "max_judge_calls": "test_judge_budget_runs: a run ends where its judge may be asked no more",
    "max_judge_cost": "test_judge_budget_runs: a run ends where its judge may be asked no more",
    "sampler": "test_vllm_sampler and tests/vllm: a run sampled by vLLM",
}


def test_every_setting_of_the_schema_is_in_a_table() -> None:
    for algorithm, schema in TRAINERS.items():
        covered = set(CHANGES[algorithm]) | {k.split("/")[0] for k in ELSEWHERE}
        assert set(schema.model_fields) - covered == set(), algorithm


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of each loop with the base settings, to be differed from."""
    place = tmp_path_factory.mktemp("reference")
    home = Home.locate(place / "home")
    env = push(home, place / "sums")
    found: dict[str, Any] = {"home": home, "env": env}
    for algorithm in TRAINERS:
        run = make_run(home, env, algorithm, BASE[algorithm], run_id=f"base-{algorithm}")
        go(run)
        found[algorithm] = trace(run)
    return found


def cases() -> list[Any]:
    """Every setting of every algorithm; one that an algorithm before has too goes to the long
    suite, because the loops share the code that applies it."""
    seen: set[str] = set()
    listed = []
    for algorithm, changes in CHANGES.items():
        for setting in changes:
            marks = pytest.mark.long if setting in seen else ()
            listed.append(pytest.param(algorithm, setting, marks=marks))
        seen |= set(changes)
    return listed


@pytest.mark.parametrize(("algorithm", "setting"), cases())
def test_changing_a_setting_changes_the_run(
    reference: dict[str, Any], algorithm: str, setting: str
) -> None:
    changed = BASE[algorithm] | {setting: CHANGES[algorithm][setting]}
    run = make_run(
        reference["home"], reference["env"], algorithm, changed, run_id=f"{algorithm}-{setting}"
    )
    go(run)
    assert trace(run) != reference[algorithm]
