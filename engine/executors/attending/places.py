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
    """An executor on another machine, with what is needed to send files there and bring them back.

    Attributes:
        look: the host's answer to the last probe, which says which files of the run have changed.
    """

    home: Home
    host: Host
    look: JsonObject

    @property
    def link(self) -> Connection:
        """The connection over which files are read and written there."""
        ...

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Send the host the files that a run needs there: its models, environments, configuration
        and source code, without those that the host has already. A host that is rented is only
        ordered here, and gets the files once it is up. `handle` tells which launch of the run on
        this host it is for. Returns the number of bytes that were sent."""
        ...

    def folder(self, run: RunDir, handle: Handle) -> str:
        """Return the run's folder on the host, below the root of the connection."""
        ...


@contextlib.contextmanager
def connected(home: Home, host: Host, python: str = "") -> Iterator[FarExecutor]:
    """Connect to a host of any kind, and yield its executor. The connection is closed at the end of
    the `with` block.

    Args:
        python: an interpreter on the host; "" for the one that its set-up chose.

    Raises HostLost (not reached), HostRefused (a person has to act), FarError, or UserError
    HOST_UNUSABLE if the host was never set up.
    """
    if host.kind == SKY:  # its machines are rented later, each with an environment of its own
        extras = (*EXTRAS, *(GPU_EXTRAS if host.sky.accelerators else ()))
        packages = () if host.python else pinned(*extras)
        with contextlib.closing(SkyExecutor(home, host, packages)) as executor:
            yield executor
        return
    python = python or hosts.facts_of(home, host).python
    if host.kind == RAY:
        # If this machine sees the shared folder itself, files are written by its own interpreter:
        # `python` may exist on the cluster's nodes alone.
        folder_python = sys.executable if host.ssh == HERE else python
        with (
            Link(host.ssh, host.folder, folder_python) as link,
            contextlib.closing(RayExecutor(home, host, link, python)) as executor,
        ):
            yield executor
        return
    with Link(host.ssh, host.folder, python) as link:
        executor_class = SlurmExecutor if host.kind == SLURM else SshExecutor
        yield executor_class(home, host, link)
