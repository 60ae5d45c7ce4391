"""langchain-mcp-adapters: list the tools, call one; prints one JSON line.

Runs in that package's own environment. argv: the server's command.
"""

import asyncio
import json
import os
import sys

from langchain_core.tools import ToolException
from langchain_mcp_adapters.client import MultiServerMCPClient


async def main() -> None:
    command, *args = sys.argv[1:]
    entry = {"transport": "stdio", "command": command, "args": args, "env": dict(os.environ)}
    tools = await MultiServerMCPClient({"honesmith": entry}).get_tools()
    named = {tool.name: tool for tool in tools}
    status = await named["get_status"].ainvoke({})
    try:
        refused = await named["wait_run"].ainvoke({"run_id": "nobody"})
    except ToolException as error:
        refused = str(error)
    said = {"tools": list(named), "status": _text(status), "refused": _text(refused)}
    print(json.dumps(said))


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


asyncio.run(main())
