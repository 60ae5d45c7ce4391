"""The executor on machines that SkyPilot rents: the seam's verbs over its API server, and over ssh.

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
from engine.executors.cluster.place import name_prefix, of_job
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

# That a machine may not be reached before its place is asked whether it is there.
_SILENT_S = float(os.environ.get("HONESMITH_SKY_SILENT_S", "120"))
_ASKED_S = _SILENT_S / 2  # between two of those questions
_ASK_S = (1.0, 15.0)  # between two questions for a machine that is not up: more, the longer it is
_YOUNG_S = 600.0  # from the note of a cluster until it must have been asked for
_LAPSED_HOURS = 0.5  # beyond its hours, after which a cluster is given back from here


@dataclass
class _Silence:
    """A machine that should be up and is not reached; times are monotonic."""

    since: float
    asked_at: float = -math.inf


# By cluster, beyond a connection: whoever does not reach a machine connects anew.
_silences: dict[str, _Silence] = {}


@dataclass(frozen=True)
class _Wait:
    """What was answered last of a launch whose machine is not up; times are monotonic."""

    cluster: str
    probe: Probe
    began: float
    asked_at: float

    @property
    def is_fresh(self) -> bool:
        """Whether it is too early to ask again."""
        now = time.monotonic()
        return now - self.asked_at < min(max(_ASK_S[0], (now - self.began) / 10), _ASK_S[1])


class SkyExecutor:
    """Machines rented through one API server; the object is open as long as the connections.

    Attributes:
        link: to the cluster of the run that was looked at last.
        look: what the last probe brought, for the mirror.
        packages: what the environment of a cluster is built from; none where the host names an
            interpreter.
    """

    def __init__(self, home: Home, host: Host, packages: Sequence[str]) -> None:
        """Nothing is connected to yet. Raises HostRefused where the token cannot be read."""
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
        """As the setting `compute` names it."""
        return self.host.compute

    def close(self) -> None:
        """End the connections."""
        self._leave()
        self.api.close()

    def capabilities(self) -> Caps:
        """What a cluster would have, by the server's catalogue; kept for plans.

        Raises FarError where nothing is offered within the limits of the host.
        """
        offer = self.best_offer()
        # One that is not installed here has a range of versions.
        needed = [Requirement(each) for each in self.packages]
        packages = {each.name: str(each.specifier).removeprefix("==") for each in needed}
        facts = hosts.find_facts(self.home, self.host)
        if not packages and facts is not None:
            packages = dict(facts.packages)
        price = self._price(offer)
        values = described(machine_of(offer, self.host.sky), packages, price)
        noted = hosts.note_facts(self.home, self.host, interpreter(self.host), values)
        return noted.capabilities()

    def warnings(self) -> list[str]:
        """What whoever rents here should know; one sentence each."""
        warnings = list(self.host.warnings)
        known = {each.cluster for each in rented.all_rented(self.home)}
        present = [each.name for each in self.api.owned(name_prefix(self.home_id))]
        strange = [name for name in present if name not in known]
        if strange:
            warnings.append(
                f"{', '.join(strange[:5])} at {self.api.address} carry the name of this "
                "home, which knows nothing of them: they may be of a copy of it, and cost money. "
                f"`honesmith hosts remove {self.host.name} --wipe` gives all back."
            )
        if self.api.is_open():
            warnings.append(
                f"{self.api.address} answers without a token: whoever reaches it rents machines "
                "with its accounts."
            )
        return warnings

    def give_back_all(self) -> None:
        """Give back every cluster of this home. Raises FarError where the server could not."""
        for owned in self._owned():
            self._give_back(self._cluster_name(owned.run_id, owned.launch))

    def best_offer(self) -> Offer | None:
        """The cheapest machine within the limits of the host; None where the catalogue has no
        price. Raises HostLost, HostRefused or FarError."""
        self.api.version()
        return allowed_offer(self.host, find_offers(self.api, self.host.sky))

    def room_for(self, gpus: int) -> str:
        """What a run with so many devices would be given now, in words. Raises FarError where
        nothing is offered, HostLost or HostRefused."""
        offer = self.best_offer()
        self.api.dry_run(self._cluster_name("check", gpus), self._task("check"))
        what = offer.in_words if offer is not None else "a machine whose price is not listed"
        limit = self.host.sky.max_hours
        return f"SkyPilot would rent {what}; it takes minutes to be up, and ends after {limit:g} h"

    def send(self, run: RunDir, config: TrainConfig, handle: Handle) -> int:
        """Ask for the cluster of a launch, within the limits of the host; returns 0: its files go
        there once it is up."""
        self._clear(run, handle)
        name = self._cluster_name(run.id, handle.launch)
        if self.api.find(name) is None and not self._is_coming(name):
            offer = self.best_offer()
            rented.note(self.home, self.host.name, name, run.id, handle.launch, self._price(offer))
            self.api.launch(name, self._task(name))
        return 0

    def _price(self, offer: Offer | None) -> float:
        """What is counted with for an hour of a cluster: where no price is known, the limit."""
        return offer.price if offer is not None else self.host.sky.max_price

    def _task(self, name: str) -> JsonObject:
        _, public_key = access.own_key(self.home)
        return task_of(name, self.host, public_key, self.packages, self._lease_s)

    def _clear(self, run: RunDir, handle: Handle) -> None:
        """Give back what older launches of the run left, which is stale.

        Raises FarError where a newer launch is there, or the server cannot give one back.
        """
        for owned in self._owned():
            if owned.run_id != run.id or owned.launch == handle.launch:
                continue
            if owned.launch > handle.launch:
                message = f"launch {owned.launch} of {run.id} is there, not {handle.launch}"
                raise FarError("RUN_STATE", message)
            self._give_back(self._cluster_name(run.id, owned.launch))

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the launch where its machine is up; else the probe that finds it up does."""
        inner = self._inside(self._cluster_name(run.id, handle.launch))
        if inner is not None:
            self._place(inner, run, handle)

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """What became of it; where its machine has come up, the run is put there and started."""
        self.look = {}
        name = self._cluster_name(run.id, handle.launch)
        try:
            if self._entered == name and self._inner is not None:
                probe = self._probe_inside(self._inner, run, handle)
                if probe.life != "unknown":
                    return probe
            if self._wait is not None and self._wait.cluster == name and self._wait.is_fresh:
                return self._wait.probe
            probe = self._probe_outside(run, handle, name)
        except (HostLost, HostRefused, FarError) as error:
            self._leave()
            return Probe("unknown", why=one_line(str(error), 300))
        self._note_wait(name, probe)
        return probe

    def _note_wait(self, name: str, probe: Probe) -> None:
        """Keep what a launch waits for, so that the server is asked for it ever more seldom."""
        now = time.monotonic()
        last = self._wait if self._wait is not None and self._wait.cluster == name else None
        began = last.began if last is not None else now
        self._wait = _Wait(name, probe, began, now) if probe.life == "pending" else None

    def _probe_outside(self, run: RunDir, handle: Handle, name: str) -> Probe:
        """What became of a launch whose machine is not entered, or does not answer."""
        self._leave()
        cluster = self.api.find(name)
        if cluster is None:
            return self._without_cluster(run, handle, name)
        if not cluster.is_up:
            launches = self.api.launches(name)
            if launches and launches[0].status == "FAILED":  # a part of it is there, and paid
                why = self.api.why_failed(launches[0]) or cluster.why
                self._give_back(name)
                return self._failed(run, why)
            return _waits(cluster.why or f"SkyPilot says {cluster.status}")
        try:
            inner = self._enter(cluster)
            if inner is not None:
                self._place(inner, run, handle)
                return self._probe_inside(inner, run, handle)
        except HostLost as error:
            return self._unreached(name, str(error))
        why = self.api.why_not_ready(name)
        if why:
            self._give_back(name)
            return self._failed(run, why)
        return _waits("its machine is being set up")

    def _probe_inside(self, inner: SshExecutor, run: RunDir, handle: Handle) -> Probe:
        """What became of a run whose machine is entered."""
        probe = inner.probe(run, handle)
        self.look = inner.look
        if probe.life != "unknown":
            _silences.pop(self._entered, None)
        return probe

    def _unreached(self, name: str, why: str) -> Probe:
        """A machine that should be up and is not reached: after a while its place is asked."""
        now = time.monotonic()
        silence = _silences.setdefault(name, _Silence(now))
        if now - silence.since < _SILENT_S or now - silence.asked_at < _ASKED_S:
            return Probe("unknown", why=one_line(why, 300))
        silence.asked_at = now
        cluster = self.api.find(name, is_asked_anew=True)
        if cluster is None or cluster.status == "STOPPED":
            self._forget(name)
            return Probe("gone")
        return Probe("unknown", why=one_line(f"{why}; SkyPilot says {cluster.status}", 300))

    def _without_cluster(self, run: RunDir, handle: Handle, name: str) -> Probe:
        """A launch whose cluster the server does not have: it comes, could not come, or is gone."""
        launches = self.api.launches(name)
        if any(each.is_open for each in launches):
            message = next((each.message for each in launches if each.is_open), "")
            return _waits(message or "SkyPilot looks for a machine")
        self._forget(name)
        if handle.stop_asked:
            words = "cancelled before its machine was up"
            end = {"state": "cancelled", "reason_kind": "cancelled", "reason": words}
            return Probe("exited", end=orders.end_of(end, run))
        if launches and launches[0].status == "FAILED":
            return self._failed(run, self.api.why_failed(launches[0]) or launches[0].message)
        if launches and launches[0].status == "CANCELLED":
            return self._failed(run, "its launch was cancelled at the server")
        return Probe("gone")

    def _failed(self, run: RunDir, why: str) -> Probe:
        """A launch that came to no machine which can train."""
        end: JsonObject = {
            "state": "failed",
            "reason_kind": "infra",
            "reason": f"no machine was rented: {why}",
            "hint": Hint(_hint_for(self.host)).to_json(),
        }
        return Probe("exited", end=orders.end_of(end, run))

    def _inside(self, name: str) -> SshExecutor | None:
        """The machine of a cluster, connected to where it is up and has told its host key; the
        server is not asked where it was entered before."""
        if self._entered == name and self._inner is not None:
            return self._inner
        cluster = self.api.find(name)
        return self._enter(cluster) if cluster is not None and cluster.is_up else None

    def _enter(self, cluster: Cluster) -> SshExecutor | None:
        """Connect to a cluster that is up; None as long as its job has not told its host key."""
        self._leave()
        if cluster.address is None:
            return None
        tunnel: Sequence[str] = ()
        if cluster.cloud.lower() in ("kubernetes", "ssh"):
            tunnel = access.pod_tunnel(self.home, self.host.name, cluster.name)
        way = access.access_of(
            self.home, cluster.name, cluster.address, self.api.log(cluster.name), tunnel
        )
        if way is None:
            return None
        python = interpreter(self.host)
        try:
            self.link.present = Link(way.destination, self.host.folder, python, way.options)
            self._inner = SshExecutor(self.home, self.host, self.link.present)
        except HostRefused as error:
            # It is new: what it does not take now it may take in a moment, but another key.
            if "host key" in error.message:
                raise
            raise HostLost(error.message) from error
        self._entered = cluster.name
        return self._inner

    def _leave(self) -> None:
        """End the connection to a cluster."""
        self.link.close()
        self._inner, self._entered = None, ""

    def _place(self, inner: SshExecutor, run: RunDir, handle: Handle) -> None:
        """Put the run on its machine and start it, unless it is there; again changes nothing."""
        asked = inner.link.job("launch", home_id=self.home_id, run_id=run.id)
        if int(asked.get("launch", 0)) != handle.launch:
            config = run.read_config()
            assert isinstance(config, TrainConfig)  # nothing else runs on another machine
            inner.send(run, config, handle)
        inner.start(run, handle)

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask it to save and end; where its machine is not up yet, that is given back at once."""
        name = self._cluster_name(run.id, handle.launch)
        self._wait = None
        inner = self._inside(name)
        if inner is not None:
            inner.stop(run, handle)
            return
        self._give_back(name)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Give back the cluster of an ended launch, and those of older ones; what lives stays."""
        for owned in self._owned():
            is_meant = owned.run_id == run.id and owned.launch <= handle.launch
            if is_meant and self._life_of(owned) == "exited":
                self._give_back(self._cluster_name(run.id, owned.launch))

    def give_back_unwanted(self) -> list[str]:
        """Give back what this home has rented for runs that it has no more, and what is beyond its
        hours; returns the ids of their runs.

        A cluster of this home's name that stands in none of its files stays: it may be of a copy
        of the home.
        """
        given_back = []
        for each in rented.all_rented(self.home, self.host.name):
            hours = (time.time() - each.asked) / 3600
            is_beyond = hours > self.host.sky.max_hours + _LAPSED_HOURS
            if is_beyond or not self.home.run(each.run_id).path.exists():
                self._give_back(each.cluster)
                given_back.append(each.run_id)
        return given_back

    def _lives(self, run: RunDir, launch: int) -> bool:
        """Whether a run runs on its cluster: asked of that machine, as far as it is reached."""
        inner = self._inside(self._cluster_name(run.id, launch))
        if inner is None:
            return False
        living = [each for each in inner.list_owned() if each.life != "exited"]
        return any(each.run_id == run.id and each.launch == launch for each in living)

    def list_owned(self) -> Sequence[Owned]:
        """Every launch of this home that has a cluster, or is to have one."""
        owned = self._owned()
        return [Owned(each.run_id, each.launch, self._life_of(each)) for each in owned]

    def _life_of(self, owned: Owned) -> Life:
        """Whether the run of a cluster that is up has ended."""
        run = self.home.run(owned.run_id)
        handle = Handle.read(run)
        if owned.life != "running":
            return owned.life
        if handle is not None and (handle.launch > owned.launch or handle.phase == "ended"):
            return "exited"  # all of it is here: no need to ask
        try:
            return "running" if self._lives(run, owned.launch) else "exited"
        except HostLost:
            return "running"

    def _owned(self) -> list[Owned]:
        """Every launch of this home that the server knows, or that was asked for; those of another
        host at the same server are that one's."""
        notes, known = rented.all_rented(self.home), self.home.user_config().hosts
        asked = {each.cluster: each.asked for each in notes if each.host == self.host.name}
        of_others = {each.cluster for each in notes if each.host in known} - set(asked)
        listed = self.api.owned(name_prefix(self.home_id))
        present = {each.name: each for each in listed if each.name not in of_others}
        owned = []
        for name in sorted({*present, *asked}):
            place = of_job(Path("/"), self.home_id, name)
            if place is None:
                continue
            cluster = present.get(name)
            # Another process may be about to ask for one whose note is young.
            is_old = time.time() - asked.get(name, 0.0) > _YOUNG_S
            if cluster is None and is_old and not self._is_coming(name):
                self._forget(name)
                continue
            life: Life = "running" if cluster is not None and cluster.is_up else "pending"
            owned.append(Owned(one_line(place.run_id, 200), place.launch, life))
        return owned

    def folder(self, run: RunDir, handle: Handle) -> str:
        """The run's folder on its machine, below the root of the connection."""
        return f"homes/{self.home_id}/runs/{run.id}"

    def _is_coming(self, name: str) -> bool:
        """Whether the server is to launch, or launches, a cluster."""
        return any(each.is_open for each in self.api.launches(name))

    def _give_back(self, name: str) -> None:
        """Give a cluster back. Raises FarError where the server could not."""
        if self._entered == name:
            self._leave()
        self.api.down(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Forget a cluster that is not there."""
        rented.forget(self.home, name)
        access.forget(self.home, name)
        _silences.pop(name, None)

    def _cluster_name(self, run_id: str, launch: int) -> str:
        """The name of a launch's cluster: whoever goes on after a crash finds it by this."""
        return f"{name_prefix(self.home_id)}{run_id}-{launch}"

    @property
    def _lease_s(self) -> float:
        return 3600 * self.host.lease_hours


def _waits(why: str) -> Probe:
    """A launch whose machine is not up; its wait costs no hours of the run."""
    return Probe("pending", why=one_line(why, 300), spent_s=0.0)


def _hint_for(host: Host) -> str:
    """What to do where no machine could be rented."""
    return (
        f"Name other accelerators or another infra in [hosts.{host.name}], or resume the run "
        "later: nothing is rented now."
    )
