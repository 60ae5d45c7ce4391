"""A port of this machine that leads to a port of a host, through the user's own ssh.

The port is held by this process for as long as the deployment lives, also while the host is not
reached: nobody else can take it. ssh itself forwards nothing that is written in the user's config;
each connection to the port gets a channel of one ssh connection (`ssh -W` over its control socket).
"""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from engine.executors.ssh import OPTIONS, HostLost, HostRefused, check_destination, environment
from engine.home.sanitize import one_line

_START_S = 60.0  # until the ssh connection stands
_POLL_S = 0.02
_PAUSE_S = 0.1  # after a connection that could not be taken
_LONGEST_FOLDER = 60  # characters; a socket's whole path may have about 100
_MESSAGE_CHARS = 500
_OF_CONTROL = ("ControlMaster", "ControlPath")  # options of every connection that differ here
_REFUSED = "administratively prohibited"  # what ssh prints where the other side's sshd forbids it


class Tunnel:
    """One ssh connection, over which connections are led to ports of a host's loopback.

    It ends with the process that has opened it, however that ends, once the connections that it
    leads have ended: the program at its other end reads from a pipe of that process.
    """

    def __init__(self, destination: str) -> None:
        """Connect, and wait until connections can be led on.

        Args:
            destination: the host as ssh takes it.

        Raises HostLost if the connection does not come about now.
        """
        check_destination(destination)
        self.destination = destination
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the tunnel
        # A socket's path must be short. Only this user can enter the folder.
        self._folder = Path(tempfile.mkdtemp(prefix="honesmith-", dir=_short_folder()))
        self._socket = self._folder / "s"
        self._process = subprocess.Popen(
            [*self._ssh("ControlMaster=yes"), "-T", destination, "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=environment(),
            process_group=0,  # a signal to the deployment's processes is for this program alone
        )
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether ssh still runs; it ends within a minute of the network's death."""
        return self._process.poll() is None

    def lead(self, connection: socket.socket, far_port: int) -> None:
        """Lead a connection to a port of the host's loopback; returns when it has ended."""
        # Never a login of its own: if the connection is gone, this ends at once.
        command = self._ssh("ControlMaster=no", "ProxyCommand=false")
        with connection:
            subprocess.run(
                [*command, "-W", f"127.0.0.1:{far_port}", self.destination],
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                stderr=self._stderr,
                env=environment(),
                process_group=0,
                check=False,
            )

    def check_allowed(self) -> None:
        """Raise HostRefused if the host has refused to lead a connection on, which ssh learns with
        the first one."""
        if _REFUSED in self._messages():
            raise HostRefused(
                f"the sshd of {self.destination} forwards no ports",
                "Set `AllowTcpForwarding local` in its sshd_config, or for this user.",
            )

    def close(self) -> None:
        """End the tunnel and what it leads; a second call does nothing."""
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ssh(self, *more: str) -> list[str]:
        """Return the ssh program with the options of every connection, but for the socket over
        which connections are led, and with `more` options."""
        options = [option for option in OPTIONS if not option.startswith(_OF_CONTROL)]
        options += [*more, f"ControlPath={self._socket}", "ControlPersist=no"]
        options.append("LogLevel=INFO")  # what it refuses is read from its messages
        return ["ssh", *(part for option in options for part in ("-o", option))]

    def _wait_until_open(self) -> None:
        """Wait until the control socket is there. Raises HostLost if ssh ends, or after `_START_S`
        seconds."""
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._socket.exists():
                return
            time.sleep(_POLL_S)
        raise HostLost(self._messages() or f"no tunnel to {self.destination} came about")

    def _messages(self) -> str:
        """Return the end of what ssh printed, in one line; "" if it printed nothing."""
        with contextlib.suppress(OSError, ValueError):  # the file is closed already
            self._stderr.seek(0)
            text = self._stderr.read()[-2000:].decode("utf-8", "replace")
            return one_line(text, _MESSAGE_CHARS)
        return ""


class Entrance:
    """The port of this machine at which connections come in.

    Attributes:
        port: the port, on loopback.
        tunnel, far_port: where connections are led now; they are closed while `tunnel` is None.
    """

    def __init__(self) -> None:
        """Listen on a free port until `close`."""
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.tunnel: Tunnel | None = None
        self.far_port = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self.tunnel, self._is_closed = None, True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept` in its thread
        self._listener.close()

    def _accept(self) -> None:
        """Take connections until the port is closed, each with a thread of its own."""
        while not self._is_closed:
            connection = None
            try:
                connection, _ = self._listener.accept()
                tunnel = self.tunnel
                if tunnel is None:
                    connection.close()
                    continue
                arguments = (connection, self.far_port)
                threading.Thread(target=tunnel.lead, args=arguments, daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads: it passes
                if connection is not None:
                    connection.close()
                if not self._is_closed:
                    time.sleep(_PAUSE_S)


def _short_folder() -> str | None:
    """Return a folder for temporary files whose path is short enough for a socket in it; None for
    the usual one."""
    return "/tmp" if len(tempfile.gettempdir()) > _LONGEST_FOLDER else None
