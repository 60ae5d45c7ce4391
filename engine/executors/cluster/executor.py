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
    """A cluster over one connection to where its shared folder is seen."""

    def capabilities(self) -> Caps:
        """What the last job that looked at a node has found. Raises UserError HOST_UNUSABLE where
        there was none (`look_at_a_node`)."""
        return hosts.facts_of(self.home, self.host).capabilities()

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The folder of a launch of the run over there, below the root."""
        return str(self._place(run, handle).run.path.relative_to(self.root))

    def _place(self, run: RunDir, handle: Handle) -> Place:
        """The launch over there."""
        return Place(Path(self.root), self.home_id, run.id, handle.launch)

    def _order(self, run: RunDir, row: RunRow, cap: float) -> JsonObject:
        """What the job of a run is to do (node_side.py).

        Args:
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
        """Raise FarError where a node has found that no database can be kept in the folder."""
        if described.get("database"):
            raise FarError(
                "HOST_UNUSABLE",
                f"{self.root} does not keep a database: {described['database']}",
                "Name a folder on another file system (folder of the host), one with locks.",
            )
