"""When a run would start at a place that has a queue of its own: asked of that place."""

from engine.core.errors import UserError
from engine.executors import hosts
from engine.executors.attending.places import connected
from engine.executors.ray.executor import RayExecutor
from engine.executors.sky.executor import SkyExecutor
from engine.executors.slurm.executor import SlurmExecutor
from engine.executors.ssh import FarError, HostLost, HostRefused
from engine.home.config_tables.hosts import SSH
from engine.home.rows import LOCAL
from engine.home.run_dir import Home


def when_it_starts(home: Home, compute: str, gpus: int) -> str:
    """Ask a cluster when a run on so many devices would start. Returns a sentence; "" if the place
    `compute` (a host such as "slurm:lab", or "local") has no queue of its own.

    If the cluster is not reached, the sentence says so. Raises UserError HOST_NOT_FOUND or
    HOST_UNUSABLE if it is not known, was not set up, or would never start such a job.
    """
    host = hosts.host_of(home, compute) if compute != LOCAL else None
    if host is None or host.kind == SSH:
        return ""
    try:
        with connected(home, host) as executor:
            if isinstance(executor, RayExecutor | SkyExecutor):
                return executor.room_for(gpus)
            assert isinstance(executor, SlurmExecutor)  # the kind of the host says so
            start = executor.expected_start(gpus, 0.0)
    except FarError as error:
        raise UserError(
            "HOST_UNUSABLE",
            f"{host.name} would not take such a job: {error.message}"[:800],
            hint=f"Change what [hosts.{host.name}] of {home.config_file} asks for, or gpus.",
            field="settings.compute",
        ) from error
    except (HostLost, HostRefused) as error:
        return f"when it starts is not known: {error}"[:300]
    return f"Slurm would start it at {start}" if start else "Slurm does not say when it starts"
