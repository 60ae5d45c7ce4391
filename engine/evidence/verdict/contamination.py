"""Held-out tasks that stand in the training rows of a run's models, as `contamination.json` lists
them."""

import json
from collections.abc import Mapping, Sequence

from pydantic import Field

from engine.core.format import counted
from engine.evidence.overlap.overlap import Kind
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.record import Record


class SharedPair(Record):
    """The ids of a held-out task and of the training row that holds it. `kind` is the kind of
    match, `part` the shared part: prompt or answer."""

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
        twins: how many further held-out tasks have a twin among the rows, by kind of twin.
        examples: a few of the matches.
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
        counts = {"exact": self.exact, "normalised": self.normalised, "ngram": self.ngram}
        return counts[kind]


class Contamination(Record):
    """The result of the check at submit (engine/runs/submit/contamination.py).

    Attributes:
        verdict: clean, overlap or leak.
        leaked: ids of the held-out tasks that the training rows teach.
        headline: the result in a sentence.
        sources: one entry for each environment version that was trained on.
        harmless: whether tasks and rows share nothing but answers to other questions.
        taught: of an evaluation of several models: model -> how many of the tasks it was taught.
    """

    verdict: str = "clean"
    leaked: tuple[str, ...] = ()
    headline: str = ""
    sources: tuple[SharedRows, ...] = ()
    harmless: bool = False
    taught: Mapping[str, int] = Field(default_factory=dict)


def read_contamination(run_dir: RunDir) -> Contamination:
    """The stored result of the check for held-out tasks in the run's training rows.

    Returns a clean result if nothing was stored, as for runs that were never checked. Raises
    DamagedRecord if the file cannot be read.
    """
    try:
        return Contamination.read(run_dir.contamination)
    except FileNotFoundError:
        return Contamination()


def taught_tasks(run_dir: RunDir) -> frozenset[str]:
    """Ids of the held-out tasks that the training rows teach: no model can be judged by them."""
    return frozenset(read_contamination(run_dir).leaked)


def without_tasks(rows: Sequence[EvaluationRow], task_ids: frozenset[str]) -> list[EvaluationRow]:
    """The rows without those on the tasks `task_ids`."""
    return [row for row in rows if row.task not in task_ids]


def contamination_warnings(run_dir: RunDir) -> list[str]:
    """A sentence about held-out tasks in training rows, as a list of one. Returns [] if there are
    none, or nothing but equal answers, which the push told.

    The sentence ends with the number of tasks that are left out of the verdict, if any, because
    training rows teach them.
    """
    contamination = read_contamination(run_dir)
    if contamination.verdict == "clean" or contamination.harmless:
        return []
    warning = f"Contamination: {contamination.headline or 'training rows hold held-out tasks'}"
    leaked = contamination.leaked  # tasks that no model can be judged by
    if leaked:
        ending = left_out_for_all(leaked, contamination.taught)
        are = "is" if len(leaked) == 1 else "are"
        warning += ending or f"; {len(leaked)} {are} left out of the verdict"
    return [f"{warning}."]


def left_out_for_all(leaked: Sequence[str], taught: Mapping[str, int]) -> str:
    """Say, as the end of a sentence, that an evaluation of several models leaves tasks out for all
    of them because some were trained on these tasks, and how to ask the other models all tasks.

    Returns "" if no task is left out, if no model was trained on tasks, or if every model was.

    Args:
        leaked: the ids of the tasks that are left out.
        taught: maps each model of the evaluation to how many of the tasks it was trained on.
    """
    taught_models = [f"{model} ({count})" for model, count in taught.items() if count]
    other_models = [model for model, count in taught.items() if not count]
    if not leaked or not taught_models or not other_models:
        return ""
    are, them = ("is", "it") if len(leaked) == 1 else ("are", "them")
    were = "was" if len(taught_models) == 1 else "were"
    return (
        f"; {counted(len(leaked), 'task')} {are} left out for all models, because "
        f"{' and '.join(taught_models)} {were} trained on {them}: "
        f"evaluate(models={json.dumps(other_models)}) asks all tasks"
    )
