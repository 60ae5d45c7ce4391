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
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # which RFC 6455 adds to the key of a request
_CONNECT_S = 60.0
_MOST_HEAD = 64 << 10  # bytes of the head of the server's answer
_MOST_MESSAGE = 16 << 20  # bytes of a message
_CHUNK = 64 << 10  # bytes that are read at once
# Kinds of frames ("opcodes"): a continued message, text, bytes, and three that control.
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
# The highest bit: of a frame's first byte, that it ends its message; of its second, that it is
# masked.
_LAST = _MASKED = 0x80
_LENGTH_16, _LENGTH_64 = 126, 127  # in place of a length: it follows in 2 or 8 bytes
_NORMAL_CLOSURE = 1000  # the code of a connection that is closed because it is done


class Broken(Exception):
    """The server does not speak as a WebSocket does, or refuses the connection."""


@dataclass
class WebSocket:
    """One connection, of which this side is the client.

    Attributes:
        wire: the socket.
        data: bytes that were received and are no whole frame yet.
        parts: the parts of a message in several frames that have come so far.
    """

    wire: socket.socket
    data: bytes = b""
    parts: list[bytes] = field(default_factory=list)

    def send(self, content: bytes, kind: int = _BINARY) -> None:
        """Send one message in one frame. `kind` is the kind of frame. The content is masked (XOR
        with four random bytes, again and again), as that of a client must be."""
        size = len(content)
        if size < _LENGTH_16:
            length = bytes([_MASKED | size])
        elif size < 1 << 16:
            length = bytes([_MASKED | _LENGTH_16]) + size.to_bytes(2, "big")
        else:
            length = bytes([_MASKED | _LENGTH_64]) + size.to_bytes(8, "big")
        mask = secrets.token_bytes(4)
        repeated_mask = (mask * (size // 4 + 1))[:size]
        # As two large numbers, which is much faster than byte by byte.
        masked = int.from_bytes(content, "big") ^ int.from_bytes(repeated_mask, "big")
        head = bytes([_LAST | kind]) + length + mask
        self.wire.sendall(head + masked.to_bytes(size, "big"))

    def take(self, received: bytes) -> list[bytes] | None:
        """Return the messages that are complete with the bytes that were just received; None if the
        server has closed the connection. Incomplete ones are kept for the next call.

        Pings are answered. Raises Broken for bytes that are no valid frame.
        """
        self.data += received
        messages = []
        while (frame := self._frame()) is not None:
            is_last, kind, content = frame
            if kind == _CLOSE:
                return None
            if kind == _PING:
                self.send(content, _PONG)
            elif kind in (_CONTINUED, _TEXT, _BINARY):
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
        """Take the next whole frame off the received bytes: (whether it ends its message, its kind,
        its content). Returns None if there is none yet. Raises Broken for a frame that a server may
        not send."""
        data = self.data
        if len(data) < 2:
            return None
        size, start = data[1] & 0x7F, 2  # `start`: where the content begins
        if data[1] & _MASKED:
            raise Broken("a masked frame from the server")
        if size in (_LENGTH_16, _LENGTH_64):
            width = 2 if size == _LENGTH_16 else 8
            if len(data) < start + width:
                return None
            size, start = int.from_bytes(data[start : start + width], "big"), start + width
        if size > _MOST_MESSAGE:
            raise Broken("a frame that is too large")
        if len(data) < start + size:
            return None
        self.data = data[start + size :]
        return bool(data[0] & _LAST), data[0] & 0x0F, data[start : start + size]


def opened(server: str, cluster: str, token: str) -> WebSocket:
    """Open a WebSocket to the pod of a cluster, through the API server.

    Args:
        server: the URL of the server.
        cluster: the cluster's name.
        token: the token for the server; "" for none.

    Raises Broken if the server refuses the connection or does not answer as a WebSocket, OSError if
    it is not reached.
    """
    url = urlsplit(server)
    is_encrypted = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if is_encrypted else 80)
    wire = socket.create_connection((host, port), _CONNECT_S)
    if is_encrypted:
        wire = ssl.create_default_context().wrap_socket(wire, server_hostname=host)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    lines = [
        f"GET {url.path.rstrip('/')}{_PATH}?cluster_name={quote(cluster, safe='')} HTTP/1.1",
        f"Host: {url.netloc}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
    ]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    wire.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    data = b""
    while b"\r\n\r\n" not in data:
        received = wire.recv(_CHUNK)
        data += received
        if not received or len(data) > _MOST_HEAD:
            raise Broken("no answer of a WebSocket")
    head, _, first_frames = data.partition(b"\r\n\r\n")
    _require_acceptance(head, key)
    wire.settimeout(None)
    return WebSocket(wire, first_frames)


def _require_acceptance(head: bytes, key: str) -> None:
    """Raise Broken unless the head of the server's answer accepts the WebSocket: with the status
    101, and with the hash that only an answer to the request with this `key` has."""
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    if " 101 " not in f"{status_line} ":
        raise Broken(f"the server refuses the connection: {status_line[:200]}")
    expected = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
    fields = [line.partition(":") for line in header_lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    if headers.get("sec-websocket-accept") != expected:
        raise Broken("an answer to another question")


def carry(web: WebSocket, source: int, target: int) -> None:
    """Send to the WebSocket what is read from the file descriptor `source`, and write to `target`
    what comes from it, until one of the two sides ends."""
    messages = web.take(b"")  # frames that came with the head of the server's answer
    while messages is not None:
        for message in messages:
            _write_all(target, message)
        messages = []
        # `select` does not see bytes that the TLS layer has read from the socket already.
        is_buffered = isinstance(web.wire, ssl.SSLSocket) and web.wire.pending() > 0
        ready = [web.wire] if is_buffered else select.select([source, web.wire], [], [])[0]
        if source in ready:
            content = os.read(source, _CHUNK)
            if not content:
                web.send(_NORMAL_CLOSURE.to_bytes(2, "big"), _CLOSE)
                return
            web.send(content)
        if web.wire in ready:
            received = web.wire.recv(_CHUNK)
            if not received:
                return
            messages = web.take(received)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a file descriptor, however few it takes at once."""
    while data:
        written = os.write(descriptor, data)
        data = data[written:]


def main(root: str, host_name: str, cluster: str) -> int:
    """Carry the bytes of one ssh connection between this process's stdin and stdout and the pod of
    a cluster. Returns the exit status.

    `root` is the folder of the home, `host_name` the name of the host in config.toml.
    """
    home = Home(Path(root))
    try:
        host = hosts.host_of(home, host_name)
        token, _ = token_of(home, host)
        web = opened(host.sky.address, cluster, token)
        carry(web, source=0, target=1)  # stdin and stdout
    except (Broken, OSError, UserError, HostRefused) as error:
        sys.stderr.write(f"the pod of {cluster} is not reached: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
