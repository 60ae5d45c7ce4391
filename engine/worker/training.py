"""What the training loops share around their steps: policy, optimizer, evaluations, checkpoints,
and the end of the run.

A loop iterates over `steps()`, does its own forward and backward pass, and calls `optimizer_step`
once or more and `log` once per step. Whatever happens between steps happens in `log` and `steps`.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from engine.evidence.detect.alerts import Watch, alert_fields
from engine.evidence.detect.findings import Finding
from engine.evidence.verdict.verdict import run_verdict
from engine.home.hashes import weight_hashes
from engine.machine.pace.heartbeat import Outlook
from engine.records.known_settings import KnownSettings
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.manifest import ReplayUsed
from engine.records.run_config import TrainConfig
from engine.records.settings import STOP_EARLY_PATIENCE
from engine.runs.evaluation import exam
from engine.worker.components import Components
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, LoopState, Result, Stopped
from engine.worker.core.limits import AnswerLimits
from engine.worker.evaluation.during_training import (
    Best,
    HalfResult,
    HeldoutEvaluation,
    Questions,
)
from engine.worker.evaluation.heldout_loss import HeldoutLoss
from engine.worker.manifest import write_manifest
from engine.worker.network.adapter import fingerprint, read_adapter
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import SamplingParams
from engine.worker.ranks.messages import Step
from engine.worker.ranks.parts import SHAREABLE
from engine.worker.ranks.shared_pass import SharedPass
from engine.worker.rollouts.collect import RolloutContext
from engine.worker.update import checkpoint
from engine.worker.update.disk_guard import make_room
from engine.worker.update.memory_retry import BatchPass, MemoryRetry, tokens_at_once
from engine.worker.update.meter import Meter, peak_memory, totals
from engine.worker.update.pending import Pending, Reading
from engine.worker.update.profiling import Profiler
from engine.worker.update.replay_pass import PassWithReplay
from engine.worker.update.schedule import apply_step, make_optimizer, rate
from engine.worker.update.work_ahead import Exam, earliest_end, work_ahead
from envs.json_types import TaskRow

Sums = TypeVar("Sums")


class Training:
    """One training run under way. As a context manager it saves a checkpoint if the run is asked to
    stop (`Stopped`)."""

    def __init__(self, job: Job[TrainConfig], components: Components, total: int) -> None:
        """Make the policy, its optimizer and the meters.

        Args:
            components: what was loaded for the run.
            total: optimizer steps (SFT, DPO) or batches (GRPO) of the whole run.

        Raises:
            WorkerFailure: kind config, if the adapter to start from was trained on another base.
        """
        self.job = job
        self.components = components
        self.total = total
        self.settings = job.config.settings
        self.base_weights = weight_hashes(job.run.home, components.base.path)
        self.policy = self._starting_policy()
        self._initial_weights = self.policy.adapter.state()  # the best ones if training does harm
        self.parameters = self.policy.parameters()
        self.optimizer = make_optimizer(self.parameters, self.settings)
        self.ranks = components.ranks
        self._shared_pass: SharedPass | None = None  # the current batch's, shared with other ranks
        self.meter = Meter(self.policy, self.ranks.count if self.ranks else 1)
        self.profiler = Profiler(job.run.logs, wanted=job.config.profile)
        self.done = 0  # steps done so far
        self.state: LoopState = {}  # what the loop keeps in checkpoints, besides weights
        self.evaluation: HeldoutEvaluation | None = None
        # Checks every step for alerts: signs of trouble in metrics and rollouts.
        self.watch = Watch(job.run, job.config.algorithm, KnownSettings.of(self.settings))
        self.ended_by_alert = False
        self.replayed: ReplayUsed | None = None  # what the loop replays; set before `start`
        # Seconds spent between the steps: on evaluations ("exam") and on checkpoints.
        self.phase_s = {"exam_s": 0.0, "save_s": 0.0}
        self._initial_fingerprint = fingerprint(self.parameters)  # `finish` expects a different one
        self._last_saved_step = -1  # none yet

    def _starting_policy(self) -> Policy:
        """Make the policy before the first step: the base with a new adapter, or with the adapter
        that the config starts from. Raises WorkerFailure if that adapter was trained on another
        base."""
        start = self.job.config.start_adapter
        start_folder = Path(start) if start else None
        if start_folder is not None:
            checkpoint.require_base(start_folder, self.base_weights)
        return Policy(self.components.base, self.settings, start_folder)

    def __enter__(self) -> "Training":
        """Return this object; only `__exit__` has work to do."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Save a checkpoint if the run was asked to stop (`Stopped`) after at least one step, and
        end the other ranks (processes of this run). After any other error, the run is resumed from
        the last checkpoint that was saved before."""
        try:
            if isinstance(error, Stopped) and self.done > 0:
                self.save()
            if self.ranks is not None and isinstance(error, RuntimeError):
                self.ranks.explain(error)
        finally:
            if self.ranks is not None:
                ended_well = error is None or isinstance(error, Stopped)
                self.ranks.close(failed=not ended_well)

    def start(
        self,
        tasks: Sequence[TaskRow],
        *,
        context: RolloutContext | None,
        limits: AnswerLimits,
        budget: int,
        losses: HeldoutLoss | None = None,
    ) -> None:
        """Prepare the evaluations and write the manifest. Then resume from the last checkpoint; if
        there is none, do the first evaluation, at step 0. Raises WorkerFailure if that checkpoint
        was trained on another base.

        Args:
            tasks: the held-out tasks, and dev tasks if there are any (`exam.exam_tasks`).
            context: how the tasks are played; None if the environment scores nothing.
            limits: how long answers may get.
            budget: the most tokens of one forward pass, padding included.
            losses: also measures the loss on the same tasks (SFT, DPO); None if it is not measured.
        """
        params = SamplingParams.greedy(limits, self.settings.seed)
        questions = Questions(self.components.env, tasks, context, params, losses)
        self.evaluation = HeldoutEvaluation(
            self.job, self.policy, self.components.sampler, questions, budget
        )
        isolation = context.process.isolation if context else ""
        write_manifest(
            self.job,
            self.components,
            isolation,
            params,
            self.meter.matrix_flops,
            self.replayed,
        )
        self._report_start(self.evaluation)
        # With more tasks in an evaluation, a smaller change of its score raises an alert.
        self.watch.exam_tasks = self.evaluation.validation_count
        resumed = self._resume()
        if self.ranks is not None:  # the other ranks begin with the same weights as this one
            self.ranks.broadcast_state(self.policy.adapter, self.optimizer)
        self._plan_work(self.evaluation, resumed=resumed)
        if tasks and not resumed:
            self._evaluate_start(self.evaluation)
        self._catch_up_alerts()

    def _plan_work(self, evaluation: HeldoutEvaluation, *, resumed: bool) -> None:
        """Note how much work this attempt will do, for the forecast of its end. `resumed` says that
        it goes on from a checkpoint, so that the evaluation at step 0 is not done again."""
        exam_size = Exam(
            choosing=evaluation.units(exam.VALIDATION),
            reported=evaluation.units(exam.TEST),
            questions=evaluation.prior_skills.question_count() if evaluation.tasks else 0,
        )
        outlook = Outlook(
            steps_before=self.done,
            answers_at_end=exam_size.reported,
            earliest_end=self._earliest_end(evaluation.best),
        )
        units = work_ahead(self.settings, self.done, self.total, exam_size, resumed=resumed)
        pulse.plan(units, outlook)

    def _earliest_end(self, best: Best) -> int | None:
        """Return the step at which `stop_early=heldout` may end this run; None if that is not set.
        `best` is the best step so far."""
        return earliest_end(self.settings, self.done, self.total, best.since)

    def _evaluate_start(self, evaluation: HeldoutEvaluation) -> None:
        """Evaluate the policy before the first step, and write its metrics as those of step 0."""
        with self._timed("exam_s"):
            result = evaluation.evaluate(0, exam.VALIDATION, exam.TEST)
        self.job.metrics(step=0, values=result.curves)

    def _catch_up_alerts(self) -> None:
        """After a resume, read the earlier steps again: the alerts that they raised become active,
        and may end the run."""
        self.watch.catch_up(self.done)
        self.ended_by_alert = self.settings.stop_early == "alert" and bool(self.watch.active_alerts)

    def _report_start(self, evaluation: HeldoutEvaluation) -> None:
        """Write the event `started`: how many steps there are, how many tasks choose the
        checkpoint, and on how many others the result is reported."""
        dev = {"dev_tasks": evaluation.dev_count} if evaluation.dev_count else {}
        self.job.event(
            "started",
            f"{self.total} steps{evaluation.in_words()}",
            total_steps=self.total,
            heldout_tasks=len(evaluation.tasks),
            heldout_choose=evaluation.validation_count,
            **dev,
        )

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is still to do, from 1; the caller does that step.
        Raises Stopped between two steps if the run was asked to stop.

        The iteration ends early, with the event `stopped_early`, if the setting `stop_early` asks
        for it: with "alert" after an alert, with "heldout" after STOP_EARLY_PATIENCE evaluations in
        a row without progress. It also ends early where GRPO's rewards no longer differ.
        """
        while self.done < self.total and not self.ends_now:
            # Checked before a step: if an attempt was killed after this end, the resumed one must
            # not train another step.
            if self.evaluation is not None and self._no_longer_improves(self.evaluation.best):
                self.job.event(
                    "stopped_early", f"no better exam since step {self.evaluation.best.step}"
                )
                return
            self.job.check_stop()
            step = self.done + 1
            # A step's random draws (mostly dropout) depend on the seed and its number only, so that
            # a resumed run repeats them. The large factor keeps apart the steps of two seeds.
            torch.manual_seed(self.settings.seed * 1_000_003 + step)
            with self.profiler.step(step), pulse.phase("training"):
                yield step
        if self.ended_by_alert:
            alerts = ", ".join(sorted(self.watch.active_alerts))
            self.job.event("stopped_early", f"alert: {alerts}", step=self.done)
        elif self.ends_now and self.done < self.total:
            self.job.event("stopped_early", "no rewards of a group differ any more", step=self.done)

    @property
    def ends_now(self) -> bool:
        """Whether the step just done was the last one, before `total`: it raised an alert that ends
        the run, or the loop has noted in the state that there is nothing left to learn."""
        return self.ended_by_alert or self.state.get("ends_at") is not None

    def _no_longer_improves(self, best: Best) -> bool:
        """Tell whether `stop_early=heldout` ends the run, because STOP_EARLY_PATIENCE evaluations
        in a row made no progress (`best_after`)."""
        return self.settings.stop_early == "heldout" and best.since >= STOP_EARLY_PATIENCE

    def within_memory(self, step: int, budget: int, batch_pass: BatchPass[Sums]) -> Sums:
        """Run the pass over the batch of `step` and return what it returns.

        Microbatches have at most `budget` tokens. Whenever memory runs out, this limit is halved
        for the rest of the run, and the pass is done again.

        Raises:
            WorkerFailure: kind oom, if halving does not help.
        """
        retry = MemoryRetry(
            budget,
            self.state,
            clear_gradients=self.policy.adapter.clear_gradients,
            report=partial(self._report_memory, step),
        )
        any_pass: object = batch_pass  # `object`: the type of `batch_pass` excludes the check below
        if isinstance(any_pass, PassWithReplay):  # only rank 0 trains on the replayed rows
            any_pass.first = self._shared_by_ranks(step, any_pass.policy_pass)
        shared = self._shared_by_ranks(step, batch_pass)
        if self.ranks is not None and self.ranks.lockstep is not None:
            # A pass over a sharded base cannot be repeated: other ranks wait in the middle of it.
            return shared.run(tokens_at_once(budget, self.state))
        return retry.run(shared)

    def _shared_by_ranks(self, step: int, batch_pass: BatchPass[Sums]) -> BatchPass[Sums]:
        """Return the pass as all ranks do it together, or the pass itself if this process is the
        whole run or ranks cannot do parts of this pass."""
        if self.ranks is None or not self.ranks.trainers or not isinstance(batch_pass, SHAREABLE):
            return batch_pass
        if self._shared_pass is None or self._shared_pass.batch_pass is not batch_pass:
            seed = self.settings.seed * 1_000_003 + step  # as in `steps`
            self._shared_pass = SharedPass(self.ranks, batch_pass, seed)
        shared: Any = self._shared_pass  # it returns what `batch_pass` would: `Sums`
        return shared

    def _report_memory(self, step: int, tokens: int, message: str) -> None:
        """Write the event that memory ran out in `step`, and apply the new token limit to
        evaluations too.

        Args:
            tokens: the limit after halving.
            message: the error, in one line.
        """
        self.job.event(
            "memory",
            f"memory ran out in step {step}: from here on at most {tokens} tokens go through "
            "the model at once; the updates stay the same",
            step=step,
            microbatch_tokens=tokens,
            evidence=message,
        )
        if self.evaluation is not None:
            self.evaluation.budget = min(self.evaluation.budget, tokens)

    def optimizer_step(self, step: int, pending: Pending[Sums]) -> tuple[Sums, float, float]:
        """Update the adapter's weights with the gradients gathered so far, and clear the gradients.

        Args:
            pending: the result of the pass that gathered them; it is read from the device here,
                together with the norm.

        Returns (that result, gradient norm before clipping, learning rate of the step).

        Raises:
            WorkerFailure: kind nonfinite, if the loss or a gradient is NaN or infinite; then no
                weight has changed.
        """
        lr = rate(step, self.total, self.settings)
        adapter, max_norm = self.policy.adapter, self.settings.max_grad_norm
        reading = Reading(pending, step=self.done + 1)
        apply = partial(apply_step, self.optimizer, adapter, lr, max_norm, reading)
        if self.ranks is None:
            grad_norm = apply()
        else:
            grad_norm = self.ranks.step(Step(lr, max_norm), adapter, apply)
        return reading.sums, grad_norm, lr

    def log(
        self,
        step: int,
        values: Mapping[str, float | None],
        rollouts: Sequence[TrajectoryRecord] = (),
    ) -> None:
        """End a step: evaluate if that is due, check for alerts, write the metrics, and save a
        checkpoint if that is due. With `stop_early=alert` an alert makes this step the last one, as
        does `ends_at` of the state. The last step is always evaluated.

        Args:
            step: the number of the step just done.
            values: the step's metrics by name, `train_s` among them.
            rollouts: the records of the step's rollouts; empty for SFT and DPO.
        """
        self.done = step
        train_s = values["train_s"] or 0.0  # never None, unlike other metrics
        values = {**values, **self.meter.step(train_s)}
        is_last = step == self.total or self.state.get("ends_at") == step
        evaluation_is_due = is_last or step % self.settings.eval_every == 0
        evaluated = self._evaluate(step) if evaluation_is_due else HalfResult({})
        values |= evaluated.curves
        alerts, cleared_alerts = self.watch.check_step(step, values, rollouts, evaluated.rows)
        if alerts and not is_last and self.settings.stop_early == "alert":
            self.ended_by_alert = True
            if not evaluation_is_due:  # this step has become the last one
                values |= self._evaluate(step).curves
        self.job.metrics(step, values)
        self._report_alerts(step, alerts, cleared_alerts)
        # Last: a run resumed from the checkpoint must find everything above already written.
        self._save_if_due(step)

    def _report_alerts(
        self, step: int, alerts: Sequence[Finding], cleared_alerts: Sequence[str]
    ) -> None:
        """Write an event for each alert that `step` has raised, and for each that has ended
        (`cleared_alerts`)."""
        for finding in alerts:
            self.job.event("alert", finding.what, step=step, **alert_fields(finding))
        for name in cleared_alerts:
            self.job.event("alert_cleared", f"{name} is over", step=step, id=name)

    def _save_if_due(self, step: int) -> None:
        """Save a checkpoint of the step just done (`step`) if it is the best so far, if the setting
        `save_every` asks for it, or if it is the last."""
        is_best = self.evaluation is not None and self.evaluation.best.step == step
        is_last = step == self.total or self.ends_now
        if is_best or is_last or step % self.settings.save_every == 0:
            self.save()
        if is_best:
            checkpoint.mark_best(self.job.run, step)

    def _evaluate(self, step: int) -> HalfResult:
        """Evaluate the policy after `step` on the tasks that choose the checkpoint, and return the
        result; an empty `HalfResult` if there are no held-out tasks."""
        if self.evaluation is None or not self.evaluation.tasks:
            return HalfResult({})
        with self._timed("exam_s"):
            result = self.evaluation.evaluate(step, exam.VALIDATION)
        pulse.expect_end(self._earliest_end(self.evaluation.best))
        return result

    def save(self) -> None:
        """Save a checkpoint of the step just done, and remove old ones: all but the last
        `keep_checkpoints`, the best and this one."""
        if self.ranks is not None:
            self.ranks.require_same_weights(fingerprint(self.parameters))
        best = self.evaluation.best if self.evaluation is not None else Best()
        progress = checkpoint.Progress(self.done, self._state_with_best(best))
        keep = {best.step, self.done}
        with self._timed("save_s"), pulse.phase("checkpoint"):
            self._make_room(keep)
            folder = checkpoint.save(
                self.job.run,
                self.policy,
                self.optimizer,
                progress,
                base_ref=self.job.config.base.ref,
                base_weights=self.base_weights,
            )
        checkpoint.prune(self.job.run, self.settings.keep_checkpoints, keep)
        # `__exit__` may save the same step once more, which is no new event.
        if self._last_saved_step != self.done:
            self.job.event("checkpoint", f"saved {folder.name}", step=self.done)
        self._last_saved_step = self.done

    def _make_room(self, keep: set[int]) -> None:
        """Make room on the disk for the checkpoint of the step just done, unless that is already
        saved. Checkpoints of the steps in `keep` stay. Raises WorkerFailure (kind infra) if the
        disk stays too full."""
        if self.done not in self.job.run.checkpoint_steps():
            parameters = sum(parameter.numel() for parameter in self.parameters)
            report = partial(self.job.event, "disk_low", step=self.done)
            make_room(self.job.run, parameters, keep, report)

    def _state_with_best(self, best: Best) -> LoopState:
        """Return what a checkpoint keeps besides weights: the loop's state, and the best step so
        far under the key `best`."""
        state = dict(self.state)
        if best.step > 0:  # -1 before there is a best step
            # JSON has no infinity; a field left out is read back as its default, which is infinite.
            state["best"] = {
                name: value for name, value in asdict(best).items() if math.isfinite(value)
            }
        return state

    def finish(self) -> Result:
        """End the run: check that the weights changed, and play the test half of the held-out tasks
        with the best checkpoint.

        Returns the result record: the number of steps, the best checkpoint, the verdict (whether
        the model got better, with the numbers that show it), and what was measured.

        Raises:
            WorkerFailure: kind no_update, if the adapter has the same weights as at the start.
        """
        if not self.state.get("no_gradient"):  # the loop notes there that no step had a gradient
            self._require_changed_weights()
        # Verdict and summary are filled in below; they stand here for the order of the keys.
        result: Result = {"steps": self.done, "verdict": "unknown", "summary": ""}
        with pulse.phase("finishing"):
            result |= self._report_best()
            checkpoint.mark_best(self.job.run, result["best_step"])
            verdict = run_verdict(self.job.run).to_json()
        result |= {"verdict": verdict["verdict"], "evidence": verdict}
        if verdict["verdict"] == "worse":
            self._make_start_the_best()
        result["summary"] = verdict.get("summary", "")
        result["measured"] = self._measurements()
        self.job.event("finished", f"done after {self.done} steps: {verdict['verdict']}")
        return result

    def _make_start_the_best(self) -> None:
        """Save the adapter that the run started with as the checkpoint of step 0, and mark it as
        the best, so that `@best` never names a model that is worse than the start. The verdict
        stays that of the best trained checkpoint."""
        self.policy.adapter.load(self._initial_weights)
        checkpoint.save(
            self.job.run,
            self.policy,
            self.optimizer,
            checkpoint.Progress(0, {}),
            base_ref=self.job.config.base.ref,
            base_weights=self.base_weights,
        )
        checkpoint.mark_best(self.job.run, 0)
        self.job.event(
            "best_is_start",
            "every checkpoint is worse than the start: @best is the start, saved as step 0",
            step=self.done,
        )

    def _report_best(self) -> Result:
        """Play the test half of the held-out tasks with the best checkpoint, and return its step
        and score as `best_step` and `best_score`. Without held-out tasks or a best checkpoint,
        nothing is played, and only `best_step` is returned, which is the last step."""
        evaluation = self.evaluation
        # The best step is -1 before any checkpoint has been the best.
        if evaluation is None or not evaluation.tasks or evaluation.best.step <= 0:
            return {"best_step": self.done}
        with self._timed("exam_s"):
            best_step = evaluation.report(self._load_step)
        return {"best_step": best_step, "best_score": evaluation.best.score}

    def _require_changed_weights(self) -> None:
        """Raise WorkerFailure (kind no_update) if the adapter has the same weights as at the start
        of the run."""
        if fingerprint(self.parameters) == self._initial_fingerprint:
            raise WorkerFailure(
                "no_update",
                "The adapter did not change.",
                evidence=f"{self.done} steps, weights equal to the start",
                hint="Raise learning_rate; for grpo read zero_advantage_share first.",
            )

    def _measurements(self) -> Result:
        """Return how long the run took and how much memory, for people and for later estimates: the
        keys of `meter.totals` and `HeldoutEvaluation.habits`, and `matrix_flops`."""
        measured: Result = totals(self.job.run)  # {} for a run without a step
        measured["matrix_flops"] = self.meter.matrix_flops
        phase_s = {phase: round(seconds, 3) for phase, seconds in self.phase_s.items()}
        measured["seconds"] = measured.get("seconds", {}) | phase_s
        # The last evaluation counts too; it comes after the last line of the metrics.
        measured["peak_memory"] = peak_memory(self.meter.device)
        if self.evaluation is not None:
            measured |= self.evaluation.habits()
        return measured

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Context manager that adds the seconds spent in it to `phase_s[phase]`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phase_s[phase] += time.monotonic() - began

    def _load_step(self, step: int) -> None:
        """Load the adapter of the checkpoint of `step` into the policy."""
        self.policy.adapter.load(read_adapter(self.job.run.checkpoint(step)))

    def _resume(self) -> bool:
        """Load the newest undamaged checkpoint, if there is one, and drop the metrics of later
        steps; without a checkpoint, drop all metrics. Returns whether there was one.

        Raises:
            WorkerFailure: kind config, if the checkpoint was trained on another base.
        """
        checkpoint.sweep(self.job.run)
        folder = self._newest_undamaged_checkpoint()
        if folder is None:
            self.job.rewind(step=-1)  # -1: drop all metrics
            return False
        checkpoint.require_base(folder, self.base_weights)
        progress = checkpoint.restore(folder, self.policy, self.optimizer)
        self.done = progress.step
        self._restore_state(progress.state)
        self.job.rewind(self.done)
        self.job.event("resumed", f"from {folder.name}", step=self.done)
        return True

    def _restore_state(self, state: LoopState) -> None:
        """Restore what a checkpoint has kept of the loop: its state, the best step so far, and how
        far the token limit was lowered because memory ran out."""
        assert self.evaluation is not None  # `start` has made it before it resumes
        best = state.pop("best", None)
        if best and best["step"] in self.job.run.checkpoint_steps():
            self.evaluation.best = Best(**best)
            # The run may have been killed after it saved the checkpoint and before it marked it.
            checkpoint.mark_best(self.job.run, best["step"])
        elif best:  # its checkpoint was damaged or deleted: the next evaluated step is the best
            self.job.event("best_lost", f"the checkpoint of step {best['step']} is gone")
        self.state = state
        self.evaluation.budget = tokens_at_once(self.evaluation.budget, self.state)

    def _newest_undamaged_checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint whose files match its manifest, or None.

        Newer, damaged checkpoints are renamed to `damaged_...`, each with the event
        `checkpoint_damaged`, so that their steps can be saved again.
        """
        while True:
            folder = self.job.run.latest_checkpoint()
            if folder is None:
                return None
            try:
                checkpoint.verify(folder)
                return folder
            except WorkerFailure as failure:
                new_folder = checkpoint.mark_damaged(folder)
                self.job.event(
                    "checkpoint_damaged",
                    f"{failure.message} {failure.evidence}; it is kept as {new_folder.name} and "
                    "the one before it is used",
                    checkpoint=folder.name,
                )
