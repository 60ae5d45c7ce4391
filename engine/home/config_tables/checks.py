"""What names and numbers in config.toml may be, and the error for those that are not.

Imported by the supervisor, which must start at once: standard library only.
"""

import math
import re
from pathlib import Path
from typing import Any

from engine.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")  # of a table
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")  # that holds a key or a token


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that is 0 or more.

    True is an int in Python, but it is no number in config.toml.
    """
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and math.isfinite(value) and value >= 0


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number that is 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def invalid(path: Path, field: str, fault: str, hint: str) -> UserError:
    """Make the error SETTING_INVALID for the key `field` of the config file at `path`.

    `fault` is the predicate of the message, such as "is missing"; `hint` says how to correct it.
    """
    return UserError("SETTING_INVALID", f"{path}: {field} {fault}", hint=hint, field=field)
