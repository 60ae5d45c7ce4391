"""Carries one ssh connection to the pod of a cluster on Kubernetes, through the API server.

`python -P -m engine.executors.sky.tunnel HOME HOST CLUSTER` is what ssh starts as its
ProxyCommand: what it is given goes into a WebSocket (RFC 6455) as binary messages, and back. The
connection inside is encrypted end to end; the server sees which pod it leads to.
"""

import base64
import hashlib
import os
import secrets
import select
import socket
import ssl
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from engine.core.errors import UserError
from engine.executors import hosts
from engine.executors.sky.access import token_of
from engine.executors.ssh import HostRefused
from engine.home.run_dir import Home

_PATH = "/kubernetes-pod-ssh-proxy"
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONNECT_S = 60.0
_MOST_HEAD = 64 << 10
_MOST_MESSAGE = 16 << 20
_CHUNK = 64 << 10
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_LAST = 0x80
_LENGTH_16, _LENGTH_64 = 126, 127


class Broken(Exception):
    """The server does not speak as a WebSocket does, or refuses the connection."""


@dataclass
class WebSocket:
    """One connection, of which this side is the client."""

    wire: socket.socket
    data: bytes = b""
    parts: list[bytes] = field(default_factory=list)  # of a message in several frames

    def send(self, content: bytes, kind: int = _BINARY) -> None:
        """Send one message, masked as a client's must be."""
        size = len(content)
        if size < _LENGTH_16:
            length = bytes([_LAST | size])
        elif size < 1 << 16:
            length = bytes([_LAST | _LENGTH_16]) + size.to_bytes(2, "big")
        else:
            length = bytes([_LAST | _LENGTH_64]) + size.to_bytes(8, "big")
        mask = secrets.token_bytes(4)
        repeated = (mask * (size // 4 + 1))[:size]
        masked = int.from_bytes(content, "big") ^ int.from_bytes(repeated, "big")
        head = bytes([_LAST | kind]) + length + mask
        self.wire.sendall(head + masked.to_bytes(size, "big"))

    def take(self, received: bytes) -> list[bytes] | None:
        """The messages that are complete with these bytes; None once the server has closed.

        Pings are answered. Raises Broken for what is no frame.
        """
        self.data += received
        messages = []
        while (frame := self._frame()) is not None:
            is_last, kind, content = frame
            if kind == _CLOSE:
                return None
            if kind == _PING:
                self.send(content, _PONG)
            elif kind in (0, _TEXT, _BINARY):
                self.parts.append(content)
                if sum(map(len, self.parts)) > _MOST_MESSAGE:
                    raise Broken("a message without an end")
                if is_last:
                    messages.append(b"".join(self.parts))
                    self.parts = []
            elif kind != _PONG:
                raise Broken(f"a frame of kind {kind}")
        return messages

    def _frame(self) -> tuple[bool, int, bytes] | None:
        """The next whole frame: whether it ends its message, its kind, its content."""
        data = self.data
        if len(data) < 2:
            return None
        size, at = data[1] & 0x7F, 2
        if data[1] & _LAST:
            raise Broken("a masked frame from the server")
        if size in (_LENGTH_16, _LENGTH_64):
            width = 2 if size == _LENGTH_16 else 8
            if len(data) < at + width:
                return None
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        if size > _MOST_MESSAGE:
            raise Broken("a frame that is too large")
        if len(data) < at + size:
            return None
        self.data = data[at + size :]
        return bool(data[0] & _LAST), data[0] & 0x0F, data[at : at + size]


def opened(server: str, cluster: str, token: str) -> WebSocket:
    """Connect to the pod of a cluster. Raises Broken or OSError."""
    parts = urlsplit(server)
    is_safe = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_safe else 80)
    wire = socket.create_connection((host, port), _CONNECT_S)
    if is_safe:
        wire = ssl.create_default_context().wrap_socket(wire, server_hostname=host)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    lines = [
        f"GET {parts.path.rstrip('/')}{_PATH}?cluster_name={quote(cluster, safe='')} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
        *([f"Authorization: Bearer {token}"] if token else []),
    ]
    wire.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    data = b""
    while b"\r\n\r\n" not in data:
        more = wire.recv(_CHUNK)
        data += more
        if not more or len(data) > _MOST_HEAD:
            raise Broken("no answer of a WebSocket")
    head, _, rest = data.partition(b"\r\n\r\n")
    answer = head.decode("latin-1").split("\r\n")
    if " 101 " not in f"{answer[0]} ":
        raise Broken(f"the server refuses the connection: {answer[0][:200]}")
    expected = base64.b64encode(hashlib.sha1((key + _MAGIC).encode()).digest()).decode()
    fields = [line.partition(":") for line in answer[1:]]
    accepted = {name.strip().lower(): value.strip() for name, _, value in fields}
    if accepted.get("sec-websocket-accept") != expected:
        raise Broken("an answer to another question")
    wire.settimeout(None)
    return WebSocket(wire, rest)


def carry(web: WebSocket, given: int, taken: int) -> None:
    """Carry bytes between a WebSocket and two descriptors until one of them ends."""
    messages = web.take(b"")
    while messages is not None:
        for message in messages:
            _write(taken, message)
        messages = []
        is_buffered = isinstance(web.wire, ssl.SSLSocket) and web.wire.pending() > 0
        ready = [web.wire] if is_buffered else select.select([given, web.wire], [], [])[0]
        if given in ready:
            content = os.read(given, _CHUNK)
            if not content:
                web.send((1000).to_bytes(2, "big"), _CLOSE)
                return
            web.send(content)
        if web.wire in ready:
            received = web.wire.recv(_CHUNK)
            if not received:
                return
            messages = web.take(received)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def main(root: str, host_name: str, cluster: str) -> int:
    """Carry one connection; returns the exit status."""
    home = Home(Path(root))
    try:
        host = hosts.host_of(home, host_name)
        token, _ = token_of(home, host)
        carry(opened(host.sky.address, cluster, token), 0, 1)
    except (Broken, OSError, UserError, HostRefused) as error:
        sys.stderr.write(f"the pod of {cluster} is not reached: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
