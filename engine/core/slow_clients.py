"""Connections on which nothing comes: closed, so that they cannot use up what there is."""

import asyncio
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

KNOWN = "honesmith.known"  # in the scope of a request: a connection worth keeping
HEADERS_S = 10.0  # for the headers of a request, from the connection or its first byte


_Idle = dict["ImpatientProtocol", None]
_IDLE: "WeakKeyDictionary[ServerState, tuple[_Idle, _Idle]]" = WeakKeyDictionary()


class ImpatientProtocol(H11Protocol):
    """uvicorn's own protocol, which waits for the first request of a connection for ever.

    Above `limit_concurrency` connections uvicorn refuses every request, whoever asks. So when there
    are as many, the one on which nothing has been asked for the longest is closed for a new one,
    strangers' first: an app says of a request that it knows who asks by `scope[KNOWN]`.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle(known=False)[self] = None
        self._make_room()
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._patience is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # the headers are there; the gate has an eye on the body
            self._is_asked()
            self._stop_waiting()

    def on_response_complete(self) -> None:
        before = self.cycle
        super().on_response_complete()
        if self.cycle is before and not self.transport.is_closing():
            self._idle(known=bool(self.scope.get(KNOWN)))[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_asked()
        self._stop_waiting()
        super().connection_lost(exc)

    def _idle(self, known: bool) -> "dict[ImpatientProtocol, None]":
        """The connections of this server that ask for nothing, the longest idle first."""
        return _IDLE.setdefault(self.server_state, ({}, {}))[known]

    def _is_asked(self) -> None:
        for known in (False, True):
            self._idle(known).pop(self, None)

    def _make_room(self) -> None:
        """At the limit, close the connection that is idle for longest, unknown ones first."""
        while self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            idle = (one for known in (False, True) for one in self._idle(known) if one is not self)
            oldest = next(idle, None)
            if oldest is None:  # all others are being answered
                return
            oldest._is_asked()
            self.connections.discard(oldest)
            oldest.transport.close()

    def _wait(self) -> None:
        self._patience = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        self.transport.close()
