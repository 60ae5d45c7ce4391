"""Every setting of a search for a prompt, with its source: those given, and defaults."""

from engine.core.hardware import Hardware
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.models.model_files import ModelFacts
from engine.records.settings import PROMPT, GivenSettings, PromptSettings, SamplingSettings
from engine.settings import resolution
from engine.settings.defaults import EVAL_ROWS, MODEL, USER, SettingsDraft

_SELECT_ROWS, _PROMPTS_PER_STEP, _CALLS, _REFLECTION_TOKENS = 30, 4, 20, 2048
_OF_ENDPOINT = {"max_calls", "max_cost"}  # caps of the endpoint, not of the model that answers
# The tasks that choose are answered with the first prompt and with about three better ones; in the
# other rounds the few tasks of a round are answered twice.
_FULL_ANSWERS, _ROUNDS = 4, 12


def resolve_settings(
    given: GivenSettings, model: ModelFacts, env: EnvRecord, facts: EnvFacts, hardware: Hardware
) -> tuple[PromptSettings, dict[str, str]]:
    """Choose every setting of a search for a prompt.

    Args:
        given: the settings that the user gave, by name.
        model: the facts about the model that answers.
        env: the environment version.
        facts: the measured lengths of its tasks.
        hardware: this machine.

    Returns the settings, and for each the source of its value: user, recipe, model or hardware.
    Raises UserError SETTING_* if a given setting does not exist or has an unusable value.
    """
    values = resolution.validate(PROMPT, given)
    # The settings that a search has in common with every other run that samples.
    settings_of_search = set(PromptSettings.model_fields) - _OF_ENDPOINT
    shared = set(SamplingSettings.model_fields) & settings_of_search
    given_sampling = {name: values[name] for name in shared if name in values}
    sampling = resolution.resolve_sampling(
        given_sampling,
        model=model,
        env=facts,
        attempts=1,
        hardware=hardware,
    )
    draft = SettingsDraft(values)
    for name in shared:
        draft.set_default(name, getattr(sampling.settings, name), sampling.sources[name])
    _fill_search_settings(draft, env)
    draft.set_default("max_length", model.max_positions, MODEL)
    draft.set_default("accept_reward_risk", False)
    settings = PromptSettings.model_validate(draft.values)
    sources = {name: draft.sources.get(name, USER) for name in PromptSettings.model_fields}
    return settings, sources


def _fill_search_settings(draft: SettingsDraft, env: EnvRecord) -> None:
    """Fill in, where the user gave no value, how long the search goes on and on how many rows.

    `select_rows` is the number of tasks that choose among prompts: dev tasks if there are any, else
    a part of the train tasks. `prompts_per_step` is the number of train tasks of one round.
    """
    # How many tasks each split of the environment has.
    train, dev, heldout = (env.rows.get(split, 0) for split in ("train", "dev", "heldout"))
    choosing_rows = dev or train // 2
    draft.lower_to("select_rows", choosing_rows, "there are no more rows to choose by")
    draft.set_default("select_rows", max(1, min(_SELECT_ROWS, choosing_rows)))
    reflected_rows = train if dev else train - draft["select_rows"]
    draft.lower_to("prompts_per_step", max(1, reflected_rows), "there are no more train rows")
    draft.set_default("prompts_per_step", max(1, min(_PROMPTS_PER_STEP, reflected_rows)))
    # A round answers its tasks twice: with the old and with the new prompt.
    rollouts_of_rounds = 2 * _ROUNDS * draft["prompts_per_step"]
    draft.set_default("max_rollouts", _FULL_ANSWERS * draft["select_rows"] + rollouts_of_rounds)
    draft.set_default("max_calls", _CALLS)
    draft.set_default("max_cost", None)
    draft.set_default("reflection_tokens", _REFLECTION_TOKENS)
    draft.set_default("tool_texts", bool(env.tools))
    draft.lower_to("eval_rows", heldout, "the environment has no more held-out rows")
    draft.set_default("eval_rows", min(EVAL_ROWS, heldout))
