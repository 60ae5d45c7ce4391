"""The audit log: one line for every call that changes something, over HTTP, stdio or in a shell.

The file `audit.jsonl` in the home (mode 0600) only grows. It holds a digest of the arguments and
not the arguments, because they may contain what a person does not want to be stored twice.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.files import Appender
from engine.core.reply import Reply
from engine.home.run_dir import Home
from mcp_server.access.log import log

_ID_FIELDS = ("run_id", "env_id", "deployment_id", "key")  # fields of replies that name things
LOCAL = "local"  # the caller of a shell command: anyone who may use this machine's account


@dataclass(frozen=True)
class Call:
    """A call that is about to change something.

    Attributes:
        caller: name of the key that calls, or `LOCAL`.
        via: http, stdio or cli.
        tool: name of the tool, or of the change that a command makes.
        arguments: the arguments of the call, by name; only their digest is stored.
    """

    caller: str
    via: str
    tool: str
    arguments: Mapping[str, Any]


class Record:
    """How a call ended.

    Attributes:
        result: "ok", "asked" (a person is asked first), an error code, or "cut short" until the end
            is known.
        details: further fields of the line, such as the ids in the reply.
    """

    def __init__(self) -> None:
        """Start a record of a call whose result is not known yet. The result is "cut short", which
        stays if neither `succeeded` nor `failed` is called before the process ends."""
        self.result = "cut short"
        self.details: dict[str, str | bool] = {}

    def succeeded(self, reply: Any) -> None:
        """Note that the call succeeded, and the ids in its `reply` (the fields in `_ID_FIELDS`).

        A reply that is not an object, such as a text, has no ids. The line of a resumed run gets
        `resumed`, because the log already holds its id in the line of the first start.
        """
        self.result = "ok"
        if not isinstance(reply, Mapping):
            return
        # A reply has only some of these fields, and a field may be null.
        self.details = {
            name: reply[name] for name in _ID_FIELDS if isinstance(reply.get(name), str)
        }
        if "resumed_from" in reply:
            self.details["resumed"] = True

    def failed(self, error: BaseException) -> None:
        """Note how the call failed.

        The result becomes the code of a UserError, or INTERNAL for any other Exception (a bug). It
        stays "cut short" for an interruption, such as a cancelled call or a Ctrl-C.
        """
        # The MCP SDK wraps what a tool raises in an error of its own.
        if isinstance(error.__cause__, UserError):
            error = error.__cause__
        if isinstance(error, UserError):
            self.result = error.code
        elif isinstance(error, Exception):
            self.result = "INTERNAL"


class Audit:
    """The audit log of one home.

    Args:
        home: the home whose `audit.jsonl` is written and read.
        clock: returns the present time in unix seconds.
    """

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        """Open nothing yet; the docstring of the class explains the arguments."""
        self._home = home
        self._clock = clock

    @contextlib.contextmanager
    def recording(self, call: Call) -> Iterator[Record]:
        """Context manager: yield a `Record` for the block to fill in, and write the line of `call`
        into the log when the block has ended.

        The line is written whether the block succeeds, fails or is interrupted. The log is opened
        before the block runs, so a call that could not be recorded is not made.

        Raises:
            UserError: HOME_UNUSABLE if the log cannot be opened.
        """
        try:
            log_file = Appender(self._home.audit)
        except OSError as error:
            raise UserError(
                "HOME_UNUSABLE",
                f"the audit log {self._home.audit} cannot be written: {error.strerror or error}",
                hint="Nothing was done. Make the home writable, then call again.",
                retryable=True,
            ) from error
        record = Record()
        with log_file:
            try:
                yield record
            except BaseException as error:  # also a cancelled call, which is no Exception
                record.failed(error)
                raise
            finally:
                self._write_line(log_file, call, record)  # also if the block was interrupted

    def _write_line(self, log_file: Appender, call: Call, record: Record) -> None:
        """Append the line of `call` to the audit log.

        If that fails, the error is written to the server's own log and not raised.
        """
        line: dict[str, object] = {
            "time": round(self._clock(), 3),
            "who": call.caller,
            "via": call.via,
            "tool": call.tool,
            "args": digest(call.arguments),
            "result": record.result,
            **record.details,
        }
        try:
            log_file.append(line)
        except OSError:  # the disk filled up during the call, which cannot be undone
            log.exception("a call of %s is missing in the audit log", call.tool)

    def runs_of(self, caller: str, since: float = 0.0) -> list[str]:
        """Return the ids of the runs that `caller` started or resumed at `since` or later, each
        once, in the order of the log.

        The first successful call of a tool in `TOOLS_THAT_START_RUNS` that names a run has started
        the run. A later call has resumed the run if its line says `resumed`. Any other call was
        answered with an existing run, e.g. with a probe that was asked for again.

        Args:
            caller: name of a key, or `LOCAL`.
            since: unix seconds; with 0 the whole log counts.
        """
        started_runs: dict[str, None] = {}  # used as a set of run ids that keeps their order
        known_runs: set[str] = set()
        for raw_line in self._lines_about_runs():
            try:
                line = json.loads(raw_line)
                if line["result"] != "ok" or line["tool"] not in TOOLS_THAT_START_RUNS:
                    continue
                run_id = str(line["run_id"])
                is_start = run_id not in known_runs or bool(line.get("resumed"))
                # A run that another caller started is also known from here on: a later call of
                # `caller` that names it was answered with that run and has not started it.
                known_runs.add(run_id)
                if is_start and line["who"] == caller and line["time"] >= since:
                    started_runs[run_id] = None
            except (ValueError, KeyError, TypeError):
                continue  # a person may have edited the log; skip lines that are not ours
        return list(started_runs)

    def _lines_about_runs(self) -> Iterator[bytes]:
        """Yield the raw lines of the log that name a run, oldest first; none if there is no log."""
        try:
            file = open(self._home.audit, "rb")  # noqa: SIM115  the with below closes it
        except FileNotFoundError:
            return
        with file:
            for raw_line in file:
                # Searching the bytes is faster than parsing each line as JSON.
                names_run = b'"run_id"' in raw_line
                is_complete = raw_line.endswith(b"\n")  # otherwise it is still being written
                if names_run and is_complete:
                    yield raw_line


def call_with_audit_log(
    home: Home, tool: str, change: Callable[..., Reply], **arguments: Any
) -> Reply:
    """Call `change(home, **arguments)` for a shell command, record the call in the audit log of
    `home`, and return the reply of `change`.

    `tool` is the name of the change in the log.

    Raises:
        UserError: HOME_UNUSABLE if the call cannot be recorded; it is then not made. Errors of
            `change` are passed on.
    """
    with Audit(home).recording(Call(LOCAL, "cli", tool, arguments)) as record:
        reply = change(home, **arguments)
        record.succeeded(reply)
    return reply


# The tools that start a run.
TOOLS_THAT_START_RUNS = frozenset({"submit_train", "evaluate", "dry_run"})


def digest(arguments: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a call's arguments in hex (64 characters).

    The order in which the arguments were given does not matter.
    """
    # default=str: a shell command may pass values that JSON lacks, such as a request object.
    text = json.dumps(arguments, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
