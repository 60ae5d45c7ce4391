"""What the HTTP servers in front of a model share: checks of who may ask, bodies within limits, and
streams that end when nobody reads them."""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.worker.gateway.chat_request import Refused

MAX_BODY = 4 * 1024 * 1024  # bytes
BODY_S = 20.0  # how long the whole body of a request may take to arrive
STALL_S = 60.0  # how long a client may take to read the next piece of a stream
BEAT_S = 1.0  # how long a stream may send nothing before it sends a sign of life
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


class ImpatientStream(StreamingResponse):
    """A streamed response that ends if its client stops reading for `STALL_S` seconds. Otherwise
    such a client would occupy the model for ever."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to the client, then close the generator that makes its pieces. The
        arguments are those of every ASGI application. Raises TimeoutError if the client reads
        nothing for `STALL_S` seconds."""

        async def send_in_time(message: Message) -> None:
            """Send one piece to the client, within `STALL_S` seconds."""
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            pieces = self.body_iterator
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()  # frees the model at once


async def body_of(request: Request) -> Any:
    """Read the request's body and decode it from JSON.

    Raises:
        Refused: 413 if it is larger than `MAX_BODY`, 408 if it takes longer than `BODY_S` seconds,
            400 if it is no JSON.
    """
    size = 0
    parts = []
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise Refused(413, f"The body is larger than {MAX_BODY} bytes.")
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"The body did not arrive within {BODY_S:g} s.") from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:  # no JSON, or JSON that is nested too deeply
        raise Refused(400, "The body is no JSON.") from error


def is_bearer_of(request: Request, key: bytes) -> bool:
    """Tell whether the request has the bearer token `key`; the comparison takes constant time."""
    # Compared as bytes, because compare_digest accepts no text beyond ASCII.
    header = request.headers.get("authorization", "").encode("utf-8", "replace")
    scheme, _, token = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key)


def refusal_of_place(request: Request) -> JSONResponse | None:
    """Return an error response if the request does not come from this machine, else None.

    The status is 421 for a Host other than loopback, and 403 for another Origin, such as that of a
    web page in a browser on this machine.
    """
    host = request.headers.get("host", "").rsplit(":", 1)[0]  # without the port, if it has one
    if host not in _LOOPBACK_HOSTS:
        return problem(421, "This server answers on loopback only.")
    origin = request.headers.get("origin")
    if origin is not None and not _is_local_origin(origin):
        return problem(403, "This Origin may not call.")
    return None


def _is_local_origin(origin: str) -> bool:
    """Tell whether an Origin header, such as `http://localhost:3000`, names a page on loopback."""
    scheme, _, host = origin.partition("://")
    host_without_port = host.rsplit(":", 1)[0]
    return scheme in ("http", "https") and host_without_port in _LOOPBACK_HOSTS


def problem(status: int, message: str) -> JSONResponse:
    """Make an error response in OpenAI's shape, with the HTTP status `status` and a message for the
    caller. A 401 also says that a bearer token is wanted."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    error = {"message": message, "type": "invalid_request_error", "code": status}
    return JSONResponse({"error": error}, status, headers)
