"""Commands about data files: `honesmith data ...`."""

from pathlib import Path
from typing import Annotated

import typer

from mcp_server.api import verbs
from mcp_server.screen.terminal import FAILED, OK, CommandGroup, Json, command, show

app = typer.Typer(help="Data files.", no_args_is_help=True, cls=CommandGroup)


@app.command("inspect")
@command
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL, JSON, CSV or parquet.")],
    as_json: Json = False,
) -> int:
    """What is in a data file: shapes, bad rows by line, duplicates, lengths, splits."""
    reply = verbs.inspect_data(file)
    show(reply, as_json)
    return FAILED if reply["bad"] else OK  # bad: how many lines are not rows


# Without a callback typer would turn a group of one command into that command.
@app.callback()
def _group() -> None:
    pass
