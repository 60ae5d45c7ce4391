"""The command line `honesmith`: it starts the server, and offers the verbs of the tools to people.

Heavy modules are imported inside the command that needs them: `honesmith --help` and the start of
`honesmith serve` must not wait for tables, templates or schemas (importing mcp alone takes half a
second).
"""
# ruff: noqa: PLC0415

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.core.errors import UserError
from engine.core.format import counted
from mcp_server import __version__
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.access.log import log_file
from mcp_server.api import addresses, verbs
from mcp_server.cli import (
    data_commands,
    env_commands,
    judge_commands,
    model_commands,
    run_commands,
)
from mcp_server.cli.machines import host_commands
from mcp_server.cli.team import key_commands, share_commands
from mcp_server.screen.terminal import (
    FAILED,
    OK,
    CommandGroup,
    HomeFolder,
    Json,
    command,
    home_of,
    show,
)

if TYPE_CHECKING:
    from mcp_server.cli.client_config import Launch
    from mcp_server.protocol.guard import GuardedServer

app = typer.Typer(
    name="honesmith",
    cls=CommandGroup,
    help="The training server a coding agent can drive and a person can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULT_PORT = 8321

Port = Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    # Prints the version for `honesmith --version` and ends; does nothing before a command. It has
    # no docstring, because typer would show that as the help of `honesmith`.
    if version:
        typer.echo(__version__)
        raise typer.Exit()


@app.command()
@command
def serve(
    http: Annotated[bool, typer.Option("--http", help="Streamable HTTP instead of stdio.")] = False,
    port: Port = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Host header to accept; needed beyond loopback.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder agents may push from (repeatable). Default: the current one."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Offer only what changes nothing.")
    ] = False,
    home: HomeFolder = None,
) -> None:
    """The MCP server: stdio for an agent that starts it, HTTP with a bearer token for others."""
    from mcp_server.protocol.app import build_server

    located_home, roots = home_of(home), _resolved_roots(root)
    server = build_server(located_home, roots, read_only)
    if not http:
        _serve_stdio(server)
        return
    from mcp_server.access.bearer import load_token
    from mcp_server.access.keys import Keys
    from mcp_server.protocol.http_app import allowed_hosts, serve_http
    from mcp_server.protocol.routes.transfers import add_transfers

    if not read_only:
        add_transfers(server, located_home)  # the routes for uploads, exports and sharing
    hosts = allowed_hosts(host, allow_host or ())
    accepted_keys = Keys(located_home, load_token(located_home))
    serve_http(server, accepted_keys, host=host, port=port, hosts=hosts)


def _serve_stdio(server: "GuardedServer") -> None:
    """Serve over stdio until the agent that started this process has ended, or until a Ctrl-C."""
    from mcp_server.protocol.parent_watch import watch_parent
    from mcp_server.protocol.stdio import end_by_interrupt

    watch_parent()  # ends this process when the agent that started it is gone
    end_by_interrupt()  # lets a Ctrl-C end it at once
    server.run()


@app.command()
@command
def setup(
    vllm: Annotated[
        bool, typer.Option("--vllm", help="vLLM's own environment instead, for faster sampling.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Build it anew.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Build the training environment of a light install in the home (CPU or CUDA)."""
    from engine.machine.install import setup_env, vllm_env

    def print_progress(line: str) -> None:
        """Print a line about the installation on stderr."""
        typer.echo(line, err=True)

    if vllm:
        build = partial(vllm_env.setup_vllm, say=print_progress)
        return show(call_with_audit_log(home_of(home), "setup_vllm", build, again=again), as_json)
    # A light install is one without torch: it gets an environment with torch, in the home. Any
    # other install can train already, so there is nothing to build, even with `again`.
    if _has_torch():
        return show({"summary": f"{sys.executable} has torch; nothing to do."}, as_json)
    build = partial(setup_env.setup, say=print_progress)
    return show(call_with_audit_log(home_of(home), "setup", build, again=again), as_json)


@app.command()
@command
def demo(
    model: Annotated[
        str, typer.Option(help="pebble, or smollm2: a real language model, fetched if missing.")
    ] = "pebble",
    seed: Annotated[int, typer.Option(min=0, help="Of training and sampling.")] = 0,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Train, judge, deploy and chat with a model on this machine, through a real MCP client."""
    from mcp_server.cli.demo.loop import run_demo

    return run_demo(home, model=model, seed=seed, as_json=as_json)


@app.command()
@command
def doctor(
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Try every faster way to compute on the devices; about a minute each."
        ),
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """What is wrong with this machine, and how to mend it."""
    from engine import doctor as engine_doctor

    examine = engine_doctor.examine_fast_paths if gpu else engine_doctor.examine
    located_home = home_of(home)
    log_checks = [] if gpu else [_log_check(log_file(located_home))]
    # On a terminal each check is shown as soon as it is done (below). Elsewhere the whole reply is
    # shown at the end.
    if as_json or not sys.stdout.isatty():
        reply = examine(located_home)
        reply["checks"] += log_checks
        show(reply, as_json)
        return FAILED if reply["failed"] else OK

    def show_check(check: Mapping[str, Any]) -> None:
        """Print one check for a person."""
        show(check, as_json=False, renderer="check")

    reply = examine(located_home, report_check=show_check)
    for check in log_checks:
        show_check(check)
    show({"summary": reply["summary"]}, as_json=False)
    return FAILED if reply["failed"] else OK


@app.command()
@command
def init(
    folder: Annotated[Path, typer.Argument(help="The project.")] = Path("."),
    agent: Annotated[
        list[str] | None,
        typer.Option(help="claude, cursor, codex, vscode; several with commas."),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Write address and token instead of a command.")
    ] = False,
    port: Port = DEFAULT_PORT,
    show_only: Annotated[
        bool, typer.Option("--print", help="Show entries, write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an entry of ours.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Tell coding agents about the server and start a project; nothing is overwritten."""
    from mcp_server.cli import client_config, starter

    folder = folder.resolve()
    agents = client_config.parse_agents(agent or [])
    launch = _launch(folder, port=port if http else None, home=home)
    if show_only:
        # Without --agent, one entry is shown as an example.
        return _print_entries(agents or ["claude"], launch, as_json)
    _make_folder(folder)
    entry_states = client_config.write_entries(folder, agents, launch, force)
    written, kept = starter.starter_project(folder)
    # For each file: written, unchanged or kept.
    files = {**entry_states, **_file_states(written, kept)}
    written_count = sum(state == "written" for state in files.values())
    first_env = folder / "environments" / starter.FIRST_ENV
    reply = {
        "summary": f"{folder}: {counted(written_count, 'file')} written.",
        "files": files,
        "next": [starter.push_suggestion(first_env)],
        "warnings": _init_warnings(agents, http=http),
    }
    return show(reply, as_json)


def _file_states(written: Sequence[str], kept: Sequence[str]) -> dict[str, str]:
    """Return file -> "written" for each of the files `written`, and file -> "kept" for each of the
    files `kept`, which existed already."""
    return {**dict.fromkeys(written, "written"), **dict.fromkeys(kept, "kept")}


def _launch(folder: Path, port: int | None, home: Path | None) -> "Launch":
    """Describe how coding agents reach the server: over HTTP at `port`; if `port` is None, by a
    command with which each agent starts a server of its own for the project `folder`."""
    from mcp_server.cli import client_config

    if port is None:
        return client_config.Launch(argv=client_config.serve_argv(folder, home))
    from mcp_server.access.bearer import load_token

    url = f"http://127.0.0.1:{port}/mcp"
    return client_config.Launch(url=url, token=load_token(home_of(home)))


def _init_warnings(agents: Sequence[str], *, http: bool) -> list[str]:
    """Return the warnings that `init` shows at its end.

    `agents` are the coding agents that the user named. With `http` the files written for them hold
    a token.
    """
    warnings = []
    if http and agents:
        warnings.append("The files hold the bearer token: do not commit them.")
    if not agents:
        warnings.append("No agent was named: add --agent claude,cursor,codex,vscode.")
    return warnings


@app.command()
@command
def ui(
    open_page: Annotated[bool, typer.Option("--open", help="In the browser.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Write a page of all runs, environments and reports, and say where it is."""
    from mcp_server.cli import overview_page

    reply = overview_page.write_page(home_of(home))  # a reply that holds the path as `page`
    if open_page:
        import webbrowser

        webbrowser.open(Path(reply["page"]).as_uri())
    show(reply, as_json)


@app.command()
@command
def playbook(
    section: Annotated[
        str, typer.Argument(help="A section, or an address as run://pebble/card.")
    ] = "",
    as_json: Json = False,
) -> None:
    """How to train well."""
    if addresses.is_address(section):
        text = addresses.read(home_of(None), section)  # None: the default home
    else:
        text = verbs.read_playbook(section)
    if as_json:
        return show({"section": section, "text": text}, as_json)
    if not section:  # the contents tell agents how to read a section; tell people the command
        text = text.replace('read_playbook(section="...")', "honesmith playbook SECTION")
        text = re.sub(r'read_playbook\(section="([^"]+)"\)', r"honesmith playbook \1", text)
    return show(text, as_json)


def _print_entries(agents: Sequence[str], launch: "Launch", as_json: bool) -> None:
    """Print the entries that `init` would write into the configuration files of these agents."""
    from mcp_server.cli import client_config

    entries = {name: client_config.entry_text(name, launch) for name in agents}
    if as_json:
        show({"entries": entries}, as_json)
        return
    for name, entry in entries.items():
        typer.echo(f"# {client_config.CLIENTS[name].file}\n{entry}")


def _log_check(path: Path) -> dict[str, str]:
    """Make the check of the server's log for `doctor`: a warning with path and size if the log
    exists, otherwise a pass. The file is made only when an internal error is logged.
    """
    if not path.exists():
        return {"name": "server log", "status": "pass", "detail": "no fault of ours was logged"}
    detail = f"{path}, {path.stat().st_size} bytes"
    fix = "Read its end; delete it when it is no longer needed."
    return {"name": "server log", "status": "warn", "detail": detail, "fix": fix}


def _resolved_roots(roots: list[Path] | None) -> list[Path] | None:
    """Return the folders given with `--root` as absolute paths; None if the option was not used.

    Raises:
        UserError: BAD_ARGUMENT if one of them is not a folder.
    """
    if not roots:
        return None
    for root in roots:
        if not root.is_dir():
            raise UserError(
                "BAD_ARGUMENT",
                f"--root {root} is not a folder",
                hint="Check the path.",
                field="root",
            )
    return [root.resolve() for root in roots]


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents. Raises UserError BAD_ARGUMENT if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "BAD_ARGUMENT", f"{folder} cannot be made: {error.strerror}", field="folder"
        ) from error


def _has_torch() -> bool:
    """Whether torch is installed in the same Python environment as this program."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


app.add_typer(env_commands.app, name="env")
app.add_typer(data_commands.app, name="data")
app.add_typer(judge_commands.app, name="judge")
app.add_typer(key_commands.app, name="key")
app.add_typer(model_commands.models, name="models")
app.add_typer(host_commands.app, name="hosts")
app.add_typer(run_commands.runs, name="runs")
run_commands.runs.command("priority")(share_commands.priority)
for _name, _function in {
    "status": run_commands.status,
    "dry-run": run_commands.dry_run,
    "estimate": run_commands.estimate,
    "train": run_commands.train,
    "rerun": run_commands.rerun,
    "wait": run_commands.wait,
    "logs": run_commands.logs,
    "rollouts": run_commands.rollouts,
    "evaluate": run_commands.evaluate,
    "compare": run_commands.compare,
    "diff": run_commands.diff,
    "curate": run_commands.curate,
    "diagnose": run_commands.diagnose,
    "cancel": run_commands.cancel,
    "pin": run_commands.pin,
    "unpin": run_commands.unpin,
    "report": run_commands.report,
    "results": run_commands.results,
    "verify": run_commands.verify,
    "share": share_commands.share,
    "deploy": model_commands.deploy,
    "undeploy": model_commands.undeploy,
    "chat": model_commands.chat,
    "export": model_commands.export,
}.items():
    app.command(_name)(_function)


def main() -> None:
    """Run the command line; the installed script `honesmith` calls this."""
    app()
