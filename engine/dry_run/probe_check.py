"""The check "probe": the model answers some tasks in a short separate run, called a probe."""

from collections.abc import Callable

from engine.core.files import read_json
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.dry_run import checks
from engine.dry_run.checks import DryRun
from engine.dry_run.judgements import Outcome, judge_probe, required, too_hard, warn_of_degenerate
from engine.environments.registry import EnvRecord
from engine.records.run_result import ProbeResult
from engine.runs import lifecycle
from engine.runs.submit.requests import ProbeRequest


def check_probe(
    run: DryRun, samples: int, began: float, cap_function: Callable[[float], float] | None
) -> Outcome:
    """Let the model answer some tasks in a separate run, and judge whether GRPO could learn from
    the answers.

    The check is skipped if the environment does not score, if the model does not exist yet, or if
    the run does not end in the time that the call has left.

    Args:
        run: the dry run.
        samples: how many tasks are answered.
        began: value of `time.monotonic()` at the start of the call.
        cap_function: takes the most device hours that the probe is estimated to need, and returns
            how many it may take; None if no quota applies.
    """
    record = required(run.facts.record)
    if not record.scored:
        return Outcome("skip", "the environment scores nothing")
    making_run = required(run.facts.model).waits_for
    if making_run:
        return Outcome("skip", f"{making_run} is still to make the model; the run waits for it")
    run_id = run.facts.probe_run_id = _start_probe(run, record, samples, cap_function)
    timeout_s = checks.seconds_left(began)
    status = lifecycle.wait(run.home, run_id, until="end", timeout_s=timeout_s)
    if status["state"] == "done":
        return _judge_finished_probe(run, run_id)
    if status["state"] in ("failed", "cancelled"):
        return _failed_probe(run_id, status)
    wait_call = Call("wait_run", {"run_id": run_id})
    fix = Hint("Wait for it, or make the same dry run again.", wait_call)
    return Outcome("skip", f"{run_id} is {status['state']}", fix)


def _start_probe(
    run: DryRun, record: EnvRecord, samples: int, cap_function: Callable[[float], float] | None
) -> str:
    """Submit the probe (a run in which the model answers `samples` tasks) and return its run id.

    A probe takes settings of GRPO. For another algorithm it gets only the settings that the
    algorithm shares with GRPO.
    """
    settings = run.settings if run.algorithm == "grpo" else run.shared_settings()
    request = ProbeRequest(record.env_id, run.model, samples, settings)
    return lifecycle.submit_probe(run.home, request, cap_function)["run_id"]


def _judge_finished_probe(run: DryRun, run_id: str) -> Outcome:
    """Store the result of the probe (answers of the model to some tasks), and whether its tasks are
    too hard for GRPO. Returns the outcome of the check."""
    path = run.home.run(run_id).result
    run.facts.probe = read_json(path)
    result = ProbeResult.read(path)
    run.facts.too_hard = run.algorithm == "grpo" and too_hard(result)
    return warn_of_degenerate(judge_probe(result), result, run.facts.audit)


def _failed_probe(run_id: str, status: Reply) -> Outcome:
    """Return the outcome of the check if its probe (answers of the model to some tasks) failed or
    was cancelled. `status` is that of the probe's run, as `lifecycle.wait` returned it."""
    error = status.get("error") or {}
    detail = f"{run_id}: {error.get('message', status['state'])}"
    fix = Hint.from_fields(error.get("hint", ""), error.get("call"))
    return Outcome("fail", detail, fix)
