"""What all providers of sandboxes share: what is ordered, what a command gave, how one fails."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from envs.json_types import JsonObject

KEPT_BYTES = 64 << 10  # of each stream of a command: the first and the last half of this
LABEL = "honesmith"  # the label that every sandbox of ours has


class SandboxFault(Exception):
    """The provider failed, or what it was asked for; the text says how. No fault of the model.

    Attributes:
        retryable: whether the same may work in a moment: too many requests, or a server's error.
    """

    def __init__(self, text: str, *, retryable: bool = False) -> None:
        """Store `text`, the reason, and whether it may work in a moment."""
        super().__init__(text)
        self.retryable = retryable


@dataclass(frozen=True)
class Order:
    """The sandbox that a task needs.

    Attributes:
        image: the container image, or the provider's name of one; "" for the provider's default.
        workdir: the folder in which commands run; "" for that of the image.
        variables: environment variables of every command.
        cpus, memory_mb, disk_mb: what it may use; 0 for the provider's default.
        network: whether it may reach the internet.
        lifetime_s: after so many seconds the provider ends it, whatever has become of us.
        labels: what it is marked with.
    """

    image: str = ""
    workdir: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    network: bool = False
    lifetime_s: float = 600.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """What one command gave.

    Attributes:
        status: its exit status; 128 and the signal where one ended it.
        stdout, stderr: what it wrote, each cut to KEPT_BYTES; all in `stdout` where the provider
            keeps them together.
        timed_out: whether its time was up, and it was ended.
    """

    status: int
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False


class Sandbox(Protocol):
    """An open sandbox. Every method raises SandboxFault where the provider fails.

    Attributes:
        workdir: the folder in which commands run.
    """

    workdir: str

    def exec(
        self, command: str, seconds: float, variables: Mapping[str, str], grading: bool
    ) -> Ran:
        """Run `command` by bash in the working folder, at most `seconds`, with these variables too.
        `grading` is whether it is the task's own, which may see the tests and the logs."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file at an absolute path; its folders are made."""
        ...

    def read(self, path: str, most: int) -> bytes | None:
        """Return the regular file at an absolute path; None if there is none. A file of more than
        `most` bytes is a fault."""
        ...

    def remove(self, path: str) -> None:
        """Remove the file at an absolute path, or all that is in a folder there."""
        ...

    def end_processes(self) -> None:
        """End every process that the commands so far have left. Raises SandboxFault if one may
        live."""
        ...

    def close(self) -> None:
        """Give the sandbox back. May be called twice."""
        ...


class Provider(Protocol):
    """A module that opens sandboxes."""

    def problem(self, options: JsonObject) -> str:
        """Return what keeps this provider from working here with these options of
        [adapter.sandbox], and what to do; "" for nothing."""
        ...

    def open(self, options: JsonObject, order: Order) -> Sandbox:
        """Open a sandbox. Raises SandboxFault."""
        ...


def kept(data: bytes) -> str:
    """Return the text of a stream, with its middle cut out where it has more than KEPT_BYTES."""
    if len(data) <= KEPT_BYTES:
        return data.decode("utf-8", "replace")
    half = KEPT_BYTES // 2
    dropped = len(data) - 2 * half
    note = f"\n... {dropped:,} bytes are left out ...\n"
    return data[:half].decode("utf-8", "replace") + note + data[-half:].decode("utf-8", "replace")
