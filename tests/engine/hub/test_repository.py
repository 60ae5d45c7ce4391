"""One file of the hub fetched by several processes at once: each has a partial file of its own."""

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from engine.hub.repository import RemoteFile, download

CONTENT = bytes(range(256)) * 40


class Slow(BaseHTTPRequestHandler):
    """Sends half of the file, and the rest when the test lets it."""

    go = threading.Event()
    half_sent = threading.Semaphore(0)
    ranges: list[str] = []  # noqa: RUF012  emptied by the fixture

    def do_GET(self) -> None:
        start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        self.ranges.append(start)
        rest = CONTENT[int(start) :]
        self.send_response(206 if int(start) else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        middle = len(rest) // 2
        self.wfile.write(rest[:middle])
        self.wfile.flush()
        self.half_sent.release()
        self.go.wait()
        self.wfile.write(rest[middle:])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Slow.go.clear()
    Slow.ranges.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/rows.jsonl"
    Slow.go.set()
    server.shutdown()
    server.server_close()


FILE = RemoteFile(name="rows.jsonl", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


def test_two_first_downloads_of_one_file_do_not_write_into_each_other(url: str, tmp_path: Path):
    target = tmp_path / "rows.jsonl"
    faults: list[str] = []

    def fetch() -> None:
        with httpx.Client() as client:
            faults.append(download(client, url, target, FILE))

    both = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in both:
        thread.start()
    for _ in both:
        assert Slow.half_sent.acquire(timeout=4)
    deadline = time.monotonic() + 4
    while len(list(tmp_path.glob("*.part"))) < 2:  # until both are under way at the same time
        assert time.monotonic() < deadline
    Slow.go.set()
    for thread in both:
        thread.join()
    assert faults == ["", ""] and target.read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_an_earlier_attempt_has_left_is_continued(url: str, tmp_path: Path):
    target = tmp_path / "rows.jsonl"
    (tmp_path / "rows.jsonl.part").write_bytes(CONTENT[:1000])
    Slow.go.set()
    with httpx.Client() as client:
        assert download(client, url, target, FILE) == ""
    assert target.read_bytes() == CONTENT and Slow.ranges == ["1000"]
