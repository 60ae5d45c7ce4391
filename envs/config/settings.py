"""Read `environment.toml`: parameters, names of secrets, limits, the program that plays the
rollouts, the foreign format of the folder. Parameters come from nowhere else."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envs.config.adapters import KINDS, Adapter
from envs.config.endpoints import PREFIX, is_reference, judge_reference
from envs.config.problem import EnvProblem

FILE = "environment.toml"
MOST_DEV_SHARE = 0.5  # share of the rows; training keeps at least the other half
SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
# Names that would change how the env process itself runs.
RESERVED_SECRETS = ("PATH", "HOME", "TMPDIR", "LANG")
RESERVED_PREFIXES = ("PYTHON", "LD_", "HONESMITH_")


@dataclass(frozen=True)
class Limits:
    """The resources that an environment's process may use.

    Args:
        start_seconds: time to import the environment and call its `tasks()`.
        call_seconds: time for one call of `score`, `start` or `step`.
        memory_mb: address space in MiB.
        processes: processes and threads it may have at once.
        file_mb: the largest file it may write, in MiB.
        open_files: files open at once.
        network: whether it may use the network.
    """

    start_seconds: float = 60.0
    call_seconds: float = 10.0
    memory_mb: int = 2048
    processes: int = 64
    file_mb: int = 64
    open_files: int = 256
    network: bool = False


REWARDS = ("exit", "stdout", "file", "http")
SCORERS = ("exact", "number", "json", "contains")  # implemented in envs/scored_rows.py


@dataclass(frozen=True)
class Rollout:
    """A program that plays the tasks by itself and asks the model over HTTP (docs/gateway.md).

    Args:
        command: the program and its arguments, run in a private copy of the environment's folder.
        reward: where the reward is read from: `exit` (the exit status: 0 succeeded, 1 failed),
            `stdout` (the last line, as JSON), `file`, or `http` (a server is asked).
        reward_file: if `reward` is `file`, the path of that file in the private copy.
        reward_url: if `reward` is `http`, the address to which the rollout is posted.
        reward_seconds: time limit for the reply of that server.
        seconds: time limit for one rollout.
        at_once: the most rollouts that run at the same time.
    """

    command: tuple[str, ...]
    reward: str = "exit"
    reward_file: str = "reward.json"
    reward_url: str = ""
    reward_seconds: float = 30.0
    seconds: float = 60.0
    at_once: int = 8


@dataclass(frozen=True)
class Prompt:
    """Texts in which every task is asked, whatever its own are.

    Args:
        system: the system message; "" for none; None leaves each task its own.
        tools: by the name of a tool, what it says of itself.
        of: id of the version that is the same but for these texts; "" where none is known.
    """

    system: str | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    of: str = ""


_TABLES = tuple(
    "params secrets endpoints limits split command rollout scorer adapter prompt".split()
)
_ROLLOUT_BOUNDS = {
    "seconds": (0.5, 3600.0),
    "at_once": (1, 64),
    "reward_seconds": (0.1, 600.0),
}
BOUNDS: dict[str, tuple[float, float]] = {
    "start_seconds": (0.1, 3600),
    "call_seconds": (0.1, 3600),
    "memory_mb": (64, 1 << 20),
    "processes": (1, 4096),
    "file_mb": (1, 1 << 16),
    "open_files": (32, 65536),
}


@dataclass(frozen=True)
class EnvSettings:
    """The contents of `environment.toml`; every part is optional.

    Attributes:
        params: the parameters of the environment.
        secrets: the names of the secrets it receives as environment variables.
        endpoints: the models that it may ask by name, such as "openai:big" and "model:pebble":
            those that the file lists, and the judge of its rubric.toml.
        limits: the resources it may use.
        dev_share: the share of the training rows that a push moves to the split dev, if no row
            names that split.
        drop_leaks: whether a push leaves out training rows that teach a held-out or dev task, and
            repeated questions among those tasks.
        rollout: the program that plays the tasks; None if the environment's own code scores or
            answers.
        scorer: how rows of data files are scored by their answers, one of `SCORERS`; "" for not at
            all.
        adapter: the foreign format in which the folder is written; None for our own.
        prompt: texts in which every task is asked; None leaves all as they are.
    """

    params: dict[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    dev_share: float = 0.0
    drop_leaks: bool = False
    rollout: Rollout | None = None
    scorer: str = ""
    adapter: Adapter | None = None
    endpoints: tuple[str, ...] = ()
    prompt: Prompt | None = None

    @property
    def network(self) -> bool:
        """Whether this environment uses the network: its own process does, or a server is asked
        over HTTP for the rewards."""
        asks_reward = self.rollout is not None and self.rollout.reward == "http"
        return self.limits.network or asks_reward


def read_settings(folder: Path) -> EnvSettings:
    """Read and check `environment.toml` in `folder`. Without that file all settings are defaults.

    Raises:
        EnvProblem: ENV_INVALID if the file cannot be read, is not valid TOML, or holds an unknown
            name or a value out of bounds. The problem names the line if it is known.
    """
    path = folder / FILE
    try:
        text = path.read_bytes().decode("utf-8-sig")  # -sig: some editors write a byte order mark
    except FileNotFoundError:
        return EnvSettings(endpoints=_endpoints({}, "", folder))
    except (OSError, UnicodeDecodeError) as error:  # no access, or not UTF-8
        raise EnvProblem(
            "ENV_INVALID", f"{FILE} cannot be read as UTF-8: {error}", file=FILE
        ) from error
    data = _parse_toml(text)
    _refuse_unknown(data, _TABLES, text, kind="table")
    params = data.get("params", {})
    if not isinstance(params, dict):
        raise _problem_at(text, "params", "params is a table: [params]")
    split = _split_table(data, text)
    return EnvSettings(
        params,
        secrets=_secrets(data.get("secrets", []), text),
        limits=_limits(data, text),
        dev_share=float(split.get("dev", 0)),
        drop_leaks=split.get("drop_leaks", False),
        rollout=_rollout(data, text),
        scorer=_scorer(data, text),
        adapter=_adapter(data, text),
        endpoints=_endpoints(data, text, folder),
        prompt=_prompt(data, text),
    )


def _parse_toml(text: str) -> Mapping[str, Any]:
    """Parse the text of a TOML file. Raises EnvProblem ENV_INVALID if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    # ValueError: a number with too many digits for int(); RecursionError: nested too deep.
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        # tomllib gives the line only in its message: "... (at line 3, column 1)".
        line_match = re.search(r"line (\d+)", str(error))
        raise EnvProblem(
            "ENV_INVALID",
            f"{FILE} is not valid TOML: {error}",
            hint="Correct that line.",
            file=FILE,
            line=int(line_match.group(1)) if line_match else 0,
        ) from error


def _secrets(value: Any, text: str) -> tuple[str, ...]:
    """Return the names of secrets that the file lists, each once, in the order of the file.

    Args:
        value: the file's `secrets`: a list of names, or a table with that list as `names`.
        text: the whole file, to find the line of an error.

    Raises EnvProblem ENV_INVALID for a value of another form, for a malformed name, and for a name
    that would change how the env process runs, such as PATH.
    """
    names = value.get("names") if isinstance(value, dict) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _problem_at(
            text, "secrets", 'secrets is a list of names: secrets = ["JUDGE_API_KEY"]'
        )
    for name in names:
        if not SECRET_NAME.fullmatch(name):
            raise _problem_at(
                text, "secrets", f"{name!r} is no name of a secret (capitals, digits and _)"
            )
        if name in RESERVED_SECRETS or name.startswith(RESERVED_PREFIXES):
            raise _problem_at(
                text, "secrets", f"{name} cannot be a secret: it steers the env process"
            )
    return tuple(dict.fromkeys(names))  # each once, in order


def _endpoints(data: Mapping[str, Any], text: str, folder: Path) -> tuple[str, ...]:
    """Return the models that the file lists and that the folder's rubric.toml names as judge, each
    once.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID for a list of another form, and if a command plays the tasks.
    """
    listed = data.get("endpoints", [])
    if not isinstance(listed, list) or not all(is_reference(name) for name in listed):
        raise _problem_at(
            text, "endpoints", f'endpoints is a list of names: endpoints = ["{PREFIX}big"]'
        )
    if listed and "command" in data:
        raise _problem_at(text, "endpoints", "a command can ask no model but the one that it plays")
    names = list(listed)
    judge = judge_reference(folder)
    if judge:
        names.append(judge)
    return tuple(dict.fromkeys(names))  # each once, in order


def _limits(data: Mapping[str, Any], text: str) -> Limits:
    """Return the limits of the environment's process: those that the table [limits] sets, and
    defaults for the others.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID for an unknown name, a wrong type or a value outside `BOUNDS`.
    """
    table = data.get("limits", {})
    if not isinstance(table, dict):
        raise _problem_at(text, "limits", "limits is a table: [limits]")
    limit_names = tuple(field.name for field in fields(Limits))
    _refuse_unknown(table, limit_names, text, kind="limit")
    for name, value in table.items():
        if name != "network":
            default = getattr(Limits(), name)
            _check_number(f"limits.{name}", value, text, BOUNDS[name], default)
        elif not isinstance(value, bool):
            raise _problem_at(text, name, f"limits.network is true or false, got {value!r}")
    return Limits(**table)


def _split_table(data: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """Return the checked table [split]: `dev` is the share of the rows for that split, a number
    from 0 to 0.5; `drop_leaks` is true or false.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID for an unknown name or another value.
    """
    table = data.get("split", {})
    if not isinstance(table, dict):
        raise _problem_at(text, "split", "split is a table: [split]")
    _refuse_unknown(table, ("dev", "drop_leaks"), text, kind="split")
    if not isinstance(table.get("drop_leaks", False), bool):
        raise _problem_at(text, "drop_leaks", "split.drop_leaks is true or false")
    share = table.get("dev", 0)
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= MOST_DEV_SHARE:
        raise _problem_at(
            text, "dev", f"split.dev is a share of the rows from 0 to {MOST_DEV_SHARE}, got {share}"
        )
    return table


def _scorer(data: Mapping[str, Any], text: str) -> str:
    """Return the name of the scorer for data files; "" if the file names none.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID for an unknown name, or if there is also a `command`, which earns the rewards
    itself.
    """
    scorer = data.get("scorer", "")
    if not scorer:
        return ""
    if scorer not in SCORERS:
        raise _problem_at(text, "scorer", f"scorer is one of {', '.join(SCORERS)}, got {scorer!r}")
    if "command" in data:
        raise _problem_at(text, "scorer", "a command earns the rewards, so scorer does nothing")
    return scorer


def _rollout(data: Mapping[str, Any], text: str) -> Rollout | None:
    """Return the program that plays the tasks: the file's `command` with its settings from
    [rollout], or that of its adapter; None if there is neither.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID if the command is not a list of texts, if there is a table [rollout] without a
    command, or for an unknown name or wrong value in that table.
    """
    command, table = data.get("command"), data.get("rollout", {})
    if not isinstance(table, dict):
        raise _problem_at(text, "rollout", "rollout is a table: [rollout]")
    if command is None:
        return _adapter_rollout(data, table, text)
    _adapter(data, text)  # raises if the file has an adapter as well as a command
    if not _is_argv(command):
        raise _problem_at(
            text, "command", 'command is a program and its arguments: ["python3", "agent.py"]'
        )
    names = tuple(field.name for field in fields(Rollout) if field.name != "command")
    _refuse_unknown(table, names, text, kind="rollout setting")
    _check_rollout_numbers(table, text)
    if table.get("reward", "exit") not in REWARDS:
        message = f"rollout.reward is one of {', '.join(REWARDS)}, got {table['reward']!r}"
        raise _problem_at(text, "reward", message)
    _check_reward_file(table, text)
    _check_reward_url(data, table, text)
    return Rollout(tuple(command), **table)


def _adapter_rollout(
    data: Mapping[str, Any], table: Mapping[str, Any], text: str
) -> Rollout | None:
    """Return the program of the file's adapter, if that has one, else None.

    Called for a file without a `command`. `table` is [rollout] in `data` (the parsed file), {} if
    missing; `text` is the file's text, to find the line of an error. Raises EnvProblem ENV_INVALID
    for a wrong value in the table, or if there is such a table but no program.
    """
    adapter = _adapter(data, text)
    if adapter is not None and adapter.format.program:
        _refuse_unknown(table, ("seconds", "at_once"), text, kind="rollout setting")
        _check_rollout_numbers(table, text)
        return Rollout(adapter.command, reward="stdout", **table)
    if "rollout" in data:
        raise _problem_at(text, "rollout", "[rollout] is for a command, and there is none")
    return None


def _is_argv(command: object) -> bool:
    """Whether `command` is a program and its arguments in a form that the kernel accepts: a list of
    texts without NUL, the first not empty."""
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        return False
    names_program = bool(command) and command[0] != ""
    return names_program and not any("\0" in part for part in command)


def _check_rollout_numbers(table: Mapping[str, Any], text: str) -> None:
    """Raise EnvProblem ENV_INVALID if a number in [rollout] (seconds, at_once, reward_seconds) is
    out of bounds.

    `table` is that table, `text` the text of the whole file, to find the line.
    """
    for name in table.keys() & _ROLLOUT_BOUNDS.keys():
        # Its type says whether the number must be a whole one.
        default = getattr(Rollout(()), name)
        _check_number(f"rollout.{name}", table[name], text, _ROLLOUT_BOUNDS[name], default)


def _adapter(data: Mapping[str, Any], text: str) -> Adapter | None:
    """Return the adapter that the table [adapter] describes; None without that table.

    The adapter's options are not checked here, but by the module that reads its format. `data` is
    the parsed file, `text` its text, to find the line of an error. Raises EnvProblem ENV_INVALID
    for an unknown kind, or if the file also has a `command` or a `scorer`.
    """
    table = data.get("adapter")
    if table is None:
        return None
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise _problem_at(text, "adapter", 'adapter is a table with a kind: kind = "skyrl-gym"')
    kind = table["kind"]
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        suggestion = f"; did you mean {close[0]}?" if close else ""
        message = f"unknown kind of adapter {kind!r}{suggestion}"
        raise _problem_at(text, "kind", message, ", ".join(KINDS))
    for name in ("command", "scorer"):
        if name in data:
            raise _problem_at(text, name, f"a {name} is for environments without an adapter")
    return Adapter(kind, {name: value for name, value in table.items() if name != "kind"})


def _prompt(data: Mapping[str, Any], text: str) -> Prompt | None:
    """Return the texts of the table [prompt], in which every task is asked; None without the table.

    `data` is the parsed file, `text` its text, to find the line of an error. Raises EnvProblem
    ENV_INVALID for an unknown name or a value that is no text, and if a command plays the tasks,
    which writes its prompts itself.
    """
    table = data.get("prompt")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise _problem_at(text, "prompt", "prompt is a table: [prompt]")
    _refuse_unknown(table, ("system", "tools", "of"), text, kind="text")
    if _rollout(data, text) is not None:
        raise _problem_at(text, "prompt", "a command writes its prompts itself")
    tools = table.get("tools", {})  # name of a tool -> its description
    has_texts = isinstance(tools, dict) and all(isinstance(value, str) for value in tools.values())
    if not has_texts:
        raise _problem_at(text, "tools", 'prompt.tools is a table: get_weather = "Tells ..."')
    for name in ("system", "of"):
        if not isinstance(table.get(name, ""), str):
            raise _problem_at(text, name, f"prompt.{name} is a text")
    return Prompt(table.get("system"), tools, table.get("of", ""))


def _check_reward_file(table: Mapping[str, Any], text: str) -> None:
    """Raise EnvProblem ENV_INVALID if [rollout] (`table`) names a `reward_file` that is not a path
    inside the environment's folder, or names one although the reward is not read from a file.

    `text` is the text of the whole file, to find the line of the error.
    """
    if "reward_file" not in table:
        return
    path = table["reward_file"]
    parts = path.split("/") if isinstance(path, str) else [""]  # [""]: refused below
    # An empty part: the path begins with "/" (so it is absolute) or has "//".
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        message = f"rollout.reward_file is a path in the environment's folder, got {path!r}"
        raise _problem_at(text, "reward_file", message)
    if table.get("reward") != "file":
        message = 'rollout.reward_file is read with reward = "file" alone'
        raise _problem_at(text, "reward_file", message)


def _check_reward_url(data: Mapping[str, Any], table: Mapping[str, Any], text: str) -> None:
    """Raise EnvProblem ENV_INVALID if the settings of a reward server in [rollout] do not fit.

    With reward = "http" there must be an address of the server, and the program must have no
    network: it could then answer in the server's place. With another reward, no setting of the
    server may be there. `data` is the parsed file, `table` its [rollout], `text` its text, to find
    the line of an error.
    """
    if table.get("reward") != "http":
        for name in ("reward_url", "reward_seconds"):
            if name in table:
                raise _problem_at(text, name, f'rollout.{name} is for reward = "http" alone')
        return
    url = table.get("reward_url")
    if not _is_address(url):
        message = (
            'reward = "http" asks reward_url, an http:// or https:// address without a user: '
            f'reward_url = "http://127.0.0.1:9000/reward"; got {url!r}'
        )
        faulty_key = "reward_url" if "reward_url" in table else "reward"
        raise _problem_at(text, faulty_key, message)
    limits = data.get("limits")
    has_network = isinstance(limits, dict) and limits.get("network") is True
    if has_network:
        message = (
            'reward = "http" and network = true: a program with a network could answer in the '
            "place of the reward server; leave network out (the server is asked without it)"
        )
        raise _problem_at(text, "network", message)


def _is_address(url: object) -> bool:
    """Whether a value is an http(s) address with a host, without a user or a fragment."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[\x21-\x7e]{1,2000}", url):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port  # None if the address names none
    except ValueError:  # a port that is no number
        return False
    return bool(parts.hostname) and not parts.username and not parts.fragment and port != 0


def _check_number(
    name: str, value: Any, text: str, bounds: tuple[float, float], default: float
) -> None:
    """Raise EnvProblem ENV_INVALID unless `value` is a number within `bounds`.

    It must be a whole number if `default` is an int. `name` is "table.setting", e.g.
    "limits.memory_mb"; `text` is the whole file, to find the line.
    """
    low, high = bounds
    is_integer = isinstance(default, int)
    accepted_types = int if is_integer else int | float
    # A bool is an int in Python, so it has to be refused separately.
    is_number = isinstance(value, accepted_types) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        expected = "a whole number" if is_integer else "a number"
        message = f"{name} is {expected} from {low:g} to {high:g}, got {value}"
        raise _problem_at(text, name.partition(".")[2], message)


def _refuse_unknown(
    table: Mapping[str, Any], allowed: tuple[str, ...], text: str, kind: str
) -> None:
    """Raise EnvProblem ENV_INVALID for the first name in `table` that is not in `allowed`.

    The message suggests an allowed name that is similar.

    Args:
        table: the whole file or one of its tables, as a dict.
        allowed: the names that may occur in it.
        text: the whole file, to find the line of an error.
        kind: what the names are, for the message, e.g. "table" or "limit".
    """
    for name in table:
        if name not in allowed:
            close_names = difflib.get_close_matches(name, allowed, n=1)
            suggestion = f"; did you mean {close_names[0]}?" if close_names else ""
            raise _problem_at(
                text, name, f"unknown {kind} {name!r}{suggestion}", ", ".join(allowed)
            )


def _problem_at(text: str, key: str, message: str, allowed: str = "") -> EnvProblem:
    """Return an EnvProblem ENV_INVALID that points to the line of environment.toml that defines
    `key`, the first if several do.

    Args:
        text: the whole file. If no line of it defines `key`, the error has no line.
        key: the name of a table or a setting.
        message: what is wrong.
        allowed: the allowed names, for the hint; "" for a general hint.
    """
    # A table header such as [key] or [key.sub], or an assignment such as key = or key.sub =.
    definition = re.compile(rf"^\s*(\[{re.escape(key)}[\].]|\"?{re.escape(key)}\"?\s*[=.])")
    line = 0  # the error has no line
    for number, line_text in enumerate(text.splitlines(), 1):
        if definition.match(line_text):
            line = number
            break
    hint = f"Known here: {allowed}." if allowed else "Correct environment.toml."
    return EnvProblem("ENV_INVALID", message, hint=hint, file=FILE, line=line)
