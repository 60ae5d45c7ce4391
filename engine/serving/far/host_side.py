"""Models served on a host: these functions are called there, over a connection
(engine/executors/far_side.py).

A model is served there by an ordinary deployment of a home, which stands below the root of the
connection: it ends by itself when it is idle, or when a run there needs its memory.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_json
from engine.executors import jobs
from engine.home.rows import LOCAL
from engine.home.run_dir import DeployDir, Home
from engine.home.store import Store
from engine.home.team.owners import Viewer
from engine.machine.processes import deployments
from engine.machine.processes.deployments import ANYBODY
from engine.models import adapters, catalog
from engine.serving import service
from engine.serving.starting import Target


class Wanted(TypedDict):
    """A model that is to be served; its folders lie below the root.

    Attributes:
        name, base_name: the names of the model and of its base in requests.
        base: folder of the base.
        adapter: folder of the adapter; "" for the base itself.
        thinking: whether it was trained with thinking on.
    """

    name: str
    base_name: str
    base: str
    adapter: str
    thinking: bool


def serve(root: str, home_id: str, model: Wanted, owner: str, wait_s: float) -> JsonObject:
    """Serve a model whose folders were sent before, until it is stopped or idle.

    Args:
        model: the model, as JSON.
        owner: the key there for whom it is served, "" for the local user. Different owners share no
            deployment but for what it serves already.
        wait_s: how long this call may wait until it is loaded.

    Returns "ready"; if that is True also the deployment's id, port, key and models. Raises the
    errors of `service.serve` if it cannot be served.
    """
    home = _home_of(root, home_id, owner)
    ref = catalog.resolve_model(home, str(Path(root, model["base"])))
    ref = replace(ref, ref=model["name"], base_ref=model["base_name"])
    adapter = ""
    if model["adapter"]:
        folder = Path(root, model["adapter"])
        ref = replace(ref, adapter=folder, adapter_facts=adapters.read_facts(folder, ref.facts))
        adapter = str(folder)
    target = Target(ref, model["name"], adapter, model["thinking"], compute=LOCAL)
    try:
        row, _ = service.serve(home, target, time.monotonic() + wait_s, ANYBODY, by_deploy=True)
    except UserError as error:
        if error.code == "DEPLOY_FAILED" and error.retryable:  # it is still being loaded
            return {"ready": False}
        raise
    deployment = home.deployment(row.deployment_id)
    key = deployment.key.read_text().strip()
    return {"ready": True, "deployment_id": row.deployment_id, "key": key, **_announced(deployment)}


def _home_of(root: str, home_id: str, owner: str) -> Home:
    """Return the home on this host in which an owner's models are served: `owner` is the id of a
    key of the home `home_id`, "" for its local user."""
    home = jobs.home_at(root, home_id)
    return Home(home.root, Viewer(owner, may="use")) if owner else home


def _announced(deployment: DeployDir) -> JsonObject:
    """Return the "port" and the "models" of a deployment that answers; 0 and [] if it has ended."""
    try:
        ready = read_json(deployment.ready)
        return {"port": int(ready["port"]), "models": [str(name) for name in ready["models"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"port": 0, "models": []}


def serving(root: str, home_id: str, deployment_id: str) -> JsonObject:
    """Return whether a deployment is "alive", its "port" and "models", and why it ended
    ("message")."""
    home = jobs.home_at(root, home_id)
    folder = home.deployment(deployment_id)
    if deployments.is_alive(folder):
        return {"alive": True, "message": "", **_announced(folder)}
    deployments.living(home)  # this call records in the row that the process has ended
    with Store(home) as store:
        row = store.get_deployment(deployment_id)
    return {"alive": False, "message": row.message or "it ended", "port": 0, "models": []}


def stop_serving(root: str, home_id: str, models: list[str], owner: str) -> JsonObject:
    """Stop serving these models for `owner`. Their deployment ends, unless it has others that were
    deployed."""
    home = _home_of(root, home_id, owner)
    for model in models:
        service.stop_models(home, model)
    return {}


CALLS: Mapping[str, Callable[..., JsonObject]] = {
    "prepare": jobs.prepare,
    "serve": serve,
    "serving": serving,
    "stop_serving": stop_serving,
}
