"""The one place a call passes on its way in and out.

In: a key without the scope is refused, unknown tools and arguments with the nearest name, wrong
values in our own words; what changes something is written into the audit log.
Out: an envelope, clean text, at most 10,000 characters; a `UserError` becomes an error result whose
text is one line of JSON; anything else becomes INTERNAL, with its traceback in the home's log only.

It sits at the handler, not in the SDK's middleware, so that both protocol eras dress its answers
(`resultType`, server info) like any other.
"""

import contextlib
import difflib
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
from pydantic import ValidationError

from engine.core.errors import UserError
from engine.core.hints import Call as ToolCall
from engine.core.hints import Change, Hint
from engine.core.reply import RESULT_CHARS
from engine.home.run_dir import Home
from engine.home.sanitize import clean_text
from engine.records.settings import GRPOSettings, SamplingSettings, SFTSettings
from mcp_server.access.audit_log import Audit, Call
from mcp_server.access.keys import LOCAL, STDIO, Key, Scope, spending
from mcp_server.access.log import log
from mcp_server.api.replies import cap, compact, envelope, error_line
from mcp_server.protocol.stdio import answered, until_client_leaves

if TYPE_CHECKING:
    from mcp_server.access.quotas import Cap

# Where the gate leaves the key that an HTTP request came with.
KEY = "honesmith.key"

# What tells nothing of the home; everything else but tools/call needs the scope read.
_FREE = frozenset(
    "initialize ping server/discover tools/list prompts/list prompts/get resources/list "
    "resources/templates/list tools/call logging/setLevel".split()
)


class GuardedServer(MCPServer[Any]):
    """An `MCPServer` whose calls go through the guard.

    Args:
        home: whose audit log is written.
        tools: what a client may call.
        needs: the scope each tool needs.
        hidden: names of tools that this server knows and, being read-only, does not offer.
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
        super().__init__(tools=tools, middleware=[self._scoped], **options)
        self._home = home
        self._audit = Audit(home)
        self._needs = needs
        self._offered = {tool.name: tool for tool in tools}
        self._hidden = hidden
        self._turns: dict[str, anyio.Lock] = {}  # by key

    async def run_stdio_async(self) -> None:
        async with (
            until_client_leaves(),
            stdio_server() as (reader, writer),
            answered(reader, writer) as messages,
        ):
            inner = self._lowlevel_server
            await inner.run(messages, writer, inner.create_initialization_options())

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        context = context or Context(mcp_server=self)
        caller = caller_of(context)
        try:
            if not self._changes(name):
                tool = self.checked(name, arguments, caller)
                await self._in_sight(caller, name, arguments)
                return self.answer(await tool.run(present(arguments), context), caller)
            call = Call(caller.name, _transport(caller), name, arguments)
            # What is held ends after the line is written: quotas are counted from the lines.
            async with contextlib.AsyncExitStack() as held:
                with self._audit.recording(call) as record:
                    tool = self.checked(name, arguments, caller)
                    await self._in_sight(caller, name, arguments)
                    granted = await self._within_quota(held, caller, name, present(arguments))
                    given = present(arguments)
                    if granted is not None:
                        given["max_gpu_hours"] = granted.hours
                    elif given.get("resume") and "max_gpu_hours" not in given:
                        given["max_gpu_hours"] = await self._former_cap(str(given["resume"]))
                    data = await tool.run(given, context)
                    if isinstance(data, InputRequiredResult):  # nothing is done before the answer
                        record.result = "asked"
                        return data
                    record.ok(data)
                    if granted is not None and granted.warning:
                        data["warnings"] = [*data["warnings"], granted.warning]
            return self.answer(data, caller)
        except MCPError:
            raise
        except UserError as error:
            return refusal(error.of_call(ToolCall(name, present(arguments))))
        except Exception as error:  # noqa: BLE001  the outermost handler of every tool
            cause = error.__cause__ if isinstance(error, ToolError) else error
            if isinstance(cause, UserError):
                return refusal(cause.of_call(ToolCall(name, present(arguments))))
            return refusal(internal(name, cause))

    def answer(self, data: Any, caller: Key = LOCAL) -> CallToolResult:
        """The success result: structured content, and the same as compact JSON; text as it is."""
        if isinstance(data, str):
            return CallToolResult(content=[TextContent(text=clean_text(data)[:RESULT_CHARS])])
        body = cap(envelope(data, "Done."))
        # Nobody is sent to what this server does not offer, or this key may not call.
        body["next"] = [call for call in body["next"] if self._may(caller, call.get("tool"))]
        return CallToolResult(content=[TextContent(text=compact(body))], structured_content=body)

    def checked(self, name: str, arguments: Mapping[str, Any], caller: Key) -> Tool:
        """The tool that this call is for. Raises UserError when the call cannot be made."""
        tool = self._offered.get(name)
        if tool is None:
            raise self._no_such_tool(name)
        caller.require(self._needs[name], name)
        check_arguments(tool, arguments)
        return tool

    async def _scoped(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """Requires the scope `read` for every request about the home that is no tool call."""
        if ctx.method not in _FREE and not ctx.method.startswith("notifications/"):
            try:
                caller_of(ctx).require("read", ctx.method)
            except UserError as error:
                raise MCPError(code=INVALID_REQUEST, message=error_line(error)) from None
        return await call_next(ctx)

    async def _within_quota(
        self,
        held: contextlib.AsyncExitStack,
        caller: Key,
        tool: str,
        arguments: Mapping[str, Any],
    ) -> "Cap | None":
        """Checks the quota; returns the cap of a submit that names none, where hours are limited.

        Of two calls that would each just fit, the second must see the first: calls of one key
        that start something pass one at a time, until `held` ends.

        Raises UserError QUOTA, and HOME_UNUSABLE when the calls before it take too long.
        """
        # The database is not needed before a key has a quota.
        from mcp_server.access import quotas  # noqa: PLC0415

        if not caller.is_limited or not quotas.starts_a_run(tool, arguments):
            return None
        turn = self._turns.setdefault(caller.name, anyio.Lock())
        await held.enter_async_context(spending(self._home, caller, turn))
        return await anyio.to_thread.run_sync(
            partial(quotas.check_quota, self._home, caller, tool, arguments)
        )

    async def _former_cap(self, run_id: str) -> float:
        from mcp_server.access import quotas  # noqa: PLC0415  as above

        return await anyio.to_thread.run_sync(quotas.former_cap, self._home, run_id)

    async def _in_sight(self, caller: Key, tool: str, arguments: Mapping[str, Any]) -> None:
        """To others than the owner a path without a model is not found, whatever lies there.

        Raises UserError MODEL_NOT_FOUND.
        """
        names = models_of(tool, arguments)
        if caller.is_owner or not any("/" in name or name[:1] in ".~" for name in names):
            return
        from engine.models import catalog  # noqa: PLC0415  as the engine's other parts: when needed

        for name in names:
            await anyio.to_thread.run_sync(catalog.check_in_sight, self._home, name)

    def _changes(self, name: str) -> bool:
        if name in self._hidden:
            return True
        tool = self._offered.get(name)
        return tool is not None and not (tool.annotations and tool.annotations.read_only_hint)

    def _may(self, caller: Key, tool: Any) -> bool:
        return tool in self._offered and self._needs[tool] in caller.scopes

    def _no_such_tool(self, name: str) -> UserError:
        if name in self._hidden:
            return UserError(
                "READ_ONLY",
                f"{name} changes something and this server was started with --read-only",
                hint="Ask the person who runs it to start it without --read-only.",
            )
        return UserError(
            "BAD_ARGUMENT",
            f"there is no tool named {name!r}",
            hint=_did_you_mean(name, list(self._offered)),
            field="name",
        )


_WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


def _is_a(kind: str, value: Any) -> bool:
    """Whether `value` is of that JSON type; pydantic would take true for 1 and "5" for 5."""
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    return isinstance(value, int | float)


def caller_of(context: Any) -> Key:
    """The key of the caller: over HTTP as the gate found it; stdio may do everything.

    Raises KeyError for an HTTP request that passed no gate: such a call must fail.
    """
    if isinstance(context, Context):
        try:
            context = context.request_context
        except ValueError:
            return LOCAL  # called by the program itself
    request = context.request
    return LOCAL if request is None else request.scope[KEY]


def _transport(caller: Key) -> str:
    return STDIO if caller is LOCAL else "http"


def models_of(tool: str, arguments: Mapping[str, Any]) -> list[str]:
    """The arguments of a call that name models."""
    named = [arguments.get(name) for name in ("model", "compare_to")]
    named += [arguments.get("run_id")] if tool == "deploy" else []
    listed = arguments.get("models")
    named += listed if isinstance(listed, list) else []
    return [name for name in named if isinstance(name, str) and name]


def present(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given: some clients send null for those they leave out."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that `tool` does not have or cannot take, as a UserError.

    The SDK ignores unknown arguments, so a misspelt one would run with defaults.
    """
    known: Mapping[str, Any] = tool.parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            raise UserError(
                "UNKNOWN_ARGUMENT",
                f"{tool.name} has no argument {name!r}",
                hint=Hint(
                    _did_you_mean(name, list(known)) + _settings_hint(name, known),
                    change=_moved(name, arguments[name], known),
                ),
                field=name,
            )
    arguments = present(arguments)
    for name, value in arguments.items():
        kind = str(known[name].get("type"))
        if kind in _WORDS and not _is_a(kind, value):
            raise UserError(
                "BAD_ARGUMENT",
                f"{name}={compact_value(value)} is not {_WORDS[kind]}",
                hint=_expected(known[name]),
                field=name,
            )
    try:
        tool.fn_metadata.validate_arguments(arguments)
    except ValidationError as error:
        raise _bad_argument(tool.name, known, error) from None


def refusal(error: UserError) -> CallToolResult:
    """The error result: one line of JSON, because clients drop structured content on errors."""
    return CallToolResult(content=[TextContent(text=error_line(error))], is_error=True)


def internal(name: str, error: BaseException | None) -> UserError:
    """The error for a bug of ours: the traceback goes to the log, a sentence to the caller."""
    log.error("%s failed", name, exc_info=error)
    return UserError(
        "INTERNAL",
        f"{name} met a fault of ours ({type(error).__name__})",
        hint="Try once more; if it stays, `honesmith doctor` names the log with the details.",
        retryable=True,
    )


def _bad_argument(tool: str, known: Mapping[str, Any], error: ValidationError) -> UserError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else ""
    schema = known.get(name, {})
    if first["type"] == "missing":
        return UserError("BAD_ARGUMENT", f"{tool} needs {name}", hint=_expected(schema), field=name)
    value = compact_value(first.get("input"))
    message = f"{'.'.join(path)}={value} cannot be used: {first['msg']}"
    near = difflib.get_close_matches(str(first.get("input")).lower(), schema.get("enum", []), 1)
    change = Change(arguments={name: near[0]}) if near else None
    hint = Hint(_expected(schema), change=change)
    return UserError("BAD_ARGUMENT", message, hint=hint, field=".".join(path))


def compact_value(value: Any) -> str:
    """`value` short enough to be quoted in an error."""
    try:
        text = compact(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _expected(schema: Mapping[str, Any]) -> str:
    """What an argument takes, in words, from its schema."""
    if "enum" in schema:
        kind = "one of " + ", ".join(map(str, schema["enum"]))
    else:
        kind = {"string": "a text", "array": "a list", "object": "an object"}.get(
            schema.get("type", ""), f"a {schema.get('type', 'value')}"
        )
        kind = kind.replace("a integer", "a whole number")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        kind += f" from {low} to {high}"
    elif low is not None:
        kind += f", at least {low}"
    about = schema.get("description", "")
    return f"It takes {kind}. {about}".strip()


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.55)
    listed = f"Available: {', '.join(known)}."
    return f"Did you mean {near[0]}? {listed}" if near else listed


def _moved(name: str, value: object, known: Mapping[str, Any]) -> Change | None:
    """The correction of an unknown argument: under the nearest name, or inside settings."""
    if setting := _setting_meant(name, known):
        return Change(settings={setting: value}, without_arguments=(name,))
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.55)
    return Change({near[0]: value}, without_arguments=(name,)) if near else None


def _settings_hint(name: str, known: Mapping[str, Any]) -> str:
    """A sentence for a setting that was passed as an argument; "" where the name is no setting."""
    setting = _setting_meant(name, known)
    return f' Settings go inside settings, e.g. settings={{"{setting}": ...}}.' if setting else ""


def _setting_meant(name: str, known: Mapping[str, Any]) -> str:
    if "settings" not in known:
        return ""
    schemas = [SamplingSettings] if "attempts" in known else [SFTSettings, GRPOSettings]
    names = [field for schema in schemas for field in schema.model_fields]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    return near[0] if near else ""
