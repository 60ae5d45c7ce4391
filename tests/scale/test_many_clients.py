"""Many clients and long files: no errors, bounded waits, flat memory (`make scale`, ten minutes).

Wants two idle cores; its numbers are said at the end. HONESMITH_SCALE_S and HONESMITH_SCALE_CALLS
shorten the long parts.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_server import client_of, listening
from mcp import Client, StdioServerParameters

from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.bearer import load_token
from mcp_server.api import verbs

pytestmark = [pytest.mark.scale, pytest.mark.timeout(1_800)]

SECONDS = float(os.environ.get("HONESMITH_SCALE_S", "120"))
CLIENTS, SERVERS, EVERY_S = 64, 8, 4.0
CALLS = int(os.environ.get("HONESMITH_SCALE_CALLS", "20000"))
BARE = """
import sys
import uvicorn
from mcp.server import MCPServer

server = MCPServer("bare")

@server.tool()
def nothing() -> dict[str, str]:
    return {"summary": "nothing"}

class Ready(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

Ready(uvicorn.Config(server.streamable_http_app(), port=0, log_level="error")).run()
"""


@pytest.fixture
def say(record_property) -> Callable[..., None]:
    """Has the end of the session say some numbers of a test."""

    def said(**numbers: Any) -> None:
        record_property("said", json.dumps(numbers))

    return said


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[max(0, int(len(seconds) * 0.99) - 1)]


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    result = await call()
    assert not result.is_error, result.content
    return time.perf_counter() - began


async def test_64_http_clients_beside_8_stdio_servers_on_one_home(home: Home, say):
    token, began = load_token(home), time.monotonic()
    took: list[float] = []
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "mcp_server.cli", "serve", "--home", str(home.root)],
        env=dict(os.environ),
    )

    async def loop(client: Client, offset: float) -> None:
        await asyncio.sleep(offset)  # clients do not knock all at once
        while time.monotonic() - began < SECONDS:
            took.append(await timed(lambda: client.call_tool("get_status", {})))
            await asyncio.sleep(EVERY_S)

    async with listening(home) as url, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(url, token)) for _ in range(CLIENTS)]
        clients += [await stack.enter_async_context(Client(parameters)) for _ in range(SERVERS)]
        began = time.monotonic()
        await asyncio.gather(*(loop(c, EVERY_S * n / len(clients)) for n, c in enumerate(clients)))
    say(calls=len(took), errors=0, p50_s=statistics.median(took), p99_s=p99(took))
    assert len(took) >= (CLIENTS + SERVERS) * SECONDS / (EVERY_S + 2)
    assert p99(took) < 0.150, "on two idle cores"


async def rate(call: Callable[[], Awaitable[Any]], seconds: float) -> float:
    """Calls per second of one client that asks again as soon as it was answered."""
    for _ in range(20):
        await timed(call)
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        await timed(call)
        count += 1
    return count / passed


async def test_a_call_costs_hardly_more_than_one_of_a_bare_server(home: Home, tmp_path: Path, say):
    """Our cheapest tool against a tool that does nothing on the bare SDK, in turn."""
    token = load_token(home)
    script = tmp_path / "bare.py"
    script.write_text(BARE)
    bare = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE
    )
    assert bare.stdout
    try:
        port = int((await asyncio.wait_for(bare.stdout.readline(), 30)).decode())
        ours, theirs = [], []
        async with (
            listening(home) as url,
            client_of(url, token) as mine,
            client_of(f"http://127.0.0.1:{port}/mcp", token) as other,
        ):
            for _ in range(5):
                theirs.append(await rate(lambda: other.call_tool("nothing", {}), 3))
                ours.append(await rate(lambda: mine.call_tool("read_playbook", {}), 3))
    finally:
        bare.terminate()
        await bare.wait()
    ratio = statistics.median(ours) / statistics.median(theirs)
    say(ours_per_s=statistics.median(ours), bare_per_s=statistics.median(theirs), ratio=ratio)
    assert ratio >= 0.8


async def test_memory_stays_flat_over_many_calls(home: Home, say):
    token = load_token(home)
    async with listening(home) as url, client_of(url, token) as client:
        (server,) = (
            process
            for process in psutil.Process().children(recursive=True)
            if "serve" in process.cmdline()
        )
        sizes = []
        for number in range(CALLS):
            tool = "get_status" if number % 4 == 0 else "read_playbook"
            await timed(lambda tool=tool: client.call_tool(tool, {}))
            if number % (CALLS // 10) == CALLS // 10 - 1:
                sizes.append(server.memory_info().rss / 1e6)
    say(calls=CALLS, rss_mb=[round(size, 1) for size in sizes])
    assert sizes[-1] - sizes[1] < 10, "from the second tenth on it grows no more"


def a_run(home: Home, name: str) -> str:
    with Store(home) as store:
        row = store.insert_run(NewRun(name, "train", "sft", "arith@0", "pebble"))
        home.run(row.run_id).create()
        store.set_state(row.run_id, "cancelled", only_from={"queued"})
    return row.run_id


def least(call: Callable[[], Any], times: int = 15) -> float:
    """Seconds of the quickest of several calls: what else runs here is not our subject."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def test_the_end_of_a_long_log_is_read_as_fast_as_that_of_a_short_one(home: Home, say):
    short, long = a_run(home, "short"), a_run(home, "long")
    for run_id, lines in ((short, 1_000), (long, 1_000_000)):
        with home.run(run_id).log(1).open("w") as file:
            file.writelines(f"step {n} of a run, loss {n / 7:.6f}\n" for n in range(lines))
    for view in ("console", "error"):
        few = least(lambda view=view: verbs.read_logs(home, short, view))
        many = least(lambda view=view: verbs.read_logs(home, long, view))
        say(view=view, lines_1000_s=few, lines_1000000_s=many, ratio=many / few)
        assert many <= 3 * few


def test_the_status_of_a_thousand_runs_is_there_at_once(home: Home, tmp_path: Path, say):
    full = Home.locate(tmp_path / "full")
    for where, count in ((home, 10), (full, 1_000)):
        for _ in range(count):
            a_run(where, "arith-sft")
    few = least(lambda: verbs.get_status(home))
    many = least(lambda: verbs.get_status(full))
    say(runs_10_s=few, runs_1000_s=many, ratio=many / few)
    assert many <= 3 * few
