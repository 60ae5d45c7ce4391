"""One candidate compared with the first."""

from dataclasses import dataclass

from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.settings_diff import Attribution
from engine.evidence.verdict.comparison import Comparison


@dataclass(frozen=True)
class Contest:
    """One candidate compared with the first.

    Attributes:
        p_adjusted: the p value, corrected for the other contests and for earlier evaluations of the
            two models; None where there is none.
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
        """The contest as JSON; `method=False` leaves out the name of the statistical method.

        `p_adjusted` (None where there was no test) is there only if p had to be corrected, for
        other contests or earlier evaluations.
        """
        body: dict[str, object] = {"model": self.other.label, "against": self.first.label}
        body |= self.comparison.to_json()
        if not method:
            del body["method"]
        if self.corrected:
            # Three significant digits.
            p = None if self.p_adjusted is None else float(f"{self.p_adjusted:.3g}")
            body["p_adjusted"] = p
        return body | {"attribution": self.cause.to_json()}
