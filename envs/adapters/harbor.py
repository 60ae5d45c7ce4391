"""Harbor tasks: folders with an instruction, an environment and tests that grade what an agent with
a shell has left.

`programs/harbor_rollout.py` plays each rollout: the model's commands run in a sandbox, which is the
rollout's own box, a container, or one rented at a cloud (envs/sandboxes/).
"""

from pathlib import Path

from envs.adapters.parts.harbor_task import (
    SOLUTION,
    HarborTask,
    Options,
    TaskRefused,
    read_task,
    task_folders,
)
from envs.adapters.parts.options import read_options
from envs.base import SingleTurnEnv, Task
from envs.config.adapters import LOCAL, Adapter
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings, read_settings
from envs.json_types import JsonObject
from envs.sandboxes import opening

AGENTS, CALLS = ("model", "solution", "none"), ("tool", "block")
SPARE_S = 5.0  # of a rollout, for opening its sandbox and giving it back


class Harbor(SingleTurnEnv):
    """The Harbor tasks of one folder."""

    def __init__(self, folder: Path, options: Options, tasks: list[HarborTask]) -> None:
        """Store what was read."""
        self.folder = folder
        self.options = options
        self.harbor_tasks = tasks

    def tasks(self) -> list[Task]:
        """Return the tasks, each with the path of its folder for the program that plays it."""
        root = self.folder / self.options.tasks
        return [
            Task(
                task.folder.relative_to(root).as_posix(),
                task.instruction,
                metadata={
                    "folder": task.folder.relative_to(self.folder).as_posix(),
                    **{
                        name: task.about[name]
                        for name in ("difficulty", "category", "tags")
                        if name in task.about
                    },
                },
            )
            for task in self.harbor_tasks
        ]


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Harbor:
    """Read the tasks that the options name.

    Raises EnvProblem ENV_INVALID for a wrong option, for a provider that cannot work here, and for
    a task that needs what is not supported.
    """
    options = read_options(adapter, Options)
    settings = read_settings(folder)
    fault = _problem(options, settings)
    if fault:
        raise EnvProblem("ENV_INVALID", fault, hint="docs/adapters.md says what each option is.")
    root = folder / options.tasks
    folders = task_folders(root)[: options.size or None]
    if not folders:
        message = f"there is no task in {options.tasks}: no folder with a task.toml"
        raise EnvProblem("ENV_INVALID", message, hint='[adapter] tasks = "tasks" names the folder.')
    try:
        tasks = [read_task(each, options.sandbox, settings.secrets) for each in folders]
        if options.agent == "solution":
            _require_solutions(tasks)
    except TaskRefused as refusal:
        raise EnvProblem("ENV_INVALID", str(refusal)) from refusal
    return Harbor(folder, options, tasks)


def _problem(options: Options, settings: EnvSettings) -> str:
    """Return what is wrong with the options themselves or with their place, "" for nothing."""
    if options.agent not in AGENTS:
        return f"[adapter] agent is one of {', '.join(AGENTS)}, got {options.agent!r}"
    if options.calls not in CALLS:
        return f"[adapter] calls is one of {', '.join(CALLS)}, got {options.calls!r}"
    fault = opening.problem(options.sandbox)
    if fault:
        return fault
    provider = options.sandbox.get("provider", LOCAL)
    if provider != LOCAL and not settings.limits.network:
        return f"provider {provider} is reached over the network: [limits] network = true"
    assert settings.rollout is not None  # the format has a program
    seconds = settings.rollout.seconds
    if seconds <= options.verifier_seconds + SPARE_S:
        return (
            f"[rollout] seconds = {seconds:g} leave the model no time beside "
            f"verifier_seconds = {options.verifier_seconds:g} and {SPARE_S:g} s for the sandbox; "
            "raise seconds"
        )
    return ""


def _require_solutions(tasks: list[HarborTask]) -> None:
    """Raise TaskRefused for the first task without a solution."""
    for task in tasks:
        if not (task.folder / SOLUTION).is_file():
            message = f'task {task.folder.name} has no {SOLUTION}, which agent = "solution" plays'
            raise TaskRefused(message)
