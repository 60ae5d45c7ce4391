"""A server over HTTP in a process of its own, and clients of any key."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from engine.home.run_dir import Home


@asynccontextmanager
async def listening(home: Home, *options: str) -> AsyncIterator[str]:
    """A server in a process of its own; yields its address."""
    async with serving(home, *options) as (_, url):
        yield url


@asynccontextmanager
async def serving(
    home: Home, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The same; yields the process too, which the test may end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mcp_server.cli", "serve", "--http", "--port", "0"),
        *("--home", str(home.root), *options),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        found = re.search(r"http://\S+/mcp", line)
        assert found, line
        yield process, found.group()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def client_of(
    url: str, token: str, mode: Any = "auto", **options: Any
) -> AsyncIterator[Client]:
    """An MCP client that sends `token`; `options` as for `Client`."""
    async with (
        httpx2.AsyncClient(headers=bearer(token), timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode, **options) as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def initialize(number: int = 1) -> dict[str, Any]:
    """The first message of a client of the older era."""
    return {
        "jsonrpc": "2.0",
        "id": number,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "probe", "version": "1"},
        },
    }


ACCEPT = {"Accept": "application/json, text/event-stream"}
