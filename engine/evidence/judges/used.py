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
    runs_of_judge: dict[str, dict[str, list[str]]] = {}  # reference -> identity -> ids of runs
    for run in runs:
        for judge in judges_of(run):
            of_ref = runs_of_judge.setdefault(judge.ref, {})
            of_ref.setdefault(judge.identity, []).append(run.id)
    return [
        _sentence(ref, list(of_ref.values()))
        for ref, of_ref in runs_of_judge.items()
        if len(of_ref) > 1
    ]


def _sentence(ref: str, groups: Sequence[Sequence[str]]) -> str:
    """Name a run of each of the judges that `ref` meant, at most three."""
    names = " and ".join(group[0] for group in groups[:3])
    return (
        f"The judge {ref} was not the same model in {names}: their scores are not of one scale. "
        "Evaluate all of them in one call."
    )
