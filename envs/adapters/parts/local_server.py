"""A server that belongs to the environment's folder: started beside it, asked over loopback.

The port is one that the sandbox has opened for it and for nothing else. Standard library only: the
programs of `envs/adapters/programs/` read this file too.
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

POLL_S = 0.02  # between two tries to reach a server that is starting
REPLY_BYTES = 16 << 20  # of one reply


class ServerFault(Exception):
    """The server ended, did not answer, or answered nothing that could be read."""


@contextmanager
def running(command: Sequence[str], folder: Path, port: int, seconds: float) -> Iterator[str]:
    """A context with the server under way; gives its URL.

    Args:
        command: the program and its arguments, run in `folder`; `python3` is this interpreter. The
            variable PORT names the port it must listen on.
        seconds: it must answer `/health` by then.

    Raises ServerFault if it ends or does not answer in time.
    """
    process = start(command, folder, port)
    try:
        url = f"http://127.0.0.1:{port}"
        await_health(url, seconds, process)
        yield url
    finally:
        process.kill()
        process.wait()


def start(command: Sequence[str], folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start the server; see `running`. Raises ServerFault where it cannot be started."""
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
    """Wait until `/health` answers. Raises ServerFault if `process` ends or time is up before."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ValueError):
            urllib.request.urlopen(f"{url}/health", timeout=seconds).close()
            return
        if process is not None and process.poll() is not None:
            raise ServerFault(f"the server left with exit status {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerFault(f"the server did not answer {url}/health within {seconds:g} s")
        time.sleep(POLL_S)


def asked(
    url: str, seconds: float, body: Any = None, headers: Mapping[str, str] | None = None
) -> Any:
    """What a GET, or with `body` a POST of JSON, answers. Raises ServerFault for no JSON, an error
    status, and where it takes longer than `seconds`."""
    data = None if body is None else json.dumps(body).encode()
    told = {"Content-Type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, told), timeout=seconds
        ) as reply:
            return json.loads(reply.read(REPLY_BYTES))
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode("utf-8", "replace")
        raise ServerFault(f"{url} answered {error.code}: {text[:300]}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ServerFault(f"{url} answered nothing that is JSON: {error}") from error
