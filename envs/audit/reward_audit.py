"""The reward audit: what does a scorer pay for answers that are none?

Rows are scored in a seeded random order until the time is up; the share covered is part of the
result. A scorer is a risk when a degenerate answer earns at least half of what the reference
answer earns, when everything earns the same, when many reference answers fail, or when the same
answer earns two rewards: scored twice in a row, again after others in another order, or by a new
process that has scored nothing else. Near misses that are paid, pay that rises with the length of
nothing, and answers that make it raise are weaknesses: said, and no risk.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.audit import rescore
from envs.audit.audit_summary import PAYS_FOR_LENGTH, headline, pays_for_length
from envs.audit.probes import GOLD, INFORMATIVE, NEAR, PROBES, message_probes, text_probes
from envs.audit.rescore import Scored
from envs.base import Task
from envs.json_types import ChatMessage, ScoreReply

PAID = 0.5  # of what gold earns
GOLD_FAILURES = 0.1  # share of rows
UNSTABLE = 0.02  # share of rows scored twice
LEAST_ROWS = 3  # scored whatever the time says, up to `OVERRUN` times the budget
OVERRUN = 3.0
POOL = 200  # other rows that probes are drawn from
AGAIN = 12  # rows scored once more at the very end, the last first
FRESH = 12  # answers of the end that a new process scores, and as many of the rows before
RAISING = 0.05  # share of the answers to a probe on which a score may fail before it is a weakness
SHOWN = 5


class Scorer(Protocol):
    """What the audit needs of an env process."""

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply: ...

    def start(self, task: Mapping[str, Any]) -> Any: ...


Ask = Callable[[Any, Any], ScoreReply]  # (scorer, answer to a probe) -> score


@dataclass
class _Tally:
    """What one probe earned so far."""

    rewards: list[float] = field(default_factory=list)
    golds: list[float] = field(default_factory=list)  # of the same rows, where there is gold
    successes: int = 0
    errors: int = 0
    paid: int = 0
    below: float = 0.0  # rows on which gold earned more; a tie counts half
    example: dict[str, Any] | None = None
    error: str = ""

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)


@dataclass
class _Findings:
    tallies: dict[str, _Tally] = field(default_factory=dict)
    gold_failing: list[str] = field(default_factory=list)
    gold_rows: int = 0
    repeated: int = 0
    unstable: list[dict[str, Any]] = field(default_factory=list)  # twice in a row, two rewards
    revisited: int = 0
    drifted: list[dict[str, Any]] = field(default_factory=list)  # changed by what came between
    last: deque[Scored] = field(default_factory=lambda: deque(maxlen=FRESH))
    before: list[Scored] = field(default_factory=list)  # gold and another answer of each row
    fresh: dict[str, Any] = field(default_factory=dict)  # what a new process said of some of them
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    cut: bool = False  # the time was up in the middle of a row


def audit(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    kind: str,
    *,
    seed: int = 0,
    budget_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    fresh: Callable[[], Scorer] | None = None,
) -> dict[str, Any]:
    """Scores the probes of as many `rows` (stored task rows) as fit into `budget_s` seconds.

    Args:
        fresh: gives a scorer that has scored nothing yet, for a sample to be scored again by; it
            may be called twice, and raise EnvProblem where there is none to be had.

    Returns a JSON object: `verdict` (ok, warn or risk), `headline`, `risks` and `weaknesses`
    (names), `probes` (a table), `separability` (near miss -> share of rows where gold earns more),
    `saturation`, `rows_scored`, `rows`, `share`, `deterministic`, `order_dependent`,
    `fresh_process` (see envs/audit/rescore.py), `gold_failing`, `problems`, `seed`, `seconds`.
    """
    if kind == "sft" or not rows:
        return _unscored(len(rows), seed)
    began = clock()
    rng = random.Random(seed)
    order = rng.sample(range(len(rows)), len(rows))
    pool = [Task.from_row(rows[index]) for index in order[:POOL]]
    found = _Findings()
    probe = _probe_messages if kind == "multi" else _probe_text
    firsts: list[_First] = []

    def late() -> bool:
        return clock() - began > OVERRUN * budget_s

    for index in order:
        if clock() - began > budget_s and (found.rows >= LEAST_ROWS or late()):
            break
        first = probe(scorer, rows[index], pool, rng, found, late)
        if first is not None and len(firsts) < AGAIN:
            firsts.append(first)
        found.rows += 1
    for first in reversed(firsts):
        if late():
            break
        first.revisit(found)
    if fresh is not None:
        found.fresh = rescore.score_again(_sample(found), fresh, late)
    return _verdict(found, len(rows), seed, clock() - began)


def _sample(found: _Findings) -> list[Scored]:
    """What was scored last, then others from all over the rows; the last first: a process that
    changes in the middle of its life was another one by then."""
    last = list(found.last)[::-1]
    known = {id(each) for each in last}
    before = [each for each in found.before if id(each) not in known]
    kept = min(FRESH, len(before))
    return last + [before[at * len(before) // kept] for at in range(kept)]


@dataclass(frozen=True)
class _First:
    """What an answer earned when it was first scored, to be compared with what it earns later."""

    task_id: str
    reward: float
    again: Callable[[], ScoreReply]

    def revisit(self, found: _Findings) -> None:
        reward = self.again()["reward"]
        found.revisited += 1
        if reward != self.reward:
            change = {"task": self.task_id, "first": self.reward, "second": reward}
            found.drifted.append(change)


def _probe_text(
    scorer: Scorer,
    row: Mapping[str, Any],
    pool: Sequence[Task],
    rng: random.Random,
    found: _Findings,
    late: Callable[[], bool],
) -> _First | None:
    task = Task.from_row(row)
    gold = task.answer_text if task.answer is not None else None
    others = [other.answer_text for other in pool if other.id != task.id and other.answer]
    probes = text_probes(task.prompt_text, gold, others, rng)
    return _score_all(probes, scorer, lambda who, text: who.score(row, text), task.id, found, late)


def _probe_messages(
    scorer: Scorer,
    row: Mapping[str, Any],
    pool: Sequence[Task],
    rng: random.Random,
    found: _Findings,
    late: Callable[[], bool],
) -> _First | None:
    task = Task.from_row(row)
    others = [_assistant(other) for other in pool if other.id != task.id and other.answer]
    probes = message_probes(task.prompt_text, _assistant(task), others, rng)
    return _score_all(probes, scorer, lambda who, said: play(who, row, said), task.id, found, late)


def _assistant(task: Task) -> list[ChatMessage]:
    return [message.to_dict() for message in task.answer_messages if message.role == "assistant"]


def play(
    scorer: Scorer, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> ScoreReply:
    """The score of a rollout in which the model says `messages`, as far as the env lets it."""
    began = time.monotonic()
    try:
        episode = scorer.start(row)
    except Exception as error:  # noqa: BLE001 - a failed rollout is a result here
        return {"reward": 0.0, "success": False, "error": str(error), "seconds": 0.0}
    try:
        for message in messages:
            if episode.step(message) is None:
                break
        score = episode.score()
    except Exception as error:  # noqa: BLE001 - a failed rollout is a result here
        score = {"reward": 0.0, "success": False, "error": str(error)}
    finally:
        episode.close()
    score["seconds"] = time.monotonic() - began
    return score


def _score_all(
    probes: Mapping[str, Any],
    scorer: Scorer,
    ask: Ask,
    task_id: str,
    found: _Findings,
    late: Callable[[], bool],
) -> _First | None:
    """Gold first, twice, and once more after all others: chance and memory give themselves away.

    Every second row is scored the other way round, so that what comes first is not always gold.
    Stops where it is `late`: each answer of a scorer that hangs costs the time of a whole call.
    """
    order = list(probes)
    if found.rows % 2 and len(order) > 1:
        order.reverse()
    results: dict[str, ScoreReply] = {}
    repeat = ""
    for name in order:
        if (found.tallies or results) and late():
            found.cut = True
            break
        results[name] = ask(scorer, probes[name])
        found.seconds.append(results[name]["seconds"])
        if name in (GOLD, order[0]) and not repeat and (GOLD not in probes or name == GOLD):
            repeat = name
            second = ask(scorer, probes[name])
            if len(found.seconds) == 1 and second["reward"] != results[name]["reward"]:
                # The first call of all may be slow beyond a limit inside of score().
                results[name], second = second, ask(scorer, probes[name])
            _repeat(found, second["reward"], results[name]["reward"], task_id)
    gold = results.get(GOLD)
    if gold is not None:
        found.gold_rows += 1
        if gold["error"] or gold["success"] is False:
            found.gold_failing.append(task_id)
    for name in probes:  # in their own order, whatever order they were scored in
        if name in results:
            earned = None if gold is None else gold["reward"]
            tally = found.tallies.setdefault(name, _Tally())
            _count(tally, results[name], earned, probes[name], task_id)
    _keep(found, ask, task_id, probes, results)
    if found.cut or not repeat:
        return None
    first = _First(task_id, results[repeat]["reward"], lambda: ask(scorer, probes[repeat]))
    first.revisit(found)
    return first


def _keep(
    found: _Findings,
    ask: Ask,
    task_id: str,
    probes: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
) -> None:
    """What a new process may be asked about: of each row gold and one other, of the end all.

    Not what failed: a call that took too long this time says nothing of the one to come.
    """
    scored = {
        name: Scored(
            {"task": task_id, "probe": name, "completion": _said(probes[name])},
            result["reward"],
            lambda who, answer=probes[name]: ask(who, answer),
        )
        for name, result in results.items()
        if not result["error"]
    }
    found.last.extend(scored.values())
    others = [name for name in scored if name != GOLD]
    turn = others[found.rows % len(others)] if others else GOLD
    found.before += [scored[name] for name in (GOLD, turn) if name in scored]


def _repeat(found: _Findings, second: float, first: float, task_id: str) -> None:
    found.repeated += 1
    if second != first:
        found.unstable.append({"task": task_id, "first": first, "second": second})


def _count(
    tally: _Tally, result: Mapping[str, Any], gold: float | None, answer: Any, task_id: str
) -> None:
    reward = result["reward"]
    tally.rewards.append(reward)
    tally.successes += result["success"] is True
    if result["error"]:
        tally.errors += 1
        tally.error = tally.error or str(result["error"])[:200]
    if gold is not None:
        tally.golds.append(gold)
        tally.below += 1.0 if gold > reward else 0.5 if gold == reward else 0.0
    pays = result["success"] is True or reward >= PAID
    if gold is not None:
        pays = gold > 0 and reward >= PAID * gold
    tally.paid += pays
    if pays and tally.example is None:
        tally.example = {"task": task_id, "completion": _said(answer), "reward": reward}


def _said(answer: Any) -> str:
    said = answer if isinstance(answer, str) else " / ".join(m["content"] for m in answer)
    return said[:160]


def _verdict(found: _Findings, rows: int, seed: int, seconds: float) -> dict[str, Any]:
    lowest = min(tally.mean for tally in found.tallies.values())
    table = [_line(name, found.tallies[name], lowest) for name in PROBES if name in found.tallies]
    risks = [line["probe"] for line in table if line["verdict"] == "risk"]
    if _all_alike(found):
        risks = ["all alike"]
    if found.gold_rows and len(found.gold_failing) > GOLD_FAILURES * found.gold_rows:
        risks.insert(0, GOLD)
    wavering = found.fresh.get("wavering", 0) > _tolerated(found)
    if len(found.unstable) > UNSTABLE * found.repeated or wavering:
        risks.append("unstable")
    else:
        if len(found.drifted) > UNSTABLE * found.revisited:
            risks.append("order dependent")
        if rescore.differing(found.fresh) > _tolerated(found):
            risks.append("fresh process")
    weaknesses = [line["probe"] for line in table if line["verdict"] == "warn"]
    if pays_for_length(table):
        weaknesses.append(PAYS_FOR_LENGTH)
    if any(line["errors"] > RAISING * line["rows"] for line in table):
        weaknesses.append("raises")
    ordered = sorted(found.seconds)
    failing = len(found.gold_failing), found.gold_rows
    return {
        "verdict": "risk" if risks else "warn" if weaknesses else "ok",
        "headline": headline(
            risks, weaknesses, table, failing, f"{found.rows} of {rows} rows scored"
        ),
        "risks": risks,
        "weaknesses": weaknesses,
        "probes": table,
        "separability": {line["probe"]: line["separated"] for line in table if "separated" in line},
        "saturation": _saturation(found),
        "rows_scored": found.rows,
        "rows": rows,
        "share": round(found.rows / rows, 4),
        "deterministic": not found.unstable and not wavering,
        "order_dependent": bool(found.drifted) and not found.unstable,
        "fresh_process": found.fresh,
        "unstable": (found.unstable or found.drifted)[:SHOWN],
        "gold_failing": found.gold_failing[:20],
        "problems": _problems(found, table),
        "score_seconds_p95": round(ordered[round(0.95 * (len(ordered) - 1))], 6),
        "seed": seed,
        "seconds": round(seconds, 3),
    }


def _tolerated(found: _Findings) -> float:
    """Answers that a new process may pay otherwise: one of so few is no share of anything."""
    return max(1.0, UNSTABLE * found.fresh.get("scored", 0))


def _problems(found: _Findings, table: list[dict[str, Any]]) -> list[str]:
    """What a person should read beside the table."""
    problems = []
    if _all_alike(found):
        problems.append("every answer, right or wrong, earns the same reward")
    if found.gold_failing:
        count, shown = len(found.gold_failing), ", ".join(found.gold_failing[:SHOWN])
        problems.append(f"{count} of {found.gold_rows} reference answers fail: {shown}")
    if not found.gold_rows:
        problems.append("no row has a reference answer: nothing shows that a right one is paid")
    if found.unstable:
        changed = f"{len(found.unstable)} of {found.repeated}"
        problems.append(f"{changed} answers scored twice in a row got two rewards")
    elif found.drifted:
        changed = f"{len(found.drifted)} of {found.revisited}"
        problems.append(
            f"{changed} answers got another reward once others had been scored: it keeps a state"
        )
    problems += [rescore.sentence(found.fresh)] if rescore.differing(found.fresh) else []
    for line in table:
        if line["errors"] and line["probe"] != GOLD:
            count = f"{line['errors']} of {line['rows']}"
            problems.append(f"score fails on {line['probe']} ({count}): {line['error']}")
    if found.cut:
        problems.append(
            f"score is so slow that the time was up after {len(found.seconds)} answers: not every "
            "probe was tried"
        )
    return problems


def _saturation(found: _Findings) -> dict[str, Any]:
    """How many rewards there are and who earns the highest: gold should, others should not."""
    rewards = {name: tally.rewards for name, tally in found.tallies.items()}
    top = max(reward for each in rewards.values() for reward in each)
    shares = {
        "gold_at_top": rewards.get(GOLD, []),
        "others_at_top": [
            reward for name, each in rewards.items() if name not in INFORMATIVE for reward in each
        ],
    }
    return {
        "top": round(top, 4),
        "levels": len({round(reward, 6) for each in rewards.values() for reward in each}),
    } | {
        name: round(sum(reward == top for reward in each) / len(each), 4) if each else None
        for name, each in shares.items()
    }


def _line(name: str, tally: _Tally, lowest: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "probe": name,
        "what": PROBES[name],
        "rows": len(tally.rewards),
        "mean": round(tally.mean, 4),
        "success": round(tally.successes / len(tally.rewards), 4),
        "paid": round(tally.paid / len(tally.rewards), 4),
        "errors": tally.errors,
        "verdict": _judged(name, tally, lowest),
    }
    if name in NEAR and tally.golds:
        line["separated"] = round(tally.below / len(tally.golds), 4)
    if tally.errors:
        line["error"] = tally.error
    if line["verdict"] in ("risk", "warn") and tally.example:
        line["example"] = tally.example
    return line


def _judged(name: str, tally: _Tally, lowest: float) -> str:
    if name in INFORMATIVE:
        return "info"
    if not _pays(tally, lowest):
        return "ok"
    return "warn" if name in NEAR else "risk"


def _pays(tally: _Tally, lowest: float) -> bool:
    """Whether a probe earns at least half of what gold earns on the same rows."""
    if not tally.golds:
        return tally.paid >= PAID * len(tally.rewards)
    gold = math.fsum(tally.golds) / len(tally.golds)
    if gold > 0:
        return tally.mean >= PAID * gold
    # Rewards that are all costs have no zero to speak of: the worst answer takes its place.
    return tally.mean - lowest >= PAID * (gold - lowest)


def _all_alike(found: _Findings) -> bool:
    rewards = [reward for tally in found.tallies.values() for reward in tally.rewards]
    return found.gold_rows > 0 and max(rewards) - min(rewards) < 1e-9


def _unscored(rows: int, seed: int) -> dict[str, Any]:
    return {
        "verdict": "ok",
        "headline": "no scorer: there is nothing to audit",
        "risks": [],
        "weaknesses": [],
        "probes": [],
        "separability": {},
        "saturation": {},
        "rows_scored": 0,
        "rows": rows,
        "share": 0.0,
        "deterministic": True,
        "order_dependent": False,
        "fresh_process": {},
        "unstable": [],
        "gold_failing": [],
        "problems": [],
        "score_seconds_p95": 0.0,
        "seed": seed,
        "seconds": 0.0,
    }
