"""Answers lines from stdio that are not messages.

The SDK drops a line that it cannot read, and the client then waits for a reply until it gives up.
A line with a lone surrogate (half of a character: some clients cut texts there) is repaired; any
other gets a JSON-RPC error.
"""

import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

_SURROGATES = re.compile("[\ud800-\udfff]")


def end_by_interrupt() -> None:
    """Let Ctrl-C end the server at once, as SIGTERM does; there is nothing to clean up.

    Python's own handler would first wait for all threads, and one of them reads stdin until the
    client leaves. Any other handler that was installed before is kept.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def plain_broken_pipe() -> AsyncIterator[None]:
    """Context manager that turns an exception group of BrokenPipeErrors into one BrokenPipeError.

    The error means that nobody reads the answers any more. The command line exits quietly when it
    gets the single error, but does not look into groups.
    """
    # The error is raised after the `except*` block, which would make a group of it again.
    client_left = False
    try:
        yield
    except* BrokenPipeError:
        client_left = True
    if client_left:
        raise BrokenPipeError


@asynccontextmanager
async def answer_bad_lines(reader: Any, writer: Any) -> AsyncIterator[Any]:
    """Context manager: yield a stream of the messages that `reader` reads, while the block runs.

    For a line that is not a message, the reader gives an exception. Such a line is repaired if
    possible; otherwise an error is sent to `writer`, which takes answers. Blank lines are ignored.
    """
    send, receive = anyio.create_memory_object_stream[Any](0)  # 0: no message waits in between

    async def pass_messages_on() -> None:
        """Pass the messages of `reader` on to `send` until the reader ends; handle the exceptions
        that it gives for lines that are no messages."""
        async with send, reader:
            async for item in reader:
                if isinstance(item, Exception):
                    await _handle_bad_line(item, send, writer)
                else:
                    await send.send(item)

    async with anyio.create_task_group() as group:
        group.start_soon(pass_messages_on)
        yield receive
        group.cancel_scope.cancel()


async def _handle_bad_line(error: Exception, send: Any, writer: Any) -> None:
    """Handle a line that is no message: repair the line and pass the message on to `send`; if that
    is not possible, send an error to `writer`.

    A blank line is ignored. `error` is the exception that the reader gave for the line.
    """
    line, json_object = _source_of(error)  # at most one of them is known; the other is None
    repaired_message = _repaired_message(line)
    is_blank = line is not None and not line.strip()
    if repaired_message is not None:
        await send.send(repaired_message)
    elif not is_blank:
        await writer.send(SessionMessage(_refusal(line, json_object)))


def _source_of(error: Exception) -> tuple[str | None, Any]:
    """Extract from the reader's error the line, or the JSON object, that could not be read.

    Returns:
        (line, None): the line is not JSON, or JSON that pydantic refuses.
        (None, object): the line holds this JSON object, which is not a message.
        (None, None): the line holds other JSON, such as a list.
    """
    faults = error.errors(include_url=False) if isinstance(error, ValidationError) else []
    for fault in faults:
        if fault["type"] == "json_invalid":
            return str(fault["input"]), None
    for fault in faults:
        if isinstance(fault["input"], dict):
            return None, fault["input"]
    return None, None


def _repaired_message(line: str | None) -> SessionMessage | None:
    """Replace the lone surrogates (halves of characters) in a line, and return its message.

    Returns None if the line has another fault, or if `line` is None.
    """
    value = _json_or_none(line)
    if value is None:
        return None
    text = _SURROGATES.sub("\ufffd", json.dumps(value, ensure_ascii=False))
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError:  # the value is not a message
        return None


def _refusal(line: str | None, json_object: Any) -> types.JSONRPCError:
    """Make the error for a line that is no message.

    The error repeats the request id, if the line has a valid one, because the client waits for it.

    Args:
        line: the text of the line; None if it is not known.
        json_object: the JSON object in the line; None if it is not known.
    """
    value = _json_or_none(line) if json_object is None else json_object
    if value is None and line is not None:
        code, message = types.PARSE_ERROR, "The line is not JSON."
    else:
        code, message = types.INVALID_REQUEST, "The line is not a JSON-RPC message."
    error = types.ErrorData(code=code, message=message)
    return types.JSONRPCError(jsonrpc="2.0", id=_request_id(value), error=error)


def _request_id(value: Any) -> str | int | None:
    """Return the request id in a JSON value; None if the value has no valid id."""
    request_id = value.get("id") if isinstance(value, dict) else None
    if isinstance(request_id, str):
        return _SURROGATES.sub("\ufffd", request_id)
    # A boolean is not a valid id, although in Python it is an int.
    if isinstance(request_id, bool) or not isinstance(request_id, int):
        return None
    return request_id


def _json_or_none(line: str | None) -> Any:
    """Parse a line of JSON and return its value; None if the line is None or not JSON.

    The standard library parses it, because pydantic refuses lone surrogates.
    """
    if line is None:
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # ValueError: not JSON. RecursionError: nested too deep.
        return None
