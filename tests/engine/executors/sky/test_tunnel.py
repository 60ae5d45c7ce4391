"""The way to a pod: a WebSocket that carries one ssh connection."""

import base64
import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.executors.sky import tunnel
from engine.executors.sky.tunnel import Broken, WebSocket, carry, opened

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Server:
    """Takes one WebSocket, and answers each message with itself twice."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}/sky"
        self.head, self.status = "", "101 Switching Protocols"
        self.accept = b""
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with contextlib.suppress(ConnectionError):  # the other end is gone
            self.answer()

    def answer(self) -> None:
        wire, _ = self.listener.accept()
        data = b""
        while b"\r\n\r\n" not in data:
            data += read_some(wire, 4096)
        self.head = data.decode()
        (line,) = [each for each in self.head.split("\r\n") if each.startswith("Sec-WebSocket-Key")]
        key = line.partition(": ")[2].encode()
        accept = self.accept or base64.b64encode(hashlib.sha1(key + _MAGIC).digest())
        wire.sendall(
            f"HTTP/1.1 {self.status}\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: ".encode()
            + accept
            + b"\r\n\r\n"
            + frame(b"SSH-2.0-"[:3], last=False)
            + frame(b"", 9)  # a ping in between
            + frame(b"-2.0\n", 0)
        )
        while (message := self.message(wire)) is not None:
            wire.sendall(frame(message * 2))
        wire.close()

    def message(self, wire: socket.socket) -> bytes | None:
        while True:
            first, second = exactly(wire, 2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(exactly(wire, 2 if size == 126 else 8), "big")
            mask = exactly(wire, 4)
            content = bytes(c ^ mask[i % 4] for i, c in enumerate(exactly(wire, size)))
            if first & 0x0F == 8:
                return None
            if first & 0x0F == 2:
                return content


def exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += read_some(wire, count - len(data))
    return data


def read_some(wire: socket.socket, most: int) -> bytes:
    data = wire.recv(most)
    if not data:  # asked again, it would say so at once, for ever
        raise ConnectionError
    return data


def frame(content: bytes, kind: int = 2, *, last: bool = True) -> bytes:
    size = len(content)
    if size < 126:
        length = bytes([size])
    elif size < 1 << 16:
        length = b"\x7e" + size.to_bytes(2, "big")
    else:
        length = b"\x7f" + size.to_bytes(8, "big")
    return bytes([(0x80 if last else 0) | kind]) + length + content


@pytest.fixture(name="server")
def a_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.listener.close()


@pytest.mark.parametrize("size", [1, 125, 126, 60_000, 65_536])
def test_bytes_go_there_and_come_back_whole(server, size):
    web = opened(server.address, "hs-x-run-1", "token")
    given_end, given = os.pipe()
    taken, taken_end = os.pipe()
    thread = threading.Thread(target=carry, args=(web, given_end, taken_end), daemon=True)
    thread.start()
    sent = os.urandom(size)
    os.write(given, sent)
    came = b""
    while len(came) < 8 + 2 * size:
        came += os.read(taken, 1 << 16)
    assert came == b"SSH-2.0\n" + sent * 2 or came.replace(b"SSH-2.0\n", b"", 1) == sent * 2
    os.close(given)
    thread.join(10)
    assert not thread.is_alive()
    assert "GET /sky/kubernetes-pod-ssh-proxy?cluster_name=hs-x-run-1 HTTP/1.1" in server.head
    assert "Authorization: Bearer token" in server.head


@pytest.mark.parametrize(
    ("change", "words"),
    [({"status": "403 Forbidden"}, "403 Forbidden"), ({"accept": b"other"}, "another question")],
)
def test_what_is_no_websocket_is_refused(server, change, words):
    vars(server).update(change)
    with pytest.raises(Broken, match=words):
        opened(server.address, "hs-x-run-1", "")


@pytest.mark.parametrize(
    "received",
    [b"\x82\xff" + b"\xff" * 8, b"\x82\x7f" + b"\xff" * 8, b"\x83\x00", b"\x82\x85abcd12345"],
)
def test_a_frame_that_none_sends_is_refused(received):
    wire: Any = None
    with pytest.raises(Broken):
        WebSocket(wire).take(received)


def test_a_message_in_many_parts_has_an_end(monkeypatch):
    monkeypatch.setattr(tunnel, "_MOST_MESSAGE", 100)
    wire: Any = None
    web = WebSocket(wire)
    with pytest.raises(Broken, match="without an end"):
        for _ in range(3):
            web.take(frame(b"x" * 50, 0, last=False))
