"""What comes over stdio and is no message: it is answered too, never passed over in silence.

The SDK drops a line it cannot read, and a client then waits for its reply until it gives up. A
lone surrogate (half of a character, which some clients cut text into) is mended; anything else
gets JSON-RPC's parse error.
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
    """Ctrl-C ends the server as SIGTERM does: at once, there is nothing to clean up.

    Python's own way is to wait first for every thread, and one reads stdin until the client goes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def until_client_leaves() -> AsyncIterator[None]:
    """Turns what a client that has left causes (nobody reads the answers) into one plain
    BrokenPipeError instead of a group of exceptions."""
    left = False
    try:
        yield
    except* BrokenPipeError:
        left = True
    if left:
        raise BrokenPipeError


@asynccontextmanager
async def answered(reader: Any, writer: Any) -> AsyncIterator[Any]:
    """The messages of `reader`; a line that is none is repaired, or refused through `writer`."""
    send, receive = anyio.create_memory_object_stream[Any](0)

    async def pump() -> None:
        async with send, reader:
            async for item in reader:
                if not isinstance(item, Exception):
                    await send.send(item)
                    continue
                line, value = _given(item)
                mended = _mended(line)
                if mended is not None:
                    await send.send(mended)
                elif line is None or line.strip():
                    await writer.send(SessionMessage(_refusal(line, value)))

    async with anyio.create_task_group() as group:
        group.start_soon(pump)
        yield receive
        group.cancel_scope.cancel()


def _given(error: Exception) -> tuple[str | None, Any]:
    """(the line, None) where it is no JSON as pydantic reads it, else (None, the object in it)."""
    faults = error.errors(include_url=False) if isinstance(error, ValidationError) else []
    for fault in faults:
        if fault["type"] == "json_invalid":
            return str(fault["input"]), None
    objects = (fault["input"] for fault in faults if isinstance(fault["input"], dict))
    return None, next(objects, None)


def _mended(line: str | None) -> SessionMessage | None:
    """The message of a line that is wrong in lone surrogates alone, replaced; else None."""
    value = _loaded(line)
    if value is None:
        return None
    text = _SURROGATES.sub("\ufffd", json.dumps(value, ensure_ascii=False))
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError:
        return None


def _refusal(line: str | None, value: Any) -> types.JSONRPCError:
    """The error for a line, with its request id where it has one: the caller waits for that id."""
    value = _loaded(line) if value is None else value
    code, message = types.INVALID_REQUEST, "The line is not a JSON-RPC message."
    if line is not None and value is None:
        code, message = types.PARSE_ERROR, "The line is not JSON."
    given = value.get("id") if isinstance(value, dict) else None
    if isinstance(given, str):
        given = _SURROGATES.sub("\ufffd", given)
    elif isinstance(given, bool) or not isinstance(given, int):
        given = None
    error = types.ErrorData(code=code, message=message)
    return types.JSONRPCError(jsonrpc="2.0", id=given, error=error)


def _loaded(line: str | None) -> Any:
    try:
        return None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None
