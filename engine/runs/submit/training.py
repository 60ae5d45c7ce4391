"""Queuing a training run, or a new attempt of one.

A submit takes well under a second, because nothing here loads a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.format import whole_percent
from engine.core.hardware import Hardware
from engine.core.reply import Reply
from engine.cost import estimate
from engine.cost.estimate import Forecast
from engine.cost.exam import Exam, exam_of, first_doubts
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.evidence.stats.basics.target import is_expectation, target_in
from engine.evidence.stats.exam_size import ExamSize
from engine.executors.admission import (
    check_placement,
    check_rented,
    compute_of,
    has_vllm,
    machine_for,
    place_after,
)
from engine.home.database import reports_unwritable_disk
from engine.home.rows import DEFAULT_GPU_HOURS, LOCAL, NewRun, RunRow, abbreviation_warning
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.fast_paths.results import why_off
from engine.machine.install import vllm_env
from engine.machine.processes import launcher, outcome
from engine.models.catalog import ModelRef
from engine.records.estimate import Estimate
from engine.records.run_config import TrainConfig, as_run_config
from engine.records.settings import PROMPT, RolloutSettings, TrainSettings
from engine.runs.evaluation.exam import reported_tasks, size_of
from engine.runs.submit import contamination
from engine.runs.submit.admission import (
    bad_argument,
    check_approval,
    check_audit,
    check_gpu_hours_cap,
    check_hours_left,
    check_judges_beside,
    check_not_deleted,
    check_secrets,
    check_size,
    check_texts,
    missing_secrets_error,
    no_env_error,
    require_files,
)
from engine.runs.submit.cautions import cautions
from engine.runs.submit.queued import reply_of, start_and_reply
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.run_folder import START, RunFiles
from engine.settings import env_checks, gpu_count, resolution, start_models, teachers
from engine.settings.teachers import ResolvedTeacher

# Errors for which a run is put at the `failover` of the place that was asked for.
_FAULTS_OF_PLACE = ("HOST_UNUSABLE", "DOES_NOT_FIT", "BUDGET")


@dataclass(frozen=True)
class ResolvedTraining:
    """A training run with everything resolved.

    Attributes:
        record: the environment version that is trained on.
        model: the model that is trained.
        machine: the hardware that it is planned for.
        resolved: the settings, where each comes from, and warnings about them.
        teacher: the model that a distillation learns from; None if there is no teacher.
        forecast: the estimate of time, memory and disk, and the setting to lower if the run does
            not fit.
        facts: measured facts about the environment's tasks, in the model's tokens.
    """

    record: EnvRecord
    model: ModelRef
    machine: Hardware
    resolved: resolution.Resolved
    teacher: ResolvedTeacher | None
    forecast: Forecast
    facts: EnvFacts

    @property
    def teacher_adapter(self) -> Path | None:
        """The folder of the teacher's adapter; None if there is no teacher, or no adapter of it."""
        model = self.teacher.model if self.teacher else None
        return model.adapter if model else None


@reports_unwritable_disk
def submit(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run, or with `resume` a new attempt of one; return the reply about it.

    If the same request was made before with the same `request_id`, nothing is queued, and the reply
    is about the first run.

    Raises UserError: SETTING_*, ENV_*, MODEL_*, BAD_ARGUMENT, REWARD_RISK, BUDGET, NOT_APPROVED,
    DOES_NOT_FIT, DISK_FULL, NO_TORCH, REQUEST_CONFLICT (the `request_id` was used for another
    request); for a resume also RUN_NOT_FOUND, RUN_STATE.
    """
    check_request(request)
    with Store(home) as store:
        earlier = store.requested_run(request.request_id, request.body())
        if earlier is not None:
            launcher.reap(home)  # this may change the run's state, so its row is read again
            row = store.get_run(earlier.run_id)
            return reply_of(home, row, ["this request was answered before"])
        if request.resume:
            return _resume(home, store, request)
        row, warnings, exam = _queue(home, store, request)
    reply = start_and_reply(home, row, warnings)
    return reply | ({"exam": exam.to_json()} if exam is not None else {})


def _queue(
    home: Home, store: Store, request: TrainRequest
) -> tuple[RunRow, list[str], Exam | None]:
    """Queue a new training run.

    Returns the run's row, warnings about the request, and its exam: what its held-out tasks can
    show (None if the run has no such tasks). Raises the errors that `submit` lists for new runs.
    """
    plan, warnings, moved = _placed(home, request)
    warnings += admit_cost(home, store, request, plan.forecast.estimate)
    parent, parent_warnings = full_parent(store, request)
    warnings += parent_warnings
    warnings += cautions(home, store, as_train_config(config_of(request, plan, parent)))
    # Held-out tasks that are also among the rows of this training or of an earlier one.
    contamination_report = contamination.compare_training(home, plan.record, plan.model.ref)
    warnings += contamination_report.warnings
    settings = plan.resolved.settings

    def count_reported() -> ExamSize:
        """Count the held-out tasks on which the verdict will rest. Slow: it reads the tasks."""
        return size_of(plan.record, reported_tasks(plan.record, settings.eval_rows))

    exam = exam_of(
        home,
        plan.record.env_id,
        plan.model.ref,
        settings,
        plan.facts,
        count_reported=count_reported,
    )
    warnings += first_doubts(exam)
    files = files_of(config_of(request, plan, parent), plan, contamination_report)
    row = store.insert_run(new_run(request, plan, parent), files.writer(home))
    if moved:
        outcome.note_event(home.run(row.run_id), "passed_over", moved)
    return row, warnings, exam


def _placed(home: Home, request: TrainRequest) -> tuple[ResolvedTraining, list[str], str]:
    """Resolve and admit a training run where it is asked for or, if that place cannot take it, at
    the place's `failover`.

    Returns the run, warnings, and why it goes to another place than the one that was asked for; ""
    if it does not. Raises the errors of `resolve` and `admit` for the place that was asked for, if
    no other can take it.
    """
    place = compute_of(request.settings)
    errors: dict[str, UserError] = {}  # by place, in the order in which they were asked
    while True:
        placed = replace(request, settings={**request.settings, "compute": place})
        try:
            plan = resolve(home, placed if errors else request, start_models.model_to_train)
            warnings = admit(home, request, plan)
        except UserError as error:
            errors[place] = error
            is_of_place = error.code in _FAULTS_OF_PLACE
            place = place_after(home, place, list(errors)) if is_of_place else ""
            if not place:
                raise next(iter(errors.values())) from None
            continue
        if not errors:
            return plan, warnings, ""
        passed = "; ".join(f"{name} cannot take it ({e.message})" for name, e in errors.items())
        moved = f"{passed}: it goes to {place}"
        return plan, [moved, *warnings], moved


def full_parent(store: Store, request: TrainRequest) -> tuple[str, list[str]]:
    """Return the whole id of the run that the request names as its parent, and warnings.

    The id is "" if the request names no parent. There is a warning if only the beginning of the id
    was given. Raises UserError RUN_NOT_FOUND if the name matches no run or more than one.
    """
    parent = store.get_run(request.parent).run_id if request.parent else ""
    return parent, abbreviation_warning("parent", request.parent, parent)


def files_of(
    config: Mapping[str, object], plan: ResolvedTraining, report: contamination.Contamination
) -> RunFiles:
    """Collect the content of the run's folder.

    Args:
        config: the content of config.json.
        plan: the run; the adapters of its start model and teacher are put into the folder.
        report: which held-out tasks occur in the rows that the model is trained on.
    """
    return RunFiles(
        config,
        start_adapter=plan.model.adapter,
        teacher_adapter=plan.teacher_adapter,
        contamination=report,
        awaited={START: plan.model} if plan.model.waits_for else {},
    )


def check_request(request: TrainRequest) -> None:
    """Check the arguments that can be checked without the environment, the model and the home.

    Raises UserError BAD_ARGUMENT for a cap that is not a number of hours above 0, a text that is
    too long, an unknown `expect`, or `profile` beside `resume`.
    """
    if request.max_gpu_hours is not None:
        check_gpu_hours_cap(request.max_gpu_hours)
    check_texts(note=request.note, request_id=request.request_id)
    if not is_expectation(request.expect):
        hint = 'Say "better", "no_difference", a target such as "90 %", or nothing.'
        raise bad_argument("expect", request.expect, hint)
    if request.resume and request.profile:
        hint = "A resumed run goes on as it was; leave it out."
        raise bad_argument("profile", value=True, hint=hint)


def resolve(
    home: Home, request: TrainRequest, model_of: Callable[[Home, str], ModelRef]
) -> ResolvedTraining:
    """Find the environment and the model, choose every setting, and estimate time, memory and disk.

    `model_of` takes the home and the name in `request.model`, and returns the model of that name.

    Raises UserError: BAD_ARGUMENT, NO_TORCH, SETTING_*, ENV_*, MODEL_*.
    """
    resolution.check_algorithm(request.algorithm)
    if not request.env_id:
        raise no_env_error()
    if compute_of(request.settings) == LOCAL:
        launcher.worker_python(home)  # raises NO_TORCH if no Python here can train
    record = registry.find_env(home, request.env_id)
    _check_target(request, record)
    model = model_of(home, request.model)
    require_files(model)
    machine = machine_for(home, request.settings)
    task_facts = _env_facts(home, request, record, model)
    resolved = _resolve_settings(home, request, model, task_facts, machine)
    # The setting `keep_env` names a version by its whole id from now on.
    resolved = replace(resolved, settings=env_checks.with_kept_version(home, resolved.settings))
    teacher = _resolve_teacher(home, resolved, model)

    def forecast_of(settings: resolution.Resolved) -> Forecast:
        """Forecast time, memory and disk of the requested run if it had these settings. The model,
        its teacher, the tasks and the machine are those that `resolve` has already found."""
        return estimate.estimate(
            home,
            settings,
            model.facts,
            task_facts,
            machine,
            teacher=teacher,
            base_path=model.base_path,
        )

    # The number of devices is chosen last, because it depends on the estimate of each choice. The
    # estimates of the other choices, which come second, are not needed here.
    resolved, _estimates = gpu_count.decide(
        home, resolved, machine, lambda settings: forecast_of(settings).estimate
    )
    forecast = forecast_of(resolved)
    return ResolvedTraining(record, model, machine, resolved, teacher, forecast, task_facts)


def _check_target(request: TrainRequest, record: registry.EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT if the request sets a target and the environment has no scorer.

    No run could reach that target.
    """
    if target_in(request.expect) is None or record.scored:
        return
    raise UserError(
        "BAD_ARGUMENT",
        f"expect={request.expect!r} is a target, and {record.env_id} scores nothing",
        hint='Push it with a scorer, such as scorer = "exact" in its environment.toml, or leave '
        "expect out.",
        field="expect",
    )


def _resolve_settings(
    home: Home, request: TrainRequest, model: ModelRef, facts: EnvFacts, machine: Hardware
) -> resolution.Resolved:
    """Choose every setting of the run; return the values, the source of each value, and warnings.

    `model` is the model that is trained, `facts` are those about the environment's tasks, `machine`
    is the hardware that the run is planned for.

    Raises UserError SETTING_*, or BAD_ARGUMENT if the environment does not suit the algorithm.
    """
    return resolution.resolve(
        request.algorithm,
        dict(request.settings),
        model=model.facts,
        env=facts,
        hardware=machine,
        inherited=model.adapter_facts,
        vllm=has_vllm(request.settings, is_here=vllm_env.find_python(home) is not None),
        vllm_fault=why_off(home, machine.device, "vllm"),
    )


def _resolve_teacher(
    home: Home, resolved: resolution.Resolved, model: ModelRef
) -> ResolvedTeacher | None:
    """Find the teacher that the settings of a distillation (`resolved`) name, and check that the
    files of its model exist.

    `model` is the model to be trained. Returns None if the settings name no teacher. Raises
    UserError MODEL_* if the teacher's model is missing, SETTING_* if it does not fit the settings.
    """
    teacher = teachers.resolve_teacher(home, resolved.settings, model)
    if teacher is not None and teacher.model is not None:
        require_files(teacher.model, field="settings.teacher")
    return teacher


def _env_facts(home: Home, request: TrainRequest, record: EnvRecord, model: ModelRef) -> EnvFacts:
    """Measure the lengths of the environment's tasks in the tokens of the model.

    If the request has the model think, the thoughts in the answers are counted too.
    """
    thinking = resolution.counted_thinking(request.algorithm, request.settings)
    return env_facts.env_facts(home, record, model.base_path, thinking=thinking)


def admit(home: Home, request: TrainRequest, plan: ResolvedTraining) -> list[str]:
    """Check that the training run `plan` can be carried out, and return warnings about what is
    doubtful.

    Raises UserError: ENV_*, NO_TORCH, SETTING_INVALID, REWARD_RISK, DOES_NOT_FIT, DISK_FULL.
    """
    record, resolved = plan.record, plan.resolved
    # `prefix_warning` says which environment was taken, if `env_id` is only the beginning of an id.
    warnings = [*registry.prefix_warning(request.env_id, record), *resolved.warnings]
    # A sentence for each past run that the estimate could not use because its files are damaged.
    warnings += plan.forecast.left_out
    check_secrets(record)
    registry.env_python(record)  # raises ENV_DEPS if packages of the environment are missing
    # "" stands for a run on this machine; another machine has packages of its own.
    if not check_placement(home, resolved.settings, record):
        launcher.require_quantizer(home, resolved.settings.quantization)
    check_rented(home, resolved.settings, plan.forecast.estimate.hours.likely)
    warnings += check_audit(record, resolved.settings)
    warnings += _short_limit_warning(plan.facts, resolved.settings)
    check_size(plan.forecast, plan.machine.disk_free)
    figures, devices = plan.forecast.estimate, plan.machine.devices
    return warnings + check_judges_beside(home, record, figures, devices)


def admit_cost(home: Home, store: Store, request: TrainRequest, figures: Estimate) -> list[str]:
    """Check that the estimated device hours of a request (in `figures`) may be spent.

    Returns a list with a warning if the run may reach its cap. Raises UserError BUDGET if the
    home's total is spent or would be exceeded, NOT_APPROVED if a person must agree first.
    """
    check_hours_left(home, store)
    warnings = estimate.check_budget(
        home, store, figures, request.cap_hours, request.given_arguments()
    )
    check_approval(home, figures, request.approved)
    return warnings


def _short_limit_warning(facts: EnvFacts, settings: TrainSettings) -> list[str]:
    """Return a warning if `max_tokens` is too small for the reference answers; otherwise [].

    It is too small if more than the share `TOO_MANY_CUT` of the answers do not fit. The warning
    names the `max_tokens` that would fit them all. Returns [] if the algorithm samples nothing.
    """
    if not isinstance(settings, RolloutSettings):
        return []
    cut_share = facts.cut_share(settings.max_tokens)
    if cut_share <= env_facts.TOO_MANY_CUT:
        return []
    return [
        f"{whole_percent(cut_share)} of the reference answers do not fit into max_tokens = "
        f"{settings.max_tokens}: no sample could be one of them; max_tokens = "
        f"{facts.longest_turn} would do"
    ]


def config_of(request: TrainRequest, plan: ResolvedTraining, parent: str) -> Mapping[str, object]:
    """Make the content of config.json of the training run `plan`, which `request` asks for, without
    the run's id.

    `parent` is the whole id of the run that the request names as its parent, "" for none.
    """
    config: dict[str, object] = {
        "kind": "train",
        "algorithm": request.algorithm,
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        "model": plan.model.ref,
        "base": {"ref": plan.model.base_ref, "path": str(plan.model.base_path)},
        # If the model has an adapter, `run_folder.write_folder` replaces None by the path of the
        # run's own copy.
        "start_adapter": None,
        "settings": plan.resolved.settings.model_dump(),
        "sources": plan.resolved.sources,
        "note": request.note,
        "expect": request.expect,
        "parent": parent,
        "max_gpu_hours": request.cap_hours,
        "estimate": plan.forecast.estimate.to_json(),
        "device": plan.machine.device.id,
    }
    if plan.teacher is not None:
        config["teacher"] = plan.teacher.entry.to_json()
    if request.profile:
        config["profile"] = True
    return config


def as_train_config(content: Mapping[str, object]) -> TrainConfig:
    """Check the content of a config.json that has no run id yet, and return the typed config.

    The run id of the returned config is "".
    """
    config = as_run_config({"run_id": "", **content})
    assert isinstance(config, TrainConfig)  # `config_of` made it with the kind "train"
    return config


def new_run(request: TrainRequest, plan: ResolvedTraining, parent: str) -> NewRun:
    """Make the row that the database stores of the training run `plan`, which `request` asks for.

    `parent` is the whole id of the run's parent, "" for none.
    """
    return NewRun(
        name=f"{plan.record.name}-{request.algorithm}",
        kind="train",
        algorithm=request.algorithm,
        env_id=plan.record.env_id,
        model=plan.model.ref,
        note=request.note,
        expect=request.expect,
        parent=parent,
        max_gpu_hours=request.cap_hours,
        estimated_hours=plan.forecast.estimate.gpu_hours.likely,
        request_id=request.request_id,
        body=request.body(),
        waits_for=plan.model.waits_for,
        compute=plan.resolved.settings.compute,
        # A CPU is one device, whatever number of processes share it.
        gpus=1 if plan.machine.device.kind == "cpu" else plan.resolved.settings.gpus,
    )


def _resume(home: Home, store: Store, request: TrainRequest) -> Reply:
    """Queue a new attempt of the run `request.resume`, and return the reply about it.

    The attempt continues from the last complete checkpoint, or from step 0 if there is none.

    Raises UserError: BAD_ARGUMENT, RUN_NOT_FOUND, RUN_STATE, NO_TORCH, ENV_SECRETS, BUDGET.
    """
    refuse_other_arguments(request)
    launcher.reap(home)  # a run whose process died can be resumed
    ended_row = store.get_run(request.resume)
    run = home.run(ended_row.run_id)
    # Called only for its error: NO_TORCH if no Python here can train.
    launcher.trainer_command(
        home, ended_row.algorithm, ended_row.gpus, is_elsewhere=ended_row.is_elsewhere
    )
    check_secrets_of(run, ended_row)
    check_hours_left(home, store)
    row = _queue_attempt(store, run, ended_row, request)
    warnings = abbreviation_warning("resume", request.resume, row.run_id)
    # Writes an event into the run's folder; the event names the checkpoint, and so does the reply.
    checkpoint = note_resumed(run, row)  # "" for step 0
    if row.algorithm == PROMPT:
        warnings.append("it goes on after the last round that was saved")
    elif row.gpus == 0:  # an evaluation of models behind a URL has no checkpoints
        warnings.append("what was answered before is not asked again")
    elif not checkpoint:
        warnings.append("no checkpoint was complete: the run starts again from step 0")
    reply = start_and_reply(home, row, warnings)
    return reply | {"attempt": row.attempt, "resumed_from": checkpoint}


def check_secrets_of(run: RunDir, row: RunRow) -> None:
    """Raise UserError ENV_SECRETS if this server lacks a secret that the run needs."""
    missing = launcher.missing_secrets(run)
    if missing:
        raise missing_secrets_error(missing, row.env_id)


def note_resumed(run: RunDir, row: RunRow) -> str:
    """Write the event that a new attempt of the run was requested; `row` is the run's row.

    Returns the name of the checkpoint from which the attempt continues; "" if it starts at step 0.
    """
    checkpoint = outcome.checkpoint_name(run)
    message = f"continues from {checkpoint}" if checkpoint else "starts again from step 0"
    if row.algorithm == PROMPT:
        message = "continues after the last round that was saved"
    outcome.note_event(run, "resumed_by_request", message, attempt=row.attempt)
    return checkpoint


def _queue_attempt(store: Store, run: RunDir, row: RunRow, request: TrainRequest) -> RunRow:
    """Queue a new attempt of a run, and return the run's new row.

    The cap on device hours is that of the request, else the cap that the run had, else the default.
    Raises UserError RUN_STATE if the run cannot be resumed or its files were deleted.
    """
    return store.resume_run(
        row.run_id,
        max_gpu_hours=float(request.max_gpu_hours or row.max_gpu_hours or DEFAULT_GPU_HOURS),
        request_id=request.request_id,
        body=request.body(),
        check=lambda: check_not_deleted(run),
    )


def refuse_other_arguments(request: TrainRequest) -> None:
    """Raise UserError BAD_ARGUMENT if a resume has arguments that only a new run takes."""
    extra_arguments = request.arguments_not_for_resume()
    if extra_arguments:
        raise UserError(
            "BAD_ARGUMENT",
            f"resume continues a run as it was, so {', '.join(extra_arguments)} cannot be given",
            hint="Beside resume only max_gpu_hours and request_id count. For other settings submit "
            "a new run.",
            field=extra_arguments[0],
        )
