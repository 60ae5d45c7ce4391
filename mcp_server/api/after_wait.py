"""The calls to suggest after a wait, by what it has shown of the run."""

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


# What a status says of a run that does not change while it goes on.
_STANDING_FACTS = frozenset({"kind", "algorithm", "env_id", "model", "device", "heldout"})
_EXPECTED = ("summary", "next", "warnings", "until_met", "state", "run_id")  # even where empty
_EMPTY = (None, "", [], {})
# What a metrics line says of the machine and not of the model.
_OF_THE_MACHINE = frozenset(
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
_OF_ERRORS = ("attempts", "errors", "value_with_errors")  # of a level; told where scores failed


def only_changes(status: Reply) -> Reply:
    """Drop from the status of a run what a caller of an earlier one knows; return the rest.

    Left out are facts that cannot have changed, and fields that are empty. The status of a run that
    has ended is returned whole.
    """
    if status.get("state") in TERMINAL:
        return status
    return {
        name: value
        for name, value in status.items()
        if name in _EXPECTED or (name not in _STANDING_FACTS and value not in _EMPTY)
    }


def essential(status: Reply) -> Reply:
    """The status of a run or a plan without what read_logs and the report show better.

    Left out are metrics of speed and memory, measurements of the machine, and of each level what
    only failed scores would change. A level is a mean with its interval.
    """
    short = dict(status)
    if isinstance(status.get("metrics"), dict):
        short["metrics"] = {
            name: value for name, value in status["metrics"].items() if name not in _OF_THE_MACHINE
        }
    if isinstance(status.get("result"), dict):
        result = {name: value for name, value in status["result"].items() if name != "measured"}
        if isinstance(result.get("evidence"), dict):
            result["evidence"] = _short_levels(result["evidence"])
        short["result"] = result
    if status.get("kind") == "plan":
        short["steps"] = [_short_levels(step) for step in status.get("steps", [])]
    return short


def _short_levels(entry: Reply) -> Reply:
    """An entry whose levels before and after have no counts of attempts and errors, where no score
    failed."""
    short = dict(entry)
    for name in ("before", "after"):
        level = entry.get(name)
        if isinstance(level, dict) and not level.get("errors"):
            short[name] = {key: value for key, value in level.items() if key not in _OF_ERRORS}
    return short


def with_cut_wait(status: Reply, requested_s: float, waited_s: float) -> Reply:
    """Add a warning to a run's status if its wait was cut short; else return the status as is.

    Args:
        status: the reply of the wait. No warning is added if what was waited for has come, or if
            the run has ended.
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


def waiting_on(calls: Sequence[Reply], until: str, timeout_s: float) -> list[Reply]:
    """Return the suggested calls, with every `wait_run` among them waiting as the last call did.

    Args:
        calls: suggested calls, each with `tool` and `arguments`.
        until: what the caller waited for; the suggested waits get it too, unless it is the default.
        timeout_s: seconds that the caller waited; the suggested waits get it too if it is above
            `MAX_WAIT_S`, since then the client has shown that it holds long calls.
    """
    goal = {} if until == "end" else {"until": until}
    time_limit = {"timeout_s": timeout_s} if timeout_s > MAX_WAIT_S else {}
    return [
        {**call, "arguments": {**goal, **call["arguments"], **time_limit}}
        if call["tool"] == "wait_run"
        else call
        for call in calls
    ]


def after_wait(run_id: str, until: str, reply: Reply) -> list[Reply]:
    """The calls to suggest after a wait, by the state of the run.

    - done: read the rollouts; if a model was trained, deploy it.
    - failed: read the error, and diagnose. cancelled: resume.
    - still open: wait on; before that, look at the first step or diagnose an alert, if reached.
    """
    if reply.get("state") in ("done", "failed", "cancelled"):
        return _after_end(run_id, reply)
    reached = until if reply.get("until_met") else ""
    # There is only one first step; another evaluation or alert may follow.
    wait_on = _wait_on(run_id, "end" if reached == "first_step" else until, reply)
    if reached in ("alert", "news"):  # of one run nothing but an alert is news before its end
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
