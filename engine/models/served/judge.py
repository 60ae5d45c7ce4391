"""Judges that are models of this home: `model:REF`, in which REF names a model as it does
everywhere else (engine/models/catalog.py).

The model is served by a deployment like any other. A program of its own finds or starts that
(engine/serving/locate.py), because packages that ask judges stand below the one that serves.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.home.hashes import file_hashes, fingerprint, weight_hashes
from engine.home.run_dir import Home
from engine.machine.processes import programs
from engine.models import adapters, catalog
from engine.models.catalog import ModelRef
from engine.models.sizing import servers
from envs.config.endpoints import LOCAL
from envs.metering.relay import Address

START_S = 600.0  # seconds that a deployment may take until it answers; large weights load slowly
_GRACE_S = 30.0  # seconds beyond that for the program itself
_REF_CHARS = 80  # how much of a judge's reference an error quotes
_STDERR_CHARS = 400  # how much of the program's error output an error quotes


@dataclass(frozen=True)
class LocalJudge:
    """A model of this home that grades answers.

    Attributes:
        ref: how an environment names it, such as "model:arith-7@best".
        name: the model name under which it is served; of a run's model it names the checkpoint, so
            that it stays the same one while the run goes on.
        model: the model.
        weights: the SHA-256 that stands for the weights of its base.
        adapter: the SHA-256 of its adapter; "" for none.
    """

    ref: str
    name: str
    model: ModelRef
    weights: str
    adapter: str

    @property
    def identity(self) -> str:
        """A hash of its weights, by which judges are told apart: the same model by another name is
        the same judge, another checkpoint is another one."""
        parts = [LOCAL, self.weights, self.adapter]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def least_bytes(self, device_kind: str) -> int:
        """Return the bytes that the judge takes on a device of this kind ("cpu" or "cuda") beside a
        run, if it is served by this project's own sampler."""
        return servers.plain_bytes(self.model.facts.params, "torch", device_kind)


def is_local(ref: str) -> bool:
    """Tell whether a judge's reference names a model of this home, as "model:pebble" does."""
    return ref.startswith(LOCAL)


def local_judge(home: Home, ref: str, field: str = "env_id") -> LocalJudge:
    """Find the model that `ref`, such as "model:pebble", names as a judge, and the hashes that
    stand for its weights.

    `field` is the user's argument that names the judge, for errors. Raises UserError
    MODEL_NOT_FOUND if there is no such model or its weights are not downloaded, and the other
    errors of `resolve_model`.
    """
    name = ref.removeprefix(LOCAL)
    try:
        if home.viewer is not None:  # a member of a team must not learn here which files exist
            catalog.check_in_sight(home, name)
        model = catalog.resolve_model(home, name)
    except UserError as error:
        raise UserError(
            error.code,
            f"the judge {ref[:_REF_CHARS]} cannot be used: {error.message}",
            hint=error.hint,
            field=field,
        ) from error
    weights = fingerprint(weight_hashes(home, model.base_path))
    if not weights:
        raise UserError(
            "MODEL_NOT_FOUND",
            f"the judge {ref[:_REF_CHARS]} cannot be used: the weights of {model.base_ref} are "
            "not here",
            hint=f"Fetch them once: `honesmith models add {model.base_ref}`.",
            field=field,
        )
    if model.adapter is None:
        return LocalJudge(ref, model.base_ref, model, weights, "")
    adapter = file_hashes(home, [model.adapter / adapters.WEIGHTS])[adapters.WEIGHTS]
    served_name = model.ref
    if model.run_id:  # the adapter is a checkpoint, whose folder is named like step_000020
        step = int(model.adapter.name.partition("_")[2])
        served_name = f"{model.run_id}@step{step}"
    return LocalJudge(ref, served_name, model, weights, adapter)


def local_judges(home: Home, refs: Iterable[str]) -> list[LocalJudge]:
    """Find the models of this home among the judges `refs`. Raises UserError as `local_judge`
    does."""
    return [local_judge(home, ref) for ref in refs if is_local(ref)]


def serve(home: Home, judge: LocalJudge, seconds: float = START_S) -> Address:
    """Return the address (URL and key) at which a deployment answers for the judge. A deployment is
    started if none does.

    A separate program does both. Its last line of output is JSON: the address, or an error with
    its code, message and hint. Raises UserError DOES_NOT_FIT or DEVICE_BUSY if there is no memory
    for a deployment, DEPLOY_FAILED if it is not ready within `seconds`, and its other errors.
    """
    command = [sys.executable, "-P", *programs.command("locator")]
    arguments = [str(home.root), judge.name, f"{seconds:g}"]
    try:
        program = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds + _GRACE_S,
            env=_variables(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_served(judge, "DEPLOY_FAILED", f"not ready after {seconds:g} s", "") from error
    reply = _last_object(program.stdout)
    if "url" in reply:
        return Address(str(reply["url"]), str(reply["key"]))
    if "code" in reply:
        raise _not_served(judge, str(reply["code"]), str(reply["message"]), str(reply["hint"]))
    reason = program.stderr.strip()[-_STDERR_CHARS:] or "it said nothing"
    raise _not_served(judge, "DEPLOY_FAILED", reason, "")


def _variables() -> Mapping[str, str]:
    """Return the environment variables for the program that starts a deployment: those of this
    process without HONESMITH_LIFELINE_FD. A process with that variable ends when the trainer ends,
    but a deployment goes on."""
    return {name: value for name, value in os.environ.items() if name != "HONESMITH_LIFELINE_FD"}


def _last_object(text: str) -> JsonObject:
    """Return the JSON object in the last line of a text; {} if there is none."""
    lines = text.strip().splitlines() or [""]
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _not_served(judge: LocalJudge, code: str, reason: str, hint: str) -> UserError:
    """Make the error for a judge that no deployment answers for. An empty `hint` stands for the
    usual one."""
    return UserError(
        code,
        f"the judge {judge.ref} is not served: {reason}",
        hint=hint or "Deploy it by hand to see what is wrong: `honesmith deploy`.",
        retryable=True,
    )
