"""The check "smoke": a worker does two real optimizer steps on a few rows and throws them away."""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from engine.core.files import read_json
from engine.core.format import size
from engine.dry_run.checks import DryRun
from engine.dry_run.judgements import Outcome, required
from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.processes import launcher, programs
from engine.machine.processes.trainer_variables import trainer_variables
from engine.records.lines.event import Event
from engine.records.lines.metrics_line import read_metrics
from engine.records.run_result import SMOKE_SAVED, SmokeResult
from engine.records.settings import RowSettings, TrainSettings
from engine.runs.submit import training
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.run_folder import RunFiles, write_folder
from engine.runs.submit.training import ResolvedTraining

STEPS = 2
MOST_ROWS = 8
_LEAST_S = 5.0  # seconds; merely starting a process with torch takes longer


def check_smoke(run: DryRun, limit_s: float) -> Outcome:
    """Do two optimizer steps of the run on at most `MOST_ROWS` rows, and judge them.

    The steps may take `limit_s` seconds. They are done in a folder that is removed afterwards; the
    result is stored in `run.facts.smoke`. The check is skipped if a run holds the device, if
    another run has yet to make the model, or if `limit_s` is too short.
    """
    obstacle = _obstacle(run, limit_s)
    if obstacle:
        return Outcome("skip", obstacle)
    folder = run.home.smoke_run(secrets.token_hex(4))
    try:
        _write_smoke_folder(run, folder)
        status = _run_worker(run, folder, limit_s)
        return _outcome(run, folder, status, limit_s)
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def _obstacle(run: DryRun, limit_s: float) -> str:
    """Return why the two steps of a smoke run cannot be done within `limit_s` seconds from now; ""
    if they can."""
    maker = required(run.facts.model).waits_for  # the run that has yet to make the model
    if maker:
        return f"{maker} is still to make the model"
    with Store(run.home.whole) as store:
        running = store.list_runs(limit=1, states=HOLDS_DEVICE)
    # A caller who does not see all runs is not told the id of another's run.
    if running and run.home.viewer and not run.home.viewer.sees_all:
        return "a run holds the device: make the same dry run later"
    if running:
        return f"{running[0].run_id} holds the device: make the same dry run when it is done"
    if limit_s < _LEAST_S:
        return "no time is left in this call: honesmith dry-run --smoke waits longer"
    return ""


def smoke_settings(settings: TrainSettings) -> TrainSettings:
    """Return the settings of a smoke run, two optimizer steps: those of the run, with a few
    changes.

    Each of the two steps takes at most `MOST_ROWS` rows, at a constant learning rate. There are no
    evaluations, no early stopping, and no rows replayed from earlier training (`keep`).
    """
    changes: dict[str, object] = {
        "steps": STEPS,
        # Other schedules span the whole run and may begin or end at a rate of 0. At a constant rate
        # both steps change the model.
        "lr_schedule": "constant",
        "warmup_ratio": 0.0,
        "eval_every": STEPS,
        "eval_rows": 0,
        "save_every": STEPS,
        "keep_checkpoints": 1,
        "stop_early": "none",
    }
    if isinstance(settings, RowSettings):
        rows = min(MOST_ROWS, settings.batch_size, settings.max_examples or MOST_ROWS)
        changes |= {"epochs": None, "batch_size": rows, "max_examples": rows}
        if "keep" in type(settings).model_fields:
            changes |= {"keep": 0.0, "keep_env": ""}
    else:
        rows = min(MOST_ROWS, settings.prompts_per_step)
        changes |= {"prompts_per_step": rows, "max_examples": rows}
    return cast(TrainSettings, settings.model_copy(update=changes))


def _write_smoke_folder(run: DryRun, folder: RunDir) -> None:
    """Write the folder of a smoke run in the form in which a submit writes the folder of a run.

    The folder holds config.json with `smoke_settings`, and the adapters of the start model and of
    the teacher.
    """
    facts = run.facts
    resolved = required(facts.resolved)
    training_plan = ResolvedTraining(
        record=required(facts.record),
        model=required(facts.model),
        machine=required(facts.machine),
        resolved=resolved,
        teacher=facts.teacher,
        forecast=required(facts.forecast),
        facts=required(facts.rows),
    )
    request = TrainRequest(env_id=run.env_id, algorithm=run.algorithm)
    settings = smoke_settings(resolved.settings)
    config = training.config_of(request, training_plan, parent="")
    files = RunFiles(
        {**config, "settings": settings.model_dump()},
        start_adapter=training_plan.model.adapter,
        teacher_adapter=training_plan.teacher_adapter,
    )
    write_folder(folder, files)


def _run_worker(run: DryRun, folder: RunDir, limit_s: float) -> int | None:
    """Run the worker of a smoke run on `folder` to its end, and return its exit status.

    Returns None if the worker was not done within `limit_s` seconds and was killed. It runs in a
    session of its own, so that its child processes can be killed with it.
    """
    python = launcher.worker_python(run.home)
    device = required(run.facts.machine).device.id
    # -P: the working folder must not be searched for modules.
    argv = [python, "-P", *programs.command("smoke"), str(folder.path)]
    with _lifeline() as lifeline, open(folder.log(attempt=1), "ab") as log:
        process = subprocess.Popen(
            argv,
            cwd=folder.path,
            env=trainer_variables(run.home.root, device, lifeline),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lifeline,),
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also kills the worker's child processes
                process.wait()


@contextmanager
def _lifeline() -> Iterator[int]:
    """Context manager: yield the reading end of a pipe, which the worker watches.

    The other end is closed at the end of the block, or when this process dies. The worker notices
    that and ends.
    """
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def _outcome(run: DryRun, folder: RunDir, status: int | None, limit_s: float) -> Outcome:
    """Make the outcome of the check from the files that the worker of the two steps left in
    `folder`; store a result in the facts of the dry run.

    `status` is the exit status of the worker; None if it took longer than `limit_s` seconds.
    """
    if status is None:
        return Outcome(
            "fail",
            f"{_stage(folder)}: not done within {limit_s:.0f} s",
            "honesmith dry-run --smoke waits ten minutes; or lower max_length, prompts_per_step or "
            "group_size.",
        )
    if folder.result.exists():
        result = SmokeResult.read(folder.result)
        run.facts.smoke = result.to_json()
        return _judge_result(result)
    if not folder.failure.exists():
        return Outcome("fail", f"{_stage(folder)}: the worker ended with status {status}")
    failure = read_json(folder.failure)
    evidence = f" ({failure['evidence']})" if failure.get("evidence") else ""
    detail = f"{_stage(folder)}: {failure['message']}{evidence}"
    return Outcome("fail", detail, str(failure.get("hint") or ""))


def _stage(folder: RunDir) -> str:
    """Say what the worker of a smoke run was doing when it ended, e.g. "step 2", by the events and
    metrics that it wrote into `folder`."""
    event_names = {event.event for event in Event.read_all(folder.events)}
    if SMOKE_SAVED in event_names:
        return "reading the saved adapter back"
    if "started" not in event_names:
        return "loading model, rows and environment"
    # Optimizer steps count from 1; a line of step 0 comes from before the first one.
    steps_done = sum(line.step > 0 for line in read_metrics(folder.metrics))
    return f"step {steps_done + 1}" if steps_done < STEPS else "saving the adapter"


def _judge_result(result: SmokeResult) -> Outcome:
    """Make the outcome of a smoke run whose two steps were done.

    The check passes. It only warns if no update was tried, because in each group all answers to a
    task earned the same reward.
    """
    seconds = ", ".join(f"{step.seconds:.2f}" for step in result.steps)
    phrases = [f"{len(result.steps)} steps on {result.rows} rows in {seconds} s"]
    phrases += _measured_phrases(result)
    phrases.append(f"{size(result.peak_memory)} at most")
    phrases.append(f"the saved adapter ({size(result.adapter_bytes)}) was read back")
    detail = ", ".join(phrases)
    if result.updated:
        return Outcome("pass", detail)
    return Outcome(
        "warn",
        f"{detail}; but all answers to a task earned the same: no update was tried",
        "A probe (samples) says how many groups teach.",
    )


def _measured_phrases(result: SmokeResult) -> list[str]:
    """Say what the steps of a smoke run measured, as parts of a sentence: loss and reward, if the
    algorithm has them, and the norms of the gradients."""
    losses = [f"{step.loss:.4g}" for step in result.steps if step.loss is not None]
    rewards = [f"{step.reward_mean:.3g}" for step in result.steps if step.reward_mean is not None]
    norms = [f"{step.grad_norm:.3g}" for step in result.steps]
    phrases: list[str] = []
    if result.loss_before is not None and result.loss_after is not None:
        phrases.append(f"loss {result.loss_before:.4g} before, {result.loss_after:.4g} after")
    elif len(losses) == len(result.steps):
        phrases.append(f"loss {', '.join(losses)}")
    if len(rewards) == len(result.steps):
        phrases.append(f"reward {', '.join(rewards)}")
    phrases.append(f"gradients {', '.join(norms)}")
    return phrases
