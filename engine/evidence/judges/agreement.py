"""How far a judge agrees with gold labels, and which way it leans.

Cohen's kappa (1960) is the agreement beyond what chance gives with the same shares of right and
wrong: (observed - chance) / (1 - chance). Intervals are percentiles of a bootstrap over answers
(Efron 1979). A lean is a difference of the judge's error (its value less the label) between two
kinds of answer, taken among right and among wrong answers apart and averaged, so that a judge which
is merely strict, or a kind that is more often right, shows none.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from engine.records.record import Record

T = TypeVar("T")
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Judged:
    """A gold answer and what the judge made of it.

    Attributes:
        label, value: of people and of the judge, from 0 to 1.
        passed: whether the judge's rubric counts it as right.
        length: of the answer, in characters.
        own: whether the judge's own model wrote it; None where the file does not say who did.
    """

    label: float
    value: float
    passed: bool
    length: int
    own: bool | None = None

    @property
    def is_right(self) -> bool:
        return self.label >= 0.5


class Figure(Record):
    """A figure with its 95 % interval, of `n` answers (a position: pairs of answers)."""

    value: float
    low: float
    high: float
    n: int

    def beyond(self, bound: float) -> bool:
        """Whether the whole interval lies above `bound` or below `-bound`."""
        return self.low > bound or self.high < -bound


def kappa(judged: Sequence[Judged]) -> float:
    """Cohen's kappa of judge and labels; 0 where chance alone explains everything, as where one of
    the two says the same of every answer."""
    if not judged:
        return 0.0
    observed = agreement(judged)
    gold, passed = fmean(j.is_right for j in judged), fmean(j.passed for j in judged)
    chance = gold * passed + (1 - gold) * (1 - passed)
    return 0.0 if chance >= 1 else (observed - chance) / (1 - chance)


def agreement(judged: Sequence[Judged]) -> float:
    """The share of answers on which judge and label agree."""
    return fmean(j.passed == j.is_right for j in judged)


def length_lean(judged: Sequence[Judged]) -> float | None:
    """How much more the judge gives answers above the median length than shorter ones; None where
    there are not both among right or among wrong answers."""
    middle = median(j.length for j in judged)
    return _lean(judged, lambda j: j.length > middle)


def own_lean(judged: Sequence[Judged]) -> float | None:
    """How much more the judge gives what its own model wrote than what others did; None where there
    are not both."""
    return _lean([j for j in judged if j.own is not None], lambda j: bool(j.own))


def _lean(judged: Sequence[Judged], is_favoured: Callable[[Judged], bool]) -> float | None:
    """The difference of the judge's mean error between two kinds of answer, averaged over right and
    wrong ones; None where neither has both kinds."""
    differences: list[float] = []
    for is_right in (True, False):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for j in judged:
            if j.is_right == is_right:
                errors[is_favoured(j)].append(j.value - j.label)
        if errors[True] and errors[False]:
            differences.append(fmean(errors[True]) - fmean(errors[False]))
    return fmean(differences) if differences else None


def with_interval(
    items: Sequence[T], figure: Callable[[Sequence[T]], float | None], seed: int = 0
) -> Figure | None:
    """A figure of the items with its bootstrap interval; None where it cannot be computed. Draws in
    which it cannot be computed are left out."""
    value = figure(items) if items else None
    if value is None:
        return None
    rng = random.Random(seed)
    draws = (figure(rng.choices(items, k=len(items))) for _ in range(RESAMPLES))
    drawn = sorted(draw for draw in draws if draw is not None)
    tail = (1 - CONFIDENCE) / 2
    low, high = drawn[int(tail * len(drawn))], drawn[int((1 - tail) * len(drawn)) - 1]
    return Figure(value=round(value, 4), low=round(low, 4), high=round(high, 4), n=len(items))
