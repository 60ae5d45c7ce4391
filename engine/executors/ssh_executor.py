"""The executor on a host over SSH: the seam's verbs over one connection."""

import json
import time
from collections.abc import Sequence

from engine.core.files import JsonObject
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.ssh import FarError, HostLost, Link
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.home.user_config import Host
from engine.processes.seam import Caps, Handle, Owned, Probe
from engine.records.run_config import TrainConfig

_END_S = 330.0  # that an older launch may take to save and end


class SshExecutor:
    """A host over one connection, which lasts as long as the object is open."""

    def __init__(self, home: Home, host: Host, link: Link) -> None:
        """Take our own source over there, and send it first where it is not there."""
        self.home, self.host, self.link = home, host, link
        self.home_id = hosts.home_id(home)
        self.root = str(link.facts.get("root", ""))
        self.look: JsonObject = {}  # what the last probe brought, for the mirror
        self.link.call("use", source=bundles.send_source(link))

    @property
    def name(self) -> str:
        """As the setting `compute` names it."""
        return self.host.compute

    def capabilities(self) -> Caps:
        """The hardware and the packages; kept for plans that are made without a connection."""
        described = self.link.job("describe")
        facts = hosts.note_facts(self.home, self.host, self.link.python, described)
        return Caps(facts.hardware.measured(), facts.packages)

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Put everything over there that the run needs; returns the bytes that were sent."""
        folder = self.folder(run, handle)
        bundle = bundles.bundle_of(run, config, self.root, self.home_id, folder)
        versions = [version.to_json() for version in bundle.envs]
        self.link.job(
            "prepare",
            home_id=self.home_id,
            config_toml=orders.config_toml(self.home),
            envs=versions,
        )
        sent = sum(bundles.send_folder(self.link, model, model.name) for model in bundle.models)
        for version in bundle.envs:
            bundles.send_env(self.link, self.home_id, version)
        self._clear(run, handle)
        sent += bundles.send_folder(self.link, bundle.run_files, folder, is_own=True)
        content = json.dumps(bundle.config).encode()
        self.link.call("write", content, path=f"{folder}/{run.config.name}")
        return sent

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Remove what older launches of the run left, which is stale; one that lives ends first.

        Raises FarError where it does not, or where a newer launch is there.
        """
        deadline = time.monotonic() + _END_S
        older: JsonObject = {"home_id": self.home_id, "run_id": run.id}
        newest = int(self.link.job("launch", **older).get("launch", 0))
        if newest > handle.launch:
            message = f"launch {newest} of {run.id} is there, and this is launch {handle.launch}"
            raise FarError("RUN_STATE", message)
        while not self.link.job("reap", **older, launch=handle.launch - 1).get("removed"):
            launch = int(self.link.job("launch", **older).get("launch", 0))
            self.link.job("stop", **older, launch=launch, reason="another launch takes its place")
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.2)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch; its files are there. Again changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        columns = orders.columns(row, orders.cap_left(self.home, row))
        of_job = {**self._of(run, handle), "row": columns, "lease_s": self._lease_s}
        self.link.job("start", **of_job, secrets=bundles.secrets_of(run))

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """What became of it; `look` then holds which of its files changed."""
        try:
            self.look = self.link.job("look", **self._of(run, handle), lease_s=self._lease_s)
        except (HostLost, FarError) as error:
            self.look = {}
            return Probe("unknown", why=one_line(str(error), 300))
        if self.look.get("launch") != handle.launch:  # stale, or another's
            return Probe("gone")
        life = orders.LIVES.get(str(self.look.get("life")), "unknown")
        end, spent_s = self.look.get("end"), self.look.get("spent_s")
        return Probe(
            life,
            state=str(self.look.get("state", "")),
            device=one_line(str(self.look.get("device", "")), 200),
            end=orders.end_of(end, run) if life == "exited" and isinstance(end, dict) else None,
            spent_s=float(spent_s) if isinstance(spent_s, int | float) else None,
        )

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end."""
        self.link.job("stop", **self._of(run, handle), reason="asked to end from where it started")

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of it over there."""
        self.link.job("reap", **self._of(run, handle))

    def list_owned(self) -> Sequence[Owned]:
        """Every job of this home that is there."""
        return orders.owned(self.link.job("list_owned", home_id=self.home_id))

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The run's folder over there, below the root."""
        return f"homes/{self.home_id}/runs/{run.id}"

    @property
    def _lease_s(self) -> float:
        return 3600 * self.host.lease_hours

    def _of(self, run: RunDir, handle: Handle) -> JsonObject:
        """Which job is meant."""
        return {"home_id": self.home_id, "run_id": run.id, "launch": handle.launch}
