"""The executor on a host over SSH: the seam's verbs over one connection."""

import json
import time
from collections.abc import Mapping, Sequence

from engine.core.files import JsonObject
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.linked import LinkedExecutor
from engine.executors.ssh import FarError
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.processes.seam import Caps, Handle, Owned

_END_S = 330.0  # that an older launch may take to save and end


class SshExecutor(LinkedExecutor):
    """A host over one connection, which lasts as long as the object is open."""

    def capabilities(self) -> Caps:
        """The hardware and the packages; kept for plans that are made without a connection."""
        described = self.link.job("describe")
        return hosts.note_facts(self.home, self.host, self.link.python, described).capabilities()

    def _prepare(self, bundle: bundles.Bundle) -> None:
        """Have a home there with the rows of the environments."""
        self.link.job(
            "prepare",
            home_id=self.home_id,
            config_toml=orders.config_toml(self.home),
            envs=[version.to_json() for version in bundle.envs],
        )

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

    def _marks(self, run: RunDir, handle: Handle) -> Mapping[str, bytes]:
        """The number of the launch: the folder, which all launches of a run have in common, is this
        one's from the moment it is there, and a late `reap` of an older one leaves it alone."""
        return {run.far("coming").name: json.dumps({"launch": handle.launch}).encode()}

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch; its files are there. Again changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        columns = orders.columns(row, orders.cap_left(self.home, row))
        of_job = {**self._of(run, handle), "row": columns, "lease_s": self._lease_s}
        self.link.job("start", **of_job, secrets=bundles.secrets_of(run))

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
