"""The audit log: one line for every call that changes something, over HTTP, stdio or in a shell.

`audit.jsonl` in the home, mode 0600, is only ever added to. It holds a digest of the arguments, not
the arguments: they may quote what a person would not want kept twice.
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

_NAMES = ("run_id", "env_id", "deployment_id", "key")
LOCAL = "local"  # who types a command: whoever may use this machine's account


@dataclass(frozen=True)
class Call:
    """A call that changes something, before it is made."""

    who: str
    via: str  # http | stdio | cli
    tool: str
    arguments: Mapping[str, Any]


class Record:
    """How a call ended: "ok", "asked" (a person is asked first), an error code, or "cut short"."""

    def __init__(self) -> None:
        self.result = "cut short"
        self.named: dict[str, str | bool] = {}

    def ok(self, reply: Any) -> None:
        """The call succeeded; the line names the run, environment or deployment of its reply."""
        self.result = "ok"
        if isinstance(reply, Mapping):
            pairs = ((name, reply.get(name)) for name in _NAMES)
            self.named = {name: value for name, value in pairs if isinstance(value, str)}
            if "resumed_from" in reply:
                self.named["resumed"] = True

    def failed(self, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, UserError) else error
        if isinstance(cause, UserError):
            self.result = cause.code
        elif isinstance(cause, Exception):
            self.result = "INTERNAL"


class Audit:
    """The log of one home."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        self._home = home
        self._clock = clock

    @contextlib.contextmanager
    def recording(self, call: Call) -> Iterator[Record]:
        """Adds the line of `call` when the block ends, however it ends.

        The log is opened before: a call that could not be recorded is not made. Raises UserError
        HOME_UNUSABLE then.
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
            except BaseException as error:
                record.failed(error)
                raise
            finally:
                self._note(log_file, call, record)

    def _note(self, log_file: Appender, call: Call, record: Record) -> None:
        line: dict[str, object] = {
            "time": round(self._clock(), 3),
            "who": call.who,
            "via": call.via,
            "tool": call.tool,
            "args": digest(call.arguments),
            "result": record.result,
            **record.named,
        }
        try:
            log_file.append(line)
        except OSError:  # the disk filled up meanwhile; what was done stays done
            log.exception("a call of %s is missing in the audit log", call.tool)

    def runs_of(self, who: str, since: float = 0.0) -> list[str]:
        """The runs that calls of `who` started or resumed since then, oldest first.

        Who is answered with a run that another call started, a probe asked for again, did not.
        """
        started: dict[str, None] = {}
        known: set[str] = set()
        try:
            file = open(self._home.audit, "rb")  # noqa: SIM115  the with below closes it
        except FileNotFoundError:
            return []
        with file:
            for raw in file:
                if b'"run_id"' not in raw or not raw.endswith(b"\n"):
                    continue
                try:
                    line = json.loads(raw)
                    if line["result"] != "ok" or line["tool"] not in STARTS:
                        continue
                    run_id = str(line["run_id"])
                    starts = run_id not in known or bool(line.get("resumed"))
                    known.add(run_id)
                    if starts and line["who"] == who and line["time"] >= since:
                        started[run_id] = None
                except (ValueError, KeyError, TypeError):
                    continue  # a line of somebody's editor
        return list(started)


def recorded(home: Home, tool: str, change: Callable[..., Reply], **asked: Any) -> Reply:
    """The reply of `change(home, **asked)`, recorded in the audit log: how commands change things.

    Raises UserError HOME_UNUSABLE when it cannot be recorded, and whatever `change` raises.
    """
    with Audit(home).recording(Call(LOCAL, "cli", tool, asked)) as record:
        reply = change(home, **asked)
        record.ok(reply)
    return reply


STARTS = frozenset({"submit_train", "evaluate", "dry_run"})


def digest(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of the arguments as JSON with sorted names."""
    text = json.dumps(arguments, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
