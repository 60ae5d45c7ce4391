"""A17: more connections than anybody needs, all at once."""

import asyncio
import contextlib
import resource
import time
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from http_server import client_of, listening

from engine.home.run_dir import Home
from mcp_server.access.bearer import load_token
from mcp_server.protocol.http_app import RESERVED_FILES, max_connections

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

WANTED, FEWEST = 10_000, 4_000
GROWN_MB = 150  # of the server; 10,000 connections held would take 400
ANSWER_S = 40.0  # another client's call in the middle of it


def server_of(home: Home) -> psutil.Process:
    for process in psutil.Process().children():
        # What earlier tests left behind for us to bury has no command line.
        with contextlib.suppress(psutil.ZombieProcess):
            if str(home.root) in process.cmdline():
                return process
    raise AssertionError("the server is none of our children")


@pytest.mark.parametrize("says", ["nothing", "half a head", "a request without a token"])
async def test_a17_ten_thousand_connections_at_once_keep_nobody_else_out(
    home: Home, says: str, record_property
):
    count = min(WANTED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    if count < FEWEST:
        pytest.skip(f"this process may open {count} connections")
    first = {
        "nothing": b"",
        "half a head": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        "a request without a token": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    }[says]
    token = load_token(home)
    async with listening(home) as url:
        parts, server = urlsplit(url), server_of(home)
        held: list[asyncio.StreamWriter] = []
        turns = asyncio.Semaphore(1_000)
        most = [0, 0]
        tried: list[int] = []  # calls that lost their connection

        async def knock() -> None:
            async with turns:
                with contextlib.suppress(ConnectionError):
                    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                    held.append(writer)
                    writer.write(first)

        async def watch() -> None:
            while True:
                most[0] = max(most[0], server.num_fds())
                most[1] = max(most[1], server.memory_info().rss)
                await asyncio.sleep(0.1)

        async def ask() -> float:
            began = time.monotonic()
            # Until it has sent its token a client is a stranger like the others, whose connection
            # may be closed for a newer one: it tries again, as clients do.
            while not await answered():
                assert time.monotonic() - began < ANSWER_S
            return time.monotonic() - began

        async def answered() -> bool:
            done = False
            try:
                async with client_of(url, token) as client:
                    assert not (await client.call_tool("get_status", {"scope": "runs"})).is_error
                    done = True
            except* httpx2.TransportError:
                tried.append(1)
            return done

        await ask()
        before = server.memory_info().rss
        watcher = asyncio.create_task(watch())
        flood = asyncio.gather(*(knock() for _ in range(count)))
        took = [await asyncio.wait_for(ask(), ANSWER_S)]
        while not flood.done() or len(took) < 3:
            took.append(await asyncio.wait_for(ask(), ANSWER_S))
        await flood
        watcher.cancel()
        assert len(held) >= FEWEST
        assert most[0] <= max_connections() + RESERVED_FILES
        assert most[1] - before < GROWN_MB * 1e6
        for writer in held:
            writer.close()
        assert server.is_running() and await ask() < ANSWER_S
    record_property(
        "said",
        f"{len(held)} connections that say {says}: at most {most[0]} descriptors, "
        f"{(most[1] - before) / 1e6:.0f} MB more; another client's calls took {max(took):.1f} s, "
        f"{len(tried)} of them once more",
    )
