"""Which key may call what: every tool and every resource against every set of scopes."""

import json
from itertools import combinations
from typing import Any

import pytest
from http_server import client_of, listening
from mcp import MCPError

from engine.run_dir import Home
from mcp_server.bearer import load_token
from mcp_server.keys import SCOPES, add_key
from mcp_server.tools import LOOK, NEEDS, offered

SETS = [pick for size in (1, 2, 3) for pick in combinations(SCOPES, size)]
VALUES = {"string": "nobody", "integer": 1, "number": 1, "boolean": False, "array": ["nobody"]}


def arguments_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What a call of a tool must have, none of which exists."""
    return {name: VALUES[schema["properties"][name]["type"]] for name in schema.get("required", [])}


def code_of(result: Any) -> str:
    return json.loads(result.content[0].text)["code"] if result.is_error else ""


def test_every_tool_needs_a_scope_and_what_only_looks_needs_read(home: Home):
    tools = offered(home, ())
    assert set(NEEDS) == {tool.name for tool in tools}
    for tool in tools:
        assert (NEEDS[tool.name] == "read") == (tool.annotations is LOOK), tool.name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_key_calls_exactly_what_its_scopes_allow(home: Home, mode: str):
    tokens = {pick: add_key(home, "-".join(pick), pick)[1] for pick in SETS}
    load_token(home)
    async with listening(home) as url:
        for pick, token in tokens.items():
            async with client_of(url, token, mode) as client:
                for tool in (await client.list_tools()).tools:
                    result = await client.call_tool(tool.name, arguments_of(tool.input_schema))
                    forbidden = code_of(result) == "FORBIDDEN"
                    assert forbidden == (NEEDS[tool.name] not in pick), (pick, tool.name)
                    if forbidden:
                        said = json.loads(result.content[0].text)
                        assert NEEDS[tool.name] in said["message"] and "key add" in said["hint"]
                for uri in ("train://hardware", "playbook://TRAINING.md", "run://nobody/config"):
                    try:
                        await client.read_resource(uri)
                        told = ""
                    except MCPError as error:
                        told = str(error)
                    assert ("FORBIDDEN" in told) == ("read" not in pick), (pick, uri, told)
    lines = [json.loads(line) for line in home.audit.read_text().splitlines()]
    denied = {(line["who"], line["tool"]) for line in lines if line["result"] == "FORBIDDEN"}
    assert ("read", "submit_train") in denied and ("read-train", "deploy") in denied
    assert ("train", "submit_train") not in denied


@pytest.mark.timeout(60)
async def test_a_key_that_only_reads_is_not_sent_to_what_it_may_not_call(home: Home):
    _, token = add_key(home, "reader", ["read"])
    load_token(home)
    async with listening(home) as url:
        async with client_of(url, token) as client:
            told = (await client.call_tool("get_status", {})).structured_content
        async with client_of(url, load_token(home)) as client:
            owner = (await client.call_tool("get_status", {})).structured_content
    assert {NEEDS[call["tool"]] for call in told["next"]} <= {"read"}
    assert any(NEEDS[call["tool"]] != "read" for call in owner["next"])


@pytest.mark.timeout(60)
async def test_completion_and_tasks_need_the_scope_read_too(home: Home):
    from mcp.types import ResourceTemplateReference

    _, token = add_key(home, "trainer", ["train"])
    load_token(home)
    reference = ResourceTemplateReference(uri="run://{run_id}/metrics")
    async with listening(home) as url, client_of(url, token) as client:
        with pytest.raises(MCPError, match="FORBIDDEN"):
            await client.complete(reference, {"name": "run_id", "value": ""})
        assert (await client.list_tools()).tools, "what is offered is no secret"
