"""Has a host serve models for a deployment of this home.

`python -P -m engine.serving.far.forwarder FOLDER` stands where the server of a deployment stands.
It sends the base and the adapters, each file once by its hash, has our own server started there,
and opens a port here that leads to it. A connection that is lost is made again, with the same port.
The server there ends by itself when it is idle; then this process ends too. If this process is
killed, nothing new passes its tunnel, and the server there becomes idle.
"""

import contextlib
import http.client
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_json, write_json, write_text
from engine.executors import bundle as bundles
from engine.executors import hosts, orders
from engine.executors.ssh import FarError, HostLost, HostRefused, Link
from engine.home.run_dir import DeployDir, Home
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes.deployments import Json
from engine.models import hub
from engine.serving.far.control import ControlServer
from engine.serving.far.host_side import Wanted
from engine.serving.far.tunnel import Entrance, Tunnel

_CALLS = "engine.serving.far.host_side"
_LOAD_S = 5.0  # how long one call to the host may wait for a model
_LOOK_S = 2.0  # seconds between two looks at the server there
_FIRST_WAIT_S, _WAIT_S = 0.5, 15.0  # before a lost connection is tried again, at first and later
_PATIENCE_S = 600.0  # a host that is not reached for so long is given up
_EXIT_FAILED = 3
_TEXT_CHARS = 500  # how much of a host's text is shown
_KEY = re.compile(r"[A-Za-z0-9_-]{20,200}")  # of a deployment
_ID = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_HEALTH_BYTES = 64 << 10  # the most that is read of an answer to /health


class _Over(Exception):
    """The server on the host has ended; its text says why."""


class _StoppedEarly(Exception):
    """The deployment is to end before it has answered."""


@dataclass
class Forwarder:
    """One deployment whose models a host serves.

    Attributes:
        config: the deployment's config.json.
        models: the models that the host is to serve: name -> folder of the adapter here, "" for the
            base model itself.
        entrance: the port here at which the models answer. `control_port` is that of this process.
        served: names of the models that the server there has.
        far_id: the deployment's id on the host; "" until there is one.
        link: the connection to the host; None while there is none. `lock` is held while it is used.
        is_up: whether the last connection came as far as an answer of the server there.
        sent_at: when models were last being sent, on the monotonic clock; -inf before.
        is_announced: whether the models have answered here.
        stop: set when the deployment is to end.
    """

    folder: DeployDir
    home: Home
    host: Host
    config: Json
    models: dict[str, str]
    entrance: Entrance = field(default_factory=Entrance)
    control_port: int = 0
    served: list[str] = field(default_factory=list)
    far_id: str = ""
    link: Link | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    is_up: bool = False
    sent_at: float = -math.inf
    is_announced: bool = False
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Serve until the deployment is stopped or has ended on the host. Returns the exit
        status."""
        routes = {
            "/health": self.health,
            "/admin/adapters": self.add_adapter,
            "/admin/stop": self.end,
        }
        control = ControlServer(self.folder, routes)
        self.control_port = control.port
        try:
            hub.ensure_weights(Path(self.config["base_path"]))
            self._attend()
        except _Over as over:
            self._note_end(str(over))
        except _StoppedEarly:
            self._stop_from_anew()
        except (HostRefused, FarError) as error:
            self._stop_from_anew()
            hint = f" {error.hint}" if error.hint else ""
            return self._fail(f"{self.host.name}: {error.message}.{hint}")
        except (HostLost, UserError, OSError) as error:
            return self._fail(f"{self.host.name}: {error}")
        finally:
            self.folder.ready.unlink(missing_ok=True)
            control.close()
            self.entrance.close()
        return 0

    def on_term(self, _signal: int, _frame: FrameType | None) -> None:
        """End in good order, as the handler of SIGTERM. What is being sent is broken off."""
        self.stop.set()
        if not self.is_announced:
            raise _StoppedEarly

    def _attend(self) -> None:
        """Connect and serve, again whenever the connection is lost, until the deployment is
        stopped.

        Raises _Over once the server there has ended, HostLost if the host is not reached for too
        long, HostRefused or FarError if it cannot serve.
        """
        failed_s, wait_s = 0.0, _FIRST_WAIT_S
        while not self.stop.is_set():
            self.is_up = False
            began = time.monotonic()
            try:
                self._serve_once()
            except HostLost as error:
                if self.is_up:
                    failed_s, wait_s = 0.0, _FIRST_WAIT_S
                elif self.sent_at < began:  # nothing was sent, which would be gone on with
                    failed_s += time.monotonic() - began
                if failed_s > _PATIENCE_S:
                    minutes = _PATIENCE_S / 60
                    raise HostLost(f"not reached for {minutes:.0f} min: {error}") from None
                _log(f"{self.host.name} is not reached: {error}")
                self.stop.wait(wait_s)
                failed_s += wait_s
                wait_s = min(_WAIT_S, 2 * wait_s)

    def _serve_once(self) -> None:
        """Connect, have the models served, let connections in, and watch both until the deployment
        is to end. Raises HostLost when the connection or the tunnel is gone, and the errors of
        `_attend`."""
        with self._connected() as link:
            if self.far_id:  # it is there from an earlier connection, or has ended
                self._look()
            else:
                try:
                    self._begin()
                finally:
                    self.sent_at = time.monotonic()
            with contextlib.closing(Tunnel(self.host.ssh)) as tunnel:
                self.entrance.tunnel = tunnel
                try:
                    self._require_answer(tunnel)
                    self.is_up = True
                    self._announce()
                    self._watch(link, tunnel)
                finally:
                    self.entrance.tunnel = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Link]:
        """Connect to the host, and let requests of other threads use the link within the `with`
        block."""
        python = hosts.facts_of(self.home, self.host).python
        with Link(self.host.ssh, self.host.folder, python, own_group=True) as link:
            source = bundles.send_source(link)
            link.call("use", source=source, calls=_CALLS)
            self.link = link
            try:
                yield link
            finally:
                with self.lock:  # none of them is using it
                    self.link = None

    def _begin(self) -> None:
        """Send the models and have them served. Raises FarError if the host cannot."""
        with self.lock:
            self._job("prepare", config_toml=orders.config_toml(self.home), envs=[])
            for name, adapter in list(self.models.items()):
                self._serve(name, adapter)

    def _serve(self, name: str, adapter: str, *, alone: bool = False) -> None:
        """Have the host serve one model, and wait until it does.

        If another deployment there serves it than served the models so far, because that has ended
        meanwhile, it gets the other adapters too, unless `alone`.

        Args:
            adapter: the adapter's folder here, "" for the base itself.
        """
        assert self.link is not None
        base = bundles.model_folder(self.home, Path(self.config["base_path"]))
        bundles.send_folder(self.link, base, base.name)
        adapter_name = ""
        if adapter:
            files = bundles.model_folder(self.home, Path(adapter))
            bundles.send_folder(self.link, files, files.name)
            adapter_name = files.name
        wanted: Wanted = {
            "name": name,
            "base_name": str(self.config["base_name"]),
            "base": base.name,
            "adapter": adapter_name,
            "thinking": bool(self.config.get("thinking")),
        }
        answer: JsonObject = {}
        while not answer.get("ready"):
            if self.stop.is_set():
                raise _StoppedEarly
            answer = self._job("serve", model=wanted, owner=self._owner, wait_s=_LOAD_S)
        self.models[name] = adapter
        before = self.far_id
        self._take_deployment(answer)
        if before not in ("", self.far_id) and not alone:
            for other, folder in list(self.models.items()):
                if folder and other not in self.served:
                    self._serve(other, folder, alone=True)

    def _take_deployment(self, answer: JsonObject) -> None:
        """Take over which deployment of the host serves now, from its answer. Raises HostLost for
        an answer in no form of ours."""
        far_id, key = str(answer.get("deployment_id", "")), str(answer.get("key", ""))
        if not _KEY.fullmatch(key) or not _ID.fullmatch(far_id):
            raise HostLost(f"{self.host.name} answers in no form of ours")
        self.far_id = far_id
        self._take(answer)
        write_text(self.folder.key, f"{key}\n")  # the server there wants it

    def _take(self, answer: JsonObject) -> None:
        """Take the port and the models of the server there from an answer of the host. Raises
        HostLost for an answer in no form of ours."""
        port, models = answer.get("port"), answer.get("models")
        if not isinstance(port, int) or not 0 <= port < 1 << 16 or not isinstance(models, list):
            raise HostLost(f"{self.host.name} answers in no form of ours")
        own = {*self.models, str(self.config["base_name"])}
        self.entrance.far_port = port
        self.served = [str(name) for name in models if name in own]

    @property
    def _owner(self) -> str:
        """The key whose deployment this is; "" for the local user."""
        return str(self.config.get("owner", ""))

    def _job(self, name: str, **arguments: Any) -> JsonObject:
        """Call a function of host_side.py on the host. Raises HostLost if the link is gone, which
        another thread may have closed."""
        if self.link is None:
            raise HostLost("the connection closed")
        return self.link.job(name, home_id=hosts.home_id(self.home), **arguments)

    def _look(self) -> None:
        """Ask the host for the server. Raises _Over if it has ended."""
        with self.lock:
            answer = self._job("serving", deployment_id=self.far_id)
            if answer.get("alive") is not True:
                why = one_line(str(answer.get("message", "")), _TEXT_CHARS)
                raise _Over(f"{self.host.name}: {why}")
            self._take(answer)

    def _require_answer(self, tunnel: Tunnel) -> None:
        """Check that the server answers through the tunnel. Raises HostRefused if the host forwards
        nothing, HostLost if it does not answer."""
        status, _ = self._ask_health()
        if status != 200:
            tunnel.check_allowed()
            raise HostLost("the server there does not answer through the tunnel")

    def _ask_health(self) -> tuple[int, JsonObject]:
        """Ask the server there whether it is well, through the tunnel. Returns its answer; 503 if
        there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.entrance.port, timeout=5)
        try:
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                response = connection.getresponse()
                answer = json.loads(response.read(_HEALTH_BYTES))
                return response.status, answer if isinstance(answer, dict) else {}
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            return 503, {"error": f"{self.host.name} is not reached just now"}

    def _watch(self, link: Link, tunnel: Tunnel) -> None:
        """Look at the server there and at the tunnel until the deployment is to end; then stop the
        models there. Raises _Over once the server has ended, HostLost when the tunnel or the link
        is gone."""
        while not self.stop.wait(_LOOK_S):
            if not tunnel.is_open or self.link is not link:
                raise HostLost("the connection closed")
            before = self.served
            self._look()
            if self.served != before:
                self._announce()
        self._stop_there()

    def _stop_there(self) -> None:
        """Have the host stop serving the models of this deployment."""
        with self.lock:
            self._job("stop_serving", models=list(self.models), owner=self._owner)

    def _stop_from_anew(self) -> None:
        """Have the host stop serving over a new connection, after the last one was broken off.
        Nothing is raised if that fails: the server there ends when it is idle."""
        self.is_announced = True  # another SIGTERM breaks nothing off
        unimportant = (HostLost, HostRefused, FarError, UserError, OSError)
        with contextlib.suppress(*unimportant), self._connected():
            self._stop_there()

    def _announce(self) -> None:
        """Write ready.json: where the models answer here, and which there are."""
        ready = {
            "url": f"http://127.0.0.1:{self.entrance.port}/v1",
            "port": self.entrance.port,
            "control_port": self.control_port,
            "pid": os.getpid(),
            "models": self.served,
        }
        self.is_announced = True
        write_json(self.folder.ready, ready)

    def health(self, _: JsonObject) -> tuple[int, JsonObject]:
        """Answer /health as the server there does."""
        return self._ask_health()

    def add_adapter(self, body: JsonObject) -> tuple[int, JsonObject]:
        """Have the host serve the adapter in the folder `path` as the model `name`."""
        name, path = body.get("name"), body.get("path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            return 400, {"error": "name and path are needed."}
        if self.models.get(name) == path and name in self.served:
            return 200, {"models": self.served}
        with self.lock:
            if self.link is None:
                return 503, {"error": f"{self.host.name} is not reached just now"}
            try:
                self._serve(name, path)
                self._announce()
                return 200, {"models": self.served}
            except HostLost as error:
                # Whatever still comes over this link would be taken for another answer.
                self.link.close()
                self.link = None
                return 503, {"error": f"{self.host.name}: {one_line(str(error), _TEXT_CHARS)}"}
            except _StoppedEarly:
                return 503, {"error": "the deployment ends"}
            except (FarError, UserError, OSError) as error:
                return 400, {"error": f"{self.host.name}: {one_line(str(error), _TEXT_CHARS)}"}

    def end(self, _: JsonObject) -> tuple[int, JsonObject]:
        """Answer /admin/stop: the deployment ends after this answer."""
        self.stop.set()
        return 200, {"stopping": True}

    def _note_end(self, why: str) -> None:
        """Record in the deployment's row why it has ended, for whoever asks."""
        with Store(self.home) as store:
            store.update_deployment(self.folder.id, state="stopped", ended=time.time(), message=why)

    def _fail(self, message: str) -> int:
        """Record why the deployment has failed. Returns the exit status."""
        message = one_line(message, 2 * _TEXT_CHARS)
        _log(message)
        if self.folder.ready.exists():  # it has answered before
            self._note_end(message)
        else:
            write_json(self.folder.failed, {"message": message})
        return _EXIT_FAILED


def _log(message: str) -> None:
    """Write a line to the deployment's log."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def main(path: Path) -> int:
    """Have a host serve the models of the deployment in the folder `path`. Returns the exit
    status."""
    folder = DeployDir(path)
    home = folder.home
    config = read_json(folder.config)
    models = {str(each["name"]): str(each["path"]) for each in config["adapters"]}
    try:
        host = hosts.host_of(home, str(config["compute"]))
    except UserError as error:
        write_json(folder.failed, {"message": f"{error}"})
        return _EXIT_FAILED
    forwarder = Forwarder(folder, home, host, config, models or {str(config["base_name"]): ""})
    signal.signal(signal.SIGTERM, forwarder.on_term)
    return forwarder.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
