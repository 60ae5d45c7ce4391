"""What the executors of all kinds of cluster have in common."""

from pathlib import Path

from engine.core.files import JsonObject
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.cluster.place import Place
from engine.executors.linked import LinkedExecutor
from engine.executors.ssh import FarError
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.machine.processes.seam import Caps, Handle
from engine.records.run_config import TrainConfig


class ClusterExecutor(LinkedExecutor):
    """Runs jobs on a cluster, over one connection to a machine that sees the cluster's shared
    folder. Each launch of a run has a folder of its own there."""

    def capabilities(self) -> Caps:
        """Return what the last job that looked at a node has found there. Raises UserError
        HOST_UNUSABLE if there was no such job yet (`look_at_a_node`)."""
        return hosts.facts_of(self.home, self.host).capabilities()

    def folder(self, run: RunDir, handle: Handle) -> str:
        """Return the run's folder in the folder of its launch, below the root."""
        return str(self._place(run, handle).run.path.relative_to(self.root))

    def _place(self, run: RunDir, handle: Handle) -> Place:
        """Return the place of the launch in the shared folder."""
        return Place(Path(self.root), self.home_id, run.id, handle.launch)

    def _order(self, run: RunDir, row: RunRow, cap: float) -> JsonObject:
        """Return the order for the job of a run (node_side.py): what it needs to queue the run in
        the launch's own home.

        Args:
            row: the run's row in the database of this machine.
            cap: device hours that the run may still take; 0 for no cap.
        """
        config = run.read_config()
        assert isinstance(config, TrainConfig)  # nothing else runs on another machine
        return {
            "row": orders.columns(row, cap),
            "lease_s": self._lease_s,
            "config_toml": orders.config_toml(self.home),
            "envs": [version.to_json() for version in bundles.env_versions(self.home, config)],
        }

    def _require_database(self, described: JsonObject) -> None:
        """Raise FarError if a node has found that no database can be kept in the shared folder.
        `described` is what the node says of itself; "database" holds the reason."""
        if described.get("database"):
            raise FarError(
                "HOST_UNUSABLE",
                f"{self.root} does not keep a database: {described['database']}",
                "Name a folder on another file system (folder of the host), one with locks.",
            )
