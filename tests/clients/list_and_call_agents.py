"""openai-agents: list the tools as its agents get them, call one; prints one JSON line.

Runs in that package's own environment. argv: the server's command.
"""

import asyncio
import json
import os
import sys

from agents import Agent, RunContextWrapper
from agents.mcp import MCPServerStdio, MCPUtil


async def main() -> None:
    command, *args = sys.argv[1:]
    params = {"command": command, "args": args, "env": dict(os.environ)}
    # Its own default of 5 s ends a start on a busy machine and every longer wait.
    async with MCPServerStdio(params=params, client_session_timeout_seconds=60) as server:
        agent = Agent(name="probe", mcp_servers=[server])
        tools = await MCPUtil.get_all_function_tools(
            [server], False, RunContextWrapper(context=None), agent
        )
        status = await server.call_tool("get_status", {})
        refused = await server.call_tool("wait_run", {"run_id": "nobody"})
    said = {"tools": [tool.name for tool in tools], "status": status.content[0].text}
    said["refused"] = refused.content[0].text if refused.is_error else ""
    print(json.dumps(said))


asyncio.run(main())
