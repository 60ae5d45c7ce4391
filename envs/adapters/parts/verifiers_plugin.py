"""Loads a taskset of verifiers 0.4 by its id, and refuses what is not supported here before any
task is played."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.adapters.parts.verifiers_trace import verifiers_module
from envs.config.problem import EnvProblem
from envs.config.settings import FILE

AS_COMMAND = (
    "A program of the folder can play such tasks and ask the model over HTTP: "
    'command = ["python3", "play.py"], see docs/gateway.md.'
)
NEMO_GYM, HARBOR = "NeMoGymTaskset", "HarborTaskset"  # tasksets that come with verifiers
NO_CONTAINER = "Take a taskset whose tasks need no container: none runs inside the sandbox."


@dataclass(frozen=True)
class Plugin:
    """A taskset that can be played here.

    Attributes:
        name: the taskset's id.
        taskset: the taskset, made with its config.
        task_type: the class of its tasks.
        env: the taskset's own `Env`; None if its tasks are answered with one message.
    """

    name: str
    taskset: Any
    task_type: Any
    env: Any

    def check_task(self, task: Any) -> None:
        """Raise EnvProblem ENV_INVALID if a task of verifiers needs something that is not supported
        here: a container, tools, skills, or a prompt that nobody says."""
        data, declared_type = task.data, self.task_type.data_type()
        task_name = f"task {data.idx} of {self.name!r}"
        if type(task) is not self.task_type or type(data) is not declared_type:
            raise unsupported(
                f"{task_name} is a {type(task).__name__} with {type(data).__name__}, but the "
                f"taskset declares {self.task_type.__name__} with {declared_type.__name__}",
                "Name both: class MySet(vf.Taskset[MyTask]), class MyTask(vf.Task[MyData]).",
            )
        container_settings = {  # name -> whether the task sets it, or its value
            "image": data.image,
            "agent_user": data.agent_user,
            "artifacts": data.artifacts,
            "network_allow": data.network_allow != ["*"],
            "network_block": data.network_block,
        }
        for name, value in container_settings.items():
            if value:
                raise unsupported(f"{task_name} sets {name}, which needs a container", NO_CONTAINER)
        is_nemo = derives_from(type(self.taskset), NEMO_GYM)  # has tools per row
        if is_nemo and data.row["responses_create_params"].get("tools"):
            raise unsupported(f"{task_name} gives the model tools", AS_COMMAND)
        if data.skills:
            message = f"{task_name} installs skills, which need a harness with tools"
            raise unsupported(message, AS_COMMAND)
        if data.prompt is None and self.env is None:
            raise unsupported(
                f"{task_name} has no prompt, and the taskset no Env that would speak first",
                "Give TaskData a prompt.",
            )


def unsupported(message: str, hint: str) -> EnvProblem:
    """Return an EnvProblem ENV_INVALID that says why a taskset cannot be played here; `hint` is
    what to do instead."""
    return EnvProblem("ENV_INVALID", message, hint=hint, file=FILE)


def derives_from(taskset_type: type, name: str) -> bool:
    """Whether a taskset class is, or derives from, the class with this name in the package
    verifiers."""
    return any(
        base.__name__ == name and base.__module__.startswith("verifiers.")
        for base in taskset_type.__mro__
    )


def load_plugin(folder: Path, name: str, config: Mapping[str, Any]) -> Plugin:
    """Load the taskset `name` with its config.

    Args:
        folder: the environment's folder; relative paths in the config that name a file in it are
            resolved.
        name: the taskset's id.
        config: the taskset's config, as in environment.toml.

    Raises EnvProblem ENV_INVALID if there is no such taskset, if its config does not fit, or if it
    needs tools, a container, a harness of its own, or more than one agent.
    """
    loaders = verifiers_module("utils.loaders")
    taskset_class = _taskset_class(loaders, name)
    try:
        taskset_config = loaders.taskset_config_type(name).model_validate({**config, "id": name})
    except ValueError as error:
        raise unsupported(
            f"the config of the taskset {name!r}: {_first_fault(error)}",
            "Correct [adapter.config].",
        ) from None
    taskset_config = taskset_config.model_copy(update=_paths_in(folder, taskset_config))
    taskset = taskset_class(taskset_config)
    _check_class(loaders, name, taskset)
    env = _own_env(loaders, name, taskset_config)
    if env is not None:
        env.taskset = taskset
    return Plugin(name, taskset, taskset_class.task_type(), env)


def _taskset_class(loaders: Any, name: str) -> Any:
    """Return the subclass of `Taskset` that the module with the id `name` exports.

    `loaders` is the module `utils.loaders` of verifiers. Raises EnvProblem ENV_INVALID if the
    module exports none or is written for an older verifiers, and ModuleNotFoundError for a package
    that the module needs.
    """
    try:
        module_of_taskset = loaders.import_taskset(name)
    except ModuleNotFoundError as error:
        raise _not_importable(name, error) from error
    except (AttributeError, ImportError) as error:
        if _is_missing_in_verifiers(error):
            raise _of_older_api(name, str(error)) from error
        raise
    try:
        return loaders.taskset_class(name)
    except (AttributeError, TypeError, ValueError) as error:
        if hasattr(module_of_taskset, "load_environment"):
            raise _of_older_api(name, "it defines load_environment") from error
        raise unsupported(
            f"the module of {name!r} exports no taskset: {error}",
            "Export one subclass of vf.Taskset: __all__ = ['MyTaskset'].",
        ) from error


def _not_importable(name: str, error: ModuleNotFoundError) -> Exception:
    """Return the error that `error`, raised by the import of the taskset `name`, means: the taskset
    itself is missing, or a package that it needs, or it is written for an older verifiers."""
    cause = error.__cause__  # the loader of verifiers raises its own error from the first one
    missing = getattr(cause, "name", None) or error.name or ""
    # An id may be "owner/name@version"; its module has the name alone.
    name_and_version = name.rsplit("/", 1)[-1]
    module_name = name_and_version.split("@", 1)[0].replace("-", "_").lower()
    if missing.split(".")[0] == "verifiers" and isinstance(cause, ModuleNotFoundError):
        return _of_older_api(name, f"it imports {missing}, which is not there")
    if missing and missing.split(".")[-1] != module_name:
        return ModuleNotFoundError(f"No module named {missing!r}", name=missing)
    return unsupported(
        f"there is no taskset {name!r}: neither {module_name}.py in the folder nor a package "
        f"{module_name}",
        "Put the module beside environment.toml, or name its package in requirements.txt.",
    )


def _is_missing_in_verifiers(error: AttributeError | ImportError) -> bool:
    """Whether the name that `error` says is missing was looked for in a module of verifiers."""
    if isinstance(error, ImportError):
        module_name = error.name
    else:
        module_name = getattr(error.obj, "__name__", "")
    return (module_name or "").split(".")[0] == "verifiers"


def _of_older_api(name: str, reason: str) -> EnvProblem:
    """Return the error for an environment that was written for verifiers before 0.4."""
    version = importlib.import_module("verifiers").__version__
    return unsupported(
        f"{name!r} is written for the API of verifiers before 0.4 ({reason}): verifiers {version} "
        "has no load_environment, SingleTurnEnv or Rubric any more",
        "Move its rows into the load() of a vf.Taskset and its reward functions to @vf.reward, or "
        "into a SingleTurnEnv of envs (docs/environments.md).",
    )


def _check_class(loaders: Any, name: str, taskset: Any) -> None:
    """Raise EnvProblem ENV_INVALID for a taskset whose tasks need tools, a container or a harness,
    or change what the model reads.

    `loaders` is the module `utils.loaders` of verifiers, `name` the taskset's id.
    """
    config, task_type = taskset.config, type(taskset).task_type()
    is_nemo = derives_from(type(taskset), NEMO_GYM)
    if is_nemo and config.task.resources_url is None:
        raise unsupported(
            f"the taskset {name!r} starts its resource server from packages that it fetches",
            "Start the server yourself and name it: [adapter.config.task] resources_url, and "
            "network = true under [limits].",
        )
    if task_type.NEEDS_CONTAINER or derives_from(type(taskset), HARBOR):
        raise unsupported(f"{task_type.__name__} of {name!r} needs a container", NO_CONTAINER)
    servers = [*type(taskset).toolsets(config), *task_type.toolsets(config.task)]
    if servers and not is_nemo:  # NeMo Gym has tools per row; `check_task` looks at these
        names = ", ".join(sorted({type(server).__name__ for server in servers}))
        raise unsupported(f"the taskset {name!r} gives the model tools ({names})", AS_COMMAND)
    if loaders.default_harness_id(name) == name:
        raise unsupported(f"the taskset {name!r} brings a harness of its own", AS_COMMAND)
    probe = object.__new__(task_type)  # without a call of __init__, just to look at its methods
    decorated = verifiers_module("utils.decorators").discover_decorated
    hooks = [method.__name__ for method in decorated(probe, "intercept")]
    hooks += [method.__name__ for method in decorated(probe, "stop")]
    hooks += list(config.task.stops)
    if hooks:
        raise unsupported(
            f"{task_type.__name__} of {name!r} acts on requests and replies ({', '.join(hooks)})",
            "Leave out its @vf.intercept and @vf.stop, or score what they watch with @vf.reward.",
        )


def _own_env(loaders: Any, name: str, config: Any) -> Any:
    """Return the taskset's own `Env`, with an agent without tools; None if it only asks for one
    answer.

    `loaders` is the module `utils.loaders` of verifiers, `name` the taskset's id, `config` its
    checked config. Raises EnvProblem ENV_INVALID if the `Env` has several agents or a harness.
    """
    env_class = loaders.environment_class(name)
    single_agent_env = verifiers_module("envs.single_agent").SingleAgentEnv
    # NeMo Gym's `start` does nothing if the server's address is given, which is required here.
    is_nemo = derives_from(loaders.taskset_class(name), NEMO_GYM)
    hooks = ("run", "setup", "finalize") if is_nemo else ("run", "setup", "finalize", "start")
    # The default `Env` asks its agent once; so does one that overrides none of its hooks.
    if all(getattr(env_class, hook) is getattr(single_agent_env, hook) for hook in hooks):
        return None
    roles = verifiers_module("configs.agent").agent_config_fields(loaders.env_config_type(name)())
    if len(roles) != 1:
        raise unsupported(
            f"{env_class.__name__} of {name!r} has the agents {', '.join(roles)}; one is played "
            "here",
            AS_COMMAND,
        )
    (role, agent) = next(iter(roles.items()))
    if agent.harness is not None and agent.harness.id != "null":
        raise unsupported(
            f"the agent {role} of {env_class.__name__} runs the harness {agent.harness.id!r}",
            AS_COMMAND,
        )
    without_tools = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    fields = {"taskset": config.model_dump(mode="json"), role: without_tools}
    return env_class(loaders.resolve_env_config(fields))


def _paths_in(folder: Path, config: Any) -> dict[str, Path]:
    """Return field -> absolute path for the relative paths in a config (a pydantic model) that
    exist in the folder."""
    paths: dict[str, Path] = {}
    for name, value in config:  # (field, value) pairs
        is_relative_path = isinstance(value, Path) and not value.is_absolute()
        if is_relative_path and (folder / value).exists():
            paths[name] = folder / value
    return paths


def _first_fault(error: ValueError) -> str:
    """Return the first fault that pydantic reports, with its place, e.g. "task.url: Field
    required"."""
    faults = error.errors() if hasattr(error, "errors") else []  # type: ignore[attr-defined]
    if not faults:
        return str(error).splitlines()[0]
    place = ".".join(str(part) for part in faults[0]["loc"])
    return f"{place}: {faults[0]['msg']}" if place else str(faults[0]["msg"])
