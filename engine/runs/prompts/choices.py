"""Every setting of a search for a prompt, with its source: those given, and defaults."""

from engine.core.hardware import Hardware
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.models.model_files import ModelFacts
from engine.records.settings import PROMPT, GivenSettings, PromptSettings, SamplingSettings
from engine.settings import resolution
from engine.settings.defaults import EVAL_ROWS, MODEL, USER, Filled

_SELECT_ROWS, _PROMPTS_PER_STEP, _CALLS, _REFLECTION_TOKENS = 30, 4, 20, 2048
_OF_ENDPOINT = {"max_calls", "max_cost"}  # caps of the endpoint, not of the model that answers
# The tasks that choose are answered with the first prompt and with about three better ones; in the
# other rounds the few tasks of a round are answered twice.
_FULL_ANSWERS, _ROUNDS = 4, 12


def resolve_settings(
    given: GivenSettings, model: ModelFacts, env: EnvRecord, facts: EnvFacts, hardware: Hardware
) -> tuple[PromptSettings, dict[str, str]]:
    """Choose all settings; returns them, and the source of each (user, recipe, model, hardware).

    Raises UserError SETTING_*.
    """
    values = resolution.validate(PROMPT, given)
    shared = set(SamplingSettings.model_fields) & set(PromptSettings.model_fields) - _OF_ENDPOINT
    sampling = resolution.resolve_sampling(
        {name: values[name] for name in shared if name in values},
        model=model,
        env=facts,
        attempts=1,
        hardware=hardware,
    )
    filled = Filled(values)
    for name in shared:
        filled.default(name, getattr(sampling.settings, name), sampling.sources[name])
    _search_defaults(filled, env)
    filled.default("max_length", model.max_positions, MODEL)
    filled.default("accept_reward_risk", False)
    settings = PromptSettings.model_validate(filled.values)
    sources = {name: filled.sources.get(name, USER) for name in PromptSettings.model_fields}
    return settings, sources


def _search_defaults(filled: Filled, env: EnvRecord) -> None:
    """Set how much is searched, and by which rows."""
    train, dev, heldout = (env.rows.get(side, 0) for side in ("train", "dev", "heldout"))
    filled.lower_to("select_rows", dev or train // 2, "there are no more rows to choose by")
    filled.default("select_rows", max(1, min(_SELECT_ROWS, dev or train // 2)))
    reflected = train if dev else train - filled["select_rows"]
    filled.lower_to("prompts_per_step", max(1, reflected), "there are no more train rows")
    filled.default("prompts_per_step", max(1, min(_PROMPTS_PER_STEP, reflected)))
    rollouts = _FULL_ANSWERS * filled["select_rows"] + 2 * _ROUNDS * filled["prompts_per_step"]
    filled.default("max_rollouts", rollouts)
    filled.default("max_calls", _CALLS)
    filled.default("max_cost", None)
    filled.default("reflection_tokens", _REFLECTION_TOKENS)
    filled.default("tool_texts", bool(env.tools))
    filled.lower_to("eval_rows", heldout, "the environment has no more held-out rows")
    filled.default("eval_rows", min(EVAL_ROWS, heldout))
