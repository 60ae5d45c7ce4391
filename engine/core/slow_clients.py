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
        """Called by uvicorn when a client has connected. The connection counts as idle and its
        client as unknown; the headers of its first request must arrive in time."""
        super().connection_made(transport)
        self._mark_idle(known=False)
        self._close_oldest_idle_at_limit()
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Called by uvicorn when bytes have arrived.

        The first bytes of a request start the timer for its headers. Once all headers have arrived,
        the timer stops and the connection is no longer idle.
        """
        # `cycle` is uvicorn's object for the request that is answered, or was answered last.
        awaits_request = self.cycle is None or self.cycle.response_complete
        if awaits_request and self._header_timer is None:
            self._start_header_timer()
        cycle_before = self.cycle
        super().data_received(data)
        # A new cycle means that all headers have arrived. A slow body is not limited here, but by
        # the access gate of the server.
        if self.cycle is not cycle_before:
            self._forget_as_idle()
            self._stop_header_timer()

    def on_response_complete(self) -> None:
        """Called by uvicorn when a request was answered. The connection is idle again, unless its
        next request has already arrived or the connection is closing.

        An app that knows the client has set `scope[KNOWN]`; such a connection stays open longer.
        """
        cycle_before = self.cycle
        super().on_response_complete()  # gives a request that has already arrived a new cycle
        if self.cycle is cycle_before and not self.transport.is_closing():
            self._mark_idle(known=bool(self.scope.get(KNOWN)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by uvicorn when the connection is closed: forget it and stop its timer."""
        self._forget_as_idle()
        self._stop_header_timer()
        super().connection_lost(exc)

    def _idle_connections(self, known: bool) -> "dict[ImpatientProtocol, None]":
        """Return this server's idle connections, the longest idle first.

        With `known` they are those whose client is known, else those whose client is unknown. The
        dict is used as an ordered set; its values are None.
        """
        # The pair of dicts is indexed by the flag: 0 for unknown clients, 1 for known ones.
        return _IDLE.setdefault(self.server_state, ({}, {}))[known]

    def _mark_idle(self, known: bool) -> None:
        """Add this connection to the idle ones of known or unknown clients. It comes last: it has
        been idle for the shortest time."""
        self._idle_connections(known)[self] = None

    def _forget_as_idle(self) -> None:
        """Remove this connection from the idle connections, if it is one of them."""
        for known in (False, True):
            self._idle_connections(known).pop(self, None)

    def _close_oldest_idle_at_limit(self) -> None:
        """Close idle connections until fewer than `limit_concurrency` are open, so that uvicorn
        does not refuse the request on this connection.

        The longest idle is closed first; those of known clients (see `KNOWN`) only after all those
        of unknown ones.
        Nothing is closed where every other connection is busy: uvicorn then refuses the request.
        """
        while self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            # Unknown clients first; within each kind the longest idle first.
            idle = [*self._idle_connections(known=False), *self._idle_connections(known=True)]
            others = [connection for connection in idle if connection is not self]
            if not others:  # all others are being answered
                return
            oldest = others[0]
            oldest._forget_as_idle()
            self.connections.discard(oldest)
            oldest.transport.close()

    def _start_header_timer(self) -> None:
        """Close the connection unless its headers are whole within `HEADERS_S` seconds."""
        self._header_timer = self.loop.call_later(HEADERS_S, self._close_as_too_slow)

    def _stop_header_timer(self) -> None:
        """Cancel that timer: the headers are whole, or the connection is closed."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_as_too_slow(self) -> None:
        """Close the connection of a client that sends its headers too slowly."""
        self._header_timer = None
        self.transport.close()
