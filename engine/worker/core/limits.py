"""Limits on the length of answers and how answers are sampled: the fields that the settings of
every kind of run have, and the limits that evaluations of SFT and DPO runs use instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class AnswerLimits(Protocol):
    """The limits on the length of an answer, and how many processes score answers."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of one assistant turn."""
        ...

    @property
    def max_turns(self) -> int:
        """The most assistant turns of one rollout."""
        ...

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and answer together."""
        ...

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end a turn, beside the end-of-turn token."""
        ...

    @property
    def score_workers(self) -> int:
        """How many processes run the environment's code to score answers at the same time."""
        ...


class SamplingSettings(AnswerLimits, Protocol):
    """Limits of answers, and the settings of the distribution that tokens are drawn from."""

    @property
    def temperature(self) -> float:
        """What the logits are divided by; 0 takes the likeliest token."""
        ...

    @property
    def top_p(self) -> float:
        """Draw from the likeliest tokens that together have this probability; 1 is off."""
        ...

    @property
    def top_k(self) -> int:
        """Draw from so many of the likeliest tokens; 0 is off."""
        ...

    @property
    def min_p(self) -> float:
        """Draw from tokens with at least this share of the likeliest one's probability; 0 is
        off."""
        ...


@dataclass(frozen=True)
class EvaluationLimits:
    """Limits of the answers in evaluations of an SFT or DPO run, whose settings have no such
    fields."""

    max_tokens: int
    max_turns: int
    max_length: int
    stop: Sequence[str] = ()
    score_workers: int = 1
