"""Commands about trained models: serve, talk to, export."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mcp_server.access.audit_log import call_and_record
from mcp_server.api import verbs
from mcp_server.screen.terminal import HomeFolder, Json, command, home_of, show

Trained = Annotated[str, typer.Argument(metavar="RUN", help="RUN, RUN@best or RUN@step20.")]


@command
def deploy(run_id: Trained, home: HomeFolder = None, as_json: Json = False) -> None:
    """Serve a trained model over the OpenAI chat API."""
    show(call_and_record(home_of(home), "deploy", verbs.deploy, run_id=run_id), as_json)


@command
def undeploy(run_id: Trained, home: HomeFolder = None, as_json: Json = False) -> None:
    """Stop serving a model."""
    show(
        call_and_record(home_of(home), "deploy", verbs.deploy, run_id=run_id, action="stop"),
        as_json,
    )


@command
def export(
    run_id: Trained,
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[Literal["adapter", "merged"], typer.Option()] = "adapter",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Write a trained model's files: the adapter, or base and adapter merged."""
    arguments = {
        "run_id": run_id,
        "action": "export",
        "format": format,
        "path": str(path.absolute()),
    }
    show(call_and_record(home_of(home), "deploy", verbs.deploy, **arguments), as_json)


@command
def chat(
    model: Annotated[str, typer.Argument(help="pebble, a path, a hub id or a run.")],
    message: Annotated[str, typer.Argument(help="What to say.")],
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    compare_to: Annotated[str, typer.Option(help="A second model.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Ask a model one question, optionally beside a second one."""
    reply = call_and_record(
        home_of(home),
        "chat",
        verbs.chat,
        model=model,
        message=message,
        system=system,
        compare_to=compare_to,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    show(reply, as_json)
