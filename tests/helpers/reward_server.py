"""A real server on loopback that says what rollouts of a command earned."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def processes_with(text: str) -> list[str]:
    """The ids of processes with a text in their command."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes():
                pids.append(entry.name)
    return pids


@dataclass
class RewardServer:
    """A server that answers every request in one way, and keeps what it was asked.

    Attributes:
        alive: the processes of programs with `mark` in their command that lived at each request.
    """

    reply: bytes = b"1"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    mark: str = "71.41"
    url: str = ""
    asked: list[dict] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)


@contextlib.contextmanager
def reward_server() -> Iterator[RewardServer]:
    """A reward server on loopback."""
    server = RewardServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.alive += processes_with(server.mark)
            server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            ended.wait(server.wait_s)
            with contextlib.suppress(OSError):  # the client has left
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(server.reply)

        def log_message(self, *_: object) -> None:
            pass

    ended = threading.Event()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}/reward"
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        ended.set()
        http.shutdown()
        http.server_close()
