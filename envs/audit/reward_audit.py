"""The reward audit: what does a scorer pay for answers that are none?

Rows are scored in a seeded random order until the time is up; the share covered is part of the
result. Of each row the reference answer (gold) and a set of wrong and degenerate answers (the
probes) are scored. One answer of a row is scored twice in a row and again after the others; at the
end some rows are scored once more in another order, and some answers by a new process: a scorer
must give one answer one reward. What follows from the numbers: `verdict.py`.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.audit import rescore, verdict
from envs.audit.audit_report import AuditReport, RewardChange
from envs.audit.findings import FRESH, Findings, Tally, shortened
from envs.audit.probes import GOLD, message_probes, text_probes
from envs.audit.rescore import Scored
from envs.base import Task
from envs.json_types import ChatMessage, ScoreReply

LEAST_ROWS = 3  # scored whatever the time says, up to `OVERRUN` times the budget
OVERRUN = 3.0
POOL = 200  # other rows that probes are drawn from
AGAIN = 12  # rows scored once more at the very end, the last first


class Scorer(Protocol):
    """What the audit needs of an env process."""

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply: ...

    def start(self, task: Mapping[str, Any]) -> Any: ...


Ask = Callable[[Any, Any], ScoreReply]  # (scorer, answer to a probe) -> score


def audit(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    kind: str,
    *,
    seed: int = 0,
    budget_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    fresh: Callable[[], Scorer] | None = None,
) -> AuditReport:
    """Scores the probes of as many `rows` (stored task rows) as fit into `budget_s` seconds.

    Args:
        fresh: gives a scorer that has scored nothing yet, for a sample to be scored again by; it
            may be called twice, and raise EnvProblem where there is none to be had.

    Its `verdict` is ok, warn or risk. With `kind` "sft" there is no scorer: nothing is scored.
    """
    if kind == "sft" or not rows:
        return verdict.unscored(len(rows), seed)
    began = clock()
    rng = random.Random(seed)
    order = rng.sample(range(len(rows)), len(rows))
    pool = [Task.from_row(rows[index]) for index in order[:POOL]]
    findings = Findings()
    probe = _probe_messages if kind == "multi" else _probe_text
    firsts: list[_First] = []

    def late() -> bool:
        return clock() - began > OVERRUN * budget_s

    for index in order:
        if clock() - began > budget_s and (findings.rows >= LEAST_ROWS or late()):
            break
        first = probe(scorer, rows[index], pool, rng, findings, late)
        if first is not None and len(firsts) < AGAIN:
            firsts.append(first)
        findings.rows += 1
    for first in reversed(firsts):
        if late():
            break
        first.revisit(findings)
    if fresh is not None:
        findings.fresh = rescore.score_again(_sample(findings), fresh, late)
    return verdict.report(findings, len(rows), seed, clock() - began)


def _sample(findings: Findings) -> list[Scored]:
    """Answers for a new process to score: those scored last, newest first, because a process that
    keeps a state differs most at its end; then as many others, spread over all rows."""
    last = list(findings.last)[::-1]
    known = {id(each) for each in last}
    before = [each for each in findings.before if id(each) not in known]
    count = min(FRESH, len(before))
    return last + [before[index * len(before) // count] for index in range(count)]


@dataclass(frozen=True)
class _First:
    """What an answer earned when it was first scored, to be compared with what it earns later."""

    task_id: str
    reward: float
    again: Callable[[], ScoreReply]

    def revisit(self, findings: Findings) -> None:
        reward = self.again()["reward"]
        findings.revisited += 1
        if reward != self.reward:
            change = RewardChange(task=self.task_id, first=self.reward, second=reward)
            findings.drifted.append(change)


def _probe_text(
    scorer: Scorer,
    row: Mapping[str, Any],
    pool: Sequence[Task],
    rng: random.Random,
    findings: Findings,
    late: Callable[[], bool],
) -> _First | None:
    task = Task.from_row(row)
    gold = task.answer_text if task.answer is not None else None
    others = [other.answer_text for other in pool if other.id != task.id and other.answer]
    probes = text_probes(task.prompt_text, gold, others, rng)
    return _score_all(
        probes, scorer, lambda who, text: who.score(row, text), task.id, findings, late
    )


def _probe_messages(
    scorer: Scorer,
    row: Mapping[str, Any],
    pool: Sequence[Task],
    rng: random.Random,
    findings: Findings,
    late: Callable[[], bool],
) -> _First | None:
    task = Task.from_row(row)
    others = [_assistant(other) for other in pool if other.id != task.id and other.answer]
    probes = message_probes(task.prompt_text, _assistant(task), others, rng)
    return _score_all(
        probes, scorer, lambda who, answer: play(who, row, answer), task.id, findings, late
    )


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
        return _failed(error)
    try:
        for message in messages:
            if episode.step(message) is None:
                break
        score = episode.score()
    except Exception as error:  # noqa: BLE001 - a failed rollout is a result here
        score = _failed(error)
    finally:
        episode.close()
    score["seconds"] = time.monotonic() - began
    return score


def _failed(error: Exception) -> ScoreReply:
    return {"reward": 0.0, "success": False, "metrics": {}, "error": str(error), "seconds": 0.0}


def _score_all(
    probes: Mapping[str, Any],
    scorer: Scorer,
    ask: Ask,
    task_id: str,
    findings: Findings,
    late: Callable[[], bool],
) -> _First | None:
    """Scores all probes of a row: gold first, twice in a row, and once more after all others, which
    shows a scorer that is random or remembers.

    Every second row is scored the other way round, so that what comes first is not always gold.
    Stops where it is `late`: each answer of a scorer that hangs costs the time of a whole call.
    """
    order = list(probes)
    if findings.rows % 2 and len(order) > 1:
        order.reverse()
    results: dict[str, ScoreReply] = {}
    repeat = ""
    for name in order:
        if (findings.tallies or results) and late():
            findings.cut = True
            break
        results[name] = ask(scorer, probes[name])
        findings.seconds.append(results[name].get("seconds", 0.0))
        if name in (GOLD, order[0]) and not repeat and (GOLD not in probes or name == GOLD):
            repeat = name
            second = ask(scorer, probes[name])
            if len(findings.seconds) == 1 and second["reward"] != results[name]["reward"]:
                # The first call of all may be slow beyond a limit inside of score().
                results[name], second = second, ask(scorer, probes[name])
            findings.repeat(task_id, results[name]["reward"], second["reward"])
    gold = results.get(GOLD)
    if gold is not None:
        findings.gold_rows += 1
        if gold["error"] or gold["success"] is False:
            findings.gold_failing.append(task_id)
    for name in probes:  # in their own order, whatever order they were scored in
        if name in results:
            earned = None if gold is None else gold["reward"]
            tally = findings.tallies.setdefault(name, Tally())
            tally.count(results[name], earned, probes[name], task_id)
    _keep(findings, ask, task_id, probes, results)
    if findings.cut or not repeat:
        return None
    first = _First(task_id, results[repeat]["reward"], lambda: ask(scorer, probes[repeat]))
    first.revisit(findings)
    return first


def _keep(
    findings: Findings,
    ask: Ask,
    task_id: str,
    probes: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
) -> None:
    """Keeps the answers that a new process may score again: of each row gold and one other, and
    every one of the last rows.

    Answers on which scoring failed are left out: a call that was too slow once may be fast again.
    """
    scored = {
        name: Scored(
            {"task": task_id, "probe": name, "completion": shortened(probes[name])},
            result["reward"],
            lambda who, answer=probes[name]: ask(who, answer),
        )
        for name, result in results.items()
        if not result["error"]
    }
    findings.last.extend(scored.values())
    others = [name for name in scored if name != GOLD]
    turn = others[findings.rows % len(others)] if others else GOLD
    findings.before += [scored[name] for name in (GOLD, turn) if name in scored]
