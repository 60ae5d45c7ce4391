"""A real server over stdio, spoken to in raw JSON lines by a client that may kill it any moment."""

import contextlib
import json
import subprocess
import sys
from typing import Any

from engine.home.run_dir import Home


class Server:
    """Started and greeted at once; nothing waits for it."""

    def __init__(self, home: Home) -> None:
        argv = [sys.executable, "-P", "-m", "mcp_server.cli", "serve", "--home", str(home.root)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0
        self.heard: dict[int, dict[str, Any]] = {}  # results that came before the one asked for
        about = {"name": "faults", "version": "0"}
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about}
        self.say("initialize", id=-1, params=hello)
        self.say("notifications/initialized")

    def say(self, method: str, **message: Any) -> None:
        assert self.process.stdin is not None
        line = json.dumps({"jsonrpc": "2.0", "method": method, **message}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it may be dead: that is what is tested
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def call(self, number: int, tool: str, **arguments: Any) -> None:
        self.say("tools/call", id=number, params={"name": tool, "arguments": arguments})

    def ask(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a call, waited for."""
        assert self.process.stdout is not None
        self.calls += 1
        number = 1_000_000 + self.calls
        self.call(number, tool, **arguments)
        for line in self.process.stdout:
            reply = json.loads(line)
            if reply.get("id") == number:
                return reply["result"]["structuredContent"]
            if "result" in reply:
                self.heard[reply["id"]] = reply["result"]
        raise AssertionError(f"the server ended while it was asked {tool}")

    def answers(self, timeout_s: float = 60) -> dict[int, dict[str, Any]]:
        """Closes its input; everything it said, by the number of the call, until it has ended."""
        said, _ = self.process.communicate(timeout=timeout_s)
        found = {}
        for line in said.splitlines():
            with contextlib.suppress(ValueError):  # the last line of one that was killed
                reply = json.loads(line)
                if "result" in reply:
                    found[reply.get("id")] = reply["result"]
        return found
