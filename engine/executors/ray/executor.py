"""The executor on a Ray cluster: the seam's verbs over its Jobs API and a shared folder.

What a job writes counts more than what Ray says of it: a head that was started anew has forgotten
its jobs, and one that is away says nothing. Ray is asked where a job gives no sign of life.
"""

import contextlib
import math
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import JsonObject
from engine.core.format import counted
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.cluster.executor import ClusterExecutor
from engine.executors.cluster.place import name_prefix, place_of_job
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
# All are seconds.
_SILENT_S = 12.0  # without a sign of life before Ray is asked; there is one every 3 s
_SETTLE_S = 15.0  # until what an ended job wrote has come through the shared folder
_HELD_S = 900.0  # that processes of a run whose job is gone may take to save and end
_STOP_S = 600.0  # that a run may take to save before Ray ends its job
_END_S = 960.0  # that an older launch may take to save and end
_JOB_END_S = 15.0  # until the program of a run that has ended is gone too
_LOOK_S = 1.0  # between two looks at the job that describes a node


@dataclass(frozen=True)
class _Launch:
    """A launch of a run on the cluster: it has a folder, a job of Ray's, or both.

    Attributes:
        launch: its number, counted from 1.
        job: its job; None if Ray knows none.
        is_started: whether it was submitted, and not only its files sent.
    """

    run_id: str
    launch: int
    life: Life
    job: Job | None
    is_started: bool


@dataclass
class _Watch:
    """What this connection knows of a launch. Times are those of the monotonic clock.

    Attributes:
        beat: the number of the last sign of life that was read.
        heard_at: when it was read first; -inf before the first.
        silent_since: since when Ray says that the job has ended, or does not know it, although it
            has not written how the run ended; None if that is not so.
    """

    beat: object = None
    heard_at: float = -math.inf
    silent_since: float | None = None


class RayExecutor(ClusterExecutor):
    """Runs jobs on a Ray cluster, over its Jobs API and a connection to its shared folder."""

    calls = "engine.executors.ray.folder_side"

    def __init__(self, home: Home, host: Host, link: Link, python: str) -> None:
        """Send this program's source over `link`, if it is not there, and prepare the Jobs API,
        which is connected to when it is first asked.

        Args:
            python: the interpreter that runs this program on a node.
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
        """Return what a user should know about this cluster, one text each, such as that it
        answers without a token. Raises HostLost or HostRefused."""
        warnings = list(self.host.warnings)
        self.api.version()  # called for its errors: it raises if the cluster is not reached
        if self.api.is_open():
            warnings.append(
                f"{self.host.ray.address} answers without a token: whoever reaches it runs code on "
                "the cluster. Start Ray with RAY_AUTH_MODE=token."
            )
        return warnings

    def room_for(self, gpus: int) -> str:
        """Say in a sentence how many nodes are large enough for the job of a run on so many GPUs,
        whatever runs on them now. Raises HostLost or HostRefused."""
        resources = self._resources(gpus)
        wanted = {"GPU": resources["entrypoint_num_gpus"], "CPU": resources["entrypoint_num_cpus"]}

        def fits(node: Mapping[str, float]) -> bool:
            """Tell whether a node has in all as many GPUs and CPUs as are wanted."""
            return all(node.get(name, 0) >= count for name, count in wanted.items())

        nodes = self.api.nodes()
        fitting = [node for node in nodes if fits(node)]
        share = f"{len(fitting)} of {counted(len(nodes), 'node')} of Ray"
        if fitting:
            return f"{share} could take it; it starts as soon as one has room"
        amounts = " and ".join(f"{count:g} {name}" for name, count in wanted.items() if count)
        return f"{share} could take it, which asks for {amounts}: it waits until one can"

    def look_at_a_node(self, say: Callable[[str], None], patience_s: float) -> Caps:
        """Submit a job that finds out what a node has, wait for its answer, and store it.

        Args:
            say: called with the reason why the job waits, whenever it changes.
            patience_s: how many seconds to wait for the answer.

        Raises FarError if there is no answer in that time, if the job ends without one, or if the
        node cannot be used.
        """
        nonce = secrets.token_hex(4)  # every such job has a name and a file of its own
        file, name = f"homes/check/{self.home_id}-{nonce}.json", f"hs-check-{self.home_id}-{nonce}"
        self.link.job("described", file=file, again=True)
        command = self._command("--describe", self.root, f"{self.root}/{file}")
        self.api.submit(name, command, {"home": self.home_id}, self._resources(1))
        said, deadline = "", time.monotonic() + patience_s
        while True:
            answer = self.link.job("described", file=file, again=False).get("described")
            if isinstance(answer, dict):
                break
            job = self.api.find(name)
            if job is None or job.status in ("FAILED", "STOPPED"):
                why = job.message if job else "Ray does not know it"
                raise FarError("HOST_UNUSABLE", f"the job that looks at a node: {why}")
            why = why_waiting(job) if job.status == "PENDING" else "it looks at a node"
            if why != said:
                say(why)
                said = why
            if time.monotonic() > deadline:
                self.api.stop(name)
                raise FarError("HOST_UNUSABLE", f"no node has answered yet: {why}")
            time.sleep(_LOOK_S)
        self._require_usable(answer)
        with contextlib.suppress(HostLost):  # a job that Ray remembers does no harm
            self.api.delete(name)
        return hosts.note_facts(self.home, self.host, self.python, answer).capabilities()

    def _require_usable(self, described: JsonObject) -> None:
        """Raise FarError if the node that described itself so has no torch, or cannot keep a
        database in the shared folder."""
        self._require_database(described)
        packages = described.get("packages")
        if not isinstance(packages, dict) or "torch" not in packages:
            raise FarError(
                "HOST_UNUSABLE",
                f"{self.python} has no torch on {one_line(str(described.get('node')), 100)}",
                "Name an interpreter that has, on every node (python of the host), or leave python "
                "out: then the set-up builds one in the folder.",
            )

    def _remove_older_launches(self, run: RunDir, handle: Handle) -> None:
        """Remove what earlier launches of the run left on the cluster. One that lives is told to
        end, and waited for.

        Raises FarError if it does not end within `_END_S` seconds, or if a later launch than that
        of `handle` is there; HostLost if Ray cannot be asked.
        """
        deadline = time.monotonic() + _END_S
        while True:
            present = [launch for launch in self._launches() if launch.run_id == run.id]
            newest = max((launch.launch for launch in present), default=0)
            if newest > handle.launch:
                message = f"launch {newest} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            older = [launch for launch in present if launch.launch < handle.launch]
            for launch in older:
                if launch.life == "exited":
                    self._remove(launch)
                else:
                    job_id = self._job_id(run, handle) | {"launch": launch.launch}
                    self.link.job("make_way", **job_id)
            if all(launch.life == "exited" for launch in older):
                return
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.5)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Submit the launch, whose files were sent before. A second call for it changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        job_id = self._job_id(run, handle)
        order = self._order(run, row, orders.cap_left(self.home, row))
        answer = self.link.job("start", **job_id, order=order, secrets=bundles.secrets_of(run))
        name = self._place(run, handle).job_name
        if answer.get("needs_job") and self.api.find(name) is None:
            command = self._command(self.root, self.home_id, run.id, str(handle.launch))
            metadata = {"home": self.home_id, "run": run.id, "launch": str(handle.launch)}
            self.api.submit(name, command, metadata, self._resources(row.gpus))

    def _outcome(self, run: RunDir, handle: Handle) -> tuple[Life, JsonObject | None, str]:
        """Return what became of the launch: (its life, how it ended or None, why it waits or "").
        The life is "unknown" if its own signs do not tell and Ray cannot be asked."""
        try:
            return self._life_and_end(self._place(run, handle).job_name, self.look)
        except (HostLost, FarError) as error:
            return "unknown", None, str(error)

    def _life_and_end(self, name: str, look: JsonObject) -> tuple[Life, JsonObject | None, str]:
        """Return what became of a launch: (its life, how it ended or None, why it waits or "").

        What its job has written counts first; Ray is asked only if it gives no signs of life.

        Args:
            name: the name of its job.
            look: the answer of the shared folder's side to a probe (folder_side.py).

        Raises HostLost if its own signs do not tell, and Ray does not answer.
        """
        if look.get("has_words"):
            return self._after_written_end(name, look)
        if look.get("claim") == TAKEN_BACK:
            return "exited", end_of(None, is_asked=_is_asked(look)), ""
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

    def _after_written_end(
        self, name: str, look: JsonObject
    ) -> tuple[Life, JsonObject | None, str]:
        """Return what became of a launch whose job has written how the run ended: (its life, the
        end or None, ""). It counts as running until all its files have come through the folder."""
        end = look.get("end")
        if not isinstance(end, dict):
            return "running", None, ""
        if not look.get("is_taken"):
            return "exited", end, ""
        # It ended because its driver was gone, or because Ray told it to. Only Ray knows why; if
        # Ray does not answer, it has lost that node, which is an answer too (None).
        try:
            job = self.api.find(name)
        except HostLost:
            job = None
        if job is not None and not job.is_ended:  # Ray takes a moment to notice it
            return "running", None, ""
        return "exited", end_of(job), ""

    def _after_silence(
        self, watch: _Watch, job: Job | None, look: JsonObject
    ) -> tuple[Life, JsonObject | None, str]:
        """Return what became of a launch whose job has ended, as Ray says, or is not known to Ray
        (None), and has not written how the run ended: (its life, the end or None, "")."""
        now = time.monotonic()
        if watch.silent_since is None:
            watch.silent_since = now
        if not look.get("claim"):
            # It never began. If Ray let it wait for too long, or forgot it, "gone" has it submitted
            # again: it may get its turn yet.
            if job is None or job.error == NOT_STARTED:
                return "gone", None, ""
            return "exited", end_of(job, is_asked=_is_asked(look)), ""
        # Processes that its driver left behind still save and end. Until then they hold the lock.
        patience_s = _HELD_S if look.get("is_held") else _SETTLE_S
        if now - watch.silent_since < patience_s:
            return "running", None, ""
        return "exited", end_of(job, is_asked=_is_asked(look)), ""

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the launch to save and end; one whose job still waits never begins. Ray is not asked
        to end a running one, because it would leave no time to save."""
        reason = "asked to end from where it started"
        answer = self.link.job("stop", **self._job_id(run, handle), reason=reason)
        if answer.get("taken_back"):
            with contextlib.suppress(HostLost):  # it finds that it was taken back when it starts
                self.api.stop(self._place(run, handle).job_name)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of this launch and of earlier ones of the run, unless they live."""
        for launch in self._launches():
            is_meant = launch.run_id == run.id and launch.launch <= handle.launch
            if is_meant and launch.life == "exited":
                self._remove(launch)

    def list_owned(self) -> Sequence[Owned]:
        """List every launch of this home on the cluster that was started, ended or not. Jobs that
        were taken back are left out, although Ray keeps them until it has room for them."""
        return [
            Owned(launch.run_id, launch.launch, launch.life)
            for launch in self._launches()
            if launch.is_started
        ]

    def _launches(self) -> list[_Launch]:
        """List every launch of this home that has a folder on the cluster, and then those that have
        none but a job of Ray's. A job without a folder that still waits is left out: it ends as
        soon as it begins."""
        listed = self.link.job("list_owned", home_id=self.home_id).get("owned")
        folders = listed if isinstance(listed, list) else []
        jobs = {job.id: job for job in self.api.owned(name_prefix(self.home_id))}
        launches = [
            _launch_of_folder(entry, jobs.pop(str(entry["job"]), None)) for entry in folders
        ]
        for name, job in jobs.items():  # those without a folder
            place = place_of_job(Path(self.root), self.home_id, name)
            if place is not None and job.status != "PENDING":
                life = _life(job, is_held=False)
                run_id = one_line(place.run_id, 200)
                launches.append(_Launch(run_id, place.launch, life, job, is_started=True))
        return launches

    def _remove(self, launch: _Launch) -> None:
        """Remove the folder of a launch that does not live, and have Ray forget its job. A job that
        is still not over after some seconds is ended."""
        self.link.job("reap", home_id=self.home_id, run_id=launch.run_id, launch=launch.launch)
        job, deadline = launch.job, time.monotonic() + _JOB_END_S
        # A job writes how the run ended before its program ends, and Ray notices that a bit later.
        while job is not None and job.status == "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.2)
            job = self.api.find(job.id)
        if job is not None and job.is_ended:
            self.api.delete(job.id)
        elif job is not None:
            self.api.stop(job.id)

    def _command(self, *arguments: str) -> str:
        """Return the command that Ray starts on a node: the driver (driver.py) with these
        arguments. Everybody at the cluster can read it, so it holds no secret."""
        source = f"PYTHONPATH={self.root}/{self.source}"
        command = ["/usr/bin/env", source, self.python, "-P", "-m", _DRIVER, *arguments]
        return f"exec {shlex.join(command)}"

    def _resources(self, gpus: int) -> JsonObject:
        """Return the amounts, under the names of Ray's Jobs API, that the job of a run on so many
        GPUs asks for."""
        options = self.host.ray
        return {
            "entrypoint_num_gpus": max(1, gpus) if options.on_gpu else 0,
            "entrypoint_num_cpus": options.cpus,
            "entrypoint_resources": options.amounts,
        }


def _is_asked(look: JsonObject) -> bool:
    """Tell whether a launch was asked to end, from the answer to a probe."""
    return look.get("asked_s") is not None


def _launch_of_folder(entry: JsonObject, job: Job | None) -> _Launch:
    """Describe the launch of a folder on the cluster.

    Args:
        entry: what the cluster tells of the folder.
        job: Ray's job of that launch; None if Ray knows none.
    """
    is_started = entry["is_started"] is True
    life: Life = "exited"
    if is_started and not entry["has_ended"]:
        life = _life(job, is_held=entry["is_held"] is True)
    return _Launch(one_line(str(entry["run_id"]), 200), int(entry["launch"]), life, job, is_started)


def _life(job: Job | None, *, is_held: bool) -> Life:
    """Return whether a launch whose end is not written is "pending", "running" or "exited".

    `job` is its job; None if Ray knows none. `is_held` says whether a process of the run holds its
    lock: then it runs although its job has ended.
    """
    if job is None or job.is_ended:
        return "running" if is_held else "exited"
    return "pending" if job.status == "PENDING" else "running"
