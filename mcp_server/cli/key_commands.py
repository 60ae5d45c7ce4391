"""Commands about the keys of the HTTP server: `honesmith key ...`."""

import datetime
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from engine.core.format import counted
from engine.core.reply import Reply
from engine.home.run_dir import Home
from mcp_server.access import keys
from mcp_server.access.audit_log import call_and_record
from mcp_server.screen.terminal import CommandGroup, HomeFolder, Json, command, home_of, show

app = typer.Typer(
    help="Keys of the HTTP server: who may call, and what.", no_args_is_help=True, cls=CommandGroup
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As the audit log calls it.")]


@dataclass(frozen=True)
class KeyLimits:
    """The options of `honesmith key add` that say what the key may do; the fields mean the same as
    in `keys.Key`."""

    scope: Annotated[
        list[str] | None,
        typer.Option(help="read, train, install or deploy; several with commas. Default: read."),
    ] = None
    days: Annotated[float, typer.Option(min=0, max=36_500, help="Until it expires; 0: never.")] = 0
    calls_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = (
        keys.CALLS_PER_MINUTE
    )
    max_runs: Annotated[int, typer.Option(min=0, help="Open at once; 0: no limit.")] = 0
    gpu_hours_per_day: Annotated[float, typer.Option(min=0, help="0: no limit.")] = 0
    max_deployments: Annotated[int, typer.Option(min=0, help="At once; 0: no limit.")] = (
        keys.DEPLOYMENTS
    )

    @property
    def scopes(self) -> list[str]:
        """The scopes in all `--scope` options as one list; ["read"] if there is no such option."""
        options = self.scope or ["read"]
        # An option may hold several scopes, such as "read,train".
        names = [name.strip() for option in options for name in option.split(",")]
        return [name for name in names if name]


@app.command("add")
@command
def add(name: Name, limits: KeyLimits, home: HomeFolder = None, as_json: Json = False) -> None:
    """Make a key and show its token once; only a digest of it is kept."""
    reply = call_and_record(
        home_of(home),
        "add_key",
        _add,
        name=name,
        scopes=limits.scopes,
        days=limits.days,
        calls_per_minute=limits.calls_per_minute,
        max_runs=limits.max_runs,
        gpu_hours_per_day=limits.gpu_hours_per_day,
        max_deployments=limits.max_deployments,
    )
    # `key` is for the audit log; a person sees the same as `name`.
    show({field: value for field, value in reply.items() if field != "key"}, as_json)


@app.command("list")
@command
def list_(home: HomeFolder = None, as_json: Json = False) -> None:
    """The keys of this home, beside the owner's token."""
    shown_keys = [_public_fields(key) for key in keys.list_keys(home_of(home))]
    show({"summary": f"{counted(len(shown_keys), 'key')}.", "keys": shown_keys}, as_json)


@app.command("remove")
@command
def remove(name: Name, home: HomeFolder = None, as_json: Json = False) -> None:
    """Forget a key; servers that run refuse its next request."""
    reply = call_and_record(home_of(home), "remove_key", _remove, name=name)
    show({"summary": f"The key {name} is gone.", "name": reply["key"]}, as_json)


def _add(home: Home, **arguments: Any) -> Reply:
    """Make a key with these arguments of `keys.add_key`, and return the reply with its token."""
    key, token = keys.add_key(home, **arguments)
    return _public_fields(key) | {
        "key": key.name,
        "token": token,
        "summary": f"The key {key.name} may {', '.join(key.scopes)}.",
        "warnings": ["This token is shown once: Authorization: Bearer TOKEN"],
    }


def _remove(home: Home, name: str) -> Reply:
    """Remove a key, and return its name as the reply that the audit log records."""
    keys.remove_key(home, name)
    return {"key": name}


def _public_fields(key: keys.Key) -> dict[str, object]:
    """Return the fields of a key that may be shown: its name, scopes, expiry and limits.

    The expiry or a limit is left out if the key has none.
    """
    fields: dict[str, object] = {"name": key.name, "scopes": list(key.scopes)}
    if key.expires:
        expiry = datetime.datetime.fromtimestamp(key.expires, datetime.UTC)
        fields["expires"] = expiry.isoformat(timespec="minutes")
    for name in ("calls_per_minute", "max_runs", "gpu_hours_per_day", "max_deployments"):
        if getattr(key, name):  # 0: no limit
            fields[name] = getattr(key, name)
    return fields
