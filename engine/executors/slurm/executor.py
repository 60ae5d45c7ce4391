"""The executor on a Slurm cluster: starts, probes, stops and removes runs over a connection to its
login node."""

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
_LEAST_MINUTES = 5  # the shortest time limit of a job
_SAVE_S = 120  # so long before its time limit a job is told to end, so that it saves
_END_S = 700.0  # seconds that an older launch may take to save and end
_LEAST_LOOK_S, _MOST_LOOK_S = 1.0, 30.0  # between two looks at the job that describes a node
_COMING_S = 60.0  # seconds until what it wrote is seen
_WHY_CHARS = 300  # how much of the reason why it waits is shown
_A_MOMENT = 1e-6  # hours; a cap so small makes the time limit of the job the shortest
_DOWN = "SLURM_DOWN"  # code of the login side's error: the controller does not answer


class SlurmExecutor(ClusterExecutor):
    """Runs jobs on a Slurm cluster, over one connection to its login node."""

    calls = "engine.executors.slurm.login_side"

    def look_at_a_node(self, say: Callable[[str], None], patience_s: float) -> Caps:
        """Submit a job that finds out what a node has, wait for its answer, and store it.

        Args:
            say: called with the reason why the job waits, whenever it changes.
            patience_s: how many seconds to wait for the answer.

        Raises FarError if there is no answer in that time, if the job ends without one, or if the
        node can keep no database in the shared folder.
        """
        described = self._described(say, patience_s)
        self._require_database(described)
        return hosts.note_facts(self.home, self.host, self.link.python, described).capabilities()

    def _described(self, say: Callable[[str], None], patience_s: float) -> JsonObject:
        """Submit the job that looks at a node, and return what it finds. For the parameters and
        errors see `look_at_a_node`."""
        job = {
            "home_id": self.home_id,
            "options": self._options(1, _A_MOMENT),
            "program": self._program,
        }
        answer = self._job("describe", **job, is_first=True)
        began, failed_at_s, said = time.monotonic(), math.inf, ""
        while not isinstance(described := answer.get("described"), dict):
            waited_s = time.monotonic() - began
            # A shared file system may show what the job wrote some time after it has ended.
            failed_at_s = min(failed_at_s, waited_s) if "failed" in answer else math.inf
            if waited_s - failed_at_s > _COMING_S:
                raise FarError("HOST_UNUSABLE", f"the job that looks at a node: {answer['failed']}")
            why = one_line(str(answer.get("why", "")), _WHY_CHARS)
            if why != said:
                say(why)
                said = why
            if waited_s > patience_s:
                raise FarError("HOST_UNUSABLE", f"no node has answered yet: {why}")
            # The longer it has waited, the seldomer it is asked.
            time.sleep(min(_MOST_LOOK_S, max(_LEAST_LOOK_S, waited_s / 10)))
            answer = self._job("describe", **job, is_first=False)
        return described

    def _remove_older_launches(self, run: RunDir, handle: Handle) -> None:
        """Remove what earlier launches of the run left on the cluster. One that lives is told to
        end, and waited for.

        Raises FarError if it does not end within `_END_S` seconds, or if a later launch than that
        of `handle` is there; HostLost if Slurm cannot be asked.
        """
        deadline = time.monotonic() + _END_S
        while not (answer := self._job("clear", **self._job_id(run, handle))).get("removed"):
            if answer.get("there"):
                message = f"launch {answer['there']} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            if time.monotonic() > deadline:
                raise FarError("RUN_STATE", f"an older launch of {run.id} does not end")
            time.sleep(0.5)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Submit the launch, whose files were sent before. A second call for it changes nothing."""
        with Store(self.home) as store:
            row = store.get_run(run.id)
        cap = orders.cap_left(self.home, row)
        self._job(
            "start",
            **self._job_id(run, handle),
            order=self._order(run, row, cap),
            options=self._options(row.gpus, cap),
            program=self._program,
            secrets=bundles.secrets_of(run),
        )

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the launch to save and end."""
        self._job("stop", **self._job_id(run, handle), reason="asked to end from where it started")

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Remove what is left of this launch and of earlier ones of the run, unless they live."""
        self._job("reap", **self._job_id(run, handle))

    def list_owned(self) -> Sequence[Owned]:
        """List every launch of this home that has a folder or a job on the cluster."""
        return orders.owned(self._job("list_owned", home_id=self.home_id))

    def expected_start(self, gpus: int, cap_hours: float) -> str:
        """Ask Slurm when a job would start, such as "2026-11-28T13:40:05 on n1"; "" if Slurm does
        not say.

        Args:
            gpus: devices of the run.
            cap_hours: device hours that the run may take; 0 for no cap.

        Raises FarError SLURM_REFUSED if it could never start, HostLost.
        """
        options = self._options(gpus, cap_hours)
        return one_line(str(self._job("expect", options=options).get("start", "")), 200)

    def _job(self, name: str, **arguments: Any) -> JsonObject:
        """Call the function `name` of login_side.py on the login node. Raises HostLost if that, or
        Slurm's controller, does not answer; FarError if the call fails there."""
        try:
            return self.link.job(name, **arguments)
        except FarError as error:
            _raise(error)  # never returns

    @property
    def _program(self) -> list[str]:
        """The beginning of a command that runs a module of this program on a node, from its source
        there; the module's name follows."""
        path = f"PYTHONPATH={self.root}/{self.source}"
        return ["/usr/bin/env", path, self.link.python, "-P", "-m"]

    def _options(self, gpus: int, cap_hours: float) -> list[str]:
        """Return the options of sbatch for a job: those of `sbatch_options`, and the folder in
        which it runs."""
        return [*sbatch_options(self.host, gpus, cap_hours), f"--chdir={self.root}"]


def _raise(error: FarError) -> NoReturn:
    """Raise HostLost if an error of the login side says that Slurm's controller does not answer,
    else the error itself."""
    if error.code == _DOWN:
        raise HostLost(error.message) from error
    raise error


def sbatch_options(host: Host, gpus: int, cap_hours: float) -> list[str]:
    """Return the options of sbatch for a job on this host.

    Args:
        gpus: devices of the run.
        cap_hours: device hours that the run may still take, which shorten the job's time limit; 0
            for no cap.
    """
    slurm = host.slurm
    hours = slurm.time_hours
    if cap_hours > 0:
        hours = min(hours, cap_hours / max(1, gpus) + _MARGIN_HOURS)
    minutes = max(_LEAST_MINUTES, math.ceil(60 * hours))
    minutes = min(minutes, max(1, math.floor(60 * slurm.time_hours)))
    save_s = min(_SAVE_S, 60 * minutes // 3)  # in a short job at most a third of its time
    options = [
        "--no-requeue",  # the machine that the run belongs to decides whether it is started again
        "--open-mode=append",
        "--nodes=1",
        "--ntasks=1",
        f"--time={minutes}",
        f"--signal=B:TERM@{save_s}",  # SIGTERM to the batch script, so long before the limit
    ]
    if slurm.gres != NO_GRES:
        options.append(f"--gres={slurm.gres}:{max(1, gpus)}")
    for key in ("partition", "account", "qos", "constraint"):
        if getattr(slurm, key):
            options.append(f"--{key}={getattr(slurm, key)}")
    if slurm.cpus:
        options.append(f"--cpus-per-task={slurm.cpus}")
    if slurm.memory_gb:
        options.append(f"--mem={math.ceil(1024 * slurm.memory_gb)}M")
    return options
