"""`environment.toml`: parameters, secrets by name, limits. Params come from nowhere else."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from envs.config.problem import EnvProblem

FILE = "environment.toml"
SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
# Names that would change how the env process itself runs.
RESERVED_SECRETS = ("PATH", "HOME", "TMPDIR", "LANG")
RESERVED_PREFIXES = ("PYTHON", "LD_", "HONESMITH_")


@dataclass(frozen=True)
class Limits:
    """What an environment's process may use.

    Args:
        start_seconds: for importing it and for `tasks()`.
        call_seconds: for one `score`, `start` or `step`.
        memory_mb: address space in MiB.
        processes: processes and threads it may hold at once.
        file_mb: the largest file it may write, in MiB.
        open_files: files open at once.
        network: whether it may reach the network.
    """

    start_seconds: float = 60.0
    call_seconds: float = 10.0
    memory_mb: int = 2048
    processes: int = 64
    file_mb: int = 64
    open_files: int = 256
    network: bool = False


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
    """The contents of `environment.toml`; all of it is optional."""

    params: dict[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


def read_settings(folder: Path) -> EnvSettings:
    """The settings of the environment in `folder`; defaults where it has no file.

    Raises EnvProblem with the line where the file can say one.
    """
    path = folder / FILE
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return EnvSettings()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvProblem(
            "ENV_INVALID", f"{FILE} cannot be read as UTF-8: {error}", file=FILE
        ) from error
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        match = re.search(r"line (\d+)", str(error))
        raise EnvProblem(
            "ENV_INVALID",
            f"{FILE} is not valid TOML: {error}",
            hint="Correct that line.",
            file=FILE,
            line=int(match.group(1)) if match else 0,
        ) from error
    _known(data, ("params", "secrets", "limits"), text, "table")
    params = data.get("params", {})
    if not isinstance(params, dict):
        raise _problem_at(text, "params", "params is a table: [params]")
    return EnvSettings(params, _secrets(data.get("secrets", []), text), _limits(data, text))


def _secrets(value: Any, text: str) -> tuple[str, ...]:
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
    return tuple(dict.fromkeys(names))


def _limits(data: Mapping[str, Any], text: str) -> Limits:
    given = data.get("limits", {})
    if not isinstance(given, dict):
        raise _problem_at(text, "limits", "limits is a table: [limits]")
    _known(given, tuple(f.name for f in fields(Limits)), text, "limit")
    for name, value in given.items():
        if name == "network":
            if not isinstance(value, bool):
                raise _problem_at(text, name, f"limits.network is true or false, got {value!r}")
            continue
        low, high = BOUNDS[name]
        whole = isinstance(getattr(Limits(), name), int)
        kinds = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "a whole number" if whole else "a number"
            raise _problem_at(
                text, name, f"limits.{name} is {what} from {low:g} to {high:g}, got {value}"
            )
    return Limits(**given)


def _known(given: Mapping[str, Any], allowed: tuple[str, ...], text: str, what: str) -> None:
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise _problem_at(text, name, f"unknown {what} {name!r}{meant}", ", ".join(allowed))


def _problem_at(text: str, key: str, message: str, allowed: str = "") -> EnvProblem:
    """A problem at the first line that names `key`."""
    pattern = re.compile(rf"^\s*(\[{re.escape(key)}[\].]|\"?{re.escape(key)}\"?\s*[=.])")
    lines = text.splitlines()
    line = next((n for n, row in enumerate(lines, 1) if pattern.match(row)), 0)
    hint = f"Known here: {allowed}." if allowed else "Correct environment.toml."
    return EnvProblem("ENV_INVALID", message, hint=hint, file=FILE, line=line)
