"""Which models graded the answers of runs, and whether they were the same."""

from collections.abc import Iterable, Sequence

from engine.home.run_dir import RunDir
from engine.records.manifest import BasesAsked, JudgeUsed, Manifest
from engine.records.record import DamagedRecord


def judges_of(run: RunDir) -> Sequence[JudgeUsed]:
    """Return the models that could grade the answers of a run; () where that was not recorded, or
    cannot be read."""
    try:
        return Manifest.read(run.manifest).judges  # of a training run
    except (OSError, DamagedRecord):
        pass
    try:
        return BasesAsked.read(run.bases).judges  # of an evaluation
    except (OSError, DamagedRecord):
        return ()


def other_judges_warnings(runs: Iterable[RunDir]) -> list[str]:
    """Return a sentence for each reference by which some of the runs asked different judges.

    Their scores are not of one scale: a checkpoint `@best` may have moved on between two runs, or
    the owner may have pointed a name at another URL.
    """
    runs_by_ref: dict[str, dict[str, list[str]]] = {}  # reference -> identity -> ids of runs
    for run in runs:
        for judge in judges_of(run):
            runs_by_identity = runs_by_ref.setdefault(judge.ref, {})
            runs_by_identity.setdefault(judge.identity, []).append(run.id)
    warnings = []
    for ref, runs_by_identity in runs_by_ref.items():
        if len(runs_by_identity) > 1:  # one reference, several judges
            warnings.append(_sentence(ref, list(runs_by_identity.values())))
    return warnings


def _sentence(ref: str, runs_of_judges: Sequence[Sequence[str]]) -> str:
    """The warning that the reference `ref` meant several judges. It names a run of each, at most
    three; `runs_of_judges` has the ids of the runs of each judge."""
    first_runs = [run_ids[0] for run_ids in runs_of_judges[:3]]
    names = " and ".join(first_runs)
    return (
        f"The judge {ref} was not the same model in {names}: their scores are not of one scale. "
        "Evaluate all of them in one call."
    )
