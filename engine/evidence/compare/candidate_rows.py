"""The models in the result of a comparison: a row for each (level, seeds, device time), and how
each compares with the first."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.remarks import redactor_of
from engine.evidence.compare.seeds import seed_of
from engine.evidence.compare.settings_diff import Attribution
from engine.evidence.robustness.robustness import robustness_of
from engine.evidence.stats.results import Level, Measure, level
from engine.evidence.verdict.comparison import Comparison
from engine.home.run_dir import Home
from engine.home.store import Store


@dataclass(frozen=True)
class CandidateRow:
    """One model in the table of a result.

    Attributes:
        evaluated_in: id of the run whose evaluation was used.
        seeds: run -> seed if the candidate stands for several seeds, else None.
        step: the checkpoint's step; None if there is none or it is not known.
        level: its mean with interval; None if the models have no measure in common.
        device_hours: the device time of its training (of all seeds together); None for a base
            model.
        in_other_words: how it did on its reworded tasks, a sentence part for each kind of
            rewording; () if no task was reworded.
    """

    id: str
    evaluated_in: str
    seeds: dict[str, int | None] | None
    step: int | None
    level: Level | None
    device_hours: float | None
    in_other_words: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        """The row as a JSON object; `seeds` takes the place of `step`, and fields that are None are
        left out."""
        body: dict[str, object] = {"id": self.id, "evaluated_in": self.evaluated_in}
        if self.seeds is not None:
            body["seeds"] = self.seeds
        elif self.step is not None:
            body["step"] = self.step
        if self.level is not None:
            body |= self.level.to_json()
        if self.device_hours is not None:
            body["device_hours"] = self.device_hours
        if self.in_other_words:
            body["in_other_words"] = list(self.in_other_words)
        return body


def candidate_row(home: Home, candidate: Candidate, measure: Measure | None) -> CandidateRow:
    """The row of one candidate in the result of a comparison.

    `measure` is what the candidates are compared by; if it is None (they share no measure), the row
    has no level.
    """
    seeds = {member.label: seed_of(home, member) for member in candidate.members}
    return CandidateRow(
        id=candidate.label,
        evaluated_in=candidate.source,
        seeds=seeds or None,
        step=candidate.step,
        level=level(candidate.rows, measure) if measure is not None else None,
        device_hours=_device_hours(home, candidate),
        in_other_words=_in_other_words(home, candidate),
    )


def _in_other_words(home: Home, candidate: Candidate) -> list[str]:
    """How a candidate did on its reworded tasks, a sentence part for each kind of rewording.
    Returns [] if its evaluation reworded no task."""
    run = home.run(candidate.source)
    sentences = []
    for result in robustness_of(run, run.find_config(), redactor_of(home, candidate.source)):
        if result.model == candidate.label:
            sentences += [kind.sentence for kind in result.kinds]
    return sentences


def _device_hours(home: Home, candidate: Candidate) -> float | None:
    """The device hours of a candidate's training, of all its seeds together. Returns None for a
    base model."""
    members = candidate.members or (candidate,)  # one for each seed
    run_ids = {member.run_id for member in members} - {""}  # "" is that of a base model
    if not run_ids:
        return None
    with Store(home) as store:
        return round(sum(store.get_run(run_id).spent_hours for run_id in run_ids), 4)


@dataclass(frozen=True)
class Contest:
    """A contest: one candidate compared with the first.

    Attributes:
        p_adjusted: the p value, corrected for the other contests and for earlier evaluations of the
            two models; None if there was no test.
        corrected: whether there was anything to correct for; only then is `p_adjusted` shown.
        cause: what the difference may be attributed to.
    """

    first: Candidate
    other: Candidate
    comparison: Comparison
    p_adjusted: float | None
    corrected: bool
    cause: Attribution

    def to_json(self, *, method: bool = True) -> dict[str, object]:
        """The comparison of two candidates (contest) as a JSON object; `method=False` leaves out
        the name of the statistical method.

        `p_adjusted` (None if there was no test) is included only if p had to be corrected, for
        other contests or earlier evaluations.
        """
        body: dict[str, object] = {"model": self.other.label, "against": self.first.label}
        body |= self.comparison.to_json()
        if not method:
            del body["method"]
        if self.corrected:
            p = self.p_adjusted
            body["p_adjusted"] = None if p is None else float(f"{p:.3g}")  # three digits
        body["attribution"] = self.cause.to_json()
        return body
