"""What SkyPilot is told of a cluster: the task that makes it what a launch needs."""

import base64
from collections.abc import Sequence
from pathlib import Path

from engine.core.files import JsonObject
from engine.executors.sky import node_side
from engine.home.user_config import Host

IDLE_MINUTES = 5  # after its job has ended, until SkyPilot gives the cluster back
_PYTHON = "3.12"


def task_of(
    name: str, host: Host, public_key: str, packages: Sequence[str], lease_s: float
) -> JsonObject:
    """The task of a cluster, in the keys of SkyPilot's task YAML.

    Args:
        public_key: that is let in over ssh.
        packages: what its environment is built from; none where the host names an interpreter.
        lease_s: without a word for so long, it ends.
    """
    sky = host.sky
    program = base64.b64encode(Path(node_side.__file__).read_bytes()).decode()
    task: JsonObject = {
        "name": name,
        "num_nodes": 1,
        "resources": _resources(host),
        # No credential of the server's goes to a place where user code runs.
        "api_server_access": False,
        "envs": {
            "HONESMITH_ROOT": host.folder,
            "HONESMITH_KEY": public_key,
            "HONESMITH_LEASE_S": f"{lease_s:g}",
            "HONESMITH_MOST_S": f"{3600 * sky.max_hours:g}",
        },
        "run": f"echo {program} | base64 -d > .honesmith-node.py && "
        "exec python3 -I .honesmith-node.py\n",
    }
    if packages:
        task["setup"] = _setup(host.folder, packages)
    return task


def interpreter(host: Host) -> str:
    """The interpreter on a cluster that runs what is ours, as a command of its login shell."""
    return host.python or f"{host.folder}/venv/bin/python"


def _resources(host: Host) -> JsonObject:
    """What the machine is to have; what is not said is left to SkyPilot."""
    sky = host.sky
    asked: JsonObject = {
        "autostop": {"idle_minutes": IDLE_MINUTES, "down": True, "wait_for": "jobs"},
        "use_spot": sky.spot,
    }
    if sky.accelerators:
        asked["accelerators"] = f"{sky.device_kind}:{sky.devices}"
    if sky.infra:
        asked["infra"] = sky.infra
    if sky.image:
        asked["image_id"] = sky.image
    if sky.max_price:
        asked["max_hourly_cost"] = sky.max_price
    if sky.cpus:
        asked["cpus"] = f"{sky.cpus}+"
    if sky.memory_gb:
        asked["memory"] = f"{sky.memory_gb:g}+"
    if sky.disk_gb:
        asked["disk_size"] = sky.disk_gb
    return asked


def _setup(folder: str, packages: Sequence[str]) -> str:
    """The commands that build our environment on the machine; again changes nothing."""
    needed = " ".join(f"'{package}'" for package in packages)
    place = folder if folder.startswith("/") else f"$HOME/{folder}"
    return f"""set -e
umask 077
venv="{place}/venv"
[ -e "$venv/ready" ] && exit 0
mkdir -p "{place}"
if command -v uv >/dev/null; then uv=uv; else uv="$HOME/.local/bin/uv"; fi
if [ -x "$uv" ] || command -v "$uv" >/dev/null; then
  "$uv" venv --quiet --python {_PYTHON} "$venv"
  "$uv" pip install --quiet --python "$venv/bin/python" {needed}
else
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check {needed}
fi
touch "$venv/ready"
"""
