"""The audit log: one line for each call that changes something, however it ends."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from http_server import client_of, listening
from mcp import Client
from typer.main import get_command
from typer.testing import CliRunner

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.access.audit_log import digest
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import add_key
from mcp_server.api import audit_verbs, host_verbs, verbs
from mcp_server.cli.main import app
from mcp_server.protocol.app import build_server
from mcp_server.protocol.tools import LOOK, all_tools


def lines(home: Home) -> list[dict]:
    if not home.audit.exists():
        return []
    return [json.loads(line) for line in home.audit.read_text().splitlines()]


async def test_each_changing_tool_leaves_one_line_and_a_looking_one_none(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    samples = {"string": "x", "integer": 5, "number": 1.5, "boolean": True, "array": ["a"]}
    tools = all_tools(home, ())
    for tool in tools:
        monkeypatch.setattr(verbs, tool.name, lambda *a, **k: {"run_id": "r-1"})
    monkeypatch.setattr(verbs, "read_playbook", lambda *a: "prose")
    async with Client(build_server(home, [])) as client:
        for tool in tools:
            schema = tool.parameters
            given = {
                n: samples[schema["properties"][n]["type"]] for n in schema.get("required", [])
            }
            before = len(lines(home))
            assert not (await client.call_tool(tool.name, given)).is_error
            added = lines(home)[before:]
            if tool.annotations is LOOK:
                assert added == []
                continue
            (line,) = added
            assert line.pop("time") > 0
            assert line == {
                "who": "stdio",
                "via": "stdio",
                "tool": tool.name,
                "args": digest(given),
                "result": "ok",
                "run_id": "r-1",
            }
    assert home.audit.stat().st_mode & 0o777 == 0o600


async def test_a_refused_call_and_a_crash_are_recorded_with_their_code(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args, **kwargs):
        raise UserError("BUDGET", "too dear", hint="less")

    def crash(*args, **kwargs):
        raise RuntimeError("oops")

    monkeypatch.setattr(verbs, "submit_train", refuse)
    monkeypatch.setattr(verbs, "cancel_run", crash)
    async with Client(build_server(home, [])) as client:
        await client.call_tool("submit_train", {"env_id": "a"})
        await client.call_tool("submit_train", {"env_idd": "a"})
        await client.call_tool("cancel_run", {"run_id": "r"})
    async with Client(build_server(home, [], read_only=True)) as client:
        await client.call_tool("submit_train", {"env_id": "a"})
    assert [line["result"] for line in lines(home)] == [
        "BUDGET",
        "UNKNOWN_ARGUMENT",
        "INTERNAL",
        "READ_ONLY",
    ]


async def test_what_cannot_be_recorded_is_not_done(home: Home, monkeypatch: pytest.MonkeyPatch):
    home.audit.mkdir()
    done = []
    monkeypatch.setattr(verbs, "cancel_run", lambda *a, **k: done.append(a) or {})
    async with Client(build_server(home, [])) as client:
        result = await client.call_tool("cancel_run", {"run_id": "r"})
        looked = await client.call_tool("get_status", {})
    assert json.loads(result.content[0].text)["code"] == "HOME_UNUSABLE"
    assert done == [] and not looked.is_error


async def test_arguments_are_not_in_the_log(home: Home):
    async with Client(build_server(home, [])) as client:
        await client.call_tool("submit_train", {"env_id": "a", "note": "my-secret-plan"})
    assert "my-secret-plan" not in home.audit.read_text()


def test_the_digest_is_the_same_in_any_order_and_another_for_another_value():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})


@pytest.mark.timeout(60)
async def test_over_http_the_line_names_the_key(home: Home):
    _, token = add_key(home, "night-shift", ["train"])
    owner = load_token(home)
    async with listening(home) as url:
        for given in (token, owner):
            async with client_of(url, given) as client:
                await client.call_tool("cancel_run", {"run_id": "nobody"})
    assert [(line["who"], line["via"], line["result"]) for line in lines(home)] == [
        ("night-shift", "http", "RUN_NOT_FOUND"),
        ("owner", "http", "RUN_NOT_FOUND"),
    ]


# What a shell may type, and what stands for it in the log; "" for what only looks, or leaves
# nothing in the home but what is made from it at any time (a report, a page).
COMMANDS = {
    "train arith": "submit_train",
    "rerun r-1": "submit_train",
    "dry-run arith": "dry_run",
    "evaluate arith pebble": "evaluate",
    "curate r-1 --name best": "curate",
    "cancel r-1": "cancel_run",
    "pin r-1 20": "pin",
    "unpin r-1 20": "unpin",
    "deploy r-1": "deploy",
    "undeploy r-1": "deploy",
    "export r-1 out": "deploy",
    "chat r-1 hello": "chat",
    "env push .": "push_env",
    "env build .": "build_env",
    "env delete arith": "delete_env",
    "env seal arith": "seal_env",
    "env audit arith": "",
    "env audit arith --all": "audit_env",
    "judge calibrate rubric.toml gold.jsonl": "calibrate_judge",
    "runs delete r-1": "delete_run",
    "key add ci": "add_key",
    "key remove ci": "remove_key",
    "key rotate ci": "rotate_key",
    "key budget robots 5": "set_budget",
    "share arith": "share",
    "share": "",
    "runs priority r-1 high": "set_priority",
    "setup --vllm": "setup_vllm",
    "models add smollm2": "add_model",
    "models remove smollm2": "remove_model",
    "hosts add box": "add_host",
    "hosts setup box": "set_up_host",
    "hosts check box": "check_host",
    "hosts remove box": "remove_host",
    "hosts list": "",
    "models list": "",
    "models show pebble": "",
    "status": "",
    "runs": "",
    "estimate arith": "",
    "wait r-1 --timeout 1": "",
    "logs r-1": "",
    "rollouts r-1": "",
    "compare r-1 r-2": "",
    "diff r-1 r-2": "",
    "diagnose r-1": "",
    "verify r-1": "",
    "report r-1": "",
    "results r-1 --csv table.csv": "",
    "playbook": "",
    "ui": "",
    "env list": "",
    "env benchmarks": "",
    "env diff a b": "",
    "env pull a out": "",
    "env check .": "",
    "env new out": "",
    "data inspect rows.jsonl": "",
    "key list": "",
    "doctor": "",
    "init out": "",
}
VERBS = [
    name
    for name, made in inspect.getmembers(verbs, inspect.isfunction)
    if "home" in inspect.signature(made).parameters or name == "read_playbook"
]
SERVERS = {"serve", "demo"}  # what they do is called over MCP


def typed(*argv: str) -> Result:
    return CliRunner().invoke(app, [*argv, "--json"])


def test_every_command_has_its_place_here():
    def walk(command: Any, path: str) -> Iterator[str]:
        inner = getattr(command, "commands", {})
        yield from [path] if not inner else ()
        for name in inner:
            yield from walk(inner[name], f"{path} {name}".strip())

    named = {name for line in COMMANDS for name in (line.split()[0], " ".join(line.split()[:2]))}
    assert set(walk(get_command(app), "")) - SERVERS <= named


@pytest.mark.parametrize("line", COMMANDS)
def test_each_changing_command_leaves_one_line_and_a_looking_one_none(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
):
    monkeypatch.chdir(tmp_path)
    reply = {"summary": "s", "run_id": "r-1", "state": "done", "intact": True, "bad": 0}
    reply |= {"run_ids": ["r-1"], "bytes": 0, "models": []}
    for name in VERBS:
        monkeypatch.setattr(verbs, name, lambda *a, **k: dict(reply))
    for name in ("show_audit", "audit_env", "calibrate_judge"):
        monkeypatch.setattr(audit_verbs, name, lambda *a, **k: dict(reply))
    for name in ("add_host", "set_up_host", "check_host", "remove_host", "list_hosts"):
        monkeypatch.setattr(host_verbs, name, lambda *a, **k: dict(reply))
    monkeypatch.setattr(
        "engine.machine.install.vllm_env.setup_vllm", lambda home, again, say: {"summary": "s"}
    )
    monkeypatch.setattr("engine.runs.rerun.rerun_request", lambda home, run_id, changes: run_id)
    monkeypatch.setattr("engine.doctor.examine", lambda home: {"checks": [], "failed": False})
    monkeypatch.setattr(
        "mcp_server.cli.team.key_commands._remove_key", lambda home, name: {"key": name}
    )
    monkeypatch.setattr(
        "mcp_server.cli.team.key_commands._rotate_key", lambda home, name: {"key": name}
    )
    monkeypatch.setattr("mcp_server.access.sharing.share", lambda home, **given: {"summary": "s"})
    monkeypatch.setattr("engine.runs.lifecycle.set_priority", lambda home, *given: dict(reply))
    for name in ("add", "remove"):
        monkeypatch.setattr(f"engine.models.library.{name}", lambda home, **named: {"model": "m"})
    monkeypatch.setattr("engine.models.catalog.describe", lambda home, ref: {"model": ref})
    done = typed(*line.split())
    assert done.exit_code == 0, done.output
    if not COMMANDS[line]:
        assert lines(home) == []
        return
    (left,) = lines(home)
    assert left.pop("time") > 0 and len(left.pop("args")) == 64
    named = {"key": "ci"} if " " in line and line.startswith("key") else {"run_id": "r-1"}
    named = {} if line.startswith(("setup", "models", "key budget", "share")) else named
    about = {"who": "local", "via": "cli", "tool": COMMANDS[line], "result": "ok"}
    assert left == about | named
    assert home.audit.stat().st_mode & 0o777 == 0o600


def test_a_refused_command_is_recorded_and_one_that_cannot_be_is_not_done(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    assert typed("cancel", "nobody").exit_code == 2
    assert typed("key", "remove", "nobody").exit_code == 2
    assert [(line["tool"], line["result"]) for line in lines(home)] == [
        ("cancel_run", "RUN_NOT_FOUND"),
        ("remove_key", "BAD_ARGUMENT"),
    ]
    home.audit.unlink()
    home.audit.mkdir()
    done = []
    monkeypatch.setattr(verbs, "cancel_run", lambda *a, **k: done.append(a) or {})
    told = typed("cancel", "nobody")
    assert told.exit_code == 1 and json.loads(told.stdout)["code"] == "HOME_UNUSABLE"
    assert done == []
    assert typed("key", "add", "ci").exit_code == 1 and not home.keys.exists()


def test_a_command_and_a_call_of_the_same_arguments_have_the_same_digest(home: Home):
    typed("cancel", "nobody", "--reason", "why")
    assert lines(home)[0]["args"] == digest({"run_id": "nobody", "reason": "why"})


def test_no_token_is_in_the_log_of_the_command_that_makes_it(home: Home):
    token = json.loads(typed("key", "add", "ci").stdout)["token"]
    assert token not in home.audit.read_text()
    with pytest.raises(UserError, match="name='local'"):
        add_key(home, "local", ["read"])
