"""`wait_run` as a task (SEP-2663), for clients that declare the extension.

Such a client gets a task at once, goes on working, polls `tasks/get`, and gets the result when the
wait is over. The server stores nothing about a task: its id holds the run, what is waited for and
since when, so it stays valid when the server restarts. Other clients get the tool's bounded wait.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio.to_thread
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, RequestParams
from pydantic import Field

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.home.rows import TERMINAL, viewer_id
from engine.home.run_dir import Home
from mcp_server.access.viewing import caller_view
from mcp_server.api import verbs
from mcp_server.api.verbs import Reply
from mcp_server.protocol.arguments import without_nulls
from mcp_server.protocol.guard import GuardedServer, caller_of, internal_error, refusal

TASKS = "io.modelcontextprotocol/tasks"
VERSIONS = frozenset({"2026-07-28"})  # of the protocol, in which the extension exists
POLL_MS = 5_000  # milliseconds that a client should leave between two polls
MAX_ID = 300  # characters of a task id; ours are far shorter
LAST_S = 253_402_300_799  # unix seconds of the end of 9999, the last that `datetime` can show
MAX_CANCELLED = 1_000  # tasks remembered as cancelled; older ones go back to "working"
MAX_MESSAGE = 300  # characters of a status message


@dataclass(frozen=True)
class Wait:
    """What a task waits for.

    Attributes:
        run_id: full id of the run.
        until: end, first_step, next_eval or alert.
        created: unix seconds at which the task was made.
        since: cursor of `wait_run` from which events count.
    """

    run_id: str
    until: str
    created: int
    since: str

    @property
    def task_id(self) -> str:
        """The id of the task: all fields joined by colons, e.g. "r-1:end:1785240000:CURSOR". The
        server stores nothing about a task, so its id must hold all of it. No field but the last can
        have a colon, so the id can be split again."""
        return f"{self.run_id}:{self.until}:{self.created}:{self.since}"

    @staticmethod
    def parse(task_id: str) -> "Wait":
        """Read a task id: RUN:EVENT:SECONDS:CURSOR. Raises ValueError if it has another form, or if
        its seconds (since 1970) are no date."""
        # At most 3 splits: the last part, a cursor, may hold colons.
        run_id, until, created, cursor = task_id.split(":", 3)
        if not 0 <= int(created) <= LAST_S:  # `datetime` cannot show it, so the id was made up
            raise ValueError(f"no task was made at {created}")
        return Wait(run_id, until, int(created), since=cursor)


class TaskParams(RequestParams):
    """Parameters of `tasks/get`, `tasks/cancel` and `tasks/update`."""

    task_id: str = Field(alias="taskId")


class WaitTasks(Extension):
    """The tasks extension: answers a call of `wait_run` with a task instead of letting it wait.

    It does so only for clients that support tasks, and only if there is something to wait for.
    """

    identifier = TASKS

    def __init__(self, home: Home) -> None:
        """Start without tasks; `home` is where the runs are that the tasks wait for."""
        self._home = home
        # (id of the key, id of the task) of cancelled tasks: a set that keeps the order in which
        # they were cancelled. Two keys may wait for one run, by tasks of the same id.
        self._cancelled: dict[tuple[str, str], None] = {}
        self._server: GuardedServer | None = None

    def set_server(self, server: GuardedServer) -> None:
        """Set the server whose guard checks the arguments and builds the results.

        The server is built with this extension, so it cannot be an argument of the constructor.
        """
        self._server = server

    def methods(self) -> Sequence[MethodBinding]:
        """List the methods that this extension adds to the protocol, each with its handler."""
        return [
            MethodBinding("tasks/get", TaskParams, self._get, VERSIONS),
            MethodBinding("tasks/cancel", TaskParams, self._cancel, VERSIONS),
            MethodBinding("tasks/update", TaskParams, self._update, VERSIONS),
        ]

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        """Answer a call of `wait_run` with a task; pass every other call on to its tool.

        The tool itself also answers if the client does not support tasks, if there is nothing to
        wait for, or if the call is refused.
        """
        if params.name != "wait_run" or not _supports_tasks(ctx) or self._server is None:
            return await call_next(ctx)
        arguments = params.arguments or {}
        try:
            # Called for its errors alone. It gets the arguments with their nulls, because it also
            # refuses an argument of an unknown name whose value is null.
            self._server.checked_tool("wait_run", arguments, caller_of(ctx))
            wait, status = await anyio.to_thread.run_sync(
                partial(self._start_wait, without_nulls(arguments))
            )
        except UserError:
            return await call_next(ctx)  # the tool refuses it too, and makes the error result
        if wait is None:
            return await call_next(ctx)
        return {"resultType": "task", **_task_fields(wait, "working", status)}

    def _start_wait(self, arguments: JsonObject) -> tuple[Wait | None, Reply]:
        """Find what a call of `wait_run` asks to wait for, and the status of the run now.

        `arguments` are those of the call, without nulls.

        Returns:
            The wait and the status. (None, {}) if there is nothing to wait for: the wait would be
            over at once, or the call only wants to look (`timeout_s` is 0).
        """
        until = arguments.get("until", "end")
        # Any other time limit is ignored: a task waits for as long as it takes.
        if "timeout_s" in arguments and float(arguments["timeout_s"]) == 0:
            return None, {}
        status = self._status_now(arguments["run_id"], until, arguments.get("cursor", ""))
        if _is_over(status, until):
            return None, {}
        # Without a cursor in the call, events count from this status on.
        since = arguments.get("cursor") or status.get("cursor", "")
        return Wait(status["run_id"], until, int(time.time()), since), status

    def _status_now(self, run_id: str, until: str, since: str) -> Reply:
        """Return the status of a run without waiting; its field `until_met` says whether the event
        `until` has come.

        `since` is the cursor from which events count; "" if they count from now on. Raises
        UserError if there is no such run or the cursor is not one of `wait_run`.
        """
        # `run_id` may be only a prefix. If the status holds the full id, that one is returned.
        status = verbs.wait_run(caller_view(self._home), run_id, until, timeout_s=0, cursor=since)
        return {"run_id": run_id} | status

    async def _status_of(self, wait: Wait) -> Reply:
        """Return the present status of the run that a task waits for, read in a thread. Raises
        UserError if the run or its files cannot be read."""
        return await anyio.to_thread.run_sync(
            partial(self._status_now, wait.run_id, wait.until, wait.since)
        )

    async def _get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        """Answer `tasks/get` with the state of a task, and its result once the wait is over.

        If the run cannot be read, the task is completed, with an error as its result.

        Raises:
            MCPError: if the task id is malformed.
        """
        wait = _parse_wait(params)
        if self._task_of_caller(wait) in self._cancelled:
            return _task_fields(wait, "cancelled", status={})
        status: Reply = {}  # stays empty if the run cannot be read
        try:
            status = await self._status_of(wait)
        except UserError as error:
            result = refusal(error)
        except Exception as error:  # noqa: BLE001  a poll must answer; the log has the traceback
            result = refusal(internal_error("tasks/get", error))
        else:
            if not _is_over(status, wait.until):
                return _task_fields(wait, "working", status)
            assert self._server is not None  # `set_server` was called before the first request
            result = self._server.answer(status, caller_of(ctx))
        return _task_fields(wait, "completed", status) | {"result": _as_json(result)}

    async def _cancel(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Answer `tasks/cancel`: end the waiting. The run goes on; `cancel_run` would stop it.

        Raises:
            MCPError: if the task id is malformed, or if its run does not exist.
        """
        wait = _parse_wait(params)
        try:
            await self._status_of(wait)  # only to see that the run exists
        except UserError:
            raise _unknown_task(params) from None
        # A dict keeps the order of adding: a task is moved to the end, so the oldest stands first.
        task = self._task_of_caller(wait)
        self._cancelled.pop(task, None)
        self._cancelled[task] = None
        if len(self._cancelled) > MAX_CANCELLED:
            oldest_task = next(iter(self._cancelled))
            del self._cancelled[oldest_task]
        return {}

    def _task_of_caller(self, wait: Wait) -> tuple[str, str]:
        """Return what tells this task from those of other callers: (id of the caller's key, id of
        the task). Two keys may wait for the same run, by tasks of the same id."""
        return viewer_id(caller_view(self._home).viewer), wait.task_id

    async def _update(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Acknowledge `tasks/update`, by which a client sends input that a task has asked for.

        Our tasks never ask for input, but the protocol demands an answer. Raises MCPError if the
        task id is malformed.
        """
        _parse_wait(params)
        return {}


def _supports_tasks(ctx: ServerRequestContext[Any, Any]) -> bool:
    """Whether the client has declared the tasks extension, in a protocol version that has it."""
    capabilities = ctx.session.client_capabilities
    extensions = capabilities.extensions if capabilities else None
    return ctx.protocol_version in VERSIONS and TASKS in (extensions or {})


def _parse_wait(params: TaskParams) -> Wait:
    """Return what the task named in a request waits for, read from its id. Raises MCPError if the
    id is malformed or too long."""
    if len(params.task_id) > MAX_ID:
        raise _unknown_task(params)
    try:
        return Wait.parse(params.task_id)
    except ValueError:
        raise _unknown_task(params) from None


def _unknown_task(params: TaskParams) -> MCPError:
    """Make the error for a task id that no task has; it repeats at most `MAX_ID` characters."""
    return MCPError(code=INVALID_PARAMS, message="Unknown task", data=params.task_id[:MAX_ID])


def _is_over(status: Reply, until: str) -> bool:
    """Whether a wait is over: the event `until` has come, or the run has ended.

    `status` is the reply of `wait_run`; `until` is the event that was waited for, such as "end" or
    "first_step".
    """
    if status.get("state") in TERMINAL:
        return True
    if until == "end":
        return False
    return bool(status.get("until_met"))


def _task_fields(wait: Wait, state: str, status: Reply) -> Reply:
    """Make the fields of a task, as the tasks extension defines them.

    Args:
        wait: what the task waits for.
        state: working, completed or cancelled.
        status: the status of the run, whose `summary` becomes the message of the task; {} for no
            message.
    """
    task: Reply = {
        "taskId": wait.task_id,
        "status": state,
        "createdAt": _iso(wait.created),
        "lastUpdatedAt": _iso(time.time()),
        "ttlMs": None,  # a task never expires
        "pollIntervalMs": POLL_MS,
    }
    if status.get("summary"):
        task["statusMessage"] = str(status["summary"])[:MAX_MESSAGE]
    return task


def _iso(seconds: float) -> str:
    """Return unix seconds as an ISO 8601 date in UTC, such as 2026-07-28T12:00:00Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _as_json(result: CallToolResult) -> Reply:
    """Return the result of a tool as the JSON object that the protocol sends."""
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)
