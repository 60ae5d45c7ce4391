"""The one place a tool call passes on its way in and out.

In: unknown tools and arguments are refused with the nearest name, wrong values in our own words.
Out: an envelope, clean text, at most 10,000 characters; a `UserError` becomes an error result whose
text is one line of JSON; anything else becomes INTERNAL, with its traceback in the home's log only.

It sits at the handler, not in the SDK's middleware, so that both protocol eras dress its answers
(`resultType`, server info) like any other.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, TextContent
from pydantic import ValidationError

from engine.clean import clean_text
from engine.errors import UserError
from mcp_server.log import log
from mcp_server.replies import RESULT_CHARS, cap, compact, envelope, error_line


class GuardedServer(MCPServer[Any]):
    """An `MCPServer` whose tool calls go through the guard.

    Args:
        tools: what a client may call.
        hidden: names of tools that this server knows and, being read-only, does not offer.
        **options: as for `MCPServer`.
    """

    def __init__(self, *, tools: list[Tool], hidden: frozenset[str], **options: Any) -> None:
        super().__init__(tools=tools, **options)
        self._offered = {tool.name: tool for tool in tools}
        self._hidden = hidden

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult:
        try:
            tool = self.checked(name, arguments)
            context = context or Context(mcp_server=self)
            return self.answer(await tool.run(present(arguments), context))
        except MCPError:
            raise
        except UserError as error:
            return refusal(error)
        except Exception as error:  # noqa: BLE001  the outermost handler of every tool
            cause = error.__cause__ if isinstance(error, ToolError) else error
            return refusal(cause if isinstance(cause, UserError) else internal(name, cause))

    def answer(self, data: Any) -> CallToolResult:
        """The success result: structured content and the same as compact JSON; prose as it is."""
        if isinstance(data, str):
            return CallToolResult(content=[TextContent(text=clean_text(data)[:RESULT_CHARS])])
        body = cap(envelope(data, "Done."))
        # A read-only server must not suggest what it does not offer.
        body["next"] = [call for call in body["next"] if call.get("tool") in self._offered]
        return CallToolResult(content=[TextContent(text=compact(body))], structured_content=body)

    def checked(self, name: str, arguments: Mapping[str, Any]) -> Tool:
        """The tool that this call is for. Raises UserError when the call cannot be made."""
        tool = self._offered.get(name)
        if tool is None:
            raise self._no_such_tool(name)
        check_arguments(tool, arguments)
        return tool

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


def present(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given: some clients send null for those they leave out."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that `tool` does not have or cannot take, as a UserError.

    The SDK ignores unknown arguments, so a misspelt one would run with defaults.
    """
    known: dict[str, Any] = tool.parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            raise UserError(
                "UNKNOWN_ARGUMENT",
                f"{tool.name} has no argument {name!r}",
                hint=_did_you_mean(name, list(known)) + _settings_hint(name, known),
                field=name,
            )
    arguments = present(arguments)
    for name, value in arguments.items():
        # pydantic would take true for 1.
        if isinstance(value, bool) and known[name].get("type") in ("integer", "number"):
            raise UserError(
                "BAD_ARGUMENT",
                f"{name}={str(value).lower()} is not a number",
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
    """A fault of ours: the traceback goes to the log, a sentence to the caller."""
    log.error("%s failed", name, exc_info=error)
    return UserError(
        "INTERNAL",
        f"{name} met a fault of ours ({type(error).__name__})",
        hint="Try once more; if it stays, `honesmith doctor` names the log with the details.",
        retryable=True,
    )


def _bad_argument(tool: str, known: dict[str, Any], error: ValidationError) -> UserError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else ""
    schema = known.get(name, {})
    if first["type"] == "missing":
        return UserError("BAD_ARGUMENT", f"{tool} needs {name}", hint=_expected(schema), field=name)
    value = compact_value(first.get("input"))
    message = f"{'.'.join(path)}={value} cannot be used: {first['msg']}"
    return UserError("BAD_ARGUMENT", message, hint=_expected(schema), field=".".join(path))


def compact_value(value: Any) -> str:
    """`value` short enough to be quoted in an error."""
    try:
        text = compact(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _expected(schema: dict[str, Any]) -> str:
    """What an argument takes, from its schema."""
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


def _settings_hint(name: str, known: dict[str, Any]) -> str:
    """Agents pass training settings flat; say where they go."""
    if "settings" not in known:
        return ""
    return f' Training settings go inside settings, e.g. settings={{"{name}": ...}}.'
