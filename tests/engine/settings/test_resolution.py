"""Settings: what is refused and how, what is chosen and why, and that nothing is ignored."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, GB, GPU

from engine.core.errors import UserError
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.settings import ALGORITHMS, SCHEMAS, TRAINERS, DistillSettings, DPOSettings
from engine.settings import aliases, env_checks, resolution

MODEL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "bfloat16", 3_257_984
)
ROWS = tuple(RowLengths(20, 28, ((20, 28),)) for _ in range(30))
ENV = EnvFacts("sums@0123456789ab", "single", True, 600, 300, 600, ROWS, paired_rows=600)


def resolve(algorithm: str, settings: Any = None, **changes: Any) -> Any:
    given = {} if settings is None else settings
    if algorithm == "distill" and isinstance(given, dict):
        given = {"teacher": "arith-grpo-7"} | given
    if algorithm == "evaluate":
        sampling = {"model": MODEL, "env": ENV, "attempts": 1} | changes
        return resolution.resolve_sampling(given, **sampling)
    training = {"model": MODEL, "env": ENV, "hardware": CPU} | changes
    return resolution.resolve(algorithm, given, **training)


def refusal(algorithm: str, settings: Any, **changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(algorithm, settings, **changes)
    error = caught.value
    assert error.hint, "a refusal says what to do instead"
    assert len(json.dumps(error.payload())) <= 1000
    return error


NAN, INF = float("nan"), float("inf")
# (algorithm, settings, code, a word of the hint). First the list of the contract, then everything
# the systems before this one accepted or ignored.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("grpo", {"group_size": 1}, "SETTING_INVALID", "advantage"),
    ("grpo", {"temperature": 0}, "SETTING_INVALID", "1.0"),
    ("sft", {"keep": 0.6}, "SETTING_INVALID", "range of keep"),
    ("sft", {"keep": 0, "keep_env": "sums"}, "SETTING_NOT_APPLICABLE", "keep = 0.35"),
    ("sft", {"keep_answers": "own"}, "SETTING_NOT_APPLICABLE", "Leave keep_answers out"),
    ("grpo", {"keep": 0, "keep_env": "sums"}, "SETTING_NOT_APPLICABLE", "keep = 0.1"),
    ("dpo", {"keep": 0.2}, "SETTING_NOT_APPLICABLE", "beta"),
    ("distill", {"keep": 0.2}, "SETTING_NOT_APPLICABLE", "SFT and GRPO"),
    ("grpo", {"temperature": 0.0}, "SETTING_INVALID", "1.0"),
    ("grpo", {"max_tokens": 256, "max_length": 256}, "SETTING_INVALID", "max_length"),
    ("grpo", {"max_tokens": 4000, "max_length": 1024}, "SETTING_INVALID", "Lower max_tokens."),
    ("grpo", {"max_tokens": 1024}, "SETTING_INVALID", "max_tokens"),
    ("sft", {"learning_rate": 50}, "SETTING_INVALID", "Leave it out"),
    ("sft", {"learning_rate": 0.11}, "SETTING_INVALID", "Leave it out"),
    ("grpo", {"learning_rate": 9e-8}, "SETTING_INVALID", "Leave it out"),
    ("grpo", {"learning_rate": 0}, "SETTING_INVALID", "Leave it out"),
    ("sft", {"epochs": True}, "SETTING_INVALID", "not numbers"),
    ("grpo", {"steps": True}, "SETTING_INVALID", "not numbers"),
    ("grpo", {"seed": False}, "SETTING_INVALID", "not numbers"),
    ("sft", {"learning_rate": True}, "SETTING_INVALID", "not numbers"),
    ("sft", {"learning_rate": NAN}, "SETTING_INVALID", "finite"),
    ("sft", {"weight_decay": INF}, "SETTING_INVALID", "finite"),
    ("grpo", {"kl_coef": -INF}, "SETTING_INVALID", "finite"),
    ("sft", {"steps": 10, "epochs": 1}, "SETTING_INVALID", "one of them"),
    ("sft", {"batch_size": 1_000_000}, "SETTING_INVALID", "600"),
    ("sft", {"batch_size": 601}, "SETTING_INVALID", "600"),
    ("sft", {"batch_size": 40, "max_examples": 30}, "SETTING_INVALID", "30"),
    ("grpo", {"prompts_per_step": 601}, "SETTING_INVALID", "600"),
    ("sft", {"lora_rank": 513}, "SETTING_INVALID", "16"),
    ("grpo", {"lora_rank": 4096}, "SETTING_INVALID", "16"),
    ("sft", {"max_examples": 0}, "SETTING_INVALID", "every train row"),
    ("grpo", {"epochs": 2}, "SETTING_NOT_APPLICABLE", "steps"),
    ("grpo", {"batch_size": 64}, "SETTING_NOT_APPLICABLE", "prompts_per_step"),
    ("grpo", {"loss_on": "all"}, "SETTING_NOT_APPLICABLE", "sampled"),
    ("sft", {"group_size": 8}, "SETTING_NOT_APPLICABLE", "batch_size"),
    ("sft", {"beta": 0.1}, "SETTING_NOT_APPLICABLE", "reference"),
    ("dpo", {"beta": 0}, "SETTING_INVALID", "range"),
    ("distill", {"teacher": None}, "SETTING_INVALID", "become like"),
    ("distill", {"teacher": ""}, "SETTING_INVALID", "settings reference"),
    ("distill", {"teacher": "http://h/v1"}, "SETTING_INVALID", "/v1/models"),
    ("distill", {"teacher": "http:///v1", "teacher_model": "m"}, "SETTING_INVALID", "e.g."),
    (
        "distill",
        {"teacher": "http://a:b@h/v1", "teacher_model": "m"},
        "SETTING_INVALID",
        "TEACHER_",
    ),
    (
        "distill",
        {"teacher": "http://h/v1?key=1", "teacher_model": "m"},
        "SETTING_INVALID",
        "TEACHER",
    ),
    ("distill", {"teacher_model": "m"}, "SETTING_NOT_APPLICABLE", "URL"),
    ("distill", {"teacher_key_env": "TEACHER_KEY"}, "SETTING_NOT_APPLICABLE", "URL"),
    ("distill", {"teacher_key_env": "AWS_SECRET_ACCESS_KEY"}, "SETTING_INVALID", "range"),
    ("distill", {"temperature": 0.7}, "SETTING_NOT_APPLICABLE", "temperature 1"),
    ("distill", {"kl_coef": 0.1}, "SETTING_NOT_APPLICABLE", "teacher"),
    ("distill", {"batch_size": 8}, "SETTING_NOT_APPLICABLE", "prompts_per_step"),
    ("distill", {"epochs": 2}, "SETTING_NOT_APPLICABLE", "steps"),
    ("grpo", {"teacher": "pebble"}, "SETTING_NOT_APPLICABLE", "Leave it out"),
    ("dpo", {"kl_coef": 0.1}, "SETTING_NOT_APPLICABLE", "beta"),
    ("dpo", {"packing": False}, "SETTING_NOT_APPLICABLE", "forward passes"),
    ("dpo", {"batch_size": 601}, "SETTING_INVALID", "600"),
    ("sft", {"temperature": 1.0}, "SETTING_NOT_APPLICABLE", "sample"),
    ("sft", {"kl_coef": 0.1}, "SETTING_NOT_APPLICABLE", "reference"),
    ("sft", {"max_tokens": 64}, "SETTING_NOT_APPLICABLE", "max_length"),
    ("grpo", {"max_turns": 4}, "SETTING_NOT_APPLICABLE", "Leave"),
    ("grpo", {"loss": "cispo", "clip_low": 0.2}, "SETTING_NOT_APPLICABLE", "clip_high"),
    # tables, and scalars that lived in them
    ("sft", {"gpu": {"type": "H100", "disk": 60}}, "SETTING_UNKNOWN", "device"),
    ("sft", {"wandb": {"project": "x"}}, "SETTING_UNKNOWN", "logs of the run"),
    ("grpo", {"worker_env": {"A": "b"}}, "SETTING_UNKNOWN", "environment.toml"),
    ("grpo", {"environment": {"id": "x", "tag": 1}}, "SETTING_UNKNOWN", "env_id"),
    ("grpo", {"train": {"steps": 3}}, "SETTING_UNKNOWN", "settings"),
    ("grpo", {"params": {"level": 2}}, "SETTING_UNKNOWN", "environment.toml"),
    ("grpo", {"pip": ["numpy"]}, "SETTING_UNKNOWN", "requirements.txt"),
    ("grpo", {"secrets": ["KEY"]}, "SETTING_UNKNOWN", "environment.toml"),
    # accepted or ignored elsewhere
    ("sft", {"max_steps": 10}, "SETTING_UNKNOWN", "steps"),
    ("grpo", {"seeds": [0, 0]}, "SETTING_UNKNOWN", "seed"),
    ("grpo", {"advantage_clip": 5.0}, "SETTING_UNKNOWN", "clip_low"),
    ("sft", {"hf_repo": "me/model"}, "SETTING_UNKNOWN", "export"),
    ("sft", {"init_from_adapter": "me/repo/sft/run/seed0"}, "SETTING_UNKNOWN", "model"),
    ("grpo", {"kl_penalty_coef": 0.1}, "SETTING_UNKNOWN", "kl_coef"),
    ("grpo", {"stop_sequences": ["x"]}, "SETTING_UNKNOWN", "stop"),
    ("sft", {"save_at_steps": [1, 2]}, "SETTING_UNKNOWN", "save_every"),
    ("grpo", {"thinking_length_penalty_coef": 0.5}, "SETTING_UNKNOWN", "thinking_length_penalty"),
    ("sft", {"zzz": 1}, "SETTING_UNKNOWN", "Settings of sft"),
    # not built yet
    ("grpo", {"packing": True}, "SETTING_NOT_APPLICABLE", "forward passes"),
    ("sft", {"packing": 1}, "SETTING_INVALID", "settings reference"),
    ("sft", {"quantization": "int8"}, "SETTING_INVALID", "settings reference"),
    ("sft", {"quantization": "nf4", "precision": "float32"}, "SETTING_INVALID", "precision"),
    ("sft", {"load_in_4bit": True}, "SETTING_UNKNOWN", 'quantization = "nf4"'),
    ("grpo", {"resample_uniform": True}, "SETTING_INVALID", "not numbers"),
    ("grpo", {"resample_uniform": 9}, "SETTING_INVALID", "settings reference"),
    ("sft", {"resample_uniform": 2}, "SETTING_NOT_APPLICABLE", "groups"),
    ("sft", {"async_sampling": True}, "SETTING_NOT_APPLICABLE", "sample"),
    ("grpo", {"dynamic_sampling": 2}, "SETTING_UNKNOWN", "resample_uniform"),
    ("grpo", {"thinking_length_penalty": 0.1}, "SETTING_NOT_APPLICABLE", "thinking = true"),
    ("grpo", {"thinking_length_penalty": 1.5}, "SETTING_INVALID", "settings reference"),
    ("sft", {"thinking_length_penalty": 0.1}, "SETTING_NOT_APPLICABLE", "reward"),
    ("sft", {"stop_early": "loss"}, "SETTING_INVALID", "heldout"),
    ("grpo", {"sampler": "vllm"}, "SETTING_INVALID", "honesmith setup --vllm"),
    ("grpo", {"sampler": "sglang"}, "SETTING_INVALID", "torch, vllm"),
    # shapes and kinds
    ("sft", {"epochs": 2.5}, "SETTING_INVALID", "range"),
    ("sft", {"epochs": 2.0}, "SETTING_INVALID", "Write 2"),
    ("sft", {"learning_rate": "1e-4"}, "SETTING_INVALID", "without quotes"),
    ("sft", {"learning_rate": "abc"}, "SETTING_INVALID", "abc is not a number; e.g. 0.001"),
    ("sft", {"steps": "many"}, "SETTING_INVALID", "many is not a number; e.g. 8"),
    ("sft", {"learning_rate": "nan"}, "SETTING_INVALID", "nan is not a number"),
    ("sft", {"learning_rate": {"peak": 1e-4}}, "SETTING_INVALID", "flat"),
    ("sft", {"lora_targets": []}, "SETTING_INVALID", "once"),
    ("sft", {"lora_targets": ["q_proj", "lm_head"]}, "SETTING_INVALID", "once"),
    ("sft", {"lora_targets": "everything"}, "SETTING_INVALID", "once"),
    ("sft", {"lora_targets": ["q_proj", "q_proj"]}, "SETTING_INVALID", "once"),
    ("grpo", {"stop": "###"}, "SETTING_INVALID", "range"),
    ("grpo", {"stop": [""]}, "SETTING_INVALID", "range"),
    ("grpo", {"loss": "ppo"}, "SETTING_INVALID", "range"),
    ("grpo", {"thinking": True}, "SETTING_INVALID", "thinking"),
    ("grpo", {"thinking": "yes"}, "SETTING_INVALID", "range"),
    ("sft", {"max_length": 2048}, "SETTING_INVALID", "1024"),
    ("grpo", {"steps": 0}, "SETTING_INVALID", "range"),
    ("grpo", {"top_p": 0}, "SETTING_INVALID", "range"),
    ("grpo", {"top_k": -1}, "SETTING_INVALID", "range"),
    ("grpo", {"min_p": 1}, "SETTING_INVALID", "range"),
    ("grpo", {"max_reward_errors": 1.5}, "SETTING_INVALID", "range"),
]


@pytest.mark.parametrize(("algorithm", "settings", "code", "word"), REFUSED)
def test_what_cannot_work_is_refused_with_a_hint(
    algorithm: str, settings: dict[str, Any], code: str, word: str
):
    error = refusal(algorithm, settings)
    assert error.code == code
    assert word.lower() in error.hint.lower()
    name = next(iter(settings))
    assert error.field == f"settings.{name}" or error.field.removeprefix("settings.") in settings
    assert error.field.removeprefix("settings.") in error.message


@pytest.mark.parametrize(
    ("algorithm", "wrong", "right"),
    [
        ("grpo", "stepz", "steps"),
        ("grpo", "Learning_Rate", "learning_rate"),
        ("grpo", "learning-rate", "learning_rate"),
        ("sft", "epoch", "epochs"),
        ("sft", "batchsize", "batch_size"),
        ("sft", "lr", "learning_rate"),
        ("grpo", "num_generations", "group_size"),
        ("grpo", "beta", "kl_coef"),
        ("dpo", "kl_beta", "beta"),
        ("distill", "teacher_model_name_or_path", "teacher"),
        ("distill", "num_generations", "group_size"),
        ("grpo", "per_device_train_batch_size", "prompts_per_step"),
        ("sft", "per_device_train_batch_size", "batch_size"),
        ("grpo", "max_new_tokens", "max_tokens"),
        ("sft", "num_gpus", "gpus"),
        ("grpo", "fsdp", "shard_base"),
        ("dpo", "rpo_alpha", "sft_weight"),
        ("sft", "num_train_epochs", "epochs"),
        ("sft", "target_modules", "lora_targets"),
        ("evaluate", "temprature", "temperature"),
    ],
)
def test_a_name_from_elsewhere_gets_ours(algorithm: str, wrong: str, right: str):
    error = refusal(algorithm, {wrong: 1})
    assert error.code == "SETTING_UNKNOWN" and right in error.hint


def test_every_foreign_name_leads_to_a_setting_of_ours():
    known = {name for schema in TRAINERS.values() for name in schema.model_fields}
    for foreign, ours in aliases.FOREIGN.items():
        assert set(ours.split("|")) <= known, foreign
        # `beta` is a setting of DPO, and what others call kl_coef in GRPO.
        assert foreign not in known or foreign in ours.split("|")
    assert not set(aliases.REFUSED) & (known | set(aliases.FOREIGN))
    for algorithm, name in aliases.NOT_FOR:
        assert name in known and name not in SCHEMAS[algorithm].model_fields


def test_several_unknown_names_are_all_named():
    error = refusal("grpo", {"max_steps": 3, "epochs": 2, "qqq": 1})
    assert "max_steps, epochs, qqq" in error.message
    assert "steps" in error.hint


def test_several_bad_values_are_all_named():
    message = refusal("grpo", {"group_size": 1, "temperature": 0, "steps": 5}).message
    assert "group_size = 1" in message and "temperature = 0" in message and "steps" not in message


@pytest.mark.parametrize("settings", [[], "steps=3", 7])
def test_settings_that_are_no_object_are_refused(settings: Any):
    assert refusal("sft", settings).code == "BAD_ARGUMENT"


@pytest.mark.parametrize(
    ("given", "meant"), [("ppo", "grpo"), ("SFT", "sft"), ("gropo", "grpo"), ("gkd", "distill")]
)
def test_an_unknown_algorithm_is_refused_with_the_one_meant(given: str, meant: str):
    error = refusal(given, {})
    assert error.code == "BAD_ARGUMENT" and f"Use {meant}" in error.hint


def test_steps_for_sft_are_accepted():
    found = resolve("sft", {"steps": 25})
    assert found.settings.steps == 25 and found.settings.epochs is None


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "evaluate"])
def test_every_setting_has_a_value_and_a_source(algorithm: str):
    found = resolve(algorithm)
    settings = found.settings.model_dump()
    assert list(settings) == list(SCHEMAS[algorithm].model_fields) == list(found.sources)
    assert set(found.sources.values()) <= {"user", "recipe", "model", "hardware"}
    assert json.loads(json.dumps(settings, allow_nan=False)) == settings


def test_what_the_user_gave_stays_and_is_marked():
    given = {"learning_rate": 2e-4, "group_size": 4, "stop": ["\n"], "lora_targets": "mlp"}
    found = resolve("grpo", given)
    assert {name for name, source in found.sources.items() if source == "user"} == set(given)
    assert found.settings.lora_targets == ["gate_proj", "up_proj", "down_proj"]
    assert (found.settings.learning_rate, found.settings.stop) == (2e-4, ["\n"])


def test_null_means_left_out():
    assert resolve("grpo", {"steps": None}) == resolve("grpo")


def test_the_recipe_of_sft():
    found = resolve("sft").settings
    assert (found.lora_rank, found.lora_alpha, len(found.lora_targets)) == (16, 32, 7)
    assert (found.lr_schedule, found.warmup_ratio) == ("cosine", 0.03)
    # 600 rows: 75 steps a pass, and six of them make the 450 updates of a small model.
    assert (found.batch_size, found.epochs, found.steps) == (8, 6, 450)
    assert (found.stop_early, found.eval_every) == ("heldout", 57)
    assert found.save_every == found.eval_every
    assert (found.eval_rows, found.max_examples, found.max_length) == (300, 600, 32)
    assert (found.keep, found.keep_env, found.keep_answers) == (0.35, "", "reference")


def test_the_recipe_of_dpo():
    found = resolve("dpo").settings
    assert isinstance(found, DPOSettings)
    assert (found.beta, found.epochs, found.batch_size) == (0.1, 1, 32)
    assert (found.lr_schedule, found.warmup_ratio) == ("cosine", 0.1)
    assert found.learning_rate < resolve("grpo").settings.learning_rate


def test_the_recipe_of_distillation():
    settings = resolve("distill").settings
    assert isinstance(settings, DistillSettings)
    assert (settings.steps, settings.prompts_per_step, settings.group_size) == (60, 16, 4)
    assert settings.learning_rate == resolve("grpo", {"steps": 60}).settings.learning_rate
    assert settings.max_length == resolve("grpo").settings.max_length
    assert settings.lr_schedule == "constant" and settings.sampler == "torch"


def test_distillation_needs_a_score_to_be_judged_by():
    with pytest.raises(UserError, match="has no score"):
        resolve("distill", env=replace(ENV, scored=False))


def test_pairs_are_what_dpo_counts_and_needs():
    env = EnvFacts("e@1", "single", True, 600, 100, 600, paired_rows=40)
    assert resolve("dpo", env=env).settings.max_examples == 40
    with pytest.raises(UserError, match="has no pairs") as caught:
        resolve("dpo", env=EnvFacts("e@1", "single", True, 600, 100, 600))
    assert 'select="pairs"' in str(caught.value.advice)


def test_the_recipe_of_grpo():
    found = resolve("grpo").settings
    assert (found.steps, found.prompts_per_step, found.group_size) == (300, 16, 8)
    assert (found.learning_rate, found.eval_every) == (6e-4, 38)
    short = resolve("grpo", {"steps": 60}).settings
    assert (short.learning_rate, short.eval_every) == (1e-3, 20)
    assert (found.lr_schedule, found.kl_coef, found.loss) == ("constant", 0.0, "dapo")
    assert (found.clip_low, found.clip_high, found.tis_cap) == (0.2, 0.28, 2.0)
    assert (found.temperature, found.top_p, found.max_turns) == (1.0, 1.0, 1)
    assert (found.max_tokens, found.max_length, found.sampler) == (16, 48, "torch")


@pytest.mark.parametrize(
    ("asked", "hardware", "vllm", "sampler"),
    [
        ("auto", CPU, True, "torch"),
        ("auto", GPU, True, "vllm"),
        ("auto", GPU, False, "torch"),
        (None, GPU, True, "vllm"),
        ("torch", GPU, True, "torch"),
        ("vllm", CPU, True, "vllm"),
    ],
)
def test_vllm_samples_where_it_is_asked_for_or_a_gpu_has_it(asked, hardware, vllm, sampler):
    given = {} if asked is None else {"sampler": asked}
    found = resolve("grpo", given, hardware=hardware, vllm=vllm)
    assert found.settings.sampler == sampler
    assert found.sources["sampler"] == ("hardware" if asked in (None, "auto") else "user")


def test_vllm_that_was_tried_in_vain_does_not_sample():
    found = resolve("grpo", hardware=GPU, vllm=True, vllm_fault="it hangs")
    assert found.settings.sampler == "torch" and "it hangs" in found.warnings[0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dr_grpo", ("group_center", 0.2, 0.28)),
        ("gspo", ("group_norm", 3e-4, 4e-4)),
        ("cispo", ("group_norm", 1.0, 4.0)),
    ],
)
def test_a_loss_brings_the_values_it_was_published_with(loss: str, expected: tuple):
    found = resolve("grpo", {"loss": loss}).settings
    assert (found.advantage, found.clip_low, found.clip_high) == expected


def test_a_small_set_gets_small_batches():
    env = EnvFacts("few@1", "single", True, 40, 20, 40, ROWS)
    assert resolve("sft", env=env).settings.batch_size == 5
    assert resolve("grpo", env=env).settings.prompts_per_step == 16
    tiny = EnvFacts("one@1", "single", True, 3, 3, 3, ROWS)
    assert resolve("sft", env=tiny).settings.batch_size == 1
    assert resolve("grpo", env=tiny).settings.prompts_per_step == 3


def test_max_tokens_is_twice_the_longest_reference_turn():
    def longest(tokens: int, model: ModelFacts = MODEL) -> tuple[int, str]:
        rows = (RowLengths(50, 50 + tokens, ((50, 50 + tokens),)),)
        found = resolve("grpo", env=EnvFacts("e@1", "single", True, 600, 9, 600, rows), model=model)
        return found.settings.max_tokens, found.sources["max_tokens"]

    large = ModelFacts(*[*list(MODEL.__dict__.values())[:10], 32768, "bfloat16", 1, True])
    assert longest(3) == (16, "recipe")
    assert longest(100) == (200, "recipe")
    assert longest(900, large) == (1024, "recipe")
    assert longest(3000, large) == (3000, "recipe")  # else no answer could be the reference
    assert longest(900) == (1024 - 50 - 1, "model")  # no more fits beside the prompt


def test_one_long_reference_answer_in_twenty_does_not_make_every_answer_long():
    large = ModelFacts(*[*list(MODEL.__dict__.values())[:10], 32768, "bfloat16", 1, True])

    def limit(long_answers: int) -> int:
        lengths = [3000] * long_answers + [700] * (100 - long_answers)
        rows = tuple(RowLengths(50, 50 + tokens, ((50, 50 + tokens),)) for tokens in lengths)
        env = EnvFacts("e@1", "single", True, 600, 9, 600, rows)
        return resolve("grpo", env=env, model=large).settings.max_tokens

    assert (limit(0), limit(5), limit(6)) == (1024, 1024, 3000)


def test_without_reference_answers_there_is_room_for_a_paragraph():
    env = EnvFacts("e@1", "single", True, 600, 9, 0, (RowLengths(50, 50),))
    assert resolve("grpo", env=env).settings.max_tokens == 256


def test_thinking_gets_room_to_think():
    model = ModelFacts(*[*list(MODEL.__dict__.values())[:10], 32768, "bfloat16", 1, True])
    assert resolve("grpo", {"thinking": True}, model=model).settings.max_tokens == 1024


def test_an_episode_of_many_turns_gets_room_for_them():
    env = EnvFacts("m@1", "multi", True, 600, 300, 600, ROWS)
    found = resolve("grpo", env=env).settings
    assert found.max_turns == 8
    assert found.max_length >= 20 + 8 * found.max_tokens
    assert resolve("grpo", {"max_turns": 3}, env=env).settings.max_turns == 3


def test_the_machine_decides_precision():
    assert resolve("sft").settings.precision == "float32"
    found = resolve("sft", hardware=GPU)
    assert (found.settings.precision, found.sources["precision"]) == ("bfloat16", "hardware")
    auto = resolve("sft", {"precision": "auto"}, hardware=GPU)
    assert (auto.settings.precision, auto.sources["precision"]) == ("bfloat16", "hardware")
    assert resolve("sft", {"precision": "float32"}, hardware=GPU).settings.precision == "float32"


def test_four_bits_are_computed_with_in_bfloat16_and_sampled_by_our_own_sampler():
    found = resolve("grpo", {"quantization": "nf4"})
    assert (found.settings.precision, found.settings.sampler) == ("bfloat16", "torch")
    on_gpu = resolve("grpo", {"quantization": "nf4"}, hardware=GPU, vllm=True)
    assert on_gpu.settings.sampler == "torch"
    error = refusal("grpo", {"quantization": "nf4", "sampler": "vllm"}, hardware=GPU, vllm=True)
    assert error.field == "settings.sampler"


def test_a_thinking_penalty_needs_thinking():
    thinker = replace(MODEL, thinking=True)
    given = {"thinking": True, "thinking_length_penalty": 0.1}
    assert resolve("grpo", given, model=thinker).settings.thinking_length_penalty == 0.1


def test_a_thinking_penalty_needs_no_switch_where_the_model_thinks_anyway():
    thinker = replace(MODEL, always_thinks=True)
    resolved = resolve("grpo", {"thinking_length_penalty": 0.1}, model=thinker)
    assert resolved.settings.thinking_length_penalty == 0.1


def test_sampling_ahead_on_the_device_that_trains_is_told_to_gain_nothing():
    said = resolve("grpo", {"async_sampling": True}).warnings
    assert len(said) == 1 and "nothing is gained" in said[0]
    elsewhere = {"async_sampling": True, "sampler": "vllm"}
    assert not resolve("grpo", elsewhere, hardware=GPU, vllm=True).warnings


def test_a_model_that_fills_the_gpu_recomputes_activations():
    large = ModelFacts(*[*list(MODEL.__dict__.values())[:12], 60 * GB, False])
    assert resolve("sft", hardware=GPU, model=large).settings.gradient_checkpointing
    assert not resolve("sft", hardware=GPU).settings.gradient_checkpointing
    assert not resolve("sft", model=large).settings.gradient_checkpointing


def test_a_continued_adapter_keeps_its_shape():
    inherited = AdapterFacts(8, 64, ("q_proj", "v_proj"))
    found = resolve("grpo", {}, inherited=inherited)
    names = ("lora_rank", "lora_alpha", "lora_targets")
    assert [getattr(found.settings, name) for name in names] == [8, 64, ["q_proj", "v_proj"]]
    assert {found.sources[name] for name in names} == {"parent run"}
    same = {"lora_rank": 8, "lora_targets": ["v_proj", "q_proj"]}
    assert resolve("grpo", same, inherited=inherited).settings == found.settings
    for name, value in (("lora_rank", 16), ("lora_alpha", 8), ("lora_targets", "mlp")):
        error = refusal("grpo", {name: value}, inherited=inherited)
        assert error.code == "SETTING_INVALID" and "Leave" in error.hint


def test_counts_above_what_there_is_are_cut_and_said():
    found = resolve("sft", {"eval_rows": 1000, "max_examples": 9999})
    assert (found.settings.eval_rows, found.settings.max_examples) == (300, 600)
    assert len(found.warnings) == 2


def test_doubtful_values_are_accepted_with_a_warning():
    said = resolve("sft", {"learning_rate": 0.05, "lora_rank": 256, "batch_size": 128}).warnings
    assert len(said) == 3
    for narrower in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        assert "tis_cap" in resolve("grpo", narrower).warnings[0]


def test_an_environment_the_algorithm_cannot_learn_from_is_refused():
    unscored = EnvFacts("d@1", "sft", False, 9, 9, 9, ROWS)
    assert 'algorithm="sft"' in refusal("grpo", {}, env=unscored).hint
    unanswered = EnvFacts("d@1", "single", True, 9, 9, 0, (RowLengths(5, 5),))
    assert 'algorithm="grpo"' in refusal("sft", {}, env=unanswered).hint
    assert "train" in refusal("grpo", {}, env=EnvFacts("d@1", "single", True, 0, 9, 0)).hint


def test_one_attempt_is_greedy_and_several_sample():
    assert resolve("evaluate").settings.temperature == 0
    assert resolve("evaluate", attempts=4).settings.temperature == 1
    assert resolve("evaluate", {"temperature": 0.7}, attempts=4).settings.temperature == 0.7
    for settings, attempts in (
        ({"temperature": 0.7}, 1),
        ({"top_p": 0.9}, 1),
        ({"top_k": 20}, 1),
        ({"min_p": 0.1}, 1),
        ({"temperature": 0}, 2),
    ):
        assert refusal("evaluate", settings, attempts=attempts).code == "SETTING_INVALID"


def test_training_settings_are_no_sampling_settings():
    error = refusal("evaluate", {"learning_rate": 1e-4})
    assert error.code == "SETTING_NOT_APPLICABLE" and "for training" in error.message


LARGE = ModelFacts(
    "LlamaForCausalLM", 4096, 32, 32, 8, 128, 14336, 128256, False, 8 * 10**9, 8192, "bfloat16", 1
)


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from([MODEL, LARGE]),
    st.integers(1, 900),
    st.integers(1, 900),
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.sampled_from(["single", "multi"]),
)
def test_defaults_always_stand_together(
    algorithm: str, model: ModelFacts, prompt: int, said: int, train: int, heldout: int, kind: str
):
    rows = (RowLengths(prompt, prompt + said, ((prompt, prompt + said),)),)
    env = EnvFacts("e@1", kind, True, train, heldout, train, rows, paired_rows=train)
    found = resolve(algorithm, model=model, env=env)
    assert not found.warnings or found.settings.lora_rank > model.hidden
    again = found.settings.model_dump(exclude={"epochs"})
    if kind == "single":
        again.pop("max_turns", None)
    if heldout == 0:
        assert again.pop("eval_rows") == 0
    resolved_again = resolve(algorithm, again, model=model, env=env).settings
    assert resolved_again.model_dump(exclude={"epochs"}) == found.settings.model_dump(
        exclude={"epochs"}
    )
    assert found.settings.max_length <= model.max_positions


def test_the_reference_names_every_setting_with_range_and_default():
    page = resolution.settings_reference()
    for algorithm in (*ALGORITHMS, "evaluate"):
        for name, field in SCHEMAS[algorithm].model_fields.items():
            line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4 and all(cells), line
            assert field.description
    assert "2 to 512, whole" in page
    assert len(page) < 12_000


@pytest.mark.parametrize(("length", "raise_it"), [({}, False), ({"max_length": 512}, True)])
def test_a_longer_max_length_is_only_advised_where_the_model_has_room(length, raise_it):
    with pytest.raises(UserError) as caught:
        resolve("grpo", {"max_tokens": 100_000} | length)
    assert ("raise max_length" in caught.value.hint) == raise_it


def test_a_run_of_dpo_is_evaluated_on_as_many_rows_as_can_measure_it():
    env = EnvFacts("p@1", "sft", False, 90, 400, 90, ROWS, paired_rows=90, heldout_pairs=12)
    assert resolve("dpo", env=env).settings.eval_rows == 12
    assert resolve("sft", env=env).settings.eval_rows == 400


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_preferences_are_refused_by_name_where_they_cannot_be_used(algorithm: str):
    pairs = EnvFacts("p@1", "preference", False, train_rows=9, heldout_rows=9, answered_rows=0)
    with pytest.raises(UserError, match=f"chosen and rejected answers.*{algorithm} cannot use"):
        env_checks.check_env(algorithm, pairs)
    env_checks.check_env("dpo", replace(pairs, paired_rows=9))
