"""The calls to suggest after a wait, by what it has shown of the run."""

from typing import Any

from engine.core.hints import Call
from engine.core.reply import Reply


def suggest(tool: str, **arguments: Any) -> Reply:
    """Make an entry for `next` of a reply: a suggested call of `tool` with these arguments."""
    return Call(tool, arguments).to_json()


def after_wait(run_id: str, until: str, reply: Reply) -> list[Reply]:
    """The calls to suggest after a wait, by the state of the run.

    - done: read the rollouts; if a model was trained, deploy it.
    - failed: read the error, and diagnose. cancelled: resume.
    - still open: wait on; before that, look at the first step or diagnose an alert, if reached.
    """
    if reply.get("state") in ("done", "failed", "cancelled"):
        return _after_end(run_id, reply)
    reached = until if reply.get("reached") else ""
    # There is only one first step; another evaluation or alert may follow.
    wait_on = _wait_on(run_id, "end" if reached == "first_step" else until, reply)
    if reached == "alert":
        return [suggest("diagnose", run_id=run_id), wait_on]
    if reached == "first_step":
        rollouts = suggest("read_rollouts", run_id=run_id)
        return [rollouts, suggest("read_logs", run_id=run_id), wait_on]
    return [wait_on]


def _after_end(run_id: str, reply: Reply) -> list[Reply]:
    """The calls to suggest after a run that is done, failed or cancelled; `reply` is its status."""
    if reply["state"] == "cancelled":
        return [suggest("submit_train", resume=run_id)]
    if reply["state"] == "failed":
        read_error = suggest("read_logs", run_id=run_id, view="error")
        return [read_error, suggest("diagnose", run_id=run_id)]
    rollouts = suggest("read_rollouts", run_id=run_id)
    if reply.get("kind", "train") != "train":
        return [rollouts]  # evaluations and probes produce no model that could be served
    return [rollouts, suggest("deploy", run_id=f"{run_id}@best")]


def _wait_on(run_id: str, until: str, reply: Reply) -> Reply:
    """The call to suggest after a wait whose run is still open: wait again, for `until`.

    It continues from the cursor of `reply`, the reply of that wait, so that nothing is missed.
    """
    arguments = {"run_id": run_id, "until": until}
    if reply.get("cursor"):
        arguments["cursor"] = reply["cursor"]
    return suggest("wait_run", **arguments)
