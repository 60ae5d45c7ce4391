"""A client of an MCP server that speaks over its standard streams: lists its tools, and calls them.

Messages are JSON-RPC, one per line (Model Context Protocol, revision 2025-06-18). There are no
timeouts here: in an env process the time limit of a call ends server and process together.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.adapters.parts import local_server
from envs.json_types import JsonObject

REVISION = "2025-06-18"
LINE_BYTES = 4 << 20  # the longest message of a server
MOST_LINES = 10_000  # the most messages between a request and its answer
END_S = 1.0  # seconds for a server to leave by itself where it cannot be killed
MOST_PAGES = 100  # the most pages of a list of tools


class ServerFault(Exception):
    """The server ended, or sent an answer that cannot be read."""


class McpServer:
    """A running server; `close` ends it.

    Args:
        command: the program and its arguments; `python3` means the environment's interpreter.
        folder: the folder in which it runs.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start the server (`command` is the program and its arguments, run in `folder`) and
        initialise the session. Raises ServerFault if it ends or answers what cannot be read."""
        program = sys.executable if command[0] in ("python", "python3") else command[0]
        self.process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._number = 0
        self._is_closed = False
        client = {"name": "honesmith", "version": "1"}
        self._ask(
            "initialize", {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client}
        )
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[JsonObject]:
        """Return every tool as an OpenAI function schema. Raises ServerFault if the server
        fails."""
        functions: list[JsonObject] = []
        params: JsonObject = {}  # which page of the list is asked for; {} for the first
        for _ in range(MOST_PAGES):
            page = self._ask("tools/list", params)
            functions += [_as_function(tool) for tool in page.get("tools", [])]
            if not page.get("nextCursor"):
                return functions
            params = {"cursor": page["nextCursor"]}
        raise ServerFault(f"the list of tools has more than {MOST_PAGES} pages")

    def call(self, name: str, arguments: JsonObject) -> tuple[str, bool]:
        """Call a tool; return (the text of its result, whether the tool says that it failed).

        Raises ServerFault if the server fails.
        """
        result = self._ask("tools/call", {"name": name, "arguments": arguments})
        parts = [part for part in result.get("content", []) if isinstance(part, dict)]
        text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")
        return text, result.get("isError") is True

    def close(self) -> None:
        """End the server; a second call does nothing. Most leave by themselves once their input
        ends."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        local_server.end(self.process, END_S)

    def __del__(self) -> None:
        """End the server if nobody has called `close`, as after a rollout that failed."""
        with contextlib.suppress(Exception):  # it may not have started
            self.close()

    def _ask(self, method: str, params: JsonObject) -> JsonObject:
        """Send a request, wait for its answer, and return the answer's `result`.

        If the server refuses a tool call, the result is {"isError": True, "content": [a text]},
        which the model reads. Raises ServerFault if it refuses any other request, ends, or sends
        `MOST_LINES` messages without an answer.
        """
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        for _ in range(MOST_LINES):
            message = self._receive()
            if message.get("id") != self._number or "method" in message:
                continue  # a notification or a request of the server; these are ignored
            if "error" in message:
                if method != "tools/call":
                    raise ServerFault(f"{method} was refused: {message['error']!r:.300}")
                reason = str(message["error"].get("message", "the call was refused"))
                return {"isError": True, "content": [{"type": "text", "text": reason}]}
            result = message.get("result")
            return result if isinstance(result, dict) else {}
        raise ServerFault(f"the server sent {MOST_LINES} messages and no answer to {method}")

    def _send(self, message: JsonObject) -> None:
        """Send one JSON-RPC message, as a line. Raises ServerFault if the server has ended."""
        stream = self.process.stdin
        assert stream is not None  # a pipe was asked for
        try:
            stream.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            stream.flush()
        except OSError as error:
            raise ServerFault(f"the MCP server has ended: {error}") from error

    def _receive(self) -> JsonObject:
        """Return the next message. Raises ServerFault if the server has ended or the line is not a
        message."""
        stream = self.process.stdout
        assert stream is not None  # a pipe was asked for
        line = stream.readline(LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ServerFault("the MCP server has ended, or sent too long a line")
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
        if not isinstance(message, dict):
            raise ServerFault(f"the MCP server wrote a line that is no message: {line[:200]!r}")
        return message


def _as_function(tool: JsonObject) -> JsonObject:
    """Return a tool of MCP as an OpenAI function schema."""
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
