"""What all executors over one connection have in common.

Each start of a run on a host is a launch, with a number counted from 1. A `Handle` says which
launch is meant.
"""

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

_WHY_CHARS, _DEVICE_CHARS = 300, 200  # the most characters that are taken of a host's texts


class LinkedExecutor:
    """Runs jobs on a host over one connection.

    Attributes:
        home_id: the name of this home on the host.
        root: the folder on the host below which everything of this program lies.
        look: the host's answer to the last probe, from which files are brought back.
        source: the folder of this program's source on the host, below the root.
    """

    calls = "engine.executors.jobs"  # the module on the host whose functions are called

    def __init__(self, home: Home, host: Host, link: Link) -> None:
        """Send this program's source over `link`, if the host does not have it, and have the host
        load it from there."""
        self.home, self.host, self.link = home, host, link
        self.home_id = hosts.home_id(home)
        self.root = str(link.facts.get("root", ""))
        self.look: JsonObject = {}
        self.source = bundles.send_source(link)
        self.link.call("use", source=self.source, calls=self.calls)

    @property
    def name(self) -> str:
        """The host as the setting `compute` names it, such as "ssh:box"."""
        return self.host.compute

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Put everything on the host that the launch of the run needs. What is there already is not
        sent again. Returns the number of bytes of files that were sent."""
        folder = self.folder(run, handle)
        bundle = bundles.bundle_of(run, config, self.root, self.home_id, folder)
        self._prepare(bundle)
        sent = sum(bundles.send_folder(self.link, model, model.name) for model in bundle.models)
        for version in bundle.envs:
            bundles.send_env(self.link, self.home_id, version)
        self._remove_older_launches(run, handle)
        launch_files = self._launch_files(run, handle)
        sent += bundles.send_folder(self.link, bundle.run_files, folder, launch_files, is_own=True)
        content = json.dumps(bundle.config).encode()
        self.link.call("write", content, path=f"{folder}/{run.config.name}")
        return sent

    def _prepare(self, bundle: bundles.Bundle) -> None:
        """Make the host ready for what is sent next. Nothing is needed by default."""

    def _launch_files(self, run: RunDir, handle: Handle) -> Mapping[str, bytes]:
        """Return small files to add to the run's folder on the host, which say which launch it is
        of: name -> content. None by default."""
        return {}

    def _remove_older_launches(self, run: RunDir, handle: Handle) -> None:
        """Remove what earlier launches of the run left on the host. One that lives is ended first.

        Raises FarError if it does not end, or if a later launch is there.
        """
        raise NotImplementedError

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """Ask the host what became of the launch, which also renews its lease. Afterwards `look`
        holds which of its files have changed; {} if the host could not be asked (life "unknown").
        """
        try:
            self.look = self.link.job("look", **self._job_id(run, handle), lease_s=self._lease_s)
        except (HostLost, FarError) as error:
            self.look = {}
            return Probe("unknown", why=one_line(str(error), _WHY_CHARS))
        if self.look.get("launch") != handle.launch:  # the host has another launch, or none
            return Probe("gone")
        life, end, why = self._outcome(run, handle)
        spent_s = self.look.get("spent_s")
        known_end = None if end is None else orders.end_of(end, run)
        return Probe(
            life,
            # An end is newer than the last state that a job gave beside its beats.
            state=str(self.look.get("state", "")) if known_end is None else known_end.state,
            device=one_line(str(self.look.get("device", "")), _DEVICE_CHARS),
            end=known_end,
            why=one_line(why, _WHY_CHARS),
            spent_s=float(spent_s) if isinstance(spent_s, int | float) else None,
        )

    def _outcome(self, run: RunDir, handle: Handle) -> tuple[Life, JsonObject | None, str]:
        """Return what became of the launch, from the host's last answer, `look`: (its life, how it
        ended or None, why it still waits or "")."""
        life = orders.LIVES.get(str(self.look.get("life")), "unknown")
        end = self.look.get("end")
        is_ended = life == "exited" and isinstance(end, dict)
        return life, end if is_ended else None, str(self.look.get("why", ""))

    def folder(self, run: RunDir, handle: Handle) -> str:
        """Return the folder of the launch on the host, below the root."""
        raise NotImplementedError

    @property
    def _lease_s(self) -> float:
        """Seconds for which a run on the host goes on if nobody asks about it."""
        return 3600 * self.host.lease_hours

    def _job_id(self, run: RunDir, handle: Handle) -> JsonObject:
        """Return the arguments that tell the functions on the host which launch is meant."""
        return {"home_id": self.home_id, "run_id": run.id, "launch": handle.launch}
