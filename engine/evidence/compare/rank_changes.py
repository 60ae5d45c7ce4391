"""What a new reward puts in another order: models, tasks, and attempts at one task.

Rows carry the reward they had (`reward_before`) beside the one they have now. GRPO learns from the
order of attempts within a task, people choose by the order of models: both may turn round although
every single reward moved little.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.evidence.stats.results import Row, rounded

MOST_TASKS = 1000  # distinct (before, after) pairs that are held against each other
SHOWN = 5
Pair = tuple[float, float]


def order_changes(models: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """What changed between two rewards of the same answers.

    Args:
        models: rows by model; those with an error before or after are left out of every number.

    Returns `rows` compared, `changed` ones (in their reward) and `success` (answers that gained or
    lost it, which may flip although no reward changed); `models` with mean and rank before and
    after, and `model_flips`, the pairs whose order is reversed; `tasks`, and `attempts` at one
    task by one model, each with the counts of `count_pairs`; `moved`, the tasks whose rank moved
    furthest.
    """
    scored = {ref: [row for row in rows if _both(row)] for ref, rows in models.items()}
    every = [row for rows in scored.values() for row in rows]
    table = _table(scored)
    tasks = {task: _means(rows) for task, rows in _by_task(every).items()}
    within = [
        count_pairs([_pair(row) for row in rows])
        for found in scored.values()
        for rows in _by_task(found).values()
    ]
    return {
        "rows": len(every),
        "changed": sum(row["reward"] != row["reward_before"] for row in every),
        "success": _success_flips(every),
        "models": table,
        "model_flips": _model_flips(table),
        "tasks": count_pairs(_sampled(list(tasks.values()))),
        "attempts": {key: sum(item[key] for item in within) for key in count_pairs([])},
        "moved": _moved(tasks),
    }


def count_pairs(values: Iterable[Pair]) -> dict[str, int]:
    """Pairs of (before, after) values by what became of their order.

    kept: ordered the same way; reversed; tied: ordered before and equal now; parted: equal before
    and ordered now. Pairs equal both times are in none of them.
    """
    found = {"kept": 0, "reversed": 0, "tied": 0, "parted": 0}
    counts = list(Counter(values).items())
    for at, ((before, after), times) in enumerate(counts):
        for (other_before, other_after), other_times in counts[at + 1 :]:
            was, now = _sign(before - other_before), _sign(after - other_after)
            if was and now:
                found["kept" if was == now else "reversed"] += times * other_times
            elif was or now:
                found["tied" if was else "parted"] += times * other_times
    return found


def sentence(changes: Mapping[str, Any]) -> str:
    """The changes in one sentence."""
    if not changes["rows"]:
        return "No answer was scored by both rewards."
    text = f"{changes['changed']} of {changes['rows']} rewards changed"
    gained, lost = (changes["success"][way] for way in ("gained", "lost"))
    if gained or lost:
        text += f"; success changed on {gained + lost} answers ({gained} gained, {lost} lost)"
    flips = changes["model_flips"]
    if flips:
        pairs = "; ".join(f"{now} is ahead of {was} now" for was, now in flips[:3])
        text += f"; the order of the models turns round: {pairs}"
    elif len(changes["models"]) > 1:
        text += "; the models keep their order"
    for what in ("tasks", "attempts"):
        found = changes[what]
        ordered = found["kept"] + found["reversed"] + found["tied"]
        if ordered:
            name = "attempts at one task" if what == "attempts" else what
            text += f"; {found['reversed']} of {ordered} ordered pairs of {name} are reversed"
    return text + "."


def _success_flips(rows: Iterable[Row]) -> dict[str, int]:
    pairs = [(row.get("success_before"), row.get("success")) for row in rows]
    return {"gained": pairs.count((False, True)), "lost": pairs.count((True, False))}


def _table(scored: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    means = {ref: _means(rows) for ref, rows in scored.items() if rows}
    ranks = [_ranks({ref: pair[side] for ref, pair in means.items()}) for side in (0, 1)]
    return [
        {
            "model": ref,
            "before": rounded(before),
            "after": rounded(after),
            "rank_before": ranks[0][ref],
            "rank_after": ranks[1][ref],
        }
        for ref, (before, after) in means.items()
    ]


def _model_flips(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[who was ahead, who is ahead now] of every pair whose order is reversed."""
    return [
        [one["model"], other["model"]]
        for one in table
        for other in table
        if one["rank_before"] < other["rank_before"] and one["rank_after"] > other["rank_after"]
    ]


def _moved(tasks: Mapping[str, Pair]) -> list[dict[str, Any]]:
    before = _ranks({task: pair[0] for task, pair in tasks.items()})
    after = _ranks({task: pair[1] for task, pair in tasks.items()})
    order = sorted(tasks, key=lambda task: (-abs(after[task] - before[task]), task))
    return [
        {
            "task": task,
            "before": rounded(tasks[task][0]),
            "after": rounded(tasks[task][1]),
            "rank_before": before[task],
            "rank_after": after[task],
        }
        for task in order[:SHOWN]
        if before[task] != after[task]
    ]


def _ranks(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the highest; equal values share the better rank."""
    ordered = sorted(values.values(), reverse=True)
    first = {value: at for at, value in reversed(list(enumerate(ordered, 1)))}
    return {name: first[value] for name, value in values.items()}


def _by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("task")), []).append(row)
    return found


def _means(rows: Sequence[Row]) -> Pair:
    """Mean over tasks of the mean over attempts, before and after; rounded, so that ties stay."""
    pairs = [[_pair(row) for row in found] for found in _by_task(rows).values()]
    sides = []
    for side in (0, 1):
        means = [math.fsum(pair[side] for pair in found) / len(found) for found in pairs]
        sides.append(round(math.fsum(means) / len(means), 9))
    return sides[0], sides[1]


def _pair(row: Row) -> Pair:
    return float(row["reward_before"]), float(row["reward"])


def _both(row: Row) -> bool:
    return not row.get("error") and not row.get("error_before")


def _sampled(values: list[Pair]) -> list[Pair]:
    if len(set(values)) <= MOST_TASKS:
        return values
    return random.Random(len(values)).sample(values, MOST_TASKS)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
