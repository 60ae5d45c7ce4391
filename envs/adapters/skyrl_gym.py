"""Environments of SkyRL-Gym. Their rows have `prompt` (messages), `env_class`, `reward_spec`, and
whatever else the environment reads.

The environment's `init(prompt)` begins a rollout, `step(text)` answers each completion; the reward
is the sum over the steps.
"""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.adapters.parts.options import read_options
from envs.adapters.parts.rows import data_rows
from envs.adapters.parts.user_code import load_file
from envs.base import Message, MultiTurnEnv, Score, Task
from envs.config.adapters import Adapter
from envs.json_types import JsonObject

PACKAGE = "skyrl_gym"


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        env: the id of the environment for rows without `env_class`.
        module: a file of the folder that registers environments of its own; "" for none.
        data: the file with the rows; "" for every data file of the folder.
        config: the environment's `env_config`.
        success_reward: the reward from which a rollout counts as solved.
    """

    env: str = ""
    module: str = ""
    data: str = ""
    success_reward: float = 1.0
    config: JsonObject = field(default_factory=dict)


@dataclass
class State:
    """One rollout: its environment, and the rewards so far."""

    env: Any
    rewards: list[float] = field(default_factory=list)


class SkyrlGym(MultiTurnEnv):
    """The rows of a folder as tasks; the environment that a row names plays it."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Import skyrl_gym, and register the environments of the folder's own module."""
        self.folder = folder
        self.options = options
        self.gym = importlib.import_module(PACKAGE)
        if options.module:
            load_file(folder, options.module)

    def tasks(self) -> list[Task]:
        """Return one task per row, with the prompt that the environment's `init` makes of it."""
        tasks = []
        for row in data_rows(self.folder, self.options.data):
            env, prompt = self._begin_environment(row.value)
            env.close()
            tasks.append(Task(row.id, prompt, split=row.split, metadata={"row": row.value}))
        return tasks

    def start(self, task: Task) -> State:
        """Begin a rollout with an environment of its own."""
        env, _prompt = self._begin_environment(task.metadata["row"])
        return State(env)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Return the environment's reply to the completion; None once it is done."""
        output = state.env.step(completion.content)
        state.rewards.append(float(output["reward"]))
        if output["done"] or not output["observations"]:
            return None
        return [Message.from_dict(message) for message in output["observations"]]

    def score(self, task: Task, state: State) -> Score:
        """Return the sum of the rewards, with those of the environment's metrics that are
        numbers."""
        reward = sum(state.rewards)
        metrics = state.env.get_metrics() if hasattr(state.env, "get_metrics") else {}
        state.env.close()
        numbers = {
            name: float(value)
            for name, value in (metrics or {}).items()
            if isinstance(value, int | float)
        }
        return Score(reward, success=reward >= self.options.success_reward, metrics=numbers)

    def _begin_environment(self, row: JsonObject) -> tuple[Any, list[Message]]:
        """Make the environment that a row names, and begin its rollout. Returns (the environment,
        the prompt that it makes of the row's)."""
        name = row.get("env_class") or self.options.env
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
        env = self.gym.make(name, env_config=_as_config(self.options.config), extras=extras)
        opening, _ = env.init(messages)
        return env, [Message.from_dict(message) for message in opening]


def _as_config(options: JsonObject) -> Any:
    """Return the options as an OmegaConf object, which SkyRL's trainer passes to environments."""
    return importlib.import_module("omegaconf").OmegaConf.create(dict(options))


def load(folder: Path, adapter: Adapter, params: JsonObject) -> SkyrlGym:
    """Load the rows and environments of a folder."""
    return SkyrlGym(folder, read_options(adapter, Options))
