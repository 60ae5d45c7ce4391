"""Everything a report says about a run, gathered once from its row and its files.

The HTML report, the Markdown report and the model card share their sections, and all sections are
built from this dossier. Texts of models and environments in it are cleaned, and secrets are hidden.
Only `config` is as it was read; its texts must be taken from the properties here, which clean them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_object
from engine.evidence.reported import ReportedNumber, number_to_report
from engine.evidence.stats.inference import Interval, wilson
from engine.evidence.stats.results import (
    VALIDATION,
    Measure,
    in_half,
    measure_of,
    side,
    value_of,
)
from engine.evidence.verdict.comparison import Comparison, compare_rows
from engine.evidence.verdict.contamination import Contamination, read_contamination
from engine.evidence.verdict.flips import FlipExamples, flip_examples
from engine.evidence.verdict.lineage import ancestry, started_from
from engine.evidence.verdict.provenance import Provenance, read_provenance
from engine.evidence.verdict.sides import Sides, evaluation_sides, training_sides
from engine.evidence.verdict.verdict import Verdict, run_verdict
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, clean_value, redactor_for
from engine.home.store import Store
from engine.records.audit import Audit
from engine.records.estimate import Estimate
from engine.records.lines.curves import Metrics, load_metrics
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.event import read_events
from engine.records.run_config import RunConfig, TrainConfig

_EXAMPLES = 4  # tasks gained, and as many lost
_EXAMPLE_CHARS = 900  # of an answer


@dataclass(frozen=True)
class Station:
    """One step in the history of a model, or one link of its provenance.

    Attributes:
        kind: base, model, train, evaluate or link.
        verdict: of a training run, "" without one.
        current: whether it is the run of this report.
        code: the hash of a link.
    """

    kind: str
    name: str
    detail: str = ""
    verdict: str = ""
    current: bool = False
    code: str = ""


@dataclass(frozen=True)
class HeldOutResult:
    """The held-out result at an evaluated step, on the half of the tasks that chooses a checkpoint.

    `interval` is the 95 % interval of `value`; None where the measure is not success.
    """

    step: int
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Dossier:
    """What is known about a run, by source.

    Attributes:
        config: None where it is missing or damaged; such a run has a report too.
        manifest: the JSON of manifest.json, {} before it is written.
        comparison, sides: before and after, None for an evaluation of one model.
        flips: examples of tasks gained and lost.
        reported: the number to report of a training run's result, None where there is none.
        held_out_results: the results of the evaluations during training.
        audit: of the environment's scorer, None where it was not audited.
        failure_evidence: what the run's failure left behind, "" without one.
        device_hours: hours of device time, None where nothing ran.
        lineage: from the base model to this run.
        alerts: the messages of the alerts raised during the run.
        provenance: the sealed links, None where nothing was sealed.
        redact: hides secrets in texts.
        gathered_at: seconds since the epoch.
    """

    row: RunRow
    run: RunDir
    config: RunConfig | None = field(repr=False)
    manifest: Mapping[str, Any]
    verdict: Verdict
    comparison: Comparison | None
    sides: Sides | None
    flips: FlipExamples
    reported: ReportedNumber | None
    metrics: Metrics
    held_out_results: list[HeldOutResult]
    audit: Audit | None
    contamination: Contamination
    failure_evidence: str
    device_hours: float | None
    lineage: list[Station]
    alerts: list[str]
    provenance: Provenance | None
    redact: Redactor = field(repr=False)
    gathered_at: float = 0.0

    @property
    def note(self) -> str:
        """The note that was given when the run was submitted, "" without one."""
        return self.redact.text(self.config.note) if isinstance(self.config, TrainConfig) else ""

    @property
    def estimate(self) -> Estimate | None:
        """What was expected of a training run when it was submitted, None for other runs."""
        return self.config.estimate if isinstance(self.config, TrainConfig) else None

    @property
    def started_from(self) -> str:
        """The reference of the model that training started from."""
        config = self.config
        start_ref = config.model if isinstance(config, TrainConfig) else ""
        return self.redact.text(start_ref or self.row.model)

    @property
    def base(self) -> str:
        """The reference of the base model below the start model."""
        config = self.config
        base_ref = config.base.ref if isinstance(config, TrainConfig) else ""
        return self.redact.text(base_ref or self.row.model)

    @property
    def labels(self) -> list[tuple[str, str]]:
        """The labels below the title, as (name, value): state, algorithm, environment, and so on.

        Empty values are left out. The state needs no name, so its name is "".
        """
        row = self.row
        start_model, base_model = self.started_from, self.base
        labels = [
            ("", row.state),
            ("algorithm", row.algorithm),
            ("environment", row.env_id),
            ("started from" if row.kind == "train" else "model", start_model),
        ]
        if base_model != start_model:
            labels.append(("base", base_model))
        if row.attempt > 1:
            labels.append(("attempt", str(row.attempt)))
        labels.append(("device", row.device))
        return [(name, value) for name, value in labels if value]

    @property
    def reward_risk_accepted(self) -> bool:
        """Whether the run was trained although the environment's reward audit fails."""
        return isinstance(self.config, TrainConfig) and self.config.settings.accept_reward_risk

    @property
    def settings(self) -> list[tuple[str, object, str]]:
        """(name, value, source) of every setting, redacted; [] without a config.

        First the settings that a user chose, then the others, both sorted by name.
        """
        if self.config is None:
            return []
        config_json = self.config.to_json()
        sources = self.redact.value(config_json["sources"])
        chosen_settings: list[tuple[str, object, str]] = []
        other_settings: list[tuple[str, object, str]] = []
        for name, value in sorted(self.redact.value(config_json["settings"]).items()):
            source = str(sources.get(name, ""))
            (chosen_settings if source == "user" else other_settings).append((name, value, source))
        return chosen_settings + other_settings

    @property
    def hashes(self) -> list[tuple[str, str]]:
        """(what, hash) for everything of which the run recorded a hash.

        In this order: environment version, task rows, weights of the model, starting adapter,
        settings. What has no hash is left out.
        """
        env_id = self.config.env_id if self.config else ""  # as name@hash
        _, _, env_hash = env_id.partition("@")
        env = self.manifest.get("env") or {}
        named_hashes = [
            ("environment", env_hash),
            ("task rows (sha256)", str(env.get("tasks_sha256") or "")),
            *_model_hashes(self.manifest.get("model") or {}),
            ("settings (sha256)", str(self.manifest.get("settings_sha256") or "")),
        ]
        return [(what, digest) for what, digest in named_hashes if digest]


def _model_hashes(model: JsonObject) -> list[tuple[str, str]]:
    """(file, hash) of the weights of the model, then of the files of the starting adapter.

    `model` is what the manifest says of the model.
    """
    named_hashes = []
    for name, digest in (model.get("files") or {}).items():
        if str(name).endswith(".safetensors"):
            named_hashes.append((f"{model.get('ref', 'model')} {name} (sha256)", str(digest)))
    for name, digest in (model.get("start_adapter") or {}).items():
        named_hashes.append((f"starting {name} (sha256)", str(digest)))
    return named_hashes


def gather(home: Home, run_id: str) -> Dossier:
    """Everything that the report on a run shows, from its row in the database and its files.

    The run may be in any state. Raises UserError RUN_NOT_FOUND or ENV_SEALED.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
        reported = number_to_report(home, store, row)
    run = home.run(row.run_id)
    config = run.find_config()
    refuse_if_of_sealed(config, "a report would show its tasks")
    redact = redactor_for(home, config.env_dir if config else None)
    is_training = row.kind == "train"
    sides = training_sides(run) if is_training else evaluation_sides(run, config)
    comparison = compare_rows(sides.before, sides.after) if sides else None
    return Dossier(
        row=row,
        run=run,
        config=config,
        manifest=clean_value(read_object(run.manifest)),
        verdict=run_verdict(run),
        comparison=comparison,
        sides=sides,
        flips=_flip_examples(comparison, sides, redact),
        reported=reported,
        metrics=load_metrics(run.metrics),
        held_out_results=_held_out_results(run) if is_training else [],
        audit=_redacted_audit(config, redact),
        contamination=_redacted_contamination(run, redact),
        failure_evidence=_failure_evidence(run, redact),
        device_hours=_device_hours(row),
        lineage=lineage(home, row, config),
        provenance=read_provenance(run),
        alerts=_alerts(run, redact),
        redact=redact,
        gathered_at=time.time(),
    )


def _flip_examples(
    comparison: Comparison | None, sides: Sides | None, redact: Redactor
) -> FlipExamples:
    """Examples of tasks won and lost, with the answers before and after training.

    At most `_EXAMPLES` for each direction, texts cut to `_EXAMPLE_CHARS` characters and with
    secrets taken out by `redact`. Empty without a comparison.
    """
    if sides is None or comparison is None:
        return FlipExamples()
    return flip_examples(
        comparison,
        sides.before,
        sides.after,
        redact,
        per_direction=_EXAMPLES,
        chars=_EXAMPLE_CHARS,
    )


def _alerts(run: RunDir, redact: Redactor) -> list[str]:
    """The messages of the alerts that a run raised while it was going on, without secrets."""
    events = read_events(run.events)
    return [redact.text(event.message) for event in events if event.event == "alert"]


def lineage(home: Home, row: RunRow, config: RunConfig | None) -> list[Station]:
    """The history of a model, from the base model to this run.

    For an evaluation: its models, then the evaluation itself. Where the home has no row of an
    ancestor, the history begins with the model that this ancestor trained.
    """
    if row.kind != "train":
        return _stations_of_evaluation(row, config)
    newest_first: list[Station] = []
    # What the run of the last round started from: a base model, or a checkpoint of the run of the
    # next round, such as "r-1@step20".
    start_ref = ""
    for run in ancestry(home.run(row.run_id)):
        run_row = _find_row(home, run.id)
        if run_row is None:
            break
        _, _, checkpoint = start_ref.partition("@")
        is_current = run.id == row.run_id
        newest_first.append(_training_station(run_row, checkpoint, current=is_current))
        start_ref = started_from(run)
    base = Station("base", start_ref, detail="base model")
    return [base, *reversed(newest_first)]


def _stations_of_evaluation(row: RunRow, config: RunConfig | None) -> list[Station]:
    """The models of an evaluation, then the evaluation itself."""
    model_refs = config.model_refs if config else []
    env_id = config.env_id if config else ""
    models = [Station("model", model_ref) for model_ref in model_refs]
    return [*models, Station("evaluate", row.run_id, detail=env_id, current=True)]


def _training_station(row: RunRow, checkpoint: str, *, current: bool) -> Station:
    """A training run in the history of a model.

    `checkpoint` is the one that the next run continued from, "" for none; `current` says that this
    is the run that the history leads to.
    """
    detail = f"{row.algorithm} on {row.env_id}"
    if checkpoint:
        detail += f", continued from {checkpoint}"
    return Station(
        kind="train", name=row.run_id, detail=detail, verdict=row.verdict, current=current
    )


def _find_row(home: Home, run_id: str) -> RunRow | None:
    """The row of a run; None where the home has only its folder, as after a copy by hand."""
    try:
        with Store(home) as store:
            return store.get_run(run_id)
    except UserError:  # RUN_NOT_FOUND
        return None


def _held_out_results(run: RunDir) -> list[HeldOutResult]:
    """The result of each evaluation, on the half of the held-out tasks that chooses a checkpoint.

    All tasks count where they are not split into halves. Success has Wilson's interval over the
    tasks; other measures have no interval. Evaluations in which nothing was scored are left out.
    """
    results = []
    for step in run.eval_steps():
        all_rows = read_evaluation(run.evals(step))
        rows = in_half(all_rows, VALIDATION) or all_rows
        measure = measure_of(rows)
        if measure is not None:  # else nothing was scored
            results.append(_held_out_result(step, rows, measure))
    return results


def _held_out_result(step: int, rows: Sequence[EvaluationRow], measure: Measure) -> HeldOutResult:
    """The mean of the rows that have a value (at least one does), with an interval for success.

    The interval is Wilson's over the tasks.
    """
    values_or_none = [value_of(row, measure) for row in rows]
    values = [value for value in values_or_none if value is not None]
    mean = sum(values) / len(values)
    if measure != "success":
        return HeldOutResult(step, mean, interval=None)
    task_count = len(side(rows, measure).values)
    # Wilson's interval needs whole tasks; several attempts at a task can make a fraction.
    solved_count = round(mean * task_count)
    return HeldOutResult(step, mean, interval=wilson(solved_count, task_count))


def _redacted_audit(config: RunConfig | None, redact: Redactor) -> Audit | None:
    """The redacted audit of the environment's scorer, None where there is none."""
    if config is None:
        return None
    try:
        audit = Audit.read(Path(config.env_dir) / "audit.json")
    except FileNotFoundError:
        return None
    return Audit.model_validate(redact.value(audit.as_written()))


def _failure_evidence(run: RunDir, redact: Redactor) -> str:
    """What showed that a run failed, such as the last line of its log; "" where nothing did."""
    return redact.text(str(read_object(run.failure).get("evidence") or ""))


def _device_hours(row: RunRow) -> float | None:
    """The hours that a run held its device, None where they are not known.

    Where the time was not recorded: those from its start to its end.
    """
    if row.spent_hours:
        return row.spent_hours
    return (row.ended - row.started) / 3600 if row.started and row.ended else None


def _redacted_contamination(run: RunDir, redact: Redactor) -> Contamination:
    """The redacted comparison of training rows with held-out tasks."""
    return Contamination.model_validate(redact.value(read_contamination(run).to_json()))
