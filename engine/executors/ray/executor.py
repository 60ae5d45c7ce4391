"""The executor on a Ray cluster: the seam's verbs over its Jobs API and a shared folder.

What a job writes counts more than what Ray says of it: a head that was started anew has forgotten
its jobs, and one that is away says nothing. Ray is asked where a job gives no sign of life.
"""

import contextlib
import math
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import JsonObject
from engine.core.format import counted
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.cluster.executor import ClusterExecutor
from engine.executors.cluster.place import name_prefix, of_job
from engine.executors.ray.causes import NOT_STARTED, end_of, why_waiting
from engine.executors.ray.folder_side import TAKEN_BACK
from engine.executors.ray.jobs_api import Job, JobsApi
from engine.executors.ssh import FarError, HostLost, Link
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.home.user_config import Host, key_of
from engine.machine.processes.seam import Caps, Handle, Life, Owned

_DRIVER = "engine.executors.ray.driver"
_SILENT_S = 12.0  # without a sign of life before Ray is asked; there is one every 3 s
_SETTLE_S = 15.0  # until the last words of an ended job have come through the shared folder
_HELD_S = 900.0  # that what a job has left may take to save and end
_STOP_S = 600.0  # that a run may take to save before Ray ends its job
_END_S = 960.0  # that an older launch may take to save and end
_JOB_END_S = 15.0  # until the program of a run that has ended is gone too
_LOOK_S = 1.0  # between two looks at the job that describes a node


@dataclass(frozen=True)
class _Launch:
    """A launch of a run over there: as a folder, as a job of Ray's, or both."""

    run_id: str
    launch: int
    life: Life
    job: Job | None
    is_started: bool


@dataclass
class _Watch:
    """What this connection knows of a launch; times are monotonic."""

    beat: object = None
    heard_at: float = -math.inf
    silent_since: float | None = None  # its job has ended, or is missing, without last words


class RayExecutor(ClusterExecutor):
    """A cluster over a connection to its folder, which lasts as long as the object is open."""

    calls = "engine.executors.ray.folder_side"

    def __init__(self, home: Home, host: Host, link: Link, python: str) -> None:
        """Take our own source over there, and send it first where it is not there.

        Args:
            python: the interpreter that runs what is ours on a node.
        """
        super().__init__(home, host, link)
        self.python = python
        token = key_of(home.root, host.ray.token_env)
        self.api = JobsApi(host.ray.address, token, host.ray.token_env)
        self._watches: dict[str, _Watch] = {}

    def close(self) -> None:
        """End the connections to the Jobs API."""
        self.api.close()

    def warnings(self) -> list[str]:
        """What whoever uses this cluster should know of it; one sentence each."""
        warnings = list(self.host.warnings)
        self.api.version()
        if self.api.is_open():
            warnings.append(
                f"{self.host.ray.address} answers without a token: whoever reaches it runs code on "
                "the cluster. Start Ray with RAY_AUTH_MODE=token."
            )
        return warnings

    def room_for(self, gpus: int) -> str:
        """Whether a node has, in all, what the job of a run with so many devices asks for; in
        words. Raises HostLost or HostRefused."""
        asked = self._resources(gpus)
        wanted = {"GPU": asked["entrypoint_num_gpus"], "CPU": asked["entrypoint_num_cpus"]}
        nodes = self.api.nodes()
        fitting = [n for n in nodes if all(n.get(key, 0) >= wanted[key] for key in wanted)]
        of_all = f"{len(fitting)} of {counted(len(nodes), 'node')} of Ray"
        if fitting:
            return f"{of_all} could take it; it starts as soon as one has room"
        what = " and ".join(f"{count:g} {key}" for key, count in wanted.items() if count)
        return f"{of_all} could take it, which asks for {what}: it waits until one can"

    def look_at_a_node(self, say: Callable[[str], None], patience_s: float) -> Caps:
        """Have a job say what a node has, and keep it.

        Args:
            say: called with why it waits, whenever that changes.
            patience_s: how long to wait for it.

        Raises FarError where it does not start in that time, or ends without an answer.
        """
        nonce = secrets.token_hex(4)
        file, job = f"homes/check/{self.home_id}-{nonce}.json", f"hs-check-{self.home_id}-{nonce}"
        self.link.job("described", file=file, again=True)
        command = self._command("--describe", self.root, f"{self.root}/{file}")
        self.api.submit(job, command, {"home": self.home_id}, self._resources(1))
        shown, deadline = "", time.monotonic() + patience_s
        while True:
            answer = self.link.job("described", file=file, again=False).get("described")
            if isinstance(answer, dict):
                break
            shown_job = self.api.find(job)
            if shown_job is None or shown_job.status in ("FAILED", "STOPPED"):
                why = shown_job.message if shown_job else "Ray does not know it"
                raise FarError("HOST_UNUSABLE", f"the job that looks at a node: {why}")
            is_waiting = shown_job.status == "PENDING"
            why = why_waiting(shown_job) if is_waiting else "it looks at a node"
            if why != shown:
                say(why)
                shown = why
            if time.monotonic() > deadline:
                self.api.stop(job)
                raise FarError("HOST_UNUSABLE", f"no node has answered yet: {why}")
            time.sleep(_LOOK_S)
        self._require_usable(answer)
        with contextlib.suppress(HostLost):
            self.api.delete(job)
        return hosts.note_facts(self.home, self.host, self.python, answer).capabilities()

    def _require_usable(self, described: JsonObject) -> None:
        """Raise FarError for a node that cannot train, or keeps no database in the folder."""
        self._require_database(described)
        packages = described.get("packages")
        if not isinstance(packages, dict) or "torch" not in packages:
            raise FarError(
                "HOST_UNUSABLE",
                f"{self.python} has no torch on {one_line(str(described.get('node')), 100)}",
                "Name an interpreter that has, on every node (python of the host), or leave python "
                "out: then the set-up builds one in the folder.",
            )

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Remove what older launches of the run left, which is stale; one that lives ends first.

        Raises FarError where it does not, or where a newer launch is there; HostLost where Ray
        cannot be asked.
        """
        deadline = time.monotonic() + _END_S
        while True:
            present = [each for each in self._launches() if each.run_id == run.id]
            newest = max((each.launch for each in present), default=0)
            if newest > handle.launch:
                message = f"launch {newest} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            older = [each for each in present if each.launch < handle.launch]
            for each in older:
                if each.life == "exited":
                    self._remove(each)
                else:
                    self.link.job("make_way", **self._of(run, handle) | {"launch": each.launch})
            if all(each.life == "exited" for each in older):
                return
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.5)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Submit the launch; its files are there. Again changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        of_job = self._of(run, handle)
        order = self._order(run, row, orders.cap_left(self.home, row))
        answer = self.link.job("start", **of_job, order=order, secrets=bundles.secrets_of(run))
        job = self._place(run, handle).job_name
        if answer.get("needs_job") and self.api.find(job) is None:
            command = self._command(self.root, self.home_id, run.id, str(handle.launch))
            metadata = {"home": self.home_id, "run": run.id, "launch": str(handle.launch)}
            self.api.submit(job, command, metadata, self._resources(row.gpus))

    def _standing(self, run: RunDir, handle: Handle) -> tuple[Life, JsonObject | None, str]:
        try:
            return self._life_and_end(self._place(run, handle).job_name, self.look)
        except (HostLost, FarError) as error:
            return "unknown", None, str(error)

    def _life_and_end(self, name: str, look: JsonObject) -> tuple[Life, JsonObject | None, str]:
        """What became of a launch: its life, how it ended, and why it waits.

        Raises HostLost where its own signs do not say, and Ray does not answer.
        """
        if look.get("has_words"):
            return self._after_last_words(name, look)
        if look.get("claim") == TAKEN_BACK:
            return "exited", end_of(None, is_asked=look.get("asked_s") is not None), ""
        watch = self._watches.setdefault(name, _Watch())
        now = time.monotonic()
        if look.get("beat") is not None and look.get("beat") != watch.beat:
            watch.beat, watch.heard_at = look.get("beat"), now
        asked_s = look.get("asked_s")
        is_overdue = isinstance(asked_s, int | float) and asked_s > _STOP_S
        if now - watch.heard_at < _SILENT_S and not is_overdue:
            watch.silent_since = None
            return "running", None, ""
        job = self.api.find(name)
        if job is not None and not job.is_ended:
            watch.silent_since = None
            if is_overdue:
                self.api.stop(name)
            is_waiting = job.status == "PENDING" and not look.get("claim")
            return ("pending", None, why_waiting(job)) if is_waiting else ("running", None, "")
        return self._after_silence(watch, job, look)

    def _after_last_words(self, name: str, look: JsonObject) -> tuple[Life, JsonObject | None, str]:
        """The end that a job wrote, once all its files are seen as it left them."""
        end = look.get("end")
        if not isinstance(end, dict):
            return "running", None, ""
        if not look.get("is_taken"):
            return "exited", end, ""
        # It ended because its driver was gone, or Ray told it to. Why, Ray alone knows; where that
        # is away, its daemons on that node are too.
        try:
            job = self.api.find(name)
        except HostLost:
            job = None
        if job is not None and not job.is_ended:  # Ray takes a moment to see it
            return "running", None, ""
        return "exited", end_of(job), ""

    def _after_silence(
        self, watch: _Watch, job: Job | None, look: JsonObject
    ) -> tuple[Life, JsonObject | None, str]:
        """What became of a job that Ray says has ended, or does not know, without last words."""
        now = time.monotonic()
        if watch.silent_since is None:
            watch.silent_since = now
        if not look.get("claim"):
            # It never began. Where Ray let it wait for too long, or forgot it, it is submitted
            # anew: it may have its turn yet.
            if job is None or job.error == NOT_STARTED:
                return "gone", None, ""
            return "exited", end_of(job, is_asked=look.get("asked_s") is not None), ""
        # What its driver left behind saves and ends: it holds the run's lock until then.
        patience_s = _HELD_S if look.get("is_held") else _SETTLE_S
        if now - watch.silent_since < patience_s:
            return "running", None, ""
        return "exited", end_of(job, is_asked=look.get("asked_s") is not None), ""

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end; one that waits never begins. Ray itself would end it without time
        to save."""
        reason = "asked to end from where it started"
        answer = self.link.job("stop", **self._of(run, handle), reason=reason)
        if answer.get("taken_back"):
            with contextlib.suppress(HostLost):  # it finds that it was taken back when it starts
                self.api.stop(self._place(run, handle).job_name)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of it over there, and of older launches; what lives stays."""
        for each in self._launches():
            is_meant = each.run_id == run.id and each.launch <= handle.launch
            if is_meant and each.life == "exited":
                self._remove(each)

    def list_owned(self) -> Sequence[Owned]:
        """Every job of this home that is there, and every folder of a launch without one; but for
        jobs that were taken back, which Ray keeps until it has room for them."""
        return [
            Owned(each.run_id, each.launch, each.life)
            for each in self._launches()
            if each.is_started
        ]

    def _launches(self) -> list[_Launch]:
        """Every launch of this home that is over there, as folder or as job."""
        listed = self.link.job("list_owned", home_id=self.home_id).get("owned")
        present = {job.id: job for job in self.api.owned(name_prefix(self.home_id))}
        launches = []
        for each in listed if isinstance(listed, list) else []:
            job = present.pop(str(each["job"]), None)
            life: Life = "exited"
            if not each["has_ended"] and each["is_started"]:
                life = _life(job, is_held=each["is_held"] is True)
            run_id = one_line(str(each["run_id"]), 200)
            launches.append(
                _Launch(run_id, int(each["launch"]), life, job, each["is_started"] is True)
            )
        for name, job in present.items():
            place = of_job(Path(self.root), self.home_id, name)
            # Without a folder one that waits ends as soon as it begins.
            if place is not None and job.status != "PENDING":
                life = _life(job, is_held=False)
                launches.append(_Launch(one_line(place.run_id, 200), place.launch, life, job, True))
        return launches

    def _remove(self, launch: _Launch) -> None:
        """Remove a launch that does not live, and have Ray forget its job."""
        self.link.job("reap", home_id=self.home_id, run_id=launch.run_id, launch=launch.launch)
        job, deadline = launch.job, time.monotonic() + _JOB_END_S
        # Its last words come before its program has ended, and Ray takes a moment to see that.
        while job is not None and job.status == "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.2)
            job = self.api.find(job.id)
        if job is not None and job.is_ended:
            self.api.delete(job.id)
        elif job is not None:
            self.api.stop(job.id)

    def _command(self, *arguments: str) -> str:
        """The command that Ray starts on a node; everybody at the cluster can read it."""
        source = f"PYTHONPATH={self.root}/{self.source}"
        command = ["/usr/bin/env", source, self.python, "-P", "-m", _DRIVER, *arguments]
        return f"exec {shlex.join(command)}"

    def _resources(self, gpus: int) -> JsonObject:
        """What a job of a run with so many devices asks for."""
        asked = self.host.ray
        return {
            "entrypoint_num_gpus": max(1, gpus) if asked.on_gpu else 0,
            "entrypoint_num_cpus": asked.cpus,
            "entrypoint_resources": asked.amounts,
        }


def _life(job: Job | None, *, is_held: bool) -> Life:
    """Whether a job waits, runs or has ended."""
    if job is None or job.is_ended:
        return "running" if is_held else "exited"
    return "pending" if job.status == "PENDING" else "running"
