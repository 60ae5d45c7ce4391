"""`honesmith init`: entries for agents, merged into what is there."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from engine.core.errors import UserError
from mcp_server.cli.client_config import (
    CLIENTS,
    Launch,
    entry_text,
    parse_agents,
    serve_argv,
    write_entry,
)

STDIO = Launch(argv=("honesmith", "serve", "--root", "/p"))
HTTP = Launch(url="http://127.0.0.1:8321/mcp", token="secret-token-1234567890")


def entry_of(project: Path, client: str) -> dict:
    spec = CLIENTS[client]
    text = (project / spec.file).read_text("utf-8")
    parse = tomllib.loads if spec.file.endswith(".toml") else json.loads
    return parse(text)[spec.key]["honesmith"]


@pytest.mark.parametrize("client", CLIENTS)
def test_an_entry_starts_the_server(tmp_path: Path, client: str):
    assert write_entry(tmp_path, client, STDIO) == "written"
    entry = entry_of(tmp_path, client)
    assert entry["command"] == "honesmith"
    assert entry["args"] == ["serve", "--root", "/p"]
    assert write_entry(tmp_path, client, STDIO) == "unchanged"


@pytest.mark.parametrize("client", CLIENTS)
def test_an_http_entry_holds_the_token_and_is_private(tmp_path: Path, client: str):
    assert write_entry(tmp_path, client, HTTP) == "written"
    entry = entry_of(tmp_path, client)
    assert entry["url"] == HTTP.url
    headers = entry.get("headers") or entry["http_headers"]
    assert headers == {"Authorization": "Bearer secret-token-1234567890"}
    assert (tmp_path / CLIENTS[client].file).stat().st_mode & 0o777 == 0o600


def test_what_others_wrote_stays(tmp_path: Path):
    file = tmp_path / ".mcp.json"
    before = {"mcpServers": {"other": {"command": "x"}}, "more": [1]}
    file.write_text(json.dumps(before))
    write_entry(tmp_path, "claude", STDIO)
    after = json.loads(file.read_text())
    assert after["mcpServers"].pop("honesmith")
    assert after == before


def test_a_toml_file_is_only_added_to(tmp_path: Path):
    file = tmp_path / ".codex" / "config.toml"
    file.parent.mkdir()
    before = '# mine\nmodel = "x"\n\n[mcp_servers.other]\ncommand = "y"'
    file.write_text(before)
    write_entry(tmp_path, "codex", STDIO)
    assert file.read_text().startswith(before)
    servers = tomllib.loads(file.read_text())["mcp_servers"]
    assert servers["other"] == {"command": "y"}
    assert servers["honesmith"]["tool_timeout_sec"] > 60


@pytest.mark.parametrize("client", ["claude", "codex"])
def test_an_entry_of_ours_that_differs_is_kept(tmp_path: Path, client: str):
    write_entry(tmp_path, client, STDIO)
    before = (tmp_path / CLIENTS[client].file).read_bytes()
    assert write_entry(tmp_path, client, HTTP) == "kept"
    assert (tmp_path / CLIENTS[client].file).read_bytes() == before


def test_force_replaces_our_entry_in_json(tmp_path: Path):
    write_entry(tmp_path, "cursor", STDIO)
    assert write_entry(tmp_path, "cursor", HTTP, force=True) == "written"
    assert entry_of(tmp_path, "cursor")["url"] == HTTP.url


def test_force_does_not_rewrite_toml(tmp_path: Path):
    write_entry(tmp_path, "codex", STDIO)
    with pytest.raises(UserError, match="already has"):
        write_entry(tmp_path, "codex", HTTP, force=True)


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("claude", "{broken"),
        ("claude", "[1, 2]"),
        ("vscode", '// a comment\n{"servers": {}}'),
        ("cursor", '{"mcpServers": 3}'),
        ("codex", "= nonsense"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, client: str, text: str):
    file = tmp_path / CLIENTS[client].file
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        write_entry(tmp_path, client, STDIO)
    assert refusal.value.code == "BAD_ARGUMENT" and "--print" in refusal.value.hint
    assert file.read_text() == text


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_shown_is_what_would_be_written(tmp_path: Path, client: str):
    write_entry(tmp_path, client, STDIO)
    spec = CLIENTS[client]
    parse = tomllib.loads if spec.file.endswith(".toml") else json.loads
    assert parse(entry_text(client, STDIO))[spec.key]["honesmith"] == entry_of(tmp_path, client)


def test_agents_are_named_with_commas_or_repeatedly():
    assert parse_agents(["claude, Cursor", "claude", "codex"]) == ["claude", "cursor", "codex"]
    with pytest.raises(UserError, match="emacs"):
        parse_agents(["emacs"])


def test_the_command_starts_this_installation(tmp_path: Path):
    argv = serve_argv(tmp_path, tmp_path / "home")
    assert argv[0].startswith(str(Path(sys.executable).parent))
    assert argv[-5:] == ("serve", "--root", str(tmp_path), "--home", str(tmp_path / "home"))


def test_a_throwaway_environment_is_started_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/cache/uv/archive-v0/abc/bin/python")
    assert serve_argv(tmp_path)[:3] == ("uvx", "honesmith", "serve")
