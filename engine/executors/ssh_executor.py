"""The executor on a host over SSH: the seam's verbs over one connection."""

import json
import time
from collections.abc import Mapping, Sequence

from engine.core.errors import FAILURE_KINDS
from engine.core.files import JsonObject
from engine.core.hints import Hint
from engine.executors import bundle as bundles
from engine.executors import hosts
from engine.executors.seam import Caps, End, Handle, Life, Owned, Probe
from engine.executors.ssh import FarError, HostLost, Link
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.home.user_config import Host
from engine.processes import outcome
from engine.processes.launcher import spent_hours
from engine.records.run_config import TrainConfig

_LIVES: Mapping[str, Life] = {
    "pending": "pending",
    "running": "running",
    "exited": "exited",
    "gone": "gone",
}
_END_S = 330.0  # that an older launch may take to save and end
_STATES = ("done", "failed", "cancelled")
_VERDICTS = ("better", "worse", "no_difference", "inconclusive", "unknown")


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
        bundle = bundles.bundle_of(run, config, self.root, self.home_id)
        versions = [version.to_json() for version in bundle.envs]
        self.link.job("prepare", home_id=self.home_id, config_toml=self._config(), envs=versions)
        sent = sum(bundles.send_folder(self.link, model, model.name) for model in bundle.models)
        for version in bundle.envs:
            bundles.send_env(self.link, self.home_id, version)
        self._clear(run, handle)
        folder = self.folder(run, handle)
        sent += bundles.send_folder(self.link, bundle.run_files, folder, is_own=True)
        content = json.dumps(bundle.config).encode()
        self.link.call("write", content, path=f"{folder}/{run.config.name}")
        return sent

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Remove what older launches of the run left, which is stale; one that lives ends first.

        Raises FarError where it does not.
        """
        deadline = time.monotonic() + _END_S
        older: JsonObject = {"home_id": self.home_id, "run_id": run.id}
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
        cap = row.max_gpu_hours
        if cap > 0:  # what is left of it: the host ends the run too, if nobody here does
            cap = max(1e-6, cap - (spent_hours(self.home, row) - row.spent_before))
        columns = {
            "name": run.id.rpartition("-")[0],
            **{key: getattr(row, key) for key in ("kind", "algorithm", "env_id", "model")},
            "note": row.note,
            "expect": row.expect,
            "max_gpu_hours": cap,
            "gpus": row.gpus,
        }
        of_job = {**self._of(run, handle), "row": columns, "lease_s": self._lease_s}
        self.link.job("start", **of_job, secrets=bundles.secrets_of(run))

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """What became of it; `look` then holds which of its files changed."""
        try:
            self.look = self.link.job("look", **self._of(run, handle), lease_s=self._lease_s)
        except (HostLost, FarError):
            self.look = {}
            return Probe("unknown")
        if self.look.get("launch") != handle.launch:  # stale, or another's
            return Probe("gone")
        life = _LIVES.get(str(self.look.get("life")), "unknown")
        end = self.look.get("end")
        return Probe(
            life,
            state=str(self.look.get("state", "")),
            device=one_line(str(self.look.get("device", "")), 200),
            end=_end_of(end, run) if life == "exited" and isinstance(end, dict) else None,
        )

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end."""
        self.link.job("stop", **self._of(run, handle), reason="asked to end from where it started")

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of it over there."""
        self.link.job("reap", **self._of(run, handle))

    def list_owned(self) -> Sequence[Owned]:
        """Every job of this home that is there."""
        owned = self.link.job("list_owned", home_id=self.home_id).get("owned")
        return [
            Owned(one_line(str(each["run_id"]), 200), int(each["launch"]), _LIVES[each["life"]])
            for each in (owned if isinstance(owned, list) else [])
        ]

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The run's folder over there, below the root."""
        return f"homes/{self.home_id}/runs/{run.id}"

    @property
    def _lease_s(self) -> float:
        return 3600 * self.host.lease_hours

    def _of(self, run: RunDir, handle: Handle) -> JsonObject:
        """Which job is meant."""
        return {"home_id": self.home_id, "run_id": run.id, "launch": handle.launch}

    def _config(self) -> str:
        """The config.toml of the home over there: what the owner of this one chose for user
        code."""
        config = self.home.user_config()
        values = {
            "sandbox": f'"{config.sandbox}"',
            "allow_root": "true" if config.allow_root else "false",
            "stop_stalled_minutes": f"{config.stop_stalled_minutes:g}",
        }
        return "".join(f"{name} = {value}\n" for name, value in values.items())


def _end_of(end: Mapping[str, object], run: RunDir) -> End:
    """How a run ended, as the host says; a word that is none of ours becomes the worst."""
    state, kind = str(end.get("state")), str(end.get("reason_kind"))
    verdict = str(end.get("verdict"))
    return End(
        state=state if state in _STATES else "failed",
        reason_kind=kind if kind in FAILURE_KINDS else "internal",
        reason=one_line(str(end.get("reason", "")), 500),
        hint=_hint_of(end.get("hint"), run),
        verdict=verdict if verdict in _VERDICTS else "unknown",
    )


def _hint_of(stored: object, run: RunDir) -> Hint:
    """The next move that the host names, as one line; of calls only the run's own resume."""
    hint = Hint.from_json(stored)
    resume = outcome.resume_hint(run).call
    is_resume = hint.call is not None and hint.call.tool == "submit_train"
    return Hint(one_line(hint.text, 300), resume if is_resume else None)
