"""How many sessions each key has open: one key must not take them all from the others."""

import time
from collections.abc import Callable

from starlette.types import Message, Scope, Send

from mcp_server.keys import Key

SESSIONS_PER_KEY = 128
_HEADER = b"mcp-session-id"


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

    def may_open(self, scope: Scope, key: Key) -> bool:
        """Whether this request names a session, or `key` may open one more."""
        mine = self._seen.get(key.name, {})
        if _session(scope["headers"]) or len(mine) < self._most:
            return True
        now = self._clock()
        for session in [name for name, seen in mine.items() if now - seen > self._idle_s]:
            del mine[session]
        return len(mine) < self._most

    def watched(self, scope: Scope, key: Key, send: Send) -> Send:
        """`send`, which also keeps account of the sessions it sees opened and ended."""
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


def _session(headers: object) -> bytes:
    pairs = headers if isinstance(headers, list | tuple) else ()
    return next((value for name, value in pairs if name.lower() == _HEADER), b"")
