"""Queuing a probe: a short run that samples a model, to see whether there is something to learn."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json
from engine.core.reply import Reply
from engine.cost.evaluation_cost import Asking
from engine.environments import env_facts
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.home.database import reports_unwritable_disk
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.records.settings import GRPOSettings
from engine.runs.submit.admission import (
    EVALUATION_WALL_HOURS,
    CapFunction,
    cap_of,
    cap_warnings,
    require_files,
    sampling_hours,
    scored_env,
)
from engine.runs.submit.evaluation import model_entry
from engine.runs.submit.queued import start_and_reply
from engine.runs.submit.requests import ProbeRequest
from engine.runs.submit.run_folder import RunFiles, adapters_of
from engine.settings import resolution
from engine.settings.defaults import SamplingLimits

_MAX_RUNS = 1000  # the most runs of one probe; each is made because the one before failed


@dataclass(frozen=True)
class _Plan:
    """A probe with everything resolved.

    Attributes:
        record: the environment version whose tasks are asked.
        model: the model that is sampled.
        facts: the measured lengths of the environment's tasks, in the model's tokens.
        resolved: the settings, where each comes from, and warnings about them.
    """

    record: EnvRecord
    model: ModelRef
    facts: EnvFacts
    resolved: resolution.Resolved


@reports_unwritable_disk
def submit_probe(
    home: Home, request: ProbeRequest, cap_function: CapFunction | None = None
) -> Reply:
    """Queue a short run in which the model answers `request.samples` tasks `group_size` times each.

    Returns the reply about the run. If the same probe was made before, nothing is queued, and the
    reply is about the earlier run, with its `result` if it is done.

    Args:
        cap_function: takes the most device hours that the run may need, and returns the hours that
            the quota of the caller's key allows. None if no quota applies.

    Raises UserError: ENV_*, MODEL_*, SETTING_*, NO_TORCH, QUOTA, BUDGET, NOT_APPROVED, RUN_STATE.
    """
    launcher.worker_python(home)  # raises NO_TORCH if no Python here can run a model
    plan = _resolve_plan(home, request)
    with Store(home) as store:
        row = _earlier_or_new_run(home, store, request, plan, cap_function)
    warnings = [*plan.resolved.warnings, *cap_warnings(row.max_gpu_hours)]
    reply = start_and_reply(home, row, warnings)
    if row.state == "done":
        reply["result"] = read_json(home.run(row.run_id).result)
    return reply


def _earlier_or_new_run(
    home: Home,
    store: Store,
    request: ProbeRequest,
    plan: _Plan,
    cap_function: CapFunction | None,
) -> RunRow:
    """Return the row of the run that made this probe before, or else queue a new run.

    `plan` is the probe with everything resolved, `cap_function` the quota of the caller's key (None
    for none).

    Raises UserError QUOTA, BUDGET, NOT_APPROVED or RUN_STATE.
    """
    config = _config_content(request, plan)
    key = _key_of(config)  # the same for the same probe
    # What the database stores as the arguments of the request, to recognise it later.
    body = {"probe": key}
    request_id, row = _earlier_probe(store, key, body)
    if row is not None:
        return row  # an existing probe costs nothing more, so the quota is not checked
    cap = _hours_cap(home, request, plan, cap_function)
    files = RunFiles({**config, "max_gpu_hours": cap}, model_adapters=adapters_of([plan.model]))
    new_run = replace(_new_run(request, plan.record, cap), request_id=request_id, body=body)
    return store.insert_run(new_run, files.writer(home))


def _resolve_plan(home: Home, request: ProbeRequest) -> _Plan:
    """Find the environment and the model of a probe (a short run that samples a model), and choose
    the settings.

    Raises UserError: ENV_*, MODEL_*, SETTING_*.
    """
    record = scored_env(home, request.env_id, "probed")
    model = catalog.resolve_model(home, request.model)
    require_files(model)
    facts = env_facts.env_facts(home, record, model.base_path)
    return _Plan(record, model, facts, _resolve_settings(home, request, model, facts))


def _hours_cap(
    home: Home, request: ProbeRequest, plan: _Plan, cap_function: CapFunction | None
) -> float:
    """Return the most device hours that the probe `plan` may take; 0 for no cap.

    `cap_function` is the quota of the caller's key, None if no quota applies.

    Raises UserError QUOTA, BUDGET or NOT_APPROVED.
    """
    work = _sampling_work(request, plan)
    # A function, because the hours are estimated only if a cap is needed.
    return cap_of(home, cap_function, lambda: sampling_hours(home, [plan.model], work).high)


def _new_run(request: ProbeRequest, record: EnvRecord, cap: float) -> NewRun:
    """Make the row that the database stores of the probe, without `request_id` and `body`.

    `cap` is the most device hours that the probe may take, 0 for no cap.
    """
    return NewRun(
        name=f"{record.name}-probe",
        kind="probe",
        algorithm="probe",
        env_id=record.env_id,
        model=request.model,
        max_gpu_hours=cap,
    )


def _resolve_settings(
    home: Home, request: ProbeRequest, model: ModelRef, facts: EnvFacts
) -> resolution.Resolved:
    """Choose the settings of the probe as for GRPO; return the values and the source of each.

    Raises UserError SETTING_* if a given setting does not exist or has an unusable value.
    """
    machine = hardware.detect(home.root)
    # Always our own sampler: a probe samples for seconds, and vLLM takes longer only to start.
    settings_but_sampler = {
        name: value for name, value in request.settings.items() if name != "sampler"
    }
    return resolution.resolve(
        "grpo", settings_but_sampler, model=model.facts, env=facts, hardware=machine
    )


def _sampling_work(request: ProbeRequest, plan: _Plan) -> Asking:
    """Describe how much the model of the probe `plan` has to sample, from which the device hours
    are estimated."""
    settings = plan.resolved.settings
    assert isinstance(settings, GRPOSettings)  # because `_resolve_settings` resolved "grpo"
    return Asking(
        SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length),
        plan.facts,
        rows=min(request.samples, plan.facts.train_rows),
        attempts=settings.group_size,
    )


def _config_content(request: ProbeRequest, plan: _Plan) -> Mapping[str, object]:
    """Make the content of config.json of the probe `plan`, without the run's id and its cap on
    device hours.

    These two keys are left out because they differ between equal probes (`_key_of`).
    """
    return {
        "kind": "probe",
        "algorithm": "probe",
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        "models": [model_entry(plan.model)],
        "samples": int(request.samples),
        "settings": plan.resolved.settings.model_dump(),
        "sources": plan.resolved.sources,
        "wall_limit_hours": EVALUATION_WALL_HOURS,
    }


def _key_of(config: Mapping[str, object]) -> str:
    """Return a key such as "probe-1f0a..." that is the same for equal probes.

    `config` is what `_config_content` returns. The key is made of its hash.
    """
    config_hash = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"probe-{config_hash[:24]}"


def _earlier_probe(store: Store, key: str, body: Mapping[str, str]) -> tuple[str, RunRow | None]:
    """Return (request id, run) of the first try of a probe that neither failed nor was cancelled.

    Each try of a probe has its own request id: `key` and the number of the try. The run is None if
    that try was not queued yet; the caller then queues it under the request id.

    Args:
        key: identifies the probe, from `_key_of`.
        body: what the database stores as the arguments of the request.

    Raises UserError RUN_STATE if `_MAX_RUNS` tries have failed or were cancelled.
    """
    for number in range(_MAX_RUNS):
        request_id = f"{key}-{number}"
        row = store.requested_run(request_id, body)
        if row is None or row.state not in ("failed", "cancelled"):  # a free id, or a run to use
            return request_id, row
    raise UserError(
        "RUN_STATE", f"this probe failed {_MAX_RUNS} times", hint="Read the log of one."
    )
