"""Environments behind OpenEnv's protocol: a server answers `reset` and `step` over a WebSocket.
Each rollout is one session, each task one seed.

A completion becomes an action: an object with the text in one field or, with `json_action`, the
JSON object in the completion. The model reads one field of the observation, or all of it as JSON.
The reward is the sum over the steps.
"""

import contextlib
import importlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs import rewards
from envs.adapters.parts import local_server
from envs.adapters.parts.options import read_options
from envs.base import Message, MultiTurnEnv, Score, Task
from envs.config.adapters import SERVER_PORT, Adapter
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

CLIENT = "openenv.core.generic_client"
START_S = 50.0  # seconds within which the server must answer /health


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        server: the program and its arguments, run in the folder; it listens on the port in the
            environment variable PORT.
        url: the URL of a server that runs already, instead of `server`; needs `network = true`.
        action: the field of an action that takes the completion.
        json_action: whether the completion is the whole action, as JSON.
        observation: the field of an observation that the model reads; "" for all, as JSON.
        instructions: the text before the first observation.
        size, seed: how many tasks there are, one for each seed from `seed` on.
        success_reward: the reward from which a rollout counts as solved.
        reset: further arguments of `reset`.
    """

    server: tuple[str, ...] = ()
    url: str = ""
    action: str = "message"
    json_action: bool = False
    observation: str = ""
    instructions: str = ""
    size: int = 200
    seed: int = 0
    success_reward: float = 1.0
    reset: JsonObject = field(default_factory=dict)


@dataclass
class State:
    """One rollout.

    Attributes:
        client: its session with the server.
        rewards: the rewards so far.
        invalid: how many completions were no action.
    """

    client: Any
    rewards: list[float] = field(default_factory=list)
    invalid: int = 0


class OpenEnv(MultiTurnEnv):
    """The tasks of one OpenEnv server, one for each seed."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Start the server, if the options name a program, and wait until it answers."""
        self.options = options
        self.module = importlib.import_module(CLIENT)
        self.url = options.url.rstrip("/")
        self.process = None
        if options.server:
            port = int(os.environ[SERVER_PORT])
            self.url = f"http://127.0.0.1:{port}"
            self.process = local_server.start(options.server, folder, port)
            local_server.await_health(self.url, START_S, self.process)

    def tasks(self) -> list[Task]:
        """Return one task for each seed: the instructions and the first observation."""
        first_seed = self.options.seed
        return [self._task(seed) for seed in range(first_seed, first_seed + self.options.size)]

    def start(self, task: Task) -> State:
        """Begin a rollout: a session of its own, reset with the task's seed."""
        client, _observation = self._reset_session(task.metadata["seed"])
        return State(client)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Take the action in the completion; return the next observation, or None at the end."""
        action = self._action(completion.content)
        if action is None:
            state.invalid += 1
            return [Message("user", "That is no JSON object; reply with an action as JSON.")]
        result = state.client.step(action)
        if result.reward is not None:
            state.rewards.append(float(result.reward))
        if result.done:
            return None
        return [Message("user", self._observation_text(result.observation))]

    def score(self, task: Task, state: State) -> Score:
        """Return the sum of the rewards, and close the session."""
        state.client.close()
        reward = sum(state.rewards)
        return Score(
            reward,
            success=reward >= self.options.success_reward,
            metrics={"invalid_actions": float(state.invalid)},
        )

    def _task(self, seed: int) -> Task:
        """Make the task for a seed: the instructions and the server's first observation."""
        client, observation = self._reset_session(seed)
        client.close()
        first_observation = self._observation_text(observation)
        parts = (self.options.instructions, first_observation)
        prompt = "\n\n".join(part for part in parts if part)
        return Task(f"seed-{seed}", prompt, metadata={"seed": seed})

    def _reset_session(self, seed: int) -> tuple[Any, Any]:
        """Open a session with the server. Returns (the session, reset with `seed`; its first
        observation)."""
        client = self.module.GenericEnvClient(base_url=self.url).sync()
        client.connect()
        result = client.reset(seed=seed, **self.options.reset)
        return client, result.observation

    def _observation_text(self, observation: Any) -> str:
        """Return the text of an observation that the model reads: the field that the options name,
        or all of it as JSON."""
        name = self.options.observation
        if name and isinstance(observation, dict):
            return str(observation.get(name, ""))
        return json.dumps(observation, ensure_ascii=False)

    def _action(self, text: str) -> JsonObject | None:
        """Return the action in a completion; None if `json_action` is set and the text holds no
        JSON object."""
        if not self.options.json_action:
            return {self.options.action: text}
        value: Any = None
        with contextlib.suppress(ValueError):  # the text is no JSON
            value = rewards.json_value(text)
        return value if isinstance(value, dict) else None


def load(folder: Path, adapter: Adapter, params: JsonObject) -> OpenEnv:
    """Connect to the server that the options name. Raises EnvProblem ENV_INVALID unless they name
    exactly one of server and url."""
    options = read_options(adapter, Options)
    if bool(options.server) == bool(options.url):
        message = "[adapter] of OpenEnv names either a server or a url"
        raise EnvProblem("ENV_INVALID", message, hint='server = ["python3", "server.py"]')
    return OpenEnv(folder, options)
