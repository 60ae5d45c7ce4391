"""Where a plan stands: its runs step by step, each with its verdict.

A plan has no state of its own: everything here is read from the rows and files of its runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.files import last_line, read_object
from engine.core.format import counted, percent
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.stats.basics.target import target_in
from engine.evidence.stats.learnability import success_to_start
from engine.evidence.verdict.side_notes import ENOUGH
from engine.home.rows import HOLDS_DEVICE, OPEN, STATES, RunRow, plan_state
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.pace.progress import Progress, alerts_in, attempt_begin, events_from, read_progress
from engine.processes import launcher
from engine.records.lines.line_record import Line
from engine.records.run_config import EvaluateConfig, GRPOConfig
from engine.runs.forecast import Forecast, forecast_of_plan

_MAX_ALERTS = 10  # that a status shows, the newest
# What a step shows of the evidence for its verdict.
_EVIDENCE_KEYS = ("metric", "before", "after", "difference", "interval", "n")
_WAYS_ON = ("submit_train", "deploy", "diagnose")  # of what a run suggests, what a plan does too
_MOST_DIGITS = 15  # of a number in a cursor: more name no position in any file


@dataclass(frozen=True)
class Marks:
    """What a cursor remembers of one run of a plan: its state, its attempt, and the byte at which
    its newer events begin."""

    state: str
    attempt: int
    events_end: int

    def dump(self) -> str:
        """The marks as a part of a cursor."""
        return f"{STATES.index(self.state)}.{self.attempt}.{self.events_end}"

    @staticmethod
    def load(text: str) -> "Marks":
        """Read the marks that `dump` made. Raises ValueError for another text."""
        state, attempt, events_end = (_whole_number(part) for part in text.split("."))
        if state >= len(STATES):
            raise ValueError(f"there is no state {state}")
        return Marks(STATES[state], attempt, events_end)


@dataclass(frozen=True)
class PlanSnapshot:
    """A plan as it was read once.

    Attributes:
        rows: its runs in the order of the steps.
        events: the events of each run since the cursor.
        ended: the ids of the runs that have ended since the cursor.
        marks: of each run, for the next cursor.
    """

    rows: Sequence[RunRow]
    events: Sequence[list[Line]]
    ended: Sequence[str]
    marks: Sequence[Marks]

    @property
    def state(self) -> str:
        """The state of the whole."""
        return plan_state(self.rows)

    @property
    def is_over(self) -> bool:
        """Whether no run of the plan is open."""
        return not any(row.state in OPEN for row in self.rows)

    @property
    def cursor(self) -> str:
        """The cursor from which the next snapshot goes on."""
        return "_".join(mark.dump() for mark in self.marks)


def marks_of(home: Home, rows: Sequence[RunRow], cursor: str) -> list[Marks]:
    """Read the marks that a cursor holds, one for each run of the plan (`rows`).

    For the cursor "" they are those from which everything of the present attempts is new. Raises
    UserError BAD_CURSOR.
    """
    if not cursor:
        begins = [attempt_begin(home.run(row.run_id), row.attempt) for row in rows]
        return [Marks("queued", attempt=0, events_end=begin) for begin in begins]
    try:
        marks = [Marks.load(part) for part in cursor.split("_")]
    except ValueError:
        marks = []
    if len(marks) != len(rows):
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by wait_run for this plan",
            hint="Pass the cursor of the last answer unchanged, or leave it out.",
            field="cursor",
        )
    return marks


def snapshot_of(home: Home, rows: Sequence[RunRow], earlier_marks: Sequence[Marks]) -> PlanSnapshot:
    """Look at the runs of a plan.

    Events and ends since `earlier_marks`, one for each run, count as new.
    """
    events, marks, ended = [], [], []
    for row, mark in zip(rows, earlier_marks, strict=True):
        new_events, end = events_from(home.run(row.run_id), mark.events_end)
        events.append(new_events)
        marks.append(Marks(row.state, row.attempt, end))
        has_changed = (row.state, row.attempt) != (mark.state, mark.attempt)
        if row.state not in OPEN and has_changed:
            ended.append(row.run_id)
    return PlanSnapshot(rows, events, ended, marks)


def has_reached(home: Home, snapshot: PlanSnapshot, until: str) -> bool:
    """Return whether a plan has reached what is waited for (`until`).

    That is its end, the first step of a run, or an event of a run; with "news" also the end of a
    step.
    """
    if until == "end":
        return snapshot.is_over
    if until == "first_step":
        lines = [last_line(home.run(row.run_id).metrics) or {} for row in snapshot.rows]
        return any(isinstance(line.get("step"), int) and line["step"] >= 1 for line in lines)
    if until == "news" and (snapshot.ended or snapshot.is_over):
        return True
    name = "evaluated" if until == "next_eval" else "alert"
    return any(event.get("event") == name for events in snapshot.events for event in events)


def status_of(
    home: Home, store: Store, snapshot: PlanSnapshot, *, has_cursor: bool = False
) -> Reply:
    """Make the status of a plan: a line for each step, and its alerts.

    With `has_cursor` the caller has seen an earlier status. While the plan goes on, it then gets
    only alerts since then, and no steps that ended before or have not begun.
    """
    plan_id = snapshot.rows[0].plan
    only_new = has_cursor and not snapshot.is_over
    shown_rows = [row for row in snapshot.rows if not only_new or _is_news(row, snapshot)]
    alerts = _alerts_since(snapshot) if only_new else _all_alerts(home, snapshot.rows)
    steps = [_step(home, row) for row in shown_rows]
    verdict = next((step["verdict"] for step in reversed(steps) if "verdict" in step), "")
    status: Reply = {
        "run_id": plan_id,
        "kind": "plan",
        "state": snapshot.state,
        "steps": steps,
        "alerts": alerts[-_MAX_ALERTS:],
        "spent_hours": round(sum(launcher.spent_hours(home, row) for row in snapshot.rows), 4),
        "max_gpu_hours": snapshot.rows[0].max_gpu_hours,
        "cursor": snapshot.cursor,
        "next": [
            *(call.to_json() for call in _next_calls(snapshot, alerts)),
            *_ways_on(home, snapshot, verdict),
        ],
        "warnings": [
            *_unready_starts(home, snapshot.rows),
            *(text for row in shown_rows for text in _warnings_of(home, row)),
        ],
    }
    forecast = forecast_of_plan(home, snapshot.rows)
    if forecast is not None:
        status["forecast"] = forecast.to_json()
        if forecast.cap:
            status["warnings"].append(forecast.cap)
    status["summary"] = _summary(home, store, snapshot, forecast)
    target = _target_text(home, snapshot.rows)
    if target:
        status["target"] = target
        status["summary"] += f" {target}"
    return status


def _target_text(home: Home, rows: Sequence[RunRow]) -> str:
    """Say whether a trained model of the plan reaches the target that was set at submit: the best
    one so far. "" without a target, and before a training is done."""
    target = next(filter(None, (target_in(row.expect) for row in rows)), None)
    done = [row for row in rows if row.kind == "train" and row.state == "done"]
    results = [(_evidence_of(home, row), row.run_id) for row in done]
    levels = [
        (evidence["after"]["value"], run_id, evidence)
        for evidence, run_id in results
        if (evidence.get("after") or {}).get("value") is not None
    ]
    if target is None or not levels:
        return ""
    value, run_id, evidence = max(levels, key=lambda each: each[0])
    interval = evidence["after"].get("interval") or (None, None)
    is_share = evidence.get("metric") == "success"
    sentence = target.sentence(value, interval, is_share=is_share)
    return f"{sentence.removesuffix('.')}, {run_id}@best."


def progress_of(home: Home, snapshot: PlanSnapshot) -> Reply:
    """Make what a wait reports of a plan under way.

    `step` is how many of the `total_steps` runs have ended, with the fraction of the one under way.
    """
    ended_runs = sum(row.state not in OPEN for row in snapshot.rows)
    report: Reply = {"run_id": snapshot.rows[0].plan, "state": snapshot.state}
    for row in snapshot.rows:
        if row.state in HOLDS_DEVICE:
            progress = read_progress(home.run(row.run_id), row)
            ended_runs += (progress.step or 0) / progress.total_steps if progress.total_steps else 0
            report |= {"now": row.run_id, "eta_s": progress.eta_s, "phase": progress.phase}
            if progress.phase_percent is not None:
                report["percent"] = progress.phase_percent
    return report | {"step": round(ended_runs, 2), "total_steps": len(snapshot.rows)}


def _alerts_since(snapshot: PlanSnapshot) -> list[Reply]:
    """List the alerts of all runs since the cursor, each with the id of its run."""
    return [
        {"run_id": row.run_id, **alert}
        for row, events in zip(snapshot.rows, snapshot.events, strict=True)
        for alert in alerts_in(events)
    ]


def _all_alerts(home: Home, rows: Sequence[RunRow]) -> list[Reply]:
    """List the latest alerts of each run since it began, each with the id of its run."""
    return [
        {"run_id": row.run_id, **alert}
        for row in rows
        for alert in read_progress(home.run(row.run_id), row).alerts
    ]


def _is_news(row: RunRow, snapshot: PlanSnapshot) -> bool:
    """Whether a run is under way, or has ended since the cursor."""
    return row.state in HOLDS_DEVICE or row.run_id in snapshot.ended


def _step(home: Home, row: RunRow) -> Reply:
    """Describe a run of a plan: its state and progress, and at its end its verdict and evidence."""
    run = home.run(row.run_id)
    config = run.find_config()
    place = config.plan if config else None
    entry: Reply = {"step": place.step if place else 0, "run_id": row.run_id}
    if place and place.label:
        entry["label"] = place.label
    entry |= {"algorithm": row.algorithm, "state": row.state}
    if row.state in HOLDS_DEVICE:
        return entry | _progress_fields(read_progress(run, row))
    if row.state == "queued" and row.awaited_ids:
        return entry | {"waits_for": row.awaited_ids}
    if row.state in ("failed", "cancelled"):
        return entry | {"reason": row.reason[:300]}
    if isinstance(config, EvaluateConfig) and config.missing_models:
        entry["missing_models"] = config.missing_models
    if row.state == "done":
        return entry | _outcome(home, row, config.model_refs if config else [])
    return entry


def _outcome(home: Home, row: RunRow, models: Sequence[str]) -> Reply:
    """Describe what a run that is done has shown.

    A training run has its verdict. An evaluation of several models (`models` are its references)
    says how each compares with the first.
    """
    if row.kind == "train":
        evidence = _evidence_of(home, row)
        evidence_fields = {
            name: evidence[name] for name in _EVIDENCE_KEYS if evidence.get(name) is not None
        }
        return {"verdict": row.verdict, **evidence_fields}
    return _comparison(home, row) if len(models) > 1 else {}


def _warnings_of(home: Home, row: RunRow) -> list[str]:
    """List what the verdict of a training run warns of, such as skills that were lost.

    Each warning begins with the run's id. [] for a run that is not done.
    """
    if row.kind != "train" or row.state != "done":
        return []
    return [f"{row.run_id}: {text}" for text in _evidence_of(home, row).get("warnings") or ()]


def _progress_fields(progress: Progress) -> Reply:
    """How far a run under way is, as keys of a reply; what is not known has no key."""
    fields = {
        "at": progress.step,
        "of": progress.total_steps,
        "phase": progress.phase or None,
        "percent": progress.phase_percent,
        "eta_s": progress.eta_s,
        "stalled": progress.stalled or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _unready_starts(home: Home, rows: Sequence[RunRow]) -> list[str]:
    """List a warning for each GRPO run under way or queued whose start, made by an SFT run of the
    plan, solves too little for its groups to differ."""
    sft_runs = {
        row.run_id: row
        for row in rows
        if row.kind == "train" and row.state == "done" and row.algorithm == "sft"
    }
    warnings = []
    for row in rows:
        maker = sft_runs.get(row.model.partition("@")[0])
        if row.algorithm == "grpo" and row.state in OPEN and maker is not None:
            warnings += _unready_start(home, row, maker)
    return warnings


def _unready_start(home: Home, row: RunRow, maker: RunRow) -> list[str]:
    """The warning that the model which the SFT run `maker` made solves too few tasks for the GRPO
    run `row` to learn from, as a list of one; [] where it solves enough, or that is not known."""
    config, evidence = home.run(row.run_id).find_config(), _evidence_of(home, maker)
    level = (evidence.get("after") or {}).get("value")  # the share of the tasks that it solves
    if not isinstance(config, GRPOConfig) or evidence.get("metric") != "success":
        return []
    size = config.settings.group_size
    if level is None or level >= success_to_start(size):
        return []
    return [
        f"{row.run_id} starts from a model that solves {percent(level)}: hardly any of its "
        f"groups of {size} differ below {percent(success_to_start(size))}, unless the "
        f"reward pays part of the way. cancel_run, then more SFT from {maker.run_id}@best"
    ]


def _ways_on(home: Home, snapshot: PlanSnapshot, verdict: str) -> list[Reply]:
    """List the calls that go on from the result of a plan, as its last training run suggests them.

    After a plan that ended "better" (`verdict`): serve the model, or train it on where it is still
    weak. After any other: diagnose that run; what was lost for nothing is no reason to train so
    again. [] while the plan goes on, and where a run of it failed.
    """
    training_rows = [row for row in snapshot.rows if row.kind == "train" and row.state == "done"]
    if not snapshot.is_over or not training_rows or snapshot.state != "done":
        return []
    last = training_rows[-1]
    if verdict in ("worse", "no_difference", "inconclusive"):
        return [Call("diagnose", {"run_id": last.run_id}).to_json()]
    evidence = _evidence_of(home, last)
    calls = [call for call in evidence.get("next") or () if call.get("tool") in _WAYS_ON]
    if any(call["tool"] != "diagnose" for call in calls):
        return calls
    # The last step did not gain over the one before it, and both together did over the start.
    level = (evidence.get("after") or {}).get("value")
    is_weak = evidence.get("metric") == "success" and (level or 0.0) < ENOUGH
    if is_weak or (target_in(last.expect) is not None and not evidence.get("as_expected")):
        return calls
    model = evidence.get("go_on_with") or f"{last.run_id}@best"
    return [Call("deploy", {"run_id": model}).to_json()]


def _evidence_of(home: Home, row: RunRow) -> Mapping[str, Any]:
    """Return the evidence for the verdict of a run that is done; {} where its file is gone."""
    evidence = read_object(home.run(row.run_id).result).get("evidence")
    return evidence if isinstance(evidence, dict) else {}


def _comparison(home: Home, row: RunRow) -> Reply:
    """Describe how the models of an evaluation compare with the first of them."""
    # Imported late: most waits end without a comparison, and it loads the statistics.
    from engine.evidence.compare.compare import compare_runs  # noqa: PLC0415

    try:
        comparison = compare_runs(home, [row.run_id])
    except UserError as error:  # a file of it is damaged, or nothing was scored
        return {"verdict": "unknown", "reason": error.message}
    return {
        "verdict": comparison["verdict"],
        "result": comparison["summary"],
        "levels": {arm["id"]: _level_text(arm) for arm in comparison["arms"]},
    }


def _level_text(arm: Mapping[str, Any]) -> Any:
    """The level of a model in a comparison, with its interval where there is one."""
    return {name: arm[name] for name in ("value", "interval", "tasks") if name in arm}


def _summary(home: Home, store: Store, snapshot: PlanSnapshot, forecast: Forecast | None) -> str:
    """Say in one sentence how many runs are done, and what is under way or stands in the way."""
    plan_id = snapshot.rows[0].plan
    done_count = sum(row.state == "done" for row in snapshot.rows)
    text = (
        f"{plan_id} is {snapshot.state}: {done_count} of {counted(len(snapshot.rows), 'run')} done"
    )
    failed_rows = [row for row in snapshot.rows if row.state in ("failed", "cancelled")]
    if failed_rows:
        first = failed_rows[0]
        text += f"; {first.run_id} {first.state}: {first.reason.rstrip('.')[:300]}"
    for row in snapshot.rows:
        if row.state in HOLDS_DEVICE:
            text += f"; {_progress_text(row, read_progress(home.run(row.run_id), row))}"
    if forecast is not None:
        text += f"; {forecast.sentence}"
    return f"{text}."


def _progress_text(row: RunRow, progress: Progress) -> str:
    """How far a run under way is, such as "grpo-1 is running at step 3 of 20"."""
    of_total = f" of {progress.total_steps}" if progress.total_steps else ""
    at_step = "" if progress.step is None else f" at step {progress.step}{of_total}"
    stalled = f", stalled: {progress.stalled}" if progress.stalled else ""
    return f"{row.run_id} is {row.state}{at_step}{stalled}"


def _next_calls(snapshot: PlanSnapshot, alerts: Sequence[Reply]) -> list[Call]:
    """List the calls that look at a plan: while it goes on, diagnose the newest of the `alerts` and
    wait on; at its end, see what came out, or why it failed."""
    plan_id = snapshot.rows[0].plan
    if not snapshot.is_over:
        diagnose_calls = [Call("diagnose", {"run_id": alert["run_id"]}) for alert in alerts[-1:]]
        return [*diagnose_calls, Call("wait_run", {"run_id": plan_id, "cursor": snapshot.cursor})]
    failed_rows = [row for row in snapshot.rows if row.state in ("failed", "cancelled")]
    if failed_rows:
        return [
            Call("read_logs", {"run_id": failed_rows[0].run_id, "view": "error"}),
            Call("submit_train", {"resume": plan_id}),
        ]
    evaluations = [row for row in snapshot.rows if row.kind == "evaluate"]
    if evaluations:
        return [Call("compare_runs", {"ids": [evaluations[-1].run_id]})]
    last_training = [row for row in snapshot.rows if row.kind == "train"][-1]
    return [Call("read_rollouts", {"run_id": last_training.run_id, "pick": "changed"})]


def _whole_number(text: str) -> int:
    """Parse a number of ASCII digits.

    Raises ValueError for anything else, and for more than `_MOST_DIGITS` digits.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:20]!r} is no number")
    return int(text)
