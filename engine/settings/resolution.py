"""Checks settings and fills in their defaults, for tool arguments and TOML files alike.

Nothing is ignored: a setting that does not exist, that belongs to the other algorithm, or whose
value cannot work is refused, with what to write instead. The schema is engine/records/settings.py,
the defaults are in engine/settings/defaults.py. Each resolved value has a source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import ValidationError

from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.core.hints import Change, Hint
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.settings import (
    ALGORITHMS,
    PROMPT,
    SCHEMAS,
    TRAINERS,
    AnswerSettings,
    CommonSettings,
    DistillSettings,
    DPOSettings,
    GivenSettings,
    GRPOSettings,
    PromptSettings,
    Reasoning,
    RolloutSettings,
    RowSettings,
    SamplingSettings,
    ScoringSettings,
    Settings,
    SFTSettings,
    TrainSettings,
    given_schema,
)
from engine.settings import aliases, defaults, env_checks, setting_checks, teachers
from engine.settings.lora_targets import with_own_targets
from engine.settings.value_errors import invalid_values_error, range_in_brief

# Limits on how much of the user's input an error message repeats.
_EXPLAINED = 4  # the most settings that are explained one by one
_MOST_NAMES, _NAME_CHARS = 6, 40  # the most names in a list, and characters of a name
_HINT_CHARS = 600  # the most characters of a hint
SETTINGS_PAGES = (*ALGORITHMS, PROMPT, "evaluate")  # each has a page of its settings
_INTRODUCTION = (
    "# Settings\n\nEvery setting may be left out; `dry_run` shows the value chosen and its source. "
    "A name that is not here is refused."
)


@dataclass(frozen=True)
class Resolved:
    """Every setting of a training run with its value and its source.

    Attributes:
        sources: for each name in `settings`: user, recipe, model, hardware or parent run.
    """

    algorithm: str
    settings: TrainSettings
    sources: dict[str, str]
    warnings: list[str]


@dataclass(frozen=True)
class ResolvedSampling:
    """Every setting of an evaluation with its value and its source, as in `Resolved`.

    An evaluation has no `max_length`, because the model's context is the limit.
    """

    settings: SamplingSettings
    sources: dict[str, str]
    warnings: list[str]


def is_switched_on(given: GivenSettings, name: Literal["thinking", "accept_reward_risk"]) -> bool:
    """Return whether the setting `name` is exactly True in `given`, the settings that a caller gave
    and that are not checked yet."""
    return given.get(name) is True


def counted_thinking(algorithm: str, given_settings: GivenSettings) -> bool | Reasoning:
    """Return the value of the setting `thinking` with which the tokens of an environment's rows are
    counted for a run of `algorithm`.

    `given_settings` holds the settings before they are checked. A wrong value counts as left out
    here, because it is refused later.
    """
    if algorithm == "dpo":
        return "keep"  # DPO has no such setting: it compares the answers as they are
    if algorithm != "sft":
        return is_switched_on(given_settings, "thinking")
    for word in get_args(Reasoning):  # the words that SFT's setting takes
        if word == given_settings.get("thinking"):
            return word
    return "keep"


def check_algorithm(algorithm: str) -> None:
    """Raise UserError BAD_ARGUMENT unless `algorithm` is one of ALGORITHMS."""
    if algorithm in ALGORITHMS:
        return
    if algorithm == PROMPT:
        raise UserError(
            "BAD_ARGUMENT",
            "prompt makes no model, so it is no step of a plan",
            hint="Submit it by itself; then train from the environment version that it makes.",
            field="algorithm",
        )
    meant_algorithm = aliases.suggest_algorithm(str(algorithm))  # "" if that is unclear
    change = Change(arguments={"algorithm": meant_algorithm}) if meant_algorithm else None
    raise UserError(
        "BAD_ARGUMENT",
        f"algorithm {algorithm!r} does not exist; there are {', '.join((*ALGORITHMS, PROMPT))}",
        hint=Hint(
            f"Use {meant_algorithm}." if meant_algorithm else "Use one of these.",
            change=change,
        ),
        field="algorithm",
    )


def validate(algorithm: str, settings: GivenSettings) -> GivenSettings:
    """Check the given settings one by one; return their values as the schema reads them.

    Settings that are None are left out. `algorithm` is "evaluate" or one of ALGORITHMS.

    Raises UserError BAD_ARGUMENT if `settings` is no object or the algorithm does not exist,
    SETTING_UNKNOWN if a name does not exist, SETTING_NOT_APPLICABLE if it belongs to another
    algorithm, SETTING_INVALID for a value of the wrong type or out of range.
    """
    if not isinstance(settings, dict):
        raise UserError(
            "BAD_ARGUMENT",
            f"settings is a {type(settings).__name__}",
            hint='Give an object, as in settings={"learning_rate": 1e-4}.',
            field="settings",
        )
    if algorithm not in ("evaluate", PROMPT):
        check_algorithm(algorithm)
    schema = SCHEMAS[algorithm]
    _check_names(algorithm, schema, settings)
    given_settings = {name: value for name, value in settings.items() if value is not None}
    if given_settings.get("gpus") == "auto":  # "auto" means the same as leaving it out
        del given_settings["gpus"]
    try:
        checked = given_schema(algorithm).model_validate(given_settings)
    except ValidationError as error:
        raise invalid_values_error(schema, error, given_settings) from error
    values = {name: getattr(checked, name) for name in given_settings}
    _check_one_duration(values)
    return values


def _check_one_duration(values: GivenSettings) -> None:
    """Raise UserError SETTING_INVALID if the given settings (`values`) have both `steps` and
    `epochs`."""
    if {"steps", "epochs"} <= values.keys():
        raise UserError(
            "SETTING_INVALID",
            f"steps = {values['steps']} and epochs = {values['epochs']} both say how long to train",
            hint=Hint(
                "Keep one of them: epochs counts passes over the rows, steps optimizer steps.",
                change=Change(without=("epochs",)),
            ),
            field="settings.steps",
        )


def resolve(
    algorithm: str,
    settings: GivenSettings,
    *,
    model: ModelFacts,
    env: EnvFacts | None,
    hardware: Hardware | None,
    inherited: AdapterFacts | None = None,
    vllm: bool = False,
    vllm_fault: str = "",
) -> Resolved:
    """Choose all settings of a training run: the given ones, and defaults for the rest.

    The given values are checked one by one and then together, defaults are filled in, and the whole
    is checked. The result also says where each value comes from.

    Args:
        algorithm: one of ALGORITHMS.
        settings: the settings that the user gave.
        model: the model that is trained.
        env: the environment; None assumes rows of usual length.
        hardware: the machine; None counts as a CPU.
        inherited: shape of the adapter that the run continues; None for a new adapter.
        vllm: whether vLLM is set up on this machine.
        vllm_fault: why vLLM is switched off on the GPU; "" if it is not.

    Raises UserError SETTING_*, or BAD_ARGUMENT if the environment does not suit the algorithm.
    """
    user_settings = with_own_targets(validate(algorithm, settings), model)
    check_algorithm(algorithm)  # because `validate` also accepts "evaluate", which trains nothing
    facts = defaults.Facts(model, env, hardware, inherited, vllm=vllm, vllm_fault=vllm_fault)
    _check_given(algorithm, user_settings, facts)
    draft = defaults.fill_defaults(algorithm, user_settings, facts)
    setting_checks.check_together(algorithm, draft, model, env)
    schema = TRAINERS[algorithm]
    return Resolved(
        algorithm,
        settings=schema.model_validate(draft.values),
        sources=_ordered_sources(draft, schema),
        warnings=draft.warnings,
    )


def _check_given(algorithm: str, user_settings: GivenSettings, facts: defaults.Facts) -> None:
    """Check that the user's settings fit each other, the environment, the machine and the adapter
    that the run continues.

    Raises UserError SETTING_* if they do not, BAD_ARGUMENT if the environment does not suit the
    algorithm.
    """
    if algorithm == "distill":
        teachers.check_given(user_settings)
    setting_checks.check_loss(user_settings)
    setting_checks.check_sampler(user_settings, has_vllm=facts.vllm)
    if facts.env is not None:
        env_checks.check_env(algorithm, facts.env)
        env_checks.check_turns(user_settings, facts.env)
    if facts.inherited is not None:
        setting_checks.check_inherited(user_settings, facts.inherited)


def resolve_sampling(
    settings: GivenSettings,
    *,
    model: ModelFacts,
    env: EnvFacts | None,
    attempts: int,
    hardware: Hardware | None = None,
) -> ResolvedSampling:
    """Choose all settings of an evaluation: the given ones, and defaults for the rest.

    Args:
        settings: the settings that the user gave.
        model: the model with the shortest context of those that answer.
        env: the environment; None assumes tasks of usual length.
        attempts: how often each task is answered.
        hardware: the machine; None if it is not known.

    Raises UserError SETTING_*.
    """
    user_settings = validate("evaluate", settings)
    setting_checks.check_sampling(user_settings, attempts)
    if env is not None:
        env_checks.check_turns(user_settings, env)
    draft = defaults.fill_defaults(
        "evaluate", user_settings, defaults.Facts(model, env, hardware, attempts=attempts)
    )
    setting_checks.check_together("evaluate", draft, model, env)
    return ResolvedSampling(
        settings=SamplingSettings.model_validate(draft.values),
        sources=_ordered_sources(draft, SamplingSettings),
        warnings=draft.warnings,
    )


def _ordered_sources(draft: defaults.SettingsDraft, schema: type[Settings]) -> dict[str, str]:
    """Return setting -> source, in the order of the schema."""
    return {name: draft.sources[name] for name in schema.model_fields}


def _check_names(algorithm: str, schema: type[Settings], settings: GivenSettings) -> None:
    """Refuse names that are not settings of this algorithm.

    `schema` is the class of the algorithm's settings, `settings` are those that the user gave.

    Raises UserError SETTING_NOT_APPLICABLE if all wrong names are settings of other algorithms,
    otherwise SETTING_UNKNOWN. The hint suggests the names that were probably meant.
    """
    unknown_names = [str(name) for name in settings if name not in schema.model_fields]
    if not unknown_names:
        return
    # The names that are not settings of another algorithm either.
    names_of_none = [name for name in unknown_names if not _other_owner(name, algorithm)]
    if not names_of_none:
        raise _not_applicable_error(unknown_names, algorithm)
    verb = "is no setting" if len(unknown_names) == 1 else "are no settings"
    hint = _names_hint(unknown_names, algorithm)
    change = _renaming_change(algorithm, settings, unknown_names)
    raise UserError(
        "SETTING_UNKNOWN",
        f"{_list_names(unknown_names)} {verb} of {algorithm}",
        hint=Hint(hint[:_HINT_CHARS], change=change),
        field=f"settings.{names_of_none[0]}",
    )


def _not_applicable_error(names: list[str], algorithm: str) -> UserError:
    """Make the error for names that are settings of another algorithm.

    The message says which algorithm has the first name; the hint says what to use instead of it.
    """
    first_name = names[0]
    verb = "is" if len(names) == 1 else "are"
    owner = _other_owner(first_name, algorithm)
    return UserError(
        "SETTING_NOT_APPLICABLE",
        f"{_list_names(names)} {verb} for {owner}, not for {algorithm}",
        hint=Hint(_advice_for_foreign(first_name, algorithm), change=Change(without=tuple(names))),
        field=f"settings.{first_name}",
    )


def _names_hint(unknown_names: list[str], algorithm: str) -> str:
    """Say what to use instead of the first few (`_EXPLAINED`) unknown names of settings.

    If nothing is known about them, the text lists all settings of the algorithm.
    """
    known_settings = SCHEMAS[algorithm].model_fields
    suggestions: list[str] = []
    for name in unknown_names[:_EXPLAINED]:
        if _other_owner(name, algorithm):
            suggestion = _advice_for_foreign(name, algorithm)
        else:
            suggestion = aliases.suggest(name, algorithm, known_settings)
        if suggestion:
            # If there is only one unknown name, the message has just named it.
            suggestions.append(f"{name}: {suggestion}" if len(unknown_names) > 1 else suggestion)
    return " ".join(suggestions) or f"Settings of {algorithm}: {', '.join(known_settings)}."


def _advice_for_foreign(name: str, algorithm: str) -> str:
    """Say what to use instead of the setting `name`, which only another algorithm has."""
    return aliases.NOT_FOR.get((algorithm, name), "Leave it out.")


def _renaming_change(
    algorithm: str, settings: GivenSettings, unknown_names: list[str]
) -> Change | None:
    """Return the change that corrects a call with unknown names of settings.

    A setting under another trainer's name gets our name, an argument of the tool that was put among
    the settings becomes an argument, and a setting of another algorithm is left out. Returns None
    if none of the names can be corrected.

    Args:
        algorithm: the algorithm of the call.
        settings: all settings that the user gave.
        unknown_names: those of them that the algorithm does not have.
    """
    known_names = SCHEMAS[algorithm].model_fields
    # Unknown name -> the setting that it means; "" if it means none.
    our_names = {
        name: aliases.meant_setting(name, algorithm, known_names) for name in unknown_names
    }
    # If the user also gave a value under our name, that value is kept.
    renamed = {
        our_name: settings[name]
        for name, our_name in our_names.items()
        if our_name and our_name not in settings
    }
    arguments = {
        name: settings[name]
        for name, our_name in our_names.items()
        if not our_name and name in aliases.ARGUMENTS
    }
    # A name that can be corrected in one of the three ways is removed from the settings.
    removed = [
        name
        for name, our_name in our_names.items()
        if our_name or name in aliases.ARGUMENTS or _other_owner(name, algorithm)
    ]
    if not removed:
        return None
    return Change(arguments=arguments, settings=renamed, without=tuple(removed))


def _other_owner(name: str, algorithm: str) -> str:
    """Name the other algorithms that have the setting `name`, such as "sft and dpo".

    Returns "training" if all algorithms that train have the setting. Returns "" if no algorithm has
    it, or if `algorithm` has it, possibly under another name.
    """
    owners = [candidate for candidate in ALGORITHMS if name in SCHEMAS[candidate].model_fields]
    if not owners and algorithm != PROMPT and name in PromptSettings.model_fields:
        return PROMPT
    if not owners or algorithm in owners:
        return ""
    if aliases.other_name(name, algorithm, SCHEMAS[algorithm].model_fields):
        return ""
    return "training" if len(owners) == len(ALGORITHMS) else " and ".join(owners)


def _list_names(names: list[str]) -> str:
    """List at most six names, each cut to 40 characters; a longer list ends " and 3 more"."""
    names_text = ", ".join(name[:_NAME_CHARS] for name in names[:_MOST_NAMES])
    if len(names) <= _MOST_NAMES:
        return names_text
    return f"{names_text} and {len(names) - _MOST_NAMES} more"


@dataclass(frozen=True)
class _Table:
    """A table of settings on the reference page.

    Attributes:
        title: its heading.
        schema: the class whose fields are the settings.
        kinds: the algorithms that have these settings, or "evaluate".
        described_before: the settings of the schema that an earlier table describes.
    """

    title: str
    schema: type[Settings]
    kinds: tuple[str, ...]
    described_before: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The heading and the table in Markdown."""
        return f"## {self.title}\n\n{_settings_table(self.schema, self.described_before)}"

    @property
    def names(self) -> list[str]:
        """The settings that the table describes."""
        return [name for name in self.schema.model_fields if name not in self.described_before]


def _tables() -> list[_Table]:
    """Make every table of settings on the reference page; tables of several algorithms come before
    those of one."""
    # The names of settings that an earlier table describes are left out of a later one.
    answers = tuple(AnswerSettings.model_fields)
    scoring = tuple(ScoringSettings.model_fields)
    common = tuple(CommonSettings.model_fields)
    of_rows = tuple(RowSettings.model_fields)
    of_rollouts = tuple(RolloutSettings.model_fields)
    asking = ("grpo", "distill", PROMPT, "evaluate")  # all that sample answers
    shared = (*answers, *scoring)
    return [
        _Table("All algorithms", CommonSettings, ALGORITHMS, scoring),
        _Table("Scoring", ScoringSettings, (*ALGORITHMS, PROMPT, "evaluate")),
        _Table("Answers", AnswerSettings, asking),
        _Table("SFT and DPO", RowSettings, ("sft", "dpo"), common),
        _Table("SFT", SFTSettings, ("sft",), of_rows),
        _Table("DPO", DPOSettings, ("dpo",), of_rows),
        _Table("GRPO and distillation", RolloutSettings, ("grpo", "distill"), (*answers, *common)),
        _Table("GRPO", GRPOSettings, ("grpo",), of_rollouts),
        _Table("Distillation", DistillSettings, ("distill",), of_rollouts),
        _Table("Search for a prompt", PromptSettings, (PROMPT,), shared),
        _Table("Evaluation", SamplingSettings, ("evaluate",), shared),
    ]


def settings_reference() -> str:
    """Return the reference page of all settings as Markdown, made from the schema."""
    return "\n\n".join([_INTRODUCTION, *(table.text for table in _tables())]) + "\n"


def settings_index() -> str:
    """Return the names of all settings by algorithm as Markdown, and where to read about them."""
    pages = ", ".join(f"`train://settings/{kind}`" for kind in SETTINGS_PAGES)
    paragraphs = [_INTRODUCTION, f"What each does, takes and defaults to: {pages}."]
    for table in _tables():
        names = ", ".join(f"`{name}`" for name in table.names)
        paragraphs.append(f"## {table.title}\n\n{names}")
    return "\n\n".join(paragraphs) + "\n"


def settings_page(kind: str) -> str:
    """Return the page of the settings that `kind` takes, as Markdown.

    `kind` is one of SETTINGS_PAGES. Raises UserError SECTION_NOT_FOUND if it is not.
    """
    if kind not in SETTINGS_PAGES:
        raise UserError(
            "SECTION_NOT_FOUND",
            f"there is no page of settings for {kind[:40]!r}",
            hint=f"Pages: {', '.join(f'train://settings/{name}' for name in SETTINGS_PAGES)}.",
            field="section",
        )
    tables = [table.text for table in _tables() if kind in table.kinds]
    return "\n\n".join([_INTRODUCTION, *tables]) + "\n"


def _settings_table(schema: type[Settings], described_before: Sequence[str]) -> str:
    """Return the settings of a schema as a table in Markdown.

    Settings in `described_before`, which an earlier table has, are left out.
    """
    rows = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
    for name, field in schema.model_fields.items():
        if name not in described_before:
            extra = field.json_schema_extra
            # How the default is chosen, in words.
            rule = extra["rule"] if isinstance(extra, dict) else ""
            rows.append(f"| `{name}` | {range_in_brief(field)} | {rule} | {field.description} |")
    return "\n".join(rows)
