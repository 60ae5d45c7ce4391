"""What reaches a deployment: hostile adapters, clients that ask too much, routes that are none."""

import asyncio
import json
import os
import pickle
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from chat_server import KEY, chat_server

from engine.core.files import read_json, write_json
from engine.home.run_dir import DeployDir, Home
from engine.serving.messages import MAX_PROMPT_CHARS
from engine.worker.gateway.chat_request import MAX_TOKENS
from engine.worker.gateway.http_parts import BODY_S
from tests.engine.conftest import add_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.worker, pytest.mark.timeout(150)]

ASK = [{"role": "user", "content": "What is 4 + 3?"}]
BODY = {"model": "pebble", "messages": ASK, "temperature": 0, "max_tokens": 8}


@pytest.fixture
def deployment(home: Home) -> Iterator[tuple[DeployDir, str]]:
    """A real server process on loopback with its key."""
    with chat_server(home) as started:
        yield started


def test_a15_nothing_but_the_routes_of_chat_can_be_reached(deployment: tuple[DeployDir, str]):
    _, url = deployment
    root = url.removesuffix("/v1")
    with httpx.Client(timeout=30, trust_env=False) as client:
        for path in (
            "/invocations",
            "/pause",
            "/update_weights",
            "/metrics",
            "/docs",
            "/v1/load_lora_adapter",
            "/openapi.json",
            "/tokenize",
            "/",
            "/v1/../admin/stop/x",
        ):
            for method in ("GET", "POST"):
                answer = client.request(method, root + path, headers=KEY)
                assert answer.status_code in (404, 405), (method, path, answer.status_code)
        for path in (
            "/v1/models",
            "/v1/chat/completions",
            "/v1/completions",
            "/admin/adapters",
            "/admin/stop",
        ):
            method = "GET" if path == "/v1/models" else "POST"
            assert client.request(method, root + path).status_code == 401, path
        # The route that rates the tokens of a prompt writes no text.
        unrated = client.post(root + "/v1/completions", headers=KEY, json={"prompt": "Hello"})
        assert unrated.status_code == 400
        for headers, status in (
            ({"Host": "evil.example"}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://localhost:3000"}, 200),
        ):
            for path in ("/health", "/v1/models"):
                answer = client.get(root + path, headers=KEY | headers)
                assert answer.status_code == status, (path, headers)


def test_a16_what_one_request_may_ask_for_is_bounded(deployment: tuple[DeployDir, str]):
    _, url = deployment
    long = [{"role": "user", "content": "a" * (MAX_PROMPT_CHARS + 1)}]
    with httpx.Client(timeout=30, headers=KEY, trust_env=False) as client:

        def status(**change: object) -> int:
            return client.post(f"{url}/chat/completions", json=BODY | change).status_code

        assert status(n=17) == 400
        assert status(max_tokens=MAX_TOKENS + 1) == 400
        assert status(messages=long) == 413
        assert status(messages=ASK * 1_001) == 413
        assert status(tools=[{}] * 129) == 413
        assert status(stream_options=[1]) == 400
        assert status(tools="x") == 400
        assert status(messages=[{"role": "user", "content": "b " * 20_000}]) == 400
        large = client.post(f"{url}/chat/completions", content=b"x" * (5 << 20))
        assert large.status_code == 413
        assert status() == 200


async def test_a16_slow_bodies_silent_connections_and_unread_streams_are_given_up(
    deployment: tuple[DeployDir, str],
):
    _, url = deployment
    parts = urlsplit(url)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(parts.hostname, parts.port, limit=1024)

    def head(size: int) -> bytes:
        return (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer sesame\r\nContent-Length: {size}\r\n\r\n"
        ).encode()

    async def slow() -> bytes:
        reader, writer = await connect()
        writer.write(head(1_000) + b"{")
        try:
            return await asyncio.wait_for(reader.read(200), BODY_S + 15)
        finally:
            writer.close()

    async def silent() -> bytes:
        reader, writer = await connect()
        try:
            return await asyncio.wait_for(reader.read(200), 25)
        finally:
            writer.close()

    said, nothing = await asyncio.gather(slow(), silent())
    assert b" 408 " in said.split(b"\r\n")[0] and nothing == b""
    body = json.dumps(BODY | {"stream": True, "max_tokens": 900, "temperature": 1}).encode()
    _, writer = await connect()
    writer.write(head(len(body)) + body)
    await writer.drain()
    writer.close()  # a client that leaves in the middle holds nothing
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"{url}/chat/completions", json=BODY, headers=KEY)
        assert answer.status_code == 200
        deadline = time.monotonic() + 30
        while (await client.get(f"{url[:-3]}/health")).json()["active"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a16_a_stream_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch):
    from engine.worker.gateway import http_parts

    monkeypatch.setattr(http_parts, "STALL_S", 0.05)
    ended = asyncio.Event()

    async def pieces() -> AsyncIterator[str]:
        try:
            while True:
                yield "data: x\n\n"
        finally:
            ended.set()

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the client's window is full and stays so

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    stream = http_parts.ImpatientStream(pieces())
    with pytest.raises(BaseException) as caught:
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert "TimeoutError" in repr(caught.value) or isinstance(caught.value, TimeoutError)
    await asyncio.wait_for(ended.wait(), 5)


def rewritten(folder: Path, change: Callable[[dict, bytes], tuple[dict, bytes]]) -> None:
    """The adapter's weights with another header or other values."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, values = change(json.loads(data[8 : 8 + size]), data[8 + size :])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)


def not_finite(folder: Path) -> None:
    value = struct.pack("<f", float("nan"))
    rewritten(folder, lambda header, values: (header, value * (len(values) // 4)))


def huge_rank(folder: Path) -> None:
    config = read_json(folder / "adapter_config.json")
    write_json(folder / "adapter_config.json", config | {"r": 1_000_000})


def wrong_rank(folder: Path) -> None:
    config = read_json(folder / "adapter_config.json")
    write_json(folder / "adapter_config.json", config | {"r": 3})


def wrong_shapes(folder: Path) -> None:
    def swap(header: dict, values: bytes) -> tuple[dict, bytes]:
        return {
            name: part | {"shape": part["shape"][::-1]} for name, part in header.items()
        }, values

    rewritten(folder, swap)


def missing_tensors(folder: Path) -> None:
    def first(header: dict, values: bytes) -> tuple[dict, bytes]:
        name, part = next(iter(header.items()))
        return {name: part}, values[: part["data_offsets"][1]]

    rewritten(folder, first)


def cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_targets(folder: Path) -> None:
    config = read_json(folder / "adapter_config.json")
    write_json(folder / "adapter_config.json", config | {"target_modules": ["../../etc", "x" * 99]})


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Runs(folder / "owned")))


def renamed_pickle(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(pickle.dumps(_Runs(folder / "owned")))


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 50_000)


HOSTILE = [
    not_finite,
    huge_rank,
    wrong_rank,
    wrong_shapes,
    missing_tensors,
    cut_short,
    other_targets,
    pickled,
    renamed_pickle,
    broken_config,
]


def test_a14_an_adapter_that_is_none_is_refused_and_runs_no_code(
    home: Home, deployment: tuple[DeployDir, str]
):
    _, url = deployment
    root = url.removesuffix("/v1")
    with httpx.Client(timeout=60, headers=KEY, trust_env=False) as client:
        for step, spoil in enumerate(HOSTILE, 10):
            folder = add_checkpoint(home, "sums-sft-1", step)
            spoil(folder)
            entry = {"name": spoil.__name__, "path": str(folder)}
            answer = client.post(f"{root}/admin/adapters", json=entry)
            assert 400 <= answer.status_code < 500, (spoil.__name__, answer.status_code)
            assert answer.json()["error"]["message"], spoil.__name__
            assert not (folder / "owned").exists()
        good = add_checkpoint(home, "sums-sft-1", 99)
        entry = {"name": "good", "path": str(good)}
        assert client.post(f"{root}/admin/adapters", json=entry).status_code == 200
        assert client.get(f"{url}/models").json()["data"][-1]["id"] == "good"
        body = BODY | {"model": "good"}
        assert client.post(f"{url}/chat/completions", json=body).status_code == 200
