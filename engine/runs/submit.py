"""Queuing work: a training run, an evaluation, a probe.

Everything is resolved and refused here, before a row exists: a run that is queued can start. The
run's folder is durable before its row is, so a row never points at nothing, and the whole takes
well under a second because nothing here loads a model.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.core import crash, hardware
from engine.core.errors import UserError
from engine.core.files import read_json, sync_folder, write_json
from engine.cost import estimate
from engine.curation.sources import stored_answers
from engine.environments import env_facts, registry
from engine.environments.registry import EnvRecord
from engine.home.database import tells_of_the_disk
from engine.home.progress import write_status
from engine.home.rows import NewRun, RunRow, taken_as
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.install import vllm_env
from engine.models import catalog, hub
from engine.models.catalog import ModelRef
from engine.processes import launcher, outcome
from engine.records.settings import EvaluationSettings, GRPOSettings
from engine.runs import contamination, ledger
from engine.runs.admission import (
    DEFAULT_HOURS,
    EVALUATION_WALL_HOURS,
    Afford,
    Playing,
    bad_argument,
    cap_of,
    check_approval,
    check_audit,
    check_cap,
    check_hours_left,
    check_kept,
    check_secrets,
    check_size,
    check_words,
    no_env,
    no_secrets,
    said_of,
    sampling_hours,
    scoring_hours,
)
from engine.settings import resolution
from engine.settings.defaults import SamplingLimits

MAX_MODELS = 8
_EXPECTED = ("", "better", "no_difference")


@tells_of_the_disk
def submit(
    home: Home,
    *,
    env_id: str = "",
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: dict[str, Any] | None = None,
    note: str = "",
    expect: str = "",
    parent: str = "",
    max_gpu_hours: float | None = None,
    request_id: str = "",
    resume: str = "",
    approved: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Queue a training run, or a new attempt of one (`resume`), and start what can start.

    Idempotent by `request_id`. `approved`: a person agreed to a spend above
    `auto_approve_gpu_hours`. `profile`: the worker leaves a trace of two steps. `max_gpu_hours`: of
    this attempt; without one DEFAULT_HOURS, for a resumed run its own. Raises UserError:
    SETTING_*, ENV_*, MODEL_*, BAD_ARGUMENT, REWARD_RISK, BUDGET, NOT_APPROVED, DOES_NOT_FIT,
    DISK_FULL, NO_TORCH, REQUEST_CONFLICT, and for a resume RUN_NOT_FOUND, RUN_STATE.
    """
    settings = dict(settings or {})
    asked = {
        "env_id": env_id,
        "model": model,
        "algorithm": algorithm,
        "settings": settings,
        "note": note,
        "expect": expect,
        "parent": parent,
        "resume": resume,
    }
    cap = DEFAULT_HOURS if max_gpu_hours is None else check_cap(max_gpu_hours)
    body = asked | {"max_gpu_hours": cap}
    check_words(note=note, request_id=request_id)
    if expect not in _EXPECTED:
        raise bad_argument("expect", expect, 'Say "better", "no_difference" or nothing.')
    if resume and profile:
        raise bad_argument("profile", True, "A resumed run goes on as it was; leave it out.")
    with Store(home) as store:
        known = store.requested_run(request_id, body)
        if known is not None:
            launcher.reap(home)
            return _answer(home, store.get_run(known.run_id), ["this request was answered before"])
        if resume:
            return _resume(home, store, asked, body, max_gpu_hours, request_id)
        new, content, link = _plan_training(home, store, asked, cap, approved)
        record = registry.find_env(home, content["env_id"])
        shared = contamination.of_training(home, record, content["model"])
        if profile:
            content["profile"] = True
        content["warnings"] += contamination.said_of(shared)
        row = store.insert_run(
            _with_request(new, request_id, body),
            _writer(home, content, [link] if link else [], shared),
        )
    crash.point("submit.committed")
    return _started(home, row, content.pop("warnings"))


@tells_of_the_disk
def submit_evaluation(
    home: Home,
    *,
    env_id: str,
    models: Sequence[str] = (),
    split: str = "heldout",
    rows: int = 100,
    attempts: int = 1,
    settings: dict[str, Any] | None = None,
    regrade: str = "",
    afford: Afford | None = None,
) -> dict[str, Any]:
    """Queue an evaluation of up to eight models on the same tasks, or with `regrade` the scoring
    of that run's stored answers by this environment, without any model.

    `afford` gives it a cap on device hours, to which it is held. Raises UserError.
    """
    if regrade:
        return _submit_regrade(
            home, env_id, regrade, models, split, rows, attempts, settings, afford
        )
    _check_evaluation(models, split, rows, attempts)
    launcher.worker_python(home)
    record = _scored_env(home, env_id, "evaluated")
    found = [catalog.resolve_model(home, ref) for ref in models]
    for ref in found:
        _runnable(ref)
    resolved, facts = _sampling(home, record, found, settings or {}, attempts)
    settings_of = EvaluationSettings(**resolved.settings.model_dump(), max_length=_room(found))
    links = [(ref.adapter, index) for index, ref in enumerate(found) if ref.adapter is not None]
    content = {
        "kind": "evaluate",
        "algorithm": "evaluate",
        "env_id": record.env_id,
        "env_dir": str(record.dir),
        "models": [_model_entry(ref) for ref in found],
        "split": split,
        "rows": rows,
        "attempts": attempts,
        "settings": settings_of.model_dump(),
        "sources": resolved.sources,
        "regrade": "",
        "wall_limit_hours": EVALUATION_WALL_HOURS,
    }
    have = facts.heldout_rows if split == "heldout" else facts.train_rows
    limits = SamplingLimits(settings_of.max_tokens, settings_of.max_turns, settings_of.max_length)
    plays = Playing(limits, facts, min(rows, have), attempts)
    cap = cap_of(home, afford, lambda: sampling_hours(home, found, plays))
    content["max_gpu_hours"] = cap
    named = ", ".join(models)
    new = NewRun(
        *(f"{record.name}-eval", "evaluate", "evaluate", record.env_id, named), max_gpu_hours=cap
    )
    warnings = [*registry.prefix_meant(env_id, record), *resolved.warnings, *said_of(cap)]
    if rows > have:
        warnings.append(f"the {split} split has {have} rows; all of them are used")
    shared = contamination.of_models(home, record, models) if split == "heldout" else None
    warnings += contamination.said_of(shared)
    with Store(home) as store:
        row = store.insert_run(new, _writer(home, content, links, shared))
    answer = _started(home, row, warnings)
    return answer | {"models": list(models), "rows": min(rows, have), "attempts": attempts}


def _submit_regrade(
    home: Home,
    env_id: str,
    regrade: str,
    models: Sequence[str],
    split: str,
    rows: int,
    attempts: int,
    settings: dict[str, Any] | None,
    afford: Afford | None,
) -> dict[str, Any]:
    """Queue the scoring of a run's stored answers by another environment version."""
    given = [("models", models, []), ("attempts", attempts, 1), ("settings", settings, {})]
    for name, value, default in given:
        if value and value != default:
            raise bad_argument(
                name, value, "regrade scores the answers that are stored; leave it out."
            )
    if split not in ("heldout", "train"):
        raise bad_argument("split", split, 'Use "heldout" or "train".')
    if rows < 1:
        raise bad_argument("rows", rows, "Give a number of tasks from 1.")
    record = _scored_env(home, env_id, "regraded")
    stored = stored_answers(home, regrade, split)
    content = {
        "kind": "evaluate",
        "algorithm": "regrade",
        "env_id": record.env_id,
        "env_dir": str(record.dir),
        "models": [{"ref": ref, "rows": path} for ref, path in stored.models],
        "split": split,
        "rows": rows,
        "attempts": stored.attempts,
        "settings": stored.sampling,
        "sources": {},
        "regrade": stored.run_id,
        "regraded_from": stored.env_id,
        "wall_limit_hours": EVALUATION_WALL_HOURS,
    }
    refs = [ref for ref, _ in stored.models]
    scored = min(rows, stored.tasks) * stored.attempts * len(refs)
    cap = cap_of(home, afford, lambda: scoring_hours(record, scored))
    content["max_gpu_hours"] = cap
    named = ", ".join(refs)
    new = NewRun(
        *(f"{record.name}-regrade", "evaluate", "regrade", record.env_id, named), max_gpu_hours=cap
    )
    warnings = [*registry.prefix_meant(env_id, record), *stored.warnings, *said_of(cap)]
    warnings += taken_as("regrade", regrade, stored.run_id)
    if stored.tasks > rows:
        warnings.append(f"{rows} of the {stored.tasks} stored tasks are scored; rows takes more")
    shared = contamination.of_models(home, record, refs) if split == "heldout" else None
    warnings += contamination.said_of(shared)
    with Store(home) as store:
        row = store.insert_run(new, _writer(home, content, [], shared))
    answer = _started(home, row, warnings)
    return answer | {"models": refs, "rows": min(rows, stored.tasks), "regrade": stored.run_id}


@tells_of_the_disk
def submit_probe(
    home: Home,
    *,
    env_id: str,
    model: str,
    settings: dict[str, Any] | None,
    samples: int,
    afford: Afford | None = None,
) -> dict[str, Any]:
    """Queue a short run that samples `samples` tasks `group_size` times each.

    The same probe asked for again is the run that was made first, with its `result` once it is
    done; after a failed one a new run is queued. Raises UserError.
    """
    launcher.worker_python(home)
    record = _scored_env(home, env_id, "probed")
    ref = catalog.resolve_model(home, model)
    _runnable(ref)
    facts = env_facts.env_facts(home, record, ref.base_path)
    machine = hardware.detect(home.root)
    # A probe samples for seconds; vLLM would take longer to start.
    given = {name: value for name, value in (settings or {}).items() if name != "sampler"}
    resolved = resolution.resolve("grpo", given, model=ref.facts, env=facts, hardware=machine)
    asked = resolved.settings
    assert isinstance(asked, GRPOSettings)
    content = {
        "kind": "probe",
        "algorithm": "probe",
        "env_id": record.env_id,
        "env_dir": str(record.dir),
        "models": [_model_entry(ref)],
        "samples": int(samples),
        "settings": asked.model_dump(),
        "sources": resolved.sources,
        "wall_limit_hours": EVALUATION_WALL_HOURS,
    }
    key = f"probe-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]}"
    limits = SamplingLimits(asked.max_tokens, asked.max_turns, asked.max_length)
    plays = Playing(limits, facts, min(samples, facts.train_rows), asked.group_size)
    links = [(ref.adapter, 0)] if ref.adapter is not None else []
    with Store(home) as store:
        request_id, row = _probe_made(store, key)
        if row is None:  # one that was made before costs nothing more
            cap = cap_of(home, afford, lambda: sampling_hours(home, [ref], plays))
            content["max_gpu_hours"] = cap
            named = (f"{record.name}-probe", "probe", "probe", record.env_id, model)
            new = _with_request(NewRun(*named, max_gpu_hours=cap), request_id, {"probe": key})
            row = store.insert_run(new, _writer(home, content, links))
    answer = _started(home, row, [*resolved.warnings, *said_of(row.max_gpu_hours)])
    if row.state == "done":
        answer["result"] = read_json(home.run(row.run_id).result)
    return answer


def _plan_training(
    home: Home, store: Store, asked: dict[str, Any], max_gpu_hours: float, approved: bool
) -> tuple[NewRun, dict[str, Any], tuple[Path, None] | None]:
    """The row, the content of config.json and the adapter to link; refuses what cannot run."""
    algorithm = asked["algorithm"]
    resolution.check_algorithm(algorithm)
    if not asked["env_id"]:
        raise no_env()
    launcher.worker_python(home)
    record = registry.find_env(home, asked["env_id"])
    ref = catalog.resolve_model(home, asked["model"])
    _runnable(ref)
    machine = hardware.detect(home.root)
    facts = env_facts.env_facts(
        home, record, ref.base_path, thinking=bool(asked["settings"].get("thinking"))
    )
    resolved = resolution.resolve(
        algorithm,
        asked["settings"],
        model=ref.facts,
        env=facts,
        hardware=machine,
        inherited=ref.adapter_facts,
        vllm=vllm_env.find_python(home) is not None,
    )
    download = hub.missing_bytes(ref.base_path)
    figures = estimate.estimate(
        home, resolved, ref.facts, facts, machine, download=download, base_path=ref.base_path
    )
    warnings = [*registry.prefix_meant(asked["env_id"], record), *resolved.warnings]
    check_secrets(record)
    registry.env_python(record)
    launcher.require_quantizer(home, resolved.settings.quantization)
    warnings += check_audit(record, resolved.settings)
    check_size(figures, machine.disk_free)
    check_hours_left(home, store)
    call = {name: asked[name] for name in ("env_id", "model", "algorithm", "settings")}
    warnings += estimate.check_budget(home, store, figures, max_gpu_hours, call)
    check_approval(home, figures, approved)
    parent = store.get_run(asked["parent"]).run_id if asked["parent"] else ""
    warnings += taken_as("parent", asked["parent"], parent)
    content: dict[str, Any] = {
        "kind": "train",
        "algorithm": algorithm,
        "env_id": record.env_id,
        "env_dir": str(record.dir),
        "model": ref.ref,
        "base": {"ref": ref.base_ref, "path": str(ref.base_path)},
        "start_adapter": None,
        "settings": resolved.settings.model_dump(),
        "sources": resolved.sources,
        "note": asked["note"],
        "expect": asked["expect"],
        "parent": parent,
        "max_gpu_hours": max_gpu_hours,
        "estimate": figures,
        "device": machine.device.id,
    }
    content["warnings"] = warnings + ledger.cautions(home, store, content)
    new = NewRun(
        name=f"{record.name}-{algorithm}",
        kind="train",
        algorithm=algorithm,
        env_id=record.env_id,
        model=ref.ref,
        note=asked["note"],
        expect=asked["expect"],
        parent=parent,
        max_gpu_hours=max_gpu_hours,
        estimated_hours=figures["gpu_hours"]["likely"],
    )
    return new, content, (ref.adapter, None) if ref.adapter is not None else None


def _resume(
    home: Home,
    store: Store,
    asked: dict[str, Any],
    body: dict[str, Any],
    max_gpu_hours: float | None,
    request_id: str,
) -> dict[str, Any]:
    fresh = {"env_id": "", "model": "pebble", "algorithm": "grpo", "settings": {}, "note": ""}
    fresh |= {"expect": "", "parent": ""}
    extra = [name for name, value in fresh.items() if asked[name] != value]
    if extra:
        raise UserError(
            "BAD_ARGUMENT",
            f"resume continues a run as it was, so {', '.join(extra)} cannot be given",
            hint="Beside resume only max_gpu_hours and request_id count. For other settings submit "
            "a new run.",
            field=extra[0],
        )
    launcher.worker_python(home)
    launcher.reap(home)
    row = store.get_run(asked["resume"])
    run = home.run(row.run_id)
    missing = launcher.missing_secrets(run)
    if missing:
        raise no_secrets(missing, row.env_id)
    check_hours_left(home, store)
    saved = outcome.checkpoint_name(run)
    own = row.max_gpu_hours or DEFAULT_HOURS
    row = store.resume_run(
        row.run_id,
        max_gpu_hours=own if max_gpu_hours is None else body["max_gpu_hours"],
        request_id=request_id,
        body=body,
        check=lambda: check_kept(run),
    )
    from_where = f"continues from {saved}" if saved else "starts again from step 0"
    outcome.note_event(run, "resumed_by_request", from_where, attempt=row.attempt)
    warnings = taken_as("resume", asked["resume"], row.run_id)
    if not saved:
        warnings.append("no checkpoint was complete: the run starts again from step 0")
    answer = _started(home, row, warnings)
    return answer | {"attempt": row.attempt, "resumed_from": saved}


def _writer(
    home: Home,
    content: dict[str, Any],
    adapters: Sequence[tuple[Path, int | None]],
    shared: dict[str, Any] | None = None,
) -> Callable[[str], None]:
    """What makes a run's folder durable, called with the id just before the row is written.

    `shared`: which held-out tasks the training rows of the run's models hold.
    """

    def write(run_id: str) -> None:
        if content.get("regrade"):
            check_kept(home.run(content["regrade"]), "regrade")
        run = home.run(run_id)
        run.create()
        crash.point("submit.folder")
        body = {"run_id": run_id, **content}
        body.pop("warnings", None)
        for source, index in adapters:
            if index is None:
                body["start_adapter"] = str(_link_folder(source, run.start_adapter))
            else:
                models = [dict(entry) for entry in body["models"]]
                models[index]["adapter"] = str(_link_folder(source, run.model_adapter(index)))
                body["models"] = models
        if shared is not None:
            write_json(run.contamination, shared)
        write_json(run.config, body)
        sync_folder(home.runs)
        crash.point("submit.config")

    try:
        json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise bad_argument("settings", "NaN", "Numbers must be finite.") from error
    return write


def _link_folder(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that lives as long as the run: hard links where the disk can.

    The run it comes from may tidy its checkpoints away while this one waits.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(source):
        try:
            os.link(source / name, target / name)
        except FileExistsError:
            continue
        except OSError:
            shutil.copy2(source / name, target / name)
    sync_folder(target)
    return target


def _started(home: Home, row: RunRow, warnings: list[str]) -> dict[str, Any]:
    with Store(home) as store:
        write_status(home.run(row.run_id), row)
        launcher.reap(home)
        return _answer(home, store.get_run(row.run_id), warnings)


def _answer(home: Home, row: RunRow, warnings: list[str]) -> dict[str, Any]:
    run = home.run(row.run_id)
    content = read_json(run.config)
    with Store(home) as store:
        position = store.queue_position(row.run_id)
    where = f"queued at position {position}" if row.state == "queued" else row.state
    if row.state == "queued" and (missing := launcher.missing_secrets(run)):
        warnings = [*warnings, f"it waits for a server that has the secrets {', '.join(missing)}"]
    return {
        "run_id": row.run_id,
        "state": row.state,
        "queue_position": position,
        "estimate": estimate.shown(content.get("estimate") or {}),
        "settings_changed_from_parent": _changes(home, content),
        "metrics_uri": f"run://{row.run_id}/metrics",
        "summary": f"{row.run_id} is {where}.",
        "next": [{"tool": "wait_run", "arguments": {"run_id": row.run_id}}],
        "warnings": warnings,
    }


def _changes(home: Home, content: dict[str, Any]) -> dict[str, Any]:
    """Settings, model, env and algorithm that differ from the parent: {"name": [its, ours]}."""
    if not content.get("parent"):
        return {}
    try:
        parent = read_json(home.run(content["parent"]).config)
    except (OSError, ValueError):
        return {}
    ours, its = dict(content["settings"]), dict(parent.get("settings") or {})
    for name in ("algorithm", "model", "env_id"):
        ours[name], its[name] = content.get(name), parent.get(name)
    names = [name for name in {**its, **ours} if its.get(name) != ours.get(name)]
    return {name: [its.get(name), ours.get(name)] for name in names}


def _check_evaluation(models: Sequence[str], split: str, rows: int, attempts: int) -> None:
    if not 1 <= len(models) <= MAX_MODELS:
        raise bad_argument("models", len(models), f"Name 1 to {MAX_MODELS} models.")
    if len(set(models)) < len(models):
        raise bad_argument(
            "models", list(models), "Name every model once; attempts repeats the tasks."
        )
    if split not in ("heldout", "train"):
        raise bad_argument("split", split, 'Use "heldout" or "train".')
    if rows < 1:
        raise bad_argument("rows", rows, "Give a number of tasks from 1.")
    if not 1 <= attempts <= 64:
        raise bad_argument("attempts", attempts, "Use 1 (greedy) to 64 (sampled).")


def _scored_env(home: Home, env_id: str, what: str) -> EnvRecord:
    record = registry.find_env(home, env_id)
    if not record.scored:
        raise UserError(
            "ENV_INVALID",
            f"{record.env_id} scores nothing, so no model can be {what} on it",
            hint="Give the environment a score function, or judge on another one.",
            field="env_id",
        )
    check_secrets(record)
    registry.env_python(record)
    return record


def _sampling(
    home: Home, record: EnvRecord, found: list[ModelRef], settings: dict[str, Any], attempts: int
) -> tuple[resolution.ResolvedSampling, env_facts.EnvFacts]:
    """Sampling settings that fit every model; the room is that of the smallest."""
    first = min(found, key=lambda ref: ref.facts.max_positions)
    facts = env_facts.env_facts(
        home, record, first.base_path, thinking=bool(settings.get("thinking"))
    )
    resolved = resolution.resolve_sampling(
        settings, model=first.facts, env=facts, attempts=attempts
    )
    return resolved, facts


def _room(found: list[ModelRef]) -> int:
    return min(ref.facts.max_positions for ref in found)


def _model_entry(ref: ModelRef) -> dict[str, Any]:
    adapter = str(ref.adapter) if ref.adapter is not None else None
    return {"ref": ref.ref, "base_path": str(ref.base_path), "adapter": adapter}


def _runnable(ref: ModelRef) -> None:
    if not ref.base_path.is_dir():
        raise UserError(
            "MODEL_NOT_FOUND",
            f"the files of {ref.base_ref} are not at {ref.base_path}",
            hint="Put them back, or use another model; get_status scope=models lists usable ones.",
            field="model",
        )


def _probe_made(store: Store, key: str) -> tuple[str, RunRow | None]:
    for request_id in (f"{key}-{attempt}" for attempt in range(1000)):
        row = store.requested_run(request_id, {"probe": key})
        if row is None or row.state not in ("failed", "cancelled"):
            return request_id, row
    raise UserError("RUN_STATE", "this probe failed 1000 times", hint="Read the log of one.")


def _with_request(new: NewRun, request_id: str, body: dict[str, Any]) -> NewRun:
    values = {name: getattr(new, name) for name in new.__dataclass_fields__}
    return NewRun(**(values | {"request_id": request_id, "body": body}))
