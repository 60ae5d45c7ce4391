"""The verbs of Honesmith: each calls one engine function and completes the head of its reply.

The MCP tools and the command line both call these functions. Engine modules are imported inside the
functions, because a server must answer its first request before it needs any of them (measured: the
imports together take longer than the rest of our own start-up).
"""
# ruff: noqa: PLC0415

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit.requests import DryRunRequest, EvaluationRequest, TrainRequest
from engine.serving.chat_request import OF_CLIENTS, ChatRequest, Listener, Patience, unheard
from mcp_server.access.keys import LOCAL, Key, check_owner_agreed
from mcp_server.api import paths
from mcp_server.api.after_wait import HELD_WAIT_S, after_wait, suggest, with_wait_arguments
from mcp_server.api.replies import fitting_page, with_head

_DATA_WAIT_S = 40.0  # for data to be fetched or read; counting tokens comes after it


def get_status(
    home: Home, scope: str = "all", limit: int = 20, cursor: str = "", key: Key = LOCAL
) -> Reply:
    """List devices, queue, runs, environments, models and deployments of a home.

    Args:
        home: the home to read.
        scope: the list to return, such as "runs"; "all": a short view of every list.
        limit: the most rows of each list; fewer if the page would be too large for a result.
        cursor: `next_cursor` of the previous page; "" for the first page.
        key: the caller. If its runs are limited, the reply holds under `key` its limits and how
            much of each is used.
    """
    from engine.runs import lifecycle  # imported late, as in every verb: the server starts faster

    limits: Reply = {}
    if key.is_limited and scope in ("all", "runs"):
        from mcp_server.access import quotas

        limits = {"key": quotas.limits_and_use(home, key)}

    def read_page(count: int) -> Reply:  # `fitting_page` lowers `count` until the page fits
        return lifecycle.overview(home, scope, count, cursor) | limits

    return with_head(fitting_page(read_page, limit), f"Status of {scope}.")


def push_env(
    home: Home,
    path: str = "",
    name: str = "",
    install: bool = False,
    roots: Sequence[Path] | None = None,
    key: Key = LOCAL,
    files: Mapping[str, object] | bytes | None = None,
) -> Reply:
    """Check an environment and store it as a version.

    Args:
        home: the home that stores the version.
        path: the folder of the environment; a relative one is looked for here, then in `roots`.
        name: name of the environment; "" for the folder's name.
        install: build a virtual environment from its requirements.txt first.
        files: path -> text of each file, or the bytes of a zip file, instead of `path`; then a name
            must be given.
        roots: folders that the environment must lie in; None: any folder may be pushed.
        key: the caller; its scopes and the owner's consent decide about installing, secrets and
            networks.

    Raises:
        UserError: a code with ENV_, or DATASET_INVALID, if the environment cannot be used.
            FORBIDDEN if `key` may not install, or may not give it a secret or a network.
            PATH_OUTSIDE_ROOTS if the folder lies in none of `roots`.
    """
    from engine.environments import push
    from engine.runs.submit import regrading

    if files is not None:
        from mcp_server.api import uploads

        with uploads.upload_folder(name, files, path) as folder_of_files:
            return push_env(home, str(folder_of_files), name, install, key=key)
    if install:
        key.require("install", "push_env with install=true")
    folder = path if roots is None else paths.from_roots(path, roots)
    reply = push.push_env(
        home,
        folder,
        name=name,
        install=install,
        roots=None if roots is None else list(roots),
        check_settings=partial(check_owner_agreed, home, key),
    )
    # Suggest to score stored answers again with the edited score(), before anything is trained.
    reply = replace(reply, next=[*reply.next, *regrading.preview_calls(home, reply.env_id)])
    return with_head(
        reply.to_json(), f"Pushed {reply.env_id}.", suggest("dry_run", env_id=reply.env_id)
    )


def dry_run(
    home: Home,
    request: DryRunRequest,
    key: Key = LOCAL,
    roots: Sequence[Path] | None = None,
) -> Reply:
    """Check a training run or a plan without training; for a data file call `inspect_data` instead.

    Args:
        home: the home that holds the environment.
        request: what could be submitted. Its `env_id` may also be the path of a data file, or the
            id of a dataset on the hub; `inspect_data` then counts tokens of the request's model.
        key: the caller; a probe of the model takes hours of its quota.
        roots: folders that a data file must lie in; None: any folder.

    Raises UserError if the environment, the model or a setting cannot be used.
    """
    from engine.dry_run import dry_run as engine_dry_run
    from engine.dry_run import report

    if paths.names_data(request.env_id) and not paths.names_shared_env(home, request.env_id):
        return inspect_data(home, request.env_id, request.model, roots, wait_s=_DATA_WAIT_S)
    reply = engine_dry_run.dry_run_request(home, request, _cap_function(home, key))
    if not request.full:
        reply = report.shortened(reply)
    return with_head(reply, f"Checked {_in_words(request)}.")


def estimate_cost(home: Home, request: TrainRequest) -> Reply:
    """Estimate time, memory and money of a run or a plan, from the same request as a dry run.

    Raises UserError if the environment, the model or a setting cannot be used.
    """
    from engine.dry_run import plan_cost

    return with_head(plan_cost.estimate_request(home, request), f"Estimated {_in_words(request)}.")


def _in_words(request: TrainRequest) -> str:
    """Return what a request trains, by which algorithm and on what: "grpo of pebble on arith"."""
    return f"{request.algorithm} of {request.model} on {request.env_id}"


def submit_train(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run, or resume one, and return at once with its id, state and estimate.

    Raises UserError NOT_APPROVED if a person must agree to the cost first; another code if the run
    cannot be trained as requested.
    """
    from engine.runs import lifecycle

    reply = lifecycle.submit(home, request)
    run_id = reply["run_id"]
    if "steps" not in reply:  # a plan has `steps`: its runs have curves, the plan itself has none
        reply.setdefault("metrics_uri", f"run://{run_id}/metrics")
    return with_head(
        reply, f"{run_id} is {reply.get('state', 'queued')}.", suggest("wait_run", run_id=run_id)
    )


def wait_run(
    home: Home,
    run_id: str,
    until: str = "end",
    timeout_s: float = 45.0,
    cursor: str = "",
    on_progress: Callable[[Reply], None] | None = None,
) -> Reply:
    """Wait for a run or a plan, at most `HELD_WAIT_S` seconds, and return its status.

    Args:
        home: the home that holds the run.
        run_id: the run, or a unique prefix.
        until: end, first_step, next_eval, alert or news; the end of the run ends every wait.
        timeout_s: seconds to wait at most; 0 returns at once.
        cursor: `cursor` from the previous reply, so that no event between two calls is missed; "":
            only events from now on count.
        on_progress: called with the status of the run while waiting.

    Raises:
        UserError: RUN_NOT_FOUND if there is no such run; BAD_ARGUMENT, BAD_CURSOR if one is wrong.
    """
    from engine.runs import lifecycle

    timeout_s = min(max(timeout_s, 0.0), HELD_WAIT_S)
    reply = lifecycle.wait(home, run_id, until, timeout_s, cursor, on_progress=on_progress)
    run_id = reply.get("run_id", run_id)  # the full id, if a prefix was given
    full = with_head(reply, f"{run_id} is {reply.get('state')}.", *after_wait(run_id, until, reply))
    return full | {"next": with_wait_arguments(full["next"], until, timeout_s)}


def forecast(home: Home, run_id: str) -> Reply:
    """Return {"forecast": when a run is likely to end and what it will have taken} for a run that
    is under way; {} for any other run.

    Raises UserError RUN_NOT_FOUND if there is no such run.
    """
    from engine.machine.pace.progress import read_progress
    from engine.runs.forecast import forecast_of_run

    with Store(home) as store:
        row = store.get_run(run_id)
        progress = read_progress(home.run(row.run_id), row)
        run_forecast = forecast_of_run(home, store, row, progress)
    return {} if run_forecast is None else {"forecast": run_forecast.to_json()}


def read_logs(
    home: Home,
    run_id: str,
    view: str = "metrics",
    keys: Sequence[str] = (),
    grep: str = "",
    limit: int = 50,
    cursor: str = "",
) -> Reply:
    """Return a page of the metrics, events, console or error of a run.

    Args:
        home: the home that holds the run.
        run_id: the run, or a unique prefix.
        view: metrics, events, console or error.
        keys: names of the metrics to show; empty: all.
        grep: only lines with this text; "": all lines.
        limit: the most rows or lines; fewer if the page would be too large for a result.
        cursor: `next_cursor` of the previous page; "" for the first page.

    Raises:
        UserError: RUN_NOT_FOUND if there is no such run; BAD_ARGUMENT, BAD_CURSOR if one is wrong.
    """
    from engine.runs.reading import logs

    def read_page(count: int) -> Reply:  # `fitting_page` lowers `count` until the page fits
        return logs.read_logs(home, run_id, view, list(keys), grep, count, cursor).to_json()

    return with_head(fitting_page(read_page, limit), f"{view} of {run_id}.")


def read_rollouts(
    home: Home,
    run_id: str,
    pick: str = "worst",
    step: int = -1,
    where: str = "",
    tokens: bool = False,
    limit: int = 3,
    max_chars: int = 1200,
    cursor: str = "",
) -> Reply:
    """Return a page of rollouts of a run: what the model wrote, and its rewards.

    Args:
        home: the home that holds the run.
        run_id: the run, or a unique prefix.
        pick: which rollouts come first, e.g. worst or best.
        step: training step; -1: the latest.
        where: a condition such as "reward < 0.5"; "": all rollouts.
        tokens: add token ids and loss mask.
        limit: the most rollouts; fewer if the page would be too large for a result.
        max_chars: the most characters of the prompt, of each turn and of the completion.
        cursor: `next_cursor` of the previous page; "" for the first page.

    Raises:
        UserError: RUN_NOT_FOUND if there is no such run; BAD_ARGUMENT, BAD_CURSOR if one is wrong.
    """
    from engine.runs.reading import rollouts
    from engine.runs.reading.rollout_pages import RolloutQuery

    def read_page(count: int) -> Reply:  # `fitting_page` lowers `count` until the page fits
        query = RolloutQuery(run_id, pick, step, where, tokens, count, max_chars, cursor)
        return rollouts.read_rollouts(home, query).to_json()

    return with_head(fitting_page(read_page, limit), f"{pick} rollouts of {run_id}.")


def evaluate(home: Home, request: EvaluationRequest, key: Key = LOCAL) -> Reply:
    """Queue an evaluation, which is a separate run, and return at once with its id.

    The hours of the evaluation count against the quota of `key`. Raises UserError QUOTA if they
    exceed it, or another code if the request cannot be run.
    """
    from engine.runs import lifecycle

    reply = lifecycle.submit_evaluation(home, request, _cap_function(home, key))
    run_id = reply.get("run_id", "")
    return with_head(
        reply, f"{run_id} is {reply.get('state', 'queued')}.", suggest("wait_run", run_id=run_id)
    )


def compare_runs(
    home: Home, ids: Sequence[str], env_id: str = "", metric: str = "", group_by: str = ""
) -> Reply:
    """Compare models, runs or evaluations by their answers to the same tasks.

    Args:
        home: the home that holds the runs and their answers.
        ids: models, runs or evaluations; the one from before the training comes first.
        env_id: the environment on which to compare them; "" if all were evaluated on only one.
        metric: a named metric of the environment; "" for success, or reward if tasks have none.
        group_by: a key of the tasks' metadata, to show the results by its values; "" for none.

    Raises:
        UserError: RUN_NOT_FOUND, NO_EVALUATION or NOT_COMPARABLE if `ids` do not exist, have no
            answers or share no tasks; BAD_ARGUMENT if another argument is wrong.
    """
    from engine.evidence.compare import compare

    reply = compare.compare_runs(home, list(ids), env_id, metric, group_by)
    return with_head(reply, f"Compared {', '.join(ids)}.")


def diagnose(home: Home, run_id: str) -> Reply:
    """Find out what went wrong in a run, likely causes first. Raises UserError if there is no such
    run, or if its tasks must not be shown."""
    from engine.evidence.detect import diagnose as engine_diagnose

    return with_head(engine_diagnose.diagnose(home, run_id), f"Diagnosed {run_id}.")


def curate(
    home: Home,
    source_ids: Sequence[str],
    name: str,
    where: str = "",
    select: str = "correct",
    max_per_task: int = 1,
    pool_models: bool = False,
    preview: bool = True,
) -> Reply:
    """Collect stored answers as rows of a new SFT dataset; with `preview` only count them.

    Args:
        home: the home that holds the answers, and in which the dataset is stored.
        source_ids: the evaluations or GRPO runs whose answers are taken.
        name: name of the dataset.
        where: a condition on each task, such as "0 < avg < 1"; "": all tasks.
        select: which answers to a task are taken, e.g. correct or best.
        max_per_task: the most answers taken of each task.
        pool_models: treat the answers of all models to a task as one group.
        preview: count and show examples, but store nothing.

    Raises UserError if a source or an argument cannot be used.
    """
    from engine.curation import curate as engine_curate
    from engine.curation.curated import Choices

    choices = Choices(list(source_ids), where, select, max_per_task, pool_models)
    # The reply has a summary of its own, about what was stored: `with_head` keeps that.
    reply = engine_curate.curate(home, name, choices, preview)
    return with_head(reply.to_json(), f"Curated {name}.")


def deploy(
    home: Home,
    run_id: str,
    action: str = "start",
    format: str = "adapter",
    path: str = "",
    roots: Sequence[Path] | None = None,
    key: Key = LOCAL,
    patience: Patience = OF_CLIENTS,
    compute: str = "",
) -> Reply:
    """Serve a trained model, stop serving it, or export its files.

    Args:
        home: the home that holds the run.
        run_id: a run or one of its checkpoints, such as RUN@best.
        action: start, stop or export.
        format: only for an export: adapter, merged, gguf-f16 or gguf-q8_0.
        path: folder that an export is written to; "": one in the home.
        roots: folders that `path` must lie in; None: it may lie anywhere.
        key: the caller; it may have a limit of deployments.
        patience: how long a start is waited for.
        compute: where it is served: "local", a host such as "ssh:box", or "" for the usual.

    Raises:
        UserError: PATH_OUTSIDE_ROOTS for a `path` outside `roots`, those of `service.deploy`.
    """
    from engine.machine.processes.deployments import Asker
    from engine.serving import service

    if action == "export" and path and roots is not None:
        path = str(paths.inside_roots(path, roots))
        paths.refuse_hidden(home, path, roots)
    asker = Asker(key.caller_id, key.max_deployments)
    reply = service.deploy(home, run_id, action, format, path, asker, patience, compute)
    summary = f"{action} {run_id}: done."
    if action != "start":  # only after a start is there a model to chat with
        return with_head(reply, summary)
    model = reply.get("model", run_id)
    return with_head(reply, summary, Call("chat", {"model": model}, needs=("message",)).to_json())


def chat(
    home: Home,
    request: ChatRequest,
    key: Key = LOCAL,
    patience: Patience = OF_CLIENTS,
    listener: Listener = unheard,
) -> Reply:
    """Ask one model or two; one that is not served yet is deployed first.

    `patience` says how long the call waits; `listener` gets each piece of the answers as it comes.
    Raises UserError if a model cannot be found or served, or refuses the question.
    """
    from engine.machine.processes.deployments import Asker
    from engine.serving import chat as engine_chat

    asker = Asker(key.caller_id, key.max_deployments)
    reply = engine_chat.chat(home, request, asker, patience, listener)
    return with_head(reply, "Answered.")


def cancel_run(home: Home, run_id: str, reason: str = "") -> Reply:
    """Stop a run after its next checkpoint; `submit_train` can resume it. `reason` is kept with the
    run. Raises UserError if there is no such run."""
    from engine.runs import lifecycle

    reply = lifecycle.cancel(home, run_id, reason)
    run_id = reply.get("run_id", run_id)  # the full id, if a prefix was given
    return with_head(
        reply, f"{run_id} is {reply.get('state')}.", suggest("submit_train", resume=run_id)
    )


def read_playbook(section: str = "") -> str:
    """Return a section of the playbook as Markdown; the table of contents for ""."""
    import playbook

    return playbook.read(section)


def report(home: Home, run_id: str) -> Reply:
    """Write `report.html` of a run and return its path; if the run's files were deleted, return
    that of the report written before. Raises UserError RUN_NOT_FOUND if there is no such run."""
    from engine.evidence.report.html_report import write_report

    with Store(home) as store:
        run_id = store.get_run(run_id).run_id
    run = home.run(run_id)
    # A report cannot be written again after the files of its run were deleted.
    only_report_left = run.deleted.exists() and run.report.exists()
    path = run.report if only_report_left else write_report(home, run_id)
    return with_head({"run_id": run_id, "report": str(path)}, f"The report of {run_id} is {path}")


def results(home: Home, run_id: str, path: Path, form: str) -> Reply:
    """Write the answers of a run into the file `path`. `form` is "csv" or "parquet" (a table), or
    "traces" (rollouts as JSON lines in the form of OpenEnv).

    Raises UserError RUN_NOT_FOUND if there is no such run, NO_EVALUATION if it has no answers, or
    BAD_ARGUMENT if the file cannot be written.
    """
    from engine.curation.training_traces import write_traces
    from engine.evidence.report.results_table import write_results

    with Store(home) as store:
        run_id = store.get_run(run_id).run_id
    if form == "traces":
        return with_head(write_traces(home, run_id, path).to_json(), f"Wrote {path}.")
    table_form: Literal["csv", "parquet"] = "csv" if form == "csv" else "parquet"
    return with_head(write_results(home, run_id, path, table_form).to_json(), f"Wrote {path}.")


def verify(home: Home, run_id: str) -> Reply:
    """Check a run's files against their hashes at its end. Raises UserError if there is no run."""
    from engine.evidence.verdict import provenance

    return with_head(provenance.verify(home, run_id).to_json(), f"Verified {run_id}.")


def inspect_data(
    home: Home,
    path: str,
    model: str = "",
    roots: Sequence[Path] | None = None,
    wait_s: float = math.inf,
) -> Reply:
    """List the shapes, bad rows, duplicates, lengths and splits of a data file.

    Args:
        home: the home whose cache holds indexes of large files, and datasets of the hub.
        path: the path of the file, or the id of a dataset on the hub, whose first training file is
            then inspected.
        model: the model whose tokens the lengths are also given in; "" for none.
        roots: folders that the file must lie in; None: any folder.
        wait_s: seconds that fetching a dataset or reading a large file may take.

    Raises UserError: DATASET_INVALID if the file cannot be read as data. DATASET_READING, which is
    retryable, if fetching or reading goes on after `wait_s`. PATH_OUTSIDE_ROOTS if the file lies in
    none of `roots`.
    """
    from engine.environments import data_inspection

    # An agent may name the file relative to one of `roots`.
    file = path if roots is None else paths.from_roots(path, roots)
    report = data_inspection.inspect(home, file, model, roots, wait_s)
    return with_head(report.to_json(), f"Looked into {path}.")


def build_env(home: Home, folder: str) -> Reply:
    """Install what the requirements.txt in `folder` names, as a push would. Raises UserError."""
    from engine.environments import versions

    return with_head(versions.build(home, Path(folder)).to_json(), f"Built {folder}.")


def diff_settings(home: Home, before: str, after: str) -> Reply:
    """List the settings in which two trainings differ; each is a run or a TOML file. Raises
    UserError if a run does not exist or has no settings, or if a file cannot be read as a run."""
    from engine.runs import diff

    return with_head(diff.diff(home, before, after), f"Compared {before} and {after}.")


def diff_envs(home: Home, before: str, after: str) -> Reply:
    """List files and lines in which two environment versions differ. Raises UserError ENV_NOT_FOUND
    if there is no such version."""
    from engine.environments import versions

    reply = versions.diff(home, before, after)
    return with_head(reply.to_json(), f"Compared {before} and {after}.")


def pull_env(home: Home, env_id: str, folder: Path) -> Reply:
    """Copy the files of an environment version into a new folder. Raises UserError ENV_NOT_FOUND if
    there is no such version, or BAD_ARGUMENT if the folder cannot be written."""
    from engine.environments import versions

    return with_head(versions.pull(home, env_id, folder).to_json(), f"Pulled {env_id}.")


def seal_env(home: Home, env_id: str, looks: int) -> Reply:
    """Seal a version: none of its tasks is shown any more, and at most `looks` models may be
    evaluated on it. Raises UserError if there is no such version or it may not be sealed now."""
    from engine.environments import versions

    return with_head(versions.seal(home, env_id, looks).to_json(), f"Sealed {env_id}.")


def delete_env(home: Home, env_id: str, force: bool = False) -> Reply:
    """Delete an environment version; one that ended runs have used needs `force`. Raises UserError
    ENV_NOT_FOUND, or RUN_STATE if a run still uses it."""
    from engine.environments import versions

    return with_head(versions.delete(home, env_id, force).to_json(), f"Deleted {env_id}.")


def pin(home: Home, run_id: str, step: int) -> Reply:
    """Pin a run's checkpoint of the training step `step`, so that the setting `keep_checkpoints`
    does not delete it. Raises UserError if there is no such run or checkpoint."""
    from engine.runs import pins

    return pins.pin(home, run_id, step)


def unpin(home: Home, run_id: str, step: int) -> Reply:
    """Undo `pin` for the checkpoint of `step`. Raises UserError if it is not pinned."""
    from engine.runs import pins

    return pins.unpin(home, run_id, step)


def deletable_runs(home: Home, run_ids: Sequence[str], force: bool = False) -> Reply:
    """Check that these runs may be deleted together; returns `run_ids` (full ids) and `warnings`.

    A run from which something was made, such as a later run, may be deleted only with `force`.
    Raises UserError RUN_STATE if one of them may not be deleted.
    """
    from engine.runs import deletion

    full_ids, warnings = deletion.deletable(home, run_ids, force)
    return {"run_ids": full_ids, "warnings": warnings}


def delete_run(home: Home, run_id: str) -> Reply:
    """Delete a run's large files. Call `deletable_runs` before: it checks whether something else
    needs the run. Raises UserError RUN_STATE if the run has not ended."""
    from engine.runs import deletion

    return with_head(deletion.delete_run(home, run_id), f"Deleted {run_id}.")


def _cap_function(home: Home, key: Key) -> Callable[[float], float] | None:
    """Return a function from the estimated hours of a run to its cap in hours, within the quota of
    `key`; None if the hours of `key` are not limited."""
    from mcp_server.access import quotas

    return quotas.cap_function_of(home, key)
