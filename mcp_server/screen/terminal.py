"""How the command line talks: options every command has, output for people and for programs.

With `--json` a command prints one JSON value on stdout and nothing else. Without it, it prints for
people: tables as wide as the terminal, no colours where nobody sees them. Exit status: 0 ok, 1 the
work failed, 2 the input was wrong.
"""

import contextlib
import difflib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.runs.submit.requests import GivenSettings
from mcp_server.access.log import log, log_file, log_to
from mcp_server.api.replies import clean
from mcp_server.screen.shell import as_typed

OK, FAILED, WRONG = 0, 1, 2

# Refusals that better input would not have avoided.
_WORK_FAILED = {
    "INTERNAL",
    "DEPLOY_FAILED",
    "DEVICE_BUSY",
    "DISK_FULL",
    "HOME_UNUSABLE",
    "NO_TORCH",
    "NO_VLLM",
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
HomeFolder = Annotated[
    Path | None,
    typer.Option("--home", metavar="DIR", help="Home folder.", envvar="HONESMITH_HOME"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, e.g. --set steps=60."),
]


class CommandGroup(TyperGroup):
    """A group whose help shows flags without a type, and which suggests only near names."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        for inner in (self, *self.commands.values()):
            assert isinstance(inner, TyperGroup | TyperCommand)
            options = [*inner.params, inner.get_help_option(typer.Context(inner))]
            for option in options:
                if isinstance(option, TyperOption) and option.is_flag:
                    option.metavar = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and name not in self.commands and not name.startswith("-"):
            begun = [known for known in self.commands if len(name) > 2 and known.startswith(name)]
            near = begun or difflib.get_close_matches(name, self.commands, cutoff=0.7)
            guess = f" Did you mean {' or '.join(repr(known) for known in near)}?" if near else ""
            ctx.fail(f"No such command {name!r}.{guess}")
        return super().resolve_command(ctx, args)


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Turn a function that returns an exit status, or raises UserError, into a command.

    A parameter whose type is a dataclass stands for one argument or option per field: typer sees
    the fields, the function gets the object.
    """
    bundles: dict[str, type[Any]] = {
        name: kind
        for name, kind in function.__annotations__.items()
        if isinstance(kind, type) and is_dataclass(kind)
    }

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
        for name, kind in bundles.items():
            arguments[name] = kind(**{item.name: arguments.pop(item.name) for item in fields(kind)})
        try:
            status = function(**arguments)
        except UserError as error:
            refuse(error, as_json)
            failed = error.code in _WORK_FAILED and error.field != "home"
            status = FAILED if failed else WRONG
        except KeyboardInterrupt:
            sys.stderr.write("\nstopped; runs go on\n")
            status = 130
        except BrokenPipeError:  # `honesmith logs | head`
            sys.stderr.close()
            status = OK
        except Exception as error:  # noqa: BLE001  the outermost handler of every command
            refuse(_internal(function.__name__, error, arguments.get("home")), as_json)
            status = FAILED
        raise typer.Exit(status or OK)

    if bundles:
        _flatten(run, bundles)
    return run


def _flatten(run: Callable[..., None], bundles: Mapping[str, type[Any]]) -> None:
    """Gives `run` the signature that typer reads: each bundle replaced by its fields."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        if parameter.name not in bundles:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        for item in fields(bundles[parameter.name]):
            default = inspect.Parameter.empty if item.default is MISSING else item.default
            parameters.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=item.type,
                )
            )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)


def _internal(name: str, error: Exception, home: Path | None) -> UserError:
    """The error for a bug of ours: a sentence for the person, the traceback in the log."""
    hint = ""
    with contextlib.suppress(UserError):  # a home that cannot be written has no log either
        where = Home.locate(home)
        log_to(where)
        log.error("%s failed", name, exc_info=error)
        hint = f"Details: {log_file(where)}"
    return UserError("INTERNAL", f"{type(error).__name__}: {error}", hint=hint)


def show(reply: Any, as_json: bool, paint: str = "reply") -> None:
    """Print a reply: as JSON, or for a person by the painter of that name."""
    if as_json:
        typer.echo(json.dumps(clean(reply), ensure_ascii=False, allow_nan=False, indent=1))
        return
    # 40 ms, and `serve` never paints.
    from mcp_server.screen import render as painters  # noqa: PLC0415

    getattr(painters, paint)(clean(reply))


@contextlib.contextmanager
def working(what: str, as_json: bool = False) -> Iterator[None]:
    """Show `what` on a terminal while the block runs; nothing where stderr is no terminal."""
    shown = sys.stderr.isatty() and not as_json
    if shown:
        sys.stderr.write(f"{what} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def refuse(error: UserError, as_json: bool) -> None:
    """Print why nothing was done and what to do instead."""
    if as_json:
        typer.echo(json.dumps(clean(error.payload()), ensure_ascii=False, indent=1))
        return
    lines = [f"error: {error.message} [{error.code}]"]
    if error.advice:
        lines.append(f"  try: {as_typed(error.advice)}")
    if error.playbook:
        lines.append(f"  read: honesmith playbook {error.playbook}")
    typer.echo(clean("\n".join(lines)), err=True)


def home_of(home: Path | None) -> Home:
    """The home of a command. Raises UserError HOME_UNUSABLE with field "home": wrong input."""
    try:
        return Home.locate(home)
    except UserError as error:
        error.field = "home"
        raise


def settings_from(pairs: Sequence[str] | None) -> GivenSettings:
    """`["steps=60", "loss=dapo"]` as settings; a value is JSON where it can be, else text.

    Raises UserError BAD_ARGUMENT on a pair without "=".
    """
    settings: dict[str, object] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise UserError(
                "BAD_ARGUMENT",
                f"--set {pair} is not NAME=VALUE",
                hint="For example --set steps=60 --set learning_rate=1e-4.",
                field="set",
            )
        try:
            settings[name.strip()] = json.loads(text)
        except ValueError:
            settings[name.strip()] = text
    return settings
