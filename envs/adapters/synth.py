"""Task apps: HTTP servers in any language with `/health`, `/task_info` and `/rollout`. Each task is
one seed.

The app plays each rollout itself and asks the model at the `inference_url` that it is given, the
trainer's HTTP server for that rollout. The app runs in the sandbox of the rollout (`server`, one
process per rollout), or elsewhere (`url`, which needs `network = true` under [limits]).
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

START_S = 30.0  # seconds within which the app must answer /health
INFO_S = 10.0  # seconds for one /task_info
SHOWN_CHARS = 2000  # how much a task shows of each part of the app's answer


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        server: the program and its arguments, run in the folder; it listens on the port in the
            environment variable PORT.
        url: the URL of an app that runs already, instead of `server`.
        env_name, config: the name and the config of the rollout's `env`.
        policy: further entries for the policy's `config`.
        output_mode: "text", "tool_calls" or "structured".
        size, seed: how many tasks there are, one for each seed from `seed` on.
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
    """The tasks of a task app, one for each seed; `programs/synth_rollout.py` plays them."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Store the folder and the options; the app is started only when it is needed."""
        self.folder = folder
        self.options = options

    def tasks(self) -> list[Task]:
        """Return one task for each seed, with what the app's `/task_info` says about it."""
        first_seed = self.options.seed
        with self._app() as url:
            seeds = range(first_seed, first_seed + self.options.size)
            return [_task(url, seed) for seed in seeds]

    @contextmanager
    def _app(self) -> Iterator[str]:
        """A context in which the app runs; yields its URL."""
        options = self.options
        if options.url:
            yield options.url.rstrip("/")
            return
        port = int(os.environ[SERVER_PORT])
        with local_server.running(options.server, self.folder, port, START_S) as url:
            yield url


def _task(url: str, seed: int) -> Task:
    """Make the task for a seed from what the app at `url` says of it. Raises ServerFault if the app
    does not answer /task_info."""
    key = os.environ.get("ENVIRONMENT_API_KEY", "")
    query = urlencode({"seed": seed})
    headers = {"X-API-Key": key} if key else None
    answer = local_server.request_json(f"{url}/task_info?{query}", INFO_S, headers=headers)
    # Some apps answer with a list, one entry for each seed that was asked about.
    info = answer[0] if isinstance(answer, list) and answer else answer
    return Task(f"seed-{seed}", _prompt_text(info, seed), metadata={"seed": seed})


def _prompt_text(info: Any, seed: int) -> str:
    """Return a text to show as the task's prompt, from the app's `/task_info` (`info`).

    The real prompt is unknown until the app asks the model.
    """
    fields = info if isinstance(info, Mapping) else {}
    task = fields.get("task")
    task_fields = task if isinstance(task, Mapping) else {}
    description = task_fields.get("description") or task_fields.get("name") or "A task app"
    parts = [f"{description} (seed {seed})"]
    for name in ("task_metadata", "observation"):
        if fields.get(name):
            parts.append(json.dumps(fields[name], ensure_ascii=False)[:SHOWN_CHARS])
    return "\n".join(parts)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> SynthApp:
    """Load the app that the options name. Raises EnvProblem ENV_INVALID unless they name exactly
    one of server and url."""
    options = read_options(adapter, Options)
    if bool(options.server) == bool(options.url):
        message = "[adapter] of a task app names either a server or a url"
        raise EnvProblem("ENV_INVALID", message, hint='server = ["node", "app.mjs"]')
    return SynthApp(folder, options)
