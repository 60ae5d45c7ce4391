"""Tells coding agents about the server, by an entry in the configuration file of each agent.

If the file exists, everything else in it stays. An existing entry of our server with other values
is replaced only with `force`. A file that cannot be parsed is not touched.
"""

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
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
    """How a client reaches the server: by a command over stdio, or by an address and a token.

    Attributes:
        argv: the command with its arguments; empty for an address.
        url: the address; "" for a command.
        token: the bearer token for the address.
    """

    argv: tuple[str, ...] = ()
    url: str = ""
    token: str = ""


@dataclass(frozen=True)
class Client:
    """How one agent is told about MCP servers.

    Attributes:
        file: its configuration file, relative to the project.
        key: name of the table of servers in that file.
        entry: makes the entry of our server.
    """

    file: str
    key: str
    entry: Callable[[Launch], Entry]


def _command_entry(launch: Launch) -> Entry:
    """Make the fields of an entry for a client that starts the server by the command in
    `launch.argv` (which must not be empty) and talks to it over stdio."""
    program, *arguments = launch.argv
    return {"command": program, "args": arguments}


def _headers(launch: Launch) -> Entry:
    """Make the HTTP headers in which a client sends its bearer token."""
    return {"Authorization": f"Bearer {launch.token}"}


def _typed_entry(launch: Launch) -> Entry:
    """Make the entry for Claude Code and VS Code, which must name the transport ("type")."""
    if launch.url:
        return {"type": "http", "url": launch.url, "headers": _headers(launch)}
    return {"type": "stdio", **_command_entry(launch)}


def _cursor_entry(launch: Launch) -> Entry:
    """Make the entry for Cursor, which infers the transport from the fields."""
    if launch.url:
        return {"url": launch.url, "headers": _headers(launch)}
    return _command_entry(launch)


def _codex_entry(launch: Launch) -> Entry:
    """Make the entry for Codex, with longer time limits than the defaults of Codex."""
    # By default Codex ends a call after 60 s. `wait_run` may take 50 s, which leaves too little.
    limits = {"startup_timeout_sec": 30, "tool_timeout_sec": 120}
    if launch.url:
        return {"url": launch.url, "http_headers": _headers(launch), **limits}
    return _command_entry(launch) | limits


CLIENTS = {
    "claude": Client(".mcp.json", "mcpServers", _typed_entry),
    "cursor": Client(".cursor/mcp.json", "mcpServers", _cursor_entry),
    "codex": Client(".codex/config.toml", "mcp_servers", _codex_entry),
    "vscode": Client(".vscode/mcp.json", "servers", _typed_entry),
}


def serve_argv(project: Path, home: Path | None = None) -> tuple[str, ...]:
    """Return the command, as a tuple of words, that starts the server of this installation for
    `project`.

    If `home` is None, the command names no home, and the server takes the one in the variable
    HONESMITH_HOME, or the default.
    """
    installed_script = shutil.which("honesmith", path=str(Path(sys.executable).parent))
    # uvx runs this program from a cache folder "archive-v0", which it may delete later. So the
    # command names uvx and not the path of this program.
    if "archive-v0" in Path(sys.executable).parts:
        command: tuple[str, ...] = ("uvx", "honesmith")
    elif installed_script:
        command = (installed_script,)
    else:
        # -P: modules in the folder where the agent starts the server must not replace ours.
        command = (sys.executable, "-P", "-m", "mcp_server.cli")
    home_option = ("--home", str(home)) if home else ()
    return (*command, "serve", "--root", str(project), *home_option)


def write_entries(
    project: Path, clients: Iterable[str], launch: Launch, force: bool
) -> dict[str, str]:
    """Add or update the entry of our server in the file of each of `clients`.

    Returns file -> "written", "unchanged", or "kept" if the file has another entry and `force` is
    off.
    """
    return {CLIENTS[client].file: write_entry(project, client, launch, force) for client in clients}


def write_entry(project: Path, client: str, launch: Launch, force: bool = False) -> str:
    """Add or update the entry of our server in one client's file.

    Args:
        project: the folder that holds the file.
        client: a name in `CLIENTS`.
        launch: how the client reaches the server.
        force: replace an entry of our server that has other values.

    Returns:
        "written"; "unchanged" if the file already has this entry; "kept" if the file has an entry
        with other values and `force` is off.

    Raises:
        UserError: BAD_ARGUMENT if the file cannot be parsed, is a link, or is TOML with an entry
            that would have to be replaced.
    """
    spec = CLIENTS[client]
    path = project / spec.file
    refuse_links(project, spec.file)
    add_entry = _into_toml if path.suffix == ".toml" else _into_json
    text = path.read_text("utf-8") if path.exists() else ""
    new_text = add_entry(path, text, spec.key, spec.entry(launch), force)
    if new_text is None:
        return "kept"
    if new_text == text:
        return "unchanged"
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = _file_mode(path, holds_token=bool(launch.token))
    write_text(path, new_text, mode=mode)
    os.chmod(path, mode)  # the umask may have removed bits from the mode that `write_text` set
    return "written"


def _file_mode(path: Path, holds_token: bool) -> int:
    """Return the permission bits for a file that is written. A file with a token may be read only
    by its owner (0600). Any other file keeps its bits; a new one gets 0644."""
    if holds_token:
        return 0o600
    if not path.exists():
        return 0o644
    return path.stat().st_mode & 0o777  # without the bits that say what kind of file it is


def entry_text(client: str, launch: Launch) -> str:
    """Return the entry of our server as the text that a person can paste into the client's file."""
    spec = CLIENTS[client]
    entry = spec.entry(launch)
    if spec.file.endswith(".toml"):
        return _toml_table(spec.key, entry)
    return json.dumps({spec.key: {NAME: entry}}, indent=2)


def parse_agents(options: Sequence[str]) -> list[str]:
    """Return the names of clients in options such as "claude,cursor", in lower case, each once.

    Raises:
        UserError: BAD_ARGUMENT if an agent is unknown.
    """
    names = [name.strip().lower() for option in options for name in option.split(",")]
    agents = [name for name in names if name]  # extra commas give empty names, which are dropped
    for name in agents:
        if name not in CLIENTS:
            raise UserError(
                "BAD_ARGUMENT",
                f"there is no agent {name!r}",
                hint=f"Available: {', '.join(CLIENTS)}.",
                field="agent",
            )
    return list(dict.fromkeys(agents))  # each once, in order


def _into_json(path: Path, text: str, key: str, entry: Entry, force: bool) -> str | None:
    """Add the entry of our server to the text of a JSON file.

    Args:
        path: the file, for the error message.
        text: its present text; "" for a new file.
        key: name of the table of servers in the file.
        entry: the entry, which gets the name `NAME` in that table.
        force: replace an entry of that name that has other values.

    Returns:
        The new text; `text` itself if it already has the same entry; None if it has an entry of
        that name with other values and `force` is off.

    Raises:
        UserError: BAD_ARGUMENT if `text` is not JSON, or if the file or its table of servers is not
            a JSON object.
    """
    try:
        config = json.loads(text) if text.strip() else {}
        servers = config.setdefault(key, {})
        existing_entry = servers.get(NAME)
    # AttributeError: a list or text where an object should be. RecursionError: nested too deep.
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if existing_entry == entry:
        return text
    if existing_entry is not None and not force:
        return None
    servers[NAME] = entry
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _into_toml(path: Path, text: str, key: str, entry: Entry, force: bool) -> str | None:
    """Add the entry of our server at the end of the text of a TOML file, as a table.

    TOML is not rewritten, because that would lose its comments.

    Args:
        path: the file, for the error message.
        text: its present text; "" for a new file.
        key: name of the table of servers in the file; the entry becomes [key.NAME].
        entry: the entry.
        force: whether the caller wants an entry with other values to be replaced. That raises an
            error, because it would rewrite the file.

    Returns:
        The new text; `text` itself if it already has the same entry; None if it has an entry with
        other values and `force` is off.

    Raises:
        UserError: BAD_ARGUMENT if `text` is not TOML, or if `force` is on and the file has an entry
            with other values.
    """
    try:
        existing_entry = tomllib.loads(text).get(key, {}).get(NAME)
    # AttributeError: a value where a table should be. RecursionError: nested too deep.
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if existing_entry == entry:
        return text
    if existing_entry is not None:
        if not force:
            return None
        raise UserError(
            "BAD_ARGUMENT",
            f"{path} already has [{key}.{NAME}] with other values",
            hint="Remove that table and run init again: TOML files are only added to.",
            field="agent",
        )
    return _appended(text, _toml_table(key, entry))


def _appended(text: str, table: str) -> str:
    """Return the text of a TOML file with `table` added at the end, after an empty line."""
    if not text:
        return table
    end_of_line = "" if text.endswith("\n") else "\n"
    return f"{text}{end_of_line}\n{table}"


def _toml_table(key: str, entry: Entry) -> str:
    """Return the entry as a TOML table named [key.NAME]; inner objects become inline tables."""
    lines = [f"[{key}.{NAME}]"]
    # json.dumps can write the values, because texts, numbers and lists look the same in TOML.
    for name, value in entry.items():
        if isinstance(value, dict):
            fields = [f"{json.dumps(field)} = {json.dumps(value[field])}" for field in value]
            lines.append(f"{name} = {{ {', '.join(fields)} }}")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _unreadable(path: Path, error: Exception) -> UserError:
    """Make the BAD_ARGUMENT error for an agent's configuration file that cannot be parsed.

    `error` is what the parser raised; its text is part of the message.
    """
    return UserError(
        "BAD_ARGUMENT",
        f"{path} cannot be read ({error}) and was left alone",
        hint="Correct it, or add the entry by hand: `honesmith init --print` shows it.",
        field="agent",
    )
