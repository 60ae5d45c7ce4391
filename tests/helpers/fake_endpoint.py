"""A real server on loopback that speaks OpenAI's chat API, and answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine.home.run_dir import Home

Body = dict[str, Any]


@dataclass
class Said:
    """What the server answers to one request."""

    text: str | None = ""
    status: int = 200
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments as text
    finish: str = "stop"
    usage: dict[str, int] | None = field(
        default_factory=lambda: {"prompt_tokens": 10, "completion_tokens": 5}
    )
    headers: dict[str, str] = field(default_factory=dict)
    raw: Any = None  # the whole reply, in place of one made of the above

    def body(self) -> Any:
        if self.raw is not None:
            return self.raw
        if self.status != 200:
            return {"error": {"message": self.text}}
        message: Body = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": f"c{n}", "type": "function", "function": {"name": a, "arguments": b}}
                for n, (a, b) in enumerate(self.calls)
            ]
        reply: Body = {"choices": [{"message": message, "finish_reason": self.finish}]}
        return reply | ({"usage": self.usage} if self.usage else {})


@dataclass
class FakeEndpoint:
    """The server.

    Attributes:
        bodies: the requests so far, in the order in which they came.
        keys: the bearer token of each.
        most_at_once: how many were answered at once.
    """

    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prompts(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def config(self, home: Home, name: str = "fake", **more: Any) -> str:
        """Write [endpoints.NAME] for this server into the home's config.toml; the reference."""
        values = {"url": self.url, "model": "fake-1", "key_env": "FAKE_KEY"} | more
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        before = home.config_file.read_text() if home.config_file.exists() else ""
        table = "\n".join([f"[endpoints.{name}]", *lines])
        home.config_file.write_text(f"{before}\n{table}\n")
        return f"openai:{name}"


@contextmanager
def fake_endpoint(answer: Callable[[Body], Said]) -> Iterator[FakeEndpoint]:
    """A server that answers every chat request by `answer`, and 404 to any other."""
    fake = FakeEndpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with fake._lock:
                fake.bodies.append(body)
                fake.keys.append(self.headers.get("authorization", ""))
                fake._now += 1
                fake.most_at_once = max(fake.most_at_once, fake._now)
            said = answer(body) if self.path == "/v1/chat/completions" else Said("?", status=404)
            with fake._lock:
                fake._now -= 1
            data = json.dumps(said.body()).encode()
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        fake.url = f"http://127.0.0.1:{http.server_port}/v1"
        try:
            yield fake
        finally:
            http.shutdown()
            thread.join()
