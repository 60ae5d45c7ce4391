"""Queuing a plan: several runs at once, all or none.

Every step is resolved before the database has a row of a run. The runs are then queued in one
transaction, and each waits for the run whose model it needs (engine/machine/processes/waiting.py).
So the plan goes on without the process that submitted it. Its runs share one cap on device hours,
which the supervisor of each run watches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from engine.core.errors import UserError
from engine.core.format import counted, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import plan_total
from engine.cost.plan_total import NO_HOURS
from engine.home.database import reports_unwritable_disk
from engine.home.rows import DEFAULT_GPU_HOURS, OPEN, NewRun, RunRow, plan_state
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.store_runs import RunMaker
from engine.machine.pace.progress import write_status
from engine.machine.processes import launcher
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.records.estimate import Estimate
from engine.records.run_config import PlanPlace, TrainConfig
from engine.records.settings import TrainSettings
from engine.runs.submit import contamination, evaluation, training
from engine.runs.submit.admission import check_hours_left, check_not_deleted
from engine.runs.submit.cautions import cautions
from engine.runs.submit.contamination import Contamination
from engine.runs.submit.evaluation import ResolvedEvaluation
from engine.runs.submit.plan_steps import PlannedEvaluation, PlannedTraining, steps_of
from engine.runs.submit.queued import unmeasured_note
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import ResolvedTraining
from engine.settings import start_models


@dataclass(frozen=True)
class PlanTraining:
    """A training run of a plan with everything resolved, except the ids of the runs before it.

    Attributes:
        planned: the run as the request asks for it.
        resolved: its environment, model, settings and estimate.
        parent: the run to compare its settings with; "" for a later step of a chain.
        contamination: which held-out tasks occur in the rows that the model is trained on.
    """

    planned: PlannedTraining
    resolved: ResolvedTraining
    parent: str
    contamination: Contamination


@dataclass(frozen=True)
class PlanEvaluation:
    """The evaluation at the end of a plan with everything resolved, except the ids of its runs.

    Attributes:
        planned: the evaluation as the request asks for it.
        resolved: its environment, models, settings and estimate.
        contamination: which held-out tasks occur in the rows that its models are trained on.
    """

    planned: PlannedEvaluation
    resolved: ResolvedEvaluation
    contamination: Contamination


@dataclass(frozen=True)
class ResolvedSteps:
    """Every step of a plan with everything resolved, and warnings that name their step."""

    trainings: Sequence[PlanTraining]
    evaluation: PlanEvaluation | None
    warnings: Sequence[str]

    @property
    def figures(self) -> list[Estimate]:
        """Return the estimates of the training runs, in their order."""
        return [step.resolved.forecast.estimate for step in self.trainings]

    @property
    def total(self) -> Estimate:
        """Return the estimate of all runs together, the evaluation included."""
        evaluation_hours = self.evaluation.resolved.hours if self.evaluation else NO_HOURS
        return plan_total.total(self.figures, evaluation_hours)


@dataclass(frozen=True)
class _Plan:
    """A plan with everything resolved.

    Attributes:
        trainings: the training runs, in their order.
        evaluation: the evaluation at the end; None if the plan has none.
        figures: the estimate of all runs together.
        warnings: warnings about the plan, each one once.
    """

    trainings: Sequence[PlanTraining]
    evaluation: PlanEvaluation | None
    figures: Estimate
    warnings: Sequence[str]


def submit(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run or a plan (several runs), or with `resume` a new attempt of either.

    Returns the reply about the run or the plan. Raises the UserErrors that `training.submit` lists,
    and for a plan also those of `evaluation.resolve`.
    """
    if request.resume:
        with Store(home) as store:
            is_plan = bool(store.plan_runs(request.resume))
        return _resume_plan(home, request) if is_plan else training.submit(home, request)
    return _submit_plan(home, request) if request.is_plan else training.submit(home, request)


@reports_unwritable_disk
def _submit_plan(home: Home, request: TrainRequest) -> Reply:
    """Queue all runs of a plan, or none of them; return the reply about the plan.

    Raises the UserErrors of `training.submit` and of `evaluation.resolve`; the message names the
    step that has the fault.
    """
    training.check_request(request)
    with Store(home) as store:
        # The first run of the plan that an earlier call with the same `request_id` has queued.
        earlier = store.requested_run(request.request_id, request.body())
        if earlier is not None:
            launcher.reap(home)  # so that the reply shows the present state of the runs
            rows = store.plan_runs(earlier.plan)
            return _reply(home, rows, ["this request was answered before"])
        plan = _resolve(home, store, request)
        name = plan.trainings[0].resolved.record.name
        makers = [_training_maker(home, step) for step in plan.trainings]
        if plan.evaluation is not None:
            makers.append(_evaluation_maker(home, plan.evaluation, plan.trainings[0]))
        rows = store.insert_plan(name, request.request_id, request.body(), makers)
    return _start_and_reply(home, rows, plan.warnings)


@reports_unwritable_disk
def _resume_plan(home: Home, request: TrainRequest) -> Reply:
    """Queue a new attempt of every unfinished run of a plan; return the reply about the plan.

    The cap on the device hours of all attempts together is that of the request, else the plan's.

    Raises UserError BAD_ARGUMENT, NO_TORCH, RUN_STATE, ENV_SECRETS or BUDGET.
    """
    training.check_request(request)
    training.refuse_other_arguments(request)
    launcher.worker_python(home)  # raises NO_TORCH if no Python here can train
    launcher.reap(home)  # runs whose processes died can be resumed
    with Store(home) as store:
        # Whether an earlier call with the same `request_id` has resumed the plan already.
        was_answered = store.requested_run(request.request_id, request.body()) is not None
        if was_answered:
            rows = store.plan_runs(request.resume)
            return _reply(home, rows, ["this request was answered before"])
        check_hours_left(home, store)
        hours_of_plan = store.plan_runs(request.resume)[0].max_gpu_hours
        rows = store.resume_plan(
            request.resume,
            max_gpu_hours=float(request.max_gpu_hours or hours_of_plan or DEFAULT_GPU_HOURS),
            request_id=request.request_id,
            body=request.body(),
            check=partial(_check_resumable, home),
        )
    for row in rows:
        if row.state == "queued":
            training.note_resumed(home.run(row.run_id), row)
    return _start_and_reply(home, rows, []) | {"resumed_from": request.resume}


def _check_resumable(home: Home, row: RunRow) -> None:
    """Check that a run of a plan can get a new attempt.

    Raises UserError RUN_STATE if the run's files were deleted, ENV_SECRETS if this server lacks a
    secret that the run needs.
    """
    run = home.run(row.run_id)
    check_not_deleted(run)
    training.check_secrets_of(run, row)


def _resolve(home: Home, store: Store, request: TrainRequest) -> _Plan:
    """Resolve every step of a plan, and check that the whole plan can be carried out and paid for.

    Raises the UserErrors of `resolved_steps`, DISK_FULL if the disk is too small for all runs, and
    BUDGET or NOT_APPROVED if their device hours may not be spent.
    """
    parent, parent_warnings = training.full_parent(store, request)
    steps = resolved_steps(home, request, parent)
    plan_total.check_disk(steps.figures, steps.trainings[0].resolved.machine.disk_free)
    warnings = [*parent_warnings, *steps.warnings]
    for step in steps.trainings:
        warnings += _prefix_with_step(step.planned.step, _cautions(home, store, step))
    warnings += training.admit_cost(home, store, request, steps.total)
    unique_warnings = list(dict.fromkeys(warnings))
    return _Plan(steps.trainings, steps.evaluation, steps.total, unique_warnings)


def resolved_steps(
    home: Home, request: TrainRequest, parent: str = "", *, is_admitted: bool = True
) -> ResolvedSteps:
    """Resolve every step of a plan: its environment, model, settings and estimate.

    Args:
        request: the plan.
        parent: the whole id of the run that the request names as its parent, "" for none.
        is_admitted: whether to refuse steps that cannot be carried out, for example because the
            memory is too small. False for an estimate, which only needs the resolved steps.

    Raises UserError BAD_ARGUMENT if `then` or `vary` is malformed, and the UserErrors of
    `training.resolve`, `training.admit` and `evaluation.resolve`, whose messages name the step.
    """
    planned_trainings, planned_evaluation = steps_of(request)
    warnings: list[str] = []
    trainings: list[PlanTraining] = []
    for planned in planned_trainings:
        step_warnings: list[str] = []
        with _naming_step(planned.step, planned.label):
            resolved = _resolved_training(home, planned, trainings)
            if is_admitted:
                step_warnings = training.admit(home, planned.request, resolved)
        report = _contamination_of(home, resolved, planned, trainings)
        warnings += _prefix_with_step(planned.step, [*step_warnings, *report.warnings])
        step_parent = parent if planned.previous_index is None else ""
        trainings.append(PlanTraining(planned, resolved, step_parent, report))
    plan_evaluation = None
    if planned_evaluation is not None:
        with _naming_step(planned_evaluation.step):
            plan_evaluation = _resolved_evaluation(home, request, planned_evaluation, trainings)
        warnings += _prefix_with_step(
            planned_evaluation.step, plan_evaluation.contamination.warnings
        )
    return ResolvedSteps(trainings, plan_evaluation, warnings)


def _contamination_of(
    home: Home,
    resolved: ResolvedTraining,
    planned: PlannedTraining,
    earlier_steps: Sequence[PlanTraining],
) -> Contamination:
    """Find which held-out tasks of a step occur in rows that its model is trained on.

    The rows of this step, of the steps before it in its chain, and of trainings before the plan are
    compared. `resolved` and `planned` are the step, `earlier_steps` all steps before it in the
    plan.
    """
    # The model from which the whole plan starts: what it was trained on before counts too.
    start = earlier_steps[0].resolved.model if earlier_steps else resolved.model
    earlier_env_ids = trained_on(earlier_steps, planned.previous_index)
    return contamination.compare_training(home, resolved.record, start.ref, earlier_env_ids)


def _cautions(home: Home, store: Store, step: PlanTraining) -> list[str]:
    """Return warnings from earlier runs about the run `step`, if it starts a chain of a plan.

    Returns [] for a later run of a chain: it starts from a new model, so no earlier run compares.
    """
    if step.planned.previous_index is not None:
        return []
    config = training.config_of(step.planned.request, step.resolved, step.parent)
    return cautions(home, store, training.as_train_config(config))


def _prefix_with_step(step: int, warnings: Sequence[str]) -> list[str]:
    """Put "step N: " before each warning."""
    return [f"step {step}: {warning}" for warning in warnings]


@contextmanager
def _naming_step(step: int, label: str = "") -> Iterator[None]:
    """Context manager: put the plan's step into the message of a UserError raised in the block.

    For example "step 2 (seed=2): ...". `label` holds the varied values of the step, such as
    "seed=2"; "" if nothing varies. For a later step the error's field becomes that of `then`.
    """
    try:
        yield
    except UserError as error:
        of_label = f" ({label})" if label else ""
        error.message = f"step {step}{of_label}: {error.message}"
        if step > 1:  # the suggested change would be applied to the settings of the first step
            error.advice = replace(error.advice, change=None)
            error.field = f"then[{step - 2}].{error.field}" if error.field else "then"
        raise


def _resolved_training(
    home: Home, planned: PlannedTraining, earlier_steps: Sequence[PlanTraining]
) -> ResolvedTraining:
    """Resolve the training run `planned` of a plan; `earlier_steps` are the runs that come before
    it.

    A later run of a chain starts from the model that the run before it has yet to train.
    """
    if planned.previous_index is None:
        return training.resolve(home, planned.request, start_models.model_to_train)
    model = _model_made_by(earlier_steps[planned.previous_index])
    # The reference in the request is ignored: the model does not exist yet.
    return training.resolve(home, planned.request, lambda _home, _ref: model)


def _model_made_by(maker: PlanTraining) -> ModelRef:
    """Return the model that the run `maker` of the plan has yet to train; its reference is
    incomplete until that run has an id."""
    run = maker.resolved
    return model_made(run.model, run.resolved.settings)


def model_made(start: ModelRef, settings: TrainSettings) -> ModelRef:
    """Return the model that a run of a plan will train from `start` with these settings.

    The reference (`ref`) of the returned model is incomplete until the run has an id
    (`_with_run_id`).
    """
    return catalog.made_by(replace(start, ref=""), "", settings)


def trained_on(trainings: Sequence[PlanTraining], index: int | None) -> list[str]:
    """List the ids of the environment versions that a chain of runs trains on, from the run at
    `index` back to the first.

    `index` is the run's place in `trainings`. If `index` is None, the list is empty.
    """
    env_ids = []
    while index is not None:
        training_run = trainings[index]
        env_ids.append(training_run.resolved.record.env_id)
        index = training_run.planned.previous_index  # None for the first run of the chain
    return env_ids


def _resolved_evaluation(
    home: Home, request: TrainRequest, planned: PlannedEvaluation, trainings: Sequence[PlanTraining]
) -> PlanEvaluation:
    """Resolve the evaluation `planned` at the end of a plan; `trainings` are the plan's training
    runs.

    It asks the model from which the plan starts, and the models that the runs have yet to train.
    """
    evaluation.check_request(planned.request)
    start = trainings[0].resolved.model
    models = [start, *(_model_made_by(trainings[index]) for index in planned.model_indices)]

    def cap_of_plan(_needed_hours: float) -> float:
        """Return the device hours that the plan may take: all of its runs share one cap."""
        return request.cap_hours

    resolved = evaluation.resolve(home, planned.request, models, cap_of_plan)
    trained_env_ids = [step.resolved.record.env_id for step in trainings]
    report = contamination.compare_models(home, resolved.record, [start.ref], trained_env_ids)
    return PlanEvaluation(planned, resolved, report)


def _training_maker(home: Home, step: PlanTraining) -> RunMaker:
    """Return the function that `Store.insert_plan` calls to make the training run `step` of the
    plan."""

    def make(plan_id: str, earlier_ids: list[str]) -> tuple[NewRun, Callable[[str], None]]:
        """Return the run's row, and the function that writes its folder, now that the plan has the
        id `plan_id`.

        `earlier_ids` are the run ids of the plan's earlier runs, in their order.
        """
        planned, resolved = step.planned, step.resolved
        if planned.previous_index is not None:  # the run starts from the model of an earlier run
            maker_id = earlier_ids[planned.previous_index]
            resolved = replace(resolved, model=_with_run_id(resolved.model, maker_id))
        config = training.config_of(planned.request, resolved, step.parent)
        plan_place = PlanPlace(
            plan_id=plan_id, step=planned.step, label=planned.label, always=planned.always
        )
        config = {**config, "plan": plan_place.to_json()}
        files = training.files_of(config, resolved, step.contamination)
        row = training.new_run(planned.request, resolved, step.parent)
        # The request id belongs to the plan. It is stored with the first run only, which is where
        # the store looks it up.
        request_id = row.request_id if not earlier_ids else ""
        return replace(row, plan=plan_id, request_id=request_id), files.writer(home)

    return make


def _evaluation_maker(home: Home, step: PlanEvaluation, first: PlanTraining) -> RunMaker:
    """Return the function that `Store.insert_plan` calls to make the evaluation `step` at the end
    of the plan.

    `first` is the plan's first run; the evaluation also asks the model from which that run starts.
    """

    def make(plan_id: str, earlier_ids: list[str]) -> tuple[NewRun, Callable[[str], None]]:
        """Return the run's row, and the function that writes its folder, now that the plan has the
        id `plan_id`.

        `earlier_ids` are the run ids of the plan's training runs, in their order.
        """
        models = [first.resolved.model]
        trained_models = step.resolved.models[1:]  # their `ref` still lacks the ids of the runs
        for model, index in zip(trained_models, step.planned.model_indices, strict=True):
            models.append(_with_run_id(model, earlier_ids[index]))
        resolved = replace(step.resolved, models=models)
        request = replace(step.planned.request, models=[model.ref for model in models])
        plan_place = PlanPlace(plan_id=plan_id, step=step.planned.step)
        config = {**evaluation.config_of(request, resolved), "plan": plan_place.to_json()}
        files = evaluation.files_of(config, resolved, step.contamination)
        return replace(evaluation.new_run(request, resolved), plan=plan_id), files.writer(home)

    return make


def _with_run_id(model: ModelRef, run_id: str) -> ModelRef:
    """Return a copy of `model` whose reference names the run that will train it, now that this run
    has an id."""
    return replace(model, ref=f"{run_id}@best", run_id=run_id, waits_for=run_id)


def _start_and_reply(home: Home, rows: Sequence[RunRow], warnings: Sequence[str]) -> Reply:
    """Start every queued run for which a device is free; return the reply about the plan.

    `warnings` become a part of the reply. `rows` are the runs of the plan, which was queued or
    resumed just now. Their STATUS.md is written first.
    """
    with Store(home) as store:
        for row in rows:
            write_status(home.run(row.run_id), row)
        launcher.reap(home)  # also starts queued runs
        return _reply(home, store.plan_runs(rows[0].plan), warnings)


def _reply(home: Home, rows: Sequence[RunRow], warnings: Sequence[str]) -> Reply:
    """Make the reply about a plan that was queued, now or by an earlier call.

    `warnings` become a part of it. `rows` are the runs of the plan. The estimate in the reply
    covers the runs that have not ended.
    """
    plan_id, cap = rows[0].plan, rows[0].max_gpu_hours
    state = plan_state(rows)
    open_rows = [row for row in rows if row.state in OPEN]
    open_hours = sum(row.estimated_hours for row in open_rows)
    runs_to_go = counted(len(open_rows), "run")
    if len(open_rows) < len(rows):
        runs_to_go += f" of {len(rows)}"
    return {
        "run_id": plan_id,
        "state": state,
        "steps": [_step_entry(home, row) for row in rows],
        "estimate": {"gpu_hours": round(open_hours, 4), "max_gpu_hours": cap},
        "summary": f"{plan_id} is {state}: {runs_to_go} to go, about {words(open_hours)}"
        f"{unmeasured_note(_estimate_bases(home, open_rows))}, at most {cap:g} GPU-hours together.",
        "next": [Call("wait_run", {"run_id": plan_id}).to_json()],
        "warnings": list(warnings),
    }


def _estimate_bases(home: Home, rows: Sequence[RunRow]) -> list[str]:
    """Return the `basis` of each training run's estimate: "measured", or "model" if the times come
    from a table of devices. Evaluations among `rows` are left out."""
    configs = [home.run(row.run_id).read_config() for row in rows]
    return [config.estimate.basis for config in configs if isinstance(config, TrainConfig)]


def _step_entry(home: Home, row: RunRow) -> Mapping[str, object]:
    """Make the entry of a plan's run in the reply to a submit: its step, id, algorithm, estimate,
    and `behind`, the ids of the runs that it waits for, if there are any."""
    config = home.run(row.run_id).read_config()
    plan_place = config.plan
    entry: dict[str, object] = {"step": plan_place.step if plan_place else 0, "run_id": row.run_id}
    if plan_place and plan_place.label:
        entry["label"] = plan_place.label
    entry |= {"algorithm": row.algorithm, "gpu_hours": round(row.estimated_hours, 4)}
    if isinstance(config, TrainConfig):
        entry["steps"] = config.settings.steps
    if row.awaited_ids:
        entry["behind"] = row.awaited_ids
    return entry
