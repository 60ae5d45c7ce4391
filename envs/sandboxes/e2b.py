"""A sandbox of E2B, through its Python package, which is the environment's own. The key is the
secret E2B_API_KEY; E2B_DOMAIN may be a secret too.

E2B starts templates, not images: `image` of [adapter.sandbox] names one.
"""

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

PACKAGE, KEY = "e2b", "E2B_API_KEY"
RELEASE = "e2b==2.63.0"  # tried with
ORDERED = f"{LABEL}-order"  # the metadata by which a sandbox is found that may have been made
USER = "root"  # of every command, as in a container
REFUSALS = range(400, 500)  # statuses after which there is no sandbox
START_SECONDS, CLOSE_SECONDS, UPLOAD_SECONDS = 120.0, 30.0, 60.0


def problem(options: JsonObject) -> str:
    """Return what is missing: the package, the key, or the template."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"provider e2b needs its package: put {RELEASE} into requirements.txt"
    if not os.environ.get(KEY):
        return f'provider e2b needs its key: secrets = ["{KEY}"], set for the server'
    if not text_option(options, "image"):
        return (
            "provider e2b starts templates, not images: name the template that was built for "
            'these tasks, [adapter.sandbox] image = "my-template"'
        )
    return ""


def open(options: JsonObject, order: Order) -> RemoteSandbox:
    """Rent a sandbox that the provider kills when its lifetime is over. Raises SandboxFault."""
    module = importlib.import_module(PACKAGE)
    ordered = os.urandom(8).hex()
    try:
        sandbox = module.Sandbox.create(
            template=order.image,
            timeout=math.ceil(order.lifetime_s),
            metadata={LABEL: "1", **order.labels, ORDERED: ordered},
            envs=dict(order.variables),
            allow_internet_access=order.network,
            request_timeout=START_SECONDS,
            retries=0,  # tried again by `opening`
        )
    except Exception as error:
        if _status(error) not in REFUSALS:
            _kill_unready(module, ordered)
        raise _fault("no sandbox", error) from error
    return _rented(module, sandbox, order)


def _rented(module: Any, sandbox: Any, order: Order) -> RemoteSandbox:
    """Return a sandbox of the package as ours."""

    def run(text: str, seconds: float, variables: Mapping[str, str]) -> Ran:
        """Run a command line. The package raises for an exit status that is not 0."""
        try:
            done = sandbox.commands.run(text, envs=dict(variables), user=USER, timeout=seconds)
        except module.CommandExitException as ended:
            return Ran(ended.exit_code, ended.stdout, ended.stderr)
        except Exception as error:
            raise _fault("a command was lost", error) from error
        return Ran(done.exit_code, done.stdout, done.stderr)

    def upload(path: str, data: bytes) -> None:
        """Write a file."""
        try:
            sandbox.files.write(path, data, user=USER, request_timeout=UPLOAD_SECONDS)
        except Exception as error:
            raise _fault(f"{path} was not written", error) from error

    def give_back() -> None:
        """Kill the sandbox."""
        try:
            sandbox.kill(request_timeout=CLOSE_SECONDS)
        except Exception as error:
            raise _fault("the sandbox was not killed", error) from error

    return RemoteSandbox(order, run, upload, give_back, sandbox.sandbox_id)


def _kill_unready(module: Any, ordered: str) -> None:
    """Kill the sandbox of this order, if it was made although the order failed."""
    # Whatever the package raises: where it cannot be reached, the sandbox's lifetime holds.
    with contextlib.suppress(Exception):
        query = module.SandboxQuery(metadata={ORDERED: ordered})
        pages = module.Sandbox.list(query=query, request_timeout=CLOSE_SECONDS)
        while pages.has_next:
            for lost in pages.next_items():
                module.Sandbox.kill(lost.sandbox_id, request_timeout=CLOSE_SECONDS)


def _fault(what: str, error: Exception) -> SandboxFault:
    """Return the fault for an error of the package."""
    status = _status(error)
    return SandboxFault(f"e2b: {what}: {error}"[:400], retryable=status == 429 or status >= 500)


def _status(error: Exception) -> int:
    """Return the HTTP status for which the package raised an error; 0 for none."""
    if type(error).__name__ == "RateLimitException":
        return 429
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else 0
