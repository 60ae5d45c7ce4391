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
    """Return what SkyPilot is told of a cluster, in the keys of its task YAML: the machine, the
    set-up of its environment, and its one job (node_side.py).

    Args:
        name: the name of the task.
        host: the host in config.toml, whose options say what to rent.
        public_key: the key that is let in over ssh.
        packages: requirements of the environment; () if the host names an interpreter instead.
        lease_s: seconds after which the job ends if no run on it is asked about.
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
    """Return the interpreter that runs this program on a cluster, as a command of the login shell
    there: the one in the host's table, or that of the environment that the set-up builds."""
    return host.python or f"{host.folder}/venv/bin/python"


def _resources(host: Host) -> JsonObject:
    """Return what the machine must have, in the keys of SkyPilot's task YAML. What the host's table
    does not say is left to SkyPilot."""
    sky = host.sky
    resources: JsonObject = {
        "autostop": {"idle_minutes": IDLE_MINUTES, "down": True, "wait_for": "jobs"},
        "use_spot": sky.spot,
    }
    if sky.accelerators:
        resources["accelerators"] = f"{sky.device_kind}:{sky.devices}"
    if sky.infra:
        resources["infra"] = sky.infra
    if sky.image:
        resources["image_id"] = sky.image
    if sky.max_price:
        resources["max_hourly_cost"] = sky.max_price
    if sky.cpus:
        resources["cpus"] = f"{sky.cpus}+"
    if sky.memory_gb:
        resources["memory"] = f"{sky.memory_gb:g}+"
    if sky.disk_gb:
        resources["disk_size"] = sky.disk_gb
    return resources


def _setup(folder: str, packages: Sequence[str]) -> str:
    """Return the shell script that builds the environment for training on a rented machine, from
    these requirements. If it is there already, the script does nothing.

    `folder` is the root of this program there: absolute, or below the user's home folder.
    """
    quoted_packages = " ".join(f"'{package}'" for package in packages)
    root = folder if folder.startswith("/") else f"$HOME/{folder}"
    return f"""set -e
umask 077
venv="{root}/venv"
[ -e "$venv/ready" ] && exit 0
mkdir -p "{root}"
if command -v uv >/dev/null; then uv=uv; else uv="$HOME/.local/bin/uv"; fi
if [ -x "$uv" ] || command -v "$uv" >/dev/null; then
  "$uv" venv --quiet --python {_PYTHON} "$venv"
  "$uv" pip install --quiet --python "$venv/bin/python" {quoted_packages}
else
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check {quoted_packages}
fi
touch "$venv/ready"
"""
