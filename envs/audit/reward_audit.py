"""The reward audit: what does a scorer pay for answers that deserve nothing?

Rows are scored in a seeded random order until the time is up; the result says which share was
covered. For each row the reference answer (gold) and a set of wrong and degenerate answers (the
probes) are scored. A scorer must give one answer one reward. So one answer of each row is scored
twice in a row and again after the others; at the end some answers are scored once more in another
order, and some by a new process. `verdict.py` judges the numbers.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.audit import rescore, verdict
from envs.audit.audit_report import AuditReport
from envs.audit.findings import FRESH, Findings, Tally, shortened
from envs.audit.groups import MOST_GROUPS, GroupFindings, audit_group
from envs.audit.probes import GOLD, message_probes, text_probes
from envs.audit.rescore import Scored
from envs.base import Task
from envs.json_types import ChatMessage, ScoreReply

LEAST_ROWS = 3  # this many rows are scored even if that takes longer than the budget...
OVERRUN = 3.0  # ...up to this many times the budget
POOL = 200  # rows whose reference answers may serve as wrong answers to other rows
AGAIN = 12  # how many rows have an answer scored once more at the end


class Scorer(Protocol):
    """The methods of an env process that the audit calls."""

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        """Return the score of a completion in a single-turn environment."""
        ...

    def start(self, task: Mapping[str, Any]) -> Any:
        """Begin a rollout of a multi-turn environment; return its `Episode`."""
        ...


@dataclass(frozen=True)
class ProbedRow:
    """A task with its probes: the answers that are tried on the scorer.

    Attributes:
        task_id: the id of the task.
        answers: name of the probe -> its answer: a text, or messages in a multi-turn environment.
        score: (scorer, answer) -> the score of one answer.
    """

    task_id: str
    answers: Mapping[str, Any]
    score: Callable[[Any, Any], ScoreReply]

    def scored(self, name: str, reward: float) -> Scored:
        """Return the answer of the probe `name` with the reward it earned, to be scored again
        later."""
        answer = self.answers[name]
        return Scored(
            identity={"task": self.task_id, "probe": name, "completion": shortened(answer)},
            reward=reward,
            score=lambda scorer: self.score(scorer, answer),
        )


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

    The `verdict` of the report is ok, warn or risk.

    Args:
        scorer: an env process.
        rows: stored task rows; taken in a random order given by `seed`.
        kind: the environment's kind: single, multi (multi-turn), command (a program earns the
            rewards) or sft (no scorer). For the last two nothing is scored.
        seed: seed of the random choices.
        budget_s: seconds for the audit. LEAST_ROWS (3) rows are scored even if that takes longer,
            up to OVERRUN (3) times as long.
        clock: returns the time in seconds.
        fresh: starts a scorer that has scored nothing yet, to score a sample of the answers again.
            It may be called twice, and may raise EnvProblem. None leaves this check out.
    """
    if kind == "command":
        return verdict.unscored_command(len(rows), seed)
    if kind == "sft" or not rows:
        return verdict.unscored(len(rows), seed)
    budget = _Budget(budget_s, clock)
    findings = Findings()  # filled by the functions below
    session = _Session(scorer, budget, findings)
    first_scores = _score_rows(session, rows, kind, random.Random(seed))
    _revisit(first_scores, session)
    if compares_groups(scorer, kind):
        findings.of_groups = _score_groups(session, rows, random.Random(seed))
    if fresh is not None:
        findings.rescoring = rescore.score_again(_sample(findings), fresh, budget.is_overrun)
    return verdict.report(findings, len(rows), seed, budget.seconds_used())


class _Budget:
    """The time that an audit may take, counted from the creation of this object.

    Args:
        seconds: the time limit; the hard limit is `OVERRUN` times as long.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """Start the clock."""
        self._seconds = seconds
        self._clock = clock
        self._began = clock()

    def seconds_used(self) -> float:
        """Return how long the audit has taken so far."""
        return self._clock() - self._began

    def is_over(self) -> bool:
        """Whether the time limit is exceeded."""
        return self.seconds_used() > self._seconds

    def is_overrun(self) -> bool:
        """Whether the hard limit, three times the time limit, is exceeded too."""
        return self.seconds_used() > OVERRUN * self._seconds

    def allows_row(self, rows_scored: int) -> bool:
        """Whether one more row may be scored after `rows_scored` rows: within the time limit, or if
        they are fewer than LEAST_ROWS (3), within the hard limit."""
        if not self.is_over():
            return True
        return rows_scored < LEAST_ROWS and not self.is_overrun()


@dataclass(frozen=True)
class _Session:
    """A running audit: its scorer, its time, and what it has measured so far."""

    scorer: Scorer
    budget: _Budget
    findings: Findings


@dataclass(frozen=True)
class _FirstScore:
    """The first reward of an answer, to be compared with later ones.

    `score_again` scores the same answer once more.
    """

    task_id: str
    reward: float
    score_again: Callable[[], ScoreReply]

    def revisit(self, findings: Findings) -> None:
        """Score the answer once more and count in `findings` whether its reward has changed."""
        findings.count_revisited(self.task_id, self.reward, self.score_again()["reward"])


def _score_rows(
    session: _Session, rows: Sequence[Mapping[str, Any]], kind: str, rng: random.Random
) -> list[_FirstScore]:
    """Score the probes of the rows, in random order, until the time is up.

    `kind` is that of the environment, single or multi. Returns the first scores of up to AGAIN (12)
    answers, one per row, so that the caller can score these answers once more at the end.
    """
    order = rng.sample(range(len(rows)), len(rows))
    # Tasks whose reference answers serve as wrong answers to the other rows.
    pool = [Task.from_row(rows[index]) for index in order[:POOL]]
    first_scores: list[_FirstScore] = []
    for index in order:
        if not session.budget.allows_row(session.findings.rows):
            break
        first_score = _score_probes(session, probed_row(rows[index], kind, pool, rng))
        if first_score is not None and len(first_scores) < AGAIN:
            first_scores.append(first_score)
        session.findings.rows += 1
    return first_scores


def probed_row(
    row: Mapping[str, Any], kind: str, pool: Sequence[Task], rng: random.Random
) -> ProbedRow:
    """Return a row with its probes.

    Args:
        row: a stored task row.
        kind: the kind of the environment, single or multi.
        pool: tasks whose reference answers serve as wrong answers to this row.
        rng: the source of random choices.
    """
    make_row = _row_with_messages if kind == "multi" else _row_with_texts
    return make_row(row, pool, rng)


def score_row(scorer: Scorer, row: ProbedRow, number: int) -> Findings:
    """Score the probes of one row, without a time limit, and return its findings; `number` is its
    index among all rows."""
    # `_score_probes` reverses the order of the probes for every second value of `rows`.
    findings = Findings(rows=number)
    no_limit = _Budget(math.inf, time.monotonic)
    _score_probes(_Session(scorer, no_limit, findings), row)
    findings.rows = 1
    return findings


def _revisit(first_scores: Sequence[_FirstScore], session: _Session) -> None:
    """Score the same answers once more until the time is up, and count those whose reward changed.

    They are scored in reverse order, in which a scorer that keeps a state gives other rewards.
    """
    for first_score in reversed(first_scores):
        if session.budget.is_overrun():
            break
        first_score.revisit(session.findings)


def compares_groups(scorer: Any, kind: str) -> bool:
    """Whether an environment of that kind scores all completions of a task together
    (`score_group`), as its `scorer` says; a scorer that is no env process never does."""
    return kind == "single" and getattr(scorer, "compares_groups", False)


def _score_groups(
    session: _Session, rows: Sequence[Mapping[str, Any]], rng: random.Random
) -> GroupFindings:
    """Audit `score_group` on the first rows of the audit's random order, at most MOST_GROUPS (20),
    until the time is up. `rng` must be seeded as for `_score_rows`, to draw the same order."""
    order = rng.sample(range(len(rows)), len(rows))
    # Tasks whose reference answers serve as wrong answers to the other rows.
    pool = [Task.from_row(rows[index]) for index in order[:POOL]]
    findings = GroupFindings()
    scorer: Any = session.scorer
    for index in order[:MOST_GROUPS]:
        if findings.groups >= LEAST_ROWS and session.budget.is_overrun():
            break
        answers = probed_row(rows[index], "single", pool, rng).answers
        audit_group(findings, scorer.score_group, rows[index], answers)
    return findings


def _sample(findings: Findings) -> list[Scored]:
    """Return the answers that a new process is to score again.

    First come the answers scored last, the newest first, because a process that keeps a state
    differs most at its end. Then up to FRESH (12) earlier ones, spread evenly over all rows.
    """
    newest_first = list(findings.latest)[::-1]
    # Compared as objects: an answer may be in both lists.
    ids_of_latest = {id(answer) for answer in newest_first}
    earlier = [answer for answer in findings.samples if id(answer) not in ids_of_latest]
    count = min(FRESH, len(earlier))
    # Positions spread evenly: index * len / count.
    return newest_first + [earlier[index * len(earlier) // count] for index in range(count)]


def _row_with_texts(row: Mapping[str, Any], pool: Sequence[Task], rng: random.Random) -> ProbedRow:
    """Return a row of a single-turn environment with its probes (the answers to try).

    `pool` holds tasks whose reference answers serve as wrong answers to this row; the row itself
    may be among them. `rng` makes random choices.
    """
    task = Task.from_row(row)
    gold = task.answer_text if task.answer is not None else None
    other_tasks = [candidate for candidate in pool if candidate.id != task.id and candidate.answer]
    other_golds = [other_task.answer_text for other_task in other_tasks]
    probes = text_probes(task.prompt_text, gold, other_golds, rng)
    return ProbedRow(task.id, probes, lambda scorer, text: scorer.score(row, text))


def _row_with_messages(
    row: Mapping[str, Any], pool: Sequence[Task], rng: random.Random
) -> ProbedRow:
    """Return a row of a multi-turn environment with its probes (the answers to try).

    `pool` holds tasks whose reference answers serve as wrong answers to this row; the row itself
    may be among them. `rng` makes random choices.
    """
    task = Task.from_row(row)
    other_tasks = [candidate for candidate in pool if candidate.id != task.id and candidate.answer]
    other_golds = [_assistant_messages(other_task) for other_task in other_tasks]
    probes = message_probes(task.prompt_text, _assistant_messages(task), other_golds, rng)
    return ProbedRow(task.id, probes, lambda scorer, messages: play(scorer, row, messages))


def _assistant_messages(task: Task) -> list[ChatMessage]:
    """Return the assistant messages of a task's reference answer; [] if it has none."""
    return [message.to_dict() for message in task.answer_messages if message.role == "assistant"]


def play(
    scorer: Scorer, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> ScoreReply:
    """Play a rollout in which the model says `messages`, one per turn, and return its score.

    The environment may end the rollout before the last message. A rollout that fails raises
    nothing: its score is 0, with the reason as `error`. The score's `seconds` is how long the
    rollout took.
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
    """Return the score of a rollout that raised `error`: reward 0, with the text of `error`."""
    return {"reward": 0.0, "success": False, "metrics": {}, "error": str(error), "seconds": 0.0}


def _score_probes(session: _Session, row: ProbedRow) -> _FirstScore | None:
    """Score all probes of a row and add the results to the session's findings.

    To find a scorer that is random or keeps a state, one answer (gold, the reference answer; the
    first one if there is no gold) is scored twice in a row and once more after all others. Returns
    the first score of that answer; None if the time was up before all probes were scored.
    """
    findings = session.findings
    order = list(row.answers)  # the names of the probes
    is_second_row = findings.rows % 2 == 1
    if is_second_row:  # so that gold is not always scored first
        order.reverse()
    repeated_name = GOLD if GOLD in row.answers else order[0]
    results = _score_in_order(session, row, order, repeated_name)
    _add_results(findings, row, results)
    _keep_for_rescoring(findings, row, results)
    if findings.stopped_in_row:
        return None
    first_score = _FirstScore(
        row.task_id,
        results[repeated_name]["reward"],
        lambda: row.score(session.scorer, row.answers[repeated_name]),
    )
    first_score.revisit(findings)  # all other answers of the row have been scored since
    return first_score


def _score_in_order(
    session: _Session, row: ProbedRow, order: Sequence[str], repeated_name: str
) -> dict[str, ScoreReply]:
    """Score the probes named in `order`; the one named `repeated_name` is scored twice in a row.

    Returns name -> score of the probes that were scored before the time was up. If not all were,
    `stopped_in_row` of the findings is set.
    """
    findings = session.findings
    results: dict[str, ScoreReply] = {}
    for name in order:
        is_first_of_audit = not findings.tallies and not results and not findings.rows
        # The very first answer is always scored, because a report needs one. The time is checked
        # before every other answer, because one answer may take the time limit of a whole call.
        if not is_first_of_audit and session.budget.is_overrun():
            findings.stopped_in_row = True
            break
        result = row.score(session.scorer, row.answers[name])
        findings.seconds.append(result.get("seconds", 0.0))
        if name == repeated_name:
            result = _score_twice(session, row, name, result, is_first_of_audit)
        results[name] = result
    return results


def _score_twice(
    session: _Session, row: ProbedRow, name: str, first: ScoreReply, is_first_of_audit: bool
) -> ScoreReply:
    """Score an answer again at once, and count in the findings whether both rewards are equal.

    Args:
        session: the running audit.
        row: the row with the answer.
        name: the probe whose answer it is.
        first: its first score.
        is_first_of_audit: whether that was the first call of the whole audit.

    Returns the score that counts: `first`, except for an unreliable very first call.
    """
    answer = row.answers[name]
    second = row.score(session.scorer, answer)
    if is_first_of_audit and second["reward"] != first["reward"]:
        # The very first call may have been too slow for a time limit inside score(). So the second
        # call counts as the first, and a third call as the second.
        first, second = second, row.score(session.scorer, answer)
    session.findings.count_repeated(row.task_id, first["reward"], second["reward"])
    return first


def _add_results(
    findings: Findings, row: ProbedRow, results: Mapping[str, Mapping[str, Any]]
) -> None:
    """Add the scores of a row's probes (name of the probe -> score) to `findings`.

    The rewards of the other probes are compared with that of gold, the reference answer.
    """
    gold_result = results.get(GOLD)
    gold_reward = None
    if gold_result is not None:
        gold_reward = gold_result["reward"]
        findings.gold_rows += 1
        if gold_result["error"] or gold_result["success"] is False:
            findings.gold_failing.append(row.task_id)
    for name, answer in row.answers.items():  # in this order, whatever order they were scored in
        if name in results:
            tally = findings.tallies.setdefault(name, Tally())
            tally.count(results[name], gold_reward, answer, row.task_id)


def _keep_for_rescoring(
    findings: Findings, row: ProbedRow, results: Mapping[str, Mapping[str, Any]]
) -> None:
    """Keep a row's answers, one for each probe, in `findings`, so that a new process can score them
    again.

    All of them go to `findings.latest`, a deque that drops its oldest answers by itself. Two of
    them go to `findings.samples`, which keeps all: gold (the reference answer), and the answer of
    one other probe, which changes from row to row; a row with gold alone adds gold twice. Answers
    on which scoring failed are left out, because a call that was too slow once may be fast the next
    time. `results` maps the name of each scored probe to its score.
    """
    scored = {
        name: row.scored(name, result["reward"])
        for name, result in results.items()
        if not result["error"]
    }
    findings.latest.extend(scored.values())
    other_names = [name for name in scored if name != GOLD]
    second_name = GOLD  # added twice if it is the only answer
    if other_names:
        # Row after row takes the next probe in turn, so that all probes get into the sample.
        second_name = other_names[findings.rows % len(other_names)]
    findings.samples += [scored[name] for name in (GOLD, second_name) if name in scored]
