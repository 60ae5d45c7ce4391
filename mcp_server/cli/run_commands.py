"""Commands about runs: plan, train, wait, read, judge."""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import UserError
from engine.core.format import counted, size
from engine.core.reply import Reply
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.runs.submit.requests import DryRunRequest, EvaluationRequest
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import verbs
from mcp_server.cli.run_options import (
    CurateOptions,
    Env,
    EvaluationOptions,
    Limit,
    LogOptions,
    PlanOptions,
    RolloutOptions,
    RunId,
    Scope,
    TrainOptions,
    Until,
    Wait,
)
from mcp_server.screen.terminal import (
    FAILED,
    OK,
    CommandGroup,
    HomeFolder,
    Json,
    Sets,
    command,
    home_of,
    settings_from,
    show,
    working,
)

Step = Annotated[int, typer.Argument(min=1, metavar="STEP", help="Of the checkpoint, such as 20.")]

runs = typer.Typer(help="The runs of this home, newest first.", cls=CommandGroup)

FOLLOW_EVERY_S = 1.0  # seconds between two reads of the logs for `logs --follow`
SMOKE_S = 600.0  # seconds that a smoke run may take; a person waits longer than an agent's call
WAIT_STEP_S = 30.0  # seconds of the longest single wait; a command waits as often as needed
MEASURING = "checking; the first time in a home its speed is measured, about 20 s"


@command
def status(
    scope: Annotated[Scope, typer.Argument()] = "all",
    limit: Limit = 20,
    cursor: str = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Devices, queue, runs, environments, models, deployments."""
    show(verbs.get_status(home_of(home), scope, limit, cursor), as_json)


@command
def _list_runs(limit: int, cursor: str, home: Path | None, as_json: bool) -> None:
    """Print one page of the runs of a home, newest first.

    The decorator `command` prints its errors and ends the program. The typer callback `list_runs`,
    which calls this function, cannot have that decorator: it also runs before each subcommand.
    """
    show(verbs.get_status(home_of(home), scope="runs", limit=limit, cursor=cursor), as_json)


@runs.callback(invoke_without_command=True)
def list_runs(
    ctx: typer.Context,
    limit: Limit = 20,
    cursor: str = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """The runs of this home, newest first."""
    # Only `honesmith runs` alone lists the runs; typer calls this before each subcommand too.
    if ctx.invoked_subcommand is None:
        _list_runs(limit=limit, cursor=cursor, home=home, as_json=as_json)
    # An option between `runs` and the subcommand would be ignored silently, so it is refused. The
    # source of an option that the user typed is ParameterSource.COMMANDLINE.
    elif any(str(ctx.get_parameter_source(name)).endswith("COMMANDLINE") for name in ctx.params):
        ctx.fail(f"Options go behind: honesmith runs {ctx.invoked_subcommand} RUN --home DIR")


@runs.command("delete")
@command
def delete_runs(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs that ended.")],
    force: Annotated[
        bool, typer.Option("--force", help="Although something was made from them.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Free the disk space of runs: what was asked and what came of it stays on record."""
    located_home = home_of(home)
    deletable = verbs.deletable_runs(located_home, run_ids, force)
    replies, failure_warnings = _delete_each(located_home, deletable["run_ids"])
    reply = _deletion_reply(replies, [*deletable.get("warnings", []), *failure_warnings])
    if not as_json:  # people are shown only the ids: the summary already names the bytes
        reply["deleted"] = list(reply["deleted"])
        reply["bytes"] = ""  # an empty field is not printed
    show(reply, as_json)
    return FAILED if failure_warnings else OK


def _deletion_reply(replies: Sequence[Reply], warnings: Sequence[str]) -> Reply:
    """Merge `replies`, one for each run that was deleted, into one reply with the sum of the freed
    bytes.

    `warnings` are further warnings, which come before those of the single replies.
    """
    freed_bytes = sum(reply["bytes"] for reply in replies)
    reply_warnings = [warning for reply in replies for warning in reply.get("warnings", [])]
    return {
        "summary": f"{counted(len(replies), 'run')} deleted, {size(freed_bytes)} freed; "
        "settings, results and spent hours stay on record.",
        "deleted": {reply["run_id"]: reply["bytes"] for reply in replies},
        "bytes": freed_bytes,
        "warnings": [*warnings, *reply_warnings],
    }


def _delete_each(home: Home, run_ids: Sequence[str]) -> tuple[list[Reply], list[str]]:
    """Delete runs one by one. If one cannot be deleted, go on with the others.

    Returns:
        The replies for the deleted runs, and a warning for each run that was not deleted.

    Raises:
        UserError or OSError: if there is only one run and it cannot be deleted.
    """
    replies = []
    failure_warnings = []
    for run_id in run_ids:
        try:
            replies.append(call_with_audit_log(home, "delete_run", verbs.delete_run, run_id=run_id))
        except (UserError, OSError) as error:
            if len(run_ids) == 1:  # the command deleted nothing, so an error says it all
                raise
            failure_warnings.append(f"{run_id} was not deleted: {error}")
    return replies, failure_warnings


@command
def dry_run(
    options: PlanOptions,
    samples: Annotated[int, typer.Option(min=0, max=256, help="Also try the model.")] = 0,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Also do two real steps on 8 rows; nothing stays.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every check and setting, the audit.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Check a run or a plan before spending anything."""
    planned = options.plan_request()
    # The fields of the planned request, and what to try beside the checks. `full` asks for all
    # details, of which the printing below may show fewer.
    trials = {"samples": samples, "smoke": smoke, "smoke_s": SMOKE_S, "full": True}
    request = DryRunRequest(**vars(planned.request), **trials)
    with working(MEASURING, as_json):
        reply = call_with_audit_log(home_of(home), "dry_run", verbs.dry_run, request=request)
    show(planned.reply_with_files(reply), as_json, renderer="whole_plan" if show_all else "plan")
    # A plan with a check that failed gives exit status 1, although the command itself has worked.
    has_failed_check = any(check.get("status") == "fail" for check in reply.get("checks", []))
    return FAILED if has_failed_check else OK


@command
def estimate(options: PlanOptions, home: HomeFolder = None, as_json: Json = False) -> None:
    """What a run or a plan will take."""
    # Time, GPU-hours, money, memory and disk; nothing is started but a measurement of speed.
    planned = options.plan_request()
    with working(MEASURING, as_json):
        reply = verbs.estimate_cost(home_of(home), planned.request)
    show(planned.reply_with_files(reply), as_json, renderer="cost")


@command
def train(
    options: TrainOptions, wait: Wait = False, home: HomeFolder = None, as_json: Json = False
) -> int:
    """Queue a training run; it goes on when this command has returned."""
    planned = options.plan_request()
    located_home = home_of(home)
    reply = call_with_audit_log(
        located_home, "submit_train", verbs.submit_train, request=planned.request
    )
    return _show_submitted(located_home, planned.reply_with_files(reply), wait, as_json)


@command
def rerun(
    run_id: RunId,
    settings: Sets = None,
    wait: Wait = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Train once more what a run trained: its environment's version, its settings and seed."""
    # Imported late: only this command reads a run's config to make a request of it.
    from engine.runs.rerun import rerun_request  # noqa: PLC0415

    located_home = home_of(home)
    request = rerun_request(located_home, run_id, settings_from(settings))
    reply = call_with_audit_log(located_home, "submit_train", verbs.submit_train, request=request)
    return _show_submitted(located_home, reply, wait, as_json)


@command
def wait(
    run_id: RunId,
    until: Until = "end",
    timeout: Annotated[float, typer.Option(min=0, help="Seconds; 0: no limit.")] = 0,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Wait for a run, with its progress. Exit status 1 when it failed or time was up."""
    return _follow(home_of(home), run_id, until, timeout, as_json)


@command
def logs(
    run_id: RunId, options: LogOptions, home: HomeFolder = None, as_json: Json = False
) -> None:
    """What a run wrote; with -f a page at a time until it ends."""
    located_home = home_of(home)
    if options.follow:
        _follow_logs(located_home, run_id, options, as_json)
        return
    page = _log_page(located_home, run_id, options, cursor=options.cursor)
    show(page, as_json, renderer=_renderer_of(options))


def _follow_logs(home: Home, run_id: str, options: LogOptions, as_json: bool) -> None:
    """Print the pages of a run's logs one after the other, and wait for new lines until the run has
    ended. `options` say which lines are printed, and from which cursor on."""
    cursor = options.cursor
    while True:
        page = _log_page(home, run_id, options, cursor)
        # One of these fields holds the lines of the page, depending on the view.
        has_lines = any(page.get(name) for name in ("lines", "events", "rows"))
        if has_lines:
            show(_without_repeated(page, as_json), as_json, renderer=_renderer_of(options))
        previous_cursor = cursor
        cursor = page.get("next_cursor", "")
        # No cursor: the run has ended and this was the last page. A cursor that ends in ":older"
        # leads to lines from before, which following does not show.
        if not cursor or cursor.endswith(":older"):
            return
        if has_lines or cursor != previous_cursor:
            continue  # there may already be another page
        if page.get("state") in TERMINAL:
            return
        # Unlike a sleep, this wait ends when the run does. It also notices if the run's processes
        # were killed.
        verbs.wait_run(home, run_id, until="end", timeout_s=FOLLOW_EVERY_S)


def _log_page(home: Home, run_id: str, options: LogOptions, cursor: str) -> Reply:
    """Read the page of a run's logs that begins at `cursor` ("": the first page), with the view and
    the filters of `options`."""
    return verbs.read_logs(
        home, run_id, options.view, options.keys or (), options.grep, options.limit, cursor
    )


def _renderer_of(options: LogOptions) -> str:
    """Return the name of the function in `mcp_server.screen.render` that prints a page of logs:
    with `--all` the one that prints every column."""
    return "all_logs" if options.all_columns else "logs"


@command
def rollouts(
    run_id: RunId, options: RolloutOptions, home: HomeFolder = None, as_json: Json = False
) -> None:
    """What the model wrote and what it earned."""
    reply = verbs.read_rollouts(
        home_of(home),
        run_id,
        pick=options.pick,
        step=options.step,
        where=options.where,
        tokens=options.tokens,
        limit=options.limit,
        max_chars=options.max_chars,
        cursor=options.cursor,
    )
    show(reply, as_json)


@command
def evaluate(
    env: Env,
    options: EvaluationOptions,
    wait: Wait = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Score models on the same tasks."""
    located_home = home_of(home)
    request = EvaluationRequest(
        env_id=env,
        models=options.models or [],
        split=options.split,
        rows=options.rows,
        attempts=options.attempts,
        settings=settings_from(options.settings),
        regrade=options.regrade,
        task_indices=options.task_indices,
        perturb=options.perturb or (),
    )
    reply = call_with_audit_log(located_home, "evaluate", verbs.evaluate, request=request)
    return _show_submitted(located_home, reply, wait, as_json)


@command
def compare(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Before, then after.")],
    env: Annotated[str, typer.Option("--env", "--env-id", help="Where they met.")] = "",
    metric: Annotated[str, typer.Option(help="A named metric to judge by.")] = "",
    group_by: Annotated[
        str, typer.Option("--by", "--group-by", help="Also by this key of the tasks' metadata.")
    ] = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Did it get better? With --by a single model will do."""
    # `ids` name models, runs or evaluations, the one from before the training first. The reply has
    # the difference of their scores on the tasks that all of them answered, and a verdict.
    show(verbs.compare_runs(home_of(home), ids, env, metric, group_by), as_json)


@command
def diff(
    before: Annotated[str, typer.Argument(metavar="RUN|FILE.toml", help="A run or a TOML file.")],
    after: Annotated[str, typer.Argument(metavar="RUN|FILE.toml", help="Another.")],
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """What two trainings were told differently; neither must be evaluated, or even be queued."""
    # The reply lists the settings that differ between the two.
    show(verbs.diff_settings(home_of(home), before, after), as_json)


@command
def diagnose(run_id: RunId, home: HomeFolder = None, as_json: Json = False) -> None:
    """Why did it not learn? Ranked causes, each with the one lever to pull."""
    # A lever is the setting or the edit to try.
    show(verbs.diagnose(home_of(home), run_id), as_json, renderer="diagnosis")


@command
def curate(options: CurateOptions, home: HomeFolder = None, as_json: Json = False) -> None:
    """What models answered well becomes an SFT dataset."""
    # Without --save the answers are only counted, and nothing is stored.
    reply = call_with_audit_log(
        home_of(home),
        "curate",
        verbs.curate,
        source_ids=options.sources,
        name=options.name,
        where=options.where,
        select=options.select,
        max_per_task=options.max_per_task,
        pool_models=options.pool_models,
        preview=not options.save,
    )
    show(reply, as_json)


@command
def cancel(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Stop a run after a checkpoint."""
    arguments = {"run_id": run_id, "reason": reason}
    show(call_with_audit_log(home_of(home), "cancel_run", verbs.cancel_run, **arguments), as_json)


@command
def pin(run_id: RunId, step: Step, home: HomeFolder = None, as_json: Json = False) -> None:
    """Keep the checkpoint of a step, whatever keep_checkpoints removes."""
    # keep_checkpoints is a setting of the run: how many checkpoints are kept.
    arguments = {"run_id": run_id, "step": step}
    show(call_with_audit_log(home_of(home), "pin", verbs.pin, **arguments), as_json)


@command
def unpin(run_id: RunId, step: Step, home: HomeFolder = None, as_json: Json = False) -> None:
    """Keep that checkpoint no longer than others."""
    # Undoes `pin` for the checkpoint of `step`.
    arguments = {"run_id": run_id, "step": step}
    show(call_with_audit_log(home_of(home), "unpin", verbs.unpin, **arguments), as_json)


@command
def verify(run_id: RunId, home: HomeFolder = None, as_json: Json = False) -> int:
    """Is what a run says still what it wrote? Names every file changed since."""
    # The files of the run are compared with the hashes that were recorded at its end.
    reply = verbs.verify(home_of(home), run_id)
    show(reply, as_json, renderer="custody")
    return OK if reply["intact"] else FAILED


@command
def report(run_id: RunId, home: HomeFolder = None, as_json: Json = False) -> None:
    """Write the report of a run and say where it is."""
    show(verbs.report(home_of(home), run_id), as_json)


@command
def results(
    run_id: RunId,
    csv: Annotated[Path | None, typer.Option(help="File to write as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="File to write as parquet.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="File for rollouts with their tokens, as OpenEnv's TrainingTrace."),
    ] = None,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Write every answer of a run or evaluation as a table: prompt, answer, scores, metadata."""
    files = {"csv": csv, "parquet": parquet, "traces": traces}
    named_files = {file_format: path for file_format, path in files.items() if path is not None}
    if len(named_files) != 1:
        message = "name one file: --csv FILE, --parquet FILE or --traces FILE"
        raise UserError("BAD_ARGUMENT", message, field="csv")
    ((file_format, path),) = named_files.items()
    show(verbs.results(home_of(home), run_id, path, file_format), as_json)


def _without_repeated(page: Reply, as_json: bool) -> Reply:
    """Return a page of `logs --follow` without the fields that would repeat on each page: the
    suggested calls and the cursor.

    For people the summary and the cursor of older lines are left out too; JSON keeps them.
    """
    repeated_fields = {"next", "next_cursor"}
    if not as_json:
        repeated_fields |= {"summary", "older_cursor"}
    return {name: value for name, value in page.items() if name not in repeated_fields}


def _show_submitted(home: Home, reply: Reply, wait: bool, as_json: bool) -> int:
    """Print the reply to a submit of a run; with `wait`, also wait for the end of the run, with its
    progress, and print its status.

    With `wait` and `as_json` only the last reply is printed, so that stdout holds one JSON value.

    Returns:
        The exit status: OK, but with `wait` FAILED if the run failed or was cancelled.
    """
    if not (wait and as_json):
        show(reply, as_json, renderer="run")
    if not wait:
        return OK
    # timeout_s=0: wait without a limit.
    return _follow(home, str(reply["run_id"]), until="end", timeout_s=0, as_json=as_json)


def _follow(home: Home, run_id: str, until: str, timeout_s: float, as_json: bool) -> int:
    """Wait for a run and show its progress meanwhile, then print its status.

    Args:
        home: the home that holds the run.
        run_id: the run, or a unique prefix.
        until: the event to wait for: end, first_step, next_eval, alert or news.
        timeout_s: the most seconds to wait; 0: no limit.
        as_json: print the last reply as JSON, and no progress.

    Returns:
        The exit status: OK if the event came or the run ended as done; FAILED if the run failed or
        was cancelled, or if the time was up first.
    """
    deadline = time.monotonic() + timeout_s if timeout_s else math.inf
    progress = _ProgressLine(quiet=as_json)
    reply, is_over = _wait_until(home, run_id, until, deadline, progress)
    progress.close()
    show(reply, as_json, renderer="run")
    return OK if is_over and reply.get("state") not in ("failed", "cancelled") else FAILED


def _wait_until(
    home: Home, run_id: str, until: str, deadline: float, progress: "_ProgressLine"
) -> tuple[Reply, bool]:
    """Wait for a run and show its progress, at most until `deadline` (seconds of `time.monotonic`).

    `until` is the event to wait for, such as "end" or "first_step". Returns the last reply, and
    whether the event came or the run has ended.
    """
    cursor = ""
    while True:
        seconds_left = max(0.0, deadline - time.monotonic())
        wait_s = min(WAIT_STEP_S, seconds_left)
        reply = verbs.wait_run(home, run_id, until, wait_s, cursor, on_progress=progress.show)
        cursor = reply.get("cursor", cursor)  # so that no event between two waits is missed
        # If `until` is "end", only the state of the run counts.
        has_event_come = until != "end" and bool(reply.get("until_met"))
        is_over = has_event_come or reply.get("state") in TERMINAL
        if is_over or time.monotonic() >= deadline:
            return reply, is_over


class _ProgressLine:
    """A line on stderr about the progress of a run. The line is rewritten in place, and shown only
    if stderr is a terminal.

    Args:
        quiet: never show the line.
    """

    def __init__(self, quiet: bool) -> None:
        """Show nothing yet. With `quiet`, or if stderr is no terminal, nothing is ever shown."""
        self._is_shown = sys.stderr.isatty() and not quiet
        self._shown_text = ""

    def show(self, status: Reply) -> None:
        """Show the state, the step and the time left of a run. `status` is the reply of a wait. An
        unchanged line is not written again."""
        if not self._is_shown:
            return
        from mcp_server.screen.render import duration  # noqa: PLC0415  late: it loads rich

        text = f"{status.get('run_id', '')} {status.get('state', '')}"
        if status.get("total_steps"):
            text += f" {status.get('step', 0)}/{status['total_steps']}"
        if status.get("percent") is not None:
            text += f" {status.get('phase', '')} {status['percent']:.0f} %"
        if status.get("stalled"):
            text += " stalled"
        if status.get("eta_s") is not None:
            text += f", {duration(status['eta_s'])} left"
        if text != self._shown_text:
            sys.stderr.write("\r\x1b[2K" + text)  # go to the start of the line and erase it
            sys.stderr.flush()
            self._shown_text = text

    def close(self) -> None:
        """Erase the line, if one was shown."""
        if self._shown_text:
            sys.stderr.write("\r\x1b[2K")  # go to the start of the line and erase it
            sys.stderr.flush()
