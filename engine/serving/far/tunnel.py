"""A port of this machine that leads to a port of a host, through the user's own ssh."""

import contextlib
import socket
import subprocess
import tempfile
import time
from types import TracebackType

from engine.executors.ssh import OPTIONS, HostLost, HostRefused, check_destination, environment

_START_S = 60.0  # until the port here takes connections
_POLL_S = 0.02
# Of the options of every connection, the one that would forbid what this one is for.
_NO_FORWARDING = "ClearAllForwardings=yes"
_REFUSED = "administratively prohibited"  # what ssh prints where the other side's sshd forbids it


class Tunnel:
    """An ssh that leads a port of loopback here to one of loopback on a host.

    It ends with the process that has opened it, however that ends: the program at the other end
    reads from a pipe of it.

    Attributes:
        port: the port here.
    """

    def __init__(self, destination: str, port: int, far_port: int) -> None:
        """Open the tunnel and wait until the port here takes connections.

        Args:
            destination: the host as ssh takes it.
            port: the port here; it must be free.
            far_port: the port on the host.

        Raises HostLost if the connection does not come about now.
        """
        check_destination(destination)
        self.destination, self.port = destination, port
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the tunnel
        options = [option for option in OPTIONS if option != _NO_FORWARDING]
        arguments = [part for option in options for part in ("-o", option)]
        # Said here, so that an option of the user's config does not take it away.
        arguments += ["-o", "ClearAllForwardings=no", "-o", "ExitOnForwardFailure=no"]
        forward = f"127.0.0.1:{port}:127.0.0.1:{far_port}"
        self._process = subprocess.Popen(
            ["ssh", *arguments, "-T", "-L", forward, destination, "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=environment(),
        )
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Tunnel":
        """Return the tunnel itself, which is open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the tunnel, whatever happened in the block."""
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether ssh still runs; it ends within a minute of the network's death."""
        return self._process.poll() is None

    def check_allowed(self) -> None:
        """Raise HostRefused if the host has refused to lead a connection on. ssh learns that with
        the first one, so something must have been asked through the tunnel before."""
        if _REFUSED in self._messages():
            raise HostRefused(
                f"the sshd of {self.destination} forwards no ports",
                "Set `AllowTcpForwarding local` in its sshd_config, or for this user.",
            )

    def close(self) -> None:
        """End the tunnel; a second call does nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process may be gone
            self._process.stdin.close()
        if self._process.poll() is None:
            # Not its input alone: ssh waits for connections through the tunnel to end.
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stderr.close()

    def _wait_until_open(self) -> None:
        """Wait until the port here takes connections. Raises HostLost if ssh ends, or after
        `_START_S` seconds."""
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(_POLL_S)
        raise HostLost(self._messages() or f"no tunnel to {self.destination} came about")

    def _messages(self) -> str:
        """Return the end of what ssh printed, in one line; "" if it printed nothing."""
        with contextlib.suppress(OSError, ValueError):  # the file is closed already
            self._stderr.seek(0)
            return " ".join(self._stderr.read()[-2000:].decode("utf-8", "replace").split())
        return ""


def free_port() -> int:
    """Return a port of loopback that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
