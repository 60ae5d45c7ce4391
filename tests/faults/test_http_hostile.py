"""Hostile and hung clients of the HTTP server: raw sockets, other people's sessions, floods."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx2
import pytest
from http_server import ACCEPT, bearer, client_of, initialize, listening

from engine.home.run_dir import Home
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import add_key
from mcp_server.access.sessions import SESSIONS_PER_KEY
from mcp_server.protocol.http_app import BODY_S, MAX_SESSIONS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


async def raw(url: str, data: bytes, wait_s: float = 30.0) -> bytes:
    """What a connection answers to these bytes, until it ends or a whole head is there."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(4096), wait_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request(token: str, *extra: str, method: str = "POST", path: str = "/mcp") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *ACCEPT_LINES, *extra]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


ACCEPT_LINES = [f"{name}: {value}" for name, value in ACCEPT.items()]


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


@asynccontextmanager
async def http(url: str, token: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(headers=bearer(token) | ACCEPT, timeout=60) as client:
        yield client


async def is_alive(url: str, token: str) -> bool:
    async with http(url, token) as client:
        return (await client.get(url.replace("/mcp", "/health"))).status_code == 200


async def test_a7_rebinding_foreign_pages_and_plain_text_posts_are_refused(home: Home):
    token = load_token(home)
    body = json.dumps(initialize())
    async with listening(home) as url, http(url, token) as client:
        for headers, status in (
            ({"Host": "evil.example"}, 421),
            ({"Host": "127.0.0.1.evil.example:80"}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Content-Type": "text/plain"}, 400),
            ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ):
            given = {"Content-Type": "application/json"} | headers
            answer = await client.post(url, content=body, headers=given)
            assert answer.status_code == status, (headers, answer.status_code)
        preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        answer = await client.options(url, headers=preflight)
        assert answer.status_code == 403
        own = await client.options(url, headers=preflight | {"Origin": "http://localhost:3000"})
        assert "access-control-allow-origin" not in own.headers
        assert await is_alive(url, token)


async def test_a7_another_address_is_guarded_as_loopback_is(home: Home):
    token = load_token(home)
    options = ("--host", "0.0.0.0", "--allow-host", "train.example")
    async with listening(home, *options) as url:
        here = url.replace("0.0.0.0", "127.0.0.1")
        async with http(here, token) as client:
            health = here.replace("/mcp", "/health")
            assert (await client.get(health)).status_code == 421
            named = {"Host": "train.example"}
            assert (await client.get(health, headers=named)).status_code == 200
            foreign = named | {"Origin": "http://evil.example"}
            assert (await client.get(health, headers=foreign)).status_code == 403
        async with httpx2.AsyncClient() as nobody:
            assert (await nobody.get(health, headers=named)).status_code == 401


async def test_a10_a_session_answers_only_the_key_that_opened_it(home: Home):
    _, alice = add_key(home, "alice", ["read"])
    _, bob = add_key(home, "bob", ["read"])
    load_token(home)
    listed = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    async with listening(home) as url, http(url, alice) as hers, http(url, bob) as his:
        opened = await hers.post(url, json=initialize())
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await hers.post(url, json=ready, headers=session)).status_code == 202
        assert (await his.post(url, json=listed, headers=session)).status_code == 404
        assert (await his.request("DELETE", url, headers=session)).status_code == 404
        assert (await hers.post(url, json=listed, headers=session)).status_code == 200
        guessed = {"mcp-session-id": "0" * 32}
        assert (await his.post(url, json=listed, headers=guessed)).status_code == 404


async def test_a10_knowing_a_run_gives_no_right_to_it(home: Home):
    from engine.home.rows import NewRun
    from engine.home.store import Store

    with Store(home) as store:
        run_id = store.insert_run(NewRun("a-sft", "train", "sft", "a@0", "pebble")).run_id
    _, reader = add_key(home, "reader", ["read"])
    load_token(home)
    async with listening(home) as url, client_of(url, reader) as client:
        for tool, arguments in (
            ("cancel_run", {"run_id": run_id}),
            ("deploy", {"run_id": run_id}),
            ("submit_train", {"resume": run_id}),
        ):
            result = await client.call_tool(tool, arguments)
            assert json.loads(result.content[0].text)["code"] == "FORBIDDEN", tool
    with Store(home) as store:
        assert store.get_run(run_id).state == "queued"


async def test_a17_headers_and_bodies_that_are_too_large_are_refused(home: Home):
    token = load_token(home)
    async with listening(home) as url:
        large = await raw(url, request(token, "X-Much: " + "x" * 100_000))
        assert status_of(large) == 431
        assert status_of(await raw(url, request(token, f"Content-Length: {5 << 20}"))) == 413
        async with http(url, token) as client:

            async def endless() -> AsyncIterator[bytes]:
                for _ in range(80):
                    yield b"x" * 65_536

            try:
                answer = await client.post(url, content=endless())
                assert answer.status_code == 413
            except httpx2.WriteError:  # it was closed while we were still sending
                pass
        for odd in ("Content-Length: -1", "Content-Length: 9" * 1 + "9" * 40):
            assert status_of(await raw(url, request(token, odd))) in (400, 413)
        assert await is_alive(url, token)


async def test_a17_a_body_and_headers_that_trickle_in_are_given_up(home: Home):
    token = load_token(home)
    async with listening(home) as url:
        parts = urlsplit(url)

        async def trickle(first: bytes) -> tuple[bytes, float]:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            answer = asyncio.create_task(reader.read(4096))
            try:
                writer.write(first)
                while not answer.done() and time.monotonic() - began < BODY_S + 20:
                    await asyncio.wait({answer}, timeout=0.5)
                    writer.write(b"x")
                return await answer, time.monotonic() - began
            except ConnectionError:
                return b"", time.monotonic() - began
            finally:
                answer.cancel()
                writer.close()

        body, head, silent = await asyncio.gather(
            trickle(request(token, "Content-Length: 10000")),
            trickle(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "),
            trickle(b""),
        )
        assert status_of(body[0]) == 408 and body[1] < BODY_S + 5
        assert head[0] == b"" and head[1] < 15
        assert silent[0] in (b"",) or status_of(silent[0]) == 400
        assert await is_alive(url, token)


async def test_a17_one_key_cannot_take_all_sessions(home: Home):
    _, greedy = add_key(home, "greedy", ["read"], calls_per_minute=0)
    _, modest = add_key(home, "modest", ["read"])
    token = load_token(home)
    async with listening(home) as url, http(url, greedy) as client:
        codes = [(await client.post(url, json=initialize(n))).status_code for n in range(200)]
        assert codes.count(200) == SESSIONS_PER_KEY < MAX_SESSIONS
        assert set(codes[SESSIONS_PER_KEY:]) == {503}
        assert await is_alive(url, greedy), "what opens no session is answered"
        async with client_of(url, greedy, mode="2026-07-28") as modern:
            assert not (await modern.call_tool("get_status", {})).is_error
        async with http(url, modest) as other:
            assert (await other.post(url, json=initialize())).status_code == 200
        assert await is_alive(url, token)


async def test_a17_a_key_that_calls_too_often_is_held_up_and_another_is_not(home: Home):
    _, fast = add_key(home, "fast", ["read"], calls_per_minute=60)
    token = load_token(home)
    async with listening(home) as url, http(url, fast) as client:
        health = url.replace("/mcp", "/health")
        answers = [await client.get(health) for _ in range(20)]
        codes = [answer.status_code for answer in answers]
        assert codes[:10] == [200] * 10 and 429 in codes[10:]
        held = next(answer for answer in answers if answer.status_code == 429)
        assert int(held.headers["retry-after"]) >= 1
        assert await is_alive(url, token)


@pytest.mark.parametrize(
    "body",
    [
        b"{nope",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"jsonrpc":"2.0","id":' + b"9" * 5_000 + b',"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"\\ud800","arguments":{}}}',
        b"[]",
        b"null",
        b"\x00",
    ],
)
async def test_i1_a_body_that_is_no_message_is_answered_and_harms_nothing(home: Home, body: bytes):
    token = load_token(home)
    async with listening(home) as url, http(url, token) as client:
        given = {"Content-Type": "application/json"}
        answer = await client.post(url, content=body, headers=given)
        assert 400 <= answer.status_code < 500
        assert "Traceback" not in answer.text
        assert await is_alive(url, token)


async def test_a20_every_key_and_refusal_is_in_the_audit_log(home: Home):
    _, trainer = add_key(home, "trainer", ["train"])
    token = load_token(home)
    async with listening(home) as url:
        for given in (token, trainer):
            async with client_of(url, given) as client:
                await client.call_tool("deploy", {"run_id": "nobody"})
                await client.call_tool("get_status", {})
    lines = [json.loads(line) for line in home.audit.read_text().splitlines()]
    assert [(line["who"], line["tool"], line["result"]) for line in lines] == [
        ("owner", "deploy", "MODEL_NOT_FOUND"),
        ("trainer", "deploy", "FORBIDDEN"),
    ]
    assert home.audit.stat().st_mode & 0o777 == 0o600
    assert token not in home.audit.read_text() and trainer not in home.audit.read_text()
