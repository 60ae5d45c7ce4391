"""The answers of a search for a prompt, from the sampler of every evaluation.

The search itself is engine/runs/prompts'; which model answers is loaded by engine/worker/evaluate.
"""

from collections.abc import Sequence

from engine.core.hints import Call, Hint
from engine.endpoints.chat_client import EndpointDown, Refused
from engine.evidence.stats.results import TEST
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import PromptConfig
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.evaluation import heldout
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, fits
from envs.json_types import TaskRow


class Desk:
    """The sampler of a search, and the files of its run."""

    def __init__(self, job: Job[PromptConfig], sampler: Sampler, context: RolloutContext) -> None:
        """Prepare to answer tasks greedily.

        Args:
            sampler: must have the adapter of the evaluated model loaded.
            context: how the tasks are played.
        """
        self.job, self.sampler, self.context = job, sampler, context
        settings = job.config.settings
        self.params = SamplingParams.greedy(settings, settings.seed)
        # The search writes its events and metrics, and asks whether to stop, through these.
        self.event, self.metrics, self.rewind = job.event, job.metrics, job.rewind
        self.check_stop = job.check_stop

    def play(self, tasks: Sequence[TaskRow]) -> list[EvaluationRow]:
        """Answer each task once, greedily, and score the answers. Returns one row per task, in the
        order of the tasks; all are marked as tasks of the test half."""
        if not tasks:
            return []
        with pulse.phase("evaluation", of=len(tasks)):
            groups = heldout.evaluate(tasks, self.context, self.sampler, self.params)
        half_of_task = {task["id"]: TEST for task in tasks}
        return list(heldout.rows_of(groups, half_of_task, model=self.job.config.model))

    def why_not(self, task: TaskRow) -> str:
        """Return why a task cannot be asked; "" if it can."""
        if fits(task, self.context, self.params):
            return ""
        return "the prompt leaves no room for an answer within max_length"

    def is_stopping(self) -> bool:
        """Tell whether the run was asked to stop."""
        return self.job.stop_signal.is_set()


def endpoint_failure(job: Job[PromptConfig], failure: Refused | EndpointDown) -> WorkerFailure:
    """Make the failure of a prompt search whose reflection endpoint (the model that proposes new
    prompts) refused the request or did not answer."""
    name = job.config.settings.reflection
    resume = Call("submit_train", {"resume": job.run.id})
    if isinstance(failure, Refused):
        advice = "Correct its url, model or key_env in config.toml; to go on:"
        return WorkerFailure(
            "config",
            f"{name} refuses to be asked.",
            evidence=str(failure),
            hint=Hint(advice, resume),
        )
    return WorkerFailure(
        "infra",
        f"{name} does not answer.",
        evidence=str(failure),
        hint=Hint("Wait until it does, then go on:", resume),
    )
