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

LEAST_ROWS = 3  # scored even if that takes longer than the budget...
OVERRUN = 3.0  # ...up to so many times the budget
POOL = 200  # rows whose reference answers may serve as wrong answers to other rows
AGAIN = 12  # rows of which an answer is scored once more at the end, the last first


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
    """Score the probes of as many rows as fit into the time, and report what they were paid.

    Args:
        scorer: an env process.
        rows: stored task rows; taken in a random order given by `seed`.
        kind: of the environment: single, multi or sft. With sft there is no scorer, so nothing is
            scored.
        budget_s: seconds; at least `LEAST_ROWS` rows are scored, up to `OVERRUN` times as long.
        clock: the time in seconds.
        fresh: starts a scorer that has scored nothing yet; it scores a sample of the answers again.
            It may be called twice, and may raise EnvProblem. None leaves this check out.

    The `verdict` of the report is ok, warn or risk.
    """
    if kind == "sft" or not rows:
        return verdict.unscored(len(rows), seed)
    began = clock()
    rng = random.Random(seed)
    order = rng.sample(range(len(rows)), len(rows))
    pool = [Task.from_row(rows[index]) for index in order[:POOL]]
    findings = Findings()
    probe = _probe_messages if kind == "multi" else _probe_text
    first_scores: list[_FirstScore] = []

    def late() -> bool:
        """Whether even the overrun of the budget is used up."""
        return clock() - began > OVERRUN * budget_s

    for index in order:
        if clock() - began > budget_s and (findings.rows >= LEAST_ROWS or late()):
            break
        first_score = probe(scorer, rows[index], pool, rng, findings, late)
        if first_score is not None and len(first_scores) < AGAIN:
            first_scores.append(first_score)
        findings.rows += 1
    # In another order than before: a scorer that keeps a state shows it.
    for first_score in reversed(first_scores):
        if late():
            break
        first_score.revisit(findings)
    if fresh is not None:
        findings.fresh = rescore.score_again(_sample(findings), fresh, late)
    return verdict.report(findings, len(rows), seed, clock() - began)


def _sample(findings: Findings) -> list[Scored]:
    """The answers that a new process is to score again.

    First those scored last, the newest first, because a process that keeps a state differs most at
    its end. Then up to `FRESH` earlier ones, spread evenly over all rows.
    """
    last = list(findings.last)[::-1]
    ids_of_last = {id(answer) for answer in last}  # of the objects: an answer may be in both lists
    earlier = [answer for answer in findings.before if id(answer) not in ids_of_last]
    count = min(FRESH, len(earlier))
    return last + [earlier[index * len(earlier) // count] for index in range(count)]


@dataclass(frozen=True)
class _FirstScore:
    """What an answer earned when it was first scored, to be compared with what it earns later.

    `again` scores the same answer once more.
    """

    task_id: str
    reward: float
    again: Callable[[], ScoreReply]

    def revisit(self, findings: Findings) -> None:
        """Score the answer once more; if its reward has changed, add it to `findings.drifted`."""
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
) -> _FirstScore | None:
    """Make the probes of a single-turn row and score them.

    `pool` holds tasks whose reference answers serve as wrong ones; `rng` makes random choices. The
    other arguments and the result are those of `_score_all`.
    """
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
) -> _FirstScore | None:
    """Make the probes of a multi-turn row and play them.

    `pool` holds tasks whose reference answers serve as wrong ones; `rng` makes random choices. The
    other arguments and the result are those of `_score_all`.
    """
    task = Task.from_row(row)
    others = [_assistant(other) for other in pool if other.id != task.id and other.answer]
    probes = message_probes(task.prompt_text, _assistant(task), others, rng)
    return _score_all(
        probes, scorer, lambda who, answer: play(who, row, answer), task.id, findings, late
    )


def _assistant(task: Task) -> list[ChatMessage]:
    """The assistant messages of a task's reference answer; [] if it has none."""
    return [message.to_dict() for message in task.answer_messages if message.role == "assistant"]


def play(
    scorer: Scorer, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> ScoreReply:
    """Play a rollout in which the model says `messages`, one per turn, and return its score.

    The environment may end the rollout before the last message. If the rollout fails, the result is
    a score of 0 with the reason as its `error`; nothing is raised.
    """
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
    """The score of a rollout that raised `error`: reward 0, with the error's text."""
    return {"reward": 0.0, "success": False, "metrics": {}, "error": str(error), "seconds": 0.0}


def _score_all(
    probes: Mapping[str, Any],
    scorer: Scorer,
    ask: Ask,
    task_id: str,
    findings: Findings,
    late: Callable[[], bool],
) -> _FirstScore | None:
    """Score all probes of a row and add the results to `findings`.

    One answer (gold, or the first one if there is no gold) is scored twice in a row and once more
    after all others. That finds a scorer that is random or keeps a state.

    Args:
        probes: name of the probe -> its answer.
        ask: scores one answer with a scorer.
        task_id: the row's task.
        late: tells whether the time is up. It is asked before every answer, because each answer of
            a scorer that hangs takes the time limit of a whole call.

    Returns the first score of the answer that was scored again, so that it can be compared once
    more at the end of the audit; None if the time was up before all probes were scored.
    """
    order = list(probes)
    # Every second row is scored the other way round, so that gold is not always the first.
    if findings.rows % 2 and len(order) > 1:
        order.reverse()
    results: dict[str, ScoreReply] = {}
    repeated = ""  # the name of the probe that was scored twice in a row
    for name in order:
        # The very first answer is scored whatever the time: a report needs one.
        if (findings.tallies or results) and late():
            findings.cut = True
            break
        results[name] = ask(scorer, probes[name])
        findings.seconds.append(results[name].get("seconds", 0.0))
        # True once per row: for gold, or for the first probe of a row without gold.
        if name in (GOLD, order[0]) and not repeated and (GOLD not in probes or name == GOLD):
            repeated = name
            second = ask(scorer, probes[name])
            if len(findings.seconds) == 1 and second["reward"] != results[name]["reward"]:
                # The first call of all may be slow beyond a limit inside of score(), so it is
                # replaced by the second, and that one by a third.
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
    _keep_for_rescoring(findings, ask, task_id, probes, results)
    if findings.cut or not repeated:
        return None
    first_score = _FirstScore(
        task_id, results[repeated]["reward"], lambda: ask(scorer, probes[repeated])
    )
    first_score.revisit(findings)
    return first_score


def _keep_for_rescoring(
    findings: Findings,
    ask: Ask,
    task_id: str,
    probes: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
) -> None:
    """Keep a row's answers in `findings`, so that a new process can score them again.

    All of them go to `findings.last`, which keeps only the newest. Gold and one other answer go to
    `findings.before`, which keeps them for every row. Answers on which scoring failed are left out,
    because a call that was too slow once may be fast the next time.
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
    # Each row takes the next of the other probes, so that all of them are in the sample.
    other = others[findings.rows % len(others)] if others else GOLD
    findings.before += [scored[name] for name in (GOLD, other) if name in scored]
