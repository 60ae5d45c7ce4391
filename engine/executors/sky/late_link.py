"""A connection to a machine that is not up yet."""

import contextlib
from typing import Any

from engine.core.files import JsonObject
from engine.executors.ssh import HostLost, Link


class LateLink:
    """A connection that comes about once its machine is up; until then every call is HostLost."""

    def __init__(self) -> None:
        self.present: Link | None = None

    @property
    def facts(self) -> JsonObject:
        """What the other side said of itself; empty without a connection."""
        return self.present.facts if self.present is not None else {}

    def call(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[JsonObject, bytes]:
        """As `Link.call`."""
        return self._link().call(operation, body, **arguments)

    def job(self, name: str, **arguments: Any) -> JsonObject:
        """As `Link.job`."""
        return self._link().job(name, **arguments)

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        link, self.present = self.present, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.close()

    def _link(self) -> Link:
        if self.present is None:
            raise HostLost("its machine is not reached")
        return self.present
