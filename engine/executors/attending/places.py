"""A connection to the place that a run goes to, whatever kind of place it is."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from engine.core.files import JsonObject
from engine.executors import hosts
from engine.executors.attending.pinned import pinned
from engine.executors.ray.executor import RayExecutor
from engine.executors.sky.executor import SkyExecutor
from engine.executors.slurm.executor import SlurmExecutor
from engine.executors.ssh import HERE, Connection, Link
from engine.executors.ssh_executor import SshExecutor
from engine.home.config_tables.hosts import RAY, SKY, SLURM
from engine.home.run_dir import Home, RunDir
from engine.home.user_config import Host
from engine.machine.install.setup_env import EXTRAS, GPU_EXTRAS
from engine.machine.processes.seam import Executor, Handle
from engine.records.run_config import TrainConfig


class FarExecutor(Executor, Protocol):
    """A place to run that is no part of this machine: the seam, and files that go there and back.

    Attributes:
        look: what the last probe brought: which files of the run changed, for the mirror.
    """

    home: Home
    host: Host
    look: JsonObject

    @property
    def link(self) -> Connection:
        """Where its files are read and written."""
        ...

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Put everything over there that the run needs; returns the bytes that were sent."""
        ...

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The run's folder over there, below the root of the connection."""
        ...


@contextlib.contextmanager
def connected(home: Home, host: Host, python: str = "") -> Iterator[FarExecutor]:
    """Connect to a host; the connection ends with the block.

    Args:
        python: an interpreter over there; "" for the one that its set-up found.

    Raises HostLost, HostRefused, FarError, or UserError HOST_UNUSABLE where it was never set up.
    """
    if host.kind == SKY:  # its machines come later, each with an environment of its own
        extras = (*EXTRAS, *(GPU_EXTRAS if host.sky.accelerators else ()))
        packages = () if host.python else pinned(*extras)
        with contextlib.closing(SkyExecutor(home, host, packages)) as executor:
            yield executor
        return
    python = python or hosts.facts_of(home, host).python
    if host.kind == RAY:
        # Where the folder is seen from here, files are put by this interpreter: the other one may
        # be on the nodes alone.
        reader = sys.executable if host.ssh == HERE else python
        with (
            Link(host.ssh, host.folder, reader) as link,
            contextlib.closing(RayExecutor(home, host, link, python)) as executor,
        ):
            yield executor
        return
    with Link(host.ssh, host.folder, python) as link:
        make = SlurmExecutor if host.kind == SLURM else SshExecutor
        yield make(home, host, link)
