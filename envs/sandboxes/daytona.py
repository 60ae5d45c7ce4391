"""A sandbox of Daytona, through its Python package, which is the environment's own. The key is the
secret DAYTONA_API_KEY; DAYTONA_API_URL and DAYTONA_TARGET may be secrets too."""

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

from envs.json_types import JsonObject
from envs.sandboxes.contract import LABEL, Order, Ran, SandboxFault
from envs.sandboxes.remote import RemoteSandbox, text_option

PACKAGE, KEY = "daytona", "DAYTONA_API_KEY"
RELEASE = "daytona==0.226.1"  # tried with
START_SECONDS, CLOSE_SECONDS = 180.0, 30.0


def problem(options: JsonObject) -> str:
    """Return what is missing: the package or the key."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"provider daytona needs its package: put {RELEASE} into requirements.txt"
    if not os.environ.get(KEY):
        return f'provider daytona needs its key: secrets = ["{KEY}"], set for the server'
    return ""


def open(options: JsonObject, order: Order) -> RemoteSandbox:
    """Rent a sandbox that the provider destroys when its lifetime is over. Raises SandboxFault."""
    module = importlib.import_module(PACKAGE)
    name = f"{LABEL}-{os.urandom(8).hex()}"  # by which one that is made but not ready is found
    try:
        client = module.Daytona()
        parameters = _parameters(module, options, order, name)
        sandbox = client.create(parameters, timeout=START_SECONDS)
    except Exception as error:
        _give_back_unready(module, name)
        raise _fault("no sandbox", error) from error
    return _rented(sandbox, order, name)


def _parameters(module: Any, options: JsonObject, order: Order, name: str) -> Any:
    """Return the parameters of the package's `create`: of a snapshot, or of an image."""
    common = {
        "name": name,
        "labels": {LABEL: "1", **order.labels},
        "env_vars": dict(order.variables),
        "ttl_minutes": math.ceil(order.lifetime_s / 60),
        "ephemeral": True,
        "auto_stop_interval": 0,  # its end is the one above
        "network_block_all": not order.network,
    }
    snapshot = text_option(options, "snapshot")
    if snapshot:
        return module.CreateSandboxFromSnapshotParams(snapshot=snapshot, **common)
    if not order.image:
        return module.CreateSandboxFromSnapshotParams(**common)
    sizes = {
        "cpu": order.cpus or None,
        "memory": math.ceil(order.memory_mb / 1024) or None,
        "disk": math.ceil(order.disk_mb / 1024) or None,
    }
    resources = module.Resources(**{name: size for name, size in sizes.items() if size})
    return module.CreateSandboxFromImageParams(image=order.image, resources=resources, **common)


def _rented(sandbox: Any, order: Order, name: str) -> RemoteSandbox:
    """Return a sandbox of the package as ours."""

    def run(text: str, seconds: float, variables: Mapping[str, str]) -> Ran:
        """Run a command line. The provider keeps both streams together."""
        try:
            # By sh whatever the image has: the provider would take zsh.
            command = f"sh -c {_quoted(text)}"
            answer = sandbox.process.exec(command, env=dict(variables), timeout=math.ceil(seconds))
        except Exception as error:
            raise _fault("a command was lost", error) from error
        return Ran(int(answer.exit_code), answer.result)

    def upload(path: str, data: bytes) -> None:
        """Write a file."""
        try:
            sandbox.fs.upload_file(data, path)
        except Exception as error:
            raise _fault(f"{path} was not written", error) from error

    def give_back() -> None:
        """Delete the sandbox."""
        try:
            sandbox.delete(timeout=CLOSE_SECONDS)
        except Exception as error:
            raise _fault("the sandbox was not deleted", error) from error

    return RemoteSandbox(order, run, upload, give_back, name)


def _give_back_unready(module: Any, name: str) -> None:
    """Delete the sandbox of this name, if it was made although the order for it failed."""
    # Whatever the package raises: where there is none, or it cannot be reached, its lifetime holds.
    with contextlib.suppress(Exception):
        module.Daytona().get(name).delete(timeout=CLOSE_SECONDS)


def _quoted(text: str) -> str:
    """Return a text as one word of a shell."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _fault(what: str, error: Exception) -> SandboxFault:
    """Return the fault for an error of the package."""
    status = getattr(error, "status_code", None)
    busy = status == 429 or (isinstance(status, int) and status >= 500)
    return SandboxFault(f"daytona: {what}: {error}"[:400], retryable=busy)
