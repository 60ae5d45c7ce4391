"""How many sessions each key has open: one key must not take them all from the others."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.types import Message, Scope, Send

from mcp_server.access.keys import Key

SESSIONS_PER_KEY = 128
_SESSION_HEADER = b"mcp-session-id"
_VERSION_HEADER = b"mcp-protocol-version"


class Sessions:
    """Counts the open sessions of each key, by the answers that open and end them.

    Args:
        idle_s: seconds without a request after which the SDK ends a session. It does not tell us,
            so such a session is taken to be closed.
        max_sessions: how many sessions a key may have open.
        clock: returns the present time in seconds, from any start.
    """

    def __init__(
        self,
        idle_s: float,
        max_sessions: int = SESSIONS_PER_KEY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without sessions; the docstring of the class explains the arguments."""
        self._idle_s = idle_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._last_used: dict[str, dict[bytes, float]] = {}  # by key, then by session id
        # For each key, the requests in progress that may open a session.
        self._opening_requests: Counter[str] = Counter()

    def may_open(self, scope: Scope, key: Key) -> bool:
        """Whether `key` may make the request with this ASGI `scope`.

        The request may pass if it opens no session, or if `key` may open one more session. If the
        limit is reached, sessions that have been idle for `idle_s` are forgotten first.
        """
        if not _opens_session(scope):
            return True
        last_used = self._last_used.get(key.name, {})  # id of an open session -> time of last use
        # A request in progress that may open a session counts as an open session.
        allowed_count = self._max_sessions - self._opening_requests.get(key.name, 0)
        if len(last_used) < allowed_count:
            return True
        now = self._clock()
        for session_id, used_at in list(last_used.items()):
            if now - used_at > self._idle_s:
                del last_used[session_id]
        return len(last_used) < allowed_count

    @contextlib.contextmanager
    def watch_request(self, scope: Scope, key: Key, send: Send) -> Iterator[Send]:
        """Context manager around the handling of one request: yield the `send` (ASGI's function
        that sends a message of the answer) to use instead of the argument `send`.

        The yielded `send` counts the session that the answer opens, and notes a session that the
        answer uses or ends. Until the answer begins, a request that may open a session counts as an
        open session. Otherwise requests that arrive together could exceed the limit together.
        """
        is_counted = _opens_session(scope)  # whether this request counts in `_opening_requests`
        if is_counted:
            self._opening_requests[key.name] += 1

        def stop_counting() -> None:
            """Take this request out of the count, once; further calls do nothing."""
            nonlocal is_counted
            if is_counted:
                self._opening_requests[key.name] -= 1
            is_counted = False

        counting_send = self.counting_send(scope, key, send)

        async def send_and_stop_counting(message: Message) -> None:
            """Send a message. At the start of the answer stop counting the request, because
            `counting_send` then counts the session itself."""
            if message["type"] == "http.response.start":
                stop_counting()
            await counting_send(message)  # counts the new session before it awaits anything

        try:
            yield send_and_stop_counting
        finally:
            stop_counting()

    def counting_send(self, scope: Scope, key: Key, send: Send) -> Send:
        """Wrap `send`, the ASGI function that sends the answer to the request with this `scope`, so
        that it also notes which session of `key` the answer opens, uses or ends."""
        session_id = _session_id(scope["headers"])  # b"" if the request belongs to no session
        last_used = self._last_used.setdefault(key.name, {})  # session id -> time of last use
        if session_id in last_used:
            last_used[session_id] = self._clock()

        async def send_and_note(message: Message) -> None:
            """Send the message; note the session that it opens or ends, or that is still in use."""
            if message["type"] == "http.response.start":
                # 404: the SDK does not know the session (any more). DELETE: the client ends it.
                has_ended = message["status"] == 404 or scope["method"] == "DELETE"
                # Any answer of a session may carry its id; only the first opens it.
                opened_id = _session_id(message.get("headers", ()))
                if session_id and has_ended:
                    last_used.pop(session_id, None)
                elif opened_id and message["status"] < 400:
                    last_used[opened_id] = self._clock()
            elif session_id in last_used:
                last_used[session_id] = self._clock()  # a session with an open stream is not idle
            await send(message)

        return send_and_note


def _opens_session(scope: Scope) -> bool:
    """Whether the SDK would open a session for the request with this ASGI `scope`.

    The SDK opens no session for `/health`, for a request with a session id, or for a newer protocol
    version, which has no sessions. A request without a version counts as one of an older version.
    """
    if scope["path"] == "/health" or _session_id(scope["headers"]):
        return False
    version = next((value for name, value in scope["headers"] if name == _VERSION_HEADER), None)
    return version is None or version.decode("latin-1") in HANDSHAKE_PROTOCOL_VERSIONS


def _session_id(headers: object) -> bytes:
    """Return the session id in the headers of a request or an answer; b"" if there is none.

    `headers` should be (name, value) pairs of bytes, as in ASGI; anything else counts as empty.
    """
    if not isinstance(headers, list | tuple):
        return b""
    return next((value for name, value in headers if name.lower() == _SESSION_HEADER), b"")
