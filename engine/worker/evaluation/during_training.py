"""Evaluations of a training run: held-out tasks at step 0, every `eval_every` steps, at the end.

The validation half (`select` in files) chooses the best checkpoint; once the run is over the test
half (`report`) is played with it. At both ends the model is also asked what it could do before
training (prior_skills.py). Where the environment does not score, the held-out loss decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.core.files import Appender, keep_lines
from engine.environments.registry import EnvRecord
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import TrainConfig
from engine.runs import stored_answers
from engine.worker.core.batch import Row
from engine.worker.core.job import Job
from engine.worker.evaluation import heldout
from engine.worker.evaluation.prior_skills import PriorSkills
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext
from envs.json_types import TaskRow


@dataclass(frozen=True)
class LossRow:
    """A held-out conversation to measure the loss on."""

    task_id: str
    row: Row


@dataclass
class Best:
    """The best step so far on the validation half; of equal scores the one with the smaller loss.

    Attributes:
        step: -1 before any.
        since: evaluations since the score last improved; a smaller loss alone does not count.
    """

    step: int = -1
    score: float = -math.inf
    loss: float = math.inf
    since: int = 0


@dataclass(frozen=True)
class HalfResult:
    """What the policy did on one half of the held-out tasks.

    Attributes:
        curves: columns of the metrics; the environment may have named some of them.
        score: what checkpoints are compared by, as measured here; None if nothing was played.
        loss: held-out loss as measured here; None if it was not.
        rows: as they were written to the file of the evaluation.
    """

    curves: dict[str, float]
    score: float | None = None
    loss: float | None = None
    rows: Sequence[EvaluationRow] = ()


@dataclass(frozen=True)
class Questions:
    """What is asked at every evaluation.

    Attributes:
        env: the version of the environment that the tasks belong to.
        tasks: held-out tasks, already `heldout.ordered`.
        context: how they are played; None plays none.
        params: how answers are sampled.
        loss_rows: the same tasks as conversations; empty where their loss is not measured.
    """

    env: EnvRecord
    tasks: Sequence[TaskRow]
    context: RolloutContext | None
    params: SamplingParams
    loss_rows: Sequence[LossRow] = ()


class HeldoutEvaluation:
    """The evaluations of one training run; see the module.

    Args:
        questions: the tasks, and how they are played or measured.
        budget: padded tokens per forward pass.

    Attributes:
        half: of each task, by its id.
        choosing: how many tasks choose the checkpoint.
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
        """Divide the tasks in `questions` into two halves; nothing is played yet. `budget` is the
        most padded tokens of one forward pass."""
        self.job = job
        self.policy = policy
        self.sampler = sampler
        self.env = questions.env
        self.tasks = questions.tasks
        self.context = questions.context
        self.params = questions.params
        self.loss_rows = questions.loss_rows
        self.budget = budget
        self.half = heldout.halves(self.tasks)
        self.choosing = sum(half == heldout.VALIDATION for half in self.half.values())  # tasks
        self.prior_skills = PriorSkills(job, policy.base, sampler)
        self.best = Best()
        # Sums over everything that was played, for `habits`.
        self._tokens = self._turns = self._episodes = 0

    def evaluate(self, step: int, *halves: str) -> HalfResult:
        """Evaluate the policy as it is now on the given halves, and write the rows to
        `evals/step_NNNNNN.jsonl`. At step 0 the earlier skills are measured too.

        Gradients and random state do not change. If the validation half was evaluated, an event
        says so, and the best step is updated.

        Args:
            halves: VALIDATION, TEST or both.

        Returns the result of the validation half; an empty one if that is not among `halves`.
        """
        path = self.job.run.evals(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Drop rows of an earlier attempt that was interrupted: each task counts once.
        keep_lines(path, lambda row: row["half"] not in halves)
        validation = HalfResult({})
        with Appender(path) as file:
            for half in halves:
                result = self._evaluate_half(half, file)
                if half == heldout.VALIDATION:
                    validation = result
        if validation.curves:
            self._report_result(step, validation)
        if step == 0:
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("before")
        self.sampler.release_memory()
        return validation

    def _evaluate_half(self, half: str, file: Appender) -> HalfResult:
        """Play the tasks of one half and measure their loss, as far as the run does either, and
        write their rows to `file`. Returns the numbers and the rows."""
        tasks = [t for t in self.tasks if self.half[t["id"]] == half]
        curves: dict[str, float] = {}
        rows: list[EvaluationRow] = []
        score = loss = None
        if self.context is not None and tasks:
            self.sampler.load(self.policy.adapter)
            groups = heldout.evaluate(tasks, self.context, self.sampler, self.params)
            rows += heldout.rows_of(groups, self.half, self.job.run.id)
            members = [t for g in groups for t in g.members]
            self._episodes += len(members)
            self._tokens += sum(t.trained_tokens for t in members)
            self._turns += sum(t.turns for t in members)
            summary = heldout.summarise(members)
            curves = summary.curves()
            score = summary.score
        loss_rows = [r for r in self.loss_rows if self.half[r.task_id] == half]
        if loss_rows:
            loss, measured_rows = self._loss(loss_rows, half)
            curves["heldout_loss"] = loss
            # One row per task: if tasks are played, it is the row of the answer.
            rows += measured_rows if self.context is None else []
        for row in rows:
            file.append(row.to_line())
        return HalfResult(curves, score, loss, rows)

    @torch.no_grad()
    def _loss(self, rows: Sequence[LossRow], half: str) -> tuple[float, list[EvaluationRow]]:
        """Measure the loss of held-out conversations. Returns (mean cross-entropy over all their
        supervised tokens, a row for the evaluation file with the loss of each)."""
        network = self.policy.base.network
        total = 0.0  # of the cross-entropies
        tokens = 0
        measured_rows: list[EvaluationRow] = []
        for members in network.split([r.row for r in rows], self.budget):
            batch = network.collate([rows[i].row for i in members])
            logprobs, _ = network.logprobs(batch, self.policy.adapter)
            # For each row of the microbatch: its summed cross-entropy, and its supervised tokens.
            sums = torch.zeros(len(members)).index_add(0, batch.row.cpu(), -logprobs.cpu())
            counts = torch.bincount(batch.row.cpu(), minlength=len(members))
            for position, index in enumerate(members):
                total += float(sums[position])
                tokens += int(counts[position])
                loss = float(sums[position]) / max(1, int(counts[position]))
                task_id = rows[index].task_id
                count = int(counts[position])
                measured_rows.append(self._loss_row(task_id, half, loss, count))
        return total / max(1, tokens), measured_rows

    def _loss_row(self, task_id: str, half: str, loss: float, tokens: int) -> EvaluationRow:
        """The row of a task whose loss was measured, for the evaluation file. `loss` is the mean
        over its supervised tokens, whose number is `tokens`."""
        return EvaluationRow(
            model=self.job.run.id,
            task=task_id,
            half=half,
            attempt=0,
            loss=loss,
            tokens=tokens,
            error=None,
        )

    def _report_result(self, step: int, result: HalfResult) -> None:
        """Write the event `evaluated` with the numbers of the validation half at `step`. After step
        0 also update the best step; step 0 is the start and cannot be the best."""
        # What was not measured takes no part; without a score, the smaller loss is better.
        loss = math.inf if result.loss is None else result.loss
        score = -loss if result.score is None else result.score
        curves = result.curves
        text = ", ".join(f"{k} {v:.3f}" for k, v in curves.items())
        text = (
            f"step {step}: {text} (the {self.choosing} held-out tasks that choose the checkpoint)"
        )
        self.job.event("evaluated", text, step=step, **curves)
        if step == 0:
            return
        since = 0 if score > self.best.score else self.best.since + 1
        # Of equal scores the smaller loss wins.
        if (score, -loss) > (self.best.score, -self.best.loss):
            self.best = Best(step, score, loss)
        self.best.since = since

    def habits(self) -> dict[str, float]:
        """How long the answers in all evaluations of the run were; {} if none was played.

        Keys:
            said_share: the mean number of tokens of an episode, as a multiple of max_tokens.
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
        """Play the test half with the best checkpoint and measure the earlier skills with it.
        Returns its step. A second env process scores a sample of the answers again meanwhile.

        Args:
            load_best: loads the checkpoint of the step it is given into the policy.
        """
        load_best(self.best.step)
        with self._rescoring() as rescore:
            self.evaluate(self.best.step, heldout.TEST)
            tasks = {task["id"]: task for task in self.tasks}
            rescore(self.job.run.evals(self.best.step), heldout.TEST, tasks)
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("after")
        return self.best.step

    @contextmanager
    def _rescoring(self) -> Iterator[stored_answers.Begin]:
        """A context with a second env process that can score answers again, to check that scores
        repeat.

        Yields `begin(file, half, tasks)`, which starts that in the background; it does nothing if
        the run plays no tasks. If it cannot be done, the reason becomes the event
        `rescore_skipped`.
        """
        if self.context is None:
            yield lambda *_: None
            return
        job = self.job
        with stored_answers.beside(
            job.run, self.env, lambda why: job.event("rescore_skipped", why)
        ) as rescore:
            yield rescore
