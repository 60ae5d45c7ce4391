"""Checks that settings do not contradict each other, the model, the machine or the rows."""

from collections.abc import Mapping, Sequence

from engine.core.errors import UserError
from engine.core.hints import Change, Hint
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.settings import ROW_ALGORITHMS, USUAL_GRPO_KEEP, USUAL_KEEP, GivenSettings
from engine.settings.defaults import USER, SettingsDraft, inherited_settings

# Loss -> the clips that do not act on it: setting, why, next move. A request may not give them.
UNUSED_CLIPS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "cispo": [
        (
            "clip_low",
            "which clips its weight from above only",
            "Leave clip_low out; clip_high is the limit.",
        )
    ],
}


def check_sampling(user_settings: GivenSettings, attempts: int) -> None:
    """Raise UserError SETTING_INVALID for a sampling setting of the user that does not fit
    `attempts`, the answers per task of an evaluation.

    With a single attempt per task the answer is greedy, so temperature, top_p, top_k and min_p
    would have no effect. Several attempts at temperature 0 would all be equal.
    """
    temperature = user_settings.get("temperature")
    if attempts == 1:
        # These values are allowed, because with them a sampled answer would be greedy or unchanged.
        neutral_values = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}
        for name, neutral_value in neutral_values.items():
            if user_settings.get(name, neutral_value) != neutral_value:
                raise _invalid_setting(
                    name,
                    f"{name} = {user_settings[name]} with one attempt, which is greedy",
                    f"Leave {name} out, or ask for several attempts.",
                )
    elif temperature == 0:
        raise _invalid_setting(
            "temperature",
            f"temperature = 0 makes all {attempts} attempts equal",
            "Leave temperature out, or ask for one attempt.",
        )


def check_loss(user_settings: GivenSettings) -> None:
    """Raise UserError SETTING_NOT_APPLICABLE if the user gave a clip beside a loss on which it does
    not act (`UNUSED_CLIPS`)."""
    loss = user_settings.get("loss")
    for name, reason, next_move in UNUSED_CLIPS.get(str(loss), ()):
        if name in user_settings:
            raise UserError(
                "SETTING_NOT_APPLICABLE",
                f"{name} does not apply to loss = {loss}, {reason}",
                hint=next_move,
                field=f"settings.{name}",
            )


def check_sampler(user_settings: GivenSettings, *, has_vllm: bool) -> None:
    """Raise UserError SETTING_INVALID if the user chose vLLM as sampler but it is not set up.

    `has_vllm` is whether it is set up on this machine.
    """
    if user_settings.get("sampler") == "vllm" and not has_vllm:
        raise _invalid_setting(
            "sampler",
            'sampler = "vllm", but vLLM is not set up on this machine',
            "Run `honesmith setup --vllm` once, or leave sampler out.",
        )


def check_together(
    algorithm: str, draft: SettingsDraft, model: ModelFacts, env: EnvFacts | None
) -> None:
    """Raise UserError SETTING_INVALID or SETTING_NOT_APPLICABLE if the settings in `draft`, with
    their defaults, contradict each other, the model or the rows of the environment."""
    _check_lengths(draft.values, model)
    _check_thinking(draft.values, model)
    _check_quantization(draft.values)
    _check_keep(algorithm, draft.values)
    if algorithm != "evaluate":  # an evaluation has no batch
        _check_batch(algorithm, draft, env)


def _check_batch(algorithm: str, draft: SettingsDraft, env: EnvFacts | None) -> None:
    """Raise UserError SETTING_INVALID if a batch of `algorithm` is larger than the number of train
    rows."""
    values = draft.values
    batch_setting = "batch_size" if algorithm in ROW_ALGORITHMS else "prompts_per_step"
    # `max_examples` has been filled in: it is the number of train rows, or None if not known.
    batch, rows = values[batch_setting], values.get("max_examples")
    if rows is not None and batch > rows:
        limited_by = " (max_examples)" if draft.sources["max_examples"] == USER else ""
        of_env = f" of {env.env_id}" if env else ""
        raise _invalid_setting(
            batch_setting,
            f"{batch_setting} = {batch} is above the {rows} train rows{limited_by}{of_env}",
            f"Use at most {rows}.",
        )


def _check_lengths(values: GivenSettings, model: ModelFacts) -> None:
    """Raise UserError SETTING_INVALID unless max_tokens < max_length <= the model's context.

    `values` holds all settings, defaults included. SFT and DPO have no max_tokens, so only
    max_length is checked. An evaluation has no max_length, so max_tokens must be below the model's
    context.
    """
    context = model.max_positions
    length = values.get("max_length")
    tokens = values.get("max_tokens")
    if length is not None and length > context:
        raise _invalid_setting(
            "max_length",
            f"max_length = {length} is above the model's context of {context} tokens",
            f"Use at most {context}.",
        )
    if tokens is not None and tokens >= (length or context):
        limit = f"max_length = {length}" if length else f"the model's {context}"
        can_raise_length = length is not None and length < context
        hint = "Lower max_tokens or raise max_length." if can_raise_length else "Lower max_tokens."
        message = f"max_tokens = {tokens} leaves no room for a prompt within {limit}"
        raise _invalid_setting("max_tokens", message, hint)


def _check_thinking(values: GivenSettings, model: ModelFacts) -> None:
    """Check the settings about thinking (a hidden part of the answer before the visible one).

    Raises UserError SETTING_INVALID if `thinking` is on but the model's template cannot switch it
    on, SETTING_NOT_APPLICABLE if a penalty on thoughts is given but the model does not think.
    """
    if values.get("thinking") is True and not model.thinking:
        raise _invalid_setting(
            "thinking",
            "thinking = true, but the model's chat template has no think block to switch on",
            "Leave thinking out, or use a model with a thinking template.",
        )
    is_thinking = values.get("thinking") or model.always_thinks
    if values.get("thinking_length_penalty") and not is_thinking:
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"thinking_length_penalty = {values['thinking_length_penalty']:g} without thinking: "
            "there is no think block to measure",
            hint="Set thinking = true, or leave thinking_length_penalty out.",
            field="settings.thinking_length_penalty",
        )


def _check_quantization(values: GivenSettings) -> None:
    """Raise UserError SETTING_INVALID if, among all settings `values`, the quantization is nf4 and
    the precision is float32 or the sampler is vLLM."""
    if values.get("quantization") == "nf4" and values.get("precision") == "float32":
        raise _invalid_setting(
            "precision",
            'precision = "float32" with quantization = "nf4", which computes in bfloat16',
            "Leave precision out, or leave quantization out.",
        )
    if values.get("quantization") == "nf4" and values.get("sampler") == "vllm":
        raise _invalid_setting(
            "sampler",
            'sampler = "vllm" with quantization = "nf4": vLLM would sample from other weights than '
            "are trained",
            "Leave sampler out.",
        )


def _check_keep(algorithm: str, values: GivenSettings) -> None:
    """Check the settings about replayed rows (rows of earlier skills that are trained on again).

    Raises UserError SETTING_NOT_APPLICABLE if `keep_env` names the rows but their share `keep` is
    0, or if `keep_answers` is given without `keep_env`.
    """
    if values.get("keep_env") and not values["keep"]:
        usual = USUAL_GRPO_KEEP if algorithm == "grpo" else USUAL_KEEP
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"keep_env = {values['keep_env']!r} without keep: no batch has a share of its rows",
            hint=Hint(
                f"Set keep = {usual:g}, or leave keep_env out.",
                change=Change(settings={"keep": usual}),
            ),
            field="settings.keep_env",
        )
    if values.get("keep_answers") == "own" and not values.get("keep_env"):
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            "keep_answers without keep_env: practice questions are always answered by the model",
            hint=Hint("Leave keep_answers out.", change=Change(without=("keep_answers",))),
            field="settings.keep_answers",
        )


def _invalid_setting(name: str, message: str, hint: str) -> UserError:
    """Make the error SETTING_INVALID for the setting `name`."""
    return UserError("SETTING_INVALID", message, hint=hint, field=f"settings.{name}")


def check_inherited(user_settings: GivenSettings, inherited: AdapterFacts) -> None:
    """Raise UserError SETTING_INVALID if a setting contradicts the shape of the continued adapter.

    `inherited` is the shape of the adapter that the run continues: rank, alpha and targets. The
    order of the targets does not matter.
    """
    for name, current in inherited_settings(inherited).items():
        requested = user_settings.get(name)  # None if the user left it out
        if isinstance(requested, list):  # the targets
            is_same = set(requested) == set(current)
        else:
            is_same = requested is None or requested == current
        if not is_same:
            raise UserError(
                "SETTING_INVALID",
                f"{name} = {requested} differs from the {current} of the run that is continued",
                hint=f"Leave {name} out, or start from the base model.",
                field=f"settings.{name}",
            )
