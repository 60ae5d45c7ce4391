"""Two to eight models on the same tasks: which is better, by how much, and because of what."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import BODY_CHARS, Reply
from engine.evidence.compare.candidates import (
    MOST_CANDIDATES,
    Candidate,
    Sampling,
    find_candidates,
)
from engine.evidence.compare.seeds import compare_candidates, grouped, seed_of
from engine.evidence.compare.settings_diff import Attribution, attribution, differing_settings
from engine.evidence.stats.power import attempts_wanted, more_rows, split_rows, tasks_wanted
from engine.evidence.stats.results import (
    VALIDATION,
    Level,
    Measure,
    by_prompt,
    level,
    measure_of,
    side,
)
from engine.evidence.verdict.comparison import (
    Comparison,
    calls_for_errors,
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
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, json_chars, redactor_for
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig

_MOST_SETTINGS = 24
_MOST_NOTES = 4


@dataclass(frozen=True)
class CandidateRow:
    """One model of the table.

    Attributes:
        seeds: seed by run, where it stands for several.
        step: of its checkpoint, None where it stands for several or is no checkpoint.
        device_hours: its training took, None for a base model.
    """

    id: str
    evaluated_in: str
    seeds: dict[str, object] | None
    step: int | None
    level: Level | None
    device_hours: float | None

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {"id": self.id, "evaluated_in": self.evaluated_in}
        if self.seeds is not None:
            body["seeds"] = self.seeds
        elif self.step is not None:
            body["step"] = self.step
        if self.level is not None:
            body |= self.level.to_json()
        if self.device_hours is not None:
            body["device_hours"] = self.device_hours
        return body


@dataclass(frozen=True)
class Contest:
    """One candidate against the first.

    Attributes:
        p_adjusted: corrected for the other contests and for earlier evaluations of the two.
        corrected: whether there was anything to correct for.
    """

    first: Candidate
    other: Candidate
    comparison: Comparison
    p_adjusted: float | None
    corrected: bool
    cause: Attribution

    def to_json(self, *, method: bool = True) -> dict[str, object]:
        numbers = self.comparison.to_json()
        if not method:
            del numbers["method"]
        p = None if self.p_adjusted is None else float(f"{self.p_adjusted:.3g}")
        return {
            "model": self.other.label,
            "against": self.first.label,
            **numbers,
            **({"p_adjusted": p} if self.corrected else {}),
            "attribution": self.cause.to_json(),
        }


@dataclass(frozen=True)
class Evidence:
    """What would settle an inconclusive comparison, in words and as calls."""

    notes: Sequence[str] = ()
    calls: Sequence[Call] = ()


@dataclass(frozen=True)
class Standing:
    """The result of `compare_runs`; `contests` in the order of the candidates, `main` the one
    furthest ahead of the first."""

    candidates: Sequence[CandidateRow]
    measure: Measure | None
    contests: Sequence[Contest]
    main: Contest
    settings: dict[str, dict[str, object]]
    sampling: Sampling
    flips: FlipExamples
    warnings: Sequence[str]
    next_calls: Sequence[Call]

    def to_json(self, leave_out: Sequence[str] = ()) -> Reply:
        """As a result, without the parts named: answers, settings, sampling."""
        texts = "answers" not in leave_out
        flips = self.flips.to_json()
        if not texts:
            flips = {
                way: [{"task": example.task} for example in examples]
                for way, examples in (("gained", self.flips.gained), ("lost", self.flips.lost))
            }
        named = "settings" in leave_out
        settings = dict.fromkeys(self.settings, "differs") if named else self.settings
        sampling = {} if "sampling" in leave_out else {"sampling": self.sampling.to_json()}
        return {
            "summary": _summary(self.main, len(self.contests)),
            "verdict": self.main.comparison.outcome.verdict,
            "metric": self.measure,
            "env_id": self.main.first.env_id,
            "reference": self.main.first.label,
            "arms": [row.to_json() for row in self.candidates],
            "comparisons": [contest.to_json(method=texts) for contest in self.contests],
            "settings": settings,
            **sampling,
            "flips": {"model": self.main.other.label, **flips},
            "warnings": list(self.warnings),
            "next": [call.to_json() for call in self.next_calls],
        }


def compare_runs(home: Home, ids: Sequence[str], env_id: str = "") -> Reply:
    """Compare each candidate with the first, task by task, on one environment version.

    `ids` are training runs (their own held-out evaluation, the half no checkpoint was chosen on),
    evaluation runs (all their models) or model references already evaluated. Runs that differ in
    the seed alone count as one candidate (engine/evidence/compare/seeds.py). `verdict` is that of
    the candidate furthest ahead of the first; with more than one comparison Holm's correction
    applies.

    Raises UserError BAD_ARGUMENT, RUN_NOT_FOUND, NO_EVALUATION or NOT_COMPARABLE (environments
    or sampling settings differ).
    """
    candidates, warnings = find_candidates(home, _checked(ids), env_id)
    candidates, shared = _without_taught(home, candidates)
    candidates = grouped(home, candidates)
    first, others = candidates[0], candidates[1:]
    measure = measure_of(*(candidate.rows for candidate in candidates))
    comparisons = [compare_candidates(home, first, other) for other in others]
    evaluations = [_evaluations(home, first, other) for other in others]
    adjusted = correct_for_many(comparisons, evaluations)
    contests = [
        Contest(
            first,
            other,
            comparison,
            p,
            corrected=len(others) > 1 or max(evaluations) > 1,
            cause=attribution(home, first, other),
        )
        for other, comparison, p in zip(others, comparisons, adjusted, strict=True)
    ]
    main = max(contests, key=lambda contest: contest.comparison.lead)
    redact = _redactor(home, first.source)
    wanted = _wanted_evidence(home, main)
    changed = Call("read_rollouts", {"run_id": main.other.source, "pick": "changed"})
    standing = Standing(
        candidates=[_candidate_row(home, candidate, measure) for candidate in candidates],
        measure=measure,
        contests=contests,
        main=main,
        settings=_first_settings(differing_settings(home, candidates)),
        sampling=first.sampling,
        flips=flip_examples(main.comparison, first.rows, main.other.rows, redact),
        warnings=[
            *warnings,
            *shared,
            *wanted.notes,
            *pair_warnings(max(evaluations)),
            *_cautions(home, candidates, comparisons),
        ],
        next_calls=[*wanted.calls, changed],
    )
    return _within_limit(standing)


def _redactor(home: Home, run_id: str) -> Redactor:
    config = home.run(run_id).find_config()
    return redactor_for(home, config.env_dir if config else None)


def _evaluations(home: Home, first: Candidate, other: Candidate) -> int:
    """How often the two were evaluated to tell them apart; seeds taken together count their own."""
    if first.members or other.members:
        return 1
    labels = (first.label, other.label)
    return evaluations_of_pair(home, first.env_id, labels, (first.source, other.source))


def _checked(ids: Sequence[str]) -> list[str]:
    wanted = list(dict.fromkeys(str(ref).strip() for ref in ids if str(ref).strip()))
    if not 1 <= len(wanted) <= MOST_CANDIDATES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(wanted)} different ids were given",
            hint=f"Give 2 to {MOST_CANDIDATES} ids; one evaluation of several models counts as "
            "one.",
            field="ids",
        )
    return wanted


def _without_taught(
    home: Home, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[str]]:
    """The candidates without the tasks that any of their models was taught, and the warnings."""
    sources = [home.run(source) for source in dict.fromkeys(each.source for each in candidates)]
    notes = list(dict.fromkeys(note for run in sources for note in contamination_warnings(run)))
    taught = frozenset().union(*(taught_tasks(run) for run in sources))
    return [replace(each, rows=without_tasks(each.rows, taught)) for each in candidates], notes


def _candidate_row(home: Home, candidate: Candidate, measure: Measure | None) -> CandidateRow:
    """A candidate as the result shows it: its level, seeds and device hours."""
    seeds = {member.label: seed_of(home, member) for member in candidate.members}
    runs = {member.run_id for member in candidate.members or (candidate,)} - {""}
    hours = None
    if runs:
        with Store(home) as store:
            hours = round(sum(store.get_run(run_id).spent_hours for run_id in runs), 4)
    return CandidateRow(
        id=candidate.label,
        evaluated_in=candidate.source,
        seeds=seeds or None,
        step=candidate.step,
        level=level(candidate.rows, measure) if measure is not None else None,
        device_hours=hours,
    )


def _summary(main: Contest, contests: int) -> str:
    text = f"{main.other.label} against {main.first.label}: {sentence(main.comparison)}"
    if contests > 1:
        text += f" It is the best of {contests} compared with {main.first.label}."
    decided = main.comparison.outcome.verdict in ("better", "worse")
    if main.cause.refused and decided:
        text += f" Not attributed: {main.cause.reason}."
    elif main.cause.to and decided:
        text += f" One lever changed: {main.cause.to}."
    return text


def _cautions(
    home: Home, candidates: Sequence[Candidate], comparisons: Sequence[Comparison]
) -> list[str]:
    """What to keep in mind of these comparisons, a sentence each."""
    notes = []
    unpaired = max(item.outcome.unpaired for item in comparisons)
    if unpaired:
        notes.append(f"Up to {unpaired} tasks were scored on one side only and are left out.")
    notes += dict.fromkeys(note for item in comparisons for note in notes_on_counting(item))
    for candidate in candidates:
        validation = sum(row.half == VALIDATION for row in candidate.rows)
        config = home.run(candidate.run_id).find_config() if candidate.run_id else None
        chosen_here = config is not None and config.env_id == candidate.env_id
        if validation and chosen_here and len(home.run(candidate.run_id).eval_steps()) > 2:
            notes.append(
                f"{validation} of the {len(candidate.rows)} answers of {candidate.label} are to "
                "tasks its checkpoint was chosen on, which flatters it a little; the run's own "
                "verdict leaves them out."
            )
    return notes[:_MOST_NOTES]


def _wanted_evidence(home: Home, contest: Contest) -> Evidence:
    """What would settle an inconclusive comparison.

    Rows of the split that were not asked yet; where all were, attempts at each, where they help;
    else rows that do not exist yet. Where one side is several seeds, more seeds: no number of
    tasks removes the differences between seeds.
    """
    first, other, comparison = contest.first, contest.other, contest.comparison
    measure = comparison.measure
    if comparison.outcome.verdict != "inconclusive" or measure is None:
        return Evidence()
    if comparison.errors_decide:
        worst = max((first, other), key=lambda each: sum(bool(row.error) for row in each.rows))
        return Evidence(calls=calls_for_errors(worst.source))
    if first.members or other.members:
        return Evidence(["One more seed on each side would tell more than tasks or attempts."])
    needed = tasks_wanted(comparison.outcome)
    config = home.run(first.source).find_config()
    split = config.split if isinstance(config, EvaluateConfig | RegradeConfig) else "heldout"
    rows = split_rows(home, first.env_id, split)
    asked = {row.task for candidate in (first, other) for row in candidate.rows}
    asked |= taught_tasks(home.run(first.source)) | taught_tasks(home.run(other.source))
    arguments: dict[str, object] = {
        "env_id": first.env_id,
        "models": [first.label, other.label],
        **({"split": split} if split != "heldout" else {}),
    }
    if rows is None or len(asked) < rows:
        count = min(max(400, needed or 2 * comparison.outcome.n), rows or 10**6)
        return Evidence(calls=[Call("evaluate", arguments | {"rows": count})])
    sides = [side(of_one, measure) for of_one in by_prompt(first.rows, other.rows)]
    attempts = attempts_wanted(sides[0], sides[1], comparison.outcome.margin)
    used = f"All {rows} rows of the {split} split are used"
    if attempts is not None:
        note = f"{used}; {attempts} attempts at each would show a change worth having."
        call = Call("evaluate", arguments | {"rows": rows, "attempts": attempts})
        return Evidence([note], [call])
    edit = more_rows(needed, rows, "held-out" if split == "heldout" else split)
    return Evidence([f"{used}: {edit}."], [Call("push_env", {"path": "..."})])


def _first_settings(table: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {name: table[name] for name in list(table)[:_MOST_SETTINGS]}


def _within_limit(standing: Standing) -> Reply:
    """The result without its least needed parts, as many as it takes to be affordable."""
    parts = ("answers", "settings", "sampling")
    for count in range(len(parts)):
        result = standing.to_json(parts[:count])
        if json_chars(result) <= BODY_CHARS:
            return result
    return standing.to_json(parts)
