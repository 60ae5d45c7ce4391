"""The status of a run: its state, progress, result or error, and the calls to make next.

It is read from the database and the run's files.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.format import percent, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.reported import number_to_report
from engine.evidence.verdict.side_notes import audit_sentences
from engine.home.halves import choosing_half_in
from engine.home.owner_marks import is_of_sealed, pinned_steps
from engine.home.rows import HOLDS_DEVICE, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.heartbeat import EXAM_PHASES
from engine.machine.pace.progress import Progress, answer_count, read_progress
from engine.machine.processes import launcher, outcome
from engine.records.env_version import EnvVersion
from engine.records.lines.line_record import Line
from engine.records.record import DamagedRecord
from engine.records.run_config import EvaluateConfig, RegradeConfig
from engine.runs.forecast import forecast_of_run
from engine.runs.targets import target_progress

# A status mentions the silence of a run that has written nothing for longer than this; one slow
# step may well take a minute.
_MIN_QUIET_S = 60
_MAX_ALERTS = 10  # a status shows at most this many new alerts
_GAP = "smallest_detectable_gap"
# The fields of a verdict's evidence that a status shows.
_EVIDENCE_KEYS = (
    "metric",
    "before",
    "after",
    "difference",
    "interval",
    "n",
    "p",
    _GAP,
    f"{_GAP}_is",
    "expected",
    "as_expected",
    "go_on_with",
    "robustness",
)


def status_of(home: Home, store: Store, row: RunRow, alerts: list[Line] | None = None) -> Reply:
    """Build the status of a run, the reply that `get_status` and `wait_run` show.

    Args:
        home: the home that holds the run.
        store: its database.
        row: the run's row in the database.
        alerts: the alerts to show, at most the newest `_MAX_ALERTS`; None shows the latest alerts
            of the whole run.
    """
    run = home.run(row.run_id)
    progress = read_progress(run, row)
    shown_alerts = progress.alerts if alerts is None else alerts[-_MAX_ALERTS:]
    status = _basic_fields(row, progress, shown_alerts)
    status["spent_hours"] = round(launcher.spent_hours(home, row), 5)
    if row.state in HOLDS_DEVICE:
        _add_outlook(status, home, store, row, progress)
    was_deleted = run.deleted.exists()
    if was_deleted:
        status["warnings"].append("its checkpoints, answers and curves were deleted")
    if row.state == "queued":
        _add_place_in_queue(status, store, run, row)
    if row.state == "preparing" and row.is_elsewhere:
        status["warnings"] += _wait_elsewhere_warning(run, row)
    status = _with_end(run, row, status)
    if was_deleted:
        _remove_calls(status)  # the suggested calls need the files that were deleted
    elif row.kind == "train" and row.state == "done":
        _add_number_to_report(status, home, store, row)
    _add_choosing_tasks(status, row, progress)
    status["warnings"] += _missing_models(run)
    pinned = _readable_pins(run)
    if pinned:
        status["pinned"] = pinned
    status["summary"] = _summary(row, status)
    status.pop("target_note", None)  # only the summary shows it
    _remove_repetitions(status)
    return status


def _remove_repetitions(status: Reply) -> None:
    """Remove from the status of a done run, in place, texts that its summary already contains.

    These are the summary in `result`, and for a training run warnings such as the sentence on
    forgotten skills.
    """
    if "result" not in status:  # the run is not done
        return
    status["result"].pop("summary", None)
    if status["kind"] != "train":
        return
    status["warnings"] = [text for text in status["warnings"] if text not in status["summary"]]


def _missing_models(run: RunDir) -> list[str]:
    """Return a warning that names the models which an evaluation left out; [] if there are none.

    A model is left out if the run that was to train it, in the same plan, did not finish.
    """
    config = run.find_config()
    if not isinstance(config, EvaluateConfig) or not config.missing_models:
        return []
    names = ", ".join(config.missing_models)
    return [f"not asked, because not made: {names}; resume the plan, then evaluate them"]


def _readable_pins(run: RunDir) -> list[int]:
    """Return the steps whose checkpoints the user has pinned; [] if the file of pins is damaged."""
    try:
        return sorted(pinned_steps(run))
    except (OSError, ValueError):
        return []


def _with_end(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """Add to a status the result of a done run, or the reason why a run stopped early.

    Returns the new status. The status of any other run is returned unchanged.
    """
    if row.state == "done":
        return _with_result(run, row, status)
    if row.state in ("failed", "cancelled", "stopping") and row.reason_kind:
        status["error"] = _reason_of_end(run, row)
        if row.kind == "train" and row.state == "cancelled" and run.best.exists():
            models = [row.model, f"{row.run_id}@best"]
            calls = [
                Call("submit_train", {"resume": row.run_id}),
                Call("evaluate", {"env_id": row.env_id, "models": models}),
            ]
            status["next"] = [call.to_json() for call in calls]
        if row.state == "cancelled":
            status["warnings"] += _unasked_skills(run)
    return status


def _unasked_skills(run: RunDir) -> list[str]:
    """Return a warning if a cancelled run's model was asked for its earlier skills before the
    training but not after it; otherwise []."""
    # The files with the answers on earlier skills, before and after the training.
    if run.kept("after").exists() or not run.kept("before").exists():
        return []
    return [
        "kept skills were asked before training alone: what it forgot is not known, and no "
        "evaluation asks them; the run asks them at its end, once resumed"
    ]


def _add_place_in_queue(status: Reply, store: Store, run: RunDir, row: RunRow) -> None:
    """Add `queue_position` and `waits_for` to the status of a queued run.

    `waits_for` describes the runs whose models this run waits for. A warning is added if the run
    waits for secrets, another machine or memory.
    """
    status["queue_position"] = store.queue_position(run.id)
    status["warnings"] += _waiting_warning(run, row)
    if row.waits_for:
        status["waits_for"] = [_state_and_step(run.home, store, name) for name in row.awaited_ids]


def _state_and_step(home: Home, store: Store, run_id: str) -> str:
    """Say in which state and at which step the run `run_id` is: "sums-sft-1 is running at step 12
    of 60"."""
    try:
        row = store.get_run(run_id)
    except UserError:  # no such run: the database was lost and made again
        return f"{run_id} is gone"
    progress = read_progress(home.run(run_id), row)
    at_step = _step_phrase({"step": progress.step, "total_steps": progress.total_steps})
    return f"{run_id} is {row.state}{at_step}"


def _add_outlook(status: Reply, home: Home, store: Store, row: RunRow, progress: Progress) -> None:
    """Add to a status what a run under way is doing (in `progress`), and when it is expected to
    end.

    The keys are `phase` (what the run is doing), `percent` (how much of the phase is done),
    `forecast`, `target`, and `stalled` and `quiet_s` if the run writes nothing.
    """
    run = home.run(row.run_id)
    if progress.phase:
        status["phase"] = progress.phase
    if progress.phase_percent is not None:
        status["percent"] = progress.phase_percent
    if row.kind == "evaluate":  # here `percent` is the share of all models together
        _add_share_answered(status, run)
    forecast = forecast_of_run(home, store, row, progress)
    if forecast is not None:
        status["forecast"] = forecast.to_json()
        if forecast.cap:
            status["warnings"].append(forecast.cap)
    _add_quiet_time(status, progress)
    _add_target(status, run, row)


def _add_target(status: Reply, run: RunDir, row: RunRow) -> None:
    """Add `target` to the status of a run that has one: the target and the best score so far.

    Two keys say that the target is passed: `target_note`, a text ("" before) that is moved into the
    summary before the reply is sent; and `target_passed`, which is true, if the run may be stopped.
    """
    progress = target_progress(run, row)
    if progress is None:
        return
    status["target"] = progress.text
    status["target_note"] = progress.note
    if progress.can_stop:
        status["target_passed"] = True


def _add_share_answered(status: Reply, run: RunDir) -> None:
    """Add `percent` (0 to 100) to the status of an evaluation: the share of answers that exist."""
    config = run.find_config()
    if not isinstance(config, EvaluateConfig):
        return
    planned_answers = _task_count(config) * config.attempts * len(config.models)
    percentage = 100 * answer_count(run) / max(1, planned_answers)  # 1, not to divide by zero
    status["percent"] = round(min(100.0, percentage), 1)


def _task_count(config: EvaluateConfig) -> int:
    """Return how many tasks an evaluation asks: `rows` of its config, or all of the split if it has
    fewer. If the environment's file is gone, the split is taken to be large enough."""
    try:
        available = EnvVersion.read(Path(config.env_dir) / "env.json").rows.get(config.split)
    except (OSError, DamagedRecord):
        available = None
    return config.rows if available is None else min(config.rows, available)


def _add_quiet_time(status: Reply, progress: Progress) -> None:
    """Add `quiet_s`, the seconds since the last sign of life, to a status if the run has written
    nothing for more than a minute.

    If the silence is longer than the run's pace explains, `stalled` is added with the reason, and
    `next` gets the calls that read the log, cancel the run and resume it.
    """
    quiet_s = progress.quiet_s
    if progress.stalled:
        status["stalled"] = progress.stalled
        status["quiet_s"] = quiet_s
        status["warnings"].append(f"stalled: {progress.stalled}")
        status["next"] = _after_stall(status["run_id"])
    elif quiet_s is not None and quiet_s > _MIN_QUIET_S:
        status["quiet_s"] = quiet_s
        status["warnings"].append(f"nothing was written for {quiet_s:.0f} s")


def _after_stall(run_id: str) -> list[Reply]:
    """Return the calls, as JSON, that read the log of a stalled run, cancel it and resume it."""
    return [
        Call("read_logs", {"run_id": run_id, "view": "console"}).to_json(),
        Call("cancel_run", {"run_id": run_id, "reason": "stalled"}).to_json(),
        Call("submit_train", {"resume": run_id}).to_json(),
    ]


def _add_number_to_report(status: Reply, home: Home, store: Store, row: RunRow) -> None:
    """Add `report_this` to a status: the number to report of the run's result, if it has one."""
    with suppress(DamagedRecord, OSError):  # the rest of the status is shown in any case
        number = number_to_report(home, store, row)
        if number is not None:
            status["report_this"] = number.to_json()


def _add_choosing_tasks(status: Reply, row: RunRow, progress: Progress) -> None:
    """Add `heldout` to the status of a training run, if the run has recorded it.

    It describes the half of the held-out tasks by which the run chooses its best checkpoint.
    """
    # `progress.started` is the event with which the present attempt began.
    choosing_half = choosing_half_in(progress.started) if row.kind == "train" else None
    if choosing_half is not None:
        status["heldout"] = choosing_half.to_json()


def _basic_fields(row: RunRow, progress: Progress, alerts: list[Line]) -> Reply:
    """Return the fields that the status of every run has, with `alerts` and no warnings yet.
    `progress` is what the run's files say of how far it is."""
    return {
        "run_id": row.run_id,
        "state": row.state,
        "kind": row.kind,
        "algorithm": row.algorithm,
        "env_id": row.env_id,
        "model": row.model,
        "attempt": row.attempt,
        "device": row.device,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "eta_s": progress.eta_s,
        "metrics": progress.metrics,
        "alerts": alerts,
        "verdict": row.verdict,
        "cursor": str(progress.cursor),
        "warnings": [],
    }


def _remove_calls(status: Reply) -> None:
    """Remove suggested calls from the status of a deleted run, in place: they need its files."""
    status["next"] = []
    if "error" in status:
        status["error"]["hint"] = "Submit a new run."
        status["error"].pop("call", None)


def _with_result(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """Return the status of a done run with its result, the result's warnings, and next calls."""
    result_fields = _result_fields(run)
    warnings = status["warnings"]
    new_warnings = [
        warning for warning in result_fields.get("warnings", []) if warning not in warnings
    ]
    status = status | result_fields | {"warnings": warnings + new_warnings}
    if not result_fields and not run.deleted.exists():
        return _with_damaged_result(run, row, status)
    if row.kind == "evaluate":
        status["next"] = _after_evaluation(run, row)
        status["warnings"] += audit_sentences(run.find_config())
    return _with_failed_scores_first(run, row, status)


def _with_damaged_result(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """Return the status of a done run whose result.json is missing or damaged.

    No call is suggested that depends on the result, such as to deploy the best checkpoint.
    """
    warning = f"{run.result.name} is missing or damaged: what the run came to cannot be read"
    calls = [Call("read_logs", {"run_id": row.run_id, "view": "events"})]
    if row.kind == "train":
        models = [row.model, row.run_id]
        calls.append(Call("evaluate", {"env_id": row.env_id, "models": models}))
    return status | {
        "damaged": run.result.name,
        "warnings": [*status["warnings"], warning],
        "next": [call.to_json() for call in calls],
    }


def _reason_of_end(run: RunDir, row: RunRow) -> Reply:
    """Return why a run failed, was cancelled or is stopping, and how to go on.

    The keys are `kind` and `message` of the reason, `hint` with its `call`, `evidence` ("" unless
    the run failed), and `last_checkpoint`.
    """
    hint = row.hint or outcome.resume_hint(run)
    return {
        "kind": row.reason_kind,
        "message": row.reason,
        **hint.as_fields(),
        "evidence": outcome.evidence(run) if row.state == "failed" else "",
        "last_checkpoint": outcome.checkpoint_name(run),
    }


def _waiting_warning(run: RunDir, row: RunRow) -> list[str]:
    """Return a warning if a queued run waits for secrets, for another machine or for memory here;
    otherwise [].

    The warning names the secrets that the run needs and this server lacks. If none are missing, it
    says why the machine that the run is for does not take it, or how much memory it waits for.
    """
    missing = launcher.missing_secrets(run)
    if missing:
        names = ", ".join(missing)
        return [f"it waits for a server that has the secrets {names} in its environment"]
    if row.is_elsewhere:
        reason = launcher.awaited_host(run.home, row)
    else:
        reason = launcher.awaited_memory(run)
    return [reason] if reason else []


def _wait_elsewhere_warning(run: RunDir, row: RunRow) -> list[str]:
    """Return a warning that says why a run still waits on another machine; [] if it does not."""
    # The record "spent" holds what was last heard of the run on the other machine.
    reason = read_object(run.far("spent")).get("why")
    return [f"it waits on {row.compute}: {reason}"] if reason else []


def _result_fields(run: RunDir) -> Reply:
    """Return the fields of a status that come from result.json; {} if that cannot be read.

    The fields are `result`, and `warnings` and `next` if the evidence for the verdict has any.
    """
    result = read_object(run.result)
    if not result:
        return {}
    evidence = result.get("evidence")
    if not isinstance(evidence, dict):
        evidence = {}
    result_fields: Reply = {"result": _shown_result(result, evidence)}
    if evidence.get("warnings"):
        result_fields["warnings"] = list(evidence["warnings"])
    if evidence.get("next"):
        result_fields["next"] = evidence["next"]
    return result_fields


def _shown_result(result: Mapping[str, Any], evidence: Mapping[str, Any]) -> Reply:
    """Return the part of result.json that a status shows.

    `result` is the content of the file, `evidence` its part on which the verdict rests. The
    evidence is cut to `_EVIDENCE_KEYS`. The verdict is left out, because the status has it already.
    """
    shown_result = {
        key: value for key, value in result.items() if key not in ("evidence", "verdict")
    }
    shown_evidence = {
        name: evidence[name] for name in _EVIDENCE_KEYS if evidence.get(name) is not None
    }
    # Once a difference was shown, it no longer matters how small a one could have been shown.
    if result.get("verdict") in ("better", "worse"):
        shown_evidence = {
            name: value for name, value in shown_evidence.items() if not name.startswith(_GAP)
        }
    if shown_evidence:
        shown_result["evidence"] = shown_evidence
    return shown_result


def _with_failed_scores_first(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """Return `status` with a warning about failed scores as the first of its `warnings`, and the
    calls that show the failures as the first in `next`. An evaluation loses its `curate` calls.

    If no scores failed, the status is returned unchanged.
    """
    score_counts = _failed_scores(status.get("result") or {})
    if not score_counts.get("failed"):
        return status
    next_calls = status.get("next", [])
    if row.kind == "evaluate":  # nobody should curate a dataset before having read the failures
        next_calls = [call for call in next_calls if call["tool"] != "curate"]
    return status | {
        "warnings": [_failed_scores_warning(score_counts), *status["warnings"]],
        "next": [*_calls_showing_failures(row), *next_calls],
    }


def _failed_scores_warning(score_counts: Mapping[str, Any]) -> str:
    """Write the warning that scores failed.

    `score_counts` is such as {"failed": 3, "of": 200}; for a training run its key "last_step" holds
    the same two numbers for the last step.
    """
    warning = f"{score_counts['failed']} of {score_counts['of']} scores failed"
    last_step = score_counts.get("last_step")
    if last_step and last_step["failed"]:
        warning += f", {last_step['failed']} of {last_step['of']} in the last step"
    return f"{warning}: the calls in next say why and show them"


def _calls_showing_failures(row: RunRow) -> list[Reply]:
    """Return the calls, as JSON, that say why scores of a run failed and show the answers."""
    argument = {"run_id": row.run_id}
    return [
        Call("diagnose", argument).to_json(),
        Call("read_rollouts", argument | {"pick": "error"}).to_json(),
    ]


def _failed_scores(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how many of a run's scores failed, such as {"failed": 3, "of": 200}.

    The numbers of an evaluation are summed over its models. The result of a training run already
    has them as `failed_scores`, with those of the last step under "last_step". Returns {} if the
    result has no such numbers.
    """
    models = result.get("models")
    if not isinstance(models, list):  # a training run
        return result.get("failed_scores") or {}
    return {
        "failed": sum(model.get("errors") or 0 for model in models),
        "of": sum(model.get("attempts") or 0 for model in models),
    }


def _after_evaluation(run: RunDir, row: RunRow) -> list[Reply]:
    """Return the calls to make after an evaluation, as JSON.

    - After one model: read its answers.
    - After several models: compare them, and read the answers that differ.
    - If training tasks were tried several times each, a call to curate a dataset comes first.

    After a sealed exam (tasks that nobody may see) no call reads answers.
    """
    config = run.find_config()  # None if the file is damaged
    models = config.model_refs if config else []
    compare_call = Call("compare_runs", {"ids": models, "env_id": row.env_id})
    if is_of_sealed(config):
        return [compare_call.to_json()] if len(models) > 1 else []
    calls = [Call("read_rollouts", {"run_id": row.run_id})]
    if len(models) > 1:
        calls = [
            compare_call,
            Call("read_rollouts", {"run_id": row.run_id, "pick": "changed"}),
        ]
    # Of all kinds of runs only these two have a split.
    evaluation = config if isinstance(config, EvaluateConfig | RegradeConfig) else None
    if evaluation and evaluation.split == "train" and evaluation.attempts > 1:
        calls = [_call_to_curate(row), *calls]
    return [call.to_json() for call in calls]


def _call_to_curate(row: RunRow) -> Call:
    """Make the call that builds a dataset from the answers of an evaluation: from those tasks whose
    attempts earned different rewards."""
    # A dataset's name may have 40 characters: 35 of the environment's name, and "-best".
    name = f"{row.env_id.partition('@')[0][:35]}-best"
    return Call("curate", {"source_ids": [row.run_id], "name": name, "where": "0 < avg < 1"})


def _summary(row: RunRow, status: Reply) -> str:
    """Say in one sentence how a run stands, from its row and its status without the summary, such
    as `sums-grpo-3 is running at step 12 of 60.`"""
    at_step = _step_phrase(status)
    match row.state:
        case "queued" if row.waits_for:
            return f"{row.run_id} waits for the model of {'; '.join(status['waits_for'])}."
        case "queued":
            return f"{row.run_id} is queued at position {status['queue_position']}."
        case "done":
            return _done_summary(row, status)
        case "failed":
            return f"{row.run_id} failed{at_step} ({row.reason_kind}): {row.reason.rstrip('.')}."
        case "cancelled":
            return f"{row.run_id} is cancelled{at_step}: {row.reason.rstrip('.')}."
        case _:  # the run holds a device, or is interrupted
            return f"{row.run_id} is {row.state}{at_step}{_describe_outlook(status)}."


def _describe_outlook(status: Reply) -> str:
    """Say what a run under way is doing and how long it will take, by its `status`, as the end of a
    sentence.

    For example ", in its evaluation (40 %), about 3 min left".
    """
    if "stalled" in status:
        return f" and stalled: {status['stalled']}"
    phase_note = f", in its {status['phase']}" if status.get("phase") in EXAM_PHASES else ""
    share_note = ""
    if phase_note and "percent" in status:
        share_note = f" ({percent(status['percent'] / 100, digits=0)})"
    seconds_left = status["eta_s"]
    time_left = f", about {words(seconds_left / 3600)} left" if seconds_left else ""
    cap = status.get("forecast", {}).get("cap")
    cap_note = f"; {cap}" if cap else ""
    target_note = status.get("target_note", "")  # that the target is passed
    return f"{phase_note}{share_note}{time_left}{cap_note}{target_note}"


def _step_phrase(status: Reply) -> str:
    """Write the run's step as a part of a sentence: ` at step 12 of 60`; "" if it has none yet.

    Only the keys `step` and `total_steps` of the status are read.
    """
    if status["step"] is None:
        return ""
    of_steps = f" of {status['total_steps']}" if status["total_steps"] is not None else ""
    return f" at step {status['step']}{of_steps}"


def _done_summary(row: RunRow, status: Reply) -> str:
    """Say in a sentence that the run is done, followed by the summary of its result. The verdict,
    with which that summary begins too, stands once."""
    result_text = status.get("result", {}).get("summary", "")
    done_text = f"{row.run_id} is done{_early_stop_note(row, status)}"
    if row.kind != "train" or result_text.startswith(f"The verdict is {row.verdict}"):
        return f"{done_text}. {result_text}".strip()
    opening = f"{row.verdict.replace('_', ' ').capitalize()}: "  # "No difference: "
    if result_text.startswith(opening):
        return f"{done_text}, verdict {row.verdict}: {result_text.removeprefix(opening)}"
    return f"{done_text}, verdict {row.verdict}. {result_text}".strip()


def _early_stop_note(row: RunRow, status: Reply) -> str:
    """Return a note that a training run ended before its last step; "" if it did not. The steps are
    those of `status`."""
    step, total_steps = status["step"], status["total_steps"]
    if row.kind != "train" or step is None or total_steps is None or step >= total_steps:
        return ""
    if row.algorithm == "prompt":  # its result says what ended it
        return ""
    return f" (it ended early, at step {step} of {total_steps}: see the event stopped_early)"
