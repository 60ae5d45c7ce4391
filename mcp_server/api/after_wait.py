"""Shortens the reply of a wait, and suggests the calls that follow it."""

from collections.abc import Sequence
from typing import Any

from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.rows import TERMINAL

MAX_WAIT_S = 50.0  # clients give up a call after 60 s
HELD_WAIT_S = 3600.0  # the longest wait for a client that keeps the call alive


def suggest(tool: str, **arguments: Any) -> Reply:
    """Make an entry for `next` of a reply: a suggested call of `tool` with these arguments."""
    return Call(tool, arguments).to_json()


# Fields of a run's status that do not change while the run goes on.
_STANDING_FACTS = frozenset({"kind", "algorithm", "env_id", "model", "device", "heldout"})
# Fields that callers expect in every status, even if they are empty.
_EXPECTED = ("summary", "next", "warnings", "until_met", "state", "run_id")
_EMPTY = (None, "", [], {})
# Metrics that tell about the machine (speed, memory) and not about the model.
_MACHINE_METRICS = frozenset(
    {
        "time",
        "tokens",
        "supervised_tokens",
        "microbatches",
        "train_s",
        "sample_s",
        "reward_s",
        "tokens_per_s",
        "mfu",
        "peak_memory",
        "matrix_flops",
    }
)
# Details that do not change what to do while a run goes on; read_logs shows them.
_DETAIL_METRICS = frozenset(
    {
        "reward_std",
        "shaped_reward_mean",
        "length_p95",
        "group_mean_p10",
        "group_mean_p50",
        "group_mean_p90",
        "group_std_p10",
        "group_std_p50",
        "group_std_p90",
        "sampler_gap_mean",
        "sampler_gap_max",
        "sampler_gap_drift",
        "export_s",
    }
)
# Counts and shares of what went wrong: they are left out if they are 0.
_TROUBLE_METRICS = frozenset(
    {
        "clip_share",
        "sampler_missing",
        "truncated_share",
        "unstitched",
        "invalid_calls",
        "groups_flat_partial",
        "resampled_groups",
        "reward_errors",
        "tasks_left_out",
    }
)
_DIGITS = 4  # significant digits of a metric
# Fields of a level (a mean score with its interval) that matter only if some scores failed.
_ERROR_COUNTS = ("attempts", "errors", "value_with_errors")


def only_changes(status: Reply) -> Reply:
    """Return the status of a run without what the caller knows from an earlier status: facts that
    cannot have changed, and empty fields. The status of a run that has ended is returned whole."""
    if status.get("state") in TERMINAL:
        return status

    changes: Reply = {}
    for name, value in status.items():
        may_be_new = name not in _STANDING_FACTS and value not in _EMPTY
        if may_be_new or name in _EXPECTED:
            changes[name] = value
    return changes


def essential(status: Reply) -> Reply:
    """Return the status of a run or a plan without what read_logs and the report show better.

    The metrics are those that tell how the model does, with four significant digits. If a run has
    several alerts with the same id, only the newest is kept. Measurements of the machine are left
    out, as are the hours of the forecast that stand beside it, and at the end of a run the numbers
    that another field has too. Each level (a mean score with its interval) lacks the counts of
    attempts and errors if no score failed.
    """
    short = dict(status)
    if isinstance(status.get("metrics"), dict):
        short["metrics"] = _essential_metrics(status["metrics"])
    if status.get("alerts"):
        short["alerts"] = _newest_of_each(status["alerts"])
    if isinstance(status.get("result"), dict):
        result = _without_fields(status["result"], "measured")
        if isinstance(result.get("evidence"), dict):
            result["evidence"] = _short_levels(result["evidence"])
        short["result"] = result
    if isinstance(status.get("forecast"), dict):
        # The status itself has the hours spent; the total is their sum with the hours to come.
        short["forecast"] = _without_fields(status["forecast"], "spent_hours", "total_hours")
    if status.get("state") == "done":
        _leave_out_repeated(short)
    if status.get("kind") == "plan":
        short["steps"] = [_short_levels(step) for step in status.get("steps", [])]
    return short


def _without_fields(fields: Reply, *names: str) -> Reply:
    """Return a copy of an object without the fields that have one of these names."""
    return {name: value for name, value in fields.items() if name not in names}


def _leave_out_repeated(status: Reply) -> None:
    """Remove numbers from the status of a done run, in place, that it has elsewhere too.

    The status of a training has `report_this`: the score after training, and the score by which the
    checkpoint was chosen. The metrics of the last step and the last held-out score would only be
    further numbers beside these. The status of an evaluation has the numbers of each model in its
    result, and `metrics` would repeat those of the last model.
    """
    report_this = status.get("report_this")
    result = status.get("result") if isinstance(status.get("result"), dict) else None
    if report_this is not None:
        for name in ("metrics", "heldout"):
            status.pop(name, None)
        if result is not None:
            status["result"] = _without_reported(result, report_this)
    elif result is not None and result.get("models"):
        status.pop("metrics", None)


def _without_reported(result: Reply, report_this: Reply) -> Reply:
    """Return the result of a training without what `report_this` (the number to report) repeats.

    These are the best score, by which the checkpoint was chosen, and of the mean score after
    training its interval and its number of tasks. The mean score itself stays, because it stands
    beside the one before training. What differs from `report_this` stays too.
    """
    short = dict(result)
    best_score = result.get("best_score")
    reported_score = report_this.get("curve", {}).get("value")  # rounded
    if isinstance(best_score, float) and reported_score == round(best_score, _DIGITS):
        del short["best_score"]
    evidence = result.get("evidence") or {}
    after = evidence.get("after") or {}
    is_reported = all(after.get(name) == report_this.get(name) for name in ("value", "tasks"))
    if after and is_reported:
        short["evidence"] = evidence | {"after": _without_fields(after, "interval", "tasks")}
    return short


def _essential_metrics(metrics: Reply) -> Reply:
    """Return the metrics that tell how the model does, as numbers with four significant digits."""
    unessential_names = _MACHINE_METRICS | _DETAIL_METRICS
    essential_metrics: Reply = {}
    for name, value in metrics.items():
        is_absent_trouble = name in _TROUBLE_METRICS and not value  # such as 0 errors
        if name in unessential_names or is_absent_trouble:
            continue
        if isinstance(value, float):
            value = float(f"{value:.{_DIGITS}g}")
        essential_metrics[name] = value
    return essential_metrics


def _newest_of_each(alerts: Sequence[Reply]) -> list[Reply]:
    """Return the newest alert of each run and kind of alert (`id`). Its field `times` says how
    often the alert was raised, if more than once.

    `alerts` must be in the order of time. Their times are left out, because their steps tell when
    they were raised.
    """
    newest: dict[tuple[object, object], Reply] = {}  # by run and kind, in the order of the last one
    for alert in alerts:
        key = (alert.get("run_id"), alert.get("id"))
        # `pop` and not `get`: the alert moves to the end of the dictionary.
        times = newest.pop(key, {}).get("times", 0) + 1
        newest[key] = _without_fields(alert, "time", "event") | {"times": times}
    for alert in newest.values():
        if alert["times"] == 1:
            del alert["times"]
    return list(newest.values())


def _short_levels(entry: Reply) -> Reply:
    """Return a copy of `entry` in which the levels `before` and `after` (mean scores with their
    intervals) have no counts of attempts and errors. A level with failed scores keeps them."""
    short = dict(entry)
    for name in ("before", "after"):
        level = entry.get(name)
        if isinstance(level, dict) and not level.get("errors"):
            short[name] = _without_fields(level, *_ERROR_COUNTS)
    return short


def with_cut_wait(status: Reply, requested_s: float, waited_s: float) -> Reply:
    """Add a warning to a run's status if its wait was cut short; else return the status as is.

    Args:
        status: the reply of the wait. No warning is added if the event that was waited for has
            come, or if the run has ended.
        requested_s: seconds that the caller wanted to wait.
        waited_s: seconds that the server was ready to wait.
    """
    if waited_s >= requested_s or status.get("until_met") or status.get("state") in TERMINAL:
        return status
    warning = (
        f"the wait was cut from {requested_s:.0f} to {waited_s:.0f} s: this client asks for no "
        "progress notifications, without which it may give up a longer call; wait again, or do "
        "other work: the run goes on by itself"
    )
    return status | {"warnings": [*status.get("warnings", []), warning]}


def with_wait_arguments(calls: Sequence[Reply], until: str, timeout_s: float) -> list[Reply]:
    """Return the suggested calls; each `wait_run` among them gets the event and the time limit of
    the caller's last wait as arguments.

    Args:
        calls: suggested calls, each with `tool` and `arguments`.
        until: the event that the caller waited for; it is added unless it is the default, "end", or
            the call names an event itself.
        timeout_s: seconds that the caller was ready to wait; they are added only if they exceed
            `MAX_WAIT_S`, because then this client keeps long calls open.
    """
    event = {} if until == "end" else {"until": until}
    time_limit = {"timeout_s": timeout_s} if timeout_s > MAX_WAIT_S else {}
    completed_calls = []
    for call in calls:
        if call["tool"] == "wait_run":
            call = {**call, "arguments": {**event, **call["arguments"], **time_limit}}
        completed_calls.append(call)
    return completed_calls


def after_wait(run_id: str, until: str, reply: Reply) -> list[Reply]:
    """Return the calls to suggest after a wait, by the state of the run.

    - done: read the rollouts; if a model was trained, deploy it.
    - failed: read the error, and diagnose. cancelled: resume.
    - still open: wait again. If the wait ended with the first step, read its rollouts before; if it
      ended with an alert, diagnose before. If its target is passed, stop it, or wait again.

    `until` is the event that was waited for, `reply` the reply of the wait: the run's status.
    """
    if reply.get("state") in ("done", "failed", "cancelled"):
        return _after_end(run_id, reply)
    event = until if reply.get("until_met") else ""  # what has come; "" if the time was up first
    # There is only one first step; another evaluation or alert may follow. A run with a target may
    # pass it long before its end, which is news.
    after_first_step = "news" if reply.get("target") else "end"
    next_event = after_first_step if event == "first_step" else until
    wait_again = _call_to_wait_again(run_id, next_event, reply)
    if reply.get("target_passed"):
        return [suggest("cancel_run", run_id=run_id, reason="target passed"), wait_again]
    # "news" of a run that goes on is an alert, or an evaluation that passed its target.
    if event == "alert" or (event == "news" and reply.get("alerts")):
        return [suggest("diagnose", run_id=run_id), wait_again]
    if event == "first_step":
        rollouts = suggest("read_rollouts", run_id=run_id)
        return [rollouts, suggest("read_logs", run_id=run_id), wait_again]
    return [wait_again]


def _after_end(run_id: str, reply: Reply) -> list[Reply]:
    """Return the calls to suggest for a run that is done, failed or cancelled. `reply` is the
    status of the run."""
    if reply["state"] == "cancelled":
        return [suggest("submit_train", resume=run_id)]
    if reply["state"] == "failed":
        read_error = suggest("read_logs", run_id=run_id, view="error")
        return [read_error, suggest("diagnose", run_id=run_id)]
    rollouts = suggest("read_rollouts", run_id=run_id)
    if reply.get("kind", "train") != "train":
        return [rollouts]  # evaluations and probes produce no model that could be served
    return [rollouts, suggest("deploy", run_id=f"{run_id}@best")]


def _call_to_wait_again(run_id: str, until: str, reply: Reply) -> Reply:
    """Make the suggested call that waits again, for the event `until`.

    `reply` is the reply of the last wait. The new wait continues from its cursor, so that no event
    between the two calls is missed.
    """
    arguments = {"run_id": run_id, "until": until}
    if reply.get("cursor"):
        arguments["cursor"] = reply["cursor"]
    return suggest("wait_run", **arguments)
