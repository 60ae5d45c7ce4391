"""Commands about data files: `honesmith data ...`."""

from typing import Annotated

import typer

from mcp_server.api import verbs
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

READING = "reading the rows; a million takes about a minute"
app = typer.Typer(help="Data files.", no_args_is_help=True, cls=CommandGroup)


@app.command("inspect")
@command
def inspect(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="JSONL, JSON, CSV or parquet; or a hub id, ORG/NAME."),
    ],
    model: Annotated[
        str, typer.Option("--model", help="Count tokens of pebble, a path, a hub id or a run.")
    ] = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """What is in a data file: shapes, bad rows by line, duplicates, lengths, splits."""
    with working(READING, as_json):
        reply = verbs.inspect_data(home_of(home), file, model)
    show(reply, as_json)
    return FAILED if reply["bad"] else OK  # bad: how many lines are not rows


@app.callback()
def _group() -> None:
    # Does nothing. Without a callback typer would turn a group of one command into that command.
    # A docstring would become the help of the group.
    pass
