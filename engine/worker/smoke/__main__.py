"""Does two real steps of a run: `python -P -m engine.worker.smoke FOLDER`.

FOLDER has the config.json of a training run with two steps on a few rows. The run's own loop does
the steps and saves its adapter, which is then read back onto a fresh copy of the base. The exit
status is 0 with result.json, or 3 with failure.json.
"""

import math
import sys
import traceback
from pathlib import Path
from typing import Any

from engine.worker.core.runtime import prepare as prepare_process

prepare_process()

import torch

from engine.records.lines.metrics_line import MetricsLine, read_metrics
from engine.records.run_config import SFTConfig
from engine.records.run_result import SMOKE_SAVED, SmokeResult, SmokeStep
from engine.worker.__main__ import DONE, FAILED, LOOPS
from engine.worker.components import Components, prepare, quiet_libraries
from engine.worker.core.failures import WorkerFailure, explain
from engine.worker.core.job import Job
from engine.worker.network.policy import Policy
from engine.worker.sft import training_rows
from engine.worker.update.losses import cross_entropy

# The metrics that together give the seconds of a step.
_SECONDS = ("sample_s", "reward_s", "teacher_s", "train_s")


def main(folder: Path) -> int:
    """Do the steps of the run in `folder`, and write their result, or why they failed, to files in
    it. Returns the exit status, DONE or FAILED."""
    quiet_libraries()
    job: Job[Any] = Job(folder)
    job.listen()  # from now on a signal, or the end of the parent process, ends this process
    try:
        measured = LOOPS[job.config.algorithm](job)["measured"]
        job.event(SMOKE_SAVED, "both steps are done; the saved adapter is read back")
        smoke_result(job, measured["peak_memory"]).write(job.run.result)
    except Exception as error:  # noqa: BLE001 - the top of the process: every failure is told
        traceback.print_exc()
        job.fail(explain(error))
        return FAILED
    return DONE


def smoke_result(job: Job[Any], peak_memory: float) -> SmokeResult:
    """Read the adapter back from the run's last checkpoint, compute the loss with it (SFT), and
    return the result of the steps done.

    Args:
        job: the run, whose steps are done.
        peak_memory: the most bytes that the steps held on the device.

    Raises WorkerFailure if there is no checkpoint, or if the adapter cannot be read or gives no
    finite loss.
    """
    steps = [step_of(line) for line in read_metrics(job.run.metrics) if line.step > 0]
    folder = job.run.latest_checkpoint()
    if folder is None:
        raise WorkerFailure("internal", "The steps left no checkpoint.")
    components = prepare(job, Path(job.config.base.path))
    policy = Policy(components.base, job.config.settings, folder)
    loss_after = _loss_of_rows(job, components, policy)
    if loss_after is not None and not math.isfinite(loss_after):
        raise WorkerFailure(
            "nonfinite", "The saved adapter gives no finite loss.", evidence=f"loss {loss_after}"
        )
    return SmokeResult(
        rows=job.config.settings.max_examples or 0,
        steps=steps,
        loss_before=steps[0].loss if loss_after is not None else None,
        loss_after=loss_after,
        peak_memory=peak_memory,
        finite=all(math.isfinite(step.grad_norm) for step in steps),
        updated=any(step.grad_norm > 0 for step in steps),
        adapter_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )


def step_of(line: MetricsLine) -> SmokeStep:
    """Summarise one optimizer step from its line of metrics. Its seconds are the sum of those of
    sampling, scoring, the teacher and training; a metric that the line lacks counts as 0."""
    return SmokeStep(
        step=line.step,
        loss=line.value("loss"),
        reward_mean=line.value("reward_mean"),
        grad_norm=line.value("grad_norm") or 0.0,
        seconds=round(sum(line.value(name) or 0.0 for name in _SECONDS), 3),
    )


def _loss_of_rows(job: Job[Any], components: Components, policy: Policy) -> float | None:
    """Compute the mean loss of `policy` per supervised token, in nats, over all rows that SFT was
    trained on. Returns None for other algorithms, whose loss is defined on answers or pairs, not on
    rows."""
    if not isinstance(job.config, SFTConfig):
        return None
    stored_rows = training_rows(job, components).rows  # may have no iterator, hence the indices
    rows = [stored_rows[index] for index in range(len(stored_rows))]
    supervised_tokens = sum(sum(row.loss_mask) for row in rows)
    loss = 0.0
    with torch.no_grad():
        for row in rows:  # one by one, which needs the least memory
            logprobs, _ = policy.logprobs(policy.collate([row]))
            loss += cross_entropy(logprobs, supervised_tokens).sum().item()
    return loss


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
