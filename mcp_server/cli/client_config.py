"""Tells coding agents about the server: the entry in each one's project configuration file.

A file that exists is merged into, never overwritten: what others wrote stays, and an entry of ours
that differs stays too unless told otherwise. A file that cannot be parsed is left alone.
"""

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.agent_files import refuse_links
from engine.core.errors import UserError
from engine.core.files import write_text

NAME = "honesmith"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """How a client reaches the server: a command over stdio, or an address and a token."""

    argv: tuple[str, ...] = ()
    url: str = ""
    token: str = ""


@dataclass(frozen=True)
class Client:
    """Where one agent lists its MCP servers: file, key in it, and the form of an entry."""

    file: str
    key: str
    entry: Callable[[Launch], Entry]


def _stdio(launch: Launch) -> Entry:
    return {"command": launch.argv[0], "args": list(launch.argv[1:])}


def _headers(launch: Launch) -> Entry:
    return {"Authorization": f"Bearer {launch.token}"}


def _typed(launch: Launch) -> Entry:
    """The entry of Claude Code and VS Code, which names the transport."""
    if launch.url:
        return {"type": "http", "url": launch.url, "headers": _headers(launch)}
    return {"type": "stdio", **_stdio(launch)}


def _cursor(launch: Launch) -> Entry:
    return {"url": launch.url, "headers": _headers(launch)} if launch.url else _stdio(launch)


def _codex(launch: Launch) -> Entry:
    # A call may wait 50 s and Codex ends calls at 60 s by default.
    limits = {"startup_timeout_sec": 30, "tool_timeout_sec": 120}
    if launch.url:
        return {"url": launch.url, "http_headers": _headers(launch), **limits}
    return _stdio(launch) | limits


CLIENTS = {
    "claude": Client(".mcp.json", "mcpServers", _typed),
    "cursor": Client(".cursor/mcp.json", "mcpServers", _cursor),
    "codex": Client(".codex/config.toml", "mcp_servers", _codex),
    "vscode": Client(".vscode/mcp.json", "servers", _typed),
}


def serve_argv(project: Path, home: Path | None = None) -> tuple[str, ...]:
    """The command that starts this very installation's server for `project`."""
    script = shutil.which("honesmith", path=str(Path(sys.executable).parent))
    if "archive-v0" in Path(sys.executable).parts:  # uvx: its environment may be cleaned away
        start: tuple[str, ...] = ("uvx", "honesmith")
    elif script:
        start = (script,)
    else:
        start = (sys.executable, "-P", "-m", "mcp_server.cli")
    home_option = ("--home", str(home)) if home else ()
    return (*start, "serve", "--root", str(project), *home_option)


def write_entry(project: Path, client: str, launch: Launch, force: bool = False) -> str:
    """Bring one client's file up to date; says what was done: written, kept or unchanged.

    Raises UserError BAD_ARGUMENT when the file is there and cannot be parsed, or is a link.
    """
    spec = CLIENTS[client]
    path = project / spec.file
    refuse_links(project, spec.file)
    # A token in the file is a secret; a plain command may be shared with the project.
    mode = 0o600 if launch.token else 0o644
    change = _into_toml if path.suffix == ".toml" else _into_json
    text = path.read_text("utf-8") if path.exists() else ""
    new = change(path, text, spec.key, spec.entry(launch), force)
    if new is None:
        return "kept"
    if new == text:
        return "unchanged"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not launch.token:
        mode = path.stat().st_mode & 0o777
    write_text(path, new, mode=mode)
    os.chmod(path, mode)
    return "written"


def shown(client: str, launch: Launch) -> str:
    """The entry as a person would paste it."""
    spec = CLIENTS[client]
    entry = spec.entry(launch)
    if spec.file.endswith(".toml"):
        return _toml_table(spec.key, entry)
    return json.dumps({spec.key: {NAME: entry}}, indent=2)


def check_names(names: Sequence[str]) -> list[str]:
    """Client names from `a,b` and repeated options. Raises UserError BAD_ARGUMENT."""
    asked = [name.strip().lower() for part in names for name in part.split(",") if name.strip()]
    for name in asked:
        if name not in CLIENTS:
            raise UserError(
                "BAD_ARGUMENT",
                f"there is no agent {name!r}",
                hint=f"Available: {', '.join(CLIENTS)}.",
                field="agent",
            )
    return list(dict.fromkeys(asked))


def _into_json(path: Path, text: str, key: str, entry: Entry, force: bool) -> str | None:
    try:
        data = json.loads(text) if text.strip() else {}
        servers = data.setdefault(key, {})
        present = servers.get(NAME)
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if present == entry:
        return text
    if present is not None and not force:
        return None
    servers[NAME] = entry
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _into_toml(path: Path, text: str, key: str, entry: Entry, force: bool) -> str | None:
    try:
        present = tomllib.loads(text).get(key, {}).get(NAME)
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if present == entry:
        return text
    if present is not None:
        if force:
            raise UserError(
                "BAD_ARGUMENT",
                f"{path} already has [{key}.{NAME}] with other values",
                hint="Remove that table and run init again: TOML files are only added to.",
                field="agent",
            )
        return None
    before = text if not text or text.endswith("\n") else text + "\n"
    return before + ("\n" if before else "") + _toml_table(key, entry)


def _toml_table(key: str, entry: Entry) -> str:
    lines = [f"[{key}.{NAME}]"]
    for name, value in entry.items():
        if isinstance(value, dict):
            pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{name} = {{ {pairs} }}")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        "BAD_ARGUMENT",
        f"{path} cannot be read ({error}) and was left alone",
        hint="Correct it, or add the entry by hand: `honesmith init --print` shows it.",
        field="agent",
    )
