"""Closes connections whose clients send nothing, so that they do not use up all connections."""

import asyncio
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

# The key in the scope of a request under which an app notes that it knows the client.
KNOWN = "honesmith.known"
# Seconds in which all headers of a request must arrive: after the connection was opened, or after
# the first byte of a later request.
HEADERS_S = 10.0


_Idle = dict["ImpatientProtocol", None]
# Server -> (idle connections of unknown clients, idle connections of known clients). The connection
# that has been idle for the longest time is the first of each.
_IDLE: "WeakKeyDictionary[ServerState, tuple[_Idle, _Idle]]" = WeakKeyDictionary()


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, which also closes connections whose client sends nothing.

    uvicorn itself waits without limit for the first request of a connection. If more than
    `limit_concurrency` connections are open, it refuses every request. So when this limit is
    reached, a new connection closes the connection that has been idle for the longest time.
    Connections of unknown clients are closed first; an app marks the client of a request as known
    by `scope[KNOWN]`.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection; uvicorn calls this.

        The connection counts as idle, and its client as unknown. The headers of its first request
        must arrive within `HEADERS_S` seconds.
        """
        super().connection_made(transport)
        self._mark_idle(known=False)
        self._close_oldest_idle_at_limit()
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Handle bytes that have arrived; uvicorn calls this.

        The first bytes of a request start the timer for its headers. Once all headers have arrived,
        the timer stops and the connection is no longer idle.
        """
        # `cycle` is uvicorn's object for the request that is answered, or was answered last.
        awaits_request = self.cycle is None or self.cycle.response_complete
        if awaits_request and self._header_timer is None:
            self._start_header_timer()
        cycle_before = self.cycle
        super().data_received(data)
        # A new cycle means that all headers have arrived. The time of the body is limited by the
        # access gate of the server, not here.
        if self.cycle is not cycle_before:
            self._forget_as_idle()
            self._stop_header_timer()

    def on_response_complete(self) -> None:
        """Mark the connection as idle after a request was answered; uvicorn calls this.

        It is not idle if its next request has already arrived or the connection is closing. If the
        app has set `scope[KNOWN]`, the client counts as known, and the connection is kept longer.
        """
        cycle_before = self.cycle
        super().on_response_complete()  # makes a new cycle if the next request has already arrived
        if self.cycle is cycle_before and not self.transport.is_closing():
            self._mark_idle(known=bool(self.scope.get(KNOWN)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that was closed, and stop its timer; uvicorn calls this."""
        self._forget_as_idle()
        self._stop_header_timer()
        super().connection_lost(exc)

    def _idle_connections(self, known: bool) -> "dict[ImpatientProtocol, None]":
        """Return this server's idle connections of known or unknown clients, longest idle first.

        The dict is used as an ordered set; its values are None.
        """
        # The flag is the index in the pair: False (0) for unknown clients, True (1) for known ones.
        return _IDLE.setdefault(self.server_state, ({}, {}))[known]

    def _mark_idle(self, known: bool) -> None:
        """Add this connection to the end of the idle connections of known or unknown clients."""
        self._idle_connections(known)[self] = None

    def _forget_as_idle(self) -> None:
        """Remove this connection from the idle connections, if it is one of them."""
        for known in (False, True):
            self._idle_connections(known).pop(self, None)

    def _close_oldest_idle_at_limit(self) -> None:
        """Close idle connections until fewer than `limit_concurrency` are open, so that uvicorn
        does not refuse the request on this connection.

        Connections of unknown clients are closed before those of known clients (`KNOWN`), and the
        longest idle first. If all other connections are busy, none is closed, and uvicorn refuses
        the request.
        """
        while self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            idle = [*self._idle_connections(known=False), *self._idle_connections(known=True)]
            other_idle = [connection for connection in idle if connection is not self]
            if not other_idle:  # all other connections are busy
                return
            oldest = other_idle[0]
            oldest._forget_as_idle()
            self.connections.discard(oldest)
            oldest.transport.close()

    def _start_header_timer(self) -> None:
        """Start the timer that closes the connection if its headers take over `HEADERS_S`
        seconds."""
        self._header_timer = self.loop.call_later(HEADERS_S, self._close_as_too_slow)

    def _stop_header_timer(self) -> None:
        """Stop the timer for the headers, if it runs."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_as_too_slow(self) -> None:
        """Close the connection of a client that sends its headers too slowly."""
        self._header_timer = None
        self.transport.close()
