"""Compare two to eight models on the same tasks: which is better, by how much, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import BODY_CHARS, Reply
from engine.evidence.compare import remarks
from engine.evidence.compare.by_metadata import ByMetadata, by_metadata, of_one_model
from engine.evidence.compare.candidate_rows import CandidateRow, Contest, candidate_row
from engine.evidence.compare.candidates import (
    MOST_CANDIDATES,
    Candidate,
    Sampling,
    find_candidates,
)
from engine.evidence.compare.further_evidence import evidence_to_gather
from engine.evidence.compare.named_metric import OWN_MEASURES, by_metric
from engine.evidence.compare.seeds import compare_candidates, with_seeds_joined
from engine.evidence.compare.settings_diff import attribution, differing_settings
from engine.evidence.compare.unevaluated import settings_alone
from engine.evidence.judges.used import other_judges_warnings
from engine.evidence.stats.results import (
    Measure,
    damaged_answers_warning,
    measure_of,
)
from engine.evidence.verdict.comparison import (
    Comparison,
    correct_for_many,
    notes_on_counting,
    sentence,
)
from engine.evidence.verdict.contamination import (
    contamination_warnings,
    taught_tasks,
    without_tasks,
)
from engine.evidence.verdict.flips import FlipExamples, flip_examples
from engine.evidence.verdict.holdout_reuse import evaluations_of_pair, pair_warnings
from engine.evidence.verdict.sides import tasks_left_out_sentence
from engine.home.owner_marks import is_of_sealed, refuse_if_of_sealed
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import json_chars

_MOST_SETTINGS = 24  # most differing settings that are shown
_MOST_NOTES = 4  # most cautions that are shown


@dataclass(frozen=True)
class Standing:
    """The result of `compare_runs`.

    Attributes:
        measure: what is compared; None if the models have no measure in common.
        contests: each other candidate compared with the first, in the order of the candidates.
        main: the contest of the candidate furthest ahead of the first.
        settings: setting -> candidate -> value, for settings that differ.
        flips: tasks gained and lost in the main contest.
        notes: sentences that belong to the verdict: what the reward did if success ties, and the
            result of a failed reward audit.
        by: the results by a key of the tasks' metadata; None if no key was named.
    """

    candidates: Sequence[CandidateRow]
    measure: Measure | None
    contests: Sequence[Contest]
    main: Contest
    settings: dict[str, dict[str, object]]
    sampling: Sampling
    flips: FlipExamples
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    next_calls: Sequence[Call] = ()
    by: ByMetadata | None = None

    def to_json(self, leave_out: Sequence[str] = ()) -> Reply:
        """The result as a JSON object, shortened by the parts named in `leave_out`.

        "answers": the answers in the examples, and the names of the statistical methods.
        "settings": the values of the settings; their names stay.
        "sampling": how the answers were sampled.
        """
        with_answers = "answers" not in leave_out
        flips = self.flips.to_json() if with_answers else self._flipped_tasks()
        settings: Mapping[str, object] = self.settings
        if "settings" in leave_out:
            settings = dict.fromkeys(self.settings, "differs")
        sampling_entry = {} if "sampling" in leave_out else {"sampling": self.sampling.to_json()}
        metadata_entries = self.by.to_json() if self.by else {}
        return {
            **self._headline(),
            **metadata_entries,
            "arms": [row.to_json() for row in self.candidates],
            "comparisons": [contest.to_json(method=with_answers) for contest in self.contests],
            "settings": dict(settings),
            **sampling_entry,
            "flips": {"model": self.main.other.label, **flips},
            "warnings": list(self.warnings),
            "next": [call.to_json() for call in self.next_calls],
        }

    def _headline(self) -> dict[str, object]:
        """The first entries of the result: summary, verdict, and what was compared on which
        environment."""
        measure_name = self.main.comparison.metric_name or self.measure
        by_sentence = [self.by.sentence(str(measure_name))] if self.by else []
        summary = _summary(self.main, len(self.contests))
        return {
            "summary": " ".join([summary, *by_sentence, *self.notes]),
            "verdict": self.main.comparison.outcome.verdict,
            "metric": measure_name,
            "env_id": self.main.first.env_id,
            "reference": self.main.first.label,
        }

    def _flipped_tasks(self) -> dict[str, object]:
        """The tasks gained and lost in the main contest (comparison of two candidates), without the
        answers to them."""
        return {
            "gained": [{"task": example.task} for example in self.flips.gained],
            "lost": [{"task": example.task} for example in self.flips.lost],
        }


def compare_runs(
    home: Home, ids: Sequence[str], env_id: str = "", metric: str = "", group_by: str = ""
) -> Reply:
    """Compare models by their answers; see `_compare_answers` for the arguments and errors.

    If a training run among `ids` was not evaluated yet, the reply only says how the runs were made
    and differ, with the verdict "unknown".
    """
    try:
        return _compare_answers(home, ids, env_id, metric, group_by)
    except UserError as error:
        if error.code != "NO_EVALUATION":
            raise
        reply = settings_alone(home, _checked_ids(ids), error)
        if reply is None:  # not all of them are training runs
            raise
        return reply


def _compare_answers(
    home: Home, ids: Sequence[str], env_id: str, metric: str, group_by: str
) -> Reply:
    """Compare each candidate with the first, task by task, on one environment version.

    Runs that differ only in their seed count as one candidate (engine/evidence/compare/seeds.py).
    `verdict` in the result is that of the candidate furthest ahead of the first; with more than one
    comparison Holm's correction applies.

    Args:
        ids: training runs (each stands for its own held-out evaluation, on the half that no
            checkpoint was chosen on), evaluation runs (all their models), or references of models
            that were evaluated.
        env_id: the environment to compare on; "" takes the newest that all have in common.
        metric: a named metric of the environment to judge by, higher taken as better; "" for
            success, else reward, else loss.
        group_by: a key of the tasks' metadata; results are then also shown for each of its values,
            and a single model is enough.

    Raises:
        UserError: BAD_ARGUMENT (too few or too many ids or models), RUN_NOT_FOUND (an unknown id),
            NO_EVALUATION (an id was never evaluated), NOT_COMPARABLE (environments or sampling
            settings differ), or ENV_SEALED (`group_by` on an environment whose held-out tasks are
            sealed).
    """
    metric = "" if metric in OWN_MEASURES else metric  # success, reward and loss are no metrics
    least_count = 1 if group_by else 2
    candidates, warnings = _candidates_to_compare(home, ids, env_id, least_count)
    if metric:
        candidates = by_metric(candidates, metric)
    first, later_candidates = candidates[0], candidates[1:]
    if group_by:
        config = home.run(first.source).find_config()
        refuse_if_of_sealed(config, "its results cannot be told by metadata")
    if not later_candidates:
        return of_one_model(home, first, group_by, metric, warnings)
    return _compare_with_first(home, candidates, metric, group_by, warnings)


def _compare_with_first(
    home: Home, candidates: Sequence[Candidate], metric: str, group_by: str, warnings: list[str]
) -> Reply:
    """The reply about at least two candidates: each one compared with the first.

    Args:
        metric: the environment's metric to judge by; "" for success, reward or loss.
        group_by: the key of the tasks' metadata by which results are shown too; "" for none.
        warnings: warnings about the choice of the candidates.
    """
    first, later_candidates = candidates[0], candidates[1:]
    # How often each was evaluated against the first: each time is a chance of a false result.
    evaluation_counts = [_times_evaluated(home, first, candidate) for candidate in later_candidates]
    contests = _contests(home, first, later_candidates, evaluation_counts, metric)
    standing = _result_without_warnings(home, candidates, contests)
    if group_by:
        shown = standing.main.other.label
        by_value = by_metadata(home, candidates, group_by, standing.measure, shown)
        standing = replace(standing, by=by_value)
        warnings = [*warnings, *by_value.warnings]
    more_evidence = evidence_to_gather(home, standing.main)
    all_warnings = [
        *remarks.swapped_bases(home, candidates),
        *warnings,
        *more_evidence.notes,
        *remarks.numbers_to_report(home, candidates),
        *pair_warnings(max(evaluation_counts)),
        *_cautions(home, candidates, [contest.comparison for contest in contests]),
    ]
    next_calls = [*more_evidence.calls, *standing.next_calls]
    return _within_limit(replace(standing, warnings=all_warnings, next_calls=next_calls))


def _result_without_warnings(
    home: Home, candidates: Sequence[Candidate], contests: Sequence[Contest]
) -> Standing:
    """The result of `compare_runs`, still without warnings.

    A contest compares one candidate with the first; the main contest is that of the candidate
    furthest ahead of the first. The last of the next calls shows the tasks that changed in it,
    unless the tasks are sealed.
    """
    measure = measure_of(*(candidate.rows for candidate in candidates))
    main = max(contests, key=lambda contest: contest.comparison.lead)
    redact = remarks.redactor_of(home, main.first.source)
    diagnosis_calls = remarks.diagnosis(home, main.other, main.comparison)
    changed = Call("read_rollouts", {"run_id": main.other.source, "pick": "changed"})
    flips = flip_examples(main.comparison, main.first.rows, main.other.rows, redact)
    is_sealed = is_of_sealed(home.run(main.first.source).find_config())
    return Standing(
        candidates=[candidate_row(home, candidate, measure) for candidate in candidates],
        measure=measure,
        contests=contests,
        main=main,
        settings=_first_settings(differing_settings(home, candidates)),
        sampling=main.first.sampling,
        flips=FlipExamples() if is_sealed else flips,
        notes=remarks.notes(home, main.first, main.other, main.comparison),
        next_calls=[] if is_sealed else [*diagnosis_calls, changed],
    )


def _candidates_to_compare(
    home: Home, ids: Sequence[str], env_id: str, least_count: int
) -> tuple[list[Candidate], list[str]]:
    """Find the candidates to compare: (the candidates, warnings).

    Runs that differ only in their seed are joined into one candidate, and tasks that training rows
    contain are left out. `least_count` is the least number of candidates; `ids`, `env_id` and the
    errors are those of `_compare_answers`.
    """
    candidates, warnings = find_candidates(home, _checked_ids(ids), env_id, least_count)
    candidates, contamination_notes = _without_contaminated(home, candidates)
    return with_seeds_joined(home, candidates), [*warnings, *contamination_notes]


def _contests(
    home: Home,
    first: Candidate,
    others: Sequence[Candidate],
    evaluation_counts: Sequence[int],
    metric: str,
) -> list[Contest]:
    """Compare each of the other candidates with the first; the p values are corrected.

    The correction is for the number of comparisons, and for how often each candidate was evaluated
    against the first (`evaluation_counts`). `metric` names what the rows are judged by; "" for
    their own measure.
    """
    comparisons = [
        replace(compare_candidates(home, first, candidate), metric_name=metric)
        for candidate in others
    ]
    # One value for all contests, so that all have the same fields in JSON.
    is_corrected = len(others) > 1 or max(evaluation_counts) > 1
    contests = []
    corrected_comparisons = correct_for_many(comparisons, evaluation_counts)
    for candidate, (comparison, p_value) in zip(others, corrected_comparisons, strict=True):
        contest = Contest(
            first,
            candidate,
            comparison=comparison,
            p_adjusted=p_value,
            corrected=is_corrected,
            cause=attribution(home, first, candidate),
        )
        contests.append(contest)
    return contests


def _times_evaluated(home: Home, first: Candidate, other: Candidate) -> int:
    """How often the two models were evaluated against each other, to correct the p value for it.

    Returns 1 if either side stands for several seeds: repeats are counted for single models only.
    """
    if first.members or other.members:
        return 1
    labels = (first.label, other.label)
    return evaluations_of_pair(home, first.env_id, labels, (first.source, other.source))


def _checked_ids(ids: Sequence[str]) -> list[str]:
    """The ids without repeats and empty ones.

    Raises UserError BAD_ARGUMENT if none or more than `MOST_CANDIDATES` remain.
    """
    stripped_ids = (str(ref).strip() for ref in ids)
    distinct_ids = list(dict.fromkeys(ref for ref in stripped_ids if ref))
    if not 1 <= len(distinct_ids) <= MOST_CANDIDATES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(distinct_ids)} different ids were given",
            hint=f"Give 2 to {MOST_CANDIDATES} ids; one evaluation of several models counts as "
            "one.",
            field="ids",
        )
    return distinct_ids


def _without_contaminated(
    home: Home, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[str]]:
    """(the candidates without rows of contaminated tasks, which training rows contain; warnings).

    A task is left out for all candidates if the training rows of any of their runs contain it.
    """
    source_ids = dict.fromkeys(candidate.source for candidate in candidates)  # each once
    sources = [home.run(source) for source in source_ids]
    warnings = _warnings_about_sources(sources)
    contaminated_tasks = frozenset().union(*(taught_tasks(run) for run in sources))
    clean_candidates = [
        replace(candidate, rows=without_tasks(candidate.rows, contaminated_tasks))
        for candidate in candidates
    ]
    return clean_candidates, warnings


def _warnings_about_sources(sources: Sequence[RunDir]) -> list[str]:
    """Warnings about stored answers that cannot be read, about answers that other judges graded,
    and about held-out tasks in training rows."""
    warnings = [note for run in sources for note in damaged_answers_warning(run)]
    warnings += other_judges_warnings(sources)
    # Each once, because several runs may have the same training rows.
    warnings += dict.fromkeys(note for run in sources for note in contamination_warnings(run))
    return warnings


def _summary(main: Contest, number_of_contests: int) -> str:
    """The main comparison (contest) in up to three sentences: its result, its rank among the
    contests, and the cause.

    The cause is left out if the verdict is neither better nor worse, or if no cause is known.
    """
    text = f"{main.other.label} against {main.first.label}: {sentence(main.comparison)}"
    if number_of_contests > 1:
        text += f" It is the best of {number_of_contests} compared with {main.first.label}."
    if main.comparison.outcome.verdict not in ("better", "worse"):
        return text
    if main.cause.refused:  # several things changed
        text += f" Not attributed: {main.cause.reason}."
    elif main.cause.only_change:
        text += f" One lever changed: {main.cause.only_change}."
    return text


def _cautions(
    home: Home, candidates: Sequence[Candidate], comparisons: Sequence[Comparison]
) -> list[str]:
    """Sentences on what weakens these comparisons, at most `_MOST_NOTES`: unpaired tasks, how
    answers were counted, and tasks that chose a checkpoint."""
    notes = []
    most_unpaired = max(comparison.outcome.unpaired for comparison in comparisons)
    if most_unpaired:
        notes.append(f"Up to {most_unpaired} tasks were scored on one side only and are left out.")
    counting_notes: list[str] = []
    for comparison in comparisons:
        counting_notes += notes_on_counting(comparison)
    notes += dict.fromkeys(counting_notes)  # each once
    notes += _notes_on_tasks_that_chose(home, candidates)
    return notes[:_MOST_NOTES]


def _notes_on_tasks_that_chose(home: Home, candidates: Sequence[Candidate]) -> list[str]:
    """A sentence for each evaluation, of those that the candidates come from, that asked tasks by
    which a checkpoint of its models was chosen."""
    notes = []
    for source in dict.fromkeys(candidate.source for candidate in candidates):  # each once
        run = home.run(source)
        notes += tasks_left_out_sentence(run, run.find_config())
    return notes


def _first_settings(table: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The first `_MOST_SETTINGS` settings of the table (setting -> candidate -> value).

    If the algorithms differ, settings that only one of them has are left out: they tell nothing.
    """
    if "algorithm" in table:  # the algorithms differ
        candidate_count = max(len(values) for values in table.values())
        table = {name: values for name, values in table.items() if len(values) == candidate_count}
    first_names = list(table)[:_MOST_SETTINGS]
    return {name: table[name] for name in first_names}


def _within_limit(standing: Standing) -> Reply:
    """The result, shortened to the size limit of a reply.

    Parts are left out one after the other, the least needed first, until the result fits. If it
    does not fit without all of them, it is returned too long.
    """
    optional_parts = ("answers", "settings", "sampling")
    for count in range(len(optional_parts)):
        result = standing.to_json(optional_parts[:count])
        if json_chars(result) <= BODY_CHARS:
            return result
    return standing.to_json(optional_parts)
