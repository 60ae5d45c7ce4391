"""A SkyPilot API server on loopback, in the shapes of 0.14.1, whose clusters are folders here.

A cluster is a home folder with an sshd of its own; its job is a process there. It speaks what
SkyPilot speaks, pickled handles included. What a real provider does is planted by hand: `gate`
holds machines back, `refusal` has none, `take_away` loses one.
"""

import base64
import enum
import json
import os
import pickle
import shutil
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
from loopback_sshd import SSHD, free_port, keygen

PRICE = 2.49
_OFFER = ["RunPod", "1x_H100", "H100", 1, 16, 80.0, 188.0, PRICE, 1.25, "US"]


class _Level(enum.Enum):
    COST = 0


class Resources:
    """As SkyPilot pickles it: slots, a nested object, an enum."""

    def __init__(self) -> None:
        self.cloud, self.accelerators = "RunPod", {"H100": 1}
        self.level, self.labels = _Level.COST, frozenset({"a"})


class CloudVmRayResourceHandle:
    """As SkyPilot pickles it."""

    def __init__(self, name: str, port: int) -> None:
        self._version, self.cluster_name = 13, name
        self.stable_internal_external_ips = [("10.0.0.4", "127.0.0.1")]
        self.stable_ssh_ports = [port]
        self.launched_resources, self.docker_user = Resources(), None


@dataclass
class FakeCluster:
    """A machine: its home folder, its sshd, its job."""

    name: str
    folder: Path
    task: dict[str, Any]
    status: str = "INIT"
    port: int = 0
    job: subprocess.Popen[bytes] | None = None
    sshd: subprocess.Popen[bytes] | None = None
    jobs: int = 0

    @property
    def home(self) -> Path:
        """The home folder of its user."""
        return self.folder / "home"

    def boot(self) -> None:
        """Bring its machine up, with a host key of its own."""
        self.home.mkdir(parents=True)
        keygen(self.folder / "ssh_host_ed25519_key")
        self.port = free_port()
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\n"
            f"HostKey {self.folder}/ssh_host_ed25519_key\n"
            f"AuthorizedKeysFile {self.home}/.ssh/authorized_keys\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\n"
            f"SetEnv HOME={self.home}\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.sshd = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "sshd.log").open("ab"),
        )

    def run(self) -> None:
        """Run the task's job, as another one where there is one already."""
        self.jobs += 1
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.home), "USER": _user()}
        variables |= {"HONESMITH_SSH_FOLDER": str(self.folder), "HONESMITH_LOOK_S": "0.2"}
        log = self.folder / f"job-{self.jobs}.log"
        job = subprocess.Popen(
            ["bash", "-c", self.task["run"]],
            cwd=self.home,
            env=variables | self.task["envs"],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.job = self.job or job

    def end(self) -> None:
        """Give its machine back: nothing of it is left."""
        for process in [self.sshd, self.job]:
            if process is not None:
                process.kill()
                process.wait()
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home):
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        """As the server shows it."""
        handle = pickle.dumps(CloudVmRayResourceHandle(self.name, self.port))
        return {
            "name": self.name,
            "launched_at": int(time.time()),
            "handle": base64.b64encode(handle).decode() if self.port else None,
            "status": self.status,
            "autostop": 5,
            "to_down": True,
            "cluster_hash": "x",
            "user_hash": "y",
            "user_name": "honesmith",
            "workspace": "default",
            "cluster_ever_up": self.status == "UP",
            "is_managed": False,
            "nodes": 1,
            "cloud": "RunPod",
            "region": "US",
            "resources_str": "1x(gpus=H100:1, ...)",
            "last_event": "Launching (1 of 1)",
            "labels": {},
        }


@dataclass
class FakeSky:
    """One server.

    Attributes:
        token: that every call must bring; "" for a server without accounts.
        offers: what the catalogue lists.
        refusal: why no machine can be had; "" for none.
        gate: machines come up while it is set.
        is_away: whether the server answers nothing that is of use.
        is_old: whether it lists the requests of every cluster, whichever is asked for, as 0.11.
        bodies: what was posted: path and body.
        minute_s: how long a minute of autostop is.
    """

    folder: Path
    token: str = ""
    offers: list[list[Any]] = field(default_factory=lambda: [list(_OFFER)])
    refusal: str = ""
    is_away: bool = False
    is_old: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    clusters: dict[str, FakeCluster] = field(default_factory=dict)
    ever: list[str] = field(default_factory=list)
    minute_s: float = 0.2
    _unnoticed: set[str] = field(default_factory=set)
    _requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    _alone: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.gate.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                authorization = self.headers.get("authorization")
                status, content, request_id = fake.answer(
                    self.command, self.path, body, authorization
                )
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                if request_id:
                    self.send_header("X-Skypilot-Request-ID", request_id)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._is_open = True
        threading.Thread(target=self._autostop, daemon=True).start()

    def close(self) -> None:
        """Answer no more; what was launched goes on."""
        self._server.shutdown()
        self._server.server_close()

    def end(self) -> None:
        """End every machine."""
        with self._alone:
            self._is_open = False
        self.gate.set()
        for cluster in list(self.clusters.values()):
            cluster.end()

    def take_away(self, name: str, *, is_noticed: bool = True) -> None:
        """Lose a machine, as a provider does; unless `is_noticed` the server knows once it asks."""
        if is_noticed:
            self.clusters.pop(name).end()
        else:
            self._unnoticed.add(name)
            self.clusters[name].end()

    def answer(self, method: str, path: str, body: Any, authorization: str | None) -> Any:
        """Status, content and request id of an answer."""
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.is_away:
            return 502, "Bad Gateway", ""
        if url.path == "/api/health":
            is_known = not self.token or authorization == f"Bearer {self.token}"
            status = "healthy" if is_known else "needs_auth"
            return 200, {"status": status, "api_version": "62", "version": "0.14.1"}, ""
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"detail": "Authentication required"}, ""
        if url.path == "/api/status":
            wanted = query.get("cluster_name")
            shown = [
                r
                for r in self._requests.values()
                if not wanted or self.is_old or r["cluster_name"] == wanted
            ]
            if query.get("all_status") != "true":
                shown = [r for r in shown if r["status"] in ("PENDING", "RUNNING")]
            limit = int(query.get("limit") or len(shown))  # the newest of them
            return 200, _with_fields(shown[::-1][:limit], parse_qs(url.query).get("fields")), ""
        if url.path == "/api/get":
            return self._get(query["request_id"])
        self.bodies.append((url.path, body))
        verb = getattr(self, "_do_" + url.path.strip("/").replace("/", "_"), None)
        if method != "POST" or verb is None:
            return 404, {"detail": "Not Found"}, ""
        if url.path == "/logs":
            return 200, verb(body), uuid.uuid4().hex
        return 200, "null", self._begin(url.path.rpartition("/")[2], body, verb)

    def _get(self, request_id: str) -> Any:
        request = self._requests.get(request_id)
        if request is None:
            return 404, {"detail": f"Request '{request_id}' not found"}, ""
        while request["status"] in ("PENDING", "RUNNING"):
            time.sleep(0.01)
        if request["error"] != "null":
            return 500, {"detail": request}, ""
        return 200, request, ""

    def _begin(self, name: str, body: dict[str, Any], verb: Any) -> str:
        request_id = str(uuid.uuid4())
        request = {
            "request_id": request_id,
            "name": f"sky.{name}",
            "status": "PENDING",
            "cluster_name": body.get("cluster_name"),
            "created_at": time.time(),
            "return_value": "null",
            "error": "null",
            "status_msg": None,
        }
        self._requests[request_id] = request

        def carry_out() -> None:
            request["status"] = "RUNNING"
            try:
                value = verb(body, request) if name == "launch" else verb(body)
            except Exception as error:  # noqa: BLE001 - it becomes the request's error
                message = {"object": "gA==", "type": type(error).__name__, "message": str(error)}
                request["error"] = json.dumps(message)
                request["status"] = "FAILED"
                return
            if request["status"] == "RUNNING":
                request["return_value"], request["status"] = json.dumps(value), "SUCCEEDED"

        threading.Thread(target=carry_out, daemon=True).start()
        return request_id

    def _do_list_accelerators(self, body: dict[str, Any]) -> Any:
        clouds = body["clouds"]
        rows = [o for o in self.offers if not clouds or str(o[0]).lower() in clouds]
        return {"H100": rows}

    def _do_launch(self, body: dict[str, Any], request: dict[str, Any]) -> Any:
        name, task = body["cluster_name"], json.loads(body["task"])
        if self.refusal:
            raise ResourcesUnavailableError(self.refusal)
        if body.get("dryrun"):
            return None
        while not self.gate.wait(0.02):
            if request["status"] == "CANCELLED":
                return None
        with self._alone:
            if not self._is_open:
                return None
            cluster = self.clusters.get(name)
            if cluster is None:
                folder = self.folder / name
                cluster = self.clusters[name] = FakeCluster(name, folder, task)
                self.ever.append(name)
                cluster.boot()
                cluster.status = "UP"
            cluster.run()
        return {"job_id": cluster.jobs, "handle": cluster.facts()["handle"]}

    def _do_status(self, body: dict[str, Any]) -> Any:
        names = body["cluster_names"]
        if body["refresh"] == "FORCE":
            for name in self._unnoticed & set(self.clusters):
                self.clusters.pop(name)
        return [c.facts() for c in self.clusters.values() if names is None or c.name in names]

    def _do_down(self, body: dict[str, Any]) -> Any:
        with self._alone:
            cluster = self.clusters.pop(body["cluster_name"], None)
        if cluster is None:
            raise ClusterDoesNotExist(f"Cluster {body['cluster_name']} does not exist.")
        cluster.end()

    def _do_queue(self, body: dict[str, Any]) -> Any:
        cluster = self.clusters[body["cluster_name"]]
        is_over = cluster.job is not None and cluster.job.poll() is not None
        status = "SUCCEEDED" if cluster.job and cluster.job.returncode == 0 else "FAILED_SETUP"
        return [{"job_id": 1, "job_name": cluster.name, "status": status if is_over else "RUNNING"}]

    def _do_logs(self, body: dict[str, Any]) -> str:
        cluster = self.clusters[body["cluster_name"]]
        log = cluster.folder / f"job-{body['job_id']}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        shown = [f"\x1b[36m(honesmith, pid=1234)\x1b[0m {line}" for line in lines]
        return "\n".join(["├── Waiting for task resources on 1 node.", *shown, ""])

    def _do_api_cancel(self, body: dict[str, Any]) -> Any:
        for request_id in body["request_ids"]:
            if self._requests[request_id]["status"] in ("PENDING", "RUNNING"):
                self._requests[request_id]["status"] = "CANCELLED"
        return body["request_ids"]

    def _autostop(self) -> None:
        """Give back what has been idle for its minutes."""
        idle_since: dict[str, float] = {}
        while self._is_open:
            time.sleep(0.05)
            for name, cluster in list(self.clusters.items()):
                if name in self._unnoticed:
                    continue
                is_idle = cluster.job is not None and cluster.job.poll() is not None
                minutes = cluster.task["resources"]["autostop"]["idle_minutes"]
                since = idle_since.setdefault(name, time.monotonic())
                if not is_idle:
                    idle_since[name] = time.monotonic()
                elif time.monotonic() - since > minutes * self.minute_s:
                    self.take_away(name)


class ResourcesUnavailableError(Exception):
    """As SkyPilot names it."""


class ClusterDoesNotExist(Exception):
    """As SkyPilot names it."""


def _with_fields(requests: list[dict[str, Any]], fields: list[str] | None) -> list[dict[str, Any]]:
    """The requests with nothing but these fields; as they are if none are named."""
    if not fields:
        return requests
    return [{key: request[key] for key in request if key in fields} for request in requests]


def kill_job(cluster: FakeCluster) -> None:
    """End the job of a cluster without a word."""
    assert cluster.job is not None
    os.killpg(cluster.job.pid, signal.SIGKILL)


def _user() -> str:
    return psutil.Process().username()
