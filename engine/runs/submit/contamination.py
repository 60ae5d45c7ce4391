"""Which held-out tasks a model was taught: its training rows held against an exam.

Every environment version is compared with itself when it is pushed. A model that was trained on
other versions (its own run's, or those of the runs it continues) is compared with the exam's
held-out tasks when it is submitted or evaluated; what was compared once is kept in the home.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.environments.registry import EnvRecord, find_env, read_tasks
from engine.evidence.compare.settings_diff import ancestors, making_of_run
from engine.evidence.stats.overlap import scan
from engine.evidence.verdict.lineage import trained_by
from engine.home.run_dir import Home

BUDGET_S = 2.0  # for all comparisons of one call that are not kept yet
_WORST = ("clean", "overlap", "leak")
_COUNTS = ("exact", "normalised", "ngram")


@dataclass(frozen=True)
class Contamination:
    """What training rows hold of held-out tasks; the content of contamination.json.

    Attributes:
        verdict: clean, overlap or leak.
        leaked: the tasks that these rows teach.
        sources: one entry per environment version trained on, as `overlap.scan` counts it.
        headline: what was found, one sentence.
    """

    verdict: str
    leaked: Sequence[str]
    sources: Sequence[Mapping[str, object]]
    headline: str

    @property
    def warnings(self) -> list[str]:
        """What to say of it at a submit."""
        return [] if self.verdict == "clean" else [f"contamination: {self.headline}"]


def of_training(home: Home, record: EnvRecord, model: str = "") -> Contamination:
    """The training rows of `record`, and of the runs that `model` descends from, against its
    held-out tasks."""
    lessons = [("", record.env_id), *_lessons(home, model)]
    return _against(home, record, [("", run, env) for run, env in lessons])


def of_models(home: Home, record: EnvRecord, models: Sequence[str]) -> Contamination:
    """What `models` were trained on against the held-out tasks of `record`; as `of_training`."""
    lessons = [(ref, run, env) for ref in models for run, env in _lessons(home, ref)]
    return _against(home, record, lessons)


def _lessons(home: Home, ref: str) -> list[tuple[str, str]]:
    """(run, environment version) of every training a model went through, the last first."""
    run_id = trained_by(home, ref) if ref else ""
    if not run_id:
        return []
    line = ancestors(home, making_of_run(home, run_id))
    configs = [(name, home.run(name).find_config()) for name in line if "/" not in name]
    return [(name, config.env_id) for name, config in configs if config]


def _against(home: Home, exam: EnvRecord, lessons: Sequence[tuple[str, str, str]]) -> Contamination:
    """The training rows of every lesson (model, run, environment version) against one exam."""
    deadline = time.monotonic() + BUDGET_S
    sources: list[Mapping[str, object]] = []
    scans: dict[str, Mapping[str, Any]] = {}
    missing: list[str] = []
    for model, run, env_id in lessons:
        if env_id not in scans:
            try:
                taught = exam if env_id == exam.env_id else find_env(home, env_id)
                scans[env_id] = _compared(home, taught, exam, deadline)
            except (UserError, OSError, ValueError):
                missing.append(env_id)
                continue
        overlap = scans[env_id]
        named = {"model": model, "run_id": run, "env_id": env_id}
        shown = {key: value for key, value in overlap.items() if key != "leaked"}
        sources.append({key: value for key, value in named.items() if value} | shown)
    leaked = sorted({task for overlap in scans.values() for task in overlap["leaked"]})
    verdicts = [overlap["verdict"] for overlap in scans.values()]
    worst = max(scans.values(), key=_weight) if scans else None
    headline = "none of these models was trained in this home"
    if worst is not None:
        headline = worst["headline"]
    if missing:
        headline += f"; {', '.join(sorted(set(missing)))[:120]} is gone and was not compared"
    verdict = max(verdicts, key=_WORST.index, default="clean")
    return Contamination(verdict, leaked, sources, headline)


def _weight(overlap: Mapping[str, Any]) -> tuple[int, int]:
    return (_WORST.index(overlap["verdict"]), sum(overlap[kind] for kind in _COUNTS))


def _compared(home: Home, taught: EnvRecord, exam: EnvRecord, deadline: float) -> Mapping[str, Any]:
    """The scan of one version's training rows against the exam, kept in the home once it is
    whole."""
    if taught.hash == exam.hash and exam.contamination:
        return exam.contamination
    kept = home.overlap(taught.hash, exam.hash)
    with contextlib.suppress(OSError, ValueError):
        return read_json(kept)
    rows, tasks = read_tasks(taught, "train"), read_tasks(exam, "heldout")
    overlap = scan(rows, tasks, max(0.1, deadline - time.monotonic()))
    if min(overlap["compared"]) == 1:  # a part only: the next call may have time for all of it
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(kept, overlap)
    return overlap
