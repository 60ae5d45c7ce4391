"""A connection to a machine that is not up yet."""

import contextlib
from typing import Any

from engine.core.files import JsonObject
from engine.executors.ssh import HostLost, Link


class LateLink:
    """A connection to a machine that is made once the machine is up. Until then every call raises
    HostLost.

    Attributes:
        present: the connection; None as long as there is none. Whoever connects sets it.
    """

    def __init__(self) -> None:
        """Begin without a connection."""
        self.present: Link | None = None

    @property
    def facts(self) -> JsonObject:
        """What the other side said of itself; {} without a connection."""
        return self.present.facts if self.present is not None else {}

    def call(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[JsonObject, bytes]:
        """Ask the other side for an operation, as `Link.call` does."""
        return self._link().call(operation, body, **arguments)

    def job(self, name: str, **arguments: Any) -> JsonObject:
        """Call a function of jobs on the other side, as `Link.job` does."""
        return self._link().job(name, **arguments)

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        link, self.present = self.present, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.close()

    def _link(self) -> Link:
        """Return the connection. Raises HostLost if there is none."""
        if self.present is None:
            raise HostLost("its machine is not reached")
        return self.present
