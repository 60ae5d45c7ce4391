"""The server as agents start it: a process, stdio, both protocol eras, the real engine."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from http_server import initialize
from mcp import Client, StdioServerParameters

import envs
from engine.home.run_dir import Home

EXAMPLES = Path(str(envs.__file__)).parent / "examples"


def launched(home: Home, *options: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "mcp_server.cli", "serve", "--home", str(home.root), *options],
        env=dict(os.environ),
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
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
        *_, after = estimate["next"]  # before it, on a busy machine, what narrows a wide range
        assert after["tool"] == "submit_train" and after["arguments"]["settings"] == {"steps": 5}
        source = await client.read_resource(f"env://{pushed['env_id']}/source")
        assert "load_environment" in source.contents[0].text


LINES = [
    (
        b'{"jsonrpc":"2.0","id":"a","method":"tools/call","params":{"name":"read_playbook",'
        b'"arguments":{"section":"\\ud800"}}}',
        "a",
        "SECTION_NOT_FOUND",
    ),
    (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"\\udfff"}}', 7, "no tool"),
    (
        b'{"jsonrpc":"2.0","id":8,"method":"tools/call","params":{"name":"get_status",'
        b'"arguments":{"\\ud800":1}}}',
        8,
        "UNKNOWN_ARGUMENT",
    ),
    (b"{nope", None, "not JSON"),
    (b"\x00\xff\xfe", None, "not JSON"),
    (b"[" * 100_000, None, "not JSON"),
    (b'{"id": 9, "method": 3}', 9, "not a JSON-RPC message"),
    (b'{"jsonrpc":"2.0","id":"\\ud800","method":3}', "\ufffd", "not a JSON-RPC message"),
    (b"[1, 2]", None, "not a JSON-RPC message"),
    (b'{"jsonrpc":"2.0","id":' + b"9" * 5_000 + b',"method":"ping"}', None, "not JSON"),
]


@pytest.mark.timeout(60)
async def test_every_line_is_answered_also_one_that_is_no_message(home: Home):
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mcp_server.cli", "serve", "--home", str(home.root)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert server.stdin and server.stdout

    async def ask(line: bytes) -> dict:
        server.stdin.write(line + b"\n")
        return json.loads(await asyncio.wait_for(server.stdout.readline(), 20))

    try:
        assert (await ask(json.dumps(initialize()).encode()))["id"] == 1
        server.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n\n  \n')
        for line, expected, said in LINES:
            answer = await ask(line)
            assert answer["id"] == expected, line[:80]
            assert said in json.dumps(answer), line[:80]
        assert "result" in await ask(b'{"jsonrpc":"2.0","id":2,"method":"ping"}')
        server.stdin.close()
        assert await asyncio.wait_for(server.wait(), 20) == 0
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


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
    from mcp_server.protocol.app import build_server

    async with Client(build_server(home, [EXAMPLES]), mode=mode) as client:
        result = await client.call_tool(tool, arguments)
        queue = await client.call_tool("get_status", {})
    assert result.is_error
    payload = json.loads(result.content[0].text)
    assert code in ("", payload["code"]), payload
    assert payload["code"] != "INTERNAL"
    assert payload["hint"] and "\n" not in result.content[0].text
    assert queue.structured_content["queue"] == []


@asynccontextmanager
async def started(home: Home) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server that has answered its first message."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mcp_server.cli", "serve", "--home", str(home.root)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert server.stdin and server.stdout
    try:
        server.stdin.write(json.dumps(initialize()).encode() + b"\n")
        assert await asyncio.wait_for(server.stdout.readline(), 20)
        yield server
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_server_ends_by_ctrl_c_as_by_sigterm_though_its_client_is_there(
    home: Home, number: signal.Signals
):
    async with started(home) as server:
        server.send_signal(number)
        assert await asyncio.wait_for(server.wait(), 5) == -number


@pytest.mark.timeout(60)
async def test_a_client_that_no_longer_reads_has_left_and_nothing_went_wrong(home: Home):
    reading, writing = os.pipe()
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mcp_server.cli", "serve", "--home", str(home.root)),
        stdin=asyncio.subprocess.PIPE,
        stdout=writing,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writing)
    os.close(reading)
    _, said = await asyncio.wait_for(
        server.communicate(json.dumps(initialize()).encode() + b"\n"), 30
    )
    assert (server.returncode, said) == (0, b"")
