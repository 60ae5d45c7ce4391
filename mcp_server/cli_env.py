"""Commands about environments: `honesmith env ...`."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import UserError
from mcp_server import starter, verbs
from mcp_server.terminal import FAILED, OK, CommandGroup, HomeFolder, Json, at, command, show

app = typer.Typer(
    help="Environments: tasks and how they are scored.", no_args_is_help=True, cls=CommandGroup
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with environment.py.")]
Install = Annotated[bool, typer.Option("--install", help="Build its requirements.txt venv.")]


@app.command("new")
@command
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make.")],
    template: Annotated[str, typer.Option(help="Which kind; --template list shows them.")] = "",
    as_json: Json = False,
) -> None:
    """Start an environment from a template."""
    if template == "list":
        names = starter.templates()
        return show({"summary": f"{len(names)} templates", "templates": names}, as_json)
    written = starter.new_env(folder, template or starter.DEFAULT_TEMPLATE)
    reply = {
        "summary": f"Wrote {len(written)} files to {folder}.",
        "files": written,
        "next": [verbs.suggest("push_env", path=str(folder))],
    }
    return show(reply, as_json)


@app.command("check")
@command
def check(folder: Folder, install: Install = False, as_json: Json = False) -> int:
    """Check an environment: contract, rows, reward audit. Stores nothing."""
    with tempfile.TemporaryDirectory(prefix="honesmith-check-") as scratch:
        reply = verbs.push_env(at(Path(scratch)), _folder(folder), "", install)
    reply["summary"] = reply["summary"].replace("Pushed", "Checked")
    reply["next"] = [verbs.suggest("push_env", path=str(folder))]
    show(reply, as_json)
    return FAILED if reply.get("problems") else OK


@app.command("push")
@command
def push(
    folder: Folder,
    name: Annotated[str, typer.Option(help="Default: the folder's name.")] = "",
    install: Install = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Store an environment as an immutable version."""
    # A person at a terminal may push from anywhere: roots bind agents.
    reply = verbs.push_env(at(home), _folder(folder), name, install)
    show(reply, as_json)
    return FAILED if reply.get("problems") else OK


@app.command("list")
@command
def list_(
    limit: Annotated[int, typer.Option(min=1)] = 50,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Pushed environments, newest first."""
    show(verbs.get_status(at(home), "envs", limit), as_json)


def _folder(folder: Path) -> str:
    if verbs.exists(folder) and folder.is_dir():
        return str(folder.absolute())
    raise UserError(
        "ENV_INVALID",
        f"{folder} is not a folder",
        hint="Name the folder that holds environment.py.",
        field="folder",
    )
