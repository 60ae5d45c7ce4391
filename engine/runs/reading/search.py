"""The search of `grep` arguments: plain text with gaps, alternatives and line ends.

A pattern is not a regular expression, so the time of a search grows only with the length of a line.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.errors import UserError

Matches = Callable[[str], bool]

_LONGEST = 200  # characters of a pattern


def matcher(pattern: str) -> Matches:
    """Compile `pattern`, such as "error|^step.*nan", into a function that tests a line; "" matches
    no line.

    Letter case is ignored. `|` separates alternatives, `.*` stands for any text, `^` and `$` for
    the ends of the line. Raises UserError BAD_ARGUMENT if the pattern has more than 200 characters.
    """
    if len(pattern) > _LONGEST:
        raise UserError(
            "BAD_ARGUMENT",
            f"grep has {len(pattern)} characters",
            hint=f"Give at most {_LONGEST}: plain text, | for alternatives, .* for a gap.",
            field="grep",
        )
    alternatives = [_Alternative.parse(part) for part in pattern.lower().split("|") if part]

    def matches(line: str) -> bool:
        """Return whether one of the alternatives is in the line."""
        lowered = line.lower()
        return any(alternative.is_in(lowered) for alternative in alternatives)

    return matches


@dataclass(frozen=True)
class _Alternative:
    """One alternative of a pattern.

    Attributes:
        parts: texts that must follow each other in the line, with anything between them.
        from_start: whether the line must begin with the first part.
        to_end: whether the line must end with the last part.
    """

    parts: tuple[str, ...]
    from_start: bool
    to_end: bool

    @staticmethod
    def parse(text: str) -> "_Alternative":
        """Parse one alternative of a pattern, in lower case, such as "^step.*nan". Backslashes are
        dropped, because they come from callers who escape as in a regular expression."""
        from_start = text.startswith("^")
        to_end = text.endswith("$")
        body = text.removeprefix("^").removesuffix("$").replace("\\", "")
        return _Alternative(tuple(body.split(".*")), from_start, to_end)

    def is_in(self, line: str) -> bool:
        """Whether a line, in lower case, contains the parts in this order, without overlap."""
        # A single part must be the whole line: "aba" has "a" at both ends, but is not "a".
        if self.from_start and self.to_end and len(self.parts) == 1:
            return line == self.parts[0]
        if self.from_start and not line.startswith(self.parts[0]):
            return False
        if self.to_end and not line.endswith(self.parts[-1]):
            return False
        # Take the earliest place of each part, which leaves the most room for the parts after it.
        position = 0
        for part in self.parts:
            position = line.find(part, position)
            if position < 0:
                return False
            position += len(part)
        return True
