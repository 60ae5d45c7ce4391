"""Evaluations of a training run: held-out tasks at step 0, every `eval_every` steps, and at the
end.

The held-out tasks are divided into two halves. The validation half (`select` in files) chooses the
best checkpoint; the test half (`report`) is played with this checkpoint once the run is over. At
step 0 and at the end, the model is also asked what it could do before training (prior_skills.py).
If the environment does not score answers, the loss on held-out tasks decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.core.files import Appender, keep_lines
from engine.core.format import decimal
from engine.environments.registry import EnvRecord
from engine.evidence.stats.basics.summary import summarise
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import TrainConfig
from engine.runs.evaluation import exam, stored_answers
from engine.worker.core import pulse
from engine.worker.core.job import Job
from engine.worker.evaluation import heldout
from engine.worker.evaluation.heldout_loss import HeldoutLoss, MeasuredLoss
from engine.worker.evaluation.prior_skills import PriorSkills
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext
from envs.json_types import TaskRow

_LEAST_RELATIVE_DROP = 0.01  # a clear drop: below the smallest loss so far by this share of it


@dataclass(frozen=True)
class Best:
    """The best step so far on the validation half. Of equal scores the higher reward counts, then
    the smaller loss.

    Attributes:
        step: the best step; -1 before there is one.
        score, loss, reward: those of the best step.
        since: how many evaluations ago the policy last made progress, see `best_after`.
        least_loss: the smallest held-out loss of any step.
    """

    step: int = -1
    score: float = -math.inf
    loss: float = math.inf
    since: int = 0
    least_loss: float = math.inf
    reward: float = -math.inf


@dataclass(frozen=True)
class HalfResult:
    """What the policy did on one half of the held-out tasks.

    Attributes:
        curves: metrics by name, for metrics.jsonl; the environment may have named some of them.
        score: the score by which checkpoints are compared; None if no task was played.
        loss: the loss on held-out tasks; None if it was not measured.
        rows: the rows that were written to the evaluation's file.
    """

    curves: dict[str, float]
    score: float | None = None
    loss: float | None = None
    rows: Sequence[EvaluationRow] = ()


def best_after(best: Best, step: int, result: HalfResult) -> Best:
    """Return the best step after the evaluation of `step`, whose validation half gave `result`;
    `best` is the one before that evaluation.

    A higher score is better, of equal scores the higher reward, then the smaller loss. Without
    scores only the loss counts. `since` counts evaluations without progress. Progress is a higher
    score, or, while not all tasks are solved, a loss clearly below every earlier one: a success
    rate of 0 can hide for a long time that the answers are getting closer.
    """
    loss = math.inf  # an unmeasured loss, or NaN, decides nothing
    if result.loss is not None and math.isfinite(result.loss):
        loss = result.loss
    score = -loss if result.score is None else result.score  # the higher the better
    is_solved = result.curves.get("heldout_success") == 1.0
    is_clear_drop = not is_solved and loss < best.least_loss * (1 - _LEAST_RELATIVE_DROP)
    reward = result.curves.get("heldout_reward", -math.inf)
    is_better = (score, reward, -loss) > (best.score, best.reward, -best.loss)
    return Best(
        step=step if is_better else best.step,
        score=score if is_better else best.score,
        loss=loss if is_better else best.loss,
        since=0 if score > best.score or is_clear_drop else best.since + 1,
        least_loss=min(loss, best.least_loss),
        reward=reward if is_better else best.reward,
    )


@dataclass(frozen=True)
class Questions:
    """What is asked at every evaluation.

    Attributes:
        env: the version of the environment that the tasks belong to.
        tasks: held-out tasks, and dev tasks if there are any (`exam.exam_tasks`).
        context: how the tasks are played; None if they are not played.
        params: how answers are sampled.
        losses: measures the loss on the same tasks; None if it is not measured.
    """

    env: EnvRecord
    tasks: Sequence[TaskRow]
    context: RolloutContext | None
    params: SamplingParams
    losses: HeldoutLoss | None = None


class HeldoutEvaluation:
    """The evaluations of one training run.

    Attributes:
        half_of_task: VALIDATION or TEST for each task id.
        validation_count: how many tasks choose the best checkpoint.
        dev_count: how many of the tasks are dev tasks; if there are any, these choose.
        best: the best step so far.
    """

    def __init__(
        self,
        job: Job[TrainConfig],
        policy: Policy,
        sampler: Sampler,
        questions: Questions,
        budget: int = 4096,
    ) -> None:
        """Divide the tasks in `questions` into two halves; nothing is played yet.

        Args:
            sampler: plays the tasks.
            questions: the tasks, and how they are played or measured.
            budget: the most tokens of one forward pass, padding included.
        """
        self.job = job
        self.policy = policy
        self.sampler = sampler
        self.env = questions.env
        self.tasks = questions.tasks
        self.context = questions.context
        self.params = questions.params
        self.losses = questions.losses
        self.budget = budget
        self.half_of_task = exam.halves(self.tasks)
        # The validation half chooses the checkpoint.
        self.validation_count = list(self.half_of_task.values()).count(exam.VALIDATION)
        self.group_of_task = {task["id"]: task.get("group") for task in self.tasks}
        self.dev_count = sum(exam.is_dev(task) for task in self.tasks)
        self.prior_skills = PriorSkills(job, policy.base, sampler)
        self.best = Best()
        # How many sampled tokens, turns and episodes all evaluations had so far; see `habits`.
        self._tokens = self._turns = self._episodes = 0

    def in_words(self) -> str:
        """Say how many held-out tasks there are, and what they are for, to be put behind the number
        of steps."""
        task_count, choosing_count = len(self.tasks), self.validation_count
        reported_count = task_count - choosing_count
        if self.dev_count:
            return (
                f": {choosing_count} dev tasks choose the checkpoint, "
                f"all {reported_count} held-out tasks are reported"
            )
        roles = f": {choosing_count} choose the checkpoint, {reported_count} are reported"
        return f", {task_count} held-out tasks{roles if task_count else ''}"

    def evaluate(self, step: int, *halves: str) -> HalfResult:
        """Evaluate the policy as it is now on the given halves (VALIDATION, TEST or both), and
        write the rows to `evals/step_NNNNNN.jsonl`.

        At step 0, the skills that the model has before training are measured too. Afterwards the
        sampler frees its memory. Returns the result of the validation half, which chooses the best
        step; it is an empty `HalfResult` if only TEST was given.
        """
        with pulse.phase("evaluation", of=self.units(*halves)):
            results = self._evaluate_halves(step, halves)
        validation = results.get(exam.VALIDATION, HalfResult({}))
        if validation.curves:
            self._report_result(step, validation)
            if step > 0:  # the start cannot be the best
                self.best = best_after(self.best, step, validation)
        if step == 0:
            # The sampler may not have the adapter yet: only playing tasks loads it.
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("before")
        self.sampler.release_memory()
        return validation

    def units(self, *halves: str) -> int:
        """Count the units of an evaluation of these halves, for percentages: one answer to score
        and one loss to measure for every task, if the run does both."""
        task_count = sum(half in halves for half in self.half_of_task.values())
        scores_answers = self.context is not None
        measures_losses = self.losses is not None
        units_per_task = int(scores_answers) + int(measures_losses)
        return task_count * units_per_task

    def _evaluate_halves(self, step: int, halves: Sequence[str]) -> dict[str, HalfResult]:
        """Evaluate the policy on each of these halves (VALIDATION or TEST) of the held-out tasks,
        and write the rows to the evaluation file of `step`. Returns the results by half."""
        path = self.job.run.evals(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rows of an earlier, interrupted attempt are dropped, so that each task counts once.
        keep_lines(path, lambda row: row["half"] not in halves)
        with Appender(path) as file:
            return {half: self._evaluate_half(half, file) for half in halves}

    def _evaluate_half(self, half: str, file: Appender) -> HalfResult:
        """Play the tasks of one half (VALIDATION or TEST) if the environment scores answers,
        measure their loss if the run does so, and write the rows to `file`. Returns the numbers and
        the rows."""
        tasks = [task for task in self.tasks if self.half_of_task[task["id"]] == half]
        played = HalfResult({})
        if self.context is not None and tasks:
            played = self._play(tasks, self.context)
        result = self._with_loss(played, half)
        for row in result.rows:
            file.append(row.to_line())
        return result

    def _play(self, tasks: Sequence[TaskRow], context: RolloutContext) -> HalfResult:
        """Play and score the tasks with the policy as it is now. Returns the metrics, the score and
        the rows of its answers; no loss is measured here."""
        self.sampler.load(self.policy.adapter)
        groups = heldout.evaluate(tasks, context, self.sampler, self.params)
        rows = list(heldout.rows_of(groups, self.half_of_task, model=self.job.run.id))
        answers = [answer for group in groups for answer in group.members]
        self._episodes += len(answers)  # these three sums are read by `habits`
        self._tokens += sum(answer.trained_tokens for answer in answers)
        self._turns += sum(answer.turns for answer in answers)
        summary = summarise(answers)
        return HalfResult(summary.curves(), score=summary.score, rows=rows)

    def _with_loss(self, played: HalfResult, half: str) -> HalfResult:
        """Add the loss on a half's tasks to `played`, the result of playing that half.

        The loss is the mean over all supervised tokens (SFT) or all pairs (DPO). Returns `played`
        itself if no loss is measured.
        """
        measured = self._losses(half)
        if not measured:
            return played
        total_loss = sum(row.total for row in measured)
        total_weight = sum(row.weight for row in measured)
        loss = total_loss / max(1, total_weight)
        rows = played.rows
        if self.context is None:  # nothing was played, so there are no rows of answers
            rows = [self._loss_row(row, half) for row in measured]
        curves = played.curves | {"heldout_loss": loss}
        return HalfResult(curves, score=played.score, loss=loss, rows=rows)

    def _losses(self, half: str) -> Sequence[MeasuredLoss]:
        """Measure the loss of each conversation of one half of the tasks (VALIDATION or TEST).
        Returns () if this run measures no losses."""
        if self.losses is None:
            return ()
        task_ids = {task for task, task_half in self.half_of_task.items() if task_half == half}
        measured = self.losses.measure(self.policy, task_ids, self.budget)
        pulse.advance(len(task_ids))  # `units` also counts tasks without an answer to measure
        return measured

    def _loss_row(self, measured: MeasuredLoss, half: str) -> EvaluationRow:
        """Make the row for the evaluation file of a task whose loss was measured but that was not
        played.

        `half` is the half that the task belongs to.
        """
        group = self.group_of_task.get(measured.task_id)
        return EvaluationRow(
            model=self.job.run.id,
            task=measured.task_id,
            half=half,
            attempt=0,
            loss=measured.loss,
            tokens=measured.tokens,
            error=None,
            **({"task_group": group} if group else {}),
        )

    def _report_result(self, step: int, result: HalfResult) -> None:
        """Write the event `evaluated` with the numbers of the validation half (`result`) at
        `step`."""
        curves = result.curves
        numbers = ", ".join(f"{name} {decimal(value)}" for name, value in curves.items())
        side = "dev" if self.dev_count else "held-out"
        tasks = f"the {self.validation_count} {side} tasks that choose the checkpoint"
        self.job.event("evaluated", f"step {step}: {numbers} ({tasks})", step=step, **curves)

    def habits(self) -> dict[str, float]:
        """Return how long the answers in all evaluations of the run were; {} if no task was played.

        Keys:
            said_share: the mean number of tokens of an episode (one played task), as a multiple of
                max_tokens.
            turns_mean: the mean number of turns of an episode.
        """
        if not self._episodes:
            return {}
        share = self._tokens / self._episodes / self.params.max_tokens
        return {
            "said_share": round(share, 4),
            "turns_mean": round(self._turns / self._episodes, 3),
        }

    def report(self, load_best: Callable[[int], None]) -> int:
        """Play the test half with the best checkpoint, then measure how much this checkpoint has
        kept of the skills that the model had before training. Returns the checkpoint's step.

        While the skills are measured, a second env process (one that runs the environment's code)
        scores a sample of the test half's answers again, to check that scores are repeatable.

        Args:
            load_best: loads the checkpoint of the step it is called with into the policy.
        """
        load_best(self.best.step)
        with self._rescoring() as rescore:
            self.evaluate(self.best.step, exam.TEST)
            task_by_id = {task["id"]: task for task in self.tasks}
            # In the background, while the skills are measured.
            rescore(self.job.run.evals(self.best.step), exam.TEST, task_by_id)
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("after")
        return self.best.step

    @contextmanager
    def _rescoring(self) -> Iterator[stored_answers.Begin]:
        """Context manager with a second process that runs the environment's code, to check that
        scores are repeatable.

        Yields a function that takes a file of answers, a half, and the tasks by id, and scores a
        sample of those answers again in the background. If the run plays no tasks, the function
        does nothing.
        """
        if self.context is None:
            yield lambda *_: None
            return
        with stored_answers.rescoring(
            self.job.run, self.env, lambda reason: self.job.event("rescore_skipped", reason)
        ) as rescore:
            yield rescore
