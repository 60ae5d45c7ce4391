"""Everything a report says about a run, gathered once from its row and its files.

The HTML report, the Markdown report and the model card are made of the same sections, and those of
this dossier. All texts of models and environments in it are cleaned, and secrets are hidden; only
`config` is as it was read, which is why its texts are taken from the properties here.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.evidence.stats.inference import Interval, wilson
from engine.evidence.stats.results import VALIDATION, in_half, measure_of, side, value_of
from engine.evidence.verdict.comparison import Comparison, compare_rows
from engine.evidence.verdict.contamination import Contamination, read_contamination
from engine.evidence.verdict.flips import FlipExamples, flip_examples
from engine.evidence.verdict.lineage import ancestry, started_from
from engine.evidence.verdict.provenance import Provenance, read_provenance
from engine.evidence.verdict.sides import Sides, evaluation_sides, training_sides
from engine.evidence.verdict.verdict import Verdict, run_verdict
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, clean_value, redactor_for
from engine.home.store import Store
from engine.records.audit import Audit
from engine.records.estimate import Estimate
from engine.records.lines.curves import Metrics, load_metrics
from engine.records.lines.evaluation_row import read_evaluation
from engine.records.lines.event import read_events
from engine.records.run_config import RunConfig, TrainConfig

_EXAMPLES = 4
_EXAMPLE_CHARS = 900


@dataclass(frozen=True)
class Station:
    """One step of the way a model came: `kind` is base, train, evaluate, or a link with its hash
    in `code`."""

    kind: str
    name: str
    detail: str = ""
    verdict: str = ""
    current: bool = False
    code: str = ""


@dataclass(frozen=True)
class Checked:
    """Held-out success or reward at an evaluated step, on the half that chooses."""

    step: int
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Dossier:
    """What the module says, by source.

    Attributes:
        config: None where it is gone or damaged; a run without one has a report too.
        manifest: the JSON of manifest.json, {} before it is written.
        audit: of the environment's scorer, None where it was not audited.
        comparison, sides: before and after, None for an evaluation of one model.
        checked: what each evaluation on the way showed.
        hours: on the device, None where nothing ran.
        lineage: from the base model to this run.
        alerts: the messages of what was raised while the run was going on.
        written: when this was gathered, seconds since the epoch.
    """

    row: RunRow
    run: RunDir
    config: RunConfig | None = field(repr=False)
    manifest: Mapping[str, Any]
    verdict: Verdict
    comparison: Comparison | None
    sides: Sides | None
    flips: FlipExamples
    metrics: Metrics
    checked: list[Checked]
    audit: Audit | None
    contamination: Contamination
    failure_evidence: str
    hours: float | None
    lineage: list[Station]
    alerts: list[str]
    provenance: Provenance | None
    redact: Redactor = field(repr=False)
    written: float = 0.0

    @property
    def note(self) -> str:
        """Why the run was made, in the words of who submitted it."""
        return self.redact.text(self.config.note) if isinstance(self.config, TrainConfig) else ""

    @property
    def estimate(self) -> Estimate | None:
        """What submit expected of a training run."""
        return self.config.estimate if isinstance(self.config, TrainConfig) else None

    @property
    def started_from(self) -> str:
        """The reference of the model that training began with."""
        config = self.config
        started = config.model if isinstance(config, TrainConfig) else ""
        return self.redact.text(started or self.row.model)

    @property
    def base(self) -> str:
        """The reference of the base model under it."""
        config = self.config
        base = config.base.ref if isinstance(config, TrainConfig) else ""
        return self.redact.text(base or self.row.model)

    @property
    def chips(self) -> list[tuple[str, str]]:
        """(name, value) of what the run is: its state, algorithm, environment, models, device."""
        row, started, base = self.row, self.started_from, self.base
        chips = (
            ("", row.state),
            ("algorithm", row.algorithm),
            ("environment", row.env_id),
            ("model" if row.kind != "train" else "started from", started),
            ("base", base if base != started else ""),
            ("attempt", str(row.attempt) if row.attempt > 1 else ""),
            ("device", row.device),
        )
        return [(name, value) for name, value in chips if value]

    @property
    def reward_risk_accepted(self) -> bool:
        """Whether it was trained although the environment's reward audit fails."""
        return isinstance(self.config, TrainConfig) and self.config.settings.accept_reward_risk

    @property
    def settings(self) -> list[tuple[str, object, str]]:
        """(name, value, source): what a person chose first, then the rest by name."""
        if self.config is None:
            return []
        stored = self.config.to_json()
        sources = self.redact.value(stored["sources"])
        rows = [
            (name, value, str(sources.get(name, "")))
            for name, value in self.redact.value(stored["settings"]).items()
        ]
        return sorted(rows, key=lambda row: (row[2] != "user", row[0]))

    @property
    def hashes(self) -> list[tuple[str, str]]:
        """(what, hash) of environment, tasks, model and settings, as the manifest has them."""
        env_id = self.config.env_id if self.config else ""
        env = self.manifest.get("env") or {}
        model = self.manifest.get("model") or {}
        hashes = [
            ("environment", env_id.partition("@")[2]),
            ("task rows (sha256)", str(env.get("tasks_sha256") or "")),
        ]
        for name, digest in (model.get("files") or {}).items():
            if str(name).endswith(".safetensors"):
                hashes.append((f"{model.get('ref', 'model')} {name} (sha256)", str(digest)))
        for name, digest in (model.get("start_adapter") or {}).items():
            hashes.append((f"starting {name} (sha256)", str(digest)))
        hashes.append(("settings (sha256)", str(self.manifest.get("settings_sha256") or "")))
        return [(what, digest) for what, digest in hashes if digest]


def gather(home: Home, run_id: str) -> Dossier:
    """The dossier of a run in any state. Raises UserError RUN_NOT_FOUND."""
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.find_config()
    redact = redactor_for(home, config.env_dir if config else None)
    training = row.kind == "train"
    sides = training_sides(run) if training else evaluation_sides(run, config)
    comparison = compare_rows(sides.before, sides.after) if sides else None
    flips = FlipExamples()
    if sides and comparison:
        flips = flip_examples(
            comparison, sides.before, sides.after, redact, each=_EXAMPLES, chars=_EXAMPLE_CHARS
        )
    return Dossier(
        row=row,
        run=run,
        config=config,
        manifest=clean_value(read_object(run.manifest)),
        verdict=run_verdict(run),
        comparison=comparison,
        sides=sides,
        flips=flips,
        metrics=load_metrics(run.metrics),
        checked=_checked(run) if training else [],
        audit=_audit(config, redact),
        contamination=_contamination(run, redact),
        failure_evidence=redact.text(str(read_object(run.failure).get("evidence") or "")),
        hours=row.spent_hours or _hours_between(row.started, row.ended),
        lineage=lineage(home, row, config),
        provenance=read_provenance(run),
        alerts=[
            redact.text(event.message)
            for event in read_events(run.events)
            if event.event == "alert"
        ],
        redact=redact,
        written=time.time(),
    )


def lineage(home: Home, row: RunRow, config: RunConfig | None) -> list[Station]:
    """From the base model to this run, oldest first."""
    if row.kind != "train":
        models = config.model_refs if config else []
        return [Station("model", ref) for ref in models] + [
            Station("evaluate", row.run_id, config.env_id if config else "", current=True)
        ]
    way: list[Station] = []
    ref = ""
    for run in ancestry(home.run(row.run_id)):
        ancestor = _row(home, run.id)
        if ancestor is None:
            break
        detail = f"{ancestor.algorithm} on {ancestor.env_id}"
        if which := ref.partition("@")[2]:
            detail += f", continued from {which}"
        current = run.id == row.run_id
        way.append(Station("train", run.id, detail, ancestor.verdict, current))
        ref = started_from(run)
    return [Station("base", ref, "base model"), *way[::-1]]


def _row(home: Home, run_id: str) -> RunRow | None:
    """The row of a run whose folder is there; a home may have been put together by hand."""
    try:
        with Store(home) as store:
            return store.get_run(run_id)
    except UserError:
        return None


def _checked(run: RunDir) -> list[Checked]:
    """What each evaluation showed on the half that chooses, with Wilson's interval for rates."""
    checked = []
    for step in run.eval_steps():
        rows = read_evaluation(run.evals(step))
        rows = in_half(rows, VALIDATION) or rows
        measure = measure_of(rows)
        if measure is None:
            continue
        values = [value for row in rows if (value := value_of(row, measure)) is not None]
        mean = sum(values) / len(values)
        interval = None
        if measure == "success":
            tasks = len(side(rows, measure).values)
            interval = wilson(round(mean * tasks), tasks)
        checked.append(Checked(step, mean, interval))
    return checked


def _audit(config: RunConfig | None, redact: Redactor) -> Audit | None:
    if config is None:
        return None
    try:
        audit = Audit.read(Path(config.env_dir) / "audit.json")
    except FileNotFoundError:
        return None
    return Audit.model_validate(redact.value(audit.as_written()))


def _hours_between(start: float | None, end: float | None) -> float | None:
    return (end - start) / 3600 if start and end else None


def _contamination(run: RunDir, redact: Redactor) -> Contamination:
    return Contamination.model_validate(redact.value(read_contamination(run).to_json()))
