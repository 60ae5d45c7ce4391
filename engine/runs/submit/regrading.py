"""Queuing the scoring of stored answers by another environment version; no model is asked."""

from collections.abc import Mapping

from engine.core.reply import Reply
from engine.curation.sources import Stored, stored_answers
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.home.rows import NewRun, taken_as
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit import contamination
from engine.runs.submit.admission import (
    EVALUATION_WALL_HOURS,
    CapFunction,
    bad_argument,
    cap_of,
    cap_warnings,
    scored_env,
    scoring_hours,
)
from engine.runs.submit.queued import start_and_reply
from engine.runs.submit.requests import EvaluationRequest
from engine.runs.submit.run_folder import RunFiles


def submit_regrade(
    home: Home, request: EvaluationRequest, cap_function: CapFunction | None
) -> Reply:
    """Queue a run that scores the stored answers of the run `request.regrade` by the environment
    version of the request, and return the reply about it.

    Args:
        cap_function: the quota of the caller's key, which gives the run its cap on device
            hours; None where no quota applies.

    Raises UserError: BAD_ARGUMENT, ENV_*, RUN_NOT_FOUND, RUN_STATE, NO_EVALUATION, QUOTA, BUDGET,
    NOT_APPROVED.
    """
    _check_request(request)
    record = scored_env(home, request.env_id, "regraded")
    stored = stored_answers(home, request.regrade, request.split)
    task_count = min(request.rows, stored.tasks)
    cap = _cap(home, record, stored, task_count, cap_function)
    warnings = _warnings(request, record, stored, cap)
    contaminated = contamination.of_evaluation(home, record, stored.refs, request.split)
    if contaminated is not None:
        warnings += contaminated.warnings
    config = _config(request, record, stored, cap)
    files = RunFiles(config, contamination=contaminated, needs=stored.run_id)
    with Store(home) as store:
        row = store.insert_run(_new_run(record, stored.refs, cap), files.writer(home))
    reply = start_and_reply(home, row, warnings)
    return reply | {"models": stored.refs, "rows": task_count, "regrade": stored.run_id}


def _cap(
    home: Home,
    record: EnvRecord,
    stored: Stored,
    task_count: int,
    cap_function: CapFunction | None,
) -> float:
    """The most device hours that scoring the answers at `task_count` tasks may take; 0 for no cap.

    Raises UserError QUOTA, BUDGET or NOT_APPROVED.
    """
    answer_count = task_count * stored.attempts * len(stored.refs)
    return cap_of(home, cap_function, lambda: scoring_hours(record, answer_count))


def _warnings(
    request: EvaluationRequest, record: EnvRecord, stored: Stored, cap: float
) -> list[str]:
    """What is doubtful about the regrade but no reason to refuse it. `cap` is its cap on device
    hours, 0 for none."""
    return [
        *registry.prefix_meant(request.env_id, record),
        *stored.warnings,
        *cap_warnings(cap),
        *taken_as("regrade", request.regrade, stored.run_id),
        *_tasks_left_out(request, stored),
    ]


def _tasks_left_out(request: EvaluationRequest, stored: Stored) -> list[str]:
    """A warning where more tasks are stored than the request has scored; otherwise []."""
    if stored.tasks <= request.rows:
        return []
    return [f"{request.rows} of the {stored.tasks} stored tasks are scored; rows takes more"]


def _new_run(record: EnvRecord, models: list[str], cap: float) -> NewRun:
    """What the database stores of the regrade.

    Args:
        models: whose answers are scored, as references.
        cap: the run's cap on device hours, 0 for none.
    """
    return NewRun(
        name=f"{record.name}-regrade",
        kind="evaluate",
        algorithm="regrade",
        env_id=record.env_id,
        model=", ".join(models),
        max_gpu_hours=cap,
    )


def check_tasks(request: EvaluationRequest) -> None:
    """Raises UserError BAD_ARGUMENT for an unknown split, and for fewer than one task (`rows`)."""
    if request.split not in ("heldout", "train"):
        raise bad_argument("split", request.split, 'Use "heldout" or "train".')
    if request.rows < 1:
        raise bad_argument("rows", request.rows, "Give a number of tasks from 1.")


def _check_request(request: EvaluationRequest) -> None:
    """Raises UserError BAD_ARGUMENT where an argument is given that a regrade does not take, and
    for whatever `check_tasks` refuses."""
    values = {
        "models": request.models,
        "attempts": request.attempts,
        "settings": request.settings,
        "task_indices": request.task_indices,
    }
    for name, value in values.items():
        is_default = not value or (name == "attempts" and value == 1)
        if not is_default:
            raise bad_argument(
                name, value, "regrade scores the answers that are stored; leave it out."
            )
    check_tasks(request)


def _config(
    request: EvaluationRequest, record: EnvRecord, stored: Stored, cap: float
) -> Mapping[str, object]:
    """The content of config.json of a regrade, without the run's id. `cap` is its cap on device
    hours, 0 for none."""
    return {
        "kind": "evaluate",
        "algorithm": "regrade",
        "env_id": record.env_id,
        "env_dir": str(record.dir),
        "models": [{"ref": ref, "rows": path} for ref, path in stored.models],
        "split": request.split,
        "rows": request.rows,
        "attempts": stored.attempts,
        "settings": stored.sampling,
        "sources": {},
        "regrade": stored.run_id,
        "regraded_from": stored.env_id,
        "wall_limit_hours": EVALUATION_WALL_HOURS,
        "max_gpu_hours": cap,
    }
