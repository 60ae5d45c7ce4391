"""Task apps over HTTP, in any language: `/health`, `/task_info`, `/rollout`, one task a seed.

The app plays each rollout itself and asks the model at the `inference_url` that it is given, which
is the rollout's own gateway. It runs in the box of the rollout (`server`), one process a rollout,
or elsewhere (`url`, with `network = true` under [limits]).
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from envs.adapters.parts import local_server
from envs.adapters.parts.options import read_options
from envs.base import SingleTurnEnv, Task
from envs.config.adapters import SERVER_PORT, Adapter
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

START_S = 30.0  # for the app to answer /health
INFO_S = 10.0  # for one /task_info
SHOWN_CHARS = 2000  # of what the app says of a task


@dataclass(frozen=True)
class Options:
    """Which app, and what it is told.

    Attributes:
        server: the program and its arguments, run in the folder; it listens on the port in the
            variable PORT.
        url: where an app runs already; instead of `server`.
        env_name, config: of the rollout's `env`.
        policy: more of the policy's `config`.
        output_mode: "text", "tool_calls" or "structured".
        size, seed: how many tasks, one for each seed from `seed` on.
    """

    server: tuple[str, ...] = ()
    url: str = ""
    env_name: str = ""
    output_mode: str = "text"
    size: int = 200
    seed: int = 0
    config: JsonObject = field(default_factory=dict)
    policy: JsonObject = field(default_factory=dict)


class SynthApp(SingleTurnEnv):
    """The seeds of a task app; `programs/synth_rollout.py` plays them."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options

    def tasks(self) -> list[Task]:
        """One task for each seed, with what the app's `/task_info` says of it."""
        first = self.options.seed
        with self._app() as url:
            return [_task(url, seed) for seed in range(first, first + self.options.size)]

    @contextmanager
    def _app(self) -> Iterator[str]:
        """A context with the URL of the app."""
        options = self.options
        if options.url:
            yield options.url.rstrip("/")
            return
        port = int(os.environ[SERVER_PORT])
        with local_server.running(options.server, self.folder, port, START_S) as url:
            yield url


def _task(url: str, seed: int) -> Task:
    """The task of a seed. Raises ServerFault."""
    key = os.environ.get("ENVIRONMENT_API_KEY", "")
    query = urlencode({"seed": seed})
    headers = {"X-API-Key": key} if key else None
    answer = local_server.asked(f"{url}/task_info?{query}", INFO_S, headers=headers)
    info = answer[0] if isinstance(answer, list) and answer else answer
    return Task(f"seed-{seed}", _shown(info, seed), metadata={"seed": seed})


def _shown(info: Any, seed: int) -> str:
    """The text that stands for a prompt, which is not known before the app asks: what the app's
    `/task_info` (`info`) tells of the task."""
    facts = info if isinstance(info, Mapping) else {}
    task = facts.get("task")
    task = task if isinstance(task, Mapping) else {}
    about = task.get("description") or task.get("name") or "A task app"
    parts = [f"{about} (seed {seed})"]
    for name in ("task_metadata", "observation"):
        if facts.get(name):
            parts.append(json.dumps(facts[name], ensure_ascii=False)[:SHOWN_CHARS])
    return "\n".join(parts)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> SynthApp:
    """The app that the options name. Raises EnvProblem ENV_INVALID unless they name one."""
    options = read_options(adapter, Options)
    if bool(options.server) == bool(options.url):
        message = "[adapter] of a task app names either a server or a url"
        raise EnvProblem("ENV_INVALID", message, hint='server = ["node", "app.mjs"]')
    return SynthApp(folder, options)
