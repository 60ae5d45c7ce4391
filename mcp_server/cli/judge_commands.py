"""Commands about language models as judges: `honesmith judge ...`."""

from pathlib import Path
from typing import Annotated

import typer

from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import audit_verbs
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

ASKING = "asking the judge about every gold answer"
app = typer.Typer(help="Language models as judges.", no_args_is_help=True, cls=CommandGroup)


@app.command("calibrate")
@command
def calibrate_judge(
    rubric: Annotated[
        Path, typer.Argument(metavar="RUBRIC", help="rubric.toml with [judge] and [[criteria]].")
    ],
    gold: Annotated[
        Path,
        typer.Argument(metavar="GOLD", help="JSONL: prompt, answer, label; reference, author."),
    ],
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Hold a judge against gold labels: agreement, kappa, biases; stored for verdicts."""
    arguments = {"rubric": rubric.absolute(), "gold": gold.absolute()}
    with working(ASKING, as_json):
        reply = call_with_audit_log(
            home_of(home), "calibrate_judge", audit_verbs.calibrate_judge, **arguments
        )
    show(reply, as_json)
    is_trusted = reply.get("trusted", True)  # False: it agrees too little with the gold labels
    return OK if is_trusted else FAILED


@app.callback()
def _group() -> None:
    # Does nothing. Without a callback typer would turn a group of one command into that command.
    # A docstring would become the help of the group.
    pass
