"""Plays one rollout of a task app: starts the app (or asks the one that runs), posts `/rollout`,
and prints the reward as the last line. Runs in a copy of the environment's folder; standard library
only."""

import importlib.util
import json
import os
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

Json = dict[Any, Any]  # JSON of unknown shape
START_S = 30.0  # seconds within which the app must answer /health


def _import_part(name: str) -> Any:
    """Import the module `name` of `envs/adapters/parts/` from its file; `sys.path` does not have it
    here."""
    path = Path(__file__).resolve().parents[1] / "parts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


local_server = _import_part("local_server")


def main() -> None:
    """Play the rollout of the task in the file HONESMITH_TASK and print its reward as JSON.

    If the app fails, exits with status 1 and writes the reason to standard error.
    """
    settings = tomllib.loads(Path("environment.toml").read_text("utf-8"))
    options = settings["adapter"]
    task = json.loads(Path(os.environ["HONESMITH_TASK"]).read_text("utf-8"))
    try:
        if "url" in options:
            answer = rollout(options["url"].rstrip("/"), options, task)
        else:
            port = int(os.environ["PORT"])
            with local_server.running(options["server"], Path.cwd(), port, START_S) as url:
                answer = rollout(url, options, task)
        sys.stdout.write(json.dumps(reward_of(answer)) + "\n")
    except (local_server.ServerFault, ValueError) as fault:
        sys.exit(f"{fault}")


def rollout(url: str, options: Json, task: Json) -> Any:
    """Post `/rollout` for the task to the app at `url` and return its JSON answer.

    `options` is the table [adapter] of environment.toml, `task` a stored row with the seed in its
    metadata. The model's address and key come from environment variables. Raises ServerFault if the
    app fails.
    """
    key = os.environ.get("ENVIRONMENT_API_KEY", "")
    body = {
        "run_id": f"rollout-{uuid.uuid4().hex}",
        "trace_correlation_id": f"trace-{uuid.uuid4().hex}",
        "env": {
            "env_name": options.get("env_name", ""),
            "config": options.get("config", {}),
            "seed": task["metadata"]["seed"],
        },
        "policy": {
            "policy_name": "policy",
            "config": {
                "model": os.environ["OPENAI_MODEL"],
                "inference_url": os.environ["OPENAI_BASE_URL"],
                "api_key": os.environ["OPENAI_API_KEY"],
                **options.get("policy", {}),
            },
            "output_mode": options.get("output_mode", "text"),
        },
        "record": {"logprobs": False, "value": False, "return_trace": False},
        "on_done": "reset",
        "safety": {"max_time_s": 3600},
        "mode": "rl",
    }
    # The limit on the rollout ends this program; the app needs none of its own.
    headers = {"X-API-Key": key} if key else None
    return local_server.request_json(f"{url}/rollout", 3600.0, body, headers)


def reward_of(answer: Any) -> Json:
    """Return the line to print for an app's answer: the reward, and metrics.

    The reward is `outcome_reward`, or the name that older apps use for it. Raises ValueError if the
    answer has none, or if the app aborted the rollout.
    """
    metrics = answer.get("metrics") if isinstance(answer, dict) else None
    if not isinstance(metrics, dict):
        raise ValueError("the answer of /rollout has no metrics")
    if answer.get("aborted"):
        raise ValueError("the task app aborted the rollout")
    names = ("outcome_reward", "outcome_score", "mean_return")  # the newest name first
    rewards = [metrics[name] for name in names if metrics.get(name) is not None]
    reward = rewards[0] if rewards else None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"the metrics of /rollout have no {names[0]}: {json.dumps(metrics)[:300]}")
    event_rewards = metrics.get("event_rewards") or []
    optional = {
        "steps": metrics.get("num_steps"),
        "event_reward": sum(event_rewards) if event_rewards else None,
    }
    numbers = {name: value for name, value in optional.items() if isinstance(value, int | float)}
    return {"reward": reward, "metrics": numbers}


if __name__ == "__main__":
    main()
