"""Gymnasium environments that can be played in words: one task per seed, one action per completion.

In a `Text` space the whole completion is the action. In a `Discrete` space it is the last action
that the completion names, by its name from `actions` or by its number; if the completion names
none, the model is told so and nothing happens. The reward is the sum over the steps.
"""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.adapters.parts.options import read_options
from envs.adapters.parts.user_code import load_file
from envs.base import Message, MultiTurnEnv, Score, Task
from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.json_types import JsonObject

PACKAGE = "gymnasium"
_SHOWN = 30  # how many actions are listed if a completion names none


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        env: the id of the environment, such as "FrozenLake-v1".
        module: a file of the folder that registers the environment; "" if gymnasium has it.
        size, seed: how many tasks there are, one for each seed from `seed` on.
        instructions: the text before the first observation.
        actions: names of the actions of a discrete space, in their order.
        observe: what the model reads: "observation" for what `reset` and `step` return, "render"
            for the result of `render()`, with `render_mode = "ansi"` in the settings.
        success_reward: the reward from which a rollout counts as solved.
        settings: arguments of `gymnasium.make`.
    """

    env: str
    module: str = ""
    size: int = 200
    seed: int = 0
    instructions: str = ""
    actions: tuple[str, ...] = ()
    observe: str = "observation"
    success_reward: float = 1.0
    settings: JsonObject = field(default_factory=dict)


@dataclass
class State:
    """One rollout: its environment, the rewards so far, and how many completions named no
    action."""

    env: Any
    rewards: list[float] = field(default_factory=list)
    invalid: int = 0


class GymnasiumText(MultiTurnEnv):
    """One gymnasium environment under many seeds."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Import gymnasium, and the folder's module if the options name one; read the names of the
        environment's actions."""
        self.options = options
        self.gym = importlib.import_module(PACKAGE)
        if options.module:
            load_file(folder, options.module)
        env, _observation = self._reset_environment(options.seed)
        space = env.action_space
        self.action_names = _action_names(space, options)
        self.first_action = int(getattr(space, "start", 0))  # the number of the first action

    def tasks(self) -> list[Task]:
        """Return one task for each seed: the instructions and the first observation."""
        first_seed = self.options.seed
        return [self._task(seed) for seed in range(first_seed, first_seed + self.options.size)]

    def start(self, task: Task) -> State:
        """Begin a rollout: an environment of its own, reset with the task's seed."""
        env, _observation = self._reset_environment(task.metadata["seed"])
        return State(env)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Take the action that the completion names; return the next observation, or None at the
        end."""
        action = self._action(completion.content)
        if action is None:
            state.invalid += 1
            some_actions = ", ".join(self.action_names[:_SHOWN])
            return [Message("user", f"That names no action. Actions: {some_actions}.")]
        observation, reward, terminated, truncated, _ = state.env.step(action)
        state.rewards.append(float(reward))
        if terminated or truncated:
            return None
        return [Message("user", self._observation_text(state.env, observation))]

    def score(self, task: Task, state: State) -> Score:
        """Return the sum of the rewards, and close the environment."""
        state.env.close()
        reward = sum(state.rewards)
        metrics = {"steps": float(len(state.rewards)), "invalid_actions": float(state.invalid)}
        return Score(reward, success=reward >= self.options.success_reward, metrics=metrics)

    def _task(self, seed: int) -> Task:
        """Make the task for a seed: the instructions and the environment's first observation."""
        env, observation = self._reset_environment(seed)
        first_observation = self._observation_text(env, observation)
        env.close()
        parts = (self.options.instructions, first_observation)
        prompt = "\n\n".join(part for part in parts if part)
        return Task(f"{self.options.env}-{seed}", prompt, metadata={"seed": seed})

    def _reset_environment(self, seed: int) -> tuple[Any, Any]:
        """Return (an environment reset with `seed`, its first observation)."""
        env = self.gym.make(self.options.env, **self.options.settings)
        observation, _ = env.reset(seed=seed)
        return env, observation

    def _observation_text(self, env: Any, observation: Any) -> str:
        """Return the text that the model reads after a reset or a step: the observation itself, or
        what the environment renders, as the options say."""
        is_rendered = self.options.observe == "render"
        return str(env.render() if is_rendered else observation).strip()

    def _action(self, text: str) -> Any:
        """Return the last action that a completion names, as its number in the action space; None
        if it names none. In a Text space the completion itself is the action."""
        if not self.action_names:  # a Text space
            return text
        # The longest first, because a regular expression takes the first alternative that fits.
        longest_first = sorted(self.action_names, key=len, reverse=True)
        any_name = "|".join(re.escape(name) for name in longest_first)
        names_in_text = re.findall(rf"(?<![\w-])(?:{any_name})(?!\w)", text, re.IGNORECASE)
        if not names_in_text:
            return None
        lower_names = [name.lower() for name in self.action_names]
        return self.first_action + lower_names.index(names_in_text[-1].lower())


def _action_names(space: Any, options: Options) -> Sequence[str]:
    """Return the names of the actions, by which a completion chooses; () if any text is an action.

    Raises EnvProblem ENV_INVALID for a space other than Text and Discrete, or for names that do not
    fit the space.
    """
    space_type = type(space).__name__  # by name: gymnasium is not imported here
    if space_type == "Text":
        return ()
    if space_type != "Discrete":
        message = (
            f"{options.env} has actions of {space_type}; words can name those of Text and Discrete"
        )
        raise EnvProblem("ENV_INVALID", message, hint="Wrap it in an environment of one of these.")
    count = int(space.n)
    first_action = int(space.start)
    action_names = options.actions or tuple(
        str(number) for number in range(first_action, first_action + count)
    )
    distinct_names = {name.lower() for name in action_names}
    if len(action_names) != count or len(distinct_names) != count:
        message = f"[adapter] actions names {len(action_names)} actions, {options.env} has {count}"
        raise EnvProblem("ENV_INVALID", message, hint="Name each once, in their order.")
    return action_names


def load(folder: Path, adapter: Adapter, params: JsonObject) -> GymnasiumText:
    """Load the environment that the options name. Raises EnvProblem ENV_INVALID for a wrong
    option."""
    options = read_options(adapter, Options)
    if options.observe not in ("observation", "render"):
        message = f"[adapter] observe is observation or render, got {options.observe!r}"
        raise EnvProblem("ENV_INVALID", message, hint="Correct environment.toml.")
    return GymnasiumText(folder, options)
