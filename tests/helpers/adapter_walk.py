"""The way of a foreign environment through a real client: push, dry run, GRPO, evaluate."""

import json
import time
from pathlib import Path
from typing import Any

from loop_client import Agent

GRPO: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_tokens": 16,
    "eval_rows": 8,
    "skill_rows": 4,
}


async def pushed(a: Agent, folder: Path, within_s: float = 300) -> dict[str, Any]:
    """Push with its packages, again and again while they are being installed."""
    deadline = time.monotonic() + within_s
    while True:
        answer = await a.client.call_tool("push_env", {"path": str(folder), "install": True})
        text = "".join(getattr(part, "text", "") for part in answer.content)
        content = json.loads(text)
        if not answer.is_error:
            return content
        assert content.get("retryable") and time.monotonic() < deadline, text


async def walked(a: Agent, folder: Path, **settings: Any) -> dict[str, Any]:
    """What each tool said of the environment in `folder`: `push`, `dry_run`, `trained`,
    `evaluated` and the `rollouts` of the training."""
    push = await pushed(a, folder)
    env_id, chosen = push["env_id"], GRPO | settings
    checked = await a.call("dry_run", env_id=env_id, settings=chosen)
    failing = [check for check in checked["checks"] if check["status"] == "fail"]
    assert not failing, failing
    run = (await a.call("submit_train", env_id=env_id, settings=chosen))["run_id"]
    trained = await a.wait(run, within_s=200)
    assert trained["state"] == "done", trained
    rollouts = await a.call("read_rollouts", run_id=run)
    asked = (await a.call("evaluate", env_id=env_id, models=["pebble", run], rows=8))["run_id"]
    evaluated = await a.wait(asked, within_s=200)
    assert evaluated["state"] == "done", evaluated
    return {
        "push": push,
        "dry_run": checked,
        "run": run,
        "trained": trained,
        "rollouts": rollouts,
        "evaluated": evaluated,
    }
