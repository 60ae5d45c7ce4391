"""Replies to the calls of an agent or a person, and how large they may be.

A reply is a frozen dataclass or a dictionary; `as_json` converts it to the JSON object that a front
end shows.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from engine.core.hints import Call

# A JSON object; which keys it has is part of the tool's description (docs/tools.md).
Reply = dict[str, Any]

# Metadata of a dataclass field: if the value is None, it is shown as null and not left out.
SHOWN_AS_NULL = {"shown_as_null": True}

# Characters of a tool's result as compact JSON; one client cuts results in the middle at 12,400.
RESULT_CHARS = 10_000
# The part of them that an engine function may fill; the rest is for the summary, the next calls and
# warnings.
BODY_CHARS = 9_300

# Limits of one call of read_rollouts: rollouts or groups on a page, and characters of each.
MOST_ROLLOUTS = 50
LEAST_ROLLOUT_CHARS, MOST_ROLLOUT_CHARS = 50, 8_000


def as_json(value: Any) -> Any:
    """Convert dataclasses, anywhere inside `value`, to JSON objects.

    - A `Call` (a suggested call of a tool) becomes the result of `Call.to_json`.
    - Any other dataclass becomes an object with its fields in order. A field that is None is left
      out, unless its metadata holds `SHOWN_AS_NULL`.
    - Mappings, lists and tuples are converted item by item; tuples become lists.
    - Other values stay as they are.
    """
    if isinstance(value, Call):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        result: Reply = {}
        for field in fields(value):
            item = getattr(value, field.name)
            is_shown_as_null = SHOWN_AS_NULL.items() <= field.metadata.items()
            if item is not None or is_shown_as_null:
                result[field.name] = as_json(item)
        return result
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


class ReplyBase:
    """The base class of dataclasses that are replies to a call, or parts of replies."""

    def to_json(self) -> Reply:
        """Return the fields as a JSON object; fields that are None are left out (`as_json`)."""
        return as_json(self)
