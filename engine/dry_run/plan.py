"""The dry run of a plan (several runs submitted together): each run is checked, and then what all
of them take together.

Every failed check of a run names the step of the plan. Runs that differ only by a varied setting
mostly give the same results; each of these is shown once.
"""

from collections.abc import Callable, Mapping, Sequence

from engine.core.format import counted, percent, size, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import estimate, plan_total
from engine.cost.hours import WIDE_NOTE, narrowing_call
from engine.cost.plan_total import NO_HOURS
from engine.dry_run.judgements import Check, CheckList, Outcome, required
from engine.dry_run.planned_run import PlannedRun
from engine.dry_run.trials import try_model
from engine.evidence.stats.learnability import share_that_differs, success_to_start
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.estimate import Estimate, Range
from engine.records.settings import GRPOSettings, TrainSettings
from engine.runs.submit import evaluation
from engine.runs.submit.plan_steps import PlannedEvaluation, steps_of
from engine.runs.submit.requests import DryRunRequest


def dry_run_plan(
    home: Home, request: DryRunRequest, began: float, cap_function: Callable[[float], float] | None
) -> Reply:
    """Check a plan that could be submitted with the same request, without training anything, and
    return the reply.

    The reply has for each run its settings, time and money, and for all of them together the total
    and the cap. Only the first run is tried by a probe or a smoke run.

    Args:
        home: the home.
        request: the plan, and what is to be tried.
        began: value of `time.monotonic()` at the start of the call.
        cap_function: the quota of the caller's key: takes the estimated device hours of a probe and
            returns its cap, or raises a UserError. None if no quota applies.

    Raises UserError BAD_ARGUMENT if `then` or `vary` of the request cannot be read.
    """
    planned_trainings, planned_evaluation = steps_of(request)
    runs: list[PlannedRun] = []
    for planned in planned_trainings:
        run = PlannedRun(home, request, planned, runs)
        run.run_checks(began)
        runs.append(run)
    plan = _CheckedPlan(home, request, runs)
    if planned_evaluation is not None:
        plan.check_evaluation(planned_evaluation)
    plan.check_together()
    if not plan.failed:
        try_model(runs[0], request, began, cap_function)
    return plan.reply()


class _CheckedPlan:
    """The runs of a plan after their checks, and the checks of the plan as a whole."""

    def __init__(self, home: Home, request: DryRunRequest, runs: Sequence[PlannedRun]) -> None:
        """Take the runs of a plan, each of which has already made its checks."""
        self.home = home
        self.request = request
        self.runs = runs
        self.checks_of_plan = CheckList(lambda: Call("dry_run", runs[0].arguments()))
        self.evaluation_step: Reply = {}
        self.evaluation_hours: Range = NO_HOURS

    def check_evaluation(self, planned: PlannedEvaluation) -> None:
        """Check the evaluation that the plan ends with; store its hours and its reply entry."""
        self.evaluation_step = {
            "step": planned.step,
            "algorithm": "evaluate",
            "env_id": planned.request.env_id,
        }
        self.checks_of_plan.run_check("evaluation", (), lambda: self._evaluation_outcome(planned))

    def _evaluation_outcome(self, planned: PlannedEvaluation) -> Outcome:
        """Judge whether the evaluation at the end of the plan can be carried out; store its hours.

        The evaluation asks the model that the plan starts from, and those that its runs make.
        Raises UserError if a submit would refuse the evaluation.
        """
        evaluation.check_request(planned.request)
        start_model = self.runs[0].facts.model
        # The models that runs of the plan are to make; `model_indices` are positions in the plan.
        made_models = [self.runs[index].model_to_be for index in planned.model_indices]
        models = [model for model in (start_model, *made_models) if model is not None]
        if len(models) < 1 + len(made_models):  # a check of a run failed, so its model is unknown
            return Outcome("skip", "needs every model of the plan")

        def shared_cap(_hours: float) -> float:
            """Return the cap on GPU-hours, which all runs of the plan share."""
            return self.request.cap_hours

        resolved = evaluation.resolve(self.home, planned.request, models, shared_cap)
        hours, tasks = resolved.hours, resolved.tasks.used
        self.evaluation_hours = hours
        self.evaluation_step |= {"models": len(models), "tasks": tasks}
        # An evaluation holds one device, so its device hours are its hours.
        self.evaluation_step |= _cost_fields(hours, hours, self._hour_price())
        text = f"{counted(len(models), 'model')} on {counted(tasks, 'task')}"
        about_tasks = evaluation.tasks_in_words(planned.request, resolved)
        return Outcome("pass", f"{text}. {about_tasks}" if about_tasks else text)

    def check_together(self) -> None:
        """Check what all runs take together: space on disk, and device hours against their cap."""
        run_check = self.checks_of_plan.run_check
        estimates = self._estimates_of_runs()
        if len(estimates) < len(self.runs):  # some run has no estimate, because its checks failed
            run_check("disk", (), lambda: Outcome("skip", "needs every step"))
            run_check("budget", (), lambda: Outcome("skip", "needs every step"))
            return
        run_check("disk", (), lambda: self._disk_outcome(estimates))
        run_check("budget", (), self._budget_outcome)

    def _disk_outcome(self, estimates: Sequence[Estimate]) -> Outcome:
        """Judge whether the disk has room for what all runs write. Raises UserError DISK_FULL if it
        has not."""
        free_bytes = required(self.runs[0].facts.machine).disk_free
        needed_bytes = plan_total.check_disk(estimates, free_bytes)
        return Outcome("pass", f"all runs write about {size(needed_bytes)}")

    def _budget_outcome(self) -> Outcome:
        """Judge whether all runs together stay within their one cap and within the total that the
        home allows. Raises UserError BUDGET if they likely do not."""
        total = required(self.total)
        cap = self.request.cap_hours  # GPU-hours
        arguments = self.runs[0].arguments()
        with Store(self.home) as store:
            warnings = estimate.check_budget(self.home, store, total, cap, arguments)
        if warnings:  # there is at most one
            return Outcome("warn", warnings[0], "Give the plan a larger max_gpu_hours.")
        high = total.gpu_hours.high
        return Outcome(
            "pass", f"at most {high:g} GPU-hours; {cap:g} are allowed for all runs together"
        )

    @property
    def total(self) -> Estimate | None:
        """The estimate of all runs together; None if one of them has no estimate."""
        estimates = self._estimates_of_runs()
        if len(estimates) < len(self.runs):
            return None
        return plan_total.total(estimates, self.evaluation_hours)

    @property
    def failed(self) -> list[dict[str, object]]:
        """The checks that failed, of all runs and of the whole plan, as the reply shows them."""
        return [entry for entry in self.entries() if entry["status"] == "fail"]

    def _estimates_of_runs(self) -> list[Estimate]:
        """Return the estimates of those training runs that have an estimate."""
        return [run.figures for run in self.runs if run.figures is not None]

    def _hour_price(self) -> float:
        """Return the price of a device hour; 0 if the home sets none."""
        return self.home.user_config().gpu_hour_price

    def entries(self) -> list[dict[str, object]]:
        """List the checks of the plan as the reply shows them.

        First come those checks of single runs that are to be shown (`_is_to_be_shown`), with their
        step; then all checks of the whole plan. A check with the same detail for several runs of a
        step is shown once.
        """
        entries: list[dict[str, object]] = []
        shown: set[tuple[int, str, str]] = set()  # (step, name, detail)
        for run in self.runs:
            for check in run.check_list.checks:
                key = (run.step, check.name, check.detail)
                if _is_to_be_shown(check) and key not in shown:
                    shown.add(key)
                    entries.append(run.entry(check))
        return entries + [check.to_json() for check in self.checks_of_plan.checks]

    def reply(self) -> Reply:
        """Return the reply about the plan: summary, next calls, warnings, steps, total and
        checks."""
        facts_of_first = self.runs[0].facts
        entries = self.entries()
        return {
            "summary": self._summary(entries),
            "next": self._next_calls(),
            "warnings": [_as_sentence(entry) for entry in entries if entry["status"] == "warn"],
            "steps": self._steps(),
            "total": _total_fields(self.total, self.request.cap_hours) if self.total else {},
            "checks": entries,
            # Only the first run is probed or smoke-tested.
            "probe": facts_of_first.probe,
            "smoke": facts_of_first.smoke,
            "run_id": facts_of_first.probe_run_id,
        }

    def _summary(self, entries: Sequence[Mapping[str, object]]) -> str:
        """Return one sentence on whether the plan can be submitted.

        If checks failed, it names the first of them. Otherwise it says how long the plan takes,
        what its cap is, and what the first warning is. `entries` are the checks of the reply.
        """
        failed = self.failed
        if failed:
            how_many = f" ({len(failed)} checks fail)" if len(failed) > 1 else ""
            return f"Not ready: {_as_sentence(failed[0])}{how_many}."
        hours, basis = required(self.total).hours, required(self.total).basis
        # "model": the hours come from a table of speeds, because nothing was measured.
        origin = ", by a table: this machine is not measured yet" if basis == "model" else ""
        origin += f"; {WIDE_NOTE}" if self._narrowing_call() else ""
        run_count = len(self.runs) + (1 if self.evaluation_step else 0)
        sentence = (
            f"Ready to train: {run_count} runs, about {words(hours.likely)} in all "
            f"({words(hours.low)} to {words(hours.high)}{origin}), one cap of "
            f"{self.request.cap_hours:g} GPU-hours for all of them."
        )
        warned = [entry for entry in entries if entry["status"] == "warn"]
        if not warned:
            return sentence
        more = f" (and {len(warned) - 1} more)" if len(warned) > 1 else ""
        return f"{sentence} First: {_as_sentence(warned[0])}{more}."

    def _next_calls(self) -> list[Reply]:
        """Return the call that submits the plan, after the one that narrows a wide range of hours;
        [] if a check failed."""
        if self.failed:
            return []
        calls = [self._narrowing_call(), Call("submit_train", self.runs[0].arguments())]
        return [call.to_json() for call in calls if call is not None]

    def _narrowing_call(self) -> Call | None:
        """Return the call (a dry run with two real steps) that narrows a wide range of hours.

        Returns None if the range is narrow or not known, or if those steps were asked for now.
        """
        first, total = self.runs[0], self.total
        if total is None or first.check_list.has("smoke"):
            return None
        return narrowing_call(self.home, total.hours, total.basis, first.arguments())

    def _steps(self) -> list[Reply]:
        """Make the entry of each run of the plan for the reply, the evaluation last.

        An entry has the run's environment, model, settings, hours and money. If a step has several
        runs, the first shows all settings, the others only those that differ from the first.
        """
        steps: list[Reply] = []
        first_settings_of_step: dict[int, Mapping[str, object]] = {}
        for run in self.runs:
            resolved = run.facts.resolved
            settings = resolved.settings.model_dump() if resolved else {}
            if run.step not in first_settings_of_step:
                first_settings_of_step[run.step] = settings
                steps.append(_entry_of_run(run, settings))
                continue
            first_settings = first_settings_of_step[run.step]
            differing = {
                name: value for name, value in settings.items() if first_settings.get(name) != value
            }
            steps.append(_entry_of_run(run, differing))
        if self.evaluation_step:
            steps.append(self.evaluation_step)
        return steps


def _is_to_be_shown(check: Check) -> bool:
    """Return whether the reply about a plan shows this check of a single run: if it failed or
    warns, or if it tried the model (probe and smoke run)."""
    return check.status in ("fail", "warn") or check.name in ("probe", "smoke")


def _entry_of_run(run: PlannedRun, settings: Mapping[str, object]) -> Reply:
    """Return the entry of one training run of a plan in the reply of a dry run.

    It has the step (counted from 1), the run's label if it has one, the algorithm, the environment,
    the start model, and `settings`, which are those to show. What the checks have found out is
    added: hours, device hours and money (left out if there is no estimate), the peak memory in
    bytes, and what it starts from. `skipped_if` tells under which condition the run is skipped.
    """
    record = run.facts.record  # the environment version; None if it was not found
    planned_training = run.planned  # as the plan asks for it, before any check
    entry: Reply = {"step": run.step}
    if planned_training.label:
        entry["label"] = planned_training.label
    entry["algorithm"] = run.algorithm
    entry["env_id"] = record.env_id if record else run.env_id
    if run.maker is None:  # no run of the plan makes the start model: it exists already
        entry["model"] = run.model
    else:  # `maker` is the earlier run of the plan that makes it
        entry["model"] = f"the best of step {run.maker.step}"
        if run.facts.resolved is not None:
            entry |= _starts_from_field(run.facts.resolved.settings, run.maker.algorithm)
    cost_estimate = run.figures  # None if a check failed before it could be made
    if cost_estimate is not None:
        entry |= _cost_fields(
            cost_estimate.hours, cost_estimate.gpu_hours, cost_estimate.gpu_hour_price
        )
        entry["memory"] = cost_estimate.peak_memory.total
    if planned_training.may_be_skipped:  # unless the step in the plan says always=true
        target = planned_training.request.expect
        entry["skipped_if"] = f"the step before reaches {target}; always=true in it: never"
    return entry | {"settings": dict(settings)}


def _starts_from_field(settings: TrainSettings, maker_algorithm: str) -> Reply:
    """Return the field `starts_from` for a step of GRPO that follows SFT: the success that the SFT
    model needs so that answers within a group earn different rewards. {} for any other step."""
    if not isinstance(settings, GRPOSettings) or maker_algorithm != "sft":
        return {}
    group_size = settings.group_size
    least_success = success_to_start(group_size)
    share_at_30_percent = share_that_differs(0.3, group_size)
    return {
        "starts_from": f"a quarter of groups of {group_size} differ at {percent(least_success)} "
        f"success, {percent(share_at_30_percent, digits=0)} at 30 %; the SFT before it ends by "
        "itself when no exam improves, and the plan warns if its model solves less"
    }


def _cost_fields(hours: Range, gpu_hours: Range, price: float) -> Reply:
    """Return the fields of a reply for the cost of a run: `hours`, and `money`, the price of
    `gpu_hours`, if a device hour has a `price` (not 0). Each has the keys low, likely and high."""
    fields: Reply = {"hours": hours.to_json()}
    if price:
        fields["money"] = plan_total.priced(gpu_hours, price).to_json()
    return fields


def _total_fields(total: Estimate, cap: float) -> Reply:
    """Return the field `total` of the reply: hours and money of all runs together, their shared
    `cap` in device hours, and the basis of the estimate."""
    fields = _cost_fields(total.hours, total.gpu_hours, total.gpu_hour_price)
    return fields | {"max_gpu_hours": cap, "basis": total.basis}


def _as_sentence(entry: Mapping[str, object]) -> str:
    """Return a check as text, with the step if it is about one: "step 2: data: 3 rows ..."."""
    label_note = f" ({entry['label']})" if entry.get("label") else ""
    step_note = f"step {entry['step']}{label_note}: " if "step" in entry else ""
    return f"{step_note}{entry['name']}: {entry['detail']}"
