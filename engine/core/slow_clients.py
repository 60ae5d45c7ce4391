"""Connections on which nothing comes: closed, so that they cannot use up what there is."""

import asyncio
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# The key in the scope of a request by which an app says that it knows the client.
KNOWN = "honesmith.known"
# Time for the headers of a request to arrive, from the connection on or from their first byte.
HEADERS_S = 10.0


_Idle = dict["ImpatientProtocol", None]
# For each server the idle connections of unknown and of known clients, the longest idle first.
_IDLE: "WeakKeyDictionary[ServerState, tuple[_Idle, _Idle]]" = WeakKeyDictionary()


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, which also closes connections whose client sends nothing.

    uvicorn itself waits without limit for the first request of a connection, and above
    `limit_concurrency` connections it refuses every request, whoever sends it. So when that many
    are open, a new connection closes the one that has been idle for the longest. Connections of
    unknown clients go first: an app marks the client of a request as known by `scope[KNOWN]`.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it counts as idle and unknown, and its headers must come in
        time."""
        super().connection_made(transport)
        self._idle_connections(known=False)[self] = None
        self._close_oldest_idle_at_limit()
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: the first of a request start the timer for its headers, the last of its
        headers stop it and make the connection busy."""
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_header_timer()
        cycle_before = self.cycle
        super().data_received(data)
        # A new cycle means that all headers have arrived; the access gate limits a slow body.
        if self.cycle is not cycle_before:
            self._forget_as_idle()
            self._stop_header_timer()

    def on_response_complete(self) -> None:
        """A request was answered: the connection is idle again, unless the next request has come
        already."""
        cycle_before = self.cycle
        super().on_response_complete()
        if self.cycle is cycle_before and not self.transport.is_closing():
            self._idle_connections(known=bool(self.scope.get(KNOWN)))[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: forget it and its timer."""
        self._forget_as_idle()
        self._stop_header_timer()
        super().connection_lost(exc)

    def _idle_connections(self, known: bool) -> "dict[ImpatientProtocol, None]":
        """The idle connections of this server whose client is known, or is not; the longest idle
        first."""
        return _IDLE.setdefault(self.server_state, ({}, {}))[known]

    def _forget_as_idle(self) -> None:
        """Take this connection out of the idle ones; it may not be among them."""
        for known in (False, True):
            self._idle_connections(known).pop(self, None)

    def _close_oldest_idle_at_limit(self) -> None:
        """At the limit of connections, close the longest idle one, unknown clients first. Nothing
        is closed while all others are being answered; uvicorn then refuses the new request."""
        while self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            others = (
                other
                for known in (False, True)
                for other in self._idle_connections(known)
                if other is not self
            )
            oldest = next(others, None)
            if oldest is None:  # all others are being answered
                return
            oldest._forget_as_idle()
            self.connections.discard(oldest)
            oldest.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADERS_S, self._close_as_too_slow)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_as_too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()
