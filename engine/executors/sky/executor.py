"""The executor on machines that SkyPilot rents: runs are started, probed, stopped and removed over
its API server, and over ssh.

A launch is a cluster of its own. It is asked for by `send`; what the run needs goes there once its
machine is up, which a probe sees. From then on the run is one on a machine over ssh
(ssh_executor.py), and the cluster is given back when all of it is here.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from engine.core.files import JsonObject
from engine.core.hints import Hint
from engine.executors import hosts, orders, rented
from engine.executors.cluster.place import name_prefix, place_of_job
from engine.executors.sky import access
from engine.executors.sky.api import Cluster, SkyApi
from engine.executors.sky.late_link import LateLink
from engine.executors.sky.offers import Offer, allowed_offer, described, find_offers, machine_of
from engine.executors.sky.task import interpreter, task_of
from engine.executors.ssh import FarError, HostLost, HostRefused, Link
from engine.executors.ssh_executor import SshExecutor
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.user_config import Host
from engine.machine.processes.seam import Caps, Handle, Life, Owned, Probe
from engine.records.run_config import TrainConfig

# Seconds for which a machine may not be reached before the server asks the cloud whether it exists.
_SILENT_S = float(os.environ.get("HONESMITH_SKY_SILENT_S", "120"))
_ASKED_S = _SILENT_S / 2  # between two of those questions
# At least and at most, between two questions about a machine that is not up.
_ASK_S = (1.0, 15.0)
_YOUNG_S = 600.0  # from the note of a cluster until it must have been asked for
_LAPSED_HOURS = 0.5  # beyond its max_hours, after which this side gives a cluster back
_WHY_CHARS = 300  # how much is kept of a reason that the server or the machine gives
_SHOWN_CLUSTERS = 5  # how many a warning names
_IN_PODS = ("kubernetes", "ssh")  # clouds whose machines are pods, reached through the server


@dataclass
class _Silence:
    """A machine that should be up and is not reached. Times are those of the monotonic clock.

    Attributes:
        since: when it was first not reached.
        asked_at: when the server was last made to ask the cloud about it.
    """

    since: float
    asked_at: float = -math.inf


# By cluster. Kept by the process, because a new executor is made after a connection is lost.
_silences: dict[str, _Silence] = {}


@dataclass(frozen=True)
class _Wait:
    """The last answer about a launch whose machine is not up. Times are those of the monotonic
    clock.

    Attributes:
        probe: the answer.
        began: when it was first asked about.
        asked_at: when it was last asked about.
    """

    cluster: str
    probe: Probe
    began: float
    asked_at: float

    @property
    def is_fresh(self) -> bool:
        """Whether it is too early to ask again. The longer the machine is waited for, the longer
        the pauses."""
        now = time.monotonic()
        least_s, most_s = _ASK_S
        pause_s = min(max(least_s, (now - self.began) / 10), most_s)
        return now - self.asked_at < pause_s


class SkyExecutor:
    """Runs jobs on machines rented through one API server. Every launch (start of a run) gets a
    cluster of one machine, and the run is put there over ssh once the machine is up.

    Attributes:
        link: the connection to the cluster of the run that was probed last.
        look: the machine's answer to the last probe, from which files are brought back.
        packages: requirements of the environment that a cluster builds; () if the host names an
            interpreter instead.
    """

    def __init__(self, home: Home, host: Host, packages: Sequence[str]) -> None:
        """Prepare a client of the server; the first call connects. Raises HostRefused if the token
        of the host cannot be read."""
        self.home, self.host = home, host
        self.home_id = hosts.home_id(home)
        self.packages = packages
        token, token_name = access.token_of(home, host)
        self.api = SkyApi(host.sky.address, token, token_name, self.home_id[:8])
        self.link = LateLink()
        self.look: JsonObject = {}
        self._inner: SshExecutor | None = None
        self._entered = ""  # the cluster that `link` leads to
        self._wait: _Wait | None = None

    @property
    def name(self) -> str:
        """The host as the setting `compute` names it, such as "sky:cloud"."""
        return self.host.compute

    def close(self) -> None:
        """End the connections to the server and to a cluster."""
        self._disconnect()
        self.api.close()

    def capabilities(self) -> Caps:
        """Return the hardware and the packages that a cluster would have, by the server's
        catalogue. The answer is also stored, for plans that are made without a connection.

        Raises FarError if nothing is offered within the limits of the host.
        """
        offer = self.best_offer()
        requirements = [Requirement(package) for package in self.packages]
        # A package that is not installed here has a range of versions in place of one.
        packages = {each.name: str(each.specifier).removeprefix("==") for each in requirements}
        facts = hosts.find_facts(self.home, self.host)
        if not packages and facts is not None:
            packages = dict(facts.packages)
        price = self._price(offer)
        values = described(machine_of(offer, self.host.sky), packages, price)
        new_facts = hosts.note_facts(self.home, self.host, interpreter(self.host), values)
        return new_facts.capabilities()

    def warnings(self) -> list[str]:
        """Return what a user should know who rents through this server, one text each: clusters
        that may cost money unseen, and a server that answers without a token."""
        warnings = list(self.host.warnings)
        noted = {note.cluster for note in rented.all_rented(self.home)}
        present = [cluster.name for cluster in self.api.owned(name_prefix(self.home_id))]
        unknown = [name for name in present if name not in noted]
        if unknown:
            warnings.append(
                f"{', '.join(unknown[:_SHOWN_CLUSTERS])} at {self.api.address} carry the name of "
                "this home, which knows nothing of them: they may be of a copy of it, and cost "
                f"money. `honesmith hosts remove {self.host.name} --wipe` gives all back."
            )
        if self.api.is_open():
            warnings.append(
                f"{self.api.address} answers without a token: whoever reaches it rents machines "
                "with its accounts."
            )
        return warnings

    def give_back_all(self) -> None:
        """Give back every cluster with this home's name at the server, also those that it has not
        noted, except those rented through another host. Raises FarError if the server cannot."""
        for owned in self._owned():
            self._give_back(self._cluster_name(owned.run_id, owned.launch))

    def best_offer(self) -> Offer | None:
        """Return the cheapest machine within the limits of the host; None if the catalogue has no
        price for such machines. Raises HostLost, HostRefused, or FarError if nothing is offered."""
        self.api.version()  # called for its errors: it raises if no SkyPilot server answers
        return allowed_offer(self.host, find_offers(self.api, self.host.sky))

    def room_for(self, gpus: int) -> str:
        """Say in a sentence which machine would be rented now for a run on so many devices. Nothing
        is rented. Raises FarError if nothing is offered, HostLost or HostRefused."""
        offer = self.best_offer()
        self.api.dry_run(self._cluster_name("check", gpus), self._task("check"))
        machine = offer.in_words if offer is not None else "a machine whose price is not listed"
        limit = self.host.sky.max_hours
        return (
            f"SkyPilot would rent {machine}; it takes minutes to be up, and ends after {limit:g} h"
        )

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Rent the cluster of a launch, within the limits of the host, unless it is rented already.
        Always returns 0: the run's files are sent once the machine is up."""
        self._give_back_older_launches(run, handle)
        name = self._cluster_name(run.id, handle.launch)
        if self.api.find(name) is None and not self._is_coming(name):
            offer = self.best_offer()
            price = self._price(offer)
            # Noted on the disk first: whatever happens, nothing is rented that nobody knows of.
            rented.note(self.home, self.host.name, name, run.id, handle.launch, price)
            self.api.launch(name, self._task(name))
        return 0

    def _price(self, offer: Offer | None) -> float:
        """Return the dollars to count with for an hour of a cluster: the offer's price, or the
        host's max_price if no price is known."""
        return offer.price if offer is not None else self.host.sky.max_price

    def _task(self, name: str) -> JsonObject:
        """Return what SkyPilot is told of the cluster `name`: its machine, its environment and the
        job that lets this home in."""
        _, public_key = access.own_key(self.home)
        return task_of(name, self.host, public_key, self.packages, self._lease_s)

    def _give_back_older_launches(self, run: RunDir, handle: Handle) -> None:
        """Give back the clusters of earlier launches of the run.

        Raises FarError if a later launch than that of `handle` is there, or the server cannot give
        one back.
        """
        for owned in self._owned():
            if owned.run_id != run.id or owned.launch == handle.launch:
                continue
            if owned.launch > handle.launch:
                message = f"launch {owned.launch} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            self._give_back(self._cluster_name(run.id, owned.launch))

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch on its machine if that is up. If not, the first probe that finds it up
        starts it."""
        inner = self._connected(self._cluster_name(run.id, handle.launch))
        if inner is not None:
            self._start_on_machine(inner, run, handle)

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """Return what became of a launch. If its machine has come up since the last probe, the run
        is put there and started. If nothing can be learnt, the life is "unknown"."""
        self.look = {}
        name = self._cluster_name(run.id, handle.launch)
        try:
            if self._entered == name and self._inner is not None:
                probe = self._probe_machine(self._inner, run, handle)
                if probe.life != "unknown":
                    return probe
            if self._wait is not None and self._wait.cluster == name and self._wait.is_fresh:
                return self._wait.probe
            probe = self._probe_server(run, handle, name)
        except (HostLost, HostRefused, FarError) as error:
            self._disconnect()
            return Probe("unknown", why=one_line(str(error), _WHY_CHARS))
        self._note_wait(name, probe)
        return probe

    def _note_wait(self, name: str, probe: Probe) -> None:
        """Remember the answer about a launch whose machine is not up, so that the server is asked
        again only after a while. Any other answer ends the wait."""
        if probe.life != "pending":
            self._wait = None
            return
        now = time.monotonic()
        is_same = self._wait is not None and self._wait.cluster == name
        began = self._wait.began if self._wait is not None and is_same else now
        self._wait = _Wait(name, probe, began, now)

    def _probe_server(self, run: RunDir, handle: Handle, name: str) -> Probe:
        """Ask the server what became of a launch whose machine is not connected to, or does not
        answer. If the machine is up, it is connected to, and the run is started there."""
        self._disconnect()
        cluster = self.api.find(name)
        if cluster is None:
            return self._probe_without_cluster(run, handle, name)
        if not cluster.is_up:
            launches = self.api.launches(name)
            if launches and launches[0].status == "FAILED":  # a part of it exists, and is paid for
                why = self.api.why_failed(launches[0]) or cluster.why
                self._give_back(name)
                return self._failed(run, why)
            return _waits(cluster.why or f"SkyPilot says {cluster.status}")
        try:
            inner = self._connect(cluster)
            if inner is not None:
                self._start_on_machine(inner, run, handle)
                return self._probe_machine(inner, run, handle)
        except HostLost as error:
            return self._unreached(name, str(error))
        why = self.api.why_not_ready(name)
        if why:
            self._give_back(name)
            return self._failed(run, why)
        return _waits("its machine is being set up")

    def _probe_machine(self, inner: SshExecutor, run: RunDir, handle: Handle) -> Probe:
        """Ask the machine that `inner` is connected to what became of the run on it."""
        probe = inner.probe(run, handle)
        self.look = inner.look
        if probe.life != "unknown":
            _silences.pop(self._entered, None)
        return probe

    def _unreached(self, name: str, why: str) -> Probe:
        """Return the answer for a machine that should be up and is not reached, for the reason
        `why`: "unknown". After a while the server is made to ask the cloud; if the cloud does not
        have the machine any more, the answer is "gone"."""
        now = time.monotonic()
        silence = _silences.setdefault(name, _Silence(now))
        if now - silence.since < _SILENT_S or now - silence.asked_at < _ASKED_S:
            return Probe("unknown", why=one_line(why, _WHY_CHARS))
        silence.asked_at = now
        cluster = self.api.find(name, is_asked_anew=True)
        if cluster is None or cluster.status == "STOPPED":
            self._forget(name)
            return Probe("gone")
        why = f"{why}; SkyPilot says {cluster.status}"
        return Probe("unknown", why=one_line(why, _WHY_CHARS))

    def _probe_without_cluster(self, run: RunDir, handle: Handle, name: str) -> Probe:
        """Return what became of a launch whose cluster the server does not have: it is still being
        rented, could not be rented, was cancelled, or is gone."""
        launches = self.api.launches(name)  # the requests to rent it, the newest first
        open_launches = [launch for launch in launches if launch.is_open]
        if open_launches:
            return _waits(open_launches[0].message or "SkyPilot looks for a machine")
        self._forget(name)
        if handle.stop_asked:
            reason = "cancelled before its machine was up"
            end = {"state": "cancelled", "reason_kind": "cancelled", "reason": reason}
            return Probe("exited", end=orders.end_of(end, run))
        if launches and launches[0].status == "FAILED":
            return self._failed(run, self.api.why_failed(launches[0]) or launches[0].message)
        if launches and launches[0].status == "CANCELLED":
            return self._failed(run, "its launch was cancelled at the server", kind="killed")
        return Probe("gone")

    def _failed(self, run: RunDir, why: str, kind: str = "infra") -> Probe:
        """Return the answer for a launch that got no machine on which it can train: it has ended as
        failed, for the reason `why`."""
        end: JsonObject = {
            "state": "failed",
            "reason_kind": kind,
            "reason": f"no machine was rented: {why}",
            "hint": Hint(_hint_for(self.host)).to_json(),
        }
        return Probe("exited", end=orders.end_of(end, run))

    def _connected(self, name: str) -> SshExecutor | None:
        """Return the executor on the machine of the cluster `name`, which is connected to if
        necessary. Returns None if the machine is not up, or has not told its host key yet."""
        if self._entered == name and self._inner is not None:
            return self._inner
        cluster = self.api.find(name)
        return self._connect(cluster) if cluster is not None and cluster.is_up else None

    def _connect(self, cluster: Cluster) -> SshExecutor | None:
        """Connect over ssh to the machine of a cluster that is up, and return the executor on it.
        Returns None if its job has not told its host key yet. Raises HostLost, or HostRefused if
        the machine has another key than it told."""
        self._disconnect()
        if cluster.address is None:
            return None
        tunnel: Sequence[str] = ()
        if cluster.cloud.lower() in _IN_PODS:
            tunnel = access.pod_tunnel(self.home, self.host.name, cluster.name)
        log = self.api.log(cluster.name)
        way_in = access.access_of(self.home, cluster.name, cluster.address, log, tunnel)
        if way_in is None:
            return None
        python = interpreter(self.host)
        try:
            self.link.present = Link(way_in.destination, self.host.folder, python, way_in.options)
            self._inner = SshExecutor(self.home, self.host, self.link.present)
        except HostRefused as error:
            # A new machine may take in a moment what it refuses now. A wrong key stays wrong.
            if "host key" in error.message:
                raise
            raise HostLost(error.message) from error
        self._entered = cluster.name
        return self._inner

    def _disconnect(self) -> None:
        """End the connection to a cluster's machine, if there is one."""
        self.link.close()
        self._inner, self._entered = None, ""

    def _start_on_machine(self, inner: SshExecutor, run: RunDir, handle: Handle) -> None:
        """Send the run to the machine that `inner` is connected to, unless this launch of it is
        there, and start it. A second call changes nothing."""
        answer = inner.link.job("launch", home_id=self.home_id, run_id=run.id)
        if int(answer.get("launch", 0)) != handle.launch:
            config = run.read_config()
            assert isinstance(config, TrainConfig)  # nothing else runs on another machine
            inner.send(run, config, handle)
        inner.start(run, handle)

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the launch to save and end. A machine that is not up yet is given back at once."""
        name = self._cluster_name(run.id, handle.launch)
        self._wait = None  # so that the next probe asks the server
        inner = self._connected(name)
        if inner is not None:
            inner.stop(run, handle)
            return
        self._give_back(name)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Give back the cluster of this launch and of earlier ones of the run, unless they live."""
        for owned in self._owned():
            is_meant = owned.run_id == run.id and owned.launch <= handle.launch
            if is_meant and self._life_of(owned) == "exited":
                self._give_back(self._cluster_name(run.id, owned.launch))

    def give_back_unwanted(self) -> list[str]:
        """Give back the clusters of this home whose runs no longer exist here, and those that are
        rented for longer than the host's max_hours. Returns the ids of their runs.

        A cluster with this home's name that this home has not noted is left alone: a copy of the
        home may have rented it.
        """
        given_back = []
        for note in rented.all_rented(self.home, self.host.name):
            hours = (time.time() - note.asked) / 3600
            is_overdue = hours > self.host.sky.max_hours + _LAPSED_HOURS
            if is_overdue or not self.home.run(note.run_id).path.exists():
                self._give_back(note.cluster)
                given_back.append(note.run_id)
        return given_back

    def _lives(self, run: RunDir, launch: int) -> bool:
        """Ask the machine of a launch whether the run lives on it. False if the machine is not up.
        Raises HostLost if it is up and not reached."""
        inner = self._connected(self._cluster_name(run.id, launch))
        if inner is None:
            return False
        living = [job for job in inner.list_owned() if job.life != "exited"]
        return any(job.run_id == run.id and job.launch == launch for job in living)

    def list_owned(self) -> Sequence[Owned]:
        """List every launch of this home that has a cluster or waits for one. A run counts as
        exited if it has ended on its machine, even while the machine is still rented."""
        owned = self._owned()
        return [Owned(each.run_id, each.launch, self._life_of(each)) for each in owned]

    def _life_of(self, owned: Owned) -> Life:
        """Return whether the run of a launch lives. `owned.life` says only whether its machine is
        up ("running"); then the machine is asked, unless everything of the run is here."""
        run = self.home.run(owned.run_id)
        handle = Handle.read(run)
        if owned.life != "running":
            return owned.life
        if handle is not None and (handle.launch > owned.launch or handle.phase == "ended"):
            return "exited"
        try:
            return "running" if self._lives(run, owned.launch) else "exited"
        except HostLost:
            return "running"  # not reached: it may live

    def _owned(self) -> list[Owned]:
        """List every launch of this home whose cluster the server knows, or that this home has
        noted as rented through this host. The life is "running" if its machine is up, else
        "pending". Clusters that were rented through another host at the same server are left out.

        A note without a cluster is deleted once it is old.
        """
        notes = rented.all_rented(self.home)
        host_names = self.home.user_config().hosts
        asked_at = {note.cluster: note.asked for note in notes if note.host == self.host.name}
        noted_of_hosts = {note.cluster for note in notes if note.host in host_names}
        of_other_hosts = noted_of_hosts - set(asked_at)
        listed = self.api.owned(name_prefix(self.home_id))
        clusters = {each.name: each for each in listed if each.name not in of_other_hosts}
        owned = []
        for name in sorted({*clusters, *asked_at}):
            place = place_of_job(Path("/"), self.home_id, name)  # read off the name; no folder
            if place is None:
                continue
            cluster = clusters.get(name)
            # While a note is young, another process may be about to ask for its cluster.
            is_old = time.time() - asked_at.get(name, 0.0) > _YOUNG_S
            if cluster is None and is_old and not self._is_coming(name):
                self._forget(name)
                continue
            life: Life = "running" if cluster is not None and cluster.is_up else "pending"
            owned.append(Owned(one_line(place.run_id, 200), place.launch, life))
        return owned

    def folder(self, run: RunDir, handle: Handle) -> str:
        """Return the run's folder on its machine, below the root of the connection."""
        return f"homes/{self.home_id}/runs/{run.id}"

    def _is_coming(self, name: str) -> bool:
        """Tell whether the server still works on a request to rent the cluster `name`."""
        return any(request.is_open for request in self.api.launches(name))

    def _give_back(self, name: str) -> None:
        """Give the cluster `name` back to its cloud. Raises FarError if the server cannot."""
        if self._entered == name:
            self._disconnect()
        self.api.down(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Delete what this home keeps of a cluster that does not exist any more."""
        rented.forget(self.home, name)
        access.forget(self.home, name)
        _silences.pop(name, None)

    def _cluster_name(self, run_id: str, launch: int) -> str:
        """Return the name of a launch's cluster, by which it is found again after a crash."""
        return f"{name_prefix(self.home_id)}{run_id}-{launch}"

    @property
    def _lease_s(self) -> float:
        """Seconds for which a run on its machine goes on if nobody asks about it."""
        return 3600 * self.host.lease_hours


def _waits(why: str) -> Probe:
    """Return the answer for a launch whose machine is not up, for the reason `why`. The wait costs
    the run no device hours."""
    return Probe("pending", why=one_line(why, _WHY_CHARS), spent_s=0.0)


def _hint_for(host: Host) -> str:
    """Return the hint for a run whose machine could not be rented."""
    return (
        f"Name other accelerators or another infra in [hosts.{host.name}], or resume the run "
        "later: nothing is rented now."
    )
