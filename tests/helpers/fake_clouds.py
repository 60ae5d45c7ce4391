"""Servers on loopback that answer as the APIs of two sandbox clouds do, as far as their own Python
packages ask here; each sandbox is a container of tests/helpers/mini_container.py."""

import base64
import email.parser
import email.policy
import json
import re
import shlex
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from mini_container import MiniContainer

KEY = "key-of-the-test"


class FakeCloud(ThreadingHTTPServer):
    """A cloud. `created` holds what was asked for each sandbox, `open` the living ones.

    Attributes:
        failures: statuses with which the next requests for a sandbox are answered.
        late_failures: the same, but the sandbox is made all the same.
        seen: the requests, "METHOD path" each.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.created: list[Any] = []
        self.open: dict[str, MiniContainer] = {}
        self.failures: list[int] = []
        self.late_failures: list[int] = []
        self.seen: list[str] = []
        self.ended: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, asked: Any) -> str:
        """Start a sandbox; its id."""
        self.created.append(asked)
        name = f"sandbox{len(self.created)}"
        self.open[name] = MiniContainer(self.folder / name)
        return name

    def named(self, wanted: dict[str, str]) -> list[str]:
        """The living sandboxes with this metadata; its names and values are quoted."""
        pairs = {unquote(name): unquote(value) for name, value in wanted.items()}
        asked = {name: self.created[int(name.removeprefix("sandbox")) - 1] for name in self.open}
        return [name for name in asked if pairs.items() <= asked[name]["metadata"].items()]

    def end(self, name: str) -> None:
        """End a sandbox."""
        self.ended.append(name)
        self.open.pop(name).close()


@contextmanager
def running(folder: Path) -> Iterator[FakeCloud]:
    """A context in which the cloud answers; its sandboxes end with it."""
    with FakeCloud(folder) as cloud:
        threading.Thread(target=cloud.serve_forever, daemon=True).start()
        try:
            yield cloud
        finally:
            cloud.shutdown()
            for name in list(cloud.open):
                cloud.open.pop(name).close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeCloud

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self._body()
        self.server.seen.append(f"{self.command} {parts.path}")
        if self.command == "POST" and parts.path in ("/sandbox", "/sandboxes", "/v2/sandboxes"):
            if self.server.failures:
                self._json(self.server.failures.pop(0), {"message": "come again", "code": 1})
                return
            asked = json.loads(body)
            asked["key"] = self.headers.get("Authorization") or self.headers.get("X-API-Key")
            name = self.server.create(asked)
            if self.server.late_failures:
                self._json(self.server.late_failures.pop(0), {"message": "lost", "code": 1})
                return
            if parts.path == "/sandbox":
                self._json(200, _as_daytona(name, asked, self.server.url))
            else:
                self._json(201, _as_e2b(name))
        elif self.command == "GET" and parts.path == "/v2/sandboxes":
            wanted = dict(parse_qsl(parse_qs(parts.query).get("metadata", [""])[0]))
            self._json(200, [_as_listed(name) for name in self.server.named(wanted)])
        elif match := re.fullmatch(r"/sandbox(?:es)?/(\w+)", parts.path):
            self._one(match[1])
        elif match := re.fullmatch(r"/toolbox/(\w+)/process/execute", parts.path):
            asked = json.loads(body)
            done = self.server.open[match[1]].run(asked["command"], asked.get("envs"))
            output = (done.stdout + done.stderr).decode()
            self._json(200, {"exitCode": done.returncode, "result": output})
        elif match := re.fullmatch(r"/toolbox/(\w+)/files/bulk-upload", parts.path):
            self._upload_daytona(match[1], body)
        elif parts.path == "/process.Process/Start":
            self._start(body)
        elif parts.path == "/files":
            name = str(self.headers["E2b-Sandbox-Id"])
            path = parse_qs(parts.query)["path"][0]
            self.server.open[name].run(_into(path), data=self._parts(body)[0][1])
            self._json(200, [{"name": path, "type": "file", "path": path}])
        else:
            self._json(404, {"message": "not here"})

    def _one(self, name: str) -> None:
        if self.command == "DELETE" and name in self.server.open:
            self.server.end(name)
            if self.path.startswith("/sandboxes"):
                self._send(204, b"", "text/plain")
                return
        asked = self.server.created[int(name.removeprefix("sandbox")) - 1]
        self._json(200, _as_daytona(name, asked, self.server.url))

    def _upload_daytona(self, name: str, body: bytes) -> None:
        parts = dict(self._parts(body))
        path = parts["files[0].path"].decode()
        self.server.open[name].run(_into(path), data=parts["files[0].file"])
        self._json(200, {})

    def _start(self, body: bytes) -> None:
        """One command of E2B: a stream of events, each with five bytes in front."""
        name = str(self.headers["E2b-Sandbox-Id"])
        asked = json.loads(body[5:])["process"]
        done = self.server.open[name].run(asked["args"][-1], asked.get("envs"))
        events: list[Any] = [{"start": {"pid": 7}}]
        for stream, data in (("stdout", done.stdout), ("stderr", done.stderr)):
            if data:
                events.append({"data": {stream: base64.b64encode(data).decode()}})
        status = f"exit status {done.returncode}"
        events.append({"end": {"exitCode": done.returncode, "exited": True, "status": status}})
        frames = b"".join(_frame(0, {"event": event}) for event in events) + _frame(2, {})
        self._send(200, frames, "application/connect+json")

    def _parts(self, body: bytes) -> list[tuple[str, bytes]]:
        """The parts of a form, by name."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
        return [
            (
                str(part.get_param("name", header="content-disposition")),
                part.get_payload(decode=True),
            )
            for part in form.iter_parts()
        ]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _into(path: str) -> str:
    return f"cat >{shlex.quote(path)}"


def _frame(flags: int, value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack(">BI", flags, len(data)) + data


def _as_daytona(name: str, asked: Any, url: str) -> dict[str, Any]:
    """What Daytona says of a sandbox."""
    return {
        "id": name,
        "organizationId": "o",
        "name": name,
        "user": "root",
        "env": asked.get("env", {}),
        "labels": asked.get("labels", {}),
        "public": False,
        "networkBlockAll": bool(asked.get("networkBlockAll")),
        "target": "us",
        "cpu": 1,
        "gpu": 0,
        "memory": 1,
        "disk": 3,
        "state": "started",
        "desiredState": "started",
        "kvm": False,
        "toolboxProxyUrl": f"{url}/toolbox",
    }


def _as_e2b(name: str) -> dict[str, Any]:
    """What E2B says of a new one."""
    return {
        "sandboxID": name,
        "templateID": "t",
        "clientID": "c",
        "envdVersion": "0.5.0",
        "envdAccessToken": "e",
        "domain": None,
    }


def _as_listed(name: str) -> dict[str, Any]:
    """What E2B says of one in a list."""
    return {
        "sandboxID": name,
        "templateID": "t",
        "clientID": "c",
        "startedAt": "2026-01-01T00:00:00Z",
        "endAt": "2026-01-01T01:00:00Z",
        "cpuCount": 1,
        "memoryMB": 512,
        "diskSizeMB": 512,
        "state": "running",
        "envdVersion": "0.5.0",
    }
