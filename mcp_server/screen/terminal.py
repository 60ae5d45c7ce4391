"""What all commands share: their common options, and output for people and for programs.

With `--json` a command prints one JSON value on stdout and nothing else. Without it, it prints
tables as wide as the terminal, and no colours where the output is not a terminal. The exit status
is 0 for success, 1 if the work failed, 2 if the input was wrong.
"""

import contextlib
import difflib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
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
INTERRUPTED = 130  # exit status after a Ctrl-C, as shells have it
NEAR_COMMAND = 0.7  # how similar a name must be to be suggested (difflib's ratio)

# Codes of errors that other input would not have avoided: exit status FAILED, not WRONG.
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
    """A group of commands whose help shows flags without a type.

    For an unknown command it suggests the commands with the most similar names.
    """

    def __init__(self, **options: Any) -> None:
        """Make the group with these `options` of typer's group. In the help of the group and of its
        commands, hide the type of flags."""
        super().__init__(**options)
        for shown_command in (self, *self.commands.values()):
            assert isinstance(shown_command, TyperGroup | TyperCommand)
            # --help is not among `params`: click makes that option only when it is asked for.
            help_option = shown_command.get_help_option(typer.Context(shown_command))
            for parameter in [*shown_command.params, help_option]:
                if isinstance(parameter, TyperOption) and parameter.is_flag:
                    parameter.metavar = ""  # the help shows the metavar as the type

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command whose name is the first of `args`, as typer does.

        An unknown name ends the program with a message, which suggests known names: those that
        begin with the unknown one, if it has three letters or more, or else similar ones.
        """
        name = args[0] if args else ""
        is_option = name.startswith("-")
        if name and name not in self.commands and not is_option:
            near_names = self._near_names(name)
            suggestion = ""
            if near_names:
                suggestion = f" Did you mean {' or '.join(map(repr, near_names))}?"
            ctx.fail(f"No such command {name!r}.{suggestion}")
        return super().resolve_command(ctx, args)

    def _near_names(self, name: str) -> list[str]:
        """Return the commands whose names begin with `name`; if there are none, or if `name` has
        fewer than three letters, those with similar names."""
        if len(name) > 2:  # too many commands begin with the same one or two letters
            longer_names = [command for command in self.commands if command.startswith(name)]
            if longer_names:
                return longer_names
        return difflib.get_close_matches(name, self.commands, cutoff=NEAR_COMMAND)


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Turn a function into a typer command that prints its errors and exits with its status.

    The function returns the exit status (None means OK) or raises UserError. A parameter whose type
    is a dataclass (a bundle) stands for several arguments or options: typer sees one option for
    each field of the dataclass, and the function gets the object.
    """
    bundles = _bundles_of(function)

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        """Call the function, print its error if it raises one, and exit with the status."""
        as_json = bool(arguments.get("as_json"))
        # typer passes each field of a bundle as a separate argument: build the bundles again.
        for name, bundle in bundles.items():
            values = {option.name: arguments.pop(option.name) for option in fields(bundle)}
            arguments[name] = bundle(**values)
        status = _call_and_print_error(function, arguments, as_json)
        raise typer.Exit(status or OK)

    if bundles:
        _flatten_signature(run, bundles)
    return run


def _bundles_of(function: Callable[..., int | None]) -> dict[str, type[Any]]:
    """Return the parameters of `function` whose annotation is a dataclass, as name -> dataclass."""
    return {
        name: bundle
        for name, bundle in function.__annotations__.items()
        if isinstance(bundle, type) and is_dataclass(bundle)
    }


def _call_and_print_error(
    function: Callable[..., int | None], arguments: Mapping[str, Any], as_json: bool
) -> int | None:
    """Call the function of a command with `arguments`. If it raises an error, print the error (as
    JSON if `as_json`) and do not raise it.

    Returns the exit status; None, which means OK, if the function returned None.
    """
    try:
        return function(**arguments)
    except UserError as error:
        print_error(error, as_json)
        # A home that cannot be used counts as wrong input, because the user has named it.
        has_work_failed = error.code in _WORK_FAILED and error.field != "home"
        return FAILED if has_work_failed else WRONG  # WRONG: the input was wrong
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; runs go on\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has left, as in `honesmith logs | head`
        sys.stderr.close()  # otherwise Python would report the broken stdout there at its exit
        return OK
    except Exception as error:  # noqa: BLE001  the outermost handler of every command
        print_error(_internal_error(function.__name__, error, arguments.get("home")), as_json)
        return FAILED


def _flatten_signature(run: Callable[..., None], bundles: Mapping[str, type[Any]]) -> None:
    """Give `run` the signature that typer reads, with each bundle replaced by its fields.

    `bundles` maps the names of parameters to the dataclasses they stand for. All parameters become
    keyword-only, so that those with and without a default may stand in any order.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        if parameter.name not in bundles:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [_parameter_of(option) for option in fields(bundles[parameter.name])]
    # typer reads the types from the annotations and all else from the signature.
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)


def _parameter_of(option: Field[Any]) -> inspect.Parameter:
    """Make the keyword-only parameter for one field of a bundle (a dataclass of several options),
    with the type and the default of the field."""
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.default is MISSING else option.default,
        annotation=option.type,
    )


def _internal_error(name: str, error: Exception, home: Path | None) -> UserError:
    """Make the INTERNAL error for a bug in the command `name`, and write its traceback to the log
    of the home.

    The hint of the error names the log. If the home cannot be used, there is no log and the hint is
    "".
    """
    hint = ""
    with contextlib.suppress(UserError):  # the home cannot be used
        located_home = Home.locate(home)
        log_to(located_home)
        log.error("%s failed", name, exc_info=error)
        hint = f"Details: {log_file(located_home)}"
    return UserError("INTERNAL", f"{type(error).__name__}: {error}", hint=hint)


def show(reply: Any, as_json: bool, renderer: str = "reply") -> None:
    """Print a reply on stdout: as JSON if `as_json`, otherwise for a person.

    `renderer` is the name of the function in `mcp_server.screen.render` that prints it for a
    person; "reply" prints any reply.
    """
    if as_json:
        typer.echo(json.dumps(clean(reply), ensure_ascii=False, allow_nan=False, indent=1))
        return
    # Imported late: it takes 40 ms, and `serve` never uses it.
    from mcp_server.screen import render  # noqa: PLC0415

    print_for_person = getattr(render, renderer)
    print_for_person(clean(reply))


@contextlib.contextmanager
def working(activity: str, as_json: bool = False) -> Iterator[None]:
    """Show `activity` with dots on stderr while the block runs, and erase it afterwards.

    Nothing is shown with `as_json`, or if stderr is not a terminal.
    """
    is_shown = sys.stderr.isatty() and not as_json
    if is_shown:
        sys.stderr.write(f"{activity} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[2K")  # to the start of the line, and erase it
            sys.stderr.flush()


def print_error(error: UserError, as_json: bool) -> None:
    """Print an error, its hint and the playbook section (advice on training) that it names: as JSON
    on stdout if `as_json`, otherwise as lines on stderr."""
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
    """Return the home in the folder `home`; if `home` is None, the default home.

    Raises:
        UserError: HOME_UNUSABLE if the folder cannot be used as a home.
    """
    try:
        return Home.locate(home)
    except UserError as error:
        # The user chose the home. `field` makes the command exit with the status for wrong input.
        error.field = "home"
        raise


def settings_from(assignments: Sequence[str] | None, option: str = "set") -> GivenSettings:
    """Read settings: ["steps=60", "loss=dapo"] becomes {"steps": 60, "loss": "dapo"}.

    A value is read as JSON; a value that is not JSON is taken as a text. None becomes {}. `option`
    is the name of the option that the assignments were given with, for the error.

    Raises:
        UserError: BAD_ARGUMENT if an assignment has no "=" or no name.
    """
    settings: dict[str, object] = {}
    for assignment in assignments or ():
        name, equals_sign, text = assignment.partition("=")
        if not equals_sign or not name.strip():
            raise UserError(
                "BAD_ARGUMENT",
                f"--{option} {assignment} is not NAME=VALUE",
                hint=f"For example --{option} steps=60 --{option} learning_rate=1e-4.",
                field=option,
            )
        try:
            settings[name.strip()] = json.loads(text)
        except ValueError:  # not JSON
            settings[name.strip()] = text
    return settings
