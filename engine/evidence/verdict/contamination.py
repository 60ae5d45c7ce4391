"""Held-out tasks that stand in the training rows of a run's models: `contamination.json`."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from engine.evidence.overlap.overlap import Kind
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.record import Record


class SharedPair(Record):
    """One held-out task and the training row that holds it; `part` is prompt or answer."""

    heldout: str
    train: str
    kind: str = ""
    part: str = ""


class SharedRows(Record):
    """What the rows of one environment version share with the held-out tasks.

    Attributes:
        env_id: the version that was trained on.
        run_id: the earlier run that trained on it; "" for this run itself.
        train, heldout: how many training rows and held-out tasks were compared.
        exact, normalised, ngram: how many held-out tasks stand in the rows, by kind of match.
        twins: how many further ones have a twin among the rows, by kind of twin.
        examples: a few of them.
    """

    env_id: str = ""
    run_id: str = ""
    train: int | None = None
    heldout: int | None = None
    exact: int = 0
    normalised: int = 0
    ngram: int = 0
    twins: Mapping[str, int] = Field(default_factory=dict)
    examples: tuple[SharedPair, ...] = ()

    def count(self, kind: Kind) -> int:
        """How many held-out tasks stand in the rows by this kind of match."""
        return {"exact": self.exact, "normalised": self.normalised, "ngram": self.ngram}[kind]


class Contamination(Record):
    """What the check at submit wrote down (engine/runs/submit/contamination.py).

    Attributes:
        verdict: clean, overlap or leak.
        leaked: ids of the held-out tasks that the training rows teach.
        headline: the result in a sentence.
        sources: one entry for each version trained on.
    """

    verdict: str = "clean"
    leaked: tuple[str, ...] = ()
    headline: str = ""
    sources: tuple[SharedRows, ...] = ()


def read_contamination(run_dir: RunDir) -> Contamination:
    """The result of the check of the run's training rows at submit.

    A clean result where nothing was written, as for runs that were never checked. Raises
    DamagedRecord for a file that cannot be read.
    """
    try:
        return Contamination.read(run_dir.contamination)
    except FileNotFoundError:
        return Contamination()


def taught_tasks(run_dir: RunDir) -> frozenset[str]:
    """Ids of the held-out tasks that the training rows teach: no model can be judged by them."""
    return frozenset(read_contamination(run_dir).leaked)


def without_tasks(rows: Sequence[EvaluationRow], taught: frozenset[str]) -> list[EvaluationRow]:
    """The rows whose task is not among `taught`."""
    return [row for row in rows if row.task not in taught]


def contamination_warnings(run_dir: RunDir) -> list[str]:
    """A sentence about held-out tasks in training rows, as a list; [] where there are none.

    The sentence ends with how many tasks the verdict leaves out (if any), because rows teach them.
    """
    contamination = read_contamination(run_dir)
    if contamination.verdict == "clean":
        return []
    warning = f"Contamination: {contamination.headline or 'training rows hold held-out tasks'}"
    if contamination.leaked:
        warning += f"; {len(contamination.leaked)} are left out of the verdict"
    return [f"{warning}."]
