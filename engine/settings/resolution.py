"""Checks settings and fills in their defaults, for tool arguments and TOML files alike.

Nothing is ignored: a setting that does not exist, that belongs to the other algorithm, or whose
value cannot work is refused, with what to write instead. The schema is engine/records/settings.py,
the defaults are in engine/settings/defaults.py. Each resolved value has a source.
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.core.hints import Change, Hint
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.settings import (
    ALGORITHMS,
    GIVEN,
    SCHEMAS,
    CommonSettings,
    GivenSettings,
    GRPOSettings,
    SamplingSettings,
    Settings,
    SFTSettings,
    TrainSettings,
    expects,
)
from engine.settings import aliases, defaults

_VALUE_HINTS = {
    "group_size": "With one completion per task every advantage is zero; 4 to 16 is usual.",
    "temperature": "At 0 all completions of a group are equal: nothing is learned; 1.0 is usual.",
    "learning_rate": "Leave it out for the value that suits the model.",
    "lora_targets": "Name each projection once, or leave it out for all-linear.",
    "lora_rank": "16 is enough for most tasks, 256 for a large SFT set.",
    "max_examples": "Leave it out to use every train row.",
    "stop_early": "Available: none, heldout, alert.",
    "sampler": "Available: auto, torch, vllm.",
}

# How much of what a user gave an error message repeats.
_EXPLAINED = 4  # settings that are explained one by one
_MOST_NAMES, _NAME_CHARS = 6, 40
_VALUE_CHARS, _TEXT_CHARS = 60, 30
_HINT_CHARS = 600


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
    """Every setting of an evaluation, with sources as in `Resolved`.

    There is no `max_length`: it is the model's context."""

    settings: SamplingSettings
    sources: dict[str, str]
    warnings: list[str]


class TrainFile(NamedTuple):
    """The content of a TOML file; `env` is "" if the file names none."""

    model: str
    algorithm: str
    env: str
    settings: GivenSettings


def wants(given: GivenSettings, name: Literal["thinking", "accept_reward_risk"]) -> bool:
    """Whether a caller switched this setting on, before the settings are resolved."""
    return given.get(name) is True


def check_algorithm(algorithm: str) -> None:
    """Raise UserError BAD_ARGUMENT unless `algorithm` is "sft" or "grpo"."""
    if algorithm in ALGORITHMS:
        return
    meant_algorithm = aliases.suggest_algorithm(str(algorithm))
    raise UserError(
        "BAD_ARGUMENT",
        f"algorithm {algorithm!r} does not exist; there are sft and grpo",
        hint=Hint(
            f"Use {meant_algorithm}." if meant_algorithm else "Use grpo or sft.",
            change=Change(arguments={"algorithm": meant_algorithm}) if meant_algorithm else None,
        ),
        field="algorithm",
    )


def validate(algorithm: str, settings: GivenSettings) -> GivenSettings:
    """Check the given settings one by one and return their values as the schema reads them.

    A setting whose value is None counts as not given and is left out.

    Args:
        algorithm: "sft", "grpo" or "evaluate".

    Raises UserError:
    - BAD_ARGUMENT: the settings are not an object, or there is no such algorithm;
    - SETTING_UNKNOWN or SETTING_NOT_APPLICABLE: for all wrong names together;
    - SETTING_INVALID: for all wrong values together, or for `steps` beside `epochs`.
    """
    if not isinstance(settings, dict):
        raise UserError(
            "BAD_ARGUMENT",
            f"settings is a {type(settings).__name__}",
            hint='Give an object, as in settings={"learning_rate": 1e-4}.',
            field="settings",
        )
    if algorithm != "evaluate":
        check_algorithm(algorithm)
    schema = SCHEMAS[algorithm]
    _check_names(algorithm, schema, settings)
    set_values = {name: value for name, value in settings.items() if value is not None}
    try:
        checked = GIVEN[algorithm].model_validate(set_values)
    except ValidationError as error:
        raise _invalid_values(algorithm, schema, error, set_values) from error
    values = {name: getattr(checked, name) for name in set_values}
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
    return values


def resolve(
    algorithm: str,
    settings: GivenSettings,
    *,
    model: ModelFacts,
    env: EnvFacts | None,
    hardware: Hardware | None,
    inherited: AdapterFacts | None = None,
    vllm: bool = False,
) -> Resolved:
    """All settings of a training run with their sources: those given, and defaults for the rest.

    Args:
        algorithm: "sft" or "grpo".
        env: the environment's facts; None gives defaults that do not depend on one.
        hardware: of this machine; None counts as a CPU.
        inherited: shape of the adapter that the run continues; None for a new one.
        vllm: whether vLLM can be started on this machine.

    Raises UserError SETTING_*, or BAD_ARGUMENT if the environment cannot serve the algorithm.
    """
    user_settings = validate(algorithm, settings)
    check_algorithm(algorithm)
    defaults.check_loss(user_settings)
    defaults.check_sampler(user_settings, vllm)
    if env is not None:
        defaults.check_env(algorithm, env)
        defaults.check_turns(user_settings, env)
    if inherited is not None:
        defaults.check_inherited(user_settings, inherited)
    filled = defaults.fill_defaults(
        algorithm, user_settings, defaults.Facts(model, env, hardware, inherited, vllm=vllm)
    )
    defaults.check_together(algorithm, filled, model, env)
    schema = SFTSettings if algorithm == "sft" else GRPOSettings
    return Resolved(
        algorithm,
        schema.model_validate(filled.values),
        _ordered_sources(filled, schema),
        filled.warnings,
    )


def resolve_sampling(
    settings: GivenSettings, *, model: ModelFacts, env: EnvFacts | None, attempts: int
) -> ResolvedSampling:
    """All settings of an evaluation with their sources: those given, and defaults for the rest.

    A single attempt per task is greedy, several are sampled at temperature 1. `env` is None for
    defaults that do not depend on an environment. Raises UserError SETTING_*.
    """
    user_settings = validate("evaluate", settings)
    defaults.check_sampling(user_settings, attempts)
    if env is not None:
        defaults.check_turns(user_settings, env)
    filled = defaults.fill_defaults(
        "evaluate", user_settings, defaults.Facts(model, env, attempts=attempts)
    )
    defaults.check_together("evaluate", filled, model, env)
    return ResolvedSampling(
        SamplingSettings.model_validate(filled.values),
        _ordered_sources(filled, SamplingSettings),
        filled.warnings,
    )


def _ordered_sources(filled: defaults.Filled, schema: type[Settings]) -> dict[str, str]:
    """The source of each setting, in the order of the schema."""
    return {name: filled.sources[name] for name in schema.model_fields}


def _check_names(algorithm: str, schema: type[Settings], settings: GivenSettings) -> None:
    """Refuse names that are not settings of this algorithm.

    Raises UserError SETTING_NOT_APPLICABLE if all wrong names are settings of another algorithm,
    else SETTING_UNKNOWN; the hint suggests the names that were probably meant.
    """
    known = schema.model_fields
    unknown = [str(name) for name in settings if name not in known]
    foreign = [name for name in unknown if _other_owner(name, algorithm)]
    if not unknown:
        return
    if foreign == unknown:
        name = foreign[0]
        owner = _other_owner(name, algorithm)
        advice = aliases.NOT_FOR.get((algorithm, name), "Leave it out.")
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"{_list_names(foreign)} {_is_or_are(foreign)} for {owner}, not for {algorithm}",
            hint=Hint(advice, change=Change(without=tuple(foreign))),
            field=f"settings.{name}",
        )
    # The field of the error is the first name that no algorithm has.
    name = next(name for name in unknown if name not in foreign)
    hints = []
    for unknown_name in unknown[:_EXPLAINED]:
        suggestion = aliases.suggest(unknown_name, algorithm, known)
        if unknown_name in foreign:
            suggestion = aliases.NOT_FOR.get((algorithm, unknown_name), "Leave it out.")
        # A single suggestion needs no name before it.
        hints.append(
            f"{unknown_name}: {suggestion}" if suggestion and len(unknown) > 1 else suggestion
        )
    hint = " ".join(filter(None, hints)) or f"Settings of {algorithm}: {', '.join(known)}."
    raise UserError(
        "SETTING_UNKNOWN",
        f"{_list_names(unknown)} {_is_or_are(unknown, 'no setting')} of {algorithm}",
        hint=Hint(hint[:_HINT_CHARS], change=_renaming_change(algorithm, settings, unknown)),
        field=f"settings.{name}",
    )


def _renaming_change(algorithm: str, settings: GivenSettings, unknown: list[str]) -> Change | None:
    """The change of the call that mends the unknown names; None if none of them can be mended.

    - A setting that has another name here is given that name, unless that is given already.
    - A name that is an argument of the tool becomes an argument.
    - A setting of another algorithm is left out.
    """
    known_names = SCHEMAS[algorithm].model_fields
    renamed: dict[str, object] = {}
    arguments: dict[str, object] = {}
    removed: list[str] = []
    for name in unknown:
        our_name = aliases.meant_setting(name, algorithm, known_names)
        if our_name:
            removed.append(name)
            if our_name not in settings:
                renamed[our_name] = settings[name]
        elif name in aliases.ARGUMENTS:
            removed.append(name)
            arguments[name] = settings[name]
        elif _other_owner(name, algorithm):
            removed.append(name)
    return Change(arguments, renamed, without=tuple(removed)) if removed else None


def _other_owner(name: str, algorithm: str) -> str:
    """The algorithm that has the setting `name` if `algorithm` does not: "sft" or "grpo".

    "training" if both have it, which happens for `algorithm` "evaluate". "" if `algorithm` has the
    setting itself, or if there is no such setting at all.
    """
    owners = [other for other in ALGORITHMS if name in SCHEMAS[other].model_fields]
    if not owners or algorithm in owners:
        return ""
    return "training" if len(owners) > 1 else owners[0]


def _list_names(names: list[str]) -> str:
    """At most six names, each cut to 40 characters; then " and 3 more" if there are."""
    shown = ", ".join(name[:_NAME_CHARS] for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _is_or_are(names: list[str], what: str = "") -> str:
    """The verb for one or several names, such as "is" or "are".

    With `what` "no setting": "is no setting" or "are no settings".
    """
    if not what:
        return "is" if len(names) == 1 else "are"
    return f"is {what}" if len(names) == 1 else f"are {what}s"


def _invalid_values(
    algorithm: str, schema: type[Settings], error: ValidationError, given: GivenSettings
) -> UserError:
    """The error for values of the wrong type or out of range.

    The message describes the first four of them; hint and field are about the first.

    Args:
        error: pydantic's error, which names them.
        given: all values that were given.
    """
    names = list(dict.fromkeys(str(item["loc"][0]) for item in error.errors()))
    problems = []
    for name in names[:_EXPLAINED]:
        value = repr(given[name])
        shown_value = value if len(value) <= _VALUE_CHARS else value[: _VALUE_CHARS - 3] + "..."
        problems.append(f"{name} = {shown_value} is not {expects(schema.model_fields[name])}")
    first_name = names[0]
    hint = _value_hint(
        first_name, given[first_name], expects(schema.model_fields[first_name]), problems[0]
    )
    return UserError(
        "SETTING_INVALID",
        "; ".join(problems),
        hint=Hint(hint, change=_type_correction({name: given[name] for name in names})),
        field=f"settings.{first_name}",
    )


def _value_hint(name: str, value: object, expected: str, problem: str) -> str:
    """What to do about a wrong value of the setting `name`.

    The kinds of mistakes are tried from the most special to the most general.

    Args:
        expected: the values that the setting takes, in words.
        problem: the description of what is wrong.
    """
    if isinstance(value, bool):
        return "true and false are not numbers."
    if isinstance(value, float) and not math.isfinite(value):
        return f"Give {name} a finite number, or leave it out."
    if isinstance(value, str) and "number" in expected:
        return _number_hint(name, value, expected)
    if isinstance(value, float) and value.is_integer() and "whole" in problem:
        return f"Write {int(value)} without a decimal point."
    if isinstance(value, dict):
        return f"Settings are flat: give {name} one value."
    return _VALUE_HINTS.get(name, "") or f"The settings reference has the range of {name}."


def _type_correction(wrong: GivenSettings) -> Change | None:
    """The change of the call that mends wrong values, where each of them stands for a number.

    None otherwise: a call without the setting would take its default, which may cost far more than
    the caller meant.
    """
    number_by_name = {name: _number_meant_by(value) for name, value in wrong.items()}
    numbers = {name: number for name, number in number_by_name.items() if number is not None}
    return Change(settings=numbers) if len(numbers) == len(wrong) else None


def _number_meant_by(value: object) -> float | int | None:
    """The number that a wrong value stands for: "8" is 8, "1e-4" is 0.0001, 8.0 is 8.

    None for a text that is not a finite number, and for every other value.
    """
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        return int(number) if number.is_integer() and "." not in value else _if_finite(number)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _if_finite(number: float) -> float | None:
    """The number; None for infinity and NaN."""
    return number if math.isfinite(number) else None


def _number_hint(name: str, text: str, expected: str) -> str:
    """What to write instead of `text`, where a number was expected.

    `expected` describes the values that the setting takes.
    """
    try:
        is_quoted_number = math.isfinite(float(text))
    except ValueError:
        is_quoted_number = False
    if is_quoted_number:
        return f"Write the number without quotes: {name}: {text[:_TEXT_CHARS]}."
    return f"{text[:_TEXT_CHARS]} is not a number; e.g. {8 if 'whole' in expected else 0.001}."


def load_toml(path: Path) -> TrainFile:
    """Read `model`, `algorithm`, `env` and the table `[settings]` from a TOML file, and check them.

    If they are missing, they are "pebble", "grpo", "" and {}. Raises UserError BAD_ARGUMENT if
    there is no such file, SETTING_UNKNOWN or SETTING_INVALID with file and line for unknown keys
    and wrong values, and every error of `validate`.
    """
    try:
        text = path.read_text("utf-8-sig")  # editors on Windows write a byte order mark
        content = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError("BAD_ARGUMENT", f"{path} does not exist", hint="Check the path.") from error
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no UTF-8, too deeply nested
        raise UserError(
            "SETTING_INVALID", f"{path}: {error}", hint="Correct the file: it must be valid TOML."
        ) from error
    known = {"model": "pebble", "algorithm": "grpo", "env": ""}
    for name, value in content.items():
        where = f"{path}:{_line_of(text, name)}"
        if name == "settings" and not isinstance(value, dict):
            raise _file_error(
                where, "settings is not a table", "Put the settings under [settings]."
            )
        if name in known and not isinstance(value, str):
            raise _file_error(where, f"{name} = {value!r} is not text", f'Write {name} = "...".')
        if name not in known and name != "settings":
            raise _unknown_key(where, name, value)
    settings = content.get("settings", {})
    chosen = {name: content.get(name, default) for name, default in known.items()}
    try:
        validate(chosen["algorithm"], settings)
    except UserError as error:
        line = _line_of(text, error.field.removeprefix("settings."))
        raise UserError(
            error.code, f"{path}:{line}: {error.message}", hint=error.advice, field=error.field
        ) from error
    return TrainFile(chosen["model"], chosen["algorithm"], chosen["env"], settings)


def _unknown_key(where: str, name: str, value: Any) -> UserError:
    """The error for an unknown key or table of a settings file; `where` is file and line."""
    is_table = isinstance(value, dict)
    if name in SFTSettings.model_fields or name in GRPOSettings.model_fields:
        hint = f"Put {name} under [settings]."
    else:
        # The algorithm makes no difference here: these are keys, no settings.
        hint = aliases.suggest(name, "grpo", ["model", "algorithm", "env", "settings"])
    what = f"[{name}] is no table of this file" if is_table else f"{name} is no key of this file"
    return UserError(
        "SETTING_UNKNOWN",
        f"{where}: {what}",
        hint=hint or "A file has model, algorithm, env and the table [settings].",
        field=name,
    )


def _file_error(where: str, what: str, hint: str) -> UserError:
    """The error SETTING_INVALID for a settings file; `where` is file and line."""
    return UserError("SETTING_INVALID", f"{where}: {what}", hint=hint)


def _line_of(text: str, name: str) -> int:
    """The number of the line that sets `name` or opens its table; 1 if no line does.

    It recognises `name = ...`, `name.key = ...`, `[name]` and `[settings.name]`, with or without
    quotes around the name.
    """
    quoted = rf"[\"']?{re.escape(name)}[\"']?"
    pattern = re.compile(rf"^\s*(\[+\s*(settings\s*\.\s*)?{quoted}\s*[\].]|{quoted}\s*[.=])")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def settings_reference() -> str:
    """The reference page of all settings as Markdown, made from the schema."""
    tables = (
        ("Both algorithms", CommonSettings, ()),
        ("SFT", SFTSettings, tuple(CommonSettings.model_fields)),
        ("GRPO", GRPOSettings, tuple(CommonSettings.model_fields)),
        ("Evaluation", SamplingSettings, ()),
    )
    parts = [
        "# Settings\n\nEvery setting may be left out; `dry_run` shows the value chosen and its "
        "source. A name that is not here is refused.",
    ]
    for title, schema, described_before in tables:
        rows = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
        for name, field in schema.model_fields.items():
            if name not in described_before:  # in the table of both algorithms
                extra = field.json_schema_extra
                rule = extra["rule"] if isinstance(extra, dict) else ""
                rows.append(f"| `{name}` | {expects(field)} | {rule} | {field.description} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
