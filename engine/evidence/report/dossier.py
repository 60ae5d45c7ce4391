"""The dossier: everything that a report says about a run, gathered once from its row and its files.

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

_EXAMPLES = 4  # most gained tasks that are shown, and most lost ones
_EXAMPLE_CHARS = 900  # most characters of a prompt or an answer


@dataclass(frozen=True)
class Station:
    """One step in the history of a model, or one link of its provenance (chain of hashes).

    Attributes:
        kind: base, model, train, evaluate or link.
        verdict: the verdict of a training run; "" if there is none.
        current: whether this is the run of the report.
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

    `interval` is the 95 % interval of `value`; None if the measure is not success.
    """

    step: int
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Dossier:
    """Everything that is known about a run.

    Attributes:
        config: None if it is missing or damaged; such a run has a report too.
        manifest: the JSON of manifest.json; {} before it is written.
        comparison, sides: before and after; None for an evaluation of one model.
        flips: examples of tasks gained and lost.
        reported: the number to report of a training run's result; None if there is none.
        held_out_results: the results of the evaluations during training.
        audit: the audit of the environment's scorer; None if it was not audited.
        failure_evidence: what the run's failure left behind; "" if it did not fail.
        device_hours: hours of device time; None if nothing ran.
        lineage: the history from the base model to this run.
        alerts: the messages of the alerts raised during the run.
        provenance: the sealed links (chain of hashes); None if the run was not sealed.
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
        """The note that the user gave when the run was submitted; "" if there is none."""
        return self.redact.text(self.config.note) if isinstance(self.config, TrainConfig) else ""

    @property
    def estimate(self) -> Estimate | None:
        """What was estimated for a training run when it was submitted; None for other runs."""
        return self.config.estimate if isinstance(self.config, TrainConfig) else None

    @property
    def started_from(self) -> str:
        """The reference of the model that training started from, with secrets hidden."""
        config = self.config
        start_ref = config.model if isinstance(config, TrainConfig) else ""
        return self.redact.text(start_ref or self.row.model)

    @property
    def base(self) -> str:
        """The reference of the base model of the start model, with secrets hidden."""
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
        """(name, value, source) of every setting, with secrets hidden. Returns [] without a config.

        The settings that the user chose come first, then the others, both sorted by name.
        """
        if self.config is None:
            return []
        config_json = self.config.to_json()
        sources = self.redact.value(config_json["sources"])
        chosen_settings: list[tuple[str, object, str]] = []
        other_settings: list[tuple[str, object, str]] = []
        for name, value in sorted(self.redact.value(config_json["settings"]).items()):
            source = str(sources.get(name, ""))
            if source == "user":
                chosen_settings.append((name, value, source))
            else:
                other_settings.append((name, value, source))
        return chosen_settings + other_settings

    @property
    def hashes(self) -> list[tuple[str, str]]:
        """(what, hash) for everything of which the run recorded a hash.

        In this order: environment version, task rows, weights of the model, starting adapter,
        settings. Anything without a hash is left out.
        """
        env_id = self.config.env_id if self.config else ""  # such as "sums@3f2a9c01b4d7"
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
    """(file, hash) for the weights of the model, then for the files of the starting adapter.

    `model` is the entry "model" of the manifest.
    """
    named_hashes = []
    model_name = model.get("ref", "model")
    for name, digest in (model.get("files") or {}).items():
        if str(name).endswith(".safetensors"):  # weights
            named_hashes.append((f"{model_name} {name} (sha256)", str(digest)))
    for name, digest in (model.get("start_adapter") or {}).items():
        named_hashes.append((f"starting {name} (sha256)", str(digest)))
    return named_hashes


def gather(home: Home, run_id: str) -> Dossier:
    """Gather everything that the report on a run shows, from its row in the database and its files.

    The run may be in any state. Raises UserError RUN_NOT_FOUND if there is no such run, and
    ENV_SEALED if the tasks of its environment must not be shown.
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
    """Examples of tasks gained and lost, with the answers before and after.

    At most `_EXAMPLES` for each direction, texts cut to `_EXAMPLE_CHARS` characters and with
    secrets removed by `redact`. Empty without a comparison.
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
    """The messages of the alerts that were raised during a run, with secrets hidden."""
    events = read_events(run.events)
    return [redact.text(event.message) for event in events if event.event == "alert"]


def lineage(home: Home, row: RunRow, config: RunConfig | None) -> list[Station]:
    """The history of a model, from the base model to this run.

    For an evaluation: its models, then the evaluation itself. If the database has no row of an
    ancestor, the history begins with the model that this ancestor trained.
    """
    if row.kind != "train":
        return _stations_of_evaluation(row, config)
    newest_first: list[Station] = []
    # The model that the child (the run of the round before) started from: a base model, or a
    # checkpoint of the run of this round, such as "r-1@step20".
    child_start_ref = ""
    for run in ancestry(home.run(row.run_id)):  # from this run back to the oldest
        run_row = _find_row(home, run.id)
        if run_row is None:
            break
        _, _, checkpoint = child_start_ref.partition("@")
        is_current = run.id == row.run_id
        newest_first.append(_training_station(run_row, checkpoint, current=is_current))
        child_start_ref = started_from(run)
    base = Station("base", child_start_ref, detail="base model")
    return [base, *reversed(newest_first)]


def _stations_of_evaluation(row: RunRow, config: RunConfig | None) -> list[Station]:
    """The models of an evaluation, then the evaluation itself."""
    model_refs = config.model_refs if config else []
    env_id = config.env_id if config else ""
    models = [Station("model", model_ref) for model_ref in model_refs]
    return [*models, Station("evaluate", row.run_id, detail=env_id, current=True)]


def _training_station(row: RunRow, checkpoint: str, *, current: bool) -> Station:
    """A training run as a step in the history of a model.

    `checkpoint` is the one that the next run continued from ("" for none). `current` says that this
    is the run of the report.
    """
    detail = f"{row.algorithm} on {row.env_id}"
    if checkpoint:
        detail += f", continued from {checkpoint}"
    return Station(
        kind="train", name=row.run_id, detail=detail, verdict=row.verdict, current=current
    )


def _find_row(home: Home, run_id: str) -> RunRow | None:
    """The row of a run. Returns None if the home has only its folder, as after a copy by hand."""
    try:
        with Store(home) as store:
            return store.get_run(run_id)
    except UserError:  # RUN_NOT_FOUND
        return None


def _held_out_results(run: RunDir) -> list[HeldOutResult]:
    """The result of each evaluation of a training run on the held-out tasks, on the half of them
    that chooses a checkpoint.

    All tasks count if they are not split into halves. Success has Wilson's interval over the tasks;
    other measures have no interval. Evaluations in which nothing was scored are left out.
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
    """The mean of the rows that have a value (at least one must), for success with Wilson's
    interval over the tasks."""
    values_or_none = [value_of(row, measure) for row in rows]
    values = [value for value in values_or_none if value is not None]
    mean = sum(values) / len(values)
    if measure != "success":
        return HeldOutResult(step, mean, interval=None)
    task_count = len(side(rows, measure).values)
    # Wilson's interval counts whole tasks, but several attempts at a task can give a fraction.
    solved_count = round(mean * task_count)
    return HeldOutResult(step, mean, interval=wilson(solved_count, task_count))


def _redacted_audit(config: RunConfig | None, redact: Redactor) -> Audit | None:
    """The audit of the environment's scorer, with secrets hidden. Returns None if there is none."""
    if config is None:
        return None
    try:
        audit = Audit.read(Path(config.env_dir) / "audit.json")
    except FileNotFoundError:
        return None
    return Audit.model_validate(redact.value(audit.as_written()))


def _failure_evidence(run: RunDir, redact: Redactor) -> str:
    """What showed that a run failed, such as the last line of its log; "" if it did not fail."""
    return redact.text(str(read_object(run.failure).get("evidence") or ""))


def _device_hours(row: RunRow) -> float | None:
    """The hours that a run held its device. Returns None if they are not known.

    If the time was not recorded, the hours from its start to its end.
    """
    if row.spent_hours:
        return row.spent_hours
    if not row.started or not row.ended:
        return None
    return (row.ended - row.started) / 3600


def _redacted_contamination(run: RunDir, redact: Redactor) -> Contamination:
    """The result of comparing training rows with held-out tasks, with secrets hidden."""
    return Contamination.model_validate(redact.value(read_contamination(run).to_json()))
