"""Evaluations of a training run: held-out tasks at step 0, every `eval_every` steps, at the end.

The validation half (`select` in files) chooses the best checkpoint; once the run is over the test
half (`report`) is played with it. At both ends the model is also asked what it could do before
(prior_skills.py). Where the
environment does not score, the held-out loss decides.
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
    """The best step so far by the validation half; of equal scores that of the smaller loss.

    `since` counts evaluations without a better score; a smaller loss alone does not end it.
    """

    step: int = -1
    score: float = -math.inf
    loss: float = math.inf
    since: int = 0


@dataclass(frozen=True)
class HalfResult:
    """What the policy did on one half: its columns, and apart from them what chooses by it.

    A column may be named by the environment; score and loss are what was measured here.

    Attributes:
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
        env: the version the tasks are of.
        tasks: held-out tasks, already `heldout.ordered`; played when `context` is given.
        params: how answers are sampled.
        loss_rows: the same tasks as conversations; empty where their loss is not asked for.
    """

    env: EnvRecord
    tasks: Sequence[TaskRow]
    context: RolloutContext | None
    params: SamplingParams
    loss_rows: Sequence[LossRow] = ()


class HeldoutEvaluation:
    """See the module.

    Args:
        budget: padded tokens per forward pass.
    """

    def __init__(
        self,
        job: Job[TrainConfig],
        policy: Policy,
        sampler: Sampler,
        questions: Questions,
        budget: int = 4096,
    ) -> None:
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
        self._tokens = self._turns = self._episodes = 0  # tokens and turns, in so many episodes

    def evaluate(self, step: int, *halves: str) -> HalfResult:
        """Evaluate the policy as it is now; returns the result of the validation half.

        Rows go to `evals/step_NNNNNN.jsonl`. Gradients and random state are left untouched.
        """
        path = self.job.run.evals(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        # An attempt that was cut short may have left rows: each task counts once.
        keep_lines(path, lambda row: row["half"] not in halves)
        validation = HalfResult({})
        with Appender(path) as file:
            for half in halves:
                result = self._evaluate_half(half, file)
                if half == heldout.VALIDATION:
                    validation = result
        if validation.curves:
            self._note(step, validation)
        if step == 0:
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("before")
        self.sampler.release_memory()
        return validation

    def _evaluate_half(self, half: str, file: Appender) -> HalfResult:
        """Play and measure the tasks of one half, and write their rows."""
        tasks = [t for t in self.tasks if self.half[t["id"]] == half]
        curves: dict[str, float] = {}
        written: list[EvaluationRow] = []
        score = loss = None
        if self.context is not None and tasks:
            self.sampler.load(self.policy.adapter)
            groups = heldout.evaluate(tasks, self.context, self.sampler, self.params)
            written += heldout.rows_of(groups, self.half, self.job.run.id)
            members = [t for g in groups for t in g.members]
            self._episodes += len(members)
            self._tokens += sum(t.trained_tokens for t in members)
            self._turns += sum(t.turns for t in members)
            summary = heldout.summarise(members)
            curves, score = summary.curves(), summary.score
        loss_rows = [r for r in self.loss_rows if self.half[r.task_id] == half]
        if loss_rows:
            loss, measured = self._loss(loss_rows, half)
            curves["heldout_loss"] = loss
            # Where tasks are played, their rows are the played ones.
            written += measured if self.context is None else []
        for row in written:
            file.append(row.to_line())
        return HalfResult(curves, score, loss, written)

    @torch.no_grad()
    def _loss(self, rows: Sequence[LossRow], half: str) -> tuple[float, list[EvaluationRow]]:
        """Mean cross-entropy over all supervised tokens of the rows, and a row of it for each."""
        network = self.policy.base.network
        total, tokens = 0.0, 0
        measured: list[EvaluationRow] = []
        for members in network.split([r.row for r in rows], self.budget):
            batch = network.collate([rows[i].row for i in members])
            logprobs, _ = network.logprobs(batch, self.policy.adapter)
            sums = torch.zeros(len(members)).index_add(0, batch.row.cpu(), -logprobs.cpu())
            counts = torch.bincount(batch.row.cpu(), minlength=len(members))
            for position, index in enumerate(members):
                total += float(sums[position])
                tokens += int(counts[position])
                loss = float(sums[position]) / max(1, int(counts[position]))
                task_id, count = rows[index].task_id, int(counts[position])
                measured.append(self._loss_row(task_id, half, loss, count))
        return total / max(1, tokens), measured

    def _loss_row(self, task_id: str, half: str, loss: float, tokens: int) -> EvaluationRow:
        return EvaluationRow(
            model=self.job.run.id,
            task=task_id,
            half=half,
            attempt=0,
            loss=loss,
            tokens=tokens,
            error=None,
        )

    def _note(self, step: int, result: HalfResult) -> None:
        """Tell of an evaluation in the events, and keep the best step."""
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
        if (score, -loss) > (self.best.score, -self.best.loss):
            self.best = Best(step, score, loss)
        self.best.since = since

    def habits(self) -> dict[str, float]:
        """`said_share`, mean tokens of an episode in multiples of max_tokens, and `turns_mean`;
        {} before any was played."""
        if not self._episodes:
            return {}
        share = self._tokens / self._episodes / self.params.max_tokens
        return {
            "said_share": round(share, 4),
            "turns_mean": round(self._turns / self._episodes, 3),
        }

    def report(self, load_best: Callable[[int], None]) -> int:
        """Play the test half with the best checkpoint; returns its step.

        Some of its answers are scored again by a fresh env process, which starts and works beside.
        """
        load_best(self.best.step)
        with self._rescoring() as begin:
            self.evaluate(self.best.step, heldout.TEST)
            tasks = {task["id"]: task for task in self.tasks}
            begin(self.job.run.evals(self.best.step), heldout.TEST, tasks)
            self.sampler.load(self.policy.adapter)
            self.prior_skills.evaluate("after")
        return self.best.step

    @contextmanager
    def _rescoring(self) -> Iterator[stored_answers.Begin]:
        if self.context is None:
            yield lambda *_: None
            return
        job = self.job
        with stored_answers.beside(
            job.run, self.env, lambda why: job.event("rescore_skipped", why)
        ) as begin:
            yield begin
