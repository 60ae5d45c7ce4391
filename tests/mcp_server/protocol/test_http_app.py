"""The HTTP server: who gets past the gate, on every route, and where it refuses to listen."""

import socket
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx2
import pytest
from http_server import listening
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import Keys
from mcp_server.access.sessions import Sessions
from mcp_server.protocol.app import build_server
from mcp_server.protocol.http_app import LOOPBACK, Gate, _listener, allowed_hosts, http_app
from mcp_server.protocol.tools import NEEDS

TOKEN = "t0ken-of-this-test-" + "x" * 24
GOOD = {"host": b"127.0.0.1:8321", "authorization": f"Bearer {TOKEN}".encode()}
ROUTES = ("/health", "/mcp", "/nothing")


async def status_of(app, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> int:
    """The status that a bare GET gets, headers as bytes so that any value can be sent."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8321),
    }
    await app(scope, receive, send)
    return sent[0]["status"]


def gate(home: Home, hosts=LOOPBACK):
    return http_app(build_server(home, []), Keys(home, TOKEN), hosts)


def headers(**changes: bytes | None) -> list[tuple[bytes, bytes]]:
    merged = GOOD | changes
    return [(name.encode(), value) for name, value in merged.items() if value is not None]


async def test_health_answers_who_has_the_token(home: Home):
    assert await status_of(gate(home), "/health", headers()) == 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        f"Bearer {TOKEN}x".encode(),
        f"Bearer {TOKEN[:-1]}".encode(),
        f"Basic {TOKEN}".encode(),
        TOKEN.encode(),
        b"Bearer \xff\xfe\xe2\x82\xac",
        "Bearer tökén".encode(),
    ],
)
async def test_without_the_right_token_every_route_answers_401(
    home: Home, route: str, authorization: bytes | None
):
    assert await status_of(gate(home), route, headers(authorization=authorization)) == 401


async def test_a_token_in_the_query_is_no_token(home: Home):
    query = f"token={TOKEN}&access_token={TOKEN}".encode()
    assert await status_of(gate(home), "/health", headers(authorization=None), query) == 401


async def test_two_tokens_are_no_token(home: Home):
    both = [*headers(), (b"authorization", b"Bearer other")]
    assert await status_of(gate(home), "/health", both) == 401


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER "])
async def test_the_scheme_is_read_in_any_case(home: Home, scheme: bytes):
    given = headers(authorization=scheme + TOKEN.encode())
    assert await status_of(gate(home), "/health", given) == 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "host",
    [
        None,
        b"",
        b"evil.com",
        b"evil.com:8321",
        b"127.0.0.1.evil.com:8321",
        b"127.0.0.1@evil.com",
        b"localhost.evil.com",
        b"[::1].evil.com",
        b"127.0.0.2:8321",
    ],
)
async def test_a_foreign_host_is_misdirected_on_every_route(
    home: Home, route: str, host: bytes | None
):
    assert await status_of(gate(home), route, headers(host=host)) == 421


@pytest.mark.parametrize(
    "host", [b"127.0.0.1", b"127.0.0.1:1", b"localhost:8321", b"LOCALHOST:8321", b"[::1]:8321"]
)
async def test_this_machines_own_names_are_served_on_any_port(home: Home, host: bytes):
    assert await status_of(gate(home), "/health", headers(host=host)) == 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "origin", [b"http://evil.com", b"null", b"", b"file://", b"http://localhost.evil.com:1", b"x"]
)
async def test_a_foreign_origin_is_forbidden_on_every_route(home: Home, route: str, origin: bytes):
    assert await status_of(gate(home), route, headers(origin=origin)) == 403


@pytest.mark.parametrize("origin", [b"http://localhost:6274", b"https://127.0.0.1:1"])
async def test_a_page_of_this_machine_may_call(home: Home, origin: bytes):
    assert await status_of(gate(home), "/health", headers(origin=origin)) == 200


async def test_named_hosts_are_served_and_loopback_no_longer_is(home: Home):
    app = gate(home, allowed_hosts("0.0.0.0", ["train.example:8321"]))
    assert await status_of(app, "/health", headers(host=b"train.example:8321")) == 200
    assert await status_of(app, "/health", headers(host=b"train.example:9")) == 421
    assert await status_of(app, "/health", headers(host=b"127.0.0.1:8321")) == 421


async def test_bodies_held_back_open_no_more_sessions_than_a_key_may_have(home: Home):
    arrived, statuses = anyio.Event(), []

    async def inner(scope, receive, send):
        await anyio.lowlevel.checkpoint()  # the others come in between
        answer = {"type": "http.response.start", "status": 200}
        await send(answer | {"headers": [(b"mcp-session-id", str(id(scope)).encode())]})

    async def receive():
        await arrived.wait()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        statuses.extend([message["status"]] if "status" in message else [])

    gate_ = Gate(inner, Keys(home, TOKEN), LOOPBACK, sessions=Sessions(idle_s=600, max_sessions=3))
    given = headers(**{"content-length": b"2"})
    scopes = [
        {"type": "http", "method": "POST", "path": "/mcp", "headers": given} for _ in range(8)
    ]
    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(gate_, scope, receive, send)
        await anyio.wait_all_tasks_blocked()
        arrived.set()
    assert sorted(statuses) == [200] * 3 + [503] * 5


async def test_a_websocket_is_not_served(home: Home):
    sent = []

    async def send(message):
        sent.append(message)

    await gate(home)({"type": "websocket", "path": "/mcp", "headers": headers()}, None, send)
    assert sent == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "train.example"])
def test_another_address_needs_hosts_to_be_named(host: str):
    with pytest.raises(UserError) as refusal:
        allowed_hosts(host, [])
    assert refusal.value.code == "BAD_ARGUMENT"
    assert "--allow-host" in refusal.value.hint


@pytest.mark.timeout(60)
def test_serve_refuses_to_start_on_another_address(home: Home):
    argv = ["serve", "--http", "--host", "0.0.0.0", "--port", "0", "--home", str(home.root)]
    done = run(argv)
    assert done.returncode == 2
    assert "--allow-host" in done.stderr


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mcp_server.cli", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.mark.timeout(60)
async def test_clients_of_both_eras_are_served_over_http(home: Home):
    async with listening(home) as url:
        token = load_token(home)
        assert home.token.stat().st_mode & 0o777 == 0o600
        for mode in ("auto", "legacy"):
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http,
                Client(streamable_http_client(url, http_client=http), mode=mode) as client,
            ):
                assert len((await client.list_tools()).tools) == len(NEEDS)
                assert not (await client.call_tool("read_playbook", {})).is_error
        async with httpx2.AsyncClient() as http:
            health = url.replace("/mcp", "/health")
            assert (await http.get(health)).status_code == 401
            answer = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.timeout(60)
def test_an_address_in_use_is_said_and_nothing_more(home: Home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(["serve", "--http", "--port", port, "--home", str(home.root)])
    assert done.returncode == 2
    assert "cannot listen" in done.stderr and "Traceback" not in done.stderr


def test_a_small_answer_is_sent_at_once():
    """asyncio turns Nagle's algorithm off for sockets whose protocol is named: 40 ms a call."""
    listener = _listener("127.0.0.1", 0)
    try:
        assert listener.proto == socket.IPPROTO_TCP
    finally:
        listener.close()


def test_the_token_is_made_once_and_kept_private(home: Home):
    first = load_token(home)
    assert load_token(home) == first
    assert len(first) >= 40
    assert home.token.stat().st_mode & 0o777 == 0o600
    home.token.chmod(0o644)
    load_token(home)
    assert home.token.stat().st_mode & 0o777 == 0o600


@pytest.mark.timeout(60)
def test_servers_that_start_together_agree_on_the_token(home: Home):
    code = (
        "from engine.home.run_dir import Home; from mcp_server.access.bearer import load_token;"
        f"print(load_token(Home.locate({str(home.root)!r})))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {process.communicate(timeout=30)[0].strip() for process in started}
    assert said == {load_token(home)}
    assert [path.name for path in home.root.iterdir() if path.name.startswith(".token")] == []


@pytest.mark.parametrize("content", ["", "short", "tökén-that-is-long-enough-but-odd"])
def test_a_token_file_that_is_no_token_is_refused(home: Home, content: str):
    home.token.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as refusal:
        load_token(home)
    assert refusal.value.code == "HOME_UNUSABLE"
    assert content not in refusal.value.message or not content


@pytest.mark.timeout(60)
def test_the_token_is_not_in_what_the_server_prints(home: Home):
    token = load_token(home)
    done = run(["init", "--print", "--home", str(home.root), str(Path(home.root, "project"))])
    assert done.returncode == 0
    assert token not in done.stdout + done.stderr
