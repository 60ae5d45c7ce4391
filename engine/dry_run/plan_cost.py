"""Estimates a plan (several runs submitted together): what each of its runs will take, and all of
them together."""

from engine.core import hardware
from engine.core.format import counted, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import estimate, plan_total, throughput
from engine.cost.hours import WIDE_NOTE, narrowing_call, unmeasured_warning
from engine.endpoints.references import is_endpoint
from engine.home.database import reports_unwritable_disk
from engine.home.run_dir import Home
from engine.records.estimate import Estimate, Range
from engine.records.settings import PROMPT
from engine.runs.prompts.submit import estimate_search
from engine.runs.submit import plans
from engine.runs.submit.evaluation import estimate_endpoint
from engine.runs.submit.plans import PlanTraining, ResolvedSteps
from engine.runs.submit.requests import EvaluationRequest, TrainRequest


@reports_unwritable_disk
def estimate_request(home: Home, request: TrainRequest) -> Reply:
    """Estimate the run or the plan that could be submitted with this request; return the reply.

    If the model is behind a URL (openai:NAME), an evaluation of it is estimated, because it cannot
    be trained.

    Raises UserError if a submit would refuse an environment, a model or the settings.
    """
    is_single_training = not request.is_plan and request.algorithm != PROMPT
    if is_endpoint(request.model) and is_single_training:
        evaluation = EvaluationRequest(request.env_id, [request.model], settings=request.settings)
        return estimate_endpoint(home, evaluation)
    if request.is_plan:
        return estimate_plan(home, request)
    if request.algorithm == PROMPT:
        return estimate_search(home, request)
    return estimate.estimate_cost(
        home, request.env_id, request.model, request.algorithm, request.settings
    )


def estimate_plan(home: Home, request: TrainRequest) -> Reply:
    """Estimate every run of a plan; return the reply.

    If the speed of the machine was never measured, it is measured first. Raises UserError, whose
    message names the step, if a submit would refuse the plan.
    """
    machine = hardware.detect(home.root)
    throughput.ensure(home, machine, estimate.PROBE_WAIT_S)
    steps = plans.resolved_steps(home, request, is_admitted=False)
    total = steps.total  # the estimate of all runs together
    fits = all(run_figures.fits for run_figures in steps.figures)  # each into its device's memory
    arguments = {name: value for name, value in request.given_arguments().items() if value}
    calls = [Call("submit_train", arguments)] if fits else []
    summary = _summary(steps, total, request.cap_hours, fits=fits)
    narrowing = narrowing_call(home, total.hours, total.basis, arguments)
    if narrowing is not None and fits:
        summary = f"{summary} This is {WIDE_NOTE}."
        calls = [narrowing, *calls]
    return {
        "summary": summary,
        "next": [call.to_json() for call in calls],
        "warnings": [
            *steps.warnings,
            *_over_cap_warnings(total, request.cap_hours),
            *unmeasured_warning(home, total),
        ],
        "steps": _step_entries(steps, total.gpu_hour_price),
        "hours": total.hours.to_json(),
        "gpu_hours": total.gpu_hours.to_json(),
        "money": total.money.to_json(),
        "gpu_hour_price": total.gpu_hour_price,
        "max_gpu_hours": request.cap_hours,
        "disk_bytes": sum(run_figures.disk_bytes for run_figures in steps.figures),
        "fits": fits,
        "basis": total.basis,
        "calibrated_on_runs": total.calibrated_on_runs,
    }


def _summary(steps: ResolvedSteps, total: Estimate, cap: float, *, fits: bool) -> str:
    """Return one sentence on what the plan will take.

    `cap` is the limit of GPU-hours for all runs together. `fits` says whether every run fits into
    the memory.
    """
    count = len(steps.trainings) + (steps.evaluation is not None)
    hours = total.hours
    sentence = (
        f"About {words(hours.likely)} ({words(hours.low)} to {words(hours.high)}) for "
        f"{counted(count, 'run')}, one cap of {cap:g} GPU-hours for all of them"
    )
    if total.gpu_hour_price:
        sentence += f", {total.money.likely:.2f} at {total.gpu_hour_price:g} an hour"
    return sentence + ("." if fits else ". A step does not fit into the memory.")


def _over_cap_warnings(total: Estimate, cap: float) -> list[str]:
    """Return a warning if the plan may not end within its cap of GPU-hours; otherwise []."""
    if total.gpu_hours.high <= cap:
        return []
    verb = "will be refused" if total.gpu_hours.likely > cap else "may be stopped"
    return [
        f"max_gpu_hours = {cap:g} is one cap for all runs; they take up to "
        f"{total.gpu_hours.high:.2f} GPU-hours: the plan {verb}"
    ]


def _step_entries(steps: ResolvedSteps, price: float) -> list[Reply]:
    """Return the entry of each run of the plan in the reply, the evaluation last. `price` is that
    of a device hour; 0 if none is set."""
    entries = [_training_entry(training) for training in steps.trainings]
    if steps.evaluation is not None:
        hours = steps.evaluation.resolved.hours
        entry: Reply = {"step": steps.evaluation.planned.step, "algorithm": "evaluate"}
        entries.append(entry | _cost_fields(hours, plan_total.priced(hours, price), price))
    return entries


def _training_entry(training: PlanTraining) -> Reply:
    """Return the entry of a training run in the reply: step, label, environment, number of
    optimizer steps, hours, money, and memory in bytes."""
    planned, resolved = training.planned, training.resolved
    figures = resolved.forecast.estimate
    entry: Reply = {"step": planned.step, "algorithm": planned.request.algorithm}
    if planned.label:
        entry["label"] = planned.label
    entry |= {"env_id": resolved.record.env_id, "steps": figures.steps}
    entry |= _cost_fields(figures.gpu_hours, figures.money, figures.gpu_hour_price)
    return entry | {"memory": figures.peak_memory.total, "fit": figures.fit}


def _cost_fields(hours: Range, money: Range, price: float) -> Reply:
    """Return the fields of a reply for the cost of a run: `hours`, and `money` if a device hour has
    a `price` (not 0). Each has the keys low, likely and high."""
    fields: Reply = {"hours": hours.to_json()}
    if price:
        fields["money"] = money.to_json()
    return fields
