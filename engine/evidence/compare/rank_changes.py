"""How a new reward changes the order of models, of tasks, and of attempts at one task.

Rows carry their old reward (`reward_before`) beside the new one. GRPO learns from the order of
attempts within a task, and people choose by the order of models: both orders may be reversed even
if every single reward changed little.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from engine.evidence.stats.results import rounded
from engine.records.lines.evaluation_row import EvaluationRow

# The most tasks with distinct (before, after) values that are compared with each other. If there
# are more, a sample is compared: the work grows with the square of their number.
MOST_TASKS = 1000
SHOWN = 5  # most tasks that are named: those whose rank moved furthest
BeforeAfter = tuple[float, float]  # (value before, value after) of one item


@dataclass(frozen=True)
class PairCounts:
    """How many pairs of items kept or changed their order between two rewards.

    Pairs that were equal before and are equal after are not counted.

    Attributes:
        kept: ordered the same way before and after.
        reversed: ordered the other way round after.
        tied: ordered before, equal after.
        parted: equal before, ordered after.
    """

    kept: int = 0
    reversed: int = 0
    tied: int = 0
    parted: int = 0

    def __add__(self, other: "PairCounts") -> "PairCounts":
        """The sums of the counts of both."""
        return PairCounts(
            kept=self.kept + other.kept,
            reversed=self.reversed + other.reversed,
            tied=self.tied + other.tied,
            parted=self.parted + other.parted,
        )

    @property
    def ordered_before(self) -> int:
        """How many pairs had an order before, whatever became of it."""
        return self.kept + self.reversed + self.tied


@dataclass(frozen=True)
class RankMove:
    """The mean reward and the rank of a model or a task, before and after.

    Rank 1 is the highest mean. A mean is None if it is not a finite number.
    """

    name: str
    before: float | None
    after: float | None
    rank_before: int
    rank_after: int

    def to_json(self, kind: str) -> dict[str, object]:
        """The fields as a JSON object; the name stands under the key `kind`, "model" or "task"."""
        body = asdict(self)
        return {kind: body.pop("name")} | body


@dataclass(frozen=True)
class RankChanges:
    """What changed between two rewards of the same answers.

    Attributes:
        rows: the number of answers with both rewards; answers with an error are not counted
            anywhere.
        changed: the number of answers whose reward changed.
        success_gained, success_lost: answers whose success changed, which can happen without a
            change of the reward.
        model_flips: (model that was ahead, model that is ahead now), for every reversed pair.
        tasks: pairs of tasks, ordered by their mean reward.
        attempts: pairs of attempts at one task by one model.
        moved: the tasks whose rank moved furthest, at most `SHOWN`.
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
        """The changes as a JSON object; a `PairCounts` becomes an object with its attributes."""
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
    """Compare two rewards of the same answers: "before" is by the old reward, "after" by the new.

    `models` maps a model's reference to its rows. Rows that were not scored by both rewards are
    left out.
    """
    scored_rows = {ref: [row for row in rows if _scored_twice(row)] for ref, rows in models.items()}
    all_scored = [row for rows in scored_rows.values() for row in rows]
    model_moves = _rank_moves(_means_by_name(scored_rows))
    task_means = _means_by_name(_rows_by_task(all_scored))
    return RankChanges(
        rows=len(all_scored),
        changed=sum(row.reward != row.reward_before for row in all_scored),
        success_gained=_count_success(all_scored, before=False, after=True),
        success_lost=_count_success(all_scored, before=True, after=False),
        models=model_moves,
        model_flips=_model_flips(model_moves),
        # If there are many tasks, a sample: the time grows with the square of their number.
        tasks=count_pairs(_sample_if_many(list(task_means.values()))),
        attempts=_count_pairs_of_attempts(scored_rows.values()),
        moved=_furthest_moves(_rank_moves(task_means)),
    )


def _means_by_name(rows_by_name: Mapping[str, Sequence[EvaluationRow]]) -> dict[str, BeforeAfter]:
    """The mean reward (before, after) of each model or task, by name. Names without rows are left
    out."""
    return {name: _mean_rewards(rows) for name, rows in rows_by_name.items() if rows}


def _count_success(rows: Sequence[EvaluationRow], *, before: bool, after: bool) -> int:
    """How many answers had the success `before` under the old reward and `after` under the new
    one."""
    return sum(row.success_before == before and row.success == after for row in rows)


def _count_pairs_of_attempts(rows_of_models: Iterable[Sequence[EvaluationRow]]) -> PairCounts:
    """Count pairs of attempts (by one model at one task) by what happened to their order.

    The counts are summed over all tasks and models. Each element of `rows_of_models` holds the rows
    of one model.
    """
    counts = PairCounts()
    for model_rows in rows_of_models:
        for rows in _rows_by_task(model_rows).values():
            counts += count_pairs([_rewards(row) for row in rows])
    return counts


def count_pairs(items: Iterable[BeforeAfter]) -> PairCounts:
    """Count pairs of items by what happened to their order, as `PairCounts` defines it.

    `items` holds one (value before, value after) per item.
    """
    # (order before, order after) -> number of pairs. An order is 1 or -1; 0 means equal. Pairs that
    # are equal both times are not in it.
    pairs = _pairs_by_order(items)
    return PairCounts(
        kept=pairs[1, 1] + pairs[-1, -1],
        reversed=pairs[1, -1] + pairs[-1, 1],
        tied=pairs[1, 0] + pairs[-1, 0],
        parted=sum(count for (order_before, _), count in pairs.items() if order_before == 0),
    )


def _pairs_by_order(items: Iterable[BeforeAfter]) -> Counter[tuple[int, int]]:
    """Count the pairs of items by their order: (order before, order after) -> number of pairs.

    An order is 1 if the first item of a pair has the higher value, -1 if the second has, 0 for
    equal values. Items that agree in both values are counted as one group; pairs within a group are
    equal before and after, and are left out.
    """
    pairs: Counter[tuple[int, int]] = Counter()
    groups = list(Counter(items).items())
    for index, ((before, after), size) in enumerate(groups):
        for (other_before, other_after), other_size in groups[index + 1 :]:
            orders = _sign(before - other_before), _sign(after - other_after)
            pairs[orders] += size * other_size
    return pairs


def sentence(changes: RankChanges) -> str:
    """The changes in one sentence, such as "12 of 80 rewards changed; the models keep their order;
    3 of 40 ordered pairs of tasks are reversed.". At most three reversed pairs of models are
    named."""
    if not changes.rows:
        return "No answer was scored by both rewards."
    parts = [f"{changes.changed} of {changes.rows} rewards changed"]
    gained, lost = changes.success_gained, changes.success_lost
    if gained or lost:
        parts.append(f"success changed on {gained + lost} answers ({gained} gained, {lost} lost)")
    parts += _order_of_models(changes)
    parts += _reversed_pairs(changes.tasks, "tasks")
    parts += _reversed_pairs(changes.attempts, "attempts at one task")
    return "; ".join(parts) + "."


def _reversed_pairs(counts: PairCounts, items: str) -> list[str]:
    """How many pairs of `items` are reversed, as part of a sentence. Returns [] if none had an
    order."""
    if not counts.ordered_before:
        return []
    return [f"{counts.reversed} of {counts.ordered_before} ordered pairs of {items} are reversed"]


def _order_of_models(changes: RankChanges) -> list[str]:
    """What happened to the order of the models, as part of a sentence. Returns [] for a single
    model."""
    if changes.model_flips:
        new_leads = "; ".join(
            f"{new_leader} is ahead of {old_leader} now"
            for old_leader, new_leader in changes.model_flips[:3]
        )
        return [f"the order of the models turns round: {new_leads}"]
    return ["the models keep their order"] if len(changes.models) > 1 else []


def _rank_moves(means: Mapping[str, BeforeAfter]) -> list[RankMove]:
    """The mean rewards and the ranks of each model or task, before and after.

    `means` maps the name of a model or task to (mean before, mean after).
    """
    ranks_before = _ranks({name: before for name, (before, _) in means.items()})
    ranks_after = _ranks({name: after for name, (_, after) in means.items()})
    return [
        RankMove(
            name,
            before=rounded(before),
            after=rounded(after),
            rank_before=ranks_before[name],
            rank_after=ranks_after[name],
        )
        for name, (before, after) in means.items()
    ]


def _model_flips(moves: Sequence[RankMove]) -> list[tuple[str, str]]:
    """The pairs of models whose order is reversed, as (was ahead, is ahead now).

    A pair that is tied before or after does not count.
    """
    flips = []
    for first, second in itertools.permutations(moves, 2):
        was_ahead = first.rank_before < second.rank_before
        is_behind = first.rank_after > second.rank_after
        if was_ahead and is_behind:
            flips.append((first.name, second.name))
    return flips


def _furthest_moves(moves: Sequence[RankMove]) -> list[RankMove]:
    """At most `SHOWN` tasks whose rank moved, the furthest first; equal moves by name."""

    def furthest_first(move: RankMove) -> tuple[int, str]:
        """The sort key: how many ranks the task moved, negated, then its name."""
        return -abs(move.rank_after - move.rank_before), move.name

    moved = [move for move in moves if move.rank_before != move.rank_after]
    return sorted(moved, key=furthest_first)[:SHOWN]


def _ranks(values: Mapping[str, float]) -> dict[str, int]:
    """The rank of each name: 1 for the highest value; equal values share the better rank."""
    best_rank: dict[float, int] = {}  # value -> rank
    for rank, value in enumerate(sorted(values.values(), reverse=True), 1):
        best_rank.setdefault(value, rank)
    return {name: best_rank[value] for name, value in values.items()}


def _rows_by_task(rows: Iterable[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """The rows by task id."""
    by_task: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return by_task


def _mean_rewards(rows: Sequence[EvaluationRow]) -> BeforeAfter:
    """The mean reward (before, after) of these rows, of which there must be at least one."""
    rewards_before: list[list[float]] = []  # for each task the old rewards of its attempts
    rewards_after: list[list[float]] = []  # and the new ones
    for task_rows in _rows_by_task(rows).values():
        rewards = [_rewards(row) for row in task_rows]
        rewards_before.append([before for before, _ in rewards])
        rewards_after.append([after for _, after in rewards])
    return _mean_over_tasks(rewards_before), _mean_over_tasks(rewards_after)


def _mean_over_tasks(values_by_task: Sequence[Sequence[float]]) -> float:
    """The mean over tasks of the mean over each task's attempts.

    Rounded to 9 digits, so that equal means stay equal in spite of rounding errors.
    """
    task_means = [math.fsum(values) / len(values) for values in values_by_task]
    return round(math.fsum(task_means) / len(task_means), 9)


def _rewards(row: EvaluationRow) -> BeforeAfter:
    """(reward before, reward now); a missing reward counts as 0."""
    return row.reward_before or 0.0, row.reward or 0.0


def _scored_twice(row: EvaluationRow) -> bool:
    """Whether both scorings of the row, by the old and by the new reward, worked."""
    return not row.error and not row.error_before


def _sample_if_many(values: list[BeforeAfter]) -> list[BeforeAfter]:
    """All `values`, or a random sample of `MOST_TASKS` of them if more than that are distinct.

    The seed is the number of values, so that the same values always give the same sample.
    """
    if len(set(values)) <= MOST_TASKS:
        return values
    return random.Random(len(values)).sample(values, MOST_TASKS)


def _sign(value: float) -> int:
    """The sign of a number: -1, 0 or 1."""
    return (value > 0) - (value < 0)  # True counts as 1
