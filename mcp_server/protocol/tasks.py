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
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from mcp_server.api import verbs
from mcp_server.api.verbs import Reply
from mcp_server.protocol.guard import GuardedServer, caller_of, internal_error, present, refusal

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
        """All fields, joined by colons; a run id holds none."""
        return f"{self.run_id}:{self.until}:{self.created}:{self.since}"

    @staticmethod
    def parse(task_id: str) -> "Wait":
        """Read a task id. Raises ValueError if it is not one of ours."""
        run_id, until, created, since = task_id.split(":", 3)
        if not 0 <= int(created) <= LAST_S:
            raise ValueError(f"no task was made at {created}")
        return Wait(run_id, until, int(created), since)


class TaskParams(RequestParams):
    """Parameters of `tasks/get`, `tasks/cancel` and `tasks/update`."""

    task_id: str = Field(alias="taskId")


class WaitTasks(Extension):
    """The extension: answers `wait_run` with a task if the client supports it and has to wait."""

    identifier = TASKS

    def __init__(self, home: Home) -> None:
        self._home = home
        self._cancelled: dict[str, None] = {}  # in the order they were cancelled
        self._server: GuardedServer | None = None

    def set_server(self, server: GuardedServer) -> None:
        """Set the server whose guard checks the arguments and builds the results.

        It needs this extension to be built, so it cannot be an argument of the constructor.
        """
        self._server = server

    def methods(self) -> Sequence[MethodBinding]:
        """The methods of the protocol that this extension answers."""
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
        """Answer `wait_run` with a task; everything else goes on to the tool.

        The tool also answers when there is nothing to wait for, and when the call is refused.
        """
        if params.name != "wait_run" or not _supports_tasks(ctx) or self._server is None:
            return await call_next(ctx)
        arguments = present(params.arguments or {})
        try:
            self._server.checked_tool("wait_run", params.arguments or {}, caller_of(ctx))
            wait, status = await anyio.to_thread.run_sync(partial(self._start_wait, arguments))
        except UserError:
            return await call_next(ctx)  # the tool refuses it too, with the right error result
        if wait is None:
            return await call_next(ctx)
        return {"resultType": "task", **_task_fields(wait, "working", status)}

    def _start_wait(self, arguments: Reply) -> tuple[Wait | None, Reply]:
        """The wait that a call asks for, and the status of the run now.

        (None, {}) if there is nothing to wait for: it is over, or a timeout of 0 asks not to wait.
        """
        until = arguments.get("until", "end")
        if float(arguments.get("timeout_s", 1)) == 0:
            return None, {}
        status = self._status_now(arguments["run_id"], until, arguments.get("cursor", ""))
        if _is_over(status, until):
            return None, {}
        since = arguments.get("cursor") or status.get("cursor", "")
        return Wait(status["run_id"], until, int(time.time()), since), status

    def _status_now(self, run_id: str, until: str, since: str) -> Reply:
        """The status of a run now, without waiting. Raises UserError as `wait_run` does."""
        return {"run_id": run_id} | verbs.wait_run(self._home, run_id, until, 0, since)

    async def _get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        """Answer `tasks/get`: the state of a task, and its result once the wait is over.

        A run that cannot be looked at completes the task with an error result.

        Raises:
            MCPError: the task id is not one of ours.
        """
        wait = _parse_wait(params)
        if wait.task_id in self._cancelled:
            return _task_fields(wait, "cancelled", {})
        try:
            status = await anyio.to_thread.run_sync(
                partial(self._status_now, wait.run_id, wait.until, wait.since)
            )
        except UserError as error:
            return _task_fields(wait, "completed", {}) | {"result": _as_json(refusal(error))}
        except Exception as error:  # noqa: BLE001  a poll must answer; the log has the traceback
            failed = refusal(internal_error("tasks/get", error))
            return _task_fields(wait, "completed", {}) | {"result": _as_json(failed)}
        if not _is_over(status, wait.until):
            return _task_fields(wait, "working", status)
        assert self._server is not None  # `set_server` was called before the first request
        result = _as_json(self._server.answer(status, caller_of(ctx)))
        return _task_fields(wait, "completed", status) | {"result": result}

    async def _cancel(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Answer `tasks/cancel`: the waiting ends, the run goes on (`cancel_run` would end that).

        Raises:
            MCPError: the task id is not one of ours, or its run does not exist.
        """
        wait = _parse_wait(params)
        try:
            await anyio.to_thread.run_sync(
                partial(self._status_now, wait.run_id, wait.until, wait.since)
            )
        except UserError:
            raise _unknown_task(params) from None
        # Removed and added again, so that the oldest cancellation stands first.
        self._cancelled.pop(wait.task_id, None)
        self._cancelled[wait.task_id] = None
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        return {}

    async def _update(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Answer `tasks/update`, by which a client would send input; our tasks never ask for any.

        The extension wants an acknowledgement all the same. Raises MCPError as `_get` does.
        """
        _parse_wait(params)
        return {}


def _supports_tasks(ctx: ServerRequestContext[Any, Any]) -> bool:
    """Whether the client has declared the extension, in a version of the protocol that has it."""
    capabilities = ctx.session.client_capabilities
    extensions = capabilities.extensions if capabilities else None
    return ctx.protocol_version in VERSIONS and TASKS in (extensions or {})


def _parse_wait(params: TaskParams) -> Wait:
    """What the task with this id waits for. Raises MCPError if it is not one of ours."""
    if len(params.task_id) > MAX_ID:
        raise _unknown_task(params)
    try:
        return Wait.parse(params.task_id)
    except ValueError:
        raise _unknown_task(params) from None


def _unknown_task(params: TaskParams) -> MCPError:
    return MCPError(code=INVALID_PARAMS, message="Unknown task", data=params.task_id[:MAX_ID])


def _is_over(status: Reply, until: str) -> bool:
    """Whether the wait is over: what was waited for has come, or the run has ended."""
    if status.get("state") in TERMINAL:
        return True
    return until != "end" and bool(status.get("reached"))


def _task_fields(wait: Wait, state: str, status: Reply) -> Reply:
    """A task as the extension describes it; the summary in `status`, if any, is its message."""
    task: Reply = {
        "taskId": wait.task_id,
        "status": state,
        "createdAt": _iso(wait.created),
        "lastUpdatedAt": _iso(time.time()),
        "ttlMs": None,
        "pollIntervalMs": POLL_MS,
    }
    if status.get("summary"):
        task["statusMessage"] = str(status["summary"])[:MAX_MESSAGE]
    return task


def _iso(seconds: float) -> str:
    """Unix seconds as an ISO 8601 date in UTC, such as 2026-07-28T12:00:00Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _as_json(result: CallToolResult) -> Reply:
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)
