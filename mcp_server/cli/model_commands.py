"""Commands about models: those of this home, and serving, asking and exporting trained ones."""
# ruff: noqa: PLC0415  the engine is imported by the command that needs it

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.serving.chat_request import OF_PEOPLE
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import verbs
from mcp_server.cli.run_options import ChatOptions
from mcp_server.screen.terminal import (
    CommandGroup,
    HomeFolder,
    Json,
    command,
    home_of,
    show,
    working,
)

models = typer.Typer(help="The models of this home.", no_args_is_help=True, cls=CommandGroup)
_MOST_LISTED = 200  # models
ModelName = Annotated[str, typer.Argument(metavar="NAME", help="As `honesmith models list` shows.")]
Trained = Annotated[str, typer.Argument(metavar="RUN", help="RUN, RUN@best or RUN@step20.")]


@command
def deploy(
    run_id: Trained,
    compute: Annotated[
        str, typer.Option(help="local, or a host that serves it, such as ssh:box.")
    ] = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Serve a trained model over the OpenAI chat API; waits until it is loaded."""
    start = partial(verbs.deploy, patience=OF_PEOPLE)  # waits longer than a call of an agent
    with working(f"loading {run_id}", as_json):
        reply = call_with_audit_log(home_of(home), "deploy", start, run_id=run_id, compute=compute)
    show(reply, as_json)


@command
def undeploy(run_id: Trained, home: HomeFolder = None, as_json: Json = False) -> None:
    """Stop serving a model."""
    arguments = {"run_id": run_id, "action": "stop"}
    show(call_with_audit_log(home_of(home), "deploy", verbs.deploy, **arguments), as_json)


@command
def export(
    run_id: Trained,
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[
        Literal["adapter", "merged", "gguf-f16", "gguf-q8_0"], typer.Option()
    ] = "adapter",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Write a trained model's files: the adapter, or base and adapter merged, also as GGUF."""
    arguments = {
        "run_id": run_id,
        "action": "export",
        "format": format,
        "path": str(path.absolute()),
    }
    show(call_with_audit_log(home_of(home), "deploy", verbs.deploy, **arguments), as_json)


@command
def chat(options: ChatOptions, home: HomeFolder = None, as_json: Json = False) -> None:
    """Ask a model, optionally beside a second one; without a message, talk with it here."""
    from mcp_server.screen import conversation

    located_home = home_of(home)
    request = options.request()
    if not request.message and not request.messages and not request.conversation:
        if conversation.is_possible() and not as_json:
            return conversation.talk(located_home, request)
        # Without a terminal the message comes from a pipe, as in `echo hi | honesmith chat m`.
        request = replace(request, message=sys.stdin.read())
    conversation.ask(located_home, request, as_json)
    return None


@models.command("list")
@command
def list_models(home: HomeFolder = None, as_json: Json = False) -> None:
    """The models that can be used without a download, and those that can be fetched by name."""
    from engine.models.known_models import KNOWN

    reply = verbs.get_status(home_of(home), scope="models", limit=_MOST_LISTED)
    usable_names = {entry["ref"] for entry in reply["models"]}
    can_be_added = [
        {"name": name, "megabytes": model.megabytes, "license": model.license, "about": model.about}
        for name, model in KNOWN.items()
        if name not in usable_names
    ]
    show({**reply, "can_be_added": can_be_added}, as_json)


@models.command("add")
@command
def add_model(
    source: Annotated[str, typer.Argument(help="smollm2, or the path of a GGUF file.")],
    name: Annotated[str, typer.Option(help="What to call it; by default as the source.")] = "",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Fetch a model by its name, or import a GGUF file, so that it can be named as `model`."""

    from engine.models import library

    def print_progress(line: str) -> None:
        """Print a line about the download or the import on stderr."""
        typer.echo(line, err=True)

    add = partial(library.add, say=print_progress)
    show(call_with_audit_log(home_of(home), "add_model", add, source=source, name=name), as_json)


@models.command("show")
@command
def show_model(
    model: Annotated[str, typer.Argument(help="pebble, a model of this home, a path, a hub id.")],
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """What a model is: sizes, context, how it was made, where it lies."""
    from engine.models import catalog

    show(catalog.describe(home_of(home), model), as_json)


@models.command("remove")
@command
def remove_model(name: ModelName, home: HomeFolder = None, as_json: Json = False) -> None:
    """Delete a model of this home. Runs trained on it can no longer be loaded."""
    from engine.models import library

    reply = call_with_audit_log(home_of(home), "remove_model", library.remove, name=name)
    show(reply, as_json)
