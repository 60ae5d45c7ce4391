"""What the HTTP servers in front of a model share: who may ask, bodies within limits, streams that
end when nobody reads them."""

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
BODY_S = 20.0  # for the whole body of a request
STALL_S = 60.0  # for a client to read the next piece of a stream
BEAT_S = 1.0  # without a piece, after which a stream says that it is alive
_LOCAL = ("127.0.0.1", "localhost")


class ImpatientStream(StreamingResponse):
    """A streamed response that ends when its client stops reading for `STALL_S`; otherwise it would
    occupy the model for ever."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, then close the generator that makes its pieces. Raises TimeoutError when
        the client reads nothing for `STALL_S`."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            pieces = self.body_iterator
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()  # the model is free again at once


async def body_of(request: Request) -> Any:
    """The request's body, decoded from JSON.

    Raises:
        Refused: 413 when it is larger than `MAX_BODY`, 408 when it takes longer than `BODY_S`, 400
            when it is no JSON.
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
    except (ValueError, RecursionError) as error:  # ValueError: no JSON; the other: nested too deep
        raise Refused(400, "The body is no JSON.") from error


def is_bearer_of(request: Request, key: bytes) -> bool:
    """Whether the request has the bearer token `key`; compared in constant time."""
    # As bytes, because compare_digest takes no text beyond ASCII.
    header = request.headers.get("authorization", "").encode("utf-8", "replace")
    scheme, _, token = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key)


def refusal_of_place(request: Request) -> JSONResponse | None:
    """An error response where the request comes from elsewhere than this machine: 421 for another
    Host than loopback, 403 for another Origin, as of a web page in a browser here; else None."""
    host = request.headers.get("host", "").rsplit(":", 1)[0]  # it may carry a port
    if host not in _LOCAL:
        return problem(421, "This server answers on loopback only.")
    origin = request.headers.get("origin")
    if origin is not None and not _is_local_origin(origin):
        return problem(403, "This Origin may not call.")
    return None


def _is_local_origin(origin: str) -> bool:
    """Whether an Origin header, such as `http://localhost:3000`, names a page on loopback."""
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.rsplit(":", 1)[0] in _LOCAL


def problem(status: int, message: str) -> JSONResponse:
    """An error response in OpenAI's shape, with the HTTP status `status`."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    error = {"message": message, "type": "invalid_request_error", "code": status}
    return JSONResponse({"error": error}, status, headers)
