"""The target of a run: the share of held-out tasks to solve, or the reward to reach.

A user writes it in `expect`, such as `expect="90 %"`; `expect` may also predict a verdict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.format import percent, significant
from engine.home.rows import PREDICTIONS

_TARGET = re.compile(r"\s*(?:>=?)?\s*(\d{1,3}(?:\.\d{1,6})?)\s*(%?)\s*")
_ROUNDING = 1e-9  # a level this little below the target reaches it


@dataclass(frozen=True)
class Target:
    """A level to reach, above 0 and at most 1: 0.9 is 90 % of the held-out tasks, or a reward of
    0.9."""

    level: float

    @property
    def in_words(self) -> str:
        """The target as people write it, such as "90 %"."""
        return f"{100 * self.level:g} %"

    def is_reached_by(self, value: float | None) -> bool | None:
        """Whether a measured level is as high as the target. Returns None if nothing was
        measured."""
        return None if value is None else value >= self.level - _ROUNDING

    def sentence(
        self, value: float | None, interval: Sequence[float | None], *, is_share: bool
    ) -> str:
        """A sentence whether a level reaches the target, such as "Target 90 %: not reached, 85.7 %
        (95 % interval 81.2 % to 89.2 %)."

        Args:
            value: the measured level; None if nothing was measured.
            interval: the ends of its 95 % interval, each may be None.
            is_share: True for a share of tasks, which is shown in percent; False for a reward.
        """
        if value is None:
            return f"Target {self.in_words}: not known, nothing was measured."
        show = percent if is_share else significant
        is_reached = self.is_reached_by(value)
        word, caution = "reached" if is_reached else "not reached", ""
        low, high = interval
        if low is None or high is None:
            return f"Target {self.in_words}: {word}, {show(value)}."
        if is_reached and low < self.level:  # the true level may be below the target
            word = "reached, but not for sure"
            caution = "; more tasks would tell whether it holds"
        between = f"{show(low)} to {show(high)}"
        return f"Target {self.in_words}: {word}, {show(value)} (95 % interval {between}){caution}."


def target_in(expect: str) -> Target | None:
    """The target that `expect` names, such as "90 %", ">= 0.9" or "0.9".

    Returns None if it names none: it is empty, predicts a verdict, or is not a level above 0 and up
    to 1.
    """
    match = _TARGET.fullmatch(expect)
    if match is None:
        return None
    number, percent_sign = match.groups()
    level = float(number) / (100 if percent_sign else 1)
    return Target(level) if 0 < level <= 1 else None


def is_expectation(expect: str) -> bool:
    """Whether a text is a valid `expect` of a run: "", a predicted verdict, or a target."""
    return expect in ("", *PREDICTIONS) or target_in(expect) is not None
