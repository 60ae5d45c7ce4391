"""Commands about the keys of the HTTP server and their projects: `honesmith key ...`."""

import datetime
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from engine.core.format import counted
from engine.core.reply import Reply
from engine.home.run_dir import Home
from mcp_server.access import keys
from mcp_server.access.audit_log import call_with_audit_log
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
        typer.Option(
            help="read, train, install, deploy, admin (not only for its own); several with commas. "
            "Default: read."
        ),
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
    max_gpu_hours: Annotated[
        float, typer.Option(min=0, help="Of all its runs together; 0: no limit.")
    ] = 0
    project: Annotated[str, typer.Option(help="Its runs count for this project too.")] = ""
    priority: Annotated[str, typer.Option(help="Of its runs: low, normal or high.")] = "normal"

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
    reply = call_with_audit_log(
        home_of(home),
        "add_key",
        _add_key,
        name=name,
        scopes=limits.scopes,
        days=limits.days,
        calls_per_minute=limits.calls_per_minute,
        max_runs=limits.max_runs,
        gpu_hours_per_day=limits.gpu_hours_per_day,
        max_deployments=limits.max_deployments,
        max_gpu_hours=limits.max_gpu_hours,
        project=limits.project,
        priority=limits.priority,
    )
    # `key` is for the audit log; a person sees the same as `name`.
    show({field: value for field, value in reply.items() if field != "key"}, as_json)


@app.command("list")
@command
def list_keys(home: HomeFolder = None, as_json: Json = False) -> None:
    """The keys of this home, beside the owner's token."""
    from mcp_server.access import ledger  # noqa: PLC0415  it loads the database

    located_home = home_of(home)
    spent = ledger.spent_by_key(located_home)  # key name -> fields about the hours it has used
    key_entries = [
        _public_fields(key) | spent.get(key.name, {}) for key in keys.list_keys(located_home)
    ]
    reply: Reply = {"summary": f"{counted(len(key_entries), 'key')}.", "keys": key_entries}
    projects = ledger.spent_by_project(located_home)
    if projects:
        reply["projects"] = projects
    show(reply, as_json)


@app.command("rotate")
@command
def rotate(name: Name, home: HomeFolder = None, as_json: Json = False) -> None:
    """Give a key a new token; what it owns stays its own."""
    reply = call_with_audit_log(home_of(home), "rotate_key", _rotate_key, name=name)
    # `key` is for the audit log; a person sees the same as `name`.
    show({field: value for field, value in reply.items() if field != "key"}, as_json)


@app.command("budget")
@command
def budget(
    project: Annotated[str, typer.Argument(metavar="PROJECT")],
    gpu_hours: Annotated[float, typer.Argument(metavar="HOURS", min=0, help="0: no limit.")],
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Set the GPU-hours that the runs of all keys of a project may take together."""
    reply = call_with_audit_log(
        home_of(home), "set_budget", _set_budget, project=project, gpu_hours=gpu_hours
    )
    show(reply, as_json)


@app.command("remove")
@command
def remove(name: Name, home: HomeFolder = None, as_json: Json = False) -> None:
    """Forget a key; servers that run refuse its next request."""
    reply = call_with_audit_log(home_of(home), "remove_key", _remove_key, name=name)
    show({"summary": f"The key {name} is gone.", "name": reply["key"]}, as_json)


def _add_key(home: Home, **arguments: Any) -> Reply:
    """Make a key with these arguments of `keys.add_key`, and return the reply for a person: the
    fields of the key and its token, with a warning that the token is shown only now."""
    key, token = keys.add_key(home, **arguments)
    return _public_fields(key) | {
        "key": key.name,
        "token": token,
        "summary": f"The key {key.name} may {', '.join(key.scopes)}.",
        "warnings": ["This token is shown once: Authorization: Bearer TOKEN"],
    }


def _rotate_key(home: Home, name: str) -> Reply:
    """Give the key called `name` a new token, and return the reply for a person: the fields of the
    key and the token, with a warning that the token is shown only now."""
    key, token = keys.rotate_key(home, name)
    return _public_fields(key) | {
        "key": key.name,
        "token": token,
        "summary": f"The key {key.name} has a new token; the old one is refused.",
        "warnings": ["This token is shown once: Authorization: Bearer TOKEN"],
    }


def _set_budget(home: Home, project: str, gpu_hours: float) -> Reply:
    """Set the GPU-hours that the runs of all keys of a project may take together (0: no limit), and
    return the reply that says so."""
    keys.set_project(home, project, gpu_hours)
    limit = f"{gpu_hours:g} GPU-hours in all" if gpu_hours else "any number of GPU-hours"
    return {"project": project, "summary": f"The project {project} may use {limit}."}


def _remove_key(home: Home, name: str) -> Reply:
    """Remove the key called `name`, and return a reply with its name, for the audit log."""
    keys.remove_key(home, name)
    return {"key": name}


def _public_fields(key: keys.Key) -> dict[str, object]:
    """Return the fields of a key that may be shown, for JSON: its name, scopes, expiry and limits,
    but not the digest of its token.

    What the key lacks or has by default is left out, such as the expiry, a limit or the project.
    """
    fields: dict[str, object] = {"name": key.name, "scopes": list(key.scopes)}
    if key.id not in ("", key.name):
        fields["owner"] = key.id  # the things that the key owns are listed under this id
    if key.project:
        fields["project"] = key.project
    if key.priority != "normal":
        fields["priority"] = key.priority
    if key.expires:
        expiry = datetime.datetime.fromtimestamp(key.expires, datetime.UTC)
        fields["expires"] = expiry.isoformat(timespec="minutes")
    limits = ("calls_per_minute", "max_runs", "gpu_hours_per_day", "max_gpu_hours")
    for name in (*limits, "max_deployments"):
        if getattr(key, name):  # 0: no limit
            fields[name] = getattr(key, name)
    return fields
