"""The conformance suite of the protocol over HTTP; conformance.yml names what fails and why."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from http_server import listening

from mcp_server.access.bearer import load_token

pytestmark = [pytest.mark.clients, pytest.mark.timeout(200)]

BASELINE = Path(__file__).with_name("conformance.yml")
# What any server must pass, whatever its tools.
GENERIC = {
    "server-initialize",
    "ping",
    "tools-list",
    "resources-list",
    "prompts-list",
    "completion-complete",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
}


@asynccontextmanager
async def with_token(url: str, token: str) -> AsyncIterator[str]:
    """An address whose requests go on to `url` with the token: the suite cannot send one."""
    there = urlsplit(url)
    held: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            line = await reader.readuntil(b"\r\n")
            fields = await reader.readuntil(b"\r\n\r\n")
            far_reader, far_writer = await asyncio.open_connection(there.hostname, there.port)
            with contextlib.closing(far_writer):
                # One request a connection, so that every request gets the line.
                more = f"Authorization: Bearer {token}\r\nConnection: close\r\n".encode()
                kept = re.sub(rb"(?im)^connection:.*\r\n", b"", fields)
                far_writer.write(line + more + kept)
                up = asyncio.create_task(_pipe(reader, far_writer))
                try:
                    await _pipe(far_reader, writer)
                finally:
                    up.cancel()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(pass_on(reader, writer))
        held.add(task)
        task.add_done_callback(held.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{there.path}"
    finally:
        server.close()
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(1 << 16):
        writer.write(part)
        await writer.drain()


def listed() -> dict[str, str]:
    """The scenarios of the baseline, each with its reason."""
    found = re.findall(r"^  - ([\w-]+)  # (\S.+)$", BASELINE.read_text("utf-8"), re.MULTILINE)
    assert len(found) == BASELINE.read_text("utf-8").count("\n  - "), "a line without a reason"
    return dict(found)


def test_the_baseline_excuses_nothing_that_any_server_must_do():
    assert len(listed()) > 10
    assert GENERIC.isdisjoint(listed())


async def test_the_suite_finds_nothing_but_what_the_baseline_names(
    installed: Callable[[str], Path], project, tmp_path: Path
):
    program = installed("conformance") / "node_modules" / ".bin" / "conformance"
    async with (
        listening(project.home) as url,
        with_token(url, load_token(project.home)) as open_url,
    ):
        argv = [str(program), "server", "--url", open_url, "--expected-failures", str(BASELINE)]
        ran = await asyncio.to_thread(project.run, argv, 180)
    print(ran.stdout[-6_000:])
    assert ran.returncode == 0, ran.stdout[-6_000:] + ran.stderr[-2_000:]
    for name in GENERIC:
        assert re.search(rf"✓ {name}: \d+ passed, 0 failed", ran.stdout), name
