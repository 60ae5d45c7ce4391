"""How many sessions each key has open: one key must not take them all from the others."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.types import Message, Scope, Send

from mcp_server.access.keys import Key

SESSIONS_PER_KEY = 128
_HEADER = b"mcp-session-id"
_VERSION = b"mcp-protocol-version"


class Sessions:
    """Sessions by key, from the answers that open and end them.

    Args:
        idle_s: after so long without a request the SDK ends a session without a word.
        most: per key.
        clock: seconds.
    """

    def __init__(
        self,
        idle_s: float,
        most: int = SESSIONS_PER_KEY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_s = idle_s
        self._most = most
        self._clock = clock
        self._seen: dict[str, dict[bytes, float]] = {}
        self._opening: Counter[str] = Counter()  # requests under way that may open one, by key

    def may_open(self, scope: Scope, key: Key) -> bool:
        """Whether this request opens no session, or `key` may open one more."""
        if not _opens(scope):
            return True
        mine = self._seen.get(key.name, {})
        room = self._most - self._opening.get(key.name, 0)
        if len(mine) < room:
            return True
        now = self._clock()
        for session in [name for name, seen in mine.items() if now - seen > self._idle_s]:
            del mine[session]
        return len(mine) < room

    @contextlib.contextmanager
    def served(self, scope: Scope, key: Key, send: Send) -> Iterator[Send]:
        """Gives a watched `send` while the request is served. A session that the request may open
        counts from now on, before it is answered."""
        counted = [key.name] if _opens(scope) else []
        self._opening.update(counted)

        def answered() -> None:
            self._opening.subtract(counted)
            counted.clear()

        watched = self.watched(scope, key, send)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered()
            await watched(message)  # notes the session before it waits for anything

        try:
            yield watch
        finally:
            answered()

    def watched(self, scope: Scope, key: Key, send: Send) -> Send:
        """`send`, which also counts the sessions that it sees opened and ended."""
        asked = _session(scope["headers"])
        mine = self._seen.setdefault(key.name, {})
        if asked in mine:
            mine[asked] = self._clock()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                gone = message["status"] == 404 or scope["method"] == "DELETE"
                opened = _session(message.get("headers", ()))
                if asked and gone:
                    mine.pop(asked, None)
                elif opened and message["status"] < 400:
                    mine[opened] = self._clock()
            elif asked in mine:
                mine[asked] = self._clock()  # an open stream is no idle session
            await send(message)

        return watch


def _opens(scope: Scope) -> bool:
    """Whether the SDK would open a session for this request, as it decides: by the headers."""
    if scope["path"] == "/health" or _session(scope["headers"]):
        return False
    version = next((value for name, value in scope["headers"] if name == _VERSION), None)
    return version is None or version.decode("latin-1") in HANDSHAKE_PROTOCOL_VERSIONS


def _session(headers: object) -> bytes:
    pairs = headers if isinstance(headers, list | tuple) else ()
    return next((value for name, value in pairs if name.lower() == _HEADER), b"")
