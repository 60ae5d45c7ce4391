"""The one schema of settings: tool argument, TOML file, run config and reference page alike.

Nothing is ignored: a name that does not exist, that belongs to the other algorithm, or whose value
cannot work is refused with what to write instead. The schema itself is engine/records/settings.py,
the defaults are engine/settings/defaults.py; every resolved value carries the source it came from.
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class Resolved:
    """Every setting of a training run with its value and where that came from.

    `sources`: user, recipe, model, hardware or parent run, for each name in `settings`.
    """

    algorithm: str
    settings: TrainSettings
    sources: dict[str, str]
    warnings: list[str]


@dataclass(frozen=True)
class ResolvedSampling:
    """Every setting of an evaluation but `max_length`, which is the model's context."""

    settings: SamplingSettings
    sources: dict[str, str]
    warnings: list[str]


class TrainFile(NamedTuple):
    """A TOML file's content. `env` is "" where the file names none."""

    model: str
    algorithm: str
    env: str
    settings: GivenSettings


def check_algorithm(algorithm: str) -> None:
    """Raises UserError BAD_ARGUMENT for anything but the trainers there are."""
    if algorithm in ALGORITHMS:
        return
    meant = aliases.suggest_algorithm(str(algorithm))
    raise UserError(
        "BAD_ARGUMENT",
        f"algorithm {algorithm!r} does not exist; there are sft and grpo",
        hint=Hint(
            f"Use {meant}." if meant else "Use grpo or sft.",
            change=Change(arguments={"algorithm": meant}) if meant else None,
        ),
        field="algorithm",
    )


def validate(algorithm: str, settings: GivenSettings) -> GivenSettings:
    """The settings given, checked one by one; None counts as left out.

    Raises UserError SETTING_UNKNOWN, SETTING_NOT_APPLICABLE or SETTING_INVALID naming every
    problem of the first kind found.
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
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        checked = GIVEN[algorithm].model_validate(given)
    except ValidationError as error:
        raise _invalid(algorithm, schema, error, given) from error
    values = {name: getattr(checked, name) for name in given}
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
    """All settings of a training run, those given and those chosen, each with its source.

    Args:
        algorithm: "sft" or "grpo".
        inherited: the adapter a run continues from.
        vllm: whether vLLM can be started on this machine.

    Raises UserError SETTING_* or BAD_ARGUMENT (the environment cannot serve the algorithm).
    """
    given = validate(algorithm, settings)
    check_algorithm(algorithm)
    defaults.check_loss(given)
    defaults.check_sampler(given, vllm)
    if env is not None:
        defaults.check_env(algorithm, env)
        defaults.check_turns(given, env)
    if inherited is not None:
        defaults.check_inherited(given, inherited)
    filled = defaults.fill(
        algorithm, given, defaults.Facts(model, env, hardware, inherited, vllm=vllm)
    )
    defaults.check_together(algorithm, filled, model, env)
    schema = SFTSettings if algorithm == "sft" else GRPOSettings
    return Resolved(
        algorithm, schema.model_validate(filled.values), _ordered(filled, schema), filled.warnings
    )


def resolve_sampling(
    settings: GivenSettings, *, model: ModelFacts, env: EnvFacts | None, attempts: int
) -> ResolvedSampling:
    """All settings of an evaluation, those given and those chosen, each with its source.

    One attempt is greedy, more sample at temperature 1. Raises UserError SETTING_*.
    """
    given = validate("evaluate", settings)
    defaults.check_sampling(given, attempts)
    if env is not None:
        defaults.check_turns(given, env)
    filled = defaults.fill("evaluate", given, defaults.Facts(model, env, attempts=attempts))
    defaults.check_together("evaluate", filled, model, env)
    return ResolvedSampling(
        SamplingSettings.model_validate(filled.values),
        _ordered(filled, SamplingSettings),
        filled.warnings,
    )


def _ordered(filled: defaults.Filled, schema: type[Settings]) -> dict[str, str]:
    """The sources, in the order of the schema."""
    return {name: filled.sources[name] for name in schema.model_fields}


def _check_names(algorithm: str, schema: type[Settings], settings: GivenSettings) -> None:
    """Refuse names that are no settings of this algorithm. Raises UserError SETTING_UNKNOWN or
    SETTING_NOT_APPLICABLE, with the names that may have been meant."""
    known = schema.model_fields
    unknown = [str(name) for name in settings if name not in known]
    foreign = [name for name in unknown if _owner(name, algorithm)]
    if not unknown:
        return
    if foreign == unknown:
        name = foreign[0]
        why = aliases.NOT_FOR.get((algorithm, name), "Leave it out.")
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"{_listed(foreign)} {_is(foreign)} for {_owner(name, algorithm)}, not for {algorithm}",
            hint=Hint(why, change=Change(without=tuple(foreign))),
            field=f"settings.{name}",
        )
    name = next(name for name in unknown if name not in foreign)
    hints = []
    for other in unknown[:4]:
        suggestion = aliases.suggest(other, algorithm, known)
        if other in foreign:
            suggestion = aliases.NOT_FOR.get((algorithm, other), "Leave it out.")
        hints.append(f"{other}: {suggestion}" if suggestion and len(unknown) > 1 else suggestion)
    hint = " ".join(filter(None, hints)) or f"Settings of {algorithm}: {', '.join(known)}."
    raise UserError(
        "SETTING_UNKNOWN",
        f"{_listed(unknown)} {_is(unknown, 'no setting')} of {algorithm}",
        hint=Hint(hint[:600], change=_renamed(algorithm, settings, unknown)),
        field=f"settings.{name}",
    )


def _renamed(algorithm: str, settings: GivenSettings, unknown: list[str]) -> Change | None:
    """The settings under the names they have here; those of another algorithm are left out."""
    known = SCHEMAS[algorithm].model_fields
    renamed: dict[str, object] = {}
    arguments: dict[str, object] = {}
    gone: list[str] = []
    for name in unknown:
        if meant := aliases.meant(name, algorithm, known):
            gone.append(name)
            if meant not in settings:
                renamed[meant] = settings[name]
        elif name in aliases.ARGUMENTS:
            gone.append(name)
            arguments[name] = settings[name]
        elif _owner(name, algorithm):
            gone.append(name)
    return Change(arguments, renamed, without=tuple(gone)) if gone else None


def _owner(name: str, algorithm: str) -> str:
    """Which trainer has the setting `name` when `algorithm` has not, else ""."""
    owners = [other for other in ALGORITHMS if name in SCHEMAS[other].model_fields]
    if not owners or algorithm in owners:
        return ""
    return "training" if len(owners) > 1 else owners[0]


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _is(names: list[str], what: str = "") -> str:
    if not what:
        return "is" if len(names) == 1 else "are"
    return f"is {what}" if len(names) == 1 else f"are {what}s"


def _invalid(
    algorithm: str, schema: type[Settings], error: ValidationError, given: GivenSettings
) -> UserError:
    """The refusal of values that are of the wrong type or out of range."""
    names = list(dict.fromkeys(str(item["loc"][0]) for item in error.errors()))
    problems = []
    for name in names[:4]:
        value = repr(given[name])
        shown = value if len(value) <= 60 else value[:57] + "..."
        problems.append(f"{name} = {shown} is not {expects(schema.model_fields[name])}")
    first = names[0]
    value, hint = given[first], _VALUE_HINTS.get(first, "")
    if isinstance(value, bool):
        hint = "true and false are not numbers."
    elif isinstance(value, float) and not math.isfinite(value):
        hint = f"Give {first} a finite number, or leave it out."
    elif isinstance(value, str) and "number" in expects(schema.model_fields[first]):
        hint = _no_number(first, value, expects(schema.model_fields[first]))
    elif isinstance(value, float) and value.is_integer() and "whole" in problems[0]:
        hint = f"Write {int(value)} without a decimal point."
    elif isinstance(value, dict):
        hint = f"Settings are flat: give {first} one value."
    hint = hint or f"The settings reference has the range of {first}."
    return UserError(
        "SETTING_INVALID",
        "; ".join(problems),
        hint=Hint(hint, change=_mended({name: given[name] for name in names})),
        field=f"settings.{first}",
    )


def _mended(wrong: GivenSettings) -> Change:
    """Values with their type put right; what cannot be is left out, for the default."""
    numbers = {name: number for name, v in wrong.items() if (number := _number(v)) is not None}
    return Change(settings=numbers, without=tuple(name for name in wrong if name not in numbers))


def _number(value: object) -> float | int | None:
    """The number that a text or a float with nothing behind its point stands for."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        return int(number) if number.is_integer() and "." not in value else _finite(number)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _no_number(name: str, text: str, expected: str) -> str:
    """What to write where a number is wanted and a text was given."""
    try:
        quoted = math.isfinite(float(text))
    except ValueError:
        quoted = False
    if quoted:
        return f"Write the number without quotes: {name}: {text[:30]}."
    return f"{text[:30]} is not a number; e.g. {8 if 'whole' in expected else 0.001}."


def load_toml(path: Path) -> TrainFile:
    """`model`, `algorithm`, `env` and the table `[settings]` of a TOML file.

    Raises UserError SETTING_UNKNOWN or SETTING_INVALID naming file and line.
    """
    try:
        text = path.read_text("utf-8-sig")
        content = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError("BAD_ARGUMENT", f"{path} does not exist", hint="Check the path.") from error
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no text, too many digits
        raise UserError(
            "SETTING_INVALID", f"{path}: {error}", hint="Correct the file: it must be valid TOML."
        ) from error
    known = {"model": "pebble", "algorithm": "grpo", "env": ""}
    for name, value in content.items():
        where = f"{path}:{_line(text, name)}"
        if name == "settings" and not isinstance(value, dict):
            raise _bad_file(where, "settings is not a table", "Put the settings under [settings].")
        if name in known and not isinstance(value, str):
            raise _bad_file(where, f"{name} = {value!r} is not text", f'Write {name} = "...".')
        if name not in known and name != "settings":
            raise _unknown_key(where, name, value)
    settings = content.get("settings", {})
    chosen = {name: content.get(name, default) for name, default in known.items()}
    try:
        validate(chosen["algorithm"], settings)
    except UserError as error:
        line = _line(text, error.field.removeprefix("settings."))
        raise UserError(
            error.code, f"{path}:{line}: {error.message}", hint=error.advice, field=error.field
        ) from error
    return TrainFile(chosen["model"], chosen["algorithm"], chosen["env"], settings)


def _unknown_key(where: str, name: str, value: Any) -> UserError:
    """The refusal of a key of a settings file that has no meaning."""
    table = isinstance(value, dict)
    if name in SFTSettings.model_fields or name in GRPOSettings.model_fields:
        hint = f"Put {name} under [settings]."
    else:
        hint = aliases.suggest(name, "grpo", ["model", "algorithm", "env", "settings"])
    what = f"[{name}] is no table of this file" if table else f"{name} is no key of this file"
    return UserError(
        "SETTING_UNKNOWN",
        f"{where}: {what}",
        hint=hint or "A file has model, algorithm, env and the table [settings].",
        field=name,
    )


def _bad_file(where: str, what: str, hint: str) -> UserError:
    return UserError("SETTING_INVALID", f"{where}: {what}", hint=hint)


def _line(text: str, name: str) -> int:
    """The line that sets `name` or opens the table of that name, 1 where none is found."""
    quoted = rf"[\"']?{re.escape(name)}[\"']?"
    pattern = re.compile(rf"^\s*(\[+\s*(settings\s*\.\s*)?{quoted}\s*[\].]|{quoted}\s*[.=])")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def settings_reference() -> str:
    """The reference of all settings as Markdown, generated from the schema."""
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
    for title, schema, inherited in tables:
        rows = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
        for name, field in schema.model_fields.items():
            if name not in inherited:
                extra = field.json_schema_extra
                rule = extra["rule"] if isinstance(extra, dict) else ""
                rows.append(f"| `{name}` | {expects(field)} | {rule} | {field.description} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
