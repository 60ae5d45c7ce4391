"""A real server process and a real MCP client to it, with the calls a test makes all the time."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from engine.home.run_dir import Home

TERMINAL = {"done", "failed", "cancelled"}


class Agent:
    """Calls tools and unpacks what they answer."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer; fails the test when the tool refuses."""
        result = await self.client.call_tool(tool, arguments)
        text = "".join(getattr(part, "text", "") for part in result.content)
        assert not result.is_error, f"{tool}: {text}"
        answer = result.structured_content
        assert answer is not None and json.loads(text) == answer
        assert answer["summary"] and "next" in answer and "warnings" in answer
        assert len(text) <= 10_000
        return answer

    async def refused(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The error a tool answers with; fails the test when it does not refuse."""
        result = await self.client.call_tool(tool, arguments)
        text = "".join(getattr(part, "text", "") for part in result.content)
        assert result.is_error, f"{tool} was not refused: {text[:200]}"
        assert "\n" not in text and len(text) <= 1000
        return json.loads(text)

    async def wait(self, run_id: str, until: str = "end", within_s: float = 55) -> dict[str, Any]:
        """Wait for a run through the tool alone."""
        deadline = time.monotonic() + within_s
        cursor = ""
        while True:
            answer = await self.call(
                "wait_run", run_id=run_id, until=until, timeout_s=5, cursor=cursor
            )
            cursor = answer["cursor"]
            if answer["state"] in TERMINAL or (until != "end" and answer.get("until_met")):
                return answer
            assert time.monotonic() < deadline, f"{run_id} is still {answer['state']}"


@asynccontextmanager
async def agent(home: Home, root: Path, mode: str = "auto") -> AsyncIterator[Agent]:
    """A server over stdio on `home`, and an agent connected to it.

    Args:
        mode: `legacy` for the 2025 protocol, `2026-07-28` for the new one, `auto` to negotiate.
    """
    argv = ["-P", "-m", "mcp_server.cli", "serve", "--home", str(home.root), "--root", str(root)]
    server = StdioServerParameters(command=sys.executable, args=argv, env=dict(os.environ))
    async with Client(server, mode=mode) as client:
        yield Agent(client)
