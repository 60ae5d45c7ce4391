"""The server over streamable HTTP, behind a gate that checks the requests of every route.

The SDK checks Host and Origin on its own route only, and on no route when the server listens on
another address than loopback; and it knows no plain bearer tokens. So the gate is our own.
"""

import re
import resource
import socket
import sys
import threading
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
from mcp_server.protocol.guard import KEY_IN_SCOPE
from mcp_server.protocol.threads import LEFT_IN_SCOPE

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_SESSIONS = 256  # each costs about 38 kB; a hostile client may open as many as it can
SESSION_IDLE_S = 600  # a session ends after this time without a request
MAX_CONNECTIONS = 1_024
RESERVED_FILES = 512  # file descriptors kept free for everything but open connections
ACCEPTED_AT_ONCE = 64  # connections accepted in one go, before their number is checked
WAITING_CONNECTIONS = 2_048  # connections that wait in the kernel until they are accepted
MIN_CONNECTIONS = 32  # even where this process may open few files
MAX_BODY = 4 * 1024 * 1024  # bytes
MAX_HEADERS = 32 * 1024  # bytes
BODY_S = 20.0  # in which the whole body of a request must arrive
UPLOADS = "/envs/"  # what the path of an upload begins with
MAX_UPLOAD = 64 * 1024 * 1024  # bytes of an upload
UPLOAD_S = 300.0  # in which a whole upload must arrive
MAX_UPLOADS = 4  # at once, one for each key: each is held in memory
_UPLOAD_OF = "honesmith.upload"  # the entry of the ASGI scope with the name of the key that uploads
# A Host value: a name or an IPv6 address in brackets, and perhaps a port.
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class Gate:
    """Lets a request through if its Host, Origin, bearer token, size and rate are allowed.

    Args:
        app: the application behind the gate.
        keys: the keys whose tokens are accepted, in the Authorization header only.
        hosts: Host values to accept, without a port (any port) or with one (that port alone).
        rates: counts how often each key calls; None: a new `Rates`.
        sessions: counts the open sessions of each key; None: a new `Sessions`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Sequence[str],
        rates: Rates | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """Build the gate; the docstring of the class explains the arguments."""
        self._app = app
        self._keys = keys
        self._hosts = frozenset(host.lower() for host in hosts)
        self._rates = rates or Rates()
        self._sessions = sessions or Sessions(idle_s=SESSION_IDLE_S)
        self._uploading: set[str] = set()  # names of the keys whose uploads are under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on to the application, or answer it here if it is refused.

        The key of the caller is stored in `scope`. The start and end of the application (lifespan)
        are passed on too; anything else, such as a WebSocket, is ignored.
        """
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # a WebSocket
        try:
            return await self._serve(scope, receive, send)
        finally:
            # If this was an upload, its key may upload again.
            self._uploading.discard(scope.get(_UPLOAD_OF, ""))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on to the application, or answer it here if it is refused."""
        admission = await self._admit(scope, receive)
        if isinstance(admission, Response):  # the request is refused
            await admission(scope, receive, send)
            return None
        key, receive = admission
        scope[KEY_IN_SCOPE] = key
        client_left = threading.Event()  # set when the client closes its connection
        scope[LEFT_IN_SCOPE] = client_left
        # Tells `ImpatientProtocol` to close connections of unknown clients before this one.
        scope[KNOWN] = True
        scope["user"] = _user_of(key)
        # `_admit` awaits nothing after its check of the sessions, so no other request comes between
        # that check and this, which counts the session.
        with self._sessions.watch_request(scope, key, send) as watched_send:
            return await self._app(scope, _watching_disconnect(receive, client_left), watched_send)

    async def _admit(self, scope: Scope, receive: Receive) -> tuple[Key, Receive] | Response:
        """Check a request: its headers, token, rate, uploads, body and sessions, in this order. The
        body is read only for a request that has passed the checks before.

        Returns:
            The key of the caller and a `receive` that gives the body; or, if the request is
            refused, the response to send.
        """
        refusal = self._check_headers(scope)
        if refusal is not None:
            return refusal
        key = self._key_of_token(scope)
        if key is None:
            return _token_refusal()
        refusal = self._check_rate(key)
        if refusal is not None:
            return refusal
        refusal = self._check_uploads(scope, key)
        if refusal is not None:
            return refusal
        max_bytes, timeout_s = _limits_of_body(scope)
        receive_body = await _read_body(scope, receive, max_bytes, timeout_s)
        if isinstance(receive_body, Response):
            return receive_body
        if not self._sessions.may_open(scope, key):
            message = f"The key {key.name} has too many sessions open."
            return PlainTextResponse(message, status_code=503)
        return key, receive_body

    def _check_headers(self, scope: Scope) -> Response | None:
        """Check the size of a request's headers, its Host and its Origin.

        Returns the response that refuses the request, or None if the headers are allowed. There
        must be exactly one Host. The Origin may be missing, because only browsers send one.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        # Each header takes 4 more bytes: the colon, a space and the end of the line.
        if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADERS:
            return PlainTextResponse("The headers are too large.", status_code=431)
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_known_host(hosts[0].decode("latin-1")):
            return PlainTextResponse("This Host is not served here.", status_code=421)
        for name, value in headers:
            if name == b"origin" and not self._is_known_origin(value.decode("latin-1")):
                return PlainTextResponse("This Origin may not call.", status_code=403)
        return None

    def _check_rate(self, key: Key) -> Response | None:
        """Count this call of `key`. Returns None, or the response that refuses the call if the key
        calls more often than it may."""
        wait_s = self._rates.wait_s(key)
        if wait_s:
            return PlainTextResponse(
                f"The key {key.name} may call {key.calls_per_minute} times a minute.",
                status_code=429,
                headers={"Retry-After": str(max(1, round(wait_s)))},  # in whole seconds
            )
        return None

    def _check_uploads(self, scope: Scope, key: Key) -> Response | None:
        """Count this request if it is an upload. Returns None, or the response that refuses the
        upload if another one by `key`, or `MAX_UPLOADS` by other keys, are under way."""
        if not _is_upload(scope):
            return None
        if key.name in self._uploading or len(self._uploading) >= MAX_UPLOADS:
            busy = _closing_refusal("Another upload is under way.", status=503)
            busy.headers["Retry-After"] = "5"  # seconds
            return busy
        # `__call__` removes the name again when the request has ended; it finds it in `scope`.
        self._uploading.add(key.name)
        scope[_UPLOAD_OF] = key.name
        return None

    def _is_known_host(self, host: str) -> bool:
        """Whether a Host value is accepted, either as it is or without its port."""
        host = host.lower()
        match = _HOST.fullmatch(host)
        return match is not None and (host in self._hosts or match["name"] in self._hosts)

    def _is_known_origin(self, origin: str) -> bool:
        """Whether an Origin value, e.g. "http://localhost:8321", is one of an accepted Host."""
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and self._is_known_host(host)

    def _key_of_token(self, scope: Scope) -> Key | None:
        """Return the key that belongs to the bearer token of a request. Returns None if the request
        has no Authorization header, or several, or no token that is valid."""
        authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(authorizations) != 1:
            return None
        scheme, _, token = authorizations[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._keys.find(token.strip())


def _watching_disconnect(receive: Receive, client_left: threading.Event) -> Receive:
    """Wrap `receive`, ASGI's function that returns the next message about a request, so that it
    also sets `client_left` when the client has closed its connection."""

    async def receive_and_watch() -> Message:
        """Return the next message; if it says that the client has left, set `client_left`."""
        message = await receive()
        if message["type"] == "http.disconnect":
            client_left.set()
        return message

    return receive_and_watch


def _user_of(key: Key) -> AuthenticatedUser:
    """Return the user object by which the SDK identifies the caller with this key.

    The SDK lets only the user who opened a session use it. It compares `client_id` and `subject`,
    so the token itself is left out.
    """
    access = AccessToken(token="", client_id=key.name, scopes=list(key.scopes), subject=key.digest)
    return AuthenticatedUser(access)


def _token_refusal() -> Response:
    """Make the response that refuses a request without a valid token."""
    return PlainTextResponse(
        "Send the token from the home folder: Authorization: Bearer TOKEN",
        status_code=401,
        headers={"WWW-Authenticate": 'Bearer realm="honesmith"'},
    )


def _is_upload(scope: Scope) -> bool:
    """Whether the request with this ASGI `scope` uploads the files of an environment."""
    return scope["method"] == "PUT" and scope["path"].startswith(UPLOADS)


def _limits_of_body(scope: Scope) -> tuple[int, float]:
    """Return the most bytes that the body of a request may have, and the seconds in which it must
    arrive."""
    return (MAX_UPLOAD, UPLOAD_S) if _is_upload(scope) else (MAX_BODY, BODY_S)


async def _read_body(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float
) -> Receive | Response:
    """Read the body of a request before the application sees it: at most `max_bytes` bytes, within
    `timeout_s` seconds.

    Returns:
        A `receive` (ASGI's function that returns the next message about a request) that gives the
        whole body, or the original `receive` if there is no body. Or, if the request is refused,
        the response to send.
    """
    headers = dict(scope["headers"])
    declared_length = headers.get(b"content-length", b"0")
    # A length that is no number counts as too large. Only 20 digits are read: a number of more is
    # too large anyway, and slow to convert.
    if not declared_length.isdigit() or int(declared_length[:20]) > max_bytes:
        return _closing_refusal(f"The body is larger than {max_bytes} bytes.", status=413)
    # A chunked body (transfer-encoding) declares no length.
    if declared_length == b"0" and b"transfer-encoding" not in headers:
        return receive
    with anyio.move_on_after(timeout_s):
        return await _receive_whole_body(receive, max_bytes)
    # Only reached if the time was up first.
    return _closing_refusal(f"The body did not arrive within {timeout_s:g} s.", status=408)


async def _receive_whole_body(receive: Receive, max_bytes: int) -> Receive | Response:
    """Read a body of at most `max_bytes` bytes until its last message, however long that takes.

    Returns:
        A `receive` that gives the whole body in one message, then the messages after it. Or, if the
        body is too large or the client has left, the response to send.
    """
    chunks: list[bytes] = []
    size = 0  # bytes
    more_body = True
    while more_body:
        message = await receive()
        if message["type"] != "http.request":  # it is http.disconnect
            return _closing_refusal("The client left.", status=400)
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            return _closing_refusal(f"The body is larger than {max_bytes} bytes.", status=413)
        more_body = message.get("more_body", False)
    messages: list[Message] = [
        {"type": "http.request", "body": b"".join(chunks), "more_body": False}
    ]

    async def receive_body() -> Message:
        """Return the whole body at the first call, then the messages that come after it."""
        return messages.pop() if messages else await receive()

    return receive_body


def _closing_refusal(message: str, status: int) -> Response:
    """Make a response with the text `message` and the HTTP status `status` that refuses a request
    and closes the connection, so that the server need not read the rest of the body."""
    return PlainTextResponse(message, status, headers={"Connection": "close"})


def http_app(server: MCPServer[Any], keys: Keys, hosts: Sequence[str]) -> ASGIApp:
    """Make the ASGI application: `/mcp` and `/health`, both behind the gate.

    `keys` are those whose tokens are accepted, `hosts` the Host values, with or without a port.
    """

    @server.custom_route("/health", methods=["GET"])
    async def health(request: Request) -> Response:
        """Answer that the server runs, and which version it is."""
        return JSONResponse({"status": "ok", "version": __version__})

    inner = server.streamable_http_app(
        max_sessions=MAX_SESSIONS,
        session_idle_timeout=SESSION_IDLE_S,
        max_request_body_size=MAX_BODY,
        # The gate has checked Host and Origin already.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Gate(inner, keys, hosts)


def allowed_hosts(host: str, explicit: Sequence[str]) -> tuple[str, ...]:
    """Return the Host values to accept when the server listens on `host`: those in `explicit`, and
    if `host` is a loopback address also those in `LOOPBACK`.

    Raises:
        UserError: BAD_ARGUMENT if `host` can be reached from other machines and `explicit` is
            empty.
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
    """Print the server's address on stderr, then serve until interrupted.

    Port 0 takes a free port. `keys` are those whose tokens are accepted, `hosts` the Host values,
    with or without a port.

    Raises:
        UserError: BAD_ARGUMENT if the server cannot listen on this address.
    """
    listener = _listener(host, port)
    host_in_url = f"[{host}]" if ":" in host else host  # only IPv6 has colons
    actual_port = listener.getsockname()[1]  # the system chose it if `port` is 0
    address = f"http://{host_in_url}:{actual_port}/mcp"
    sys.stderr.write(f"Honesmith listens on {address} (bearer token: file `token` in the home)\n")
    sys.stderr.flush()
    config = uvicorn.Config(
        http_app(server, keys, hosts),
        http=ImpatientProtocol,
        limit_concurrency=max_connections(),
        backlog=ACCEPTED_AT_ONCE,  # `Server.startup` makes the queue itself longer
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,  # seconds
        # Above the limit of the gate, which answers too large headers with a proper status.
        h11_max_incomplete_event_size=8 * MAX_HEADERS,
    )
    Server(config).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn's server, in which many connections may wait and few are accepted in one go."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then let `WAITING_CONNECTIONS` connections wait in the kernel.

        `sockets` are those that the server listens on. asyncio takes one number, `backlog`, for how
        many connections wait and for how many it accepts in one go. So the configuration has the
        small number for the second, and the first is set again here.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING_CONNECTIONS)


def max_connections() -> int:
    """Return how many connections may be open at once.

    This is `MAX_CONNECTIONS`, or fewer if the process may open few files, but at least
    `MIN_CONNECTIONS`. A connection takes one file descriptor; `RESERVED_FILES` are kept free.
    """
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    possible = max_files - RESERVED_FILES
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, possible))


def _listener(host: str, port: int) -> socket.socket:
    """Open a socket that listens on the address, which may be IPv4 or IPv6.

    Raises:
        UserError: BAD_ARGUMENT if the address is in use, forbidden or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # only IPv6 has colons
    # asyncio turns Nagle's algorithm off only if the protocol is named; otherwise every call would
    # wait for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Before the address is printed, so that no client is refused.
        listener.listen(WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UserError(
            "BAD_ARGUMENT",
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Choose another --port, or 0 for a free one.",
            field="port",
        ) from error
    return listener
