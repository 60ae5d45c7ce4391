"""The audit log: one line for each call that changes something, however it ends."""

import json

import pytest
from http_server import client_of, listening
from mcp import Client

from engine.errors import UserError
from engine.run_dir import Home
from mcp_server import verbs
from mcp_server.app import build_server
from mcp_server.audit import digest
from mcp_server.bearer import load_token
from mcp_server.keys import add_key
from mcp_server.tools import LOOK, offered


def lines(home: Home) -> list[dict]:
    if not home.audit.exists():
        return []
    return [json.loads(line) for line in home.audit.read_text().splitlines()]


async def test_each_changing_tool_leaves_one_line_and_a_looking_one_none(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    samples = {"string": "x", "integer": 5, "number": 1.5, "boolean": True, "array": ["a"]}
    tools = offered(home, ())
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
