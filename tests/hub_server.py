"""A hub on the loopback: what it answers about one repository, and what it was asked."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the server holds and what it was asked."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str, str]] = []  # path, Range, Authorization
        self.sent = 0
        self.status = 200
        self.cut_at: int | None = None  # break the connection after so many bytes of weights
        self.stall_at: int | None = None  # send so many bytes of weights, then nothing
        self.go_on = threading.Event()
        self.ranges = True
        self.card: dict[str, Any] | None = None
        self.url = ""

    def listing(self) -> bytes:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest()},
            }
            for name, data in self.files.items()
        ]
        answer = {"sha": COMMIT, "siblings": siblings, "cardData": self.card}
        return json.dumps(answer).encode()


def handler(state: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, span = self.path.partition("?")[0], self.headers.get("Range", "")
            state.asked.append((path, span, self.headers.get("Authorization", "")))
            if state.status != 200:
                self.send_error(state.status)
                return
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            data = state.listing() if path.startswith("/api/") else state.files.get(name)
            if data is None:
                self.send_error(404)
                return
            start, end = 0, len(data)
            if span and state.ranges:
                first, _, last = span.removeprefix("bytes=").partition("-")
                start, end = int(first), min(end, int(last) + 1 if last else end)
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if span and state.ranges else 200)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            body = data[start:end]
            if state.cut_at is not None and len(body) > state.cut_at:
                body, state.cut_at = body[: state.cut_at], None
            state.sent += len(body)
            if state.stall_at is not None and len(body) > state.stall_at:
                self.wfile.write(body[: state.stall_at])
                state.go_on.wait(10)
                return
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(state: Hub, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Context manager: `state` answers as the hub that HF_ENDPOINT names."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", state.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(shared_cache))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield state
    httpd.shutdown()
    httpd.server_close()
