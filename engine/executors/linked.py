"""What all executors over one connection have in common."""

import json
from collections.abc import Mapping

from engine.core.files import JsonObject
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.ssh import FarError, HostLost, Link
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.user_config import Host
from engine.machine.processes.seam import Handle, Life, Probe
from engine.records.run_config import TrainConfig


class LinkedExecutor:
    """A host over one connection, which lasts as long as the object is open.

    Attributes:
        home_id: of the home, at the other side.
        root: of the connection: everything of ours over there lies below it.
        look: what the last probe brought, for the mirror.
        source: the folder of our own source over there, below the root.
    """

    calls = "engine.executors.jobs"  # the module over there whose functions are called

    def __init__(self, home: Home, host: Host, link: Link) -> None:
        """Take our own source over there, and send it first where it is not there."""
        self.home, self.host, self.link = home, host, link
        self.home_id = hosts.home_id(home)
        self.root = str(link.facts.get("root", ""))
        self.look: JsonObject = {}
        self.source = bundles.send_source(link)
        self.link.call("use", source=self.source, calls=self.calls)

    @property
    def name(self) -> str:
        """As the setting `compute` names it."""
        return self.host.compute

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Put everything over there that the run needs; returns the bytes that were sent."""
        folder = self.folder(run, handle)
        bundle = bundles.bundle_of(run, config, self.root, self.home_id, folder)
        self._prepare(bundle)
        sent = sum(bundles.send_folder(self.link, model, model.name) for model in bundle.models)
        for version in bundle.envs:
            bundles.send_env(self.link, self.home_id, version)
        self._clear(run, handle)
        marks = self._marks(run, handle)
        sent += bundles.send_folder(self.link, bundle.run_files, folder, marks, is_own=True)
        content = json.dumps(bundle.config).encode()
        self.link.call("write", content, path=f"{folder}/{run.config.name}")
        return sent

    def _prepare(self, bundle: bundles.Bundle) -> None:
        """Make the other side ready for what is sent next."""

    def _marks(self, run: RunDir, handle: Handle) -> Mapping[str, bytes]:
        """Small files of the run's folder that say which launch it is of: name -> content."""
        return {}

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Remove what older launches of the run left, which is stale; one that lives ends first.

        Raises FarError where it does not, or where a newer launch is there.
        """
        raise NotImplementedError

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """What became of it; `look` then holds which of its files changed."""
        try:
            self.look = self.link.job("look", **self._of(run, handle), lease_s=self._lease_s)
        except (HostLost, FarError) as error:
            self.look = {}
            return Probe("unknown", why=one_line(str(error), 300))
        if self.look.get("launch") != handle.launch:  # stale, or another's
            return Probe("gone")
        life, end, why = self._standing(run, handle)
        spent_s = self.look.get("spent_s")
        return Probe(
            life,
            state=str(self.look.get("state", "")),
            device=one_line(str(self.look.get("device", "")), 200),
            end=None if end is None else orders.end_of(end, run),
            why=one_line(why, 300),
            spent_s=float(spent_s) if isinstance(spent_s, int | float) else None,
        )

    def _standing(self, run: RunDir, handle: Handle) -> tuple[Life, JsonObject | None, str]:
        """What became of a launch, from `look`: its life, how it ended, and why it waits."""
        life = orders.LIVES.get(str(self.look.get("life")), "unknown")
        end = self.look.get("end")
        is_ended = life == "exited" and isinstance(end, dict)
        return life, end if is_ended else None, str(self.look.get("why", ""))

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The run's folder over there, below the root."""
        raise NotImplementedError

    @property
    def _lease_s(self) -> float:
        return 3600 * self.host.lease_hours

    def _of(self, run: RunDir, handle: Handle) -> JsonObject:
        """Which job is meant."""
        return {"home_id": self.home_id, "run_id": run.id, "launch": handle.launch}
