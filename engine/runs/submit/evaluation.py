"""Queuing an evaluation: up to eight models answer the same tasks."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.core import hardware as machine
from engine.core.errors import UserError
from engine.core.format import counted, whole_percent, words
from engine.core.hints import Call, Change, Hint
from engine.core.reply import Reply
from engine.core.wording.kinds import KINDS
from engine.cost.evaluation_cost import Asking, EndpointCost, endpoint_cost
from engine.cost.plan_total import NO_HOURS
from engine.endpoints import checks as endpoint_checks
from engine.endpoints.references import entry_of, is_endpoint
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.home.database import reports_unwritable_disk
from engine.home.owner_marks import seal_in
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.models.catalog import ModelRef
from engine.records.estimate import Range
from engine.records.settings import EvaluationSettings, SamplingSettings
from engine.runs.evaluation.exam import size_of, tasks_asked
from engine.runs.submit import contamination
from engine.runs.submit.admission import (
    EVALUATION_WALL_HOURS,
    CapFunction,
    bad_argument,
    cap_of,
    cap_warnings,
    require_files,
    sampling_hours,
    scored_env,
)
from engine.runs.submit.queued import start_and_reply
from engine.runs.submit.regrading import check_tasks, submit_regrade
from engine.runs.submit.requests import EvaluationRequest
from engine.runs.submit.run_folder import RunFiles, adapters_of, awaited_of
from engine.settings import resolution, start_models
from engine.settings.defaults import SamplingLimits

MAX_MODELS = 8  # the most models of one evaluation
_MAX_ATTEMPTS = 64  # the most answers of a model to one task


@dataclass(frozen=True)
class Tasks:
    """The tasks that an evaluation asks.

    Attributes:
        available: how many tasks the split has.
        indices: the positions in the split that the request names; [] if it names none.
        used: how many tasks are asked.
    """

    available: int
    indices: list[int]
    used: int


@dataclass(frozen=True)
class ResolvedEvaluation:
    """An evaluation with everything resolved.

    Attributes:
        record: the environment version whose tasks are asked.
        models: the models that answer.
        resolved: the sampling settings, where each comes from, and warnings about them.
        settings: the same settings with the longest sequence that every model can read.
        tasks: the tasks that are asked.
        hours: the estimated device hours of the evaluation.
        cap: the most device hours that the run may take, 0 for no cap.
        endpoint_cost: the estimated calls, tokens and money of models behind a URL; None if no
            such model is asked.
    """

    record: EnvRecord
    models: list[ModelRef]
    resolved: resolution.ResolvedSampling
    settings: EvaluationSettings
    tasks: Tasks
    hours: Range
    cap: float
    endpoint_cost: EndpointCost | None = None


@reports_unwritable_disk
def submit_evaluation(
    home: Home, request: EvaluationRequest, cap_function: CapFunction | None = None
) -> Reply:
    """Queue an evaluation of up to eight models on the same tasks; return the reply about it.

    If `request.regrade` names a run, queue the scoring of that run's stored answers instead.

    Args:
        cap_function: takes the most device hours that the run may need, and returns the hours that
            the quota of the caller's key allows. None if no quota applies.

    Raises UserError: BAD_ARGUMENT, ENV_*, MODEL_*, SETTING_*, NO_TORCH, QUOTA, BUDGET,
    NOT_APPROVED; for `regrade` also RUN_NOT_FOUND, RUN_STATE, NO_EVALUATION.
    """
    if request.regrade:
        return submit_regrade(home, request, cap_function)
    check_request(request)
    models = [start_models.model_to_ask(home, ref) for ref in request.models]
    if _local_models(models):
        launcher.worker_python(home)  # raises NO_TORCH if no Python here can run a model

    def allowed_hours(needed_hours: float) -> float:
        """Return how many of the device hours the evaluation may take; 0 for no cap."""
        return cap_of(home, cap_function, lambda: needed_hours)

    plan = resolve(home, request, models, allowed_hours)
    warnings = warnings_of(home, request, plan)
    report = contamination.compare_evaluation(home, plan.record, request.models, request.split)
    files = files_of(config_of(request, plan), plan, report)
    if files.contamination is not None:
        warnings += files.contamination.warnings
    with Store(home) as store:
        row = store.insert_run(new_run(request, plan), files.writer(home))
    reply = start_and_reply(home, row, warnings)
    endpoint_figures = plan.endpoint_cost.to_json() if plan.endpoint_cost else {}
    return reply | {
        "models": list(request.models),
        "rows": plan.tasks.used,
        "attempts": request.attempts,
        "estimate": {
            "gpu_hours": round(plan.hours.high, 4),
            "hours": plan.hours.to_json(),
            **endpoint_figures,
        },
        "summary": f"{reply['summary'].removesuffix('.')}: {_time_in_words(plan)}. "
        f"{tasks_in_words(request, plan)}".strip(),
    }


def tasks_in_words(request: EvaluationRequest, plan: ResolvedEvaluation) -> str:
    """Say how many of the split's tasks an evaluation (`plan`) asks, and for several models what
    these can show.

    For example "Asks 100 of 240 heldout tasks (rows=240 asks all); 100 tasks show a difference of
    14 points or more (80 % power)." Returns "" if there is nothing to say.
    """
    tasks = plan.tasks
    parts = []
    if tasks.used < tasks.available and not tasks.indices:
        parts.append(
            f"asks {tasks.used} of {tasks.available:,} {request.split} tasks "
            f"(rows={tasks.available} asks all)"
        )
    is_comparison = len(plan.models) > 1 and request.split != "train"
    if is_comparison and seal_in(plan.record.dir) is None:  # no word about a sealed exam's tasks
        pool = registry.read_tasks(plan.record, request.split)
        asked_tasks, _ = tasks_asked(plan.record, request.split, pool, request.rows, tasks.indices)
        parts.append(size_of(plan.record, asked_tasks).in_words())
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""  # capitalize() would lower the rest


def estimate_endpoint(home: Home, request: EvaluationRequest) -> Reply:
    """Estimate the calls, tokens and money of an evaluation of models behind a URL.

    Nothing is queued. Returns the reply with the estimate. Raises UserError BAD_ARGUMENT, ENV_*,
    MODEL_* or SETTING_* for the same requests as `submit_evaluation`.
    """
    check_request(request)
    models = [start_models.model_to_ask(home, ref) for ref in request.models]
    plan = resolve(home, request, models, lambda _hours: 0.0)  # no cap: nothing is queued
    cost = plan.endpoint_cost.to_json() if plan.endpoint_cost else {}
    arguments: dict[str, object] = {"env_id": plan.record.env_id, "models": list(request.models)}
    if request.settings:
        arguments["settings"] = dict(request.settings)
    return {
        "summary": f"An evaluation, as {', '.join(request.models)} answers behind a URL: "
        f"{_time_in_words(plan)}.",
        "fits": True,
        "basis": "prices of config.toml",
        "rows": plan.tasks.used,
        **cost,
        "next": [Call("evaluate", arguments).to_json()],
        "warnings": warnings_of(home, request, plan),
    }


def _time_in_words(plan: ResolvedEvaluation) -> str:
    """Say how many models and tasks the evaluation `plan` has, and how long it is likely to take.

    For example "2 models, 100 tasks, about 3 min (2 min to 6 min)". Models behind a URL add their
    cost; the time is left out if no model is loaded here.
    """
    hours = plan.hours
    work = f"{counted(len(plan.models), 'model')}, {counted(plan.tasks.used, 'task')}"
    if plan.endpoint_cost is not None:
        work += f", {plan.endpoint_cost.in_words()}"
    if not _local_models(plan.models):
        return work
    return f"{work}, about {words(hours.likely)} ({words(hours.low)} to {words(hours.high)})"


def files_of(
    config: Mapping[str, object],
    plan: ResolvedEvaluation,
    report: contamination.Contamination | None,
) -> RunFiles:
    """Collect the content of the run's folder.

    Args:
        config: the content of config.json.
        plan: the evaluation; the adapters of its models are put into the folder.
        report: which of the held-out tasks the models were trained on; None if that was not
            examined.
    """
    return RunFiles(
        config,
        model_adapters=adapters_of(plan.models),
        awaited=awaited_of(plan.models),
        contamination=report,
    )


def resolve(
    home: Home,
    request: EvaluationRequest,
    models: list[ModelRef],
    cap_of_hours: Callable[[float], float],
) -> ResolvedEvaluation:
    """Find the environment of an evaluation, choose tasks and settings, and limit the device hours.

    Args:
        models: the models that the references in the request name.
        cap_of_hours: takes the most device hours that the evaluation may need, and returns the
            hours that it is allowed; 0 for no cap.

    Raises UserError: BAD_ARGUMENT, ENV_*, MODEL_*, SETTING_*, QUOTA, BUDGET, NOT_APPROVED.
    """
    record = scored_env(home, request.env_id, "evaluated", sealed=True)
    _refuse_part_of_exam(request, record)
    local_models = _local_models(models)
    for model in local_models:
        require_files(model)
    endpoint_checks.check(models, request.settings, record.kind, rewords=bool(request.kinds))
    resolved, facts = _resolve_sampling(home, record, models, request)
    tasks = _chosen_tasks(request, record)
    settings = _with_max_length(resolved.settings, models)
    # Each task is asked once as it is, and once more for each kind of other words (`perturb`).
    answers_per_task = request.attempts * (1 + len(request.kinds))
    work = _sampling_work(settings, facts, tasks, answers_per_task)
    hours = sampling_hours(home, local_models, work) if local_models else NO_HOURS
    cap = cap_of_hours(hours.high)
    cost = endpoint_cost(models, work)
    return ResolvedEvaluation(record, models, resolved, settings, tasks, hours, cap, cost)


def warnings_of(home: Home, request: EvaluationRequest, plan: ResolvedEvaluation) -> list[str]:
    """Return the warnings about an evaluation that is to be queued (`plan`): doubts that are no
    reason to refuse it."""
    return [
        *registry.prefix_warning(request.env_id, plan.record),
        *plan.resolved.warnings,
        *cap_warnings(plan.cap),
        *_short_limit_warnings(home, plan.record, _local_models(plan.models), plan.settings),
        *endpoint_checks.warnings(plan.models, plan.settings),
        *_too_few_tasks(request, plan.tasks),
    ]


def _chosen_tasks(request: EvaluationRequest, record: EnvRecord) -> Tasks:
    """Choose which tasks of the split are asked.

    Raises UserError BAD_ARGUMENT if `task_indices` is not a list of positions, or names a position
    that the split does not have.
    """
    available = record.rows.get(request.split, 0)
    # [] if the request names no positions: then `rows` tasks are used.
    indices = chosen_indices(request.task_indices, available)
    return Tasks(available, indices, used=len(indices) or min(request.rows, available))


def _too_few_tasks(request: EvaluationRequest, tasks: Tasks) -> list[str]:
    """Return a warning if the request asks for more tasks than its split has; otherwise []."""
    if request.rows <= tasks.available or tasks.indices:
        return []
    return [f"the {request.split} split has {tasks.available} rows; all of them are used"]


def _with_max_length(settings: SamplingSettings, models: Sequence[ModelRef]) -> EvaluationSettings:
    """Add to the sampling settings the longest sequence, in tokens, that every model can read."""
    max_length = min(model.facts.max_positions for model in models)
    return EvaluationSettings(**settings.model_dump(), max_length=max_length)


def _sampling_work(
    settings: EvaluationSettings, facts: EnvFacts, tasks: Tasks, attempts: int
) -> Asking:
    """Describe how much each model has to sample; the device hours are estimated from that.

    `facts` holds the measured lengths of the tasks; `attempts` is how often each task is asked,
    with its repetitions in other words.
    """
    limits = SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length)
    return Asking(limits, facts, tasks.used, attempts, settings.score_workers)


def new_run(request: EvaluationRequest, plan: ResolvedEvaluation) -> NewRun:
    """Make the row that the database stores of the evaluation `plan`, which `request` asks for."""
    return NewRun(
        name=f"{plan.record.name}-eval",
        kind="evaluate",
        algorithm="evaluate",
        env_id=plan.record.env_id,
        model=", ".join(request.models),
        max_gpu_hours=plan.cap,
        estimated_hours=plan.hours.high,
        waits_for=_awaited_ids(plan.models),
        gpus=1 if _local_models(plan.models) else 0,
    )


def _local_models(models: Sequence[ModelRef]) -> list[ModelRef]:
    """Return the models that are loaded on a device: all but those behind a URL."""
    return [model for model in models if model.endpoint is None]


def _awaited_ids(models: Sequence[ModelRef]) -> str:
    """Return the ids of the runs that have yet to train one of the models, joined by commas.

    Each id is named once; "" if every model exists.
    """
    run_ids = [model.waits_for for model in models if model.waits_for]
    return ",".join(dict.fromkeys(run_ids))


def config_of(request: EvaluationRequest, plan: ResolvedEvaluation) -> dict[str, object]:
    """Make the content of config.json of the evaluation `plan`, which `request` asks for, without
    the run's id."""
    config: dict[str, object] = {
        "kind": "evaluate",
        "algorithm": "evaluate",
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        "models": [model_entry(model) for model in plan.models],
        "split": request.split,
        "rows": request.rows,
        "attempts": request.attempts,
        "settings": plan.settings.model_dump(),
        "sources": plan.resolved.sources,
        "regrade": "",
        "wall_limit_hours": EVALUATION_WALL_HOURS,
        "max_gpu_hours": plan.cap,
        "estimated_hours": plan.hours.high,
    }
    if request.kinds:
        config["perturb"] = request.kinds
    if plan.tasks.indices:  # [] unless the request names tasks by their positions
        config |= {"task_indices": plan.tasks.indices, "rows": plan.tasks.used}
    return config


def model_entry(model: ModelRef) -> Mapping[str, object]:
    """Make the entry of a model in the list `models` of config.json, of an evaluation or a probe.

    The entry has the keys `ref`, `base_path` and `adapter`; `adapter` is None for a base model. The
    entry of a model behind a URL also has `endpoint`.
    """
    if model.endpoint is not None:
        endpoint = entry_of(model.endpoint).to_json()
        return {"ref": model.ref, "base_path": "", "adapter": None, "endpoint": endpoint}
    adapter = str(model.adapter) if model.adapter is not None else None
    return {"ref": model.ref, "base_path": str(model.base_path), "adapter": adapter}


def chosen_indices(text: str, available: int) -> list[int]:
    """Return the positions that a text such as "0-9,12" names, in order, each once; [] for "".

    Args:
        text: positions from 0, and ranges of them, separated by commas.
        available: how many tasks the split has.

    Raises UserError BAD_ARGUMENT if `text` is not such a list, or if a position is not below
    `available`.
    """
    indices: set[int] = set()
    parts = text.split(",") if text else []  # such as ["0-9", "12"]
    for part in parts:
        positions = _positions(part)
        if not positions:  # neither a number nor a range, or a range that runs backwards
            hint = 'Give positions from 0 and ranges, such as "0-9,12".'
            raise bad_argument("task_indices", text, hint)
        if positions[-1] >= available:
            hint = f"The split has {available} tasks, 0 to {available - 1}."
            raise bad_argument("task_indices", text, hint)
        indices.update(positions)
    return sorted(indices)


def _positions(text: str) -> range:
    """Return the positions that "12" or "0-9" names.

    The range is empty if `text` has another form, or if its first number is the larger one.
    """
    match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text, re.ASCII)
    if match is None:
        return range(0)
    first = int(match[1])
    last = int(match[2] or first)
    return range(first, last + 1)


def _refuse_part_of_exam(request: EvaluationRequest, record: EnvRecord) -> None:
    """Raise UserError ENV_SEALED if the environment is a sealed exam and the request does not ask
    exactly its held-out tasks, all of them, or names a model behind a URL.

    A sealed exam is an environment version whose held-out tasks nobody may see. Questions about
    some of its tasks, or in other words, would reveal single tasks. A model behind a URL would get
    the tasks sent to another machine.
    """
    if seal_in(record.dir) is None:
        return
    endpoint_ref = next((ref for ref in request.models if is_endpoint(ref)), "")
    if endpoint_ref:
        raise UserError(
            "ENV_SEALED",
            f"{record.env_id} is a sealed exam: asking {endpoint_ref} would send its tasks away",
            hint="Ask models that are loaded here; compare with that one on another environment.",
            field="models",
        )
    heldout_count = record.rows.get("heldout", 0)
    is_wrong = {  # argument -> whether it makes the evaluation ask other tasks than the exam's
        "task_indices": bool(request.task_indices),
        "perturb": bool(request.perturb),
        "split": request.split != "heldout",
        "rows": request.rows < heldout_count,
    }
    wrong_arguments = [name for name, wrong in is_wrong.items() if wrong]
    if wrong_arguments:
        without = ("task_indices", "perturb", "split")
        raise UserError(
            "ENV_SEALED",
            f"{record.env_id} is a sealed exam: all of its {counted(heldout_count, 'task')} are "
            f"asked or none, which {wrong_arguments[0]} does not do",
            hint=Hint(change=Change({"rows": heldout_count}, without_arguments=without)),
            field=wrong_arguments[0],
        )


def check_request(request: EvaluationRequest) -> None:
    """Raise UserError BAD_ARGUMENT if an argument of the request cannot be used.

    Refused are a number of models, tasks or attempts out of range, a model that is named twice, an
    unknown split, and an unknown kind of other words (`perturb`).
    """
    models = list(request.models)
    if not 1 <= len(models) <= MAX_MODELS:
        raise bad_argument("models", len(models), f"Name 1 to {MAX_MODELS} models.")
    if len(set(models)) < len(models):
        raise bad_argument("models", models, "Name every model once; attempts repeats the tasks.")
    check_tasks(request)
    if not 1 <= request.attempts <= _MAX_ATTEMPTS:
        hint = f"Use 1 (greedy) to {_MAX_ATTEMPTS} (sampled)."
        raise bad_argument("attempts", request.attempts, hint)
    unknown_kinds = [kind for kind in request.perturb if kind not in (*KINDS, "all")]
    if unknown_kinds:
        raise bad_argument("perturb", unknown_kinds[0], f"Use all, or some of {', '.join(KINDS)}.")


def _short_limit_warnings(
    home: Home, record: EnvRecord, models: Sequence[ModelRef], settings: EvaluationSettings
) -> list[str]:
    """Return a warning for each base model in whose tokens `max_tokens` is too small.

    It is too small if more than the share `TOO_MANY_CUT` of the reference answers are longer than
    `max_tokens`. The warning names the limit that would fit them all.
    """
    warnings: list[str] = []
    # Of several models with the same base the warning names the first. `reversed` puts that one
    # into the dictionary last, so it replaces the others.
    models_by_base = {model.base_path: model for model in reversed(models)}
    for base_path, model in models_by_base.items():
        facts = env_facts.env_facts(home, record, base_path, thinking=settings.thinking)
        cut_share = facts.cut_share(settings.max_tokens)
        if cut_share > env_facts.TOO_MANY_CUT:
            warnings.append(
                f"{whole_percent(cut_share)} of the reference answers do not fit into max_tokens = "
                f"{settings.max_tokens} in the tokens of {model.ref}: no answer could be one of "
                f"them; max_tokens = {facts.longest_turn} would do"
            )
    return warnings


def _resolve_sampling(
    home: Home, record: EnvRecord, models: list[ModelRef], request: EvaluationRequest
) -> tuple[resolution.ResolvedSampling, EnvFacts]:
    """Choose sampling settings that fit every model.

    Returns the settings and the measured facts about the environment's tasks. Both are made for the
    model with the shortest context, so that they also fit all others.
    """
    shortest = min(models, key=lambda model: model.facts.max_positions)  # by its context
    facts = env_facts.env_facts(
        home,
        record,
        shortest.base_path,
        thinking=resolution.is_switched_on(request.settings, "thinking"),
    )
    resolved = resolution.resolve_sampling(
        dict(request.settings),
        model=shortest.facts,
        env=facts,
        attempts=request.attempts,
        hardware=machine.detect(home.root),
    )
    return resolved, facts
