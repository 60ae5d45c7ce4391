"""Commands about environments: `honesmith env ...`."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.format import counted
from engine.core.reply import Reply
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import audit_verbs, paths, verbs
from mcp_server.cli import starter
from mcp_server.screen.terminal import (
    FAILED,
    OK,
    CommandGroup,
    HomeFolder,
    Json,
    command,
    home_of,
    show,
    working,
)

app = typer.Typer(
    help="Environments: tasks and how they are scored.", no_args_is_help=True, cls=CommandGroup
)

AUDITING = "scoring every row; what is scored stays if this is ended"
PUSHING = "reading the tasks and trying the reward, up to ten seconds"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with environment.py.")]
Version = Annotated[str, typer.Argument(metavar="ENV", help="NAME@HASH, or a name: its newest.")]
Install = Annotated[bool, typer.Option("--install", help="Build its requirements.txt venv.")]


@app.command("new")
@command
def new(
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Folder to make.")] = None,
    template: Annotated[str, typer.Option(help="Which kind; --template list shows them.")] = "",
    as_json: Json = False,
) -> None:
    """Start an environment from a template."""
    if template == "list":
        return show(_templates_reply(), as_json)
    # The argument may be left out only with `--template list`.
    if folder is None:
        raise UserError(
            "BAD_ARGUMENT",
            "no folder was named",
            hint="honesmith env new FOLDER; honesmith env new --template list shows the kinds.",
            field="folder",
        )
    written_files = starter.new_env(folder, template or starter.DEFAULT_TEMPLATE)
    reply = {
        "summary": f"Wrote {counted(len(written_files), 'file')} to {folder}.",
        "files": written_files,
        "next": [starter.push_suggestion(folder, template)],
    }
    return show(reply, as_json)


def _templates_reply() -> Reply:
    """Make the reply that lists the templates for environments, each with what it is for."""
    templates = starter.templates()
    return {"summary": counted(len(templates), "template"), "templates": templates}


@app.command("check")
@command
def check(folder: Folder, install: Install = False, as_json: Json = False) -> int:
    """Check an environment: contract, rows, reward audit. Stores nothing."""
    with (
        tempfile.TemporaryDirectory(prefix="honesmith-check-") as scratch,
        working(PUSHING, as_json),
    ):
        # A check is a push into a temporary home, of which nothing stays.
        reply = verbs.push_env(home_of(Path(scratch)), _folder_path(folder), install=install)
    reply["summary"] = reply["summary"].replace("Pushed", "Checked")
    reply["next"] = [verbs.suggest("push_env", path=str(folder))]
    show(reply, as_json)
    return FAILED if reply.get("problems") else OK  # problems: faults with file and line


@app.command("push")
@command
def push(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="With environment.py or data; a hub id; benchmark:NAME."
        ),
    ],
    name: Annotated[str, typer.Option(help="Default: the folder's name.")] = "",
    install: Install = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Store an environment as an immutable version."""
    # No `roots`: they restrict agents, while a person may push any folder.
    path = folder if paths.names_dataset(folder) else _folder_path(Path(folder))
    arguments = {"path": path, "name": name, "install": install}
    reply = None
    # `_push_reply` returns None while large data are still being read. A person waits, so the push
    # is called until it has ended.
    while reply is None:
        reply = _push_reply(home, arguments, as_json)
    show(reply, as_json)
    return FAILED if reply.get("problems") else OK


def _push_reply(home: Path | None, arguments: JsonObject, as_json: bool) -> Reply | None:
    """Call `push_env` once with these arguments and return its reply.

    Returns None if large data are still being read, and says so on stderr.
    """
    with working(PUSHING, as_json):
        try:
            return call_with_audit_log(home_of(home), "push_env", verbs.push_env, **arguments)
        except UserError as error:
            if error.code != "DATASET_READING":
                raise
            typer.echo(error.message, err=True)
            return None


@app.command("benchmarks")
@command
def list_benchmarks(as_json: Json = False) -> None:
    """Known benchmarks; `honesmith env push benchmark:NAME` fetches one."""
    from engine.hub import benchmarks  # noqa: PLC0415  the hub is slow to load

    descriptions = {
        name: f"{benchmark.about} ({benchmark.dataset})"
        for name, benchmark in benchmarks.BENCHMARKS.items()
    }
    push_command = f"honesmith env push {benchmarks.PREFIX}NAME"
    reply = {
        "summary": f"{counted(len(descriptions), 'benchmark')}: {push_command}",
        "benchmarks": descriptions,
    }
    show(reply, as_json)


@app.command("audit")
@command
def audit(
    env_id: Version,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Score every row; goes on where it was ended.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that score at once; 0: as training takes.")
    ] = 0,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """What the scorer pays for wrong answers: as stored, or by asking it about every row."""
    if not all_rows:  # show the audit that the push has stored
        reply = audit_verbs.show_audit(home_of(home), env_id)
    else:
        arguments = {"env_id": env_id, "workers": workers}
        with working(AUDITING, as_json):
            reply = call_with_audit_log(
                home_of(home), "audit_env", audit_verbs.audit_env, **arguments
            )
    show(reply, as_json)
    # The verdict "risk" means that the scorer pays for wrong answers; the exit status says so too.
    pays_wrong_answers = reply.get("audit", {}).get("verdict") == "risk"
    return FAILED if pays_wrong_answers else OK


@app.command("list")
@command
def list_envs(
    limit: Annotated[int, typer.Option(min=1)] = 50,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Pushed environments, newest first."""
    show(verbs.get_status(home_of(home), scope="envs", limit=limit), as_json)


@app.command("build")
@command
def build(folder: Folder, home: HomeFolder = None, as_json: Json = False) -> None:
    """Install the packages its requirements.txt names, once, ahead of a push."""
    path = _folder_path(folder)
    reply = call_with_audit_log(home_of(home), "build_env", verbs.build_env, folder=path)
    show(reply, as_json)


@app.command("diff")
@command
def diff(
    before: Version,
    after: Version,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """What two versions differ in: files and lines."""
    show(verbs.diff_envs(home_of(home), before, after), as_json)


@app.command("pull")
@command
def pull(
    env_id: Version,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Copy the files of a version out of the home."""
    show(verbs.pull_env(home_of(home), env_id, folder), as_json)


@app.command("seal")
@command
def seal(
    env_id: Version,
    looks: Annotated[int, typer.Option(help="How many models may be evaluated on it.")] = 20,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a version a sealed exam: no task or answer of it is shown any more, only a verdict."""
    # Each model that is evaluated on it takes one of the `looks`.
    arguments = {"env_id": env_id, "looks": looks}
    show(call_with_audit_log(home_of(home), "seal_env", verbs.seal_env, **arguments), as_json)


@app.command("delete")
@command
def delete(
    env_id: Version,
    force: Annotated[
        bool, typer.Option("--force", help="Although runs that ended have used it.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Throw a version away; never one that an open run uses."""
    arguments = {"env_id": env_id, "force": force}
    show(call_with_audit_log(home_of(home), "delete_env", verbs.delete_env, **arguments), as_json)


def _folder_path(folder: Path) -> str:
    """Return the absolute path of `folder`. Raises UserError ENV_INVALID if there is no such
    folder."""
    if paths.exists(folder) and folder.is_dir():
        return str(folder.absolute())
    raise UserError(
        "ENV_INVALID",
        f"{folder} is not a folder",
        hint="Name the folder that holds environment.py.",
        field="folder",
    )
