"""What a scripted agent does with the server, from push to chat, whichever program it runs in."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from fake_model import Call, Script, Shown
from loop_client import TERMINAL

SETTINGS = {"steps": 4, "batch_size": 8, "eval_rows": 12, "learning_rate": 3e-3, "max_examples": 40}
WAITS = 20  # at 20 s each; a tiny run on two busy cores takes one or two
QUESTION = "What is 3 + 4?"
SHOWN_CHARS = 12_000  # Codex cuts a result in the middle a little above this

LOOP = [
    *("get_status", "push_env", "dry_run", "estimate_cost", "submit_train", "wait_run"),
    *("get_status", "evaluate", "wait_run", "compare_runs", "deploy", "chat", "deploy"),
]
REFUSED = ["submit_train", "submit_train", "push_env", "submit_train"]

Step = Generator[Call, Shown, dict[str, Any]]


def the_loop(env: Path, prelude: Callable[[list[str]], Script]) -> Script:
    """Push, check, train, judge, deploy, chat, and leave nothing served.

    Args:
        env: the environment's folder.
        prelude: what this agent must do before the named tools may be called.
    """
    yield from prelude(sorted(set(LOOP)))
    devices = (yield from _ask("get_status"))["hardware"]["devices"]
    assert devices, "no device"
    pushed = yield from _ask("push_env", path=str(env))
    env_id = pushed["env_id"]
    plan = {"env_id": env_id, "model": "pebble", "algorithm": "sft", "settings": SETTINGS}
    checks = (yield from _ask("dry_run", **plan))["checks"]
    assert {c["status"] for c in checks} <= {"pass", "warn", "skip"}, checks
    assert (yield from _ask("estimate_cost", **plan))["fits"] is True
    submitted = yield from _ask("submit_train", **plan, note="a scripted agent", request_id="one")
    run_id = submitted["run_id"]
    done = yield from _until_over(run_id)
    assert done["state"] == "done" and done["verdict"] != "unknown", done
    runs = (yield from _ask("get_status", scope="runs"))["runs"]
    assert [(run["run_id"], run["state"]) for run in runs] == [(run_id, "done")]
    models = ["pebble", run_id]
    judged = yield from _ask("evaluate", env_id=env_id, models=models, rows=12)
    assert (yield from _until_over(judged["run_id"]))["state"] == "done"
    compared = yield from _ask("compare_runs", ids=models, env_id=env_id)
    assert compared["verdict"] in ("better", "worse", "no_difference", "inconclusive")
    deployed = yield from _ask("deploy", run_id=run_id)
    assert deployed["base_url"].startswith("http://127.0.0.1:")
    said = yield from _ask("chat", model=run_id, message=QUESTION, max_tokens=8)
    assert [answer["model"] for answer in said["answers"]] == [run_id]
    yield from _ask("deploy", run_id=run_id, action="stop")


def the_refusals(env: Path, prelude: Callable[[list[str]], Script]) -> Script:
    """What must be said whole: a misspelt argument, an unknown id, a spend nobody agreed to.

    The home's limit must be 0; a program without a person answers the question with no.
    """
    yield from prelude(["push_env", "submit_train"])
    error = yield from _refused("submit_train", env_id="nobody", max_gpu_hour=1)
    assert error["code"] == "UNKNOWN_ARGUMENT" and "max_gpu_hours" in error["hint"]
    error = yield from _refused("submit_train", env_id="nobody")
    assert error["code"] == "ENV_NOT_FOUND"
    env_id = (yield from _ask("push_env", path=str(env)))["env_id"]
    error = yield from _refused("submit_train", env_id=env_id, settings={"steps": 1})
    assert error["code"] == "NOT_APPROVED" and "Ask the user" in error["hint"]
    assert "nobody agreed" in error["message"], "the program was not asked"


def tools_called(shown: list[Shown]) -> list[str]:
    """The server's tools in the order they were called, waits in a row as one."""
    names = [seen.call.tool for seen in shown if seen.call.server]
    return [
        name
        for name, before in zip(names, ["", *names], strict=False)
        if (name, before) != ("wait_run", "wait_run")
    ]


def _until_over(run_id: str) -> Step:
    cursor = ""
    for _ in range(WAITS):
        answer = yield from _ask("wait_run", run_id=run_id, timeout_s=20, cursor=cursor)
        cursor = answer["cursor"]
        if answer["state"] in TERMINAL:
            return answer
    raise AssertionError(f"{run_id} is not over after {WAITS} waits")


def _ask(tool: str, **arguments: Any) -> Step:
    """The answer as the model was shown it; fails on a refusal and on what was cut or garbled."""
    seen = yield Call(tool, arguments)
    assert not seen.failed, f"{tool}: {seen.text}"
    answer = _read(seen)
    assert "code" not in answer, f"{tool}: {seen.text}"
    assert answer["summary"] and {"next", "warnings"} <= set(answer), f"{tool}: {seen.text}"
    return answer


def _refused(tool: str, **arguments: Any) -> Step:
    answer = _read((yield Call(tool, arguments)))
    assert {"code", "message", "hint"} <= set(answer), f"{tool} was not refused: {answer}"
    return answer


def _read(seen: Shown) -> dict[str, Any]:
    """The JSON among what the model was shown."""
    assert len(seen.text) <= SHOWN_CHARS, f"{seen.call.tool}: {len(seen.text)} characters"
    # Codex puts the seconds a call took before an answer, Claude Code a schema after a refusal.
    _, _, text = ("\n" + seen.text).rpartition("\nOutput:\n")
    return json.loads(text.strip().partition("\n")[0])
