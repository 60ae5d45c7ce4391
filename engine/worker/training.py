"""What both loops share around their steps: policy, optimizer, exams, checkpoints, the way out.

A loop asks for `steps()`, does its own forward and backward, calls `update` once or more per step
and `log` once; everything that happens between steps happens in `log` and `steps`.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from engine.evidence.detect.alerts import Watch, alert_fields
from engine.evidence.verdict.verdict import run_verdict
from engine.worker.components import Workbench, sampling
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Stopped
from engine.worker.evaluation import heldout
from engine.worker.evaluation.during_training import Best, Exam, LossRow
from engine.worker.manifest import weight_hashes, write_manifest
from engine.worker.network.adapter import read_adapter
from engine.worker.network.policy import Policy
from engine.worker.rollouts.collect import Stage
from engine.worker.update import checkpoint, oom_retry
from engine.worker.update.meter import Meter, peak_memory, totals
from engine.worker.update.profiling import Profiler
from engine.worker.update.schedule import apply_step, make_optimizer, rate

Found = TypeVar("Found")


class Training:
    """One training run under way.

    Args:
        job: the run.
        bench: what was loaded for it.
        total: optimizer steps (SFT) or batches (GRPO) of the whole run.
    """

    def __init__(self, job: Job, bench: Workbench, total: int) -> None:
        self.job = job
        self.bench = bench
        self.total = total
        self.settings = job.settings
        self.base_weights = weight_hashes(job.run.home, bench.base.path)
        start = job.config.get("start_adapter")
        if start:
            checkpoint.require_base(Path(start), self.base_weights)
        self.policy = Policy(bench.base, job.settings, Path(start) if start else None)
        self.parameters = self.policy.parameters()
        self.optimizer = make_optimizer(self.parameters, job.settings)
        self.meter = Meter(self.policy)
        self.profiler = Profiler(job.run.logs, wanted=bool(job.config.get("profile")))
        self.done = 0
        self.extra: dict[str, Any] = {}
        self.exam: Exam | None = None
        self.watch = Watch(job.run, job.config["algorithm"], job.settings)
        self.alarmed = False  # an alert asked for the end
        self.spent = {"exam_s": 0.0, "save_s": 0.0}  # seconds between the steps
        self._before = self._fingerprint()
        self._saved = -1

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Stopped) and self.done > 0:
            self.save()

    def examine(
        self,
        tasks: Sequence[dict[str, Any]],
        *,
        stage: Stage | None,
        limits: dict[str, Any],
        budget: int,
        loss_rows: Sequence[LossRow] = (),
    ) -> None:
        """Prepare the exams; then either resume or sit the first one, at step 0."""
        self.exam = Exam(
            self.job,
            self.policy,
            env=self.bench.env,
            tasks=tasks,
            stage=stage,
            sampler=self.bench.sampler,
            params=sampling(limits, greedy=True, seed=self.settings["seed"]),
            loss_rows=loss_rows,
            budget=budget,
        )
        isolation = stage.process.isolation if stage else ""
        sampling_used = asdict(self.exam.params)
        write_manifest(self.job, self.bench, isolation, sampling_used, self.meter.matrix_flops)
        select = self.exam.choosing
        halves = f": {select} choose the checkpoint, {len(tasks) - select} are reported"
        self.job.event(
            "started",
            f"{self.total} steps, {len(tasks)} held-out tasks{halves if tasks else ''}",
            total_steps=self.total,
            heldout_tasks=len(tasks),
            heldout_choose=select,
        )
        self.watch.exam_tasks = select
        resumed = self._resume()
        if tasks and not resumed:
            with self._timed("exam_s"):
                curves = self.exam.at(0, heldout.SELECT, heldout.REPORT)
            self.job.metrics(0, curves)
        self.watch.catch_up(self.done)
        self.alarmed = self.settings["stop_early"] == "alert" and bool(self.watch.active)

    def steps(self) -> Iterator[int]:
        """Step numbers still to do. Raises Stopped between steps when the run must stop."""
        while self.done < self.total and not self.alarmed:
            self.job.check_stop()
            step = self.done + 1
            # Every draw of a step (dropout, mostly) follows from its number: see checkpoint.py.
            torch.manual_seed(self.settings["seed"] * 1_000_003 + step)
            with self.profiler.step(step):
                yield step
            if self.exam is not None and self.exam.exhausted(self.settings):
                self.job.event("stopped_early", f"no better exam since step {self.exam.best.step}")
                return
        if self.alarmed:
            said = ", ".join(sorted(self.watch.active))
            self.job.event("stopped_early", f"alert: {said}", step=self.done)

    def within_memory(
        self,
        step: int,
        budget: int,
        attempt: Callable[[int], Found],
        finest: Callable[[int], bool],
    ) -> Found:
        """What `attempt(tokens)` returns: a pass over the batch in microbatches of at most
        `tokens`, at first `budget`, halved for the rest of the run whenever memory runs out.

        Raises WorkerFailure (oom) when halving does not help, at once where `finest(tokens)`.
        """

        def tell(tokens: int, said: str) -> None:
            self.job.event(
                "memory",
                f"memory ran out in step {step}: from here on at most {tokens} tokens go through "
                "the model at once; the updates stay the same",
                step=step,
                microbatch_tokens=tokens,
                evidence=said,
            )
            if self.exam is not None:
                self.exam.budget = min(self.exam.budget, tokens)

        return oom_retry.until_it_fits(
            attempt,
            budget=budget,
            extra=self.extra,
            clear=self.policy.adapter.clear_gradients,
            tell=tell,
            finest=finest,
        )

    def update(self, step: int) -> tuple[float, float]:
        """One optimizer step; returns (gradient norm before clipping, learning rate)."""
        lr = rate(step, self.total, self.settings)
        norm = apply_step(self.optimizer, self.policy.adapter, lr, self.settings["max_grad_norm"])
        return norm, lr

    def log(self, step: int, values: dict[str, Any]) -> None:
        """The end of a step: sit the exam when it is due, look for alerts, write the metrics,
        keep a checkpoint. With `stop_early` alert an alert makes the step the last one."""
        self.done = step
        values = values | self.meter.step(values["train_s"])
        last = step == self.total
        due = last or step % self.settings["eval_every"] == 0
        if due:
            values = values | self._sit(step)
        raised, cleared = self.watch.look(step, values)
        if raised and not last and self.settings["stop_early"] == "alert":
            self.alarmed = last = True
            values = values if due else values | self._sit(step)
        self.job.metrics(step, values)
        for finding in raised:
            self.job.event("alert", finding.what, step=step, **alert_fields(finding))
        for name in cleared:
            self.job.event("alert_cleared", f"{name} is over", step=step, id=name)
        # Last of all: what a checkpoint stands for is written, or a resumed run would lack it.
        if self.exam is not None and self.exam.best.step == step:
            self.save()
            checkpoint.mark_best(self.job.run, step)
        if last or step % self.settings["save_every"] == 0:
            self.save()

    def _sit(self, step: int) -> dict[str, float]:
        """The exam, where there are held-out tasks."""
        if self.exam is None or not self.exam.tasks:
            return {}
        with self._timed("exam_s"):
            return self.exam.at(step, heldout.SELECT)

    def save(self) -> None:
        """A checkpoint of the step just done, then the old ones tidied away."""
        best = self.exam.best if self.exam is not None else Best()
        extra = dict(self.extra)
        if best.step > 0:
            # JSON has no infinity: what is not there reads as the default.
            extra["best"] = {k: v for k, v in asdict(best).items() if math.isfinite(v)}
        progress = checkpoint.Progress(self.done, extra)
        with self._timed("save_s"):
            folder = checkpoint.save(
                self.job.run,
                self.policy,
                self.optimizer,
                progress,
                base_ref=self.job.config["base"]["ref"],
                base_weights=self.base_weights,
            )
        checkpoint.prune(self.job.run, self.settings["keep_checkpoints"], {best.step, self.done})
        if self._saved != self.done:  # a step may be saved for two reasons at once
            self.job.event("checkpoint", f"saved {folder.name}", step=self.done)
        self._saved = self.done

    def require_finite(self, value: float, what: str) -> None:
        """Raises WorkerFailure (nonfinite) before a bad number reaches the weights."""
        if not math.isfinite(value):
            raise WorkerFailure(
                "nonfinite",
                f"The {what} became NaN or infinite.",
                evidence=f"step {self.done + 1}: {what} {value}",
            )

    def finish(self) -> dict[str, Any]:
        """Hold the run to its promises, play the report half, and say what came of it.

        Raises:
            WorkerFailure: kind no_update, when the adapter is what it was at the start.
        """
        if self._fingerprint() == self._before and not self.extra.get("no_gradient"):
            raise WorkerFailure(
                "no_update",
                "The adapter did not change.",
                evidence=f"{self.done} steps, weights equal to the start",
                hint="Raise learning_rate; for grpo read zero_advantage_share first.",
            )
        result: dict[str, Any] = {"steps": self.done, "verdict": "unknown", "summary": ""}
        if self.exam is not None and self.exam.tasks and self.exam.best.step > 0:
            with self._timed("exam_s"):
                best = self.exam.report(self._load_step)
            checkpoint.mark_best(self.job.run, best)
            result |= {"best_step": best, "best_score": self.exam.best.score}
        else:
            checkpoint.mark_best(self.job.run, self.done)
            result["best_step"] = self.done
        verdict = run_verdict(self.job.run).to_json()
        result |= {"verdict": verdict["verdict"], "evidence": verdict}
        result["summary"] = verdict.get("summary", "")
        result["measured"] = self._measured()
        self.job.event("finished", f"done after {self.done} steps: {verdict['verdict']}")
        return result

    def _measured(self) -> dict[str, Any]:
        """What the run took, for people and for later estimates."""
        found: dict[str, Any] = totals(self.job.run) | {"matrix_flops": self.meter.matrix_flops}
        spent = {name: round(value, 3) for name, value in self.spent.items()}
        found["seconds"] = found.get("seconds", {}) | spent
        # Of the last exam too, which no line of the metrics knows of.
        found["peak_memory"] = peak_memory(self.meter.device)
        return found | (self.exam.habits() if self.exam is not None else {})

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] += time.monotonic() - began

    def _load_step(self, step: int) -> None:
        self.policy.adapter.load(read_adapter(self.job.run.checkpoint(step)))

    def _resume(self) -> bool:
        """Continue from the last complete checkpoint, if there is one.

        Raises WorkerFailure (config) when it was trained on another base.
        """
        checkpoint.sweep(self.job.run)
        folder = self._soundest()
        if folder is None or self.exam is None:
            self.job.rewind(-1)
            return False
        checkpoint.require_base(folder, self.base_weights)
        progress = checkpoint.restore(folder, self.policy, self.optimizer)
        self.done = progress.step
        best = progress.extra.pop("best", None)
        if best and best["step"] in self.job.run.checkpoint_steps():
            self.exam.best = Best(**best)
            # A kill may have come between the checkpoint and the link to it.
            checkpoint.mark_best(self.job.run, best["step"])
        elif best:
            self.job.event("best_lost", f"the checkpoint of step {best['step']} is gone")
        self.extra = progress.extra
        self.exam.budget = oom_retry.tokens_at_once(self.exam.budget, self.extra)
        self.job.rewind(self.done)
        self.job.event("resumed", f"from {folder.name}", step=self.done)
        return True

    def _soundest(self) -> Path | None:
        """The newest checkpoint whose files are what its manifest says. A damaged one is set
        aside, so that its step can be saved again, and an event says which and why."""
        while (folder := self.job.run.latest_checkpoint()) is not None:
            try:
                checkpoint.verify(folder)
                return folder
            except WorkerFailure as failure:
                kept = checkpoint.set_aside(folder)
                self.job.event(
                    "checkpoint_damaged",
                    f"{failure.message} {failure.evidence}; it is kept as {kept.name} and the "
                    "one before it is used",
                    checkpoint=folder.name,
                )
        return None

    def _fingerprint(self) -> bytes:
        """A digest of the adapter's weights: what "did it change" is asked of."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().cpu().numpy().tobytes())
        return digest.digest()
