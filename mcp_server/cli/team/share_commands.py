"""Commands about what belongs to whom: `honesmith share`, `honesmith runs priority`."""

from typing import Annotated

import typer

from engine.core.reply import Reply
from engine.home.run_dir import Home
from mcp_server.access import sharing
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.screen.terminal import HomeFolder, Json, command, home_of, show


@command
def share(
    name: Annotated[
        str,
        typer.Argument(help="A run, plan, environment or deployment; none: list what is shared."),
    ] = "",
    grantees: Annotated[
        list[str] | None, typer.Option("--with", metavar="KEY", help="Default: all keys.")
    ] = None,
    use: Annotated[
        bool, typer.Option("--use", help="Also train from it, evaluate, deploy, chat, curate.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Share it no more.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Let other keys see or use something; only its owner can change it."""
    if not name:  # list what is shared
        return show(sharing.list_shares(home_of(home)), as_json)
    reply = call_with_audit_log(
        home_of(home),
        "share",
        sharing.share,
        name=name,
        grantees=_split_names(grantees),
        may="use" if use else "read",
        stop=stop,
    )
    return show(reply, as_json)


@command
def priority(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run that waits.")],
    level: Annotated[str, typer.Argument(metavar="low|normal|high")],
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Let a queued run start earlier or later."""
    reply = call_with_audit_log(
        home_of(home), "set_priority", _set_priority, run_id=run, priority=level
    )
    show(reply, as_json)


def _set_priority(home: Home, run_id: str, priority: str) -> Reply:
    """Set the priority of a queued run to low, normal or high, and return the reply."""
    from engine.runs.lifecycle import set_priority  # noqa: PLC0415  a command starts faster

    return set_priority(home, run_id, priority)


def _split_names(options: list[str] | None) -> list[str]:
    """Return the names in the values of a repeated option, each of which may hold several names
    with commas. Empty names are left out; None, no such option, gives []."""
    names = [name.strip() for option in options or [] for name in option.split(",")]
    return [name for name in names if name]
