"""Which held-out tasks a model has seen in training.

The training rows and held-out tasks of an environment version are compared when it is pushed. A
model may have been trained on other versions, by its own run or by the runs that it continues. The
training rows of these versions are compared with the held-out tasks when the model is submitted or
evaluated. Every comparison is stored in the home.
"""

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.environments.registry import EnvRecord, find_env, read_tasks
from engine.evidence.compare.settings_diff import ancestors, making_of_run
from engine.evidence.overlap.overlap import scan
from engine.evidence.verdict.contamination import left_out_for_all
from engine.evidence.verdict.lineage import sees, trained_by
from engine.home.owner_marks import seal_in
from engine.home.run_dir import Home

BUDGET_S = 2.0  # seconds for all comparisons of one call whose results are not stored yet
_GONE_CHARS = 120  # the most characters of a headline that name versions which are gone
_VERDICTS = ("clean", "overlap", "leak")  # the worst is the last
_KINDS = ("exact", "normalised", "ngram")  # kinds of matches; keys of an `Overlap`
HIDDEN = "a run that is not shared"  # the name of a training that the viewer does not see
Overlap = Mapping[str, Any]  # one comparison, as `overlap.scan` returns it


@dataclass(frozen=True)
class Contamination:
    """Which held-out tasks occur in training rows; the content of contamination.json.

    Attributes:
        verdict: clean, overlap or leak.
        leaked: ids of the held-out tasks that the training rows contain.
        sources: one entry per environment version trained on, as `overlap.scan` counts it.
        headline: the result in one sentence.
        harmless: whether tasks and rows share nothing but reference answers (`is_harmless`).
        taught: of several models: model -> how many of the tasks it was taught; {} of one.
    """

    verdict: str
    leaked: Sequence[str]
    sources: Sequence[Mapping[str, object]]
    headline: str
    harmless: bool = False
    taught: Mapping[str, int] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """A list with one warning for the reply to a submit; [] if nothing speaks against the
        held-out tasks. What is harmless was told by the push."""
        if self.verdict == "clean" or self.harmless:
            return []
        return [f"contamination: {self.headline}{left_out_for_all(self.leaked, self.taught)}"]


@dataclass(frozen=True)
class _Training:
    """One training of a model on an environment version.

    `model` is "" if the model need not be named, `run_id` is "" if the run has no id yet.
    """

    model: str
    run_id: str
    env_id: str


def compare_training(
    home: Home, record: EnvRecord, model: str = "", earlier_env_ids: Sequence[str] = ()
) -> Contamination:
    """Compare the held-out tasks of `record` with all rows that a model is trained on.

    These are the training rows of `record`, and the rows on which `model` was trained before.

    Args:
        record: the environment version on which the model is to be trained.
        model: the model that is to be trained; "" if there is none yet.
        earlier_env_ids: environment versions on which earlier runs of the same plan train the model
            before this run starts.
    """
    # The training that is about to start has no run id yet. All trainings concern the same model,
    # so the model is not named.
    new_training = _Training(model="", run_id="", env_id=record.env_id)
    earlier = [replace(training, model="") for training in _trainings(home, model)]
    unique_env_ids = dict.fromkeys(earlier_env_ids)
    planned = [replace(new_training, env_id=env_id) for env_id in unique_env_ids]
    return _compare_all(home, record, [new_training, *planned, *earlier])


def compare_evaluation(
    home: Home, record: EnvRecord, models: Sequence[str], split: str
) -> Contamination | None:
    """Find which of an evaluation's held-out or dev tasks its models were trained on.

    `record` is the environment version whose tasks are asked. Returns None if `split` is "train":
    training tasks are not compared with anything.
    """
    return None if split == "train" else compare_models(home, record, models)


def compare_models(
    home: Home, record: EnvRecord, models: Sequence[str], earlier_env_ids: Sequence[str] = ()
) -> Contamination:
    """Compare the held-out tasks of `record` with the rows on which `models` were trained here.

    `earlier_env_ids` are environment versions on which some of the models have yet to be trained,
    by earlier runs of the same plan.
    """
    trainings = [training for ref in models for training in _trainings(home, ref)]
    for env_id in dict.fromkeys(earlier_env_ids):  # each once
        trainings.append(_Training(model="", run_id="", env_id=env_id))
    # What a plan has yet to train is not known to be taught to one of the models or to all, so the
    # models are not told apart then.
    distinct_models = list(dict.fromkeys(models)) if not earlier_env_ids else []
    models_to_tell_apart = distinct_models if len(distinct_models) > 1 else ()
    return _compare_all(home, record, trainings, models_to_tell_apart)


def _trainings(home: Home, ref: str) -> list[_Training]:
    """List every training that the model `ref` went through in this home, the last one first.

    A training that the viewer (the key on whose behalf the home is read) may not see is listed
    without the id of its run. Returns [] if the model was not trained here, or if `ref` is "".
    """
    last_run = trained_by(home, ref) if ref else ""
    if not last_run:
        return []
    whole_home = home.whole  # with the runs of all keys: their rows were trained on too
    trainings = []
    for name in ancestors(whole_home, making_of_run(whole_home, last_run)):
        if "/" in name:  # a base model, which may be the last ancestor; a run's id has no slash
            continue
        config = home.run(name).find_config()
        if config is not None:  # else its file is gone or damaged, and its environment not known
            shown_id = name if sees(home, name) else HIDDEN
            trainings.append(_Training(ref, shown_id, config.env_id))
    return trainings


def _compare_all(
    home: Home,
    evaluated_on: EnvRecord,
    trainings: Sequence[_Training],
    models: Sequence[str] = (),
) -> Contamination:
    """Compare the held-out tasks of `evaluated_on` with the rows of every training of `trainings`,
    and sum up.

    The headline of the result also names environment versions that are gone. `models` are those to
    tell apart in `taught`. If `evaluated_on` is a sealed exam (tasks that nobody may see), the
    result holds numbers only, and no task or row.
    """
    overlaps, gone_env_ids = _overlap_by_env(
        home, evaluated_on, [training.env_id for training in trainings]
    )
    if seal_in(evaluated_on.dir) is not None:
        overlaps = {env_id: _counts_alone(overlap) for env_id, overlap in overlaps.items()}
    sources = [
        _source_entry(training, overlaps[training.env_id])
        for training in trainings
        if training.env_id in overlaps
    ]
    leaked_ids: set[str] = set()
    for overlap in overlaps.values():
        leaked_ids |= set(overlap["leaked"])
    verdict, headline = _worst_overlap(overlaps.values())
    harmless = verdict == "overlap" and all(
        overlap["verdict"] == "clean" or is_harmless(overlap) for overlap in overlaps.values()
    )
    # A version that only a hidden run was trained on is not named in the headline.
    visible_env_ids = {training.env_id for training in trainings if training.run_id != HIDDEN}
    visible_gone_ids = [env_id for env_id in gone_env_ids if env_id in visible_env_ids]
    if visible_gone_ids:
        headline += f"; {', '.join(visible_gone_ids)[:_GONE_CHARS]} is gone and was not compared"
    if len(visible_gone_ids) < len(gone_env_ids):
        headline += f"; the rows of {HIDDEN} were not compared"
    taught = {model: _taught_count(model, trainings, overlaps) for model in models}
    return Contamination(verdict, sorted(leaked_ids), sources, headline, harmless, taught)


def _taught_count(
    model: str, trainings: Sequence[_Training], overlaps: Mapping[str, Overlap]
) -> int:
    """Count the held-out tasks that a model was taught by all of its trainings together.

    `overlaps` maps env ids to overlaps; versions that are gone have none.
    """
    taught_ids: set[str] = set()
    for training in trainings:
        if training.model == model and training.env_id in overlaps:
            taught_ids |= set(overlaps[training.env_id]["leaked"])
    return len(taught_ids)


def _counts_alone(overlap: Overlap) -> Overlap:
    """Return the overlap without its examples, which quote held-out tasks and training rows."""
    total = _overlapping_tasks(overlap)
    headline = f"{total} of {overlap['heldout']} held-out tasks overlap with training rows"
    return {**overlap, "examples": [], "headline": headline}


def _worst_overlap(overlaps: Collection[Overlap]) -> tuple[str, str]:
    """Return (verdict, headline) of the worst overlap.

    If there are no overlaps, the verdict is "clean", and the headline says that none of the models
    was trained in this home.
    """
    if not overlaps:
        return "clean", "none of these models was trained in this home"
    worst = max(overlaps, key=_severity)
    return worst["verdict"], worst["headline"]


def _source_entry(training: _Training, overlap: Overlap) -> Mapping[str, object]:
    """Make the entry of a training, with its overlap, for `sources` of a `Contamination`."""
    origin = {name: text for name, text in asdict(training).items() if text}
    # Without `leaked`: a `Contamination` lists the leaked tasks of all its sources together.
    return origin | {name: value for name, value in overlap.items() if name != "leaked"}


def _overlap_by_env(
    home: Home, evaluated_on: EnvRecord, env_ids: Sequence[str]
) -> tuple[dict[str, Overlap], list[str]]:
    """Compare held-out tasks with the training rows of several environment versions.

    Args:
        evaluated_on: the version whose held-out tasks are compared.
        env_ids: the versions whose training rows are compared.

    Returns the overlap by env id, and the sorted ids of versions that are gone or unreadable.
    """
    deadline = time.monotonic() + BUDGET_S
    overlaps: dict[str, Overlap] = {}
    gone_env_ids: list[str] = []
    for env_id in dict.fromkeys(env_ids):  # each once
        try:
            is_same = env_id == evaluated_on.env_id
            trained_on = evaluated_on if is_same else find_env(home, env_id, sealed=True)
            overlaps[env_id] = _overlap_of(home, trained_on, evaluated_on, deadline)
        except (UserError, OSError, ValueError):  # the version or its rows are gone or unreadable
            gone_env_ids.append(env_id)
    return overlaps, sorted(gone_env_ids)


def _severity(overlap: Overlap) -> tuple[int, bool, int]:
    """Return the sort key of an overlap: by verdict, then those that are not harmless, then by the
    number of matches. The worst overlap has the largest key."""
    is_serious = not is_harmless(overlap)
    return (_VERDICTS.index(overlap["verdict"]), is_serious, _overlapping_tasks(overlap))


def is_harmless(overlap: Overlap) -> bool:
    """Whether all that held-out tasks and training rows share are reference answers, to other
    questions. Results that older versions of this program stored do not tell."""
    answers = overlap.get("answers", 0)
    return overlap.get("verdict") == "overlap" and answers == _overlapping_tasks(overlap)


def _overlapping_tasks(overlap: Overlap) -> int:
    """Count the held-out tasks that stand in training rows or have a twin among them: a row that
    holds none of the task's texts and teaches it all the same."""
    # Overlaps that older versions of this program stored do not count twins.
    twin_counts = overlap.get("twins", {})
    return sum(overlap[kind] for kind in _KINDS) + sum(twin_counts.values())


def _overlap_of(
    home: Home, trained_on: EnvRecord, evaluated_on: EnvRecord, deadline: float
) -> Overlap:
    """Return the overlap of training rows with held-out tasks.

    The stored result is used if there is one. Otherwise the rows are scanned now, and the result is
    stored if the scan was complete.

    Args:
        trained_on: the version whose training rows are compared.
        evaluated_on: the version whose held-out and dev tasks are compared.
        deadline: the time on the monotonic clock, in seconds, at which a scan stops.
    """
    # A version was compared with itself when it was pushed.
    if trained_on.hash == evaluated_on.hash and evaluated_on.contamination:
        return evaluated_on.contamination
    overlap_file = home.overlap(trained_on.hash, evaluated_on.hash)
    with contextlib.suppress(OSError, ValueError):  # not stored yet, or damaged
        return read_json(overlap_file)
    rows = read_tasks(trained_on, "train")
    # Dev tasks choose checkpoints, so a training row that teaches them spoils the choice.
    tasks = [*read_tasks(evaluated_on, "heldout"), *read_tasks(evaluated_on, "dev")]
    # At least 0.1 s, so that small data sets are compared even after the deadline.
    overlap = scan(rows, tasks, max(0.1, deadline - time.monotonic()))
    # `compared` holds the scanned shares of the rows and of the tasks, 1 for all. A partial scan is
    # not stored, so that a later call can make a complete one.
    if min(overlap["compared"]) == 1:
        overlap_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(overlap_file, overlap)
    return overlap
