"""The executor on a host over SSH: starts, probes, stops and removes runs over one connection."""

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

_END_S = 330.0  # seconds that an older launch may take to save and end


class SshExecutor(LinkedExecutor):
    """Runs jobs on a host over one connection of ssh."""

    def capabilities(self) -> Caps:
        """Ask the host for its hardware and its packages. The answer is also stored, for plans that
        are made without a connection."""
        described = self.link.job("describe")
        return hosts.note_facts(self.home, self.host, self.link.python, described).capabilities()

    def _prepare(self, bundle: bundles.Bundle) -> None:
        """Have the host make a home with this one's settings and the rows of the run's
        environments."""
        self.link.job(
            "prepare",
            home_id=self.home_id,
            config_toml=orders.config_toml(self.home),
            envs=[version.to_json() for version in bundle.envs],
        )

    def _remove_older_launches(self, run: RunDir, handle: Handle) -> None:
        """Remove what earlier launches of the run left on the host. One that lives is told to end,
        and waited for.

        Raises FarError if it does not end within `_END_S` seconds, or if a later launch than that
        of `handle` is there.
        """
        deadline = time.monotonic() + _END_S
        run_ids: JsonObject = {"home_id": self.home_id, "run_id": run.id}
        newest = int(self.link.job("launch", **run_ids).get("launch", 0))
        if newest > handle.launch:
            message = f"launch {newest} of {run.id} is there, and this is launch {handle.launch}"
            raise FarError("RUN_STATE", message)
        while not self.link.job("reap", **run_ids, launch=handle.launch - 1).get("removed"):
            launch = int(self.link.job("launch", **run_ids).get("launch", 0))
            self.link.job("stop", **run_ids, launch=launch, reason="another launch takes its place")
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.2)

    def _launch_files(self, run: RunDir, handle: Handle) -> Mapping[str, bytes]:
        """Return the file that says which launch the run's folder on the host belongs to. All
        launches of a run have the same folder there. With this file in it from the beginning, a
        late request to remove an older launch leaves it alone."""
        return {run.far("coming").name: json.dumps({"launch": handle.launch}).encode()}

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch, whose files were sent before. A second call for it changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        columns = orders.columns(row, orders.cap_left(self.home, row))
        self.link.job(
            "start",
            **self._job_id(run, handle),
            row=columns,
            lease_s=self._lease_s,
            secrets=bundles.secrets_of(run),
        )

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the launch to save and end."""
        reason = "asked to end from where it started"
        self.link.job("stop", **self._job_id(run, handle), reason=reason)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what an ended launch has left on the host. One that lives stays."""
        self.link.job("reap", **self._job_id(run, handle))

    def list_owned(self) -> Sequence[Owned]:
        """List every job of this home that is on the host, ended or not."""
        return orders.owned(self.link.job("list_owned", home_id=self.home_id))

    def folder(self, run: RunDir, handle: Handle) -> str:
        """Return the run's folder on the host, below the root; all its launches share it."""
        return f"homes/{self.home_id}/runs/{run.id}"
