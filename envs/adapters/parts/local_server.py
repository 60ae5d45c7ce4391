"""Starts a server program from the environment's folder, and asks it over loopback.

The sandbox has opened the server's port for this purpose alone. Standard library only, because the
programs of `envs/adapters/programs/` import this file too.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLL_S = 0.02  # seconds between two attempts to reach a server that is starting
REPLY_BYTES = 16 << 20  # how much of a reply is read


class ServerFault(Exception):
    """The server ended, did not answer, or sent an answer that cannot be read."""


@contextmanager
def running(command: Sequence[str], folder: Path, port: int, seconds: float) -> Iterator[str]:
    """A context in which the server runs; yields its URL.

    Args:
        command: the program and its arguments; `python3` means this interpreter. The environment
            variable PORT tells the program its port.
        folder: the folder in which it runs.
        port: the port on which it must listen.
        seconds: the time within which it must answer `/health`.

    Raises ServerFault if it cannot be started, ends, or does not answer in time.
    """
    process = start(command, folder, port)
    try:
        url = f"http://127.0.0.1:{port}"
        await_health(url, seconds, process)
        yield url
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]", seconds: float = 0.0) -> None:
    """End a server program that this process started.

    Where the box refuses every signal (a kernel without Landlock's rule for them, and no
    namespaces), the server is given `seconds` to leave by itself and then left running: the parent
    of the box ends everything in it.
    """
    try:
        process.kill()
    except PermissionError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return
    process.wait()


def start(command: Sequence[str], folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start the server program `command` in `folder`, with its `port` in the environment variable
    PORT; do not wait until it answers. Raises ServerFault if it cannot be started."""
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    try:
        return subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env={**os.environ, "PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
    except OSError as error:
        raise ServerFault(f"the server {command[0]} cannot be started: {error.strerror}") from error


def await_health(
    url: str, seconds: float, process: "subprocess.Popen[bytes] | None" = None
) -> None:
    """Wait until the server at `url` answers `/health`. Raises ServerFault if `process` (that
    server, if it was started here) ends first or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ValueError):  # not listening yet, or an error status
            urllib.request.urlopen(f"{url}/health", timeout=seconds).close()
            return
        if process is not None and process.poll() is not None:
            raise ServerFault(f"the server left with exit status {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerFault(f"the server did not answer {url}/health within {seconds:g} s")
        time.sleep(POLL_S)


def request_json(
    url: str, seconds: float, body: Any = None, headers: Mapping[str, str] | None = None
) -> Any:
    """Return the JSON answer to a GET of `url`, or with a `body` to a POST of it as JSON.

    Raises ServerFault if the answer is not JSON, has an error status, or takes longer than
    `seconds`.
    """
    data = None if body is None else json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    try:
        request = urllib.request.Request(url, data, all_headers)  # ValueError: no URL
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return json.loads(reply.read(REPLY_BYTES))
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode("utf-8", "replace")
        raise ServerFault(f"{url} answered {error.code}: {text[:300]}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ServerFault(f"{url} answered nothing that is JSON: {error}") from error
