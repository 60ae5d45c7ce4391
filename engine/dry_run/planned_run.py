"""One run of a plan. It is checked like a separate run, except for what is checked for the whole
plan.

The run may start from a model that an earlier run of the plan has yet to make. It shares one cap
with all runs of the plan.
"""

from collections.abc import Mapping, Sequence

from engine.dry_run.checks import DryRun
from engine.dry_run.judgements import Check, CheckList, Outcome, required
from engine.home.run_dir import Home
from engine.models.catalog import ModelRef
from engine.records.estimate import Estimate
from engine.runs.submit import contamination
from engine.runs.submit.contamination import Contamination
from engine.runs.submit.plan_steps import PlannedTraining
from engine.runs.submit.plans import model_made
from engine.runs.submit.requests import TrainRequest

# Checks that are made once for the whole plan: its runs share one disk and one cap.
_OF_THE_PLAN = ("disk", "budget")


class PlannedRun(DryRun):
    """The checks of one run of a plan."""

    def __init__(
        self,
        home: Home,
        request: TrainRequest,
        planned: PlannedTraining,
        earlier_runs: Sequence["PlannedRun"],
    ) -> None:
        """Prepare to check one training run of a plan.

        Args:
            home: the home.
            request: the request for the whole plan.
            planned: the run.
            earlier_runs: the runs that come before it in the plan; `planned.previous_index` is the
                index of the one among them that makes its start model.
        """
        run_request = planned.request  # the request of this run alone
        super().__init__(
            home,
            run_request.env_id,
            run_request.model,
            run_request.algorithm,
            dict(run_request.settings),
        )
        self.request = request
        self.planned = planned
        # The run that makes the start model; None if the start model exists already.
        self.maker: PlannedRun | None = None
        if planned.previous_index is not None:
            self.maker = earlier_runs[planned.previous_index]

    @property
    def step(self) -> int:
        """Number of the plan's step that the run belongs to, counted from 1."""
        return self.planned.step

    @property
    def figures(self) -> Estimate | None:
        """The estimate of the run's time, memory and money; None if an earlier check failed."""
        return self.facts.forecast.estimate if self.facts.forecast else None

    @property
    def model_to_be(self) -> ModelRef | None:
        """The model that the run is to make; None if its start model or settings are not known."""
        if self.facts.model is None or self.facts.resolved is None:
            return None
        return model_made(self.facts.model, self.facts.resolved.settings)

    def run_checks(self, began: float) -> CheckList:
        """Make every check of the run, and drop those that are made for the whole plan. `began` is
        the value of `time.monotonic()` at the start of the call."""
        check_list = super().run_checks(began)
        check_list.checks = [check for check in check_list.checks if check.name not in _OF_THE_PLAN]
        return check_list

    def check_model(self) -> Outcome:
        """Check that the start model exists, or that an earlier step makes it; store the model."""
        if self.maker is None:
            return super().check_model()
        start_model = self.maker.model_to_be
        if start_model is None:
            return Outcome("skip", f"step {self.maker.step} is to make it, and cannot")
        self.facts.model = start_model
        return Outcome("pass", f"the best of step {self.maker.step}")

    def overlap(self) -> Contamination:
        """Find the held-out tasks that occur in rows that the model is trained on.

        These are the training rows of this run, of the earlier runs of the plan that make its start
        model, and of those runs that made the model which the plan starts from.
        """
        earlier_runs: list[PlannedRun] = []  # from the last to the first
        maker = self.maker
        while maker is not None:
            earlier_runs.append(maker)
            maker = maker.maker
        start_model = earlier_runs[-1].model if earlier_runs else self.model
        earlier_envs = [required(run.facts.record).env_id for run in earlier_runs]
        record = required(self.facts.record)
        return contamination.compare_training(self.home, record, start_model, earlier_envs)

    def check_disk(self) -> Outcome:
        """Skip this check: the disk is checked once for all runs of the plan."""
        return Outcome("skip", "checked for the whole plan")

    def check_budget(self) -> Outcome:
        """Skip this check: the cap is checked once for all runs of the plan."""
        return Outcome("skip", "checked for the whole plan")

    def arguments(self) -> Mapping[str, object]:
        """Return the arguments of the call that submits the whole plan.

        `env_id` is the whole id if this run belongs to the first step and its environment was
        found; otherwise it is what the user gave.
        """
        all_arguments = self.request.given_arguments()
        arguments = {name: value for name, value in all_arguments.items() if value}
        if self.maker is None and self.facts.record:
            arguments["env_id"] = self.facts.record.env_id
        return arguments

    def entry(self, check: Check) -> dict[str, object]:
        """Return a check of this run as the reply shows it, with the step, and the run's label if
        it has one.

        For later steps the call that would mend the check is left out: its arguments belong to the
        first step and cannot change a later one.
        """
        fields = {"step": self.step, **check.to_json()}
        if self.planned.label:
            fields["label"] = self.planned.label
        if self.step > 1:
            fields.pop("call", None)
            fields["fix"] = check.fix.text
        return fields
