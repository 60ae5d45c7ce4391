"""`wait_run` as a task (SEP-2663) for clients that declare the extension.

Such a client gets a task at once, goes on working, polls `tasks/get` and is handed the result when
the run is there. A task holds no state of ours: its id says which run, what is waited for and since
when, so it outlives a restart of the server. Other clients get the bounded wait of the tool.
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
ERAS = frozenset({"2026-07-28"})
POLL_MS = 5_000
MAX_ID = 300  # characters; ours are far shorter
LAST_S = 253_402_300_799  # the last second of the year 9999; a date has no later one
MAX_CANCELLED = 1_000  # kept: of older ones the client is told how the run goes


@dataclass(frozen=True)
class Wait:
    """What a task waits for; `since` is the cursor from which events count."""

    run_id: str
    until: str
    created: int
    since: str

    @property
    def task_id(self) -> str:
        return f"{self.run_id}:{self.until}:{self.created}:{self.since}"

    @staticmethod
    def parse(task_id: str) -> "Wait":
        """Raises ValueError when `task_id` is not one of ours."""
        run_id, until, created, since = task_id.split(":", 3)
        if not 0 <= int(created) <= LAST_S:
            raise ValueError(f"no task was made at {created}")
        return Wait(run_id, until, int(created), since)


class TaskParams(RequestParams):
    """Parameters of `tasks/get`, `tasks/cancel` and `tasks/update`."""

    task_id: str = Field(alias="taskId")


class WaitTasks(Extension):
    """Answers `wait_run` with a task where the client supports tasks and the wait is not over."""

    identifier = TASKS

    def __init__(self, home: Home) -> None:
        self._home = home
        self._cancelled: dict[str, None] = {}  # in the order they were cancelled
        self._server: GuardedServer | None = None

    def serve(self, server: GuardedServer) -> None:
        """The server whose guard checks arguments and dresses results; it is built after this."""
        self._server = server

    def methods(self) -> Sequence[MethodBinding]:
        return [
            MethodBinding("tasks/get", TaskParams, self._get, ERAS),
            MethodBinding("tasks/cancel", TaskParams, self._cancel, ERAS),
            MethodBinding("tasks/update", TaskParams, self._update, ERAS),
        ]

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        if params.name != "wait_run" or not _declared(ctx) or self._server is None:
            return await call_next(ctx)
        arguments = present(params.arguments or {})
        try:
            self._server.checked_tool("wait_run", params.arguments or {}, caller_of(ctx))
            wait, status = await anyio.to_thread.run_sync(partial(self._begin, arguments))
        except UserError:
            return await call_next(ctx)  # the tool says it in the tool's words
        if wait is None:
            return await call_next(ctx)
        return {"resultType": "task", **_shown(wait, "working", status)}

    def _begin(self, arguments: Reply) -> tuple[Wait | None, Reply]:
        """The wait a call asks for, or None when its answer is already there."""
        until = arguments.get("until", "end")
        if float(arguments.get("timeout_s", 1)) == 0:
            return None, {}
        status = self._look(arguments["run_id"], until, arguments.get("cursor", ""))
        if _reached(status, until):
            return None, {}
        since = arguments.get("cursor") or status.get("cursor", "")
        return Wait(status["run_id"], until, int(time.time()), since), status

    def _look(self, run_id: str, until: str, since: str) -> Reply:
        return {"run_id": run_id} | verbs.wait_run(self._home, run_id, until, 0, since)

    async def _get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        wait = _parsed(params)
        if wait.task_id in self._cancelled:
            return _shown(wait, "cancelled", {})
        try:
            status = await anyio.to_thread.run_sync(
                partial(self._look, wait.run_id, wait.until, wait.since)
            )
        except UserError as error:
            return _shown(wait, "completed", {}) | {"result": _wire(refusal(error))}
        except Exception as error:  # noqa: BLE001  a poll must answer; the log has the traceback
            failed = refusal(internal_error("tasks/get", error))
            return _shown(wait, "completed", {}) | {"result": _wire(failed)}
        if not _reached(status, wait.until):
            return _shown(wait, "working", status)
        assert self._server is not None
        result = _wire(self._server.answer(status, caller_of(ctx)))
        return _shown(wait, "completed", status) | {"result": result}

    async def _cancel(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Ends the waiting; the run goes on (`cancel_run` would end it)."""
        wait = _parsed(params)
        try:
            await anyio.to_thread.run_sync(partial(self._look, wait.run_id, wait.until, wait.since))
        except UserError:
            raise _unknown(params) from None
        self._cancelled.pop(wait.task_id, None)
        self._cancelled[wait.task_id] = None
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        return {}

    async def _update(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Our tasks never ask for input; the extension wants an acknowledgement all the same."""
        _parsed(params)
        return {}


def _declared(ctx: ServerRequestContext[Any, Any]) -> bool:
    capabilities = ctx.session.client_capabilities
    extensions = capabilities.extensions if capabilities else None
    return ctx.protocol_version in ERAS and TASKS in (extensions or {})


def _parsed(params: TaskParams) -> Wait:
    if len(params.task_id) > MAX_ID:
        raise _unknown(params)
    try:
        return Wait.parse(params.task_id)
    except ValueError:
        raise _unknown(params) from None


def _unknown(params: TaskParams) -> MCPError:
    return MCPError(code=INVALID_PARAMS, message="Unknown task", data=params.task_id[:MAX_ID])


def _reached(status: Reply, until: str) -> bool:
    """Whether the wait is over; a run that has ended ends every wait."""
    if status.get("state") in TERMINAL:
        return True
    return until != "end" and bool(status.get("reached"))


def _shown(wait: Wait, state: str, status: Reply) -> Reply:
    task: Reply = {
        "taskId": wait.task_id,
        "status": state,
        "createdAt": _iso(wait.created),
        "lastUpdatedAt": _iso(time.time()),
        "ttlMs": None,
        "pollIntervalMs": POLL_MS,
    }
    if status.get("summary"):
        task["statusMessage"] = str(status["summary"])[:300]
    return task


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _wire(result: CallToolResult) -> Reply:
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)
