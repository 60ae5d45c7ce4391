"""The server over streamable HTTP, behind a gate that every route goes through.

The SDK checks Host and Origin on its own route only, and on no route once it is bound to another
address; it has no plain bearer tokens. So the gate is ours and stands before everything.
"""

import re
import resource
import socket
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import UserError
from engine.core.slow_clients import KNOWN, ImpatientProtocol
from mcp_server import __version__
from mcp_server.access.keys import Key, Keys
from mcp_server.access.rate import Rates
from mcp_server.access.sessions import Sessions
from mcp_server.protocol.guard import KEY

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_SESSIONS = 256  # each costs about 38 kB; a hostile client may open as many as it can
SESSION_IDLE_S = 600
MAX_CONNECTIONS = 1_024
FILES = 512  # descriptors for all else, connections that are just coming or going too
AT_ONCE = 64  # connections accepted in one go, each a descriptor before anything bounds them
QUEUE = 2_048  # connections the kernel keeps for us meanwhile
MAX_BODY = 4 * 1024 * 1024
MAX_HEADERS = 32 * 1024
BODY_S = 20.0  # for the whole body of a request, however it trickles in
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class Gate:
    """Lets a request through when its Host, Origin, bearer token, size and rate are right.

    Args:
        app: what lies behind.
        keys: the tokens; they are accepted in the Authorization header only.
        hosts: Host values allowed, without a port (any port) or with one (that port).
        rates: how often each key has called.
        sessions: whose session is whose.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Sequence[str],
        rates: Rates | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(host.lower() for host in hosts)
        self._rates = rates or Rates()
        self._sessions = sessions or Sessions(idle_s=SESSION_IDLE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no WebSockets here
        refused = self._foreign(scope)
        key = None
        if refused is None:
            key = self._key(scope)
            refused = _no_token() if key is None else self._too_much(scope, key)
        if refused is None:
            body = await _body(scope, receive)
            if isinstance(body, Response):
                refused = body
            else:
                receive = body
        if refused is None and key is not None and not self._sessions.may_open(scope, key):
            refused = PlainTextResponse(f"The key {key.name} has too many sessions open.", 503)
        if refused is not None or key is None:
            if refused is not None:
                await refused(scope, receive, send)
            return None
        scope[KEY] = key
        scope[KNOWN] = True
        # The SDK gives a session only to whoever opened it.
        access = AccessToken(
            token="", client_id=key.name, scopes=list(key.scopes), subject=key.digest
        )
        scope["user"] = AuthenticatedUser(access)
        # Nothing is awaited between the question above and this: nobody comes in between.
        with self._sessions.served(scope, key, send) as watched:
            return await self._app(scope, receive, watched)

    def _foreign(self, scope: Scope) -> Response | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:
            return PlainTextResponse("The headers are too large.", 431)
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._known(hosts[0].decode("latin-1")):
            return PlainTextResponse("This Host is not served here.", 421)
        for name, value in headers:
            if name == b"origin" and not self._own_origin(value.decode("latin-1")):
                return PlainTextResponse("This Origin may not call.", 403)
        return None

    def _too_much(self, scope: Scope, key: Key) -> Response | None:
        wait = self._rates.wait_s(key)
        if wait:
            return PlainTextResponse(
                f"The key {key.name} may call {key.calls_per_minute} times a minute.",
                429,
                headers={"Retry-After": str(max(1, round(wait)))},
            )
        return None

    def _known(self, host: str) -> bool:
        host = host.lower()
        parts = _HOST.fullmatch(host)
        return parts is not None and (host in self._hosts or parts["name"] in self._hosts)

    def _own_origin(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and self._known(host)

    def _key(self, scope: Scope) -> Key | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return None
        scheme, _, token = given[0].partition(b" ")
        return self._keys.find(token.strip()) if scheme.lower() == b"bearer" else None


def _no_token() -> Response:
    return PlainTextResponse(
        "Send the token from the home folder: Authorization: Bearer TOKEN",
        401,
        headers={"WWW-Authenticate": 'Bearer realm="honesmith"'},
    )


async def _body(scope: Scope, receive: Receive) -> Receive | Response:
    """A `receive` that gives the body again, read within its limits; else the refusal to send."""
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or int(declared[:20]) > MAX_BODY:
        return _closing(f"The body is larger than {MAX_BODY} bytes.", 413)
    if declared == b"0" and b"transfer-encoding" not in headers:
        return receive
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(BODY_S) as patience:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return _closing("The client left.", 400)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY:
                return _closing(f"The body is larger than {MAX_BODY} bytes.", 413)
            if not message.get("more_body", False):
                break
    if patience.cancelled_caught:
        return _closing(f"The body did not arrive within {BODY_S:g} s.", 408)
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again


def _closing(message: str, status: int) -> Response:
    """A refusal after which the rest of the body is not waited for."""
    return PlainTextResponse(message, status, headers={"Connection": "close"})


def http_app(server: MCPServer[Any], keys: Keys, hosts: Sequence[str]) -> ASGIApp:
    """The ASGI application: `/mcp` and `/health`, both behind the gate."""

    @server.custom_route("/health", methods=["GET"])
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    inner = server.streamable_http_app(
        max_sessions=MAX_SESSIONS,
        session_idle_timeout=SESSION_IDLE_S,
        max_request_body_size=MAX_BODY,
        # The gate has checked both already, and its list knows ports.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Gate(inner, keys, hosts)


def allowed_hosts(host: str, explicit: Sequence[str]) -> tuple[str, ...]:
    """The Host values to accept when bound to `host`.

    Raises UserError BAD_ARGUMENT when `host` is not this machine's own and none are named.
    """
    if host in ("127.0.0.1", "localhost", "::1"):
        return (*LOOPBACK, *explicit)
    if not explicit:
        raise UserError(
            "BAD_ARGUMENT",
            f"--host {host} can be reached from other machines and no --allow-host is given",
            hint="Name the Host values clients will use: --allow-host train.example:8321",
            field="host",
        )
    return tuple(explicit)


def serve_http(
    server: MCPServer[Any], keys: Keys, *, host: str, port: int, hosts: Sequence[str]
) -> None:
    """Serve until interrupted. Port 0 takes a free one; the address is said on stderr.

    Raises UserError BAD_ARGUMENT when the address cannot be had.
    """
    listener = _listener(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/mcp"
    sys.stderr.write(f"Honesmith listens on {address} (bearer token: file `token` in the home)\n")
    sys.stderr.flush()
    config = uvicorn.Config(
        http_app(server, keys, hosts),
        http=ImpatientProtocol,
        limit_concurrency=max_connections(),
        backlog=AT_ONCE,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=8 * MAX_HEADERS,  # what is below is told apart by the gate
    )
    Server(config).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn's server with a long queue of connections, of which it accepts few at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)  # asyncio has set it to what is accepted in one go


def max_connections() -> int:
    """How many connections may be open; fewer where this process may open few files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(32, min(MAX_CONNECTIONS, most - FILES))


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol named: else asyncio leaves Nagle's algorithm on, and every call waits for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(QUEUE)  # before the address is told: nobody shall be refused meanwhile
    except OSError as error:
        listener.close()
        raise UserError(
            "BAD_ARGUMENT",
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Choose another --port, or 0 for a free one.",
            field="port",
        ) from error
    return listener
