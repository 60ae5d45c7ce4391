"""Queuing a training run, or a new attempt of one.

A submit takes well under a second, because nothing here loads a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core import hardware
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
from engine.fast_paths.results import why_off
from engine.home.database import reports_unwritable_disk
from engine.home.rows import DEFAULT_GPU_HOURS, NewRun, RunRow, taken_as
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.install import vllm_env
from engine.models.catalog import ModelRef
from engine.processes import launcher, outcome
from engine.records.estimate import Estimate
from engine.records.run_config import TrainConfig, as_run_config
from engine.records.settings import RolloutSettings, TrainSettings
from engine.runs.submit import contamination
from engine.runs.submit.admission import (
    bad_argument,
    check_approval,
    check_audit,
    check_gpu_hours_cap,
    check_hours_left,
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


@dataclass(frozen=True)
class ResolvedTraining:
    """A training run with everything resolved.

    Attributes:
        record: the environment version that is trained on.
        model: the model that is trained.
        machine: the hardware of this machine.
        resolved: the settings, where each comes from, and warnings about them.
        teacher: the model that a distillation learns from; None for every other algorithm.
        forecast: the estimate of time, memory and disk, and how far to lower a setting.
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
        """The folder of the teacher's adapter; None without a teacher that has one."""
        model = self.teacher.model if self.teacher else None
        return model.adapter if model else None


@reports_unwritable_disk
def submit(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run, or with `resume` a new attempt of one; return the reply about it.

    A request that was made before with the same `request_id` queues nothing and gets the reply
    about the run that it made first.

    Raises UserError: SETTING_*, ENV_*, MODEL_*, BAD_ARGUMENT, REWARD_RISK, BUDGET, NOT_APPROVED,
    DOES_NOT_FIT, DISK_FULL, NO_TORCH, REQUEST_CONFLICT (the `request_id` was used for another
    request); for a resume also RUN_NOT_FOUND, RUN_STATE.
    """
    check_request(request)
    with Store(home) as store:
        earlier = store.requested_run(request.request_id, request.body())
        if earlier is not None:
            launcher.reap(home)  # the run's state may change by it: its row is read again
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

    Returns its row, warnings about the request, and what its held-out tasks can show (None where
    the run has none). Raises the errors of `submit`.
    """
    plan = resolve(home, request, start_models.model_to_train)
    warnings = admit(home, request, plan)
    warnings += admit_cost(home, store, request, plan.forecast.estimate)
    parent, parent_warnings = full_parent(store, request)
    warnings += parent_warnings
    warnings += cautions(home, store, as_train_config(config_of(request, plan, parent)))
    # Which held-out tasks stand in the rows that the model is, or was earlier, trained on.
    contamination_report = contamination.of_training(home, plan.record, plan.model.ref)
    warnings += contamination_report.warnings
    settings = plan.resolved.settings
    exam = exam_of(home, plan.record.env_id, plan.model.ref, settings, plan.facts)
    warnings += first_doubts(exam)
    files = files_of(config_of(request, plan, parent), plan, contamination_report)
    row = store.insert_run(new_run(request, plan, parent), files.writer(home))
    return row, warnings, exam


def full_parent(store: Store, request: TrainRequest) -> tuple[str, list[str]]:
    """Return the whole id of the run that the request names as its parent, "" for none.

    The second value is a list, with a warning if only the beginning of the id was given. Raises
    UserError RUN_NOT_FOUND.
    """
    parent = store.get_run(request.parent).run_id if request.parent else ""
    return parent, taken_as("parent", request.parent, parent)


def files_of(
    config: Mapping[str, object], plan: ResolvedTraining, report: contamination.Contamination
) -> RunFiles:
    """Collect the content of the run's folder.

    Args:
        config: the content of its config.json.
        plan: the run, whose adapters are put into the folder.
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
    """Find the environment and the model, choose every setting, and estimate what the run takes.

    `model_of` is given the home and the request's `model`, and returns the model that it names.

    Raises UserError: BAD_ARGUMENT, NO_TORCH, SETTING_*, ENV_*, MODEL_*.
    """
    resolution.check_algorithm(request.algorithm)
    if not request.env_id:
        raise no_env_error()
    launcher.worker_python(home)  # for its error where nothing can train
    record = registry.find_env(home, request.env_id)
    _check_target(request, record)
    model = model_of(home, request.model)
    require_files(model)
    machine = hardware.detect(home.root)
    facts = _env_facts(home, request, record, model)
    resolved = _settings(home, request, model, facts, machine)
    resolved = replace(resolved, settings=env_checks.with_kept_version(home, resolved.settings))
    teacher = _teacher(home, resolved, model)

    def forecast_of(settings: resolution.Resolved) -> Forecast:
        return estimate.estimate(
            home, settings, model.facts, facts, machine, teacher=teacher, base_path=model.base_path
        )

    resolved, _ = gpu_count.decide(
        home, resolved, machine, lambda settings: forecast_of(settings).estimate
    )
    forecast = forecast_of(resolved)
    return ResolvedTraining(record, model, machine, resolved, teacher, forecast, facts)


def _check_target(request: TrainRequest, record: registry.EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT for a target where nothing is scored, so that no run reaches
    it."""
    if target_in(request.expect) is None or record.scored:
        return
    raise UserError(
        "BAD_ARGUMENT",
        f"expect={request.expect!r} is a target, and {record.env_id} scores nothing",
        hint='Push it with a scorer, such as scorer = "exact" in its environment.toml, or leave '
        "expect out.",
        field="expect",
    )


def _settings(
    home: Home, request: TrainRequest, model: ModelRef, facts: EnvFacts, machine: Hardware
) -> resolution.Resolved:
    """Choose every setting of the run; return them with where each comes from, and warnings.

    Raises UserError SETTING_*, or BAD_ARGUMENT if the environment cannot serve the algorithm.
    """
    return resolution.resolve(
        request.algorithm,
        dict(request.settings),
        model=model.facts,
        env=facts,
        hardware=machine,
        inherited=model.adapter_facts,
        vllm=vllm_env.find_python(home) is not None,
        vllm_fault=why_off(home, machine.device, "vllm"),
    )


def _teacher(home: Home, resolved: resolution.Resolved, model: ModelRef) -> ResolvedTeacher | None:
    """Find the teacher that the settings name, and check that the files of its model are there.

    `model` is the one to be trained. Returns None where the settings name no teacher. Raises
    UserError MODEL_* or SETTING_*.
    """
    teacher = teachers.resolve_teacher(home, resolved.settings, model)
    if teacher is not None and teacher.model is not None:
        require_files(teacher.model, field="settings.teacher")
    return teacher


def _env_facts(home: Home, request: TrainRequest, record: EnvRecord, model: ModelRef) -> EnvFacts:
    """Measure the environment's tasks in the tokens of the model.

    Thoughts are counted if the request has the model think.
    """
    thinking = resolution.counted_thinking(request.algorithm, request.settings)
    return env_facts.env_facts(home, record, model.base_path, thinking=thinking)


def admit(home: Home, request: TrainRequest, plan: ResolvedTraining) -> list[str]:
    """Check that the run can be carried out. Returns warnings about what is doubtful.

    Raises UserError: ENV_*, NO_TORCH, SETTING_INVALID, REWARD_RISK, DOES_NOT_FIT, DISK_FULL.
    """
    record, resolved = plan.record, plan.resolved
    # The first one says which environment was meant, if `env_id` is only a prefix of its id.
    warnings = [*registry.prefix_meant(request.env_id, record), *resolved.warnings]
    warnings += plan.forecast.left_out  # a sentence for each past run with damaged files
    check_secrets(record)
    registry.env_python(record)  # for its error where packages are missing
    launcher.require_quantizer(home, resolved.settings.quantization)
    warnings += check_audit(record, resolved.settings)
    warnings += _cut_answers(plan.facts, resolved.settings)
    check_size(plan.forecast, plan.machine.disk_free)
    return warnings


def admit_cost(home: Home, store: Store, request: TrainRequest, figures: Estimate) -> list[str]:
    """Check that what a request will take, as estimated, may be spent.

    Returns a list with a warning if its cap may be reached. Raises UserError BUDGET or
    NOT_APPROVED.
    """
    check_hours_left(home, store)
    warnings = estimate.check_budget(
        home, store, figures, request.cap_hours, request.given_arguments()
    )
    check_approval(home, figures, request.approved)
    return warnings


def _cut_answers(facts: EnvFacts, settings: TrainSettings) -> list[str]:
    """Return a warning if too many reference answers do not fit into `max_tokens`; otherwise [].

    Too many are more than the share `TOO_MANY_CUT`. The warning names the `max_tokens` that would
    do. [] also where nothing is sampled.
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
    """Make the content of config.json of a training run, without the run's id.

    `parent` is the whole id of the run that the request names as its parent, "" for none.
    """
    config: dict[str, object] = {
        "kind": "train",
        "algorithm": request.algorithm,
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        "model": plan.model.ref,
        "base": {"ref": plan.model.base_ref, "path": str(plan.model.base_path)},
        # If the model has an adapter, the path of the run's own copy takes the place of None when
        # the run's folder is written.
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
    """Check the content of config.json, which has no run id yet.

    Returns it as a typed config with the id "".
    """
    config = as_run_config({"run_id": "", **content})
    assert isinstance(config, TrainConfig)  # `config_of` made it with the kind "train"
    return config


def new_run(request: TrainRequest, plan: ResolvedTraining, parent: str) -> NewRun:
    """Make the row that the database stores of the new run.

    `parent` is the whole id of its parent, "" for none.
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
        gpus=1 if plan.machine.device.kind == "cpu" else plan.resolved.settings.gpus,
    )


def _resume(home: Home, store: Store, request: TrainRequest) -> Reply:
    """Queue a new attempt of the run `request.resume`, and return the reply about it.

    The attempt continues from the last complete checkpoint, or else from step 0.

    Raises UserError: BAD_ARGUMENT, RUN_NOT_FOUND, RUN_STATE, NO_TORCH, ENV_SECRETS, BUDGET.
    """
    refuse_other_arguments(request)
    launcher.reap(home)
    row = store.get_run(request.resume)
    run = home.run(row.run_id)
    launcher.trainer_command(home, row.algorithm, row.gpus)  # for its error where nothing can train
    check_secrets_of(run, row)
    check_hours_left(home, store)
    row = _queue_attempt(store, run, row, request)
    warnings = taken_as("resume", request.resume, row.run_id)
    checkpoint = note_resumed(run, row)
    if row.gpus == 0:
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
    """Write the event that a new attempt of the run was asked for; `row` is its row.

    Returns the name of the checkpoint from which the attempt goes on, "" for step 0.
    """
    checkpoint = outcome.checkpoint_name(run)
    message = f"continues from {checkpoint}" if checkpoint else "starts again from step 0"
    outcome.note_event(run, "resumed_by_request", message, attempt=row.attempt)
    return checkpoint


def _queue_attempt(store: Store, run: RunDir, row: RunRow, request: TrainRequest) -> RunRow:
    """Queue a new attempt of a run, and return the run's new row.

    The cap on device hours is that of the request, or else the one that the run had, or else the
    default. Raises UserError RUN_STATE.
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
