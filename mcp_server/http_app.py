"""The server over streamable HTTP, behind a gate that every route goes through.

The SDK checks Host and Origin on its own route only, and on no route once it is bound to another
address; it has no plain bearer tokens. So the gate is ours and stands before everything.
"""

import hmac
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import UserError
from mcp_server import __version__

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_SESSIONS = 256  # each costs about 38 kB; a hostile client may open as many as it can
SESSION_IDLE_S = 600
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class Gate:
    """Lets a request through when its Host, Origin and bearer token are right.

    Args:
        app: what lies behind.
        token: the secret; tokens are accepted in the Authorization header only.
        hosts: Host values allowed, without a port (any port) or with one (that port).
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._refusal(scope)
            if refused is not None:
                return await refused(scope, receive, send)
        elif scope["type"] != "lifespan":
            return None  # no WebSockets here
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._known(hosts[0].decode("latin-1")):
            return PlainTextResponse("This Host is not served here.", 421)
        for name, value in headers:
            if name == b"origin" and not self._own_origin(value.decode("latin-1")):
                return PlainTextResponse("This Origin may not call.", 403)
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or not self._right(given[0]):
            return PlainTextResponse(
                "Send the token from the home folder: Authorization: Bearer TOKEN",
                401,
                headers={"WWW-Authenticate": 'Bearer realm="honesmith"'},
            )
        return None

    def _known(self, host: str) -> bool:
        host = host.lower()
        parts = _HOST.fullmatch(host)
        return parts is not None and (host in self._hosts or parts["name"] in self._hosts)

    def _own_origin(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and self._known(host)

    def _right(self, authorization: bytes) -> bool:
        scheme, _, token = authorization.partition(b" ")
        # Bytes: comparing texts fails on non-ASCII ones.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def http_app(server: MCPServer[Any], token: str, hosts: Sequence[str]) -> ASGIApp:
    """The ASGI application: `/mcp` and `/health`, both behind the gate."""

    @server.custom_route("/health", methods=["GET"])
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    inner = server.streamable_http_app(
        max_sessions=MAX_SESSIONS,
        session_idle_timeout=SESSION_IDLE_S,
        # The gate has checked both already, and its list knows ports.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Gate(inner, token, hosts)


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
    server: MCPServer[Any], token: str, *, host: str, port: int, hosts: Sequence[str]
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
        http_app(server, token, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 * 1024,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            "BAD_ARGUMENT",
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Choose another --port, or 0 for a free one.",
            field="port",
        ) from error
    return listener
