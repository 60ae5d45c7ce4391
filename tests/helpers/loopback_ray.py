"""A real Ray cluster of two nodes on this machine: a network namespace and a mount of its own each.

The head has no cores for jobs, the worker has two; both see the same files but for Ray's own.
Ray stands in an environment of its own, which is made once and kept. Processes are ended by the
namespace they are in, never by name.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

_RAY = "ray[default]==2.60.0"
_CACHE = Path(os.environ.get("HONESMITH_TEST_RAY", Path(tempfile.gettempdir()) / "honesmith-ray"))
_BRIDGE_IP, _HEAD_IP, _WORKER_IP = "10.231.7.254", "10.231.7.1", "10.231.7.2"
_GCS_PORT, _API_PORT = 6390, 8270
_START_S = 120.0
TOKEN = "a-token-of-the-tests-of-at-least-32-characters"


def ray_program() -> Path:
    """The `ray` of an environment of its own, made where it is not there.

    Raises OSError or subprocess.SubprocessError where it cannot be had.
    """
    program = _CACHE / "bin" / "ray"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(_CACHE)], check=True)
        pip = [str(_CACHE / "bin/python"), "-m", "pip", "install", "-q", _RAY]
        subprocess.run(pip, check=True, capture_output=True, timeout=900)
    return program


def why_not() -> str:
    """Why no cluster can be started here; "" where it can."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "two nodes on one machine need root, ip and unshare"
    name = f"hsray-try{os.getpid()}"
    if _ip("netns", "add", name, check=False).returncode:
        return "no network namespace can be made here"
    _ip("netns", "del", name, check=False)
    try:
        ray_program()
    except (OSError, subprocess.SubprocessError) as error:
        return f"Ray is not to be had: {error}"
    return ""


class LoopbackRay:
    """A cluster; `address` is that of its Jobs API."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ray = ray_program()
        self.net = f"hsray{os.getpid() % 100_000}"  # the bridge, and how other names begin
        self.address = f"http://{_HEAD_IP}:{_API_PORT}"
        self.temp = Path(tempfile.mkdtemp(prefix="hsray"))  # short: Ray makes sockets below it
        self.token = folder / "token"
        folder.mkdir(parents=True, exist_ok=True)
        self._connect()
        try:
            self.start_head()
            self.start_worker()
        except BaseException:
            self.stop()
            raise

    def _connect(self) -> None:
        """Make the namespaces and the wires between them."""
        _ip("link", "add", self.net, "type", "bridge")
        _ip("addr", "add", f"{_BRIDGE_IP}/24", "dev", self.net)
        _ip("link", "set", self.net, "up")
        for node, address in (("head", _HEAD_IP), ("worker", _WORKER_IP)):
            name, wire = self._space(node), f"{self.net}{node[0]}"
            _ip("netns", "add", name)
            _ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", wire, "master", self.net, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def _disconnect(self) -> None:
        for node in ("head", "worker"):
            self.kill(node)
            _ip("netns", "del", self._space(node), check=False)
        _ip("link", "del", self.net, check=False)

    def _space(self, node: str) -> str:
        """The name of a node's network namespace."""
        return f"{self.net}-{node}"

    def _start(self, node: str, *options: str) -> None:
        """Start a node; it has a folder of its own where the other one has its own."""
        own = self.folder / node
        own.mkdir(exist_ok=True)
        ray = [str(self.ray), "start", "--block", "--disable-usage-stats", *options]
        ray += [f"--temp-dir={self.temp}"] if node == "head" else []
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        inside = ["unshare", "-m", "sh", "-c", script, "sh", str(own), str(self.temp), *ray]
        environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "OUTLIVES_TESTS": "yes",  # what a run starts has it no more
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }
        with (self.folder / f"{node}.log").open("ab") as log:
            # Forked away: it is no process of the test that happens to start it.
            subprocess.run(
                ["setsid", "--fork", "ip", "netns", "exec", self._space(node), *inside],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )

    def start_head(self) -> None:
        """Start the head; returns when its Jobs API answers."""
        self._start(
            "head",
            "--head",
            f"--node-ip-address={_HEAD_IP}",
            f"--port={_GCS_PORT}",
            f"--dashboard-host={_HEAD_IP}",
            f"--dashboard-port={_API_PORT}",
            "--num-cpus=0",
        )
        self._until(lambda: self.get("/api/jobs/").status_code == httpx.codes.OK, "head")

    def start_worker(self) -> None:
        """Start the worker; returns when the head counts one that it did not know."""
        before = self._nodes()
        self._start(
            "worker",
            f"--address={_HEAD_IP}:{_GCS_PORT}",
            f"--node-ip-address={_WORKER_IP}",
            "--num-cpus=2",
        )
        self._until(lambda: bool(self._nodes() - before), "worker")

    def mend(self) -> None:
        """Start again what a test has ended."""
        try:
            is_up = self.get("/api/jobs/").status_code == httpx.codes.OK
        except httpx.HTTPError:
            is_up = False
        if not is_up:
            self.kill("worker")  # of a head that is gone
            self.kill("head")
            self.start_head()
        if not self._programs("worker").get("raylet"):  # the head takes a while to see it
            self.kill("worker")
            self.start_worker()

    def _nodes(self) -> set[str]:
        """The ids of the nodes that the head counts as alive."""
        summary = self.get("/nodes?view=summary").json()["data"]["summary"]
        rays = [node["raylet"] for node in summary]
        return {ray["nodeId"] for ray in rays if ray.get("state") == "ALIVE"}

    def _until(self, holds, node: str) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if holds():
                    return
            time.sleep(0.2)
        raise AssertionError((self.folder / f"{node}.log").read_text()[-3000:])

    def get(self, path: str) -> httpx.Response:
        """Ask the head."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.get(self.address + path, headers=headers, timeout=10, trust_env=False)

    def pids(self, node: str) -> list[int]:
        """Every process of a node, jobs too."""
        listed = _ip("netns", "pids", self._space(node), check=False).stdout
        return [int(pid) for pid in listed.split()]

    def _programs(self, node: str) -> dict[str, list[int]]:
        """The processes of a node by the name of their program."""
        pids_by_name: dict[str, list[int]] = {}
        for pid in self.pids(node):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                pids_by_name.setdefault(words[0].decode().rpartition("/")[2], []).append(pid)
        return pids_by_name

    def kill(self, node: str, program: str = "") -> None:
        """Kill every process of a node, or those of one program, such as "raylet"."""
        for name, pids in self._programs(node).items():
            for pid in pids if program in ("", name) else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End everything of it."""
        for _ in range(3):  # what was being started while the others were killed
            for node in ("worker", "head"):
                self.kill(node)
            time.sleep(0.1)
        self._disconnect()
        shutil.rmtree(self.temp, ignore_errors=True)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Call `ip`."""
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
