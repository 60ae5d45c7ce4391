"""What a new reward puts in another order: models, tasks, and attempts at one task.

Rows carry the reward they had (`reward_before`) beside the one they have now. GRPO learns from the
order of attempts within a task, people choose by the order of models: both may turn round although
every single reward moved little.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from engine.evidence.stats.results import rounded
from engine.records.lines.evaluation_row import EvaluationRow

MOST_TASKS = 1000  # distinct (before, after) pairs that are compared with each other
SHOWN = 5
Pair = tuple[float, float]


@dataclass(frozen=True)
class PairCounts:
    """Pairs of (before, after) values by what became of their order.

    kept: ordered the same way; reversed; tied: ordered before and equal now; parted: equal before
    and ordered now. Pairs equal both times are in none of them.
    """

    kept: int = 0
    reversed: int = 0
    tied: int = 0
    parted: int = 0

    def __add__(self, other: "PairCounts") -> "PairCounts":
        return PairCounts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def ordered_before(self) -> int:
        return self.kept + self.reversed + self.tied


@dataclass(frozen=True)
class RankMove:
    """Mean reward and rank of a model or a task before and after; rank 1 is the highest."""

    name: str
    before: float | None
    after: float | None
    rank_before: int
    rank_after: int

    def to_json(self, kind: str) -> dict[str, object]:
        """`kind` is the key of its name: model or task."""
        body = asdict(self)
        return {kind: body.pop("name")} | body


@dataclass(frozen=True)
class RankChanges:
    """What changed between two rewards of the same answers.

    Attributes:
        rows: answers with both rewards; those with an error are in no number.
        changed: of them in their reward.
        success_gained, success_lost: answers whose success flipped, which may be although no
            reward changed.
        model_flips: (was ahead, is ahead now) of every pair whose order is reversed.
        attempts: pairs at one task by one model.
        moved: the tasks whose rank moved furthest.
    """

    rows: int
    changed: int
    success_gained: int
    success_lost: int
    models: Sequence[RankMove]
    model_flips: Sequence[tuple[str, str]]
    tasks: PairCounts
    attempts: PairCounts
    moved: Sequence[RankMove]

    def to_json(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "changed": self.changed,
            "success": {"gained": self.success_gained, "lost": self.success_lost},
            "models": [move.to_json("model") for move in self.models],
            "model_flips": [list(flip) for flip in self.model_flips],
            "tasks": asdict(self.tasks),
            "attempts": asdict(self.attempts),
            "moved": [move.to_json("task") for move in self.moved],
        }


def rank_changes(models: Mapping[str, Sequence[EvaluationRow]]) -> RankChanges:
    """Compares the two rewards of `models`, rows by model."""
    scored = {ref: [row for row in rows if _scored_twice(row)] for ref, rows in models.items()}
    every = [row for rows in scored.values() for row in rows]
    tasks = {task: _means(rows) for task, rows in _by_task(every).items()}
    attempts = PairCounts()
    for of_model in scored.values():
        for rows in _by_task(of_model).values():
            attempts += count_pairs([_pair(row) for row in rows])
    flips = [(row.success_before, row.success) for row in every]
    means = {ref: _means(rows) for ref, rows in scored.items() if rows}
    moves = _moves(means)
    return RankChanges(
        rows=len(every),
        changed=sum(row.reward != row.reward_before for row in every),
        success_gained=flips.count((False, True)),
        success_lost=flips.count((True, False)),
        models=moves,
        model_flips=_model_flips(moves),
        tasks=count_pairs(_sampled(list(tasks.values()))),
        attempts=attempts,
        moved=_furthest(_moves(tasks)),
    )


def count_pairs(values: Iterable[Pair]) -> PairCounts:
    """The pairs among these (before, after) values."""
    kept = reversed_pairs = tied = parted = 0
    counts = list(Counter(values).items())
    for index, ((before, after), times) in enumerate(counts):
        for (other_before, other_after), other_times in counts[index + 1 :]:
            was, now = _sign(before - other_before), _sign(after - other_after)
            pairs = times * other_times
            if was and was == now:
                kept += pairs
            elif was and now:
                reversed_pairs += pairs
            elif was:
                tied += pairs
            elif now:
                parted += pairs
    return PairCounts(kept, reversed_pairs, tied, parted)


def sentence(changes: RankChanges) -> str:
    """The changes in one sentence."""
    if not changes.rows:
        return "No answer was scored by both rewards."
    text = f"{changes.changed} of {changes.rows} rewards changed"
    gained, lost = changes.success_gained, changes.success_lost
    if gained or lost:
        text += f"; success changed on {gained + lost} answers ({gained} gained, {lost} lost)"
    if changes.model_flips:
        flips = changes.model_flips[:3]
        pairs = "; ".join(f"{now} is ahead of {was} now" for was, now in flips)
        text += f"; the order of the models turns round: {pairs}"
    elif len(changes.models) > 1:
        text += "; the models keep their order"
    for name, pairs in (("tasks", changes.tasks), ("attempts at one task", changes.attempts)):
        if pairs.ordered_before:
            text += f"; {pairs.reversed} of {pairs.ordered_before} ordered pairs of {name} are "
            text += "reversed"
    return text + "."


def _moves(means: Mapping[str, Pair]) -> list[RankMove]:
    before = _ranks({name: pair[0] for name, pair in means.items()})
    after = _ranks({name: pair[1] for name, pair in means.items()})
    return [
        RankMove(name, rounded(pair[0]), rounded(pair[1]), before[name], after[name])
        for name, pair in means.items()
    ]


def _model_flips(moves: Sequence[RankMove]) -> list[tuple[str, str]]:
    return [
        (one.name, other.name)
        for one in moves
        for other in moves
        if one.rank_before < other.rank_before and one.rank_after > other.rank_after
    ]


def _furthest(moves: Sequence[RankMove]) -> list[RankMove]:
    """The tasks whose rank moved, the furthest first; five are looked at."""
    order = sorted(moves, key=lambda move: (-abs(move.rank_after - move.rank_before), move.name))
    return [move for move in order[:SHOWN] if move.rank_before != move.rank_after]


def _ranks(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the highest; equal values share the better rank."""
    ordered = sorted(values.values(), reverse=True)
    first = {value: rank for rank, value in reversed(list(enumerate(ordered, 1)))}
    return {name: first[value] for name, value in values.items()}


def _by_task(rows: Iterable[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    by_task: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return by_task


def _means(rows: Sequence[EvaluationRow]) -> Pair:
    """Mean over tasks of the mean over attempts, before and after; rounded, so that ties stay."""
    pairs = [[_pair(row) for row in of_task] for of_task in _by_task(rows).values()]
    sides = []
    for side in (0, 1):
        means = [math.fsum(pair[side] for pair in of_task) / len(of_task) for of_task in pairs]
        sides.append(round(math.fsum(means) / len(means), 9))
    return sides[0], sides[1]


def _pair(row: EvaluationRow) -> Pair:
    return row.reward_before or 0.0, row.reward or 0.0


def _scored_twice(row: EvaluationRow) -> bool:
    return not row.error and not row.error_before


def _sampled(values: list[Pair]) -> list[Pair]:
    if len(set(values)) <= MOST_TASKS:
        return values
    return random.Random(len(values)).sample(values, MOST_TASKS)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
