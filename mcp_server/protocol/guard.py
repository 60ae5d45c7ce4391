"""The one place that every call passes on its way in and out.

In: a call is refused if its key lacks the scope, or if it names an unknown tool or argument (the
error says the nearest name) or a wrong value. A call that changes something is written into the
audit log. Out: a reply is an envelope of clean text, at most 10,000 characters. A `UserError`
becomes an error result whose text is one line of JSON. Any other exception becomes INTERNAL, and
its traceback goes into the home's log only.

The guard wraps the tool handler and is not a middleware of the SDK. The SDK therefore still adds to
its answers what the protocol version demands (`resultType`, server info).
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_REQUEST, CallToolResult, InputRequiredResult, TextContent

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.hints import Call as ToolCall
from engine.core.reply import RESULT_CHARS, Reply
from engine.home.run_dir import Home
from engine.home.sanitize import clean_text
from engine.home.user_config import PREFIX
from mcp_server.access.audit_log import Audit, Call
from mcp_server.access.keys import LOCAL, STDIO, Key, Scope, hold_quota_lock
from mcp_server.access.log import log
from mcp_server.access.viewing import access_of_call, caller_view, viewing
from mcp_server.api.replies import compact, cut_to_size, envelope, error_line
from mcp_server.protocol.arguments import check_arguments, did_you_mean, without_nulls
from mcp_server.protocol.stdio import answer_bad_lines, plain_broken_pipe

if TYPE_CHECKING:
    from mcp_server.access.quotas import Cap

# The entry of the ASGI scope in which the gate of the HTTP server stores the caller's key.
KEY_IN_SCOPE = "honesmith.key"

# Methods that need no scope: they tell nothing about the home. All others need the scope read;
# tools/call is here because each tool has a scope of its own.
_FREE_METHODS = frozenset(
    "initialize ping server/discover tools/list prompts/list prompts/get resources/list "
    "resources/templates/list tools/call logging/setLevel".split()
)


_SCORING = ("submit_train", "evaluate", "dry_run")  # these have an environment score answers
_DELETING = (
    "No tool deletes: a person does it with {command}. cancel_run only stops a run, and keeps what "
    "it has made."
)
# Hints for agents that call a tool of this name although only the command line can do it.
_BESIDE_TOOLS = {
    "delete_run": _DELETING.format(command="`honesmith runs delete RUN`"),
    "delete_runs": _DELETING.format(command="`honesmith runs delete RUN...`"),
    "seal_env": "No tool seals: the owner does it with `honesmith env seal ENV`.",
    "delete_env": _DELETING.format(command="`honesmith env delete ENV`"),
}


class GuardedServer(MCPServer[Any]):
    """An `MCPServer` whose calls go through the guard.

    Args:
        home: the home whose audit log is written.
        tools: the tools that a client may call.
        needs: the scope that each tool needs, by the tool's name.
        hidden: names of tools that are not offered because the server is read-only; a call of one
            gets an error that says so.
        **options: as for `MCPServer`.
    """

    def __init__(
        self,
        *,
        home: Home,
        tools: list[Tool],
        needs: Mapping[str, Scope],
        hidden: frozenset[str],
        **options: Any,
    ) -> None:
        """Build the server; the docstring of the class explains the arguments."""
        # The middleware checks the requests that are not tool calls; `call_tool` checks those.
        super().__init__(tools=tools, middleware=[self._require_read_scope], **options)
        self._home = home
        self._audit = Audit(home)
        self._scope_of_tool = needs
        self._offered_tools = {tool.name: tool for tool in tools}
        self._hidden_names = hidden
        self._quota_locks: dict[str, anyio.Lock] = {}  # by the quota group of the key

    async def run_stdio_async(self) -> None:
        """Serve over stdio until the client leaves; a line that is no message gets an error."""
        async with (
            plain_broken_pipe(),
            stdio_server() as (reader, writer),
            answer_bad_lines(reader, writer) as messages,
        ):
            sdk_server = self._lowlevel_server
            await sdk_server.run(messages, writer, sdk_server.create_initialization_options())

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Run a tool for the caller in `context` and return its result; the SDK calls this.

        An error becomes an error result; only an `MCPError` is raised. If `context` is None, the
        caller is this program itself, which may do everything. An `InputRequiredResult` is a
        question that the client has to ask a person first.
        """
        context = context or Context(mcp_server=self)
        caller = caller_of(context)
        # What the call does with the runs, environments and deployments that it names.
        access = access_of_call(name, arguments)  # "read", "use" or "change"
        # Until the call ends, the tool finds only what the caller may access in this way.
        with viewing(caller, access):
            return await self._call_as(caller, name, arguments, context)

    async def _call_as(
        self, caller: Key, name: str, arguments: JsonObject, context: Context[Any, Any]
    ) -> CallToolResult | InputRequiredResult:
        """Check and run the tool `name` for `caller`, and return its result. A call that changes
        something is also written into the audit log.

        An error becomes an error result; only an `MCPError` is raised. `call_tool` has limited this
        request to what `caller` may see of the home.
        """
        try:
            if self._changes_something(name):
                data = await self._run_recorded(name, arguments, context, caller)
            else:
                tool = self.checked_tool(name, arguments, caller)
                await self._check_model_paths(caller, name, arguments)
                data = await tool.run(without_nulls(arguments), context)
            if isinstance(data, InputRequiredResult):  # a question to a person, not a reply
                return data
            return self.answer(data, caller)
        except MCPError:
            raise  # the SDK answers it as an error of the protocol
        except Exception as error:  # noqa: BLE001  the outermost handler of every tool
            return _refusal_of(error, name, arguments)

    async def _run_recorded(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any], caller: Key
    ) -> Any:
        """Run a tool that changes something, if the caller's quota allows it, and write the call
        into the audit log.

        Returns the reply of the tool, or an `InputRequiredResult`: a question that the client has
        to ask a person first. Raises UserError if the call is refused, and what the tool raises.
        """
        call = Call(caller.name, _transport(caller), name, arguments)
        # The quota lock is released only after the line of the call is in the audit log, because
        # quotas are counted from these lines.
        async with contextlib.AsyncExitStack() as quota_lock:
            with self._audit.recording(call) as record:
                tool = self.checked_tool(name, arguments, caller)
                await self._check_model_paths(caller, name, arguments)
                arguments = without_nulls(arguments)
                # `cap`: the GPU-hours after which the new run is stopped, if the key's hours are
                # limited and the call submits a run without naming its cap. Otherwise None.
                cap = await self._check_and_lock_quota(quota_lock, caller, name, arguments)
                arguments |= await self._missing_cap(cap, arguments)
                data = await tool.run(arguments, context)
                if isinstance(data, InputRequiredResult):  # nothing is done before the answer
                    record.result = "asked"
                else:
                    record.succeeded(data)
                    _add_cap_warning(data, cap)
        return data

    async def _missing_cap(
        self, cap: "Cap | None", arguments: Mapping[str, Any]
    ) -> Mapping[str, float]:
        """Return {"max_gpu_hours": hours} to add to the arguments of a call; {} to add nothing.

        `cap` is the cap that follows from the caller's quota. It is None if the quota sets none, or
        if the call names a cap itself.
        """
        if cap is not None:
            return {"max_gpu_hours": cap.hours}
        if arguments.get("resume") and "max_gpu_hours" not in arguments:
            # The resumed run keeps its cap; the tool would fill in its default.
            run_id = str(arguments["resume"])
            return {"max_gpu_hours": await self._cap_of_resumed_run(run_id)}
        return {}

    def answer(self, data: Any, caller: Key = LOCAL) -> CallToolResult:
        """Make the result of a call that succeeded, from the reply of its tool.

        If `data` is a JSON object, it is sent twice: as structured content, and as text (compact
        JSON), without the suggested calls (`next`) that `caller` may not make. If `data` is a text,
        it is sent as text, cut to `RESULT_CHARS`.
        """
        if isinstance(data, str):
            return CallToolResult(content=[TextContent(text=clean_text(data)[:RESULT_CHARS])])
        body = cut_to_size(envelope(data, default_summary="Done."))
        body["next"] = [call for call in body["next"] if self._may_call(caller, call.get("tool"))]
        return CallToolResult(content=[TextContent(text=compact(body))], structured_content=body)

    def checked_tool(self, name: str, arguments: Mapping[str, Any], caller: Key) -> Tool:
        """Return the tool of that name, if `caller` may call it with these arguments.

        Raises:
            UserError: READ_ONLY if a read-only server hides the tool. BAD_ARGUMENT if no tool has
                this name, or if an argument has a wrong value or is missing. UNKNOWN_ARGUMENT if
                the tool has no such argument. FORBIDDEN if the key of `caller` lacks the scope.
        """
        tool = self._offered_tools.get(name)
        if tool is None:
            raise self._no_such_tool(name)
        caller.require(self._scope_of_tool[name], name)
        check_arguments(tool, arguments)
        return tool

    async def _require_read_scope(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Handle a request if its key has the scope `read` or its method needs no scope.

        The SDK calls this for every request, with the next handler as `call_next`.

        Raises:
            MCPError: INVALID_REQUEST if the key lacks the scope.
        """
        if ctx.method not in _FREE_METHODS and not ctx.method.startswith("notifications/"):
            try:
                caller_of(ctx).require("read", ctx.method)
            except UserError as error:
                raise MCPError(code=INVALID_REQUEST, message=error_line(error)) from None
        with viewing(caller_of(ctx)):
            return await call_next(ctx)

    async def _check_and_lock_quota(
        self,
        quota_lock: contextlib.AsyncExitStack,
        caller: Key,
        tool: str,
        arguments: Mapping[str, Any],
    ) -> "Cap | None":
        """Check the quota of `caller` for a call that starts a run, and take the lock of its quota.

        The lock is held until `quota_lock` is closed, so that calls of one key pass one at a time.
        Two calls that fit only one by one can then not both pass: the second is checked after the
        first is logged.

        Returns the cap (a limit of GPU-hours) for the new run if the hours of the key are limited
        and the call names no cap; otherwise None. Raises UserError QUOTA if the call exceeds the
        quota, and HOME_UNUSABLE if earlier calls of this key have held the lock for too long.
        """
        # Imported late: it loads the database, which a key without a quota does not need.
        from mcp_server.access import quotas  # noqa: PLC0415

        if not caller.is_limited or not quotas.starts_a_run(tool, arguments):
            return None
        process_lock = self._quota_locks.setdefault(caller.quota_group, anyio.Lock())
        await quota_lock.enter_async_context(hold_quota_lock(self._home, caller, process_lock))
        return await anyio.to_thread.run_sync(
            partial(quotas.check_quota, caller_view(self._home), caller, tool, arguments)
        )

    async def _cap_of_resumed_run(self, run_id: str) -> float:
        """Return the limit of GPU-hours that the run `run_id` has. A call that resumes the run
        without naming a limit keeps this one."""
        from mcp_server.access import quotas  # noqa: PLC0415  late: it loads the database

        home = caller_view(self._home)
        return await anyio.to_thread.run_sync(quotas.cap_of_resumed_run, home, run_id)

    async def _check_model_paths(
        self, caller: Key, tool: str, arguments: Mapping[str, Any]
    ) -> None:
        """Check that every path among the models of a call leads to a model, and that the owner
        shares every model behind a URL, also one that an environment of the call asks as a judge.

        Any other path, whether it exists or not, gets the same error, so that callers cannot
        explore the file system. The owner's calls are not checked. `tool` and `arguments` are those
        of the call.

        Raises:
            UserError: MODEL_NOT_FOUND if a path leads to no model; FORBIDDEN if a model behind a
                URL is not shared.
        """
        if caller.is_owner:
            return
        view = caller_view(self._home)  # the home as the caller sees it
        names = models_of(tool, arguments)
        if tool in _SCORING:
            from engine.environments import registry  # noqa: PLC0415  late: few calls need it

            for env_id in envs_of(arguments):
                await anyio.to_thread.run_sync(registry.check_judges, view, env_id)
        if any(name.strip().startswith(PREFIX) for name in names):  # a model behind a URL
            from engine.endpoints import references  # noqa: PLC0415  late: few calls need it

            for name in names:
                await anyio.to_thread.run_sync(references.check_shared, self._home, name)
        # A path has a slash, or begins with "." or "~". Other names, such as run ids, need no
        # check.
        model_paths = [name for name in names if "/" in name or name[0] in ".~"]
        if not model_paths:
            return
        from engine.models import catalog  # noqa: PLC0415  late: few calls need it

        for name in model_paths:
            await anyio.to_thread.run_sync(catalog.check_in_sight, view, name)

    def _changes_something(self, name: str) -> bool:
        """Whether the tool `name` changes something; False for an unknown name. A tool that does
        not declare to be read-only counts as changing something."""
        # A read-only server hides exactly the tools that change something.
        if name in self._hidden_names:
            return True
        tool = self._offered_tools.get(name)
        if tool is None:
            return False
        return tool.annotations is None or not tool.annotations.read_only_hint

    def _may_call(self, caller: Key, tool: Any) -> bool:
        """Whether `caller` may call the tool named `tool`; False if `tool` is None or the name of a
        tool that is not offered."""
        return tool in self._offered_tools and self._scope_of_tool[tool] in caller.scopes

    def _no_such_tool(self, name: str) -> UserError:
        """Make the error for a call of a tool that is not offered: READ_ONLY if the server hides
        the tool because it is read-only, else BAD_ARGUMENT."""
        if name in self._hidden_names:
            return UserError(
                "READ_ONLY",
                f"{name} changes something and this server was started with --read-only",
                hint="Ask the person who runs it to start it without --read-only.",
            )
        return UserError(
            "BAD_ARGUMENT",
            f"there is no tool named {name!r}",
            hint=_BESIDE_TOOLS.get(name) or did_you_mean(name, list(self._offered_tools)),
            field="name",
        )


def caller_of(context: Any) -> Key:
    """Return the key of the caller, which says who calls and what the caller may do.

    Over HTTP that is the key of the bearer token, which the gate (it checks each HTTP request
    first) has stored in the ASGI scope. Over stdio it is `LOCAL`, which may do everything.

    Args:
        context: the context of a tool, or that of a request in the middleware.

    Raises:
        KeyError: if an HTTP request did not pass the gate; such a call must fail.
    """
    if isinstance(context, Context):  # that of a tool, which wraps that of the request
        try:
            context = context.request_context
        except ValueError:  # there is no request: this program itself calls the tool
            return LOCAL
    request = context.request
    return LOCAL if request is None else request.scope[KEY_IN_SCOPE]


def _add_cap_warning(data: Reply, cap: "Cap | None") -> None:
    """Add the warning of `cap` to the reply of a submit: why the run's limit of GPU-hours is lower
    than the default. Add nothing if the quota set no cap, or if the cap has no warning."""
    if cap is not None and cap.warning:
        data["warnings"] = [*data["warnings"], cap.warning]


def _refusal_of(error: Exception, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
    """Make the error result for what a call of the tool `name` with these arguments raised."""
    # The SDK raises a ToolError, whose cause is the exception of the tool.
    cause = error.__cause__ if isinstance(error, ToolError) else error
    if isinstance(cause, UserError):
        return refusal(cause.of_call(ToolCall(name, without_nulls(arguments))))
    return refusal(internal_error(name, cause))


def _transport(caller: Key) -> str:
    """Return the name of the call's transport for the audit log. Only over stdio the caller is
    `LOCAL`."""
    return STDIO if caller is LOCAL else "http"


def models_of(tool: str, arguments: Mapping[str, Any]) -> list[str]:
    """List every model name in the arguments of a call of `tool`, e.g. "pebble" or a path.

    The arguments are not checked yet, so values of a wrong type and empty texts are left out.
    """
    values = [arguments.get("model"), arguments.get("compare_to")]
    if tool == "deploy":  # elsewhere a run_id names a run, not the model that it trained
        values.append(arguments.get("run_id"))
    values += _list_in(arguments, "models")
    for step in _steps_of(arguments):
        settings = step.get("settings")
        if isinstance(settings, dict):
            values.append(settings.get("teacher"))  # the model that a run by `distill` learns from
            values.append(_reflection_endpoint(settings))
    varied_settings = arguments.get("vary")  # setting -> values, one run for each
    if isinstance(varied_settings, dict):
        values += _list_in(varied_settings, "teacher")
    return [name for name in values if isinstance(name, str) and name]


def envs_of(arguments: Mapping[str, Any]) -> list[str]:
    """List every environment named in the arguments of a call, those of further steps included.

    The arguments are not checked yet, so values of a wrong type and empty texts are left out.
    """
    values = [step.get("env_id") for step in _steps_of(arguments)]
    return [name for name in values if isinstance(name, str) and name]


def _steps_of(arguments: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps of the plan that a call asks for: its own arguments are the first, those in
    `then` follow. A step that is no object is left out, because nothing is checked yet."""
    following_steps = _list_in(arguments, "then")
    return [arguments, *(step for step in following_steps if isinstance(step, dict))]


def _list_in(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list in the field `name`; [] if the field is missing or holds anything else."""
    value = fields.get(name)
    return value if isinstance(value, list) else []


def _reflection_endpoint(settings: Mapping[str, Any]) -> object:
    """Return the setting `reflection` as a reference to a model, such as "openai:NAME".

    The setting names the model endpoint that writes new prompts in a search for a prompt, with or
    without the PREFIX "openai:". A value that is no name is returned unchanged.
    """
    value = settings.get("reflection")
    if not isinstance(value, str) or not value.strip() or value.strip().startswith(PREFIX):
        return value
    return f"{PREFIX}{value.strip()}"


def refusal(error: UserError) -> CallToolResult:
    """Make an error result: one line of JSON, because clients drop structured content of errors."""
    return CallToolResult(content=[TextContent(text=error_line(error))], is_error=True)


def internal_error(name: str, error: BaseException | None) -> UserError:
    """Make the INTERNAL error for a bug; the traceback goes to the server's log only.

    `name` is the tool or method that failed, `error` what it raised.
    """
    log.error("%s failed", name, exc_info=error)
    return UserError(
        "INTERNAL",
        f"{name} met a fault of ours ({type(error).__name__})",
        hint="Try once more; if it stays, `honesmith doctor` names the log with the details.",
        retryable=True,
    )
