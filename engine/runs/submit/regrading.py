"""Queuing the scoring of stored answers by another environment version; no model is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.curation.sources import Stored, stored_answers
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.home.rows import TERMINAL, NewRun, abbreviation_warning
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import SplitName
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

_RUNS_LOOKED_AT = 50  # the newest ended runs that `preview_calls` reads


def submit_regrade(
    home: Home, request: EvaluationRequest, cap_function: CapFunction | None
) -> Reply:
    """Queue a regrade (the new scoring of a run's stored answers), and return the reply about it.

    The answers are those of the run `request.regrade`. The environment version of the request
    scores them.

    Args:
        cap_function: takes the most device hours that the run may need, and returns the hours that
            the quota of the caller's key allows. None if no quota applies.

    Raises UserError: BAD_ARGUMENT, ENV_*, RUN_NOT_FOUND, RUN_STATE, NO_EVALUATION, QUOTA, BUDGET,
    NOT_APPROVED.
    """
    _check_request(request)
    plan = _resolve_plan(home, request, cap_function)
    stored = plan.stored
    warnings = _warnings(request, plan)
    contamination_report = contamination.compare_evaluation(
        home, plan.record, stored.refs, request.split
    )
    if contamination_report is not None:  # None: the answers are to training tasks
        warnings += contamination_report.warnings
    files = RunFiles(
        _config_content(request, plan), contamination=contamination_report, needs=stored.run_id
    )
    with Store(home) as store:
        row = store.insert_run(_new_run(plan), files.writer(home))
    reply = start_and_reply(home, row, warnings)
    return reply | {"models": stored.refs, "rows": plan.task_count, "regrade": stored.run_id}


def preview_calls(home: Home, env_id: str) -> list[Call]:
    """Suggest a call that scores stored answers by the new environment version `env_id`.

    The answers are those that the newest GRPO run on another version of the same environment
    sampled in training. Returns [] if there is no such run, or if the version cannot score.
    """
    record = registry.find_env(home, env_id)
    if not record.scored:
        return []
    with Store(home) as store:
        rows = store.list_runs(limit=_RUNS_LOOKED_AT, states=TERMINAL, kind="train")
    for row in rows:
        env_name = row.env_id.partition("@")[0]  # an env id is `name@hash`
        is_other_version = env_name == record.name and row.env_id != record.env_id
        has_rollouts = row.algorithm == "grpo" and bool(home.run(row.run_id).rollout_steps())
        if is_other_version and has_rollouts:
            arguments = {"env_id": record.env_id, "regrade": row.run_id, "split": "train"}
            return [Call("evaluate", arguments)]
    return []


@dataclass(frozen=True)
class _Plan:
    """A regrade with everything resolved.

    Attributes:
        record: the environment version that scores.
        stored: the answers that are scored.
        task_count: how many tasks these answers belong to.
        cap: the most device hours that the run may take, 0 for no cap.
    """

    record: EnvRecord
    stored: Stored
    task_count: int
    cap: float


def _resolve_plan(
    home: Home, request: EvaluationRequest, cap_function: CapFunction | None
) -> _Plan:
    """Find the environment and the stored answers of a regrade (a new scoring of stored answers),
    choose how many are scored, and limit the device hours.

    `cap_function` is the quota of the caller's key: it takes the hours that the run may need, and
    returns those that it may take. It is None if no quota applies.

    Raises UserError: BAD_ARGUMENT if the environment is a command, which cannot score stored
    answers; ENV_*, RUN_NOT_FOUND, RUN_STATE, NO_EVALUATION, QUOTA, BUDGET, NOT_APPROVED.
    """
    record = scored_env(home, request.env_id, "regraded")
    if record.kind == "command":
        raise UserError(
            "BAD_ARGUMENT",
            f"the command of {record.env_id} earns its rewards while it plays; nothing scores a "
            "stored answer",
            hint=Hint(
                "Play the tasks again: evaluate with models.",
                Call("evaluate", {"env_id": record.env_id, "models": ["pebble"]}),
            ),
            field="regrade",
        )
    stored = stored_answers(home, request.regrade, request.split)
    task_count = min(request.rows, stored.tasks)
    answer_count = task_count * stored.attempts * len(stored.refs)  # `refs`: the models
    # A function, because the hours are estimated only if a cap is needed.
    cap = cap_of(home, cap_function, lambda: scoring_hours(record, answer_count))
    return _Plan(record, stored, task_count, cap)


def _warnings(request: EvaluationRequest, plan: _Plan) -> list[str]:
    """Return the warnings about the regrade `plan`: doubts that are no reason to refuse it."""
    return [
        *registry.prefix_warning(request.env_id, plan.record),
        *plan.stored.warnings,
        *cap_warnings(plan.cap),
        *abbreviation_warning("regrade", request.regrade, plan.stored.run_id),
        *_tasks_left_out(request, plan.stored),
    ]


def _tasks_left_out(request: EvaluationRequest, stored: Stored) -> list[str]:
    """Return a warning if the run has answers to more tasks than `rows`; otherwise []."""
    if stored.tasks <= request.rows:
        return []
    return [f"{request.rows} of the {stored.tasks} stored tasks are scored; rows takes more"]


def _new_run(plan: _Plan) -> NewRun:
    """Make the row that the database stores of the regrade `plan`."""
    return NewRun(
        name=f"{plan.record.name}-regrade",
        kind="evaluate",
        algorithm="regrade",
        env_id=plan.record.env_id,
        model=", ".join(plan.stored.refs),
        max_gpu_hours=plan.cap,
    )


def check_tasks(request: EvaluationRequest) -> None:
    """Raise UserError BAD_ARGUMENT for an unknown split, or for fewer than one task (`rows`)."""
    if request.split not in get_args(SplitName):
        raise bad_argument("split", request.split, 'Use "heldout", "dev" or "train".')
    if request.rows < 1:
        raise bad_argument("rows", request.rows, "Give a number of tasks from 1.")


def _check_request(request: EvaluationRequest) -> None:
    """Raise UserError BAD_ARGUMENT if an argument is given that a regrade does not take, if the
    split is unknown, or if `rows` is below 1."""
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


def _config_content(request: EvaluationRequest, plan: _Plan) -> Mapping[str, object]:
    """Make the content of config.json of the regrade `plan`, without the run's id."""
    stored = plan.stored
    return {
        "kind": "evaluate",
        "algorithm": "regrade",
        "env_id": plan.record.env_id,
        "env_dir": str(plan.record.dir),
        # In an entry of `models`, "rows" is the file with the model's answers. The top-level "rows"
        # below is a number of tasks.
        "models": [{"ref": ref, "rows": path} for ref, path in stored.models],
        "split": request.split,
        "rows": request.rows,
        "attempts": stored.attempts,
        "settings": stored.sampling,
        "sources": {},
        "regrade": stored.run_id,
        "regraded_from": stored.env_id,
        "wall_limit_hours": EVALUATION_WALL_HOURS,
        "max_gpu_hours": plan.cap,
    }
