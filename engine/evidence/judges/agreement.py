"""How far a judge agrees with gold labels, and which kinds of answer the judge favours.

Cohen's kappa (1960) is the agreement beyond what chance gives with the same shares of right and
wrong: (observed - chance) / (1 - chance). Intervals are percentiles of a bootstrap over answers
(Efron 1979). A lean (bias) is the difference of the judge's mean error (its value minus the label)
between two kinds of answer. It is computed among right and among wrong answers separately and then
averaged: a judge that is merely strict has no lean, and neither has a kind of answer that is merely
more often right.
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
    """A gold answer (labelled by people) and what the judge made of it.

    Attributes:
        label, value: what people and what the judge gave the answer, from 0 to 1.
        passed: whether the judge's rubric counts the answer as right.
        length: characters of the answer.
        own: whether the judge's own model wrote the answer; None if the author is not known.
    """

    label: float
    value: float
    passed: bool
    length: int
    own: bool | None = None

    @property
    def is_right(self) -> bool:
        """Whether people count the answer as right."""
        return self.label >= 0.5


class Figure(Record):
    """A statistic with its 95 % interval.

    Attributes:
        n: how many answers it was computed from; for the position bias, how many pairs of answers.
    """

    value: float
    low: float
    high: float
    n: int

    def beyond(self, bound: float) -> bool:
        """Whether the whole interval lies above `bound`, or the whole interval lies below
        `-bound`."""
        return self.low > bound or self.high < -bound


def kappa(judged: Sequence[Judged]) -> float:
    """Cohen's kappa of judge and labels.

    Returns 0 if chance alone explains the agreement: if judge and labels both give every answer the
    same mark. Returns 0 for no answers too.
    """
    if not judged:
        return 0.0
    observed = agreement(judged)
    right_share = fmean(answer.is_right for answer in judged)  # by the labels
    passed_share = fmean(answer.passed for answer in judged)  # by the judge
    # The agreement of two that mark at random with these shares.
    by_chance = right_share * passed_share + (1 - right_share) * (1 - passed_share)
    return 0.0 if by_chance >= 1 else (observed - by_chance) / (1 - by_chance)


def agreement(judged: Sequence[Judged]) -> float:
    """The share of answers on which judge and label agree."""
    return fmean(answer.passed == answer.is_right for answer in judged)


def length_lean(judged: Sequence[Judged]) -> float | None:
    """How much more the judge gives long answers (above the median length) than short ones of the
    same quality. Returns None if neither the right nor the wrong answers have both lengths."""
    median_length = median(answer.length for answer in judged)
    return _mean_favour(judged, lambda answer: answer.length > median_length)


def own_lean(judged: Sequence[Judged]) -> float | None:
    """How much more the judge gives answers of its own model than answers of others of the same
    quality. Returns None if neither the right nor the wrong answers have both kinds of author."""
    with_known_author = [answer for answer in judged if answer.own is not None]
    return _mean_favour(with_known_author, lambda answer: bool(answer.own))


def _mean_favour(judged: Sequence[Judged], is_favoured: Callable[[Judged], bool]) -> float | None:
    """The judge's mean error on favoured answers minus its mean error on the others.

    The difference is taken among right and among wrong answers, then averaged. Returns None if
    neither has both kinds of answer.
    """
    differences: list[float] = []
    for is_right in (True, False):
        errors_by_favour: dict[bool, list[float]] = {True: [], False: []}
        for answer in judged:
            if answer.is_right == is_right:
                errors_by_favour[is_favoured(answer)].append(answer.value - answer.label)
        if errors_by_favour[True] and errors_by_favour[False]:
            differences.append(fmean(errors_by_favour[True]) - fmean(errors_by_favour[False]))
    return fmean(differences) if differences else None


def with_interval(
    items: Sequence[T], figure: Callable[[Sequence[T]], float | None], seed: int = 0
) -> Figure | None:
    """The statistic `figure` of the items with its bootstrap interval. Returns None if `figure`
    returns None for the items, or there are none; resamples for which it returns None are left
    out."""
    value = figure(items) if items else None
    if value is None:
        return None
    rng = random.Random(seed)
    resampled = (figure(rng.choices(items, k=len(items))) for _ in range(RESAMPLES))
    drawn = sorted(draw for draw in resampled if draw is not None)
    tail = (1 - CONFIDENCE) / 2  # the share of the drawn values beyond each end of the interval
    low = drawn[int(tail * len(drawn))]
    high = drawn[int((1 - tail) * len(drawn)) - 1]
    return Figure(value=round(value, 4), low=round(low, 4), high=round(high, 4), n=len(items))
