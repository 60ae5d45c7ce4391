"""A connection to a host: the user's own `ssh` program, with the far side of us at its other end.

The user's ssh config says who and where: names, keys, jump hosts. Two things it cannot change here:
a host key that is not known is refused, and nothing is asked at a terminal. Nothing is forwarded.
"""

import contextlib
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.executors import far_side

# What holds whatever the user's config says: first value wins in ssh.
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "ControlMaster=no",  # a shared connection of the user's would end with ours
    "ControlPath=none",
    "RequestTTY=no",
    "ConnectTimeout=20",
    "ServerAliveInterval=15",  # a dead network is noticed within a minute
    "ServerAliveCountMax=4",
)
HERE = ""  # a destination: this machine
ANSWER_S = 180.0  # how long an answer may take that says nothing else
_START_S = 60.0  # until the other side is there
_MOST_PREAMBLE = 1 << 20  # what a login shell may print first
_NAME = re.compile(r"[A-Za-z0-9_.@%:\[\]-]{1,255}")  # of a host, as ssh takes it


class HostLost(Exception):
    """The connection does not come about, or is gone: nothing is known of what runs over there."""


class HostRefused(Exception):
    """The host is there and is not taken, or does not take us; a person has to act.

    Attributes:
        hint: what to do.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class FarError(Exception):
    """The other side could not do what it was asked."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def check_destination(text: str) -> None:
    """Raise UserError BAD_ARGUMENT for what is no name of a host, or would be read as an option."""
    if not _NAME.fullmatch(text) or text.startswith("-"):
        raise UserError(
            "BAD_ARGUMENT",
            f"{text[:80]!r} is no host that ssh can be given",
            hint="Give the name of a Host in your ssh config, or user@address.",
            field="ssh",
        )


class Connection(Protocol):
    """What the other side is asked through: a `Link`, or one that comes about later."""

    @property
    def facts(self) -> JsonObject:
        """What the other side said of itself when it was connected to."""
        ...

    def call(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[JsonObject, bytes]:
        """As `Link.call`."""
        ...

    def job(self, name: str, **arguments: Any) -> JsonObject:
        """As `Link.job`."""
        ...


class Link:
    """One connection. A context manager: it is closed at the end."""

    def __init__(
        self, destination: str, folder: str, python: str = "python3", options: Sequence[str] = ()
    ) -> None:
        """Connect.

        Args:
            destination: as `ssh` takes it; `HERE` for this machine itself, without ssh, as where
                the folder is shared with other machines.
            folder: the root over there, below the user's home; or an absolute path.
            python: the interpreter over there that runs the far side.
            options: of ssh beside ours (`OPTIONS`), which come first.

        Raises HostLost or HostRefused.
        """
        self.destination, self.python = destination or "this machine", python
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        self._buffer = b""
        self._deadline = 0.0
        self._process = subprocess.Popen(
            _command(destination, python, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self._greet(python)
            self.facts = self.call("hello", folder=folder)[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Link":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()
        if self._process.poll() is None:
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stderr.close()

    def call(
        self, operation: str, body: bytes = b"", *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> tuple[JsonObject, bytes]:
        """Ask the other side; returns its answer and the bytes that came with it.

        Raises FarError where it could not do it, HostLost where the connection is gone.
        """
        try:
            far_side.write_frame(self._requests, {"op": operation, **arguments}, body)
            self._deadline = time.monotonic() + timeout_s
            header, data = far_side.read_frame(self)
        except (OSError, EOFError) as error:
            raise HostLost(self._last_words() or str(error) or "the connection ended") from error
        except (ValueError, RecursionError) as error:
            raise HostLost(f"{self.destination} answers in no form of ours") from error
        if header.get("ok") is not True:
            raise FarError(*(str(header.get(key, ""))[:2000] for key in _ERROR_KEYS))
        return header, data

    def job(self, name: str, *, timeout_s: float = ANSWER_S, **arguments: Any) -> JsonObject:
        """Call a function of engine/executors/jobs.py over there. Raises as `call`."""
        return self.call("job", call=name, timeout_s=timeout_s, **arguments)[0]

    def read(self, count: int) -> bytes:
        """Read bytes of an answer: fewer than `count` only where the connection ends.

        Raises TimeoutError, an OSError, when the answer takes too long.
        """
        while len(self._buffer) < count:
            if not self._fill():
                break
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _fill(self) -> bool:
        """Wait for more bytes of the answer. Returns False at the end of the connection."""
        descriptor = self._answers.fileno()
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError(f"{self.destination} did not answer in time")
        data = os.read(descriptor, 1 << 20)
        self._buffer += data
        return bool(data)

    def _greet(self, python: str) -> None:
        """Send the far side's program and wait for its first word. Raises as the constructor."""
        program = Path(far_side.__file__).read_bytes()
        self._deadline = time.monotonic() + _START_S
        try:
            self._requests.write(b"%d\n" % len(program) + program)
            self._requests.flush()
            while far_side.MAGIC not in self._buffer:
                if len(self._buffer) > _MOST_PREAMBLE or not self._fill():
                    raise EOFError
        except (OSError, EOFError) as error:
            raise self._not_reached(python) from error
        self._buffer = self._buffer.partition(far_side.MAGIC)[2]

    def _not_reached(self, python: str) -> Exception:
        """What became of a connection that did not come about, from ssh's own words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        words = self._last_words()
        for pattern, message, hint in _REFUSALS:
            if re.search(pattern, words):
                return HostRefused(
                    f"{self.destination}: {message}", hint.format(host=self.destination)
                )
        if self._process.returncode in (126, 127):
            return HostRefused(
                f"{self.destination} has no {python}: {words[-200:]}",
                "Install Python 3.11 or newer there, or name one with --python.",
            )
        return HostLost(words or f"{self.destination} did not answer within {_START_S:.0f} s")

    def _last_words(self) -> str:
        """The last lines that ssh printed, printable characters alone."""
        with contextlib.suppress(OSError, ValueError):
            self._stderr.seek(0)
            text = self._stderr.read()[-4000:].decode("utf-8", "replace")
            lines = ["".join(c for c in line if c.isprintable()) for line in text.splitlines()]
            return "; ".join(line.strip(" @") for line in lines if line.strip(" @"))[-1500:]
        return ""


_ERROR_KEYS = ("error", "message", "hint")
# Part of what ssh prints, what it means, what to do.
_REFUSALS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .* has changed",
        "its host key is another one than before",
        "If the machine was set up anew, compare its fingerprint with its owner's, then "
        "`ssh-keygen -R` it and connect once with `ssh {host}`. If not, somebody may answer in its "
        "place: do not go on.",
    ),
    (
        r"Host key verification failed|No .*host key is known",
        "its host key is not known here",
        "Connect once with `ssh {host}`, compare the fingerprint, and accept it.",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it does not let this user in without a question",
        "Make `ssh -o BatchMode=yes {host} true` work: a key in an agent, or one without a "
        "passphrase, and its public half over there.",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad config",
        "ssh does not take your ssh config",
        "Run `ssh {host} true` and mend what it says.",
    ),
)


def _command(destination: str, python: str, more: Sequence[str] = ()) -> list[str]:
    """The command that runs the far side. Raises UserError BAD_ARGUMENT."""
    if destination == HERE:
        return [python, "-I", "-c", _loader()]
    check_destination(destination)
    options = [part for option in (*OPTIONS, *more) for part in ("-o", option)]
    remote = f"{_quoted(python)} -I -c '{_loader()}'"
    return ["ssh", *options, "-T", destination, "--", remote]


def _loader() -> str:
    """The command line that reads a program from its input and runs it.

    It has no single quote, so that one pair of them is enough for every login shell.
    """
    return (
        "import sys; n = int(sys.stdin.buffer.readline()); "
        'exec(compile(sys.stdin.buffer.read(n), "far_side", "exec"))'
    )


def _quoted(python: str) -> str:
    """The path of an interpreter in a remote command. Raises UserError BAD_ARGUMENT for one with a
    character that some shell reads in its own way."""
    if not re.fullmatch(r"[A-Za-z0-9_./+-]{1,1000}", python) or python.startswith("-"):
        raise UserError(
            "BAD_ARGUMENT",
            f"{python[:80]!r} is no path of an interpreter over there",
            hint="Give an absolute path of letters, digits and . _ + - /.",
            field="python",
        )
    return python


def _environment() -> Mapping[str, str]:
    """The variables of the ssh program: ours, without those of this server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HONESMITH_")}
