"""What would settle an inconclusive comparison: more tasks, more attempts, new tasks, or more
seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.hints import Call
from engine.evidence.compare.candidate_rows import Contest
from engine.evidence.compare.candidates import Candidate
from engine.evidence.stats.power import attempts_needed, more_rows, split_rows, tasks_to_decide
from engine.evidence.stats.results import Measure, side, with_one_id_per_prompt
from engine.evidence.verdict.comparison import calls_for_errors
from engine.evidence.verdict.contamination import taught_tasks
from engine.home.run_dir import Home
from engine.records.run_config import EvaluateConfig, RegradeConfig

_FEWEST_ROWS = 400  # a suggested evaluation asks at least this many rows, if the split has them
_MOST_ROWS_OF_UNKNOWN_SPLIT = 10**6  # and at most this many, if the size of the split is not known


@dataclass(frozen=True)
class Evidence:
    """What would settle an inconclusive comparison.

    Attributes:
        notes: sentences for a person.
        calls: the calls that gather the evidence.

    Both are empty if nothing is needed, or if nothing is known that would help.
    """

    notes: Sequence[str] = ()
    calls: Sequence[Call] = ()


def evidence_to_gather(home: Home, contest: Contest) -> Evidence:
    """What would settle an inconclusive comparison (contest). Empty for any other verdict.

    - A look at the failed scorings, if the verdict depends on them.
    - Else more seeds, if a candidate stands for several.
    - Else an evaluation with more tasks or attempts.
    """
    first, other, comparison = contest.first, contest.other, contest.comparison
    if comparison.outcome.verdict != "inconclusive" or comparison.measure is None:
        return Evidence()
    if comparison.errors_decide:
        return Evidence(calls=calls_for_errors(_with_most_errors(first, other).source))
    if first.members or other.members:  # no number of tasks removes the differences between seeds
        note = "One more seed on each side would tell more than tasks or attempts."
        return Evidence(notes=[note])
    return _larger_evaluation(home, contest, comparison.measure)


def _larger_evaluation(home: Home, contest: Contest, measure: Measure) -> Evidence:
    """What would settle an inconclusive comparison of two models by `measure`: the first that can
    help of more tasks, more attempts at each, or new tasks for the environment."""
    outcome = contest.comparison.outcome
    split = _evaluated_split(home, contest.first)
    split_size = split_rows(home, contest.first.env_id, split)  # None if it is not known
    asked_count = _asked_count(home, contest.first, contest.other)
    if split_size is not None and asked_count >= split_size:
        return _beyond_all_rows(contest, measure, split, split_size)
    rows = _rows_to_ask(tasks_to_decide(outcome), outcome.n, split_size)
    return Evidence(calls=[_evaluation_of(contest, split, rows=rows)])


def _beyond_all_rows(contest: Contest, measure: Measure, split: str, split_size: int) -> Evidence:
    """What would settle a comparison that used all `split_size` rows of a split already.

    More attempts at each task, or new rows if no number of attempts is known to be enough.
    """
    outcome = contest.comparison.outcome
    all_used = f"All {split_size} rows of the {split} split are used"
    attempts = _attempts_needed(contest.first, contest.other, measure, outcome.margin)
    if attempts is not None:
        note = f"{all_used}; {attempts} attempts at each would show a change worth having."
        call = _evaluation_of(contest, split, rows=split_size, attempts=attempts)
        return Evidence(notes=[note], calls=[call])
    split_name = "held-out" if split == "heldout" else split
    rows_to_add = more_rows(tasks_to_decide(outcome), split_size, split_name)
    push_call = Call("push_env", needs=("path",))
    return Evidence(notes=[f"{all_used}: {rows_to_add}."], calls=[push_call])


def _evaluation_of(contest: Contest, split: str, **amounts: int) -> Call:
    """The call that evaluates the two models of a contest (comparison) on a split of the tasks;
    `amounts` are its `rows` and `attempts`."""
    first, other = contest.first, contest.other
    arguments: dict[str, object] = {"env_id": first.env_id, "models": [first.label, other.label]}
    if split != "heldout":  # "heldout" is the default
        arguments["split"] = split
    return Call("evaluate", arguments | amounts)


def _rows_to_ask(needed_rows: int | None, compared_rows: int, split_size: int | None) -> int:
    """How many rows another evaluation should ask; no more than the split has.

    `needed_rows` is how many would decide, None if that is not known: then twice `compared_rows`,
    the rows compared so far. `split_size` is None if it is not known.
    """
    wanted_rows = max(_FEWEST_ROWS, needed_rows or 2 * compared_rows)
    most_rows = _MOST_ROWS_OF_UNKNOWN_SPLIT if split_size is None else split_size
    return min(wanted_rows, most_rows)


def _evaluated_split(home: Home, candidate: Candidate) -> str:
    """The split whose tasks the candidate answered. A training run evaluates "heldout" only."""
    config = home.run(candidate.source).find_config()
    return config.split if isinstance(config, EvaluateConfig | RegradeConfig) else "heldout"


def _attempts_needed(
    first: Candidate, other: Candidate, measure: Measure, margin: float
) -> int | None:
    """How many attempts at each task would show a difference of `margin`; None if none would."""
    rows_first, rows_other = with_one_id_per_prompt(first.rows, other.rows)
    return attempts_needed(side(rows_first, measure), side(rows_other, measure), margin)


def _with_most_errors(first: Candidate, other: Candidate) -> Candidate:
    """The candidate with more answers whose scoring failed; `first` if they have equally many."""
    first_errors = sum(bool(row.error) for row in first.rows)
    other_errors = sum(bool(row.error) for row in other.rows)
    return other if other_errors > first_errors else first


def _asked_count(home: Home, first: Candidate, other: Candidate) -> int:
    """How many tasks the candidates were asked, those included whose answers do not count.

    The answers to contaminated tasks, and to those that chose a checkpoint of a candidate, were
    removed before the comparison.
    """
    asked_tasks: set[str] = set()
    counts: list[int] = []  # of the evaluations, as their configs tell
    for candidate in (first, other):
        run = home.run(candidate.source)
        asked_tasks |= {row.task for row in candidate.rows} | taught_tasks(run)
        config = run.find_config()
        counts.append(config.rows if isinstance(config, EvaluateConfig) else 0)
    return max(len(asked_tasks), min(counts))
