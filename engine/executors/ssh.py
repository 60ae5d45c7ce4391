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
_MOST_PREAMBLE = 1 << 20  # bytes that a login shell may print first
_READ_BYTES = 1 << 20  # read at once
_NO_SUCH_COMMAND = (126, 127)  # exit statuses of a shell that cannot start, or find, a command
_NAME = re.compile(r"[A-Za-z0-9_.@%:\[\]-]{1,255}")  # of a host, as ssh takes it


class HostLost(Exception):
    """The connection does not come about, or is gone: nothing is known of what runs over there."""


class HostRefused(Exception):
    """The host is there and is not taken, or does not take us; a person has to act.

    Attributes:
        hint: what to do.
    """

    def __init__(self, message: str, hint: str) -> None:
        """`message` says what is wrong, `hint` what a person can do about it."""
        super().__init__(message)
        self.message, self.hint = message, hint


class FarError(Exception):
    """The other side could not do what it was asked."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        """`code` is the error's code on the other side, or the name of its class; `hint` may be
        ""."""
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def check_destination(text: str) -> None:
    """Raise UserError BAD_ARGUMENT if `text` is no name of a host for ssh, or would be read as an
    option of ssh."""
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
        """What the other side said of itself when the connection was made: "root", "python" and
        others (`FarSide.hello`)."""
        ...

    def call(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[JsonObject, bytes]:
        """Ask the other side for an operation of `FarSide`, as `Link.call` does."""
        ...

    def job(self, name: str, **arguments: Any) -> JsonObject:
        """Call a function of jobs on the other side, as `Link.job` does."""
        ...


class Link:
    """A connection to a host, on which a program of ours answers (far_side.py). As a context
    manager it is closed at the end of the `with` block."""

    def __init__(
        self,
        destination: str,
        folder: str,
        python: str = "python3",
        options: Sequence[str] = (),
        *,
        own_group: bool = False,
    ) -> None:
        """Connect, and start the program at the other end.

        Args:
            destination: the host as `ssh` takes it; `HERE` for this machine itself, without ssh,
                for a folder that it shares with other machines.
            folder: the root, the folder on the host below which everything lies: relative to the
                user's home folder there, or an absolute path.
            python: the interpreter on the host that runs the program.
            options: options of ssh, each `Name=value`; those in `OPTIONS` come first and so win.
            own_group: whether ssh gets no signal that is sent to this process's group.

        Raises HostLost if the connection cannot be made now, HostRefused if a person has to act.
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
            env=environment(),
            process_group=0 if own_group else None,
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
        """Return the connection itself, which is open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection, whatever happened in the block."""
        self.close()

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # the process at the other end may be gone
                stream.close()
        if self._process.poll() is None:
            try:
                self._process.wait(2)  # it ends by itself when its input ends
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stderr.close()

    def call(
        self, operation: str, body: bytes = b"", *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> tuple[JsonObject, bytes]:
        """Ask the other side for an operation of `FarSide`; return (its answer, the bytes that came
        with it).

        Args:
            operation: the name of the operation, such as "put".
            body: bytes that go with the request.
            timeout_s: how many seconds the answer may take.
            arguments: the operation's arguments by name.

        Raises FarError if the operation fails there, HostLost if the connection is gone or the
        answer takes too long.
        """
        try:
            far_side.write_frame(self._requests, {"op": operation, **arguments}, body)
            self._deadline = time.monotonic() + timeout_s
            header, data = far_side.read_frame(self)
        except (OSError, EOFError) as error:
            reason = self._ssh_messages() or str(error) or "the connection ended"
            raise HostLost(reason) from error
        except (ValueError, RecursionError) as error:
            raise HostLost(f"{self.destination} answers in no form of ours") from error
        if header.get("ok") is not True:
            code, message, hint = (str(header.get(key, ""))[:2000] for key in _ERROR_KEYS)
            raise FarError(code, message, hint)
        return header, data

    def job(self, name: str, *, timeout_s: float = ANSWER_S, **arguments: Any) -> JsonObject:
        """Call the function `name` of engine/executors/jobs.py, or of the module that takes its
        place, on the host and return its result. Raises the errors of `call`."""
        return self.call("job", call=name, timeout_s=timeout_s, **arguments)[0]

    def read(self, count: int) -> bytes:
        """Read `count` bytes of an answer, or fewer if the connection ends before.

        Raises TimeoutError, an OSError, when the answer takes too long.
        """
        while len(self._buffer) < count:
            if not self._fill():
                break
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _fill(self) -> bool:
        """Wait for more bytes of the answer and add them to the buffer. Returns False at the end of
        the connection. Raises TimeoutError at the deadline of the answer."""
        descriptor = self._answers.fileno()
        seconds_left = self._deadline - time.monotonic()
        if seconds_left <= 0 or not select.select([descriptor], [], [], seconds_left)[0]:
            raise TimeoutError(f"{self.destination} did not answer in time")
        data = os.read(descriptor, _READ_BYTES)
        self._buffer += data
        return bool(data)

    def _greet(self, python: str) -> None:
        """Send the program for the other side (far_side.py), and wait until it writes MAGIC. What a
        login shell prints before that is skipped. `python` is its interpreter, for errors.

        Raises HostLost or HostRefused if the program does not start.
        """
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
        """Return the error for a connection that could not be made, from what ssh printed:
        HostRefused if a person has to act, HostLost if another try may succeed. `python` is the
        interpreter that should have started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)  # so that its last messages and exit status are there
        messages = self._ssh_messages()
        for pattern, message, hint in _REFUSALS:
            if re.search(pattern, messages):
                return HostRefused(
                    f"{self.destination}: {message}", hint.format(host=self.destination)
                )
        if self._process.returncode in _NO_SUCH_COMMAND:
            return HostRefused(
                f"{self.destination} has no {python}: {messages[-200:]}",
                "Install Python 3.11 or newer there, or name one with --python.",
            )
        return HostLost(messages or f"{self.destination} did not answer within {_START_S:.0f} s")

    def _ssh_messages(self) -> str:
        """Return the last lines that ssh printed, joined by "; ", without control characters and
        the frames of "@" that it draws. Returns "" if it printed nothing."""
        with contextlib.suppress(OSError, ValueError):  # the file is closed already
            self._stderr.seek(0)
            text = self._stderr.read()[-4000:].decode("utf-8", "replace")
            printable = ["".join(c for c in line if c.isprintable()) for line in text.splitlines()]
            lines = [line.strip(" @") for line in printable]
            return "; ".join(line for line in lines if line)[-1500:]
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


def _command(destination: str, python: str, more_options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a Python program on the host, which is then sent to its input.

    `destination` is the host as ssh takes it, or `HERE` for this machine; `more_options` are
    options of ssh beside `OPTIONS`. Raises UserError BAD_ARGUMENT if the host or the interpreter
    `python` has a name that ssh or a shell could read in another way.
    """
    if destination == HERE:
        return [python, "-I", "-c", _loader()]
    check_destination(destination)
    options: list[str] = []
    for option in (*OPTIONS, *more_options):
        options += ["-o", option]
    remote_command = f"{_checked_python(python)} -I -c '{_loader()}'"
    return ["ssh", *options, "-T", destination, "--", remote_command]


def _loader() -> str:
    """Return Python source that reads a line with a length, then a program of so many bytes from
    its input, and runs the program.

    It has no single quote, so that one pair of them is enough for every login shell.
    """
    return (
        "import sys; n = int(sys.stdin.buffer.readline()); "
        'exec(compile(sys.stdin.buffer.read(n), "far_side", "exec"))'
    )


def _checked_python(python: str) -> str:
    """Return the path of an interpreter unchanged. Raises UserError BAD_ARGUMENT if it has a
    character that some shell on the host could read in its own way."""
    if not re.fullmatch(r"[A-Za-z0-9_./+-]{1,1000}", python) or python.startswith("-"):
        raise UserError(
            "BAD_ARGUMENT",
            f"{python[:80]!r} is no path of an interpreter over there",
            hint="Give an absolute path of letters, digits and . _ + - /.",
            field="python",
        )
    return python


def environment() -> Mapping[str, str]:
    """Return the environment variables for the ssh program: those of this process without those
    whose names begin with HONESMITH_, which are no business of a host."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HONESMITH_")}
