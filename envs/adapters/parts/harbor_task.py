"""Reads a Harbor task: a folder with task.toml, instruction.md, environment/ and tests/test.sh.

What a rollout here does not do is refused by its name, so that no task is scored in a place that it
was not written for.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.config.adapters import LOCAL
from envs.json_types import JsonObject

TASK_FILE, INSTRUCTION, VERIFIER = "task.toml", "instruction.md", "tests/test.sh"
SOLUTION = "solution/solve.sh"
DOCKERFILE = "environment/Dockerfile"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
# Providers whose keys a task must not get: whoever has one can rent what he likes.
KEYS = ("DAYTONA_API_KEY", "E2B_API_KEY", "DOCKER_HOST", "CONTAINER_HOST")
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)i?B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "M": 1, "": 1, "G": 1024, "T": 1024 * 1024}


class TaskRefused(ValueError):
    """A task cannot be played here; the text says why and what to do."""


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        tasks: the folder with the folders of the tasks.
        size: only the first so many tasks, by their names; 0 for all.
        success_reward: the reward from which a rollout counts as solved.
        reward_key: the entry of reward.json that is the reward; the others are metrics.
        commands: how many commands the model may run.
        agent_seconds: time for the model and its commands; 0 for what [rollout] seconds leave. A
            task's own limit holds too.
        command_seconds: time for one command.
        verifier_seconds: time for the tests; a shorter limit of the task holds.
        calls: how the model runs a command: "tool" calls, or a "block" of Markdown for models whose
            chat template knows no tools.
        instructions: the system message, in place of ours.
        agent: who plays: the "model", the task's own "solution", or "none", who does nothing.
        sandbox: where it is played: `provider` and its options.
    """

    tasks: str = "tasks"
    size: int = 0
    success_reward: float = 1.0
    reward_key: str = "reward"
    commands: int = 20
    agent_seconds: float = 0.0
    command_seconds: float = 30.0
    verifier_seconds: float = 20.0
    calls: str = "tool"
    instructions: str = ""
    agent: str = "model"
    sandbox: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class HarborTask:
    """One task.

    Attributes:
        folder: its folder.
        instruction: what the model is asked.
        image: its container image, "" for none.
        workdir: the folder in which commands run; "" for that of the image.
        cpus, memory_mb, disk_mb: what it asks for, 0 for nothing.
        network: whether it says that it needs the internet.
        agent_seconds, verifier_seconds: its own time limits; 0 for none.
        variables, verifier_variables: environment variables of its commands and of its tests, as
            templates such as "${KEY:-none}".
        about: its [metadata].
    """

    folder: Path
    instruction: str
    image: str = ""
    workdir: str = ""
    cpus: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    network: bool = False
    agent_seconds: float = 0.0
    verifier_seconds: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    about: JsonObject = field(default_factory=dict)

    def files(self, part: str) -> Iterable[tuple[str, bytes]]:
        """Yield (path below `part`, content) of every file of one of its folders."""
        root = self.folder / part
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path.read_bytes()

    @property
    def environment_files(self) -> list[tuple[str, bytes]]:
        """The files of environment/ that are put into the working folder: all of them where the
        task names an image, none where a Dockerfile says what becomes of them."""
        if (self.folder / DOCKERFILE).is_file():
            return []
        return list(self.files("environment"))


def task_folders(root: Path) -> list[Path]:
    """Return the folders of all tasks below `root`, sorted by name."""
    return sorted(path.parent for path in root.rglob(TASK_FILE))


def read_task(folder: Path, sandbox: JsonObject, secrets: Iterable[str]) -> HarborTask:
    """Read the task in `folder`.

    Args:
        folder: the task's folder.
        sandbox: the table [adapter.sandbox], which says where it is to be played.
        secrets: the names of the environment's secrets, which its variables may name.

    Raises TaskRefused if it has another form, or needs what is not done here.
    """
    name = folder.name
    try:
        data = tomllib.loads((folder / TASK_FILE).read_text("utf-8"))
        instruction = (folder / INSTRUCTION).read_text("utf-8").strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no TOML
        raise TaskRefused(f"task {name} cannot be read: {error}") from error
    environment, verifier = _table(data, "environment", name), _table(data, "verifier", name)
    agent = _table(data, "agent", name)
    _refuse_unsupported(folder, data, sandbox)
    task = HarborTask(
        folder,
        instruction,
        image=str(sandbox.get("image") or environment.get("docker_image") or ""),
        workdir=str(environment.get("workdir") or ""),
        cpus=_whole(environment.get("cpus"), f"{name}: cpus"),
        memory_mb=_megabytes(environment, "memory", name),
        disk_mb=_megabytes(environment, "storage", name),
        network=_needs_network(agent) or _needs_network(environment),
        agent_seconds=_seconds(agent, name),
        verifier_seconds=_seconds(verifier, name),
        variables=_variables(environment, name, secrets),
        verifier_variables=_variables(verifier, name, secrets),
        about=_table(data, "metadata", name),
    )
    _check_place(task, sandbox)
    return task


def filled_in(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with the values of the secrets that they name."""

    def value_of(match: "re.Match[str]") -> str:
        """Return the secret's value, or the default behind ":-"."""
        return os.environ.get(match[1]) or match[2] or ""

    return {name: _TEMPLATE.sub(value_of, text) for name, text in variables.items()}


def _refuse_unsupported(folder: Path, data: JsonObject, sandbox: JsonObject) -> None:
    """Raise TaskRefused for what a task may say in Harbor and no rollout here does."""
    name = folder.name
    environment, verifier = _table(data, "environment", name), _table(data, "verifier", name)
    agent = _table(data, "agent", name)
    compose = [file for file in COMPOSE if (folder / "environment" / file).is_file()]
    separate = verifier.get("environment_mode") == "separate" or "environment" in verifier
    hosts = (environment.get("allowed_hosts"), agent.get("allowed_hosts"))
    reasons = {
        "its steps: a rollout plays one": bool(data.get("steps")),
        f"environment/{compose[0] if compose else ''}: services beside the sandbox": bool(compose),
        "its MCP servers": bool(environment.get("mcp_servers")),
        "skills_dir": bool(environment.get("skills_dir")),
        "its healthcheck": bool(environment.get("healthcheck")),
        "GPUs": bool(environment.get("gpus") or environment.get("gpu_types")),
        "another system than Linux": str(environment.get("os") or "linux").lower() != "linux",
        "a verifier in a box of its own": separate,
        "its collect hooks": bool(verifier.get("collect")),
        "commands of another user": bool(agent.get("user") or verifier.get("user")),
        "a list of allowed hosts": any(hosts) or "allowlist" in _modes(data),
    }
    for reason, holds in reasons.items():
        if holds:
            raise TaskRefused(
                f"task {name} needs what is not supported: {reason}. Leave it out of the folder "
                "of the tasks, or play it with Harbor's own program as a command (docs/gateway.md)."
            )
    if not (folder / VERIFIER).is_file():
        raise TaskRefused(f"task {name} has no {VERIFIER}, which earns its reward")
    if (folder / DOCKERFILE).is_file() and not (
        environment.get("docker_image") or sandbox.get("image") or sandbox.get("snapshot")
    ):
        raise TaskRefused(
            f"task {name} has a {DOCKERFILE} and names no image; no provider here builds one. "
            "Build and publish it, and name it: [environment] docker_image in its task.toml, or "
            "[adapter.sandbox] image for all tasks."
        )


def _check_place(task: HarborTask, sandbox: JsonObject) -> None:
    """Raise TaskRefused if the provider cannot be the place of a task."""
    name, provider = task.folder.name, sandbox.get("provider", LOCAL)
    if provider == LOCAL:
        if (task.folder / DOCKERFILE).is_file():
            raise TaskRefused(
                f"task {name} has a {DOCKERFILE}, and provider local has no images: name another "
                "provider, or put what the task needs into environment/ without it"
            )
        if task.network:
            raise TaskRefused(f"task {name} needs the internet, which provider local has not")
        if task.workdir not in ("", "/app"):
            raise TaskRefused(f"task {name} works in {task.workdir}; provider local has /app alone")
    elif provider == "docker" and not task.image:
        raise TaskRefused(f"task {name} names no image: [environment] docker_image")


def _modes(data: JsonObject) -> set[str]:
    """Return what the task's tables say of the network: "public", "no-network", "allowlist"."""
    tables = (data.get("environment"), data.get("agent"), data.get("verifier"))
    return {str(table.get("network_mode")) for table in tables if isinstance(table, dict)}


def _needs_network(table: JsonObject) -> bool:
    """Whether a table says that the internet is needed. Silence is no: the model's commands reach
    nothing that nobody asked for."""
    return table.get("network_mode") == "public" or table.get("allow_internet") is True


def _table(data: JsonObject, key: str, name: str) -> JsonObject:
    """Return a table of task.toml, {} if it is missing. Raises TaskRefused for another value."""
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise TaskRefused(f"task {name}: {key} in {TASK_FILE} is a table, got {value!r}")
    return value


def _seconds(table: JsonObject, name: str) -> float:
    """Return the table's `timeout_sec`, 0 if it has none."""
    value = table.get("timeout_sec", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise TaskRefused(f"task {name}: timeout_sec is a number of seconds, got {value!r}")
    return float(value)


def _whole(value: Any, place: str) -> int:
    """Return a count, rounded up; 0 for none."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise TaskRefused(f"task {place} is a number, got {value!r}")
    return int(-(-value // 1))


def _megabytes(table: JsonObject, what: str, name: str) -> int:
    """Return a size in MiB: `<what>_mb`, or `<what>` with a unit, such as "2G"; 0 for none."""
    if f"{what}_mb" in table:
        return _whole(table[f"{what}_mb"], f"{name}: {what}_mb")
    if what not in table:
        return 0
    match = _SIZE.fullmatch(str(table[what]).strip())
    if match is None:
        raise TaskRefused(f'task {name}: {what} is a size such as "2G", got {table[what]!r}')
    return int(int(match[1]) * _MB[match[2].upper()])


def _variables(table: JsonObject, name: str, secrets: Iterable[str]) -> dict[str, str]:
    """Return the table's `env`. Raises TaskRefused if it names a variable that is no secret of the
    environment and has no default, or the key of a provider."""
    variables = table.get("env", {})
    if not isinstance(variables, dict):
        raise TaskRefused(f"task {name}: env is a table of texts")
    allowed = set(secrets) - set(KEYS)
    for variable, text in variables.items():
        for match in _TEMPLATE.finditer(str(text)):
            if match[1] in KEYS or (match[1] not in allowed and match[2] is None):
                raise TaskRefused(
                    f"task {name}: {variable} needs {match[1]}, which the environment does not "
                    f'give: secrets = ["{match[1]}"] in environment.toml (no provider\'s key)'
                )
            if "$" in (match[2] or ""):  # it would be filled in once more
                raise TaskRefused(f"task {name}: the default of {match[1]} names a variable")
            if match[1] not in allowed:  # its default holds, whatever variables there are
                text = text.replace(match[0], match[2])
        variables = {**variables, variable: str(text)}
    return variables
