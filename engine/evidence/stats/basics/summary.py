"""Means over the answers of one model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from engine.core.metrics import curve_name


class ScoredAnswer(Protocol):
    """The fields of an answer that a mean needs; trajectories and evaluation rows have them."""

    @property
    def reward(self) -> float | None: ...
    @property
    def success(self) -> bool | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def cut(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, float] | None: ...


@dataclass(frozen=True)
class Summary:
    """Means over answers. An answer whose scoring failed counts as not solved, with reward 0.

    Attributes:
        n: the number of answers.
        success: the share that succeeded; None if no score says whether an answer succeeded.
        errors: the number of answers that could not be scored.
        truncated: the share of answers cut by a limit.
        metrics: means of the environment's own metrics over the answers that were scored.
    """

    n: int
    success: float | None
    reward: float
    errors: int
    truncated: float
    metrics: dict[str, float]

    def curves(self, split: str = "heldout") -> dict[str, float]:
        """The means as columns of metrics.jsonl, each named after the `split` of the tasks.

        For "heldout" they are `heldout_reward`, `heldout_success` (if it is known), then
        `heldout_<name>` for each metric of the environment. A metric of the environment named
        `reward` or `success` is dropped in favour of ours.
        """
        own_means = {f"{split}_reward": self.reward}
        if self.success is not None:
            own_means[f"{split}_success"] = self.success
        environment_means: dict[str, float] = {}
        for name, value in self.metrics.items():
            environment_means[f"{split}_{curve_name(name)}"] = value
        # The first `own_means` puts our columns first, the second overwrites equal names.
        return own_means | environment_means | own_means

    @property
    def score(self) -> float:
        """The number by which checkpoints are chosen: success if it is known, else reward."""
        return self.reward if self.success is None else self.success


def summarise(scored_answers: Iterable[ScoredAnswer]) -> Summary:
    """The means over answers.

    An answer that could not be scored counts as not solved, with reward 0; it does not count in
    `metrics`. `success` is None if no score says whether its task was solved.
    """
    answers = list(scored_answers)
    scored = [answer for answer in answers if answer.error is None]
    count = max(1, len(answers))  # the means of nothing are 0
    success = None
    if any(answer.success is not None for answer in scored):
        success = sum(bool(answer.success) for answer in answers) / count
    return Summary(
        n=len(answers),
        success=success,
        reward=sum(answer.reward or 0.0 for answer in answers) / count,
        errors=len(answers) - len(scored),
        truncated=sum(answer.cut for answer in answers) / count,
        metrics=_metric_means(scored),
    )


def _metric_means(scored: Sequence[ScoredAnswer]) -> dict[str, float]:
    """The mean of each of the environment's metrics, by name, over the scored answers that have it.
    A metric that only some tasks have is absent on the others, not 0."""
    values_by_metric: dict[str, list[float]] = {}
    for answer in scored:
        for name, value in (answer.metrics or {}).items():
            values_by_metric.setdefault(name, []).append(value)
    return {name: fmean(values_by_metric[name]) for name in sorted(values_by_metric)}
