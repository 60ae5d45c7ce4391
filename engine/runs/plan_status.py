"""The status of a plan (several runs that were submitted together), run by run with verdicts.

A plan has no state of its own: everything here is read from the rows and files of its runs.
"""

import itertools
import math
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
from engine.machine.pace.progress import (
    Progress,
    alerts_in,
    attempt_begin,
    events_from,
    read_progress,
)
from engine.machine.processes import launcher
from engine.records.lines.line_record import Line
from engine.records.run_config import EvaluateConfig, GRPOConfig
from engine.runs.forecast import Forecast, forecast_of_plan

_MAX_ALERTS = 10  # a status shows at most this many alerts, the newest
# The fields of a verdict's evidence that a step shows.
_EVIDENCE_KEYS = ("metric", "before", "after", "difference", "interval", "n")
# Calls that a run suggests and a plan passes on.
_CONTINUING_TOOLS = ("submit_train", "deploy", "diagnose")
_MOST_DIGITS = 15  # the most digits of a number in a cursor; no file is longer than such a number


@dataclass(frozen=True)
class Marks:
    """What a cursor remembers of one run of a plan.

    Attributes:
        state, attempt: the run's state and the number of its attempt at the time of the reply.
        events_end: the byte of the run's events file at which newer events begin.
    """

    state: str
    attempt: int
    events_end: int

    def dump(self) -> str:
        """Write the marks as a part of a cursor, such as "3.1.2048": state, attempt, byte."""
        return f"{STATES.index(self.state)}.{self.attempt}.{self.events_end}"

    @staticmethod
    def load(text: str) -> "Marks":
        """Read the marks that `dump` wrote. Raises ValueError if `text` has another form."""
        state_index, attempt, events_end = (_whole_number(part) for part in text.split("."))
        if state_index >= len(STATES):
            raise ValueError(f"there is no state {state_index}")
        return Marks(STATES[state_index], attempt, events_end)


@dataclass(frozen=True)
class PlanSnapshot:
    """The state of a plan at one moment.

    Attributes:
        rows: the runs of the plan in the order of the steps.
        events: for each run, its events since the cursor.
        ended: the ids of the runs that have ended since the cursor.
        marks: for each run, what the next cursor remembers of it.
    """

    rows: Sequence[RunRow]
    events: Sequence[list[Line]]
    ended: Sequence[str]
    marks: Sequence[Marks]

    @property
    def state(self) -> str:
        """The state of the whole plan."""
        return plan_state(self.rows)

    @property
    def is_over(self) -> bool:
        """Whether all runs of the plan have ended."""
        return not any(row.state in OPEN for row in self.rows)

    @property
    def cursor(self) -> str:
        """The cursor for the next call, after which only newer events count."""
        return "_".join(mark.dump() for mark in self.marks)


def marks_in_cursor(home: Home, rows: Sequence[RunRow], cursor: str) -> list[Marks]:
    """Read from a cursor what it remembers of each run of the plan (`rows`).

    For the cursor "" the marks are such that everything in the present attempts counts as new.
    Raises UserError BAD_CURSOR if `cursor` is not a cursor of this plan.
    """
    if not cursor:
        # The byte of each run's events file at which its present attempt begins.
        begins = [attempt_begin(home.run(row.run_id), row.attempt) for row in rows]
        return [Marks("queued", attempt=0, events_end=begin) for begin in begins]
    try:
        marks = [Marks.load(part) for part in cursor.split("_")]
    except ValueError:
        marks = []  # refused below, because a plan has at least one run
    if len(marks) != len(rows):
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by wait_run for this plan",
            hint="Pass the cursor of the last answer unchanged, or leave it out.",
            field="cursor",
        )
    return marks


def read_snapshot(
    home: Home, rows: Sequence[RunRow], earlier_marks: Sequence[Marks]
) -> PlanSnapshot:
    """Read the present state of a plan's runs.

    `earlier_marks` holds for each run what the cursor remembers. Events after that, and ends of
    runs after that, count as new.
    """
    events_of_runs, marks, ended_ids = [], [], []
    for row, earlier_mark in zip(rows, earlier_marks, strict=True):
        new_events, end = events_from(home.run(row.run_id), earlier_mark.events_end)
        events_of_runs.append(new_events)
        marks.append(Marks(row.state, row.attempt, end))
        has_changed = (row.state, row.attempt) != (earlier_mark.state, earlier_mark.attempt)
        if row.state not in OPEN and has_changed:
            ended_ids.append(row.run_id)
    return PlanSnapshot(rows, events_of_runs, ended_ids, marks)


def has_reached(home: Home, snapshot: PlanSnapshot, until: str) -> bool:
    """Return whether a plan, in its present state `snapshot`, has reached `until`, the goal of a
    wait.

    "end" is the end of the plan, "first_step" the first step of any run, "next_eval" an evaluation
    and "alert" an alert of any run. "news" is an alert, or the end of a run or of the plan.
    """
    if until == "end":
        return snapshot.is_over
    if until == "first_step":
        lines = [last_line(home.run(row.run_id).metrics) or {} for row in snapshot.rows]
        return any(isinstance(line.get("step"), int) and line["step"] >= 1 for line in lines)
    if until == "news" and (snapshot.ended or snapshot.is_over):
        return True
    awaited_event = "evaluated" if until == "next_eval" else "alert"
    all_events = itertools.chain.from_iterable(snapshot.events)
    return any(event.get("event") == awaited_event for event in all_events)


def status_of(
    home: Home, store: Store, snapshot: PlanSnapshot, *, has_cursor: bool = False
) -> Reply:
    """Make the status of a plan from its present state `snapshot`: an entry for each step, alerts,
    hours, and the calls to make next.

    `has_cursor` says that the caller has seen an earlier status. While the plan goes on, such a
    caller gets only newer alerts, and only the steps that are under way or have ended since.
    """
    plan_id = snapshot.rows[0].plan
    only_new = has_cursor and not snapshot.is_over
    shown_rows = [row for row in snapshot.rows if not only_new or _is_news(row, snapshot)]
    alerts = _alerts_since(snapshot) if only_new else _all_alerts(home, snapshot.rows)
    steps = [_step_entry(home, row) for row in shown_rows]
    verdicts = [step["verdict"] for step in steps if "verdict" in step]
    last_verdict = verdicts[-1] if verdicts else ""
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
            *_continuation_calls(home, snapshot, last_verdict),
        ],
        "warnings": [
            *_weak_start_warnings(home, snapshot.rows),
            *(text for row in shown_rows for text in _verdict_warnings(home, row)),
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
    """Say whether the best trained model of the plan reaches the target that was set at submit.

    `rows` are the runs of the plan. Returns "" if no target was set, or if no training run is done
    yet.
    """
    targets = [target_in(row.expect) for row in rows]  # None for a run without one
    target = next((target for target in targets if target), None)  # all runs have the same
    if target is None:
        return ""
    best_row, best_score = None, -math.inf
    for row in rows:
        if row.kind == "train" and row.state == "done":
            score = (_evidence_of(home, row).get("after") or {}).get("value")
            if score is not None and score > best_score:
                best_row, best_score = row, score
    if best_row is None:
        return ""
    evidence = _evidence_of(home, best_row)
    interval = evidence["after"].get("interval") or (None, None)  # the ends of its 95 % interval
    is_share = evidence.get("metric") == "success"  # a share of tasks, written in per cent
    sentence = target.sentence(best_score, interval, is_share=is_share)
    return f"{sentence.removesuffix('.')}, {best_row.run_id}@best."


def progress_of(home: Home, snapshot: PlanSnapshot) -> Reply:
    """Make the progress report that a wait sends while a plan is under way; `snapshot` is its
    present state.

    `total_steps` is the number of runs. `step` is how many of them have ended, plus the finished
    share of the run under way, such as 1.25.
    """
    ended_runs: float = sum(row.state not in OPEN for row in snapshot.rows)
    report: Reply = {"run_id": snapshot.rows[0].plan, "state": snapshot.state}
    for row in snapshot.rows:
        if row.state in HOLDS_DEVICE:
            progress = read_progress(home.run(row.run_id), row)
            if progress.total_steps:
                ended_runs += (progress.step or 0) / progress.total_steps
            report |= {"now": row.run_id, "eta_s": progress.eta_s, "phase": progress.phase}
            if progress.phase_percent is not None:
                report["percent"] = progress.phase_percent
    return report | {"step": round(ended_runs, 2), "total_steps": len(snapshot.rows)}


def _alerts_since(snapshot: PlanSnapshot) -> list[Reply]:
    """Return the alerts of all runs of a plan since the cursor, each with the id of its run.

    `snapshot` is the present state of the plan, with the events since the cursor.
    """
    alerts: list[Reply] = []
    for row, events in zip(snapshot.rows, snapshot.events, strict=True):
        alerts += [{"run_id": row.run_id, **alert} for alert in alerts_in(events)]
    return alerts


def _all_alerts(home: Home, rows: Sequence[RunRow]) -> list[Reply]:
    """Return the latest alerts of every run in `rows`, each with the id of its run."""
    alerts: list[Reply] = []
    for row in rows:
        progress = read_progress(home.run(row.run_id), row)
        alerts += [{"run_id": row.run_id, **alert} for alert in progress.alerts]
    return alerts


def _is_news(row: RunRow, snapshot: PlanSnapshot) -> bool:
    """Return whether a caller who saw an earlier status wants to see this run: because it is under
    way, or has ended since the cursor."""
    return row.state in HOLDS_DEVICE or row.run_id in snapshot.ended


def _step_entry(home: Home, row: RunRow) -> Reply:
    """Make the entry of a run in the status of its plan: its state and progress, and at its end its
    verdict and evidence."""
    run = home.run(row.run_id)
    config = run.find_config()  # None if the file is gone or damaged
    place = config.plan if config else None  # the run's place in its plan
    entry: Reply = {"step": place.step if place else 0, "run_id": row.run_id}
    if place and place.label:
        entry["label"] = place.label
    entry |= {"algorithm": row.algorithm, "state": row.state}
    if row.state in HOLDS_DEVICE:
        return entry | _progress_fields(read_progress(run, row))
    if row.state == "queued" and row.awaited_ids:
        return entry | {"waits_for": row.awaited_ids}
    if row.is_skipped:
        entry["state"] = "skipped"
    if row.state in ("failed", "cancelled"):
        return entry | {"reason": row.reason[:300]}  # a reason may quote a log
    if isinstance(config, EvaluateConfig) and config.missing_models:
        entry["missing_models"] = config.missing_models
    if row.state == "done":
        return entry | _outcome_fields(home, row, config.model_refs if config else [])
    return entry


def _outcome_fields(home: Home, row: RunRow, models: Sequence[str]) -> Reply:
    """Return the result of a run that is done, as fields of its step.

    For a training run these are the verdict and its evidence. For an evaluation of several models
    (`models` are their references) they say how each model compares with the first.
    """
    if row.kind == "train":
        evidence = _evidence_of(home, row)
        evidence_fields = {
            name: evidence[name] for name in _EVIDENCE_KEYS if evidence.get(name) is not None
        }
        return {"verdict": row.verdict, **evidence_fields, **_kept_skill_sentences(evidence)}
    return _comparison_fields(home, row) if len(models) > 1 else {}


def _kept_skill_sentences(evidence: Mapping[str, Any]) -> Reply:
    """Say what a training run did to the skills that its start had (`kept_skills`), and what it and
    the runs before it did to those of their base model (`kept_since_base`), each in a sentence.

    `evidence` is that of the run's verdict. What the warnings of the verdict say is not repeated.
    Returns {} if no skill was asked.
    """
    against_start = evidence.get("kept_skills") or {}
    against_base = against_start.get("against_base") or {}
    sentences = {
        "kept_skills": against_start.get("summary"),
        "kept_since_base": against_base.get("summary"),
    }
    warnings = evidence.get("warnings") or ()
    return {name: text for name, text in sentences.items() if text and text not in warnings}


def _verdict_warnings(home: Home, row: RunRow) -> list[str]:
    """Return the warnings of a training run's verdict, for example about skills that were lost.

    Each warning begins with the run's id. Returns [] if the run is not done or trains nothing.
    """
    if row.kind != "train" or row.state != "done":
        return []
    return [f"{row.run_id}: {text}" for text in _evidence_of(home, row).get("warnings") or ()]


def _progress_fields(progress: Progress) -> Reply:
    """Return how far a run under way has come (`progress`), as fields of its step in the status of
    a plan; unknown ones are left out."""
    fields = {
        "at": progress.step,
        "of": progress.total_steps,
        "phase": progress.phase or None,
        "percent": progress.phase_percent,
        "eta_s": progress.eta_s,
        "stalled": progress.stalled or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _weak_start_warnings(home: Home, rows: Sequence[RunRow]) -> list[str]:
    """Return a warning for each GRPO run of a plan that has not ended and whose start model is too
    weak to learn.

    Only start models that an SFT run of the plan has made are judged. Such a model is too weak if
    it solves so few tasks that the answers to one task (a group) hardly ever differ in reward.
    """
    sft_runs = {
        row.run_id: row
        for row in rows
        if row.kind == "train" and row.state == "done" and row.algorithm == "sft"
    }
    warnings = []
    for row in rows:
        sft_run = sft_runs.get(row.model.partition("@")[0])  # "sums-sft-1@best" -> "sums-sft-1"
        if row.algorithm == "grpo" and row.state in OPEN and sft_run is not None:
            warnings += _weak_start_warning(home, row, sft_run)
    return warnings


def _weak_start_warning(home: Home, row: RunRow, sft_run: RunRow) -> list[str]:
    """Return a warning if the model of the SFT run `sft_run` is too weak for the GRPO run `row`.

    GRPO learns only from groups (the answers to one task) that differ in reward. Returns [] if the
    model solves enough tasks, or if its success rate is not known.
    """
    config = home.run(row.run_id).find_config()
    evidence = _evidence_of(home, sft_run)
    # The share of tasks that the model solves.
    success_rate = (evidence.get("after") or {}).get("value")
    if not isinstance(config, GRPOConfig) or evidence.get("metric") != "success":
        return []
    group_size = config.settings.group_size
    # `success_to_start` is the share at which enough groups hold both right and wrong answers.
    if success_rate is None or success_rate >= success_to_start(group_size):
        return []
    return [
        f"{row.run_id} starts from a model that solves {percent(success_rate)}: hardly any of its "
        f"groups of {group_size} differ below {percent(success_to_start(group_size))}, unless the "
        f"reward pays part of the way. cancel_run, then more SFT from {sft_run.run_id}@best"
    ]


def _continuation_calls(home: Home, snapshot: PlanSnapshot, verdict: str) -> list[Reply]:
    """Return the calls that continue from the result of a plan, as JSON; `verdict` is the last one
    of its runs, "" for none.

    If `verdict` is "worse", "no_difference" or "inconclusive", the call is to diagnose the last
    training run. Otherwise the calls are those that this run suggests: to train on, if the model is
    still weak, or to serve the model. Returns [] while the plan goes on, and if a run of it failed.
    """
    training_rows = [row for row in snapshot.rows if row.kind == "train" and row.state == "done"]
    if not snapshot.is_over or not training_rows or snapshot.state != "done":
        return []
    last_training = training_rows[-1]
    if verdict in ("worse", "no_difference", "inconclusive"):
        return [Call("diagnose", {"run_id": last_training.run_id}).to_json()]
    evidence = _evidence_of(home, last_training)
    calls = [call for call in evidence.get("next") or () if call.get("tool") in _CONTINUING_TOOLS]
    if any(call["tool"] != "diagnose" for call in calls):
        return calls
    # The last run suggests only a diagnosis, because it did not gain over the run before it. But
    # the plan as a whole did gain over its start model, so the model is served if it is strong.
    success_rate = (evidence.get("after") or {}).get("value")
    # ENOUGH: the share of solved tasks from which on a model is worth serving.
    is_weak = evidence.get("metric") == "success" and (success_rate or 0.0) < ENOUGH
    has_target = target_in(last_training.expect) is not None
    misses_target = has_target and not evidence.get("as_expected")
    if is_weak or misses_target:
        return calls
    model = evidence.get("go_on_with") or f"{last_training.run_id}@best"
    return [Call("deploy", {"run_id": model}).to_json()]


def _evidence_of(home: Home, row: RunRow) -> Mapping[str, Any]:
    """Return the evidence for a run's verdict, from its result.json; {} if there is none."""
    evidence = read_object(home.run(row.run_id).result).get("evidence")
    return evidence if isinstance(evidence, dict) else {}


def _comparison_fields(home: Home, row: RunRow) -> Reply:
    """Describe how the models of an evaluation compare with the first of them.

    Returns the fields `verdict`, `result` (a sentence) and `levels` (model -> its score). If the
    models cannot be compared, the verdict is "unknown" and `reason` says why.
    """
    # Imported late, because it loads the statistics, and most waits end without a comparison.
    from engine.evidence.compare.compare import compare_runs  # noqa: PLC0415

    try:
        comparison = compare_runs(home, [row.run_id])
    except UserError as error:  # a file of the run is damaged, or nothing was scored
        return {"verdict": "unknown", "reason": error.message}
    return {
        "verdict": comparison["verdict"],
        "result": comparison["summary"],
        "levels": {arm["id"]: _level_fields(arm) for arm in comparison["arms"]},  # arm: a model
    }


def _level_fields(arm: Mapping[str, Any]) -> Reply:
    """Return the score of one model as fields of a reply: `value`, `interval`, `tasks`, and
    `in_other_words` (how it did on reworded tasks) if it was asked these.

    `arm` is the model's entry in the result of a comparison.
    """
    names = ("value", "interval", "tasks", "in_other_words")
    return {name: arm[name] for name in names if name in arm}


def _summary(home: Home, store: Store, snapshot: PlanSnapshot, forecast: Forecast | None) -> str:
    """Say in one sentence how many runs of a plan are done, which run failed, and how far the runs
    under way are. `forecast` tells when the plan will end; None if that is not known."""
    plan_id = snapshot.rows[0].plan
    done_count = sum(row.state == "done" for row in snapshot.rows)
    text = (
        f"{plan_id} is {snapshot.state}: {done_count} of {counted(len(snapshot.rows), 'run')} done"
    )
    skipped_rows = [row for row in snapshot.rows if row.is_skipped]
    if skipped_rows:
        names = ", ".join(row.run_id for row in skipped_rows)
        text += f"; {names} skipped: {skipped_rows[0].reason.rstrip('.')}"
    failed_rows = _failed_rows(snapshot.rows)
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
    """Say how far a run under way is, such as "grpo-1 is running at step 3 of 20"."""
    of_total = f" of {progress.total_steps}" if progress.total_steps else ""
    at_step = "" if progress.step is None else f" at step {progress.step}{of_total}"
    stalled = f", stalled: {progress.stalled}" if progress.stalled else ""
    return f"{row.run_id} is {row.state}{at_step}{stalled}"


def _next_calls(snapshot: PlanSnapshot, alerts: Sequence[Reply]) -> list[Call]:
    """Return the calls that show more about a plan in its present state `snapshot`.

    While the plan goes on: diagnose the run of the newest of the `alerts`, and wait. If a run
    failed or was cancelled: read its log, or resume the plan. Otherwise: compare the models of the
    evaluation, or read answers that the training changed.
    """
    plan_id = snapshot.rows[0].plan
    if not snapshot.is_over:
        diagnose_calls = [Call("diagnose", {"run_id": alert["run_id"]}) for alert in alerts[-1:]]
        return [*diagnose_calls, Call("wait_run", {"run_id": plan_id, "cursor": snapshot.cursor})]
    failed_rows = _failed_rows(snapshot.rows)
    if failed_rows:
        return [
            Call("read_logs", {"run_id": failed_rows[0].run_id, "view": "error"}),
            Call("submit_train", {"resume": plan_id}),
        ]
    evaluations = [row for row in snapshot.rows if row.kind == "evaluate"]
    if evaluations:
        return [Call("compare_runs", {"ids": [evaluations[-1].run_id]})]
    training_rows = [row for row in snapshot.rows if row.kind == "train"]
    last_training = [row for row in training_rows if not row.is_skipped][-1]
    return [Call("read_rollouts", {"run_id": last_training.run_id, "pick": "changed"})]


def _failed_rows(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the runs that failed or were cancelled, without those that their plan skipped."""
    return [row for row in rows if row.state in ("failed", "cancelled") and not row.is_skipped]


def _whole_number(text: str) -> int:
    """Parse a number of ASCII digits.

    Raises ValueError if `text` is anything else, or has more than `_MOST_DIGITS` digits.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:20]!r} is no number")
    return int(text)
