"""The target of a run: the share of held-out tasks, or the reward, that it is to reach.

A user gives it in words, as `expect="90 %"`, beside the two predictions of a verdict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.format import percent, significant

PREDICTIONS = ("better", "no_difference")  # of a verdict; the other words of `expect` are targets
_TARGET = re.compile(r"\s*(?:>=?)?\s*(\d{1,3}(?:\.\d{1,6})?)\s*(%?)\s*")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Target:
    """A level to reach, from above 0 to 1: 0.9 is 90 % of the held-out tasks, or a reward of 0.9.

    `is_reached_by` compares a measured level with it.
    """

    level: float

    @property
    def in_words(self) -> str:
        """The target as people write it, such as "90 %"."""
        return f"{100 * self.level:g} %"

    def is_reached_by(self, value: float | None) -> bool | None:
        """Whether a measured level is as high as the target; None where nothing was measured."""
        return None if value is None else value >= self.level - _ROUNDING

    def sentence(
        self, value: float | None, interval: Sequence[float | None], *, is_share: bool
    ) -> str:
        """Say whether a level reaches the target, such as "Target 90 %: not reached, 85.7 % (95 %
        interval 81.2 % to 89.2 %)."

        Args:
            value: the measured level; None where nothing was measured.
            interval: its 95 % interval; its ends may be None.
            is_share: whether it is a share of tasks, shown in percent; else a reward.
        """
        if value is None:
            return f"Target {self.in_words}: not known, nothing was measured."
        show = percent if is_share else significant
        word = "reached" if self.is_reached_by(value) else "not reached"
        low, high = interval
        if low is None or high is None:
            return f"Target {self.in_words}: {word}, {show(value)}."
        caution = ""
        if word == "reached" and low < self.level:
            word = "reached, but not for sure"
            caution = "; more tasks would tell whether it holds"
        between = f"{show(low)} to {show(high)}"
        return f"Target {self.in_words}: {word}, {show(value)} (95 % interval {between}){caution}."


def target_in(expect: str) -> Target | None:
    """The target that `expect` names, such as "90 %" or "0.9"; None where it names none: a
    prediction of the verdict, nothing, or a text that is no level above 0 and up to 1."""
    match = _TARGET.fullmatch(expect)
    if match is None:
        return None
    level = float(match[1]) / (100 if match[2] else 1)
    return Target(level) if 0 < level <= 1 else None


def is_expectation(expect: str) -> bool:
    """Whether a text can be expected of a run: "", a prediction of the verdict, or a target."""
    return expect in ("", *PREDICTIONS) or target_in(expect) is not None
