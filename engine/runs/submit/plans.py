"""Queuing a plan: several runs at once, all or none.

Every step is resolved before a row exists. The runs are then queued in one transaction, each behind
the run whose model it needs (engine/processes/waiting.py), so nobody has to live for the plan to go
on. Its runs share one cap on device hours, which each supervisor watches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import plan_total
from engine.cost.plan_total import NO_HOURS
from engine.home.database import reports_unwritable_disk
from engine.home.rows import DEFAULT_GPU_HOURS, OPEN, NewRun, RunRow, plan_state
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.store_runs import RunMaker
from engine.models import catalog
from engine.models.catalog import ModelRef
from engine.pace.progress import write_status
from engine.processes import launcher
from engine.records.estimate import Estimate
from engine.records.run_config import PlanPlace, TrainConfig
from engine.records.settings import TrainSettings
from engine.runs.submit import contamination, evaluation, training
from engine.runs.submit.admission import check_hours_left, check_not_deleted
from engine.runs.submit.cautions import cautions
from engine.runs.submit.contamination import Contamination
from engine.runs.submit.evaluation import ResolvedEvaluation
from engine.runs.submit.plan_steps import PlannedEvaluation, PlannedTraining, steps_of
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import ResolvedTraining
from engine.settings import start_models


@dataclass(frozen=True)
class PlanTraining:
    """A training run of a plan with everything resolved, except the ids of the runs before it.
    `parent` is the run to compare its settings with; "" for a later step of a chain."""

    planned: PlannedTraining
    resolved: ResolvedTraining
    parent: str
    contamination: Contamination


@dataclass(frozen=True)
class PlanEvaluation:
    """The evaluation at the end of a plan, resolved in the same way."""

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
        """The estimates of the training runs."""
        return [each.resolved.forecast.estimate for each in self.trainings]

    @property
    def total(self) -> Estimate:
        """The estimate of all runs together, the evaluation included."""
        evaluation_hours = self.evaluation.resolved.hours if self.evaluation else NO_HOURS
        return plan_total.total(self.figures, evaluation_hours)


@dataclass(frozen=True)
class _Plan:
    """Everything resolved; `figures` is the estimate of all of it, `warnings` about it."""

    trainings: Sequence[PlanTraining]
    evaluation: PlanEvaluation | None
    figures: Estimate
    warnings: Sequence[str]


def submit(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run or a plan, or with `resume` a new attempt of one of the two, and return
    the reply about it. Raises the errors of engine/runs/submit/training.py."""
    if request.resume:
        with Store(home) as store:
            is_plan = bool(store.plan_runs(request.resume))
        return _resume_plan(home, request) if is_plan else training.submit(home, request)
    return _submit_plan(home, request) if request.is_plan else training.submit(home, request)


@reports_unwritable_disk
def _submit_plan(home: Home, request: TrainRequest) -> Reply:
    """Queue all runs of a plan, or none; returns the reply about it. Raises the errors of
    engine/runs/submit/training.py and engine/runs/submit/evaluation.py."""
    training.check_request(request)
    with Store(home) as store:
        earlier = store.requested_run(request.request_id, request.body())
        if earlier is not None:
            launcher.reap(home)
            rows = store.plan_runs(earlier.plan)
            return _reply(home, rows, ["this request was answered before"])
        plan = _resolve(home, store, request)
        name = plan.trainings[0].resolved.record.name
        makers = [_training_maker(home, each) for each in plan.trainings]
        if plan.evaluation is not None:
            makers.append(_evaluation_maker(home, plan.evaluation, plan.trainings[0]))
        rows = store.insert_plan(name, request.request_id, request.body(), makers)
    return _start_and_reply(home, rows, plan.warnings)


@reports_unwritable_disk
def _resume_plan(home: Home, request: TrainRequest) -> Reply:
    """Queue a new attempt of every run of a plan that did not get done; they may take the device
    hours of the request together, or else those of the plan.

    Raises UserError BAD_ARGUMENT, NO_TORCH, RUN_STATE, ENV_SECRETS or BUDGET.
    """
    training.check_request(request)
    training.refuse_other_arguments(request)
    launcher.worker_python(home)  # for its error where nothing can train
    launcher.reap(home)
    with Store(home) as store:
        if store.requested_run(request.request_id, request.body()) is not None:
            rows = store.plan_runs(request.resume)
            return _reply(home, rows, ["this request was answered before"])
        check_hours_left(home, store)
        cap = request.max_gpu_hours or store.plan_runs(request.resume)[0].max_gpu_hours
        rows = store.resume_plan(
            request.resume,
            max_gpu_hours=float(cap or DEFAULT_GPU_HOURS),
            request_id=request.request_id,
            body=request.body(),
            check=partial(_check_resumable, home),
        )
    for row in rows:
        if row.state == "queued":
            training.note_resumed(home.run(row.run_id), row)
    return _start_and_reply(home, rows, []) | {"resumed_from": request.resume}


def _check_resumable(home: Home, row: RunRow) -> None:
    """Raises UserError RUN_STATE where the files of a run were deleted, ENV_SECRETS where this
    server lacks a secret that it needs."""
    run = home.run(row.run_id)
    check_not_deleted(run)
    training.check_secrets_of(run, row)


def _resolve(home: Home, store: Store, request: TrainRequest) -> _Plan:
    """Resolve every step of a plan, and check that all of it can be carried out and paid for.
    Raises the errors of a submit; those of a step name it."""
    parent, parent_warnings = training.full_parent(store, request)
    steps = resolved_steps(home, request, parent)
    plan_total.check_disk(steps.figures, steps.trainings[0].resolved.machine.disk_free)
    warnings = [*parent_warnings, *steps.warnings]
    for each in steps.trainings:
        warnings += _of_step(each.planned.step, _cautions(home, store, each))
    warnings += training.admit_cost(home, store, request, steps.total)
    unique_warnings = list(dict.fromkeys(warnings))
    return _Plan(steps.trainings, steps.evaluation, steps.total, unique_warnings)


def resolved_steps(
    home: Home, request: TrainRequest, parent: str = "", *, is_admitted: bool = True
) -> ResolvedSteps:
    """Every step of a plan, resolved. Raises the errors of a submit; those of a step name it.

    Args:
        parent: the whole id of the run that the request names as its parent, "" for none.
        is_admitted: also refuse steps that cannot be carried out, such as one that is too large;
            without it the steps are only resolved, for an estimate.
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
        before = trained_on(trainings, planned.behind)
        start = trainings[0].resolved.model.ref if trainings else resolved.model.ref
        report = contamination.of_training(home, resolved.record, start, before)
        warnings += _of_step(planned.step, [*step_warnings, *report.warnings])
        own_parent = parent if planned.behind is None else ""
        trainings.append(PlanTraining(planned, resolved, own_parent, report))
    evaluated = None
    if planned_evaluation is not None:
        with _naming_step(planned_evaluation.step):
            evaluated = _resolved_evaluation(home, request, planned_evaluation, trainings)
        warnings += _of_step(planned_evaluation.step, evaluated.contamination.warnings)
    return ResolvedSteps(trainings, evaluated, warnings)


def _cautions(home: Home, store: Store, each: PlanTraining) -> list[str]:
    """What earlier runs say about a run that starts a chain; [] for a later one, whose start model
    no run has had."""
    if each.planned.behind is not None:
        return []
    config = training.config_of(each.planned.request, each.resolved, each.parent)
    return cautions(home, store, training.as_train_config(config))


def _of_step(step: int, warnings: Sequence[str]) -> list[str]:
    """Warnings that say which step they are about."""
    return [f"step {step}: {warning}" for warning in warnings]


@contextmanager
def _naming_step(step: int, label: str = "") -> Iterator[None]:
    """A context in which a UserError says which step of the plan it is about."""
    try:
        yield
    except UserError as error:
        of_label = f" ({label})" if label else ""
        error.message = f"step {step}{of_label}: {error.message}"
        if step > 1:  # a change of settings would be made to those of the first step
            error.advice = replace(error.advice, change=None)
            error.field = f"then[{step - 2}].{error.field}" if error.field else "then"
        raise


def _resolved_training(
    home: Home, planned: PlannedTraining, before: Sequence[PlanTraining]
) -> ResolvedTraining:
    """A training run with everything resolved; `before` are the runs that come before it."""
    if planned.behind is None:
        return training.resolve(home, planned.request, start_models.model_to_train)
    model = _made_by(before[planned.behind])
    return training.resolve(home, planned.request, lambda _home, _ref: model)


def _made_by(maker: PlanTraining) -> ModelRef:
    """The model that a run of the plan is to make."""
    return model_made(maker.resolved.model, maker.resolved.resolved.settings)


def model_made(start: ModelRef, settings: TrainSettings) -> ModelRef:
    """The model that a run of a plan is to make of `start` with these settings. Its reference is
    set when the run has an id."""
    return catalog.made_by(replace(start, ref=""), "", settings)


def trained_on(trainings: Sequence[PlanTraining], place: int | None) -> list[str]:
    """The environment versions on which the chain up to the run at `place` is trained."""
    env_ids = []
    while place is not None:
        env_ids.append(trainings[place].resolved.record.env_id)
        place = trainings[place].planned.behind
    return env_ids


def _resolved_evaluation(
    home: Home, request: TrainRequest, planned: PlannedEvaluation, trainings: Sequence[PlanTraining]
) -> PlanEvaluation:
    """The evaluation at the end of a plan with everything resolved."""
    evaluation.check_request(planned.request)
    start = trainings[0].resolved.model
    models = [start, *(_made_by(trainings[place]) for place in planned.asked)]
    resolved = evaluation.resolve(home, planned.request, models, lambda _hours: request.cap_hours)
    before = [each.resolved.record.env_id for each in trainings]
    report = contamination.of_models(home, resolved.record, [start.ref], before)
    return PlanEvaluation(planned, resolved, report)


def _training_maker(home: Home, each: PlanTraining) -> RunMaker:
    """What `Store.insert_plan` needs of a training run."""

    def make(plan_id: str, ids: list[str]) -> tuple[NewRun, Callable[[str], None]]:
        planned, resolved = each.planned, each.resolved
        if planned.behind is not None:
            resolved = replace(resolved, model=_named(resolved.model, ids[planned.behind]))
        config = training.config_of(planned.request, resolved, each.parent)
        place = PlanPlace(plan_id=plan_id, step=planned.step, label=planned.label)
        config = {**config, "plan": place.to_json()}
        files = training.files_of(config, resolved, each.contamination)
        new = training.new_run(planned.request, resolved, each.parent)
        # The request id belongs to the plan; only its first run is looked up by it.
        request_id = new.request_id if not ids else ""
        return replace(new, plan=plan_id, request_id=request_id), files.writer(home)

    return make


def _evaluation_maker(home: Home, each: PlanEvaluation, first: PlanTraining) -> RunMaker:
    """What `Store.insert_plan` needs of the evaluation; `first` is the plan's first run."""

    def make(plan_id: str, ids: list[str]) -> tuple[NewRun, Callable[[str], None]]:
        models = zip(each.resolved.models[1:], each.planned.asked, strict=True)
        named = [first.resolved.model, *(_named(model, ids[place]) for model, place in models)]
        resolved = replace(each.resolved, models=named)
        request = replace(each.planned.request, models=[model.ref for model in named])
        place = PlanPlace(plan_id=plan_id, step=each.planned.step)
        config = {**evaluation.config_of(request, resolved), "plan": place.to_json()}
        files = evaluation.files_of(config, resolved, each.contamination)
        return replace(evaluation.new_run(request, resolved), plan=plan_id), files.writer(home)

    return make


def _named(model: ModelRef, run_id: str) -> ModelRef:
    """The model that a run of the plan is to make, now that this has an id."""
    return replace(model, ref=f"{run_id}@best", run_id=run_id, waits_for=run_id)


def _start_and_reply(home: Home, rows: Sequence[RunRow], warnings: Sequence[str]) -> Reply:
    """Write STATUS.md of the plan's runs, start what can start, and return the reply about it."""
    with Store(home) as store:
        for row in rows:
            write_status(home.run(row.run_id), row)
        launcher.reap(home)
        return _reply(home, store.plan_runs(rows[0].plan), warnings)


def _reply(home: Home, rows: Sequence[RunRow], warnings: Sequence[str]) -> Reply:
    """The reply about a plan that was queued, now or by an earlier call; its estimate is of the
    runs that have not ended."""
    plan_id, cap = rows[0].plan, rows[0].max_gpu_hours
    state = plan_state(rows)
    ahead = [row for row in rows if row.state in OPEN]
    hours = sum(row.estimated_hours for row in ahead)
    of_all = "" if len(ahead) == len(rows) else f" of {len(rows)}"
    return {
        "run_id": plan_id,
        "state": state,
        "steps": [_step(home, row) for row in rows],
        "estimate": {"gpu_hours": round(hours, 4), "max_gpu_hours": cap},
        "summary": f"{plan_id} is {state}: {counted(len(ahead), 'run')}{of_all} to go, about "
        f"{60 * hours:.1f} minutes, at most {cap:g} GPU-hours together.",
        "next": [Call("wait_run", {"run_id": plan_id}).to_json()],
        "warnings": list(warnings),
    }


def _step(home: Home, row: RunRow) -> Mapping[str, object]:
    """A run of a plan as an entry of the reply to a submit."""
    config = home.run(row.run_id).read_config()
    place = config.plan
    entry: dict[str, object] = {"step": place.step if place else 0, "run_id": row.run_id}
    if place and place.label:
        entry["label"] = place.label
    entry |= {"algorithm": row.algorithm, "gpu_hours": round(row.estimated_hours, 4)}
    if isinstance(config, TrainConfig):
        entry["steps"] = config.settings.steps
    if row.awaited_ids:
        entry["behind"] = row.awaited_ids
    return entry
