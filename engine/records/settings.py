"""The schema of settings: names, types, ranges and what each does.

Every setting here is applied by a worker. The classes are the complete settings of a run;
`given_schema` returns the schema of what a user may give, in which every setting is optional.
engine/settings/defaults.py chooses the values of settings that are left out, by the rule that each
field names. engine/settings/resolution.py checks and refuses given values.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Optional, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue, create_model
from pydantic.fields import Field, FieldInfo

ALGORITHMS = ("sft", "dpo", "grpo", "distill")
PROMPT = "prompt"  # it trains no weights: it searches for a better prompt
ROW_ALGORITHMS = ("sft", "dpo")  # they learn from existing rows
REPLAYING_ALGORITHMS = ("sft", "grpo")  # they have the setting `keep`
SAMPLING_ALGORITHMS = ("grpo", "distill")  # they learn from answers that they sample
# With stop_early=heldout this many evaluations in a row without progress end a run.
STOP_EARLY_PATIENCE = 3
# Setting -> value, as a client gave them: any may be left out, and none has been checked yet.
GivenSettings = Mapping[str, Any]
# The projections of a layer that can have an adapter, by the names of most model families.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
# These, and their counterparts in other families: several projections in one, mixers without
# softmax, latent attention, MLPs without a gate.
ProjectionName = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "out_proj",
    "in_proj",
    "in_proj_qkv",
    "in_proj_qkvz",
    "in_proj_z",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "query_key_value",
    "dense",
    "gate_up_proj",
    "w1",
    "w2",
    "w3",
    "fc1",
    "fc2",
    "dense_h_to_4h",
    "dense_4h_to_h",
]
KNOWN_PROJECTIONS: tuple[str, ...] = get_args(ProjectionName)
# The projections of an MLP; all others belong to attention or to what replaces it.
ANY_MLP = (*MLP, "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h")

_TARGET_GROUPS = {
    "all-linear": list(PROJECTIONS),
    "all_linear": list(PROJECTIONS),
    "attention": list(ATTENTION),
    "mlp": list(MLP),
}


MAX_RANK = 512  # the highest rank of an adapter that is trained or served
MAX_TOP_K = 1_000_000  # more than any vocabulary has


def _setting(about: str, rule: str, *, given_from: int | None = None, **limits: Any) -> Any:
    """Make the pydantic field of one setting.

    Args:
        about: what the setting does, for the reference page.
        rule: how the value is chosen if a user leaves the setting out, for the reference page.
        given_from: the lowest value that a user may give, if it is above the field's lower limit:
            a value that is filled in may be lower. None if the limit holds for users too.
        limits: limits of the value, as pydantic's Field names them, such as `ge`.
    """
    extra: dict[str, JsonValue] = {"rule": rule}
    if given_from is not None:
        extra["given_from"] = given_from
    return Field(description=about, json_schema_extra=extra, **limits)


def _expand_target_group(value: Any) -> Any:
    """Return the projections that a group such as "attention" means in most model families.

    If a model has other names for them, engine/settings/lora_targets.py replaces them later. Any
    value that is no group is returned unchanged, and validation checks it.
    """
    if not isinstance(value, str):
        return value
    return _TARGET_GROUPS.get(value, value)


def _refuse_repeats(value: list[str]) -> list[str]:
    """Return the list of projections unchanged. Raises ValueError if a projection is named
    twice."""
    if len(set(value)) < len(value):
        raise ValueError("a projection is named twice")
    return value


Targets = Annotated[
    list[ProjectionName],
    BeforeValidator(_expand_target_group),
    AfterValidator(_refuse_repeats),
]
Reasoning = Literal["keep", "drop", "require"]
# The default share of replayed rows in SFT and in GRPO, and the most steps of a run that forgets
# so little that it replays none; measured in benchmarks/RESULTS.md.
USUAL_KEEP, USUAL_GRPO_KEEP, HARMLESS_STEPS = 0.35, 0.1, 10
StopText = Annotated[str, Field(min_length=1, max_length=64)]
TeacherName = Annotated[str, Field(min_length=1, max_length=4096)]
TeacherText = Annotated[str, Field(max_length=200)]
EndpointName = Annotated[str, Field(min_length=1, max_length=200)]
EnvName = Annotated[str, Field(max_length=200)]
# "" or a variable whose name begins with TEACHER_, so that a caller cannot make the server send any
# other secret to a URL.
TEACHER_KEY_PATTERN = r"^(TEACHER_[A-Z0-9_]{1,60})?$"
COMPUTE_PATTERN = r"^(local|(ssh|slurm|ray|sky):[A-Za-z0-9][A-Za-z0-9._-]{0,59})$"
TeacherKeyName = Annotated[str, Field(pattern=TEACHER_KEY_PATTERN)]


class Settings(BaseModel):
    """The base class of all settings: unknown names and values of another type are refused."""

    # Built when one is first used (`defer_build`): a server starts sooner.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, defer_build=True
    )


def _top_k() -> Any:
    """Make the field of top_k, which is the same for training and for evaluations."""
    return _setting(
        "Only the so many likeliest tokens are sampled from; 0: all.",
        rule="0",
        default=0,
        ge=0,
        le=MAX_TOP_K,
    )


def _min_p() -> Any:
    """Make the field of min_p, which is the same for training and for evaluations."""
    return _setting(
        "Only tokens of at least this share of the likeliest's probability are sampled; 0: all.",
        rule="0",
        default=0.0,
        ge=0,
        lt=1,
    )


def _keep(description: str, usual: float) -> Any:
    """Make the field of `keep` (the share of replayed rows) for one algorithm; `description` says
    what it does there.

    `usual` is the default in runs of more than `HARMLESS_STEPS` steps.
    """
    return _setting(
        description,
        f"{usual:g} for more than {HARMLESS_STEPS} steps, else 0",
        default=0.0,
        ge=0,
        le=0.5,
    )


class AnswerSettings(Settings):
    """How long an answer may get."""

    max_tokens: int = _setting(
        "Longest assistant turn in tokens.",
        "twice the longest reference turn, from 16 to 1024, or what 19 in 20 need; 256 without one",
        ge=1,
    )
    stop: list[StopText] = _setting(
        "Texts that end a turn, beside the end-of-turn token.", "none", max_length=8
    )
    thinking: bool = _setting("Let the model fill its think block.", "false")
    max_turns: int = _setting(
        "Most assistant turns of an episode (multi-turn environments).", "8", ge=1, le=64
    )


class ScoringSettings(Settings):
    """How answers are scored."""

    score_workers: int = _setting(
        "Env processes that score at once.",
        "1 for scores under 0.02 s, else the cores (with network x 4), at most 32",
        default=1,
        ge=1,
        le=64,
    )
    max_judge_calls: int | None = _setting(
        "Most requests to judges (envs.judge); more end the run.", "no limit", default=None, ge=1
    )
    max_judge_cost: float | None = _setting(
        "Most money for them, by the judges' prices.", "no limit", default=None, gt=0
    )


class CommonSettings(ScoringSettings):
    """Settings of every trainer."""

    learning_rate: float = _setting(
        "Peak step size of AdamW on the adapter.",
        "from hidden size (grpo: and steps); grpo lower, dpo lowest",
        ge=1e-7,
        le=1e-1,
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = _setting(
        "How the learning rate goes down to 0 after the warm-up.",
        "cosine; grpo constant",
    )
    warmup_ratio: float = _setting(
        "Share of all steps in which the learning rate rises from 0.",
        "sft 0.03, dpo 0.1, grpo 0",
        ge=0,
        lt=1,
    )
    weight_decay: float = _setting("Decoupled weight decay of AdamW.", "0", ge=0, le=1)
    max_grad_norm: float = _setting(
        "The gradient is scaled down to this norm; 0 leaves it as it is.", "1", ge=0, le=1000
    )
    lora_rank: int = _setting("Rank of the adapter.", "16", ge=1, le=MAX_RANK)
    lora_alpha: int = _setting(
        "The adapter's output is scaled by lora_alpha / lora_rank.", "32", ge=1, le=4096
    )
    lora_dropout: float = _setting("Dropout before the adapter while training.", "0", ge=0, le=0.5)
    lora_targets: Targets = _setting(
        "Projections that get an adapter.",
        "all-linear",
        min_length=1,
        max_length=len(KNOWN_PROJECTIONS),
    )
    max_length: int = _setting(
        "Longest sequence in tokens, prompt included. SFT and DPO cut rows there; GRPO drops "
        "tasks whose prompt leaves no room for max_tokens.",
        "what the rows need, at most the model's context",
        ge=8,
    )
    seed: int = _setting(
        "Decides the order of rows, sampling and the adapter's start.", "0", ge=0, le=2**31 - 1
    )
    eval_every: int = _setting(
        "Steps between evaluations on held-out rows; step 0 and the last have one.",
        "sft an eighth of the steps, dpo a fifth, grpo some 40",
        ge=1,
    )
    eval_rows: int = _setting(
        "Held-out rows used, the same in every run: one half picks the best checkpoint, the other "
        "is reported. With dev rows as many of those pick, and all held-out are reported.",
        "all, at most 400",
        ge=0,
        given_from=1,
    )
    skill_rows: int = _setting(
        "Most questions of each battery of skills, asked before and after; 0: none.",
        "200",
        default=200,
        ge=0,
        le=10_000,
    )
    save_every: int = _setting("Steps between checkpoints.", "eval_every", ge=1)
    keep_checkpoints: int = _setting(
        "Newest checkpoints kept, beside the best one.", "3", ge=1, le=1000
    )
    max_examples: int | None = _setting(
        "Train on a seeded sample of this many train rows.", "all train rows", ge=1
    )
    accept_reward_risk: bool = _setting(
        "Train although the environment's reward audit fails; the verdict says so.", "false"
    )
    gradient_checkpointing: bool = _setting(
        "Recompute activations in the backward pass: less memory, a third slower.",
        "true where the weights take over a third of a GPU",
    )
    precision: Literal["auto", "float32", "bfloat16"] = _setting(
        "Number format of the frozen weights and the arithmetic; the adapter is always float32.",
        "auto: bfloat16 on a GPU that has it, else float32",
    )
    quantization: Literal["none", "nf4"] = _setting(
        "nf4: keep the frozen projections in 4 bits: a quarter of their memory; slower, inexact.",
        "none",
    )
    gpus: int = _setting(
        "Devices that share every batch; with async_sampling half of them only sample.",
        "as many of the machine's GPUs as pay; 1 on a CPU",
        default=1,
        ge=1,
        le=64,
    )
    compute: str = _setting(
        'Where it runs, such as "ssh:box", of `honesmith hosts`.',
        "local",
        default="local",
        pattern=COMPUTE_PATTERN,
    )
    shard_base: bool = _setting(
        "Cut the frozen layers over the devices that train (FSDP2), where none holds all; slower.",
        "true where the model fits only so",
        default=False,
    )
    stop_early: Literal["none", "heldout", "alert"] = _setting(
        "heldout: end the run once three evaluations in a row brought neither a better score nor, "
        "unless every task is solved, a clearly smaller loss; alert: end it, with checkpoint and "
        "verdict, at the first alert.",
        "none; sft with held-out tasks heldout",
    )


class RowSettings(CommonSettings):
    """Settings of training on rows that exist: SFT, DPO."""

    epochs: int | None = _setting(
        "Passes over the train rows.",
        "3 to 20, for 450 updates of a small model, 60 of a large one; dpo 1",
        ge=1,
        le=1000,
    )
    steps: int = _setting(
        "Optimizer steps; instead of epochs.", "epochs x rows / batch_size", ge=1, le=1_000_000
    )
    batch_size: int = _setting(
        "Rows per optimizer step (DPO: pairs).",
        "8 to 32 by the rows, at most an eighth of them; dpo 32",
        ge=1,
    )


class RehearsalSettings(Settings):
    """What SFT and GRPO do to keep other skills; `keep` has a default of its own in each."""

    keep_env: EnvName = _setting(
        "Environment whose train rows are replayed as often; one that an exam asks is left out.",
        "none",
        default="",
    )
    keep_answers: Literal["reference", "own"] = _setting(
        "What is replayed of keep_env: its answers, or the model's own right ones (all, if it does "
        "not score).",
        "reference",
        default="reference",
    )
    vary_wording: float = _setting(
        "Share of rows seen in other words, each time anew.", "0", default=0.0, ge=0, le=1
    )


class SFTSettings(RowSettings, RehearsalSettings):
    """Settings of supervised fine-tuning."""

    packing: bool = _setting(
        "Rows of a step share forward passes; false: one row each, the least memory.", "true"
    )
    loss_on: Literal["assistant", "last", "all"] = _setting(
        "Tokens that carry loss: every assistant turn, the last one, or all.", "assistant"
    )
    thinking: Reasoning = _setting(
        "Reasoning in the rows: keep trains it where a turn has some, drop leaves it out, require "
        "leaves out rows with a turn that has none, and has the model think when it is asked.",
        "require where every answer has reasoning, else keep",
        default="keep",
    )
    keep: float = _keep(
        "Share of each batch that are replayed rows, on top of batch_size, so that skills stay: "
        "the model's own right answers before the first step to practice questions.",
        USUAL_KEEP,
    )


class DPOSettings(RowSettings):
    """Settings of direct preference optimisation, on pairs of a better and a worse answer."""

    beta: float = _setting(
        "How firmly the policy is held to where it started: the larger, the less it may move.",
        "0.1",
        gt=0,
        le=10,
    )
    sft_weight: float = _setting(
        "Weight of the better answers' own loss per token, which keeps them likely.",
        "0",
        default=0.0,
        ge=0,
        le=10,
    )


class RolloutSettings(AnswerSettings, CommonSettings):
    """Settings of training on completions that the policy samples: GRPO, distillation."""

    steps: int = _setting("Steps.", "grpo 60 to 300, distill 60", ge=1, le=1_000_000)
    prompts_per_step: int = _setting("Tasks per step.", "16, at most the train rows", ge=1)
    tis_cap: float = _setting(
        "Largest weight that corrects for the sampler's own probabilities.", "2", ge=1, le=100
    )
    max_reward_errors: float = _setting(
        "The run fails when a larger share of its scores raised or hung, from 32 of them on.",
        "0.2",
        ge=0,
        le=1,
    )
    sampler: Literal["auto", "torch", "vllm"] = _setting(
        "Who samples: our own sampler, or vLLM where `honesmith setup --vllm` built it.",
        "auto: vllm on a GPU where it is set up, else torch",
    )


class GRPOSettings(RolloutSettings, RehearsalSettings):
    """Settings of reinforcement learning with groups of completions."""

    group_size: int = _setting("Completions of each task.", "8", ge=2, le=512)
    temperature: float = _setting("Sampling temperature.", "1", gt=0, le=2)
    top_p: float = _setting("Share of probability sampled from.", "1", gt=0, le=1)
    top_k: int = _top_k()
    min_p: float = _min_p()
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = _setting(
        "How token losses are clipped and averaged.", "dapo"
    )
    advantage: Literal["group_norm", "group_center", "rloo"] = _setting(
        "Reward minus the group's mean: divided by its deviation, as it is, or leave-one-out.",
        "group_norm; group_center for dr_grpo",
    )
    clip_low: float = _setting(
        "The probability ratio is clipped below 1 - clip_low; not for cispo.",
        "0.2; 0.0003 for gspo",
        gt=0,
        le=1,
    )
    clip_high: float = _setting(
        "The probability ratio is clipped above 1 + clip_high.",
        "0.28; 0.0004 for gspo, 4 for cispo",
        gt=0,
        le=10,
    )
    kl_coef: float = _setting("Weight of the divergence from the starting point.", "0", ge=0, le=10)
    updates_per_batch: int = _setting(
        "Optimizer steps on each batch of completions.", "1", ge=1, le=16
    )
    resample_uniform: int = _setting(
        "Most rounds of a step in which groups of equal rewards are replaced by fresh tasks.",
        "0",
        ge=0,
        le=8,
    )
    async_sampling: bool = _setting(
        "Sample the next batch, one update behind, beside training: with gpus above 1 on others.",
        "false",
    )
    curriculum: Literal["none", "rollouts"] = _setting(
        "rollouts: draw tasks by what their groups earned lately, those whose answers differ "
        "most often; none: every task in turn, shuffled.",
        "none",
        default="none",
    )
    thinking_length_penalty: float = _setting(
        "Taken off the reward: this, times the share of max_tokens spent thinking.",
        "0",
        ge=0,
        le=1,
    )
    keep: float = _keep(
        "Share of a step's rows that are replayed, as in SFT; their mean loss is added.",
        USUAL_GRPO_KEEP,
    )


class DistillSettings(RolloutSettings):
    """Settings of on-policy distillation: the policy samples, a teacher rates every token."""

    teacher: TeacherName = _setting(
        "The model to become like, with the same tokenizer: whatever `model` takes, or the URL (or "
        "`openai:NAME`) of an OpenAI-compatible server with log-probabilities of prompts.",
        "none: it must be given",
    )
    teacher_model: TeacherText = _setting("Of a URL: the name of the model there.", "none")
    teacher_key_env: TeacherKeyName = _setting(
        "Of a URL: the variable of the server's environment with its key.", "none"
    )
    group_size: int = _setting("Completions of each task.", "4", ge=1, le=512)


class SamplingSettings(AnswerSettings, ScoringSettings):
    """Settings of an evaluation: how a model is asked."""

    temperature: float = _setting(
        "Sampling temperature; one attempt is greedy.", "0 for one attempt, else 1", ge=0, le=2
    )
    top_p: float = _setting("Share of probability sampled from.", "1", gt=0, le=1)
    top_k: int = _top_k()
    min_p: float = _min_p()
    seed: int = _setting("Decides the samples of several attempts.", "0", ge=0, le=2**31 - 1)
    max_calls: int | None = _setting(
        "Most turns of openai: models; the run then ends.",
        "no limit",
        default=None,
        ge=1,
    )
    max_cost: float | None = _setting("Most money for them.", "no limit", default=None, gt=0)


class EvaluationSettings(SamplingSettings):
    """Settings of an evaluation as its worker reads them."""

    max_length: int = _setting("Longest sequence in tokens.", "the model's context", ge=1)


class PromptSettings(AnswerSettings, ScoringSettings):
    """Settings of the search for a better prompt, in which no weight is trained."""

    reflection: EndpointName = _setting(
        "Endpoint of config.toml that writes prompts.",
        "must be given",
    )
    max_rollouts: int = _setting(
        "Most answers of the model but for the exam.",
        "4 x select_rows + 24 x prompts_per_step",
        ge=3,
    )
    max_calls: int = _setting("Most requests to the endpoint.", "20", ge=1, le=10_000)
    max_cost: float | None = _setting("Most money for models behind a URL.", "no limit", gt=0)
    reflection_tokens: int = _setting("Longest answer of the endpoint.", "2048", ge=64, le=65_536)
    prompts_per_step: int = _setting(
        "Train tasks behind each new prompt.",
        "4, at most half of the train rows",
        ge=1,
        le=64,
    )
    select_rows: int = _setting(
        "Rows that choose: dev, else train rows kept from the endpoint.",
        "30, at most half of the train rows",
        ge=1,
    )
    tool_texts: bool = _setting("Rewrite tools' texts too.", "true where the environment has tools")
    eval_rows: int = _setting(
        "Held-out rows, asked with both prompts.",
        "all, at most 400",
        ge=0,
        given_from=1,
    )
    max_length: int = _setting("Longest sequence in tokens.", "the model's context", ge=8)
    seed: int = _setting("Decides which rows are drawn.", "0", ge=0, le=2**31 - 1)
    accept_reward_risk: bool = _setting("Search although the reward audit fails.", "false")


TrainSettings = SFTSettings | DPOSettings | GRPOSettings | DistillSettings

TRAINERS: dict[str, type[TrainSettings]] = {
    "sft": SFTSettings,
    "dpo": DPOSettings,
    "grpo": GRPOSettings,
    "distill": DistillSettings,
}
SCHEMAS: dict[str, type[Settings]] = {**TRAINERS, "evaluate": SamplingSettings}
SCHEMAS[PROMPT] = PromptSettings


def _with_optional_fields(schema: type[Settings]) -> type[Settings]:
    """Derive the schema of the settings that a user may give.

    It has the fields of `schema` with their limits, but each is optional (None if left out).
    """
    fields: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        field_infos = [field]
        least = lowest_given(field)
        if least is not None:  # the lower limit for users is above that of the field
            field_infos.append(Field(ge=least))
        optional_field = FieldInfo.merge_field_infos(*field_infos, default=None)
        # Not `X | None`: the annotation need not be a class, and only Optional takes any.
        fields[name] = (Optional[field.annotation], optional_field)  # noqa: UP045
    return create_model(f"Given{schema.__name__}", __base__=Settings, **fields)


def lowest_given(field: FieldInfo) -> int | None:
    """Return the lowest value of a setting that a user may give (`given_from` of `_setting`).

    Returns None if the field's own lower limit holds for users too.
    """
    extra = field.json_schema_extra
    value = extra.get("given_from") if isinstance(extra, dict) else None
    return value if isinstance(value, int) else None


@cache  # each is built when it is first used, so that a server starts sooner
def given_schema(algorithm: str) -> type[Settings]:
    """Return the schema of the settings that a user may give for a name in `SCHEMAS`."""
    return _with_optional_fields(SCHEMAS[algorithm])
