"""Limits on the length of answers and how answers are sampled: the fields that the settings of
every kind of run have, and the limits that evaluations of SFT and DPO runs use instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class AnswerLimits(Protocol):
    """The limits on the length of an answer, in tokens.

    Attributes:
        max_tokens: of one assistant turn.
        max_turns: assistant turns of one rollout.
        max_length: of prompt and answer together.
        stop: texts that end a turn, beside the end-of-turn token.
        score_workers: how many env processes (which run the environment's code) score at once.
    """

    @property
    def max_tokens(self) -> int: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def score_workers(self) -> int: ...


class SamplingSettings(AnswerLimits, Protocol):
    """Limits of answers, and the settings of the distribution that tokens are drawn from."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True)
class EvaluationLimits:
    """Limits of the answers in evaluations of an SFT or DPO run, whose settings have no such
    fields."""

    max_tokens: int
    max_turns: int
    max_length: int
    stop: Sequence[str] = ()
    score_workers: int = 1
