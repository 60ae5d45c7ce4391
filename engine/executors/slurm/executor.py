"""The executor on a Slurm cluster: the seam's verbs over a connection to its login node."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from engine.core.files import JsonObject
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.cluster.executor import ClusterExecutor
from engine.executors.ssh import FarError, HostLost
from engine.home.config_tables.hosts import NO_GRES
from engine.home.run_dir import RunDir
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes.seam import Caps, Handle, Owned

_MARGIN_HOURS = 0.25  # of a job beyond the run's cap: to start, to evaluate, to save
_LEAST_MINUTES = 5
_SAVE_S = 120  # before its time limit a job is told to end, so that it saves
_END_S = 700.0  # that an older launch may take to save and end
_LOOK_S = (1.0, 30.0)  # between two looks at the job that describes a node, at first and later
_COMING_S = 60.0  # until what it wrote is seen
_A_MOMENT = 1e-6  # hours
_DOWN = "SLURM_DOWN"  # code of the far side's error: the controller does not answer


class SlurmExecutor(ClusterExecutor):
    """A cluster over one connection, which lasts as long as the object is open."""

    calls = "engine.executors.slurm.login_side"

    def look_at_a_node(self, say: Callable[[str], None], patience_s: float) -> Caps:
        """Have a job say what a node has, and keep it.

        Args:
            say: called with why it waits, whenever that changes.
            patience_s: how long to wait for it.

        Raises FarError where it does not start in that time, or ends without an answer.
        """
        described = self._described(say, patience_s)
        self._require_database(described)
        return hosts.note_facts(self.home, self.host, self.link.python, described).capabilities()

    def _described(self, say: Callable[[str], None], patience_s: float) -> JsonObject:
        """What a node says of itself. Raises as `look_at_a_node`."""
        asked = {
            "home_id": self.home_id,
            "options": self._options(1, _A_MOMENT),
            "program": self._program,
        }
        answer = self._job("describe", **asked, is_first=True)
        began, failed_at, shown = time.monotonic(), math.inf, ""
        while not isinstance(described := answer.get("described"), dict):
            waited_s = time.monotonic() - began
            # A shared file system may show what the job wrote some time after it has ended.
            failed_at = min(failed_at, waited_s) if "failed" in answer else math.inf
            if waited_s - failed_at > _COMING_S:
                raise FarError("HOST_UNUSABLE", f"the job that looks at a node: {answer['failed']}")
            why = one_line(str(answer.get("why", "")), 300)
            if why != shown:
                say(why)
                shown = why
            if waited_s > patience_s:
                raise FarError("HOST_UNUSABLE", f"no node has answered yet: {why}")
            time.sleep(min(_LOOK_S[1], max(_LOOK_S[0], waited_s / 10)))
            answer = self._job("describe", **asked, is_first=False)
        return described

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Remove what older launches of the run left, which is stale; one that lives ends first.

        Raises FarError where it does not, or where a newer launch is there; HostLost where Slurm
        cannot be asked.
        """
        deadline = time.monotonic() + _END_S
        while not (answer := self._job("clear", **self._of(run, handle))).get("removed"):
            if answer.get("there"):
                message = f"launch {answer['there']} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.5)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Submit the launch; its files are there. Again changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        cap = orders.cap_left(self.home, row)
        self._job(
            "start",
            **self._of(run, handle),
            order=self._order(run, row, cap),
            options=self._options(row.gpus, cap),
            program=self._program,
            secrets=bundles.secrets_of(run),
        )

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end."""
        self._job("stop", **self._of(run, handle), reason="asked to end from where it started")

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of it over there."""
        self._job("reap", **self._of(run, handle))

    def list_owned(self) -> Sequence[Owned]:
        """Every job of this home that is there."""
        return orders.owned(self._job("list_owned", home_id=self.home_id))

    def expected_start(self, gpus: int, cap_hours: float) -> str:
        """When a job would start, such as "2026-11-28T13:40:05 on n1"; "" where Slurm does not say.

        Raises FarError SLURM_REFUSED where it never could, HostLost.
        """
        options = self._options(gpus, cap_hours)
        return one_line(str(self._job("expect", options=options).get("start", "")), 200)

    def _job(self, name: str, **arguments: Any) -> JsonObject:
        """Call the login side. Raises HostLost where it, or Slurm's controller, does not answer."""
        try:
            return self.link.job(name, **arguments)
        except FarError as error:
            _raise(error)

    @property
    def _program(self) -> list[str]:
        """What runs a module of ours on a node, with our source there."""
        path = f"PYTHONPATH={self.root}/{self.source}"
        return ["/usr/bin/env", path, self.link.python, "-P", "-m"]

    def _options(self, gpus: int, cap_hours: float) -> list[str]:
        """What sbatch is told of a job, see `sbatch_options`."""
        return [*sbatch_options(self.host, gpus, cap_hours), f"--chdir={self.root}"]


def _raise(error: FarError) -> NoReturn:
    """Raise what an error of the login side means here."""
    if error.code == _DOWN:
        raise HostLost(error.message) from error
    raise error


def sbatch_options(host: Host, gpus: int, cap_hours: float) -> list[str]:
    """What sbatch is told of a job.

    Args:
        gpus: devices of the run.
        cap_hours: device hours that the run may still take; 0 for no cap.
    """
    asked = host.slurm
    hours = asked.time_hours
    if cap_hours > 0:
        hours = min(hours, cap_hours / max(1, gpus) + _MARGIN_HOURS)
    minutes = max(_LEAST_MINUTES, math.ceil(60 * hours))
    minutes = min(minutes, max(1, math.floor(60 * asked.time_hours)))
    save_s = min(_SAVE_S, 60 * minutes // 3)
    options = [
        "--no-requeue",  # what goes on, and from where, is decided where the run was started
        "--open-mode=append",
        "--nodes=1",
        "--ntasks=1",
        f"--time={minutes}",
        f"--signal=B:TERM@{save_s}",
    ]
    if asked.gres != NO_GRES:
        options.append(f"--gres={asked.gres}:{max(1, gpus)}")
    for key in ("partition", "account", "qos", "constraint"):
        if getattr(asked, key):
            options.append(f"--{key}={getattr(asked, key)}")
    if asked.cpus:
        options.append(f"--cpus-per-task={asked.cpus}")
    if asked.memory_gb:
        options.append(f"--mem={math.ceil(1024 * asked.memory_gb)}M")
    return options
