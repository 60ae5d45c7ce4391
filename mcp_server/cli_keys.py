"""Commands about the keys of the HTTP server: `honesmith key ...`."""

import datetime
from typing import Annotated

import typer

from mcp_server import keys
from mcp_server.terminal import CommandGroup, HomeFolder, Json, at, command, show

app = typer.Typer(
    help="Keys of the HTTP server: who may call, and what.", no_args_is_help=True, cls=CommandGroup
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As the audit log calls it.")]


@app.command("add")
@command
def add(
    name: Name,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="read, train or deploy; several with commas. Default: read."),
    ] = None,
    days: Annotated[float, typer.Option(min=0, help="Until it expires; 0: never.")] = 0,
    calls_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = (
        keys.CALLS_PER_MINUTE
    ),
    max_runs: Annotated[int, typer.Option(min=0, help="Open at once; 0: no limit.")] = 0,
    gpu_hours_per_day: Annotated[float, typer.Option(min=0, help="0: no limit.")] = 0,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a key and show its token once; only a digest of it is kept."""
    asked = [part.strip() for text in scope or ["read"] for part in text.split(",") if part.strip()]
    key, token = keys.add_key(
        at(home),
        name,
        asked,
        days=days,
        calls_per_minute=calls_per_minute,
        max_runs=max_runs,
        gpu_hours_per_day=gpu_hours_per_day,
    )
    reply = _shown(key) | {
        "token": token,
        "summary": f"The key {name} may {', '.join(key.scopes)}.",
        "warnings": ["This token is shown once: Authorization: Bearer TOKEN"],
    }
    show(reply, as_json)


@app.command("list")
@command
def list_(home: HomeFolder = None, as_json: Json = False) -> None:
    """The keys of this home, beside the owner's token."""
    found = [_shown(key) for key in keys.list_keys(at(home))]
    show({"summary": f"{len(found)} keys.", "keys": found}, as_json)


@app.command("remove")
@command
def remove(name: Name, home: HomeFolder = None, as_json: Json = False) -> None:
    """Forget a key; servers that run refuse its next request."""
    keys.remove_key(at(home), name)
    show({"summary": f"The key {name} is gone.", "name": name}, as_json)


def _shown(key: keys.Key) -> dict[str, object]:
    shown: dict[str, object] = {"name": key.name, "scopes": list(key.scopes)}
    if key.expires:
        until = datetime.datetime.fromtimestamp(key.expires, datetime.UTC)
        shown["expires"] = until.isoformat(timespec="minutes")
    limits = ("calls_per_minute", "max_runs", "gpu_hours_per_day")
    return shown | {name: getattr(key, name) for name in limits if getattr(key, name)}
