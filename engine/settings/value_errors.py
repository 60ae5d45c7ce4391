"""The error for settings of the wrong type or out of range, with what to write instead."""

import math
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from engine.core.errors import UserError
from engine.core.hints import Change, Hint
from engine.records.settings import (
    COMPUTE_PATTERN,
    PROJECTIONS,
    TEACHER_KEY_PATTERN,
    GivenSettings,
    Settings,
    lowest_given,
)

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

# Limits on how much of the user's input an error repeats.
_EXPLAINED = 4  # the most settings that are explained one by one
_VALUE_CHARS, _TEXT_CHARS = 60, 30  # of a value in the message, of a text in the hint


def invalid_values_error(
    schema: type[Settings], error: ValidationError, given: GivenSettings
) -> UserError:
    """Make the error for values of the wrong type or out of range.

    The message describes the first four wrong values; hint and field are about the first one.

    Args:
        schema: the settings of the algorithm.
        error: pydantic's error, which names the wrong values.
        given: all values that were given.
    """
    # "loc" is the path to a fault, such as ("lora_targets", 2); its first part is the setting.
    paths = [fault["loc"] for fault in error.errors()]
    names = list(dict.fromkeys(str(setting) for setting, *_ in paths))  # each once
    problems = [
        f"{name} = {_shortened_value(given[name])} is not {expects(schema.model_fields[name])}"
        for name in names[:_EXPLAINED]
    ]
    first_name = names[0]
    hint = _value_hint(
        first_name,
        given[first_name],
        expected=expects(schema.model_fields[first_name]),
    )
    return UserError(
        "SETTING_INVALID",
        "; ".join(problems),
        hint=Hint(hint, change=_type_correction({name: given[name] for name in names})),
        field=f"settings.{first_name}",
    )


def _shortened_value(value: object) -> str:
    """Write the value as Python code, cut to `_VALUE_CHARS` characters."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."


def _value_hint(name: str, value: object, expected: str) -> str:
    """Say what to do about a wrong value of the setting `name`.

    The kinds of mistakes are tried from the most special to the most general.

    Args:
        name: the setting.
        value: the wrong value.
        expected: the values that the setting takes, in words, such as "a whole number above 0".
    """
    if isinstance(value, bool):  # the value is wrong, so a number was most likely expected
        return "true and false are not numbers."
    if isinstance(value, float) and not math.isfinite(value):
        return f"Give {name} a finite number, or leave it out."
    if isinstance(value, str) and "number" in expected:
        return _number_hint(name, value, expected)
    if isinstance(value, float) and value.is_integer() and "whole" in expected:
        return f"Write {int(value)} without a decimal point."
    if isinstance(value, dict):
        return f"Settings are flat: give {name} one value."
    return _VALUE_HINTS.get(name, "") or f"The settings reference has the range of {name}."


def _type_correction(wrong: GivenSettings) -> Change | None:
    """Return the change of the call that replaces each wrong value by the number that it means.

    For example the text "8" means 8. Returns None if one of the values means no number: that
    setting could only be left out, and its default may cost far more than the caller meant.
    """
    numbers: dict[str, object] = {}
    for name, value in wrong.items():
        number = _number_meant_by(value)
        if number is None:
            return None
        numbers[name] = number
    return Change(settings=numbers)


def _number_meant_by(value: object) -> float | int | None:
    """Return the number that a wrong value means: "8" is 8, "1e-4" is 0.0001, 8.0 is 8.

    Returns None for any other value, such as a text that is not a finite number.
    """
    if isinstance(value, float):  # the value is wrong, so a whole number is expected
        return int(value) if value.is_integer() else None
    if not isinstance(value, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    # A text with a point, such as "8.0", means a float.
    is_whole = number.is_integer() and "." not in value
    return int(number) if is_whole else number


def _number_hint(name: str, text: str, expected: str) -> str:
    """Say what to write instead of the text `text` for the setting `name`, which takes a number.

    `expected` describes the values that the setting takes, in words.
    """
    try:
        is_quoted_number = math.isfinite(float(text))
    except ValueError:
        is_quoted_number = False
    if is_quoted_number:
        return f"Write the number without quotes: {name}: {text[:_TEXT_CHARS]}."
    example = 8 if "whole" in expected else 0.001
    return f"{text[:_TEXT_CHARS]} is not a number; e.g. {example}."


# What texts of a pattern are, in words.
_TEXTS = {
    TEACHER_KEY_PATTERN: "the name of a variable that begins with TEACHER_",
    COMPUTE_PATTERN: "local, or ssh:, slurm:, ray: or sky: and the name of a host",
}


def expects(field: FieldInfo) -> str:
    """Say which values the setting with the schema `field` takes.

    For example "a whole number from 2 to 512", "one of none, nf4", "true or false" or "a list of at
    most 8 texts".
    """
    plain_type = _plain_type(field.annotation)
    if get_origin(plain_type) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(plain_type))
    if get_origin(plain_type) is list:
        return _list_in_words(field, _plain_type(get_args(plain_type)[0]))
    if plain_type is bool:
        return "true or false"
    if plain_type is str:
        pattern = _limit(field, "pattern")
        return _TEXTS[pattern] if pattern else "a text"
    type_text = "a whole number" if plain_type is int else "a number"
    return f"{type_text} {_range_in_words(field)}".strip()


def range_in_brief(field: FieldInfo) -> str:
    """Say which values the setting with the schema `field` takes, as briefly as a table needs: "2
    to 512, whole"."""
    plain_type = _plain_type(field.annotation)
    if get_origin(plain_type) is Literal:
        return ", ".join(str(value) for value in get_args(plain_type))
    if plain_type not in (int, float):
        return expects(field)
    limits = _range_in_words(field).removeprefix("from ")
    return f"{limits}, whole" if plain_type is int else limits


def _list_in_words(field: FieldInfo, item_type: Any) -> str:
    """Say which values the list setting with the schema `field` takes; its items are of the type
    `item_type`."""
    if get_origin(item_type) is Literal:  # only `lora_targets` is such a list
        names = ", ".join(PROJECTIONS)
        return f"all-linear, attention, mlp or a list of the model's projections, as {names}"
    max_items = _limit(field, "max_length")
    return f"a list of at most {max_items} texts" if max_items else "a list of texts"


def _plain_type(annotation: Any) -> Any:
    """Return the type in an annotation without `| None` and Annotated.

    For example `Annotated[int, ...] | None` -> int.
    """
    while True:  # a loop, because the two may be nested in either order
        arguments = get_args(annotation)
        types_but_none = [argument for argument in arguments if argument is not type(None)]
        if get_origin(annotation) is Annotated:
            annotation = arguments[0]
        elif type(None) in arguments and len(types_but_none) == 1:
            annotation = types_but_none[0]
        else:
            return annotation


def _range_in_words(field: FieldInfo) -> str:
    """Write the limits of a number: "from 1 to 8", "above 0", "of at least 1"; "" if it has none.

    If users may give only values above the field's own lower limit, their limit is written.
    """
    lowest, above = _limit(field, "ge"), _limit(field, "gt")
    least = lowest_given(field)  # the lower limit for users, None if it is the field's own
    if least is not None:
        lowest, above = least, None
    upper_limit = _upper_limit_in_words(field)
    if above is not None:
        return f"above {_as_text(above)} {upper_limit}".strip()
    if lowest is None:
        return upper_limit
    if not upper_limit:  # "from 1" alone would read as an unfinished sentence
        return f"of at least {_as_text(lowest)}"
    return f"from {_as_text(lowest)} {upper_limit}"


def _upper_limit_in_words(field: FieldInfo) -> str:
    """Write the upper limit of a number: "to 8" or "to below 8"; "" if it has none."""
    highest, below = _limit(field, "le"), _limit(field, "lt")
    if highest is not None:
        return f"to {_as_text(highest)}"
    return f"to below {_as_text(below)}" if below is not None else ""


def _limit(field: FieldInfo, name: str) -> Any:
    """Return the limit of a setting that pydantic calls `name`, such as "ge" (greater or equal);
    None if it has none."""
    for constraint in field.metadata:
        value = getattr(constraint, name, None)
        if value is not None:
            return value
    return None


def _as_text(value: float) -> str:
    """Write a number that limits a setting as text; a float gets no needless digits, e.g. 1e-7 ->
    "1e-07"."""
    return f"{value:g}" if isinstance(value, float) else str(value)
