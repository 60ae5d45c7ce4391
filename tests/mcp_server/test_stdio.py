"""The server as agents start it: a process, stdio, both protocol eras, the real engine."""

import json
import os
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

import envs
from engine.run_dir import Home

EXAMPLES = Path(str(envs.__file__)).parent / "examples"


def launched(home: Home, *options: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "mcp_server.cli", "serve", "--home", str(home.root), *options],
        env=dict(os.environ),
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_agent_gets_from_status_to_an_estimate(home: Home, mode: str):
    async with Client(launched(home, "--root", str(EXAMPLES)), mode=mode) as client:

        async def call(tool: str, **arguments) -> dict:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result.content[0].text
            body = result.structured_content
            assert json.loads(result.content[0].text) == body
            assert body["summary"] and len(result.content[0].text) <= 10_000
            assert isinstance(body["next"], list) and isinstance(body["warnings"], list)
            return body

        assert (await call("get_status"))["hardware"]["devices"]
        pushed = await call("push_env", path="arithmetic")
        assert pushed["rows"]["train"] and pushed["rows"]["heldout"]
        again = await call("push_env", path=str(EXAMPLES / "arithmetic"))
        assert again["env_id"] == pushed["env_id"]
        checked = await call("dry_run", env_id="arithmetic", algorithm="sft")
        assert {check["status"] for check in checked["checks"]} <= {"pass", "warn"}
        plan = {"env_id": "arithmetic", "algorithm": "grpo", "settings": {"steps": 5}}
        estimate = await call("estimate_cost", **plan)
        assert estimate["fits"] is True
        (after,) = estimate["next"]
        assert after["tool"] == "submit_train" and after["arguments"]["settings"] == {"steps": 5}
        source = await client.read_resource(f"env://{pushed['env_id']}/source")
        assert "load_environment" in source.contents[0].text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [
        ("push_env", {"path": "/etc"}, "PATH_OUTSIDE_ROOTS"),
        ("submit_train", {"env_id": "nobody"}, "ENV_NOT_FOUND"),
        ("wait_run", {"run_id": "nobody"}, "RUN_NOT_FOUND"),
        ("read_logs", {"run_id": "nobody"}, "RUN_NOT_FOUND"),
        ("cancel_run", {"run_id": "nobody"}, "RUN_NOT_FOUND"),
        ("compare_runs", {"ids": ["a", "b"]}, ""),
        ("chat", {"model": "nobody", "message": "hi"}, "MODEL_NOT_FOUND"),
        ("deploy", {"run_id": "nobody"}, "MODEL_NOT_FOUND"),
        ("read_playbook", {"section": "nonsense"}, "SECTION_NOT_FOUND"),
        ("get_status", {"scope": "runs", "cursor": "zzz"}, "BAD_CURSOR"),
    ],
)
async def test_what_the_engine_refuses_is_one_line_with_a_hint(
    home: Home, mode: str, tool: str, arguments: dict, code: str
):
    from mcp_server.app import build_server

    async with Client(build_server(home, [EXAMPLES]), mode=mode) as client:
        result = await client.call_tool(tool, arguments)
        queue = await client.call_tool("get_status", {})
    assert result.is_error
    payload = json.loads(result.content[0].text)
    assert code in ("", payload["code"]), payload
    assert payload["code"] != "INTERNAL"
    assert payload["hint"] and "\n" not in result.content[0].text
    assert queue.structured_content["queue"] == []
