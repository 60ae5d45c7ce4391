"""How the command line talks: options every command has, output for people and for programs.

With `--json` a command prints one JSON value on stdout and nothing else. Without it, it prints for
people: tables as wide as the terminal, no colours where nobody sees them. Exit status: 0 ok, 1 the
work failed, 2 the input was wrong.
"""

import ast
import contextlib
import difflib
import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from engine.errors import UserError
from engine.run_dir import Home
from mcp_server.log import log, log_file, log_to
from mcp_server.replies import clean

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
    """Commands whose flags are shown without a type, and whose typos meet near names alone."""

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
    """Turn a function that returns an exit status, or raises UserError, into a command."""

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
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

    return run


def _internal(name: str, error: Exception, home: Path | None) -> UserError:
    """A person gets a sentence, the log the traceback."""
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
    from mcp_server import paint as painters  # noqa: PLC0415

    getattr(painters, paint)(clean(reply))


@contextlib.contextmanager
def working(what: str, as_json: bool = False) -> Iterator[None]:
    """Say on a terminal what is being done while it is done; nothing where nobody looks."""
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
    lines = [f"error: {as_typed(error.message)} [{error.code}]"]
    if error.hint:
        lines.append(f"  try: {as_typed(error.hint)}")
    if error.playbook:
        lines.append(f"  read: honesmith playbook {error.playbook}")
    typer.echo(clean("\n".join(lines)), err=True)


def at(home: Path | None) -> Home:
    """The home of a command. Raises UserError HOME_UNUSABLE with field "home": wrong input."""
    try:
        return Home.locate(home)
    except UserError as error:
        error.field = "home"
        raise


def settings_from(pairs: Sequence[str] | None) -> dict[str, Any]:
    """`["steps=60", "loss=dapo"]` as settings; a value is JSON where it can be, else text.

    Raises UserError BAD_ARGUMENT on a pair without "=".
    """
    settings: dict[str, Any] = {}
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


def as_command(call: Mapping[str, Any]) -> str:
    """A suggested tool call as the command a person would type."""
    tool, arguments = str(call.get("tool", "")), dict(call.get("arguments", {}))
    name, first = _COMMANDS.get(tool, (tool.replace("_", "-"), ()))
    if tool == "get_status" and arguments.get("scope") in _LISTS:
        name = _LISTS[arguments.pop("scope")]
    if tool == "deploy" and arguments.get("action") in ("stop", "export"):
        name = {"stop": "undeploy", "export": "export"}[arguments.pop("action")]
        first = (*first, "path")
    words = ["honesmith", *name.split()]
    words += [str(arguments.pop(key)) for key in first if key in arguments]
    for key, value in arguments.items():
        if key == "settings":
            named = value.items() if isinstance(value, Mapping) else ()  # `settings=...`
            pairs = [f"{k}={_value(v)}" for k, v in named] or [str(value)]
            words += [word for pair in pairs for word in ("--set", pair)] if value else []
        elif key == "preview":  # the command previews unless it is told to save
            words += [] if value else ["--save"]
        elif value is True:
            words.append(f"--{key.replace('_', '-')}")
        elif key == "keys":
            names = value if isinstance(value, list) else [value]
            words += [word for name in names for word in ("--key", str(name))]
        elif isinstance(value, list):
            words += [str(item) for item in value]
        elif value not in ("", None, False) and key != "cursor":
            words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(words)


def as_typed(text: str) -> str:
    """`text` with each tool, call and argument named in it as a person would type it."""
    done, upto = [], 0
    # What a call became is not read again: its values may be the names of tools.
    for found in _CALL.finditer(text):
        done += [_spoken(text[upto : found.start()]), _typed(found[0])]
        upto = found.end()
    return "".join([*done, _spoken(text[upto:])])


def _spoken(text: str) -> str:
    for pattern, typed in _SPOKEN:
        text = pattern.sub(typed, text)
    return text


def _typed(call: str) -> str:
    try:
        parsed = ast.parse(call, mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
            return call
        arguments = {
            item.arg: ast.literal_eval(_AsWritten().visit(item.value))
            for item in parsed.keywords
            if item.arg
        }
        # `read_logs(run_id)`: the name of an argument stands for its value.
        arguments |= {item.id: item.id for item in parsed.args if isinstance(item, ast.Name)}
        return as_command({"tool": parsed.func.id, "arguments": arguments})
    except (ValueError, SyntaxError, TypeError):  # no values, or not those of this tool
        return call


class _AsWritten(ast.NodeTransformer):
    """Names as values, at any depth: JSON's words are what they mean, all others and `...` stand
    for a value as they are written."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS.get(node.id, node.id))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant("...") if node.value is ... else node


_COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "get_status": ("status", ("scope",)),
    "push_env": ("env push", ("path",)),
    "dry_run": ("dry-run", ("env_id",)),
    "estimate_cost": ("estimate", ("env_id",)),
    "submit_train": ("train", ("env_id",)),
    "wait_run": ("wait", ("run_id",)),
    "read_logs": ("logs", ("run_id",)),
    "read_rollouts": ("rollouts", ("run_id",)),
    "evaluate": ("evaluate", ("env_id",)),
    "compare_runs": ("compare", ()),
    "diagnose": ("diagnose", ("run_id",)),
    "deploy": ("deploy", ("run_id",)),
    "chat": ("chat", ("model", "message")),
    "cancel_run": ("cancel", ("run_id",)),
    "read_playbook": ("playbook", ("section",)),
}


_LISTS = {"envs": "env list", "runs": "runs"}  # scopes that have a command of their own
_JSON_WORDS = {"true": True, "false": False, "null": None}
# A word of its own is no part of a path, an address, an option or a longer name; the full stop of
# a sentence may follow it.
_BEGINS, _ENDS = r"(?<![\w/\\.@~-])", r"(?![\w/\\@~(-]|\.[\w/\\.@~-])"
_CALL = re.compile(rf"{_BEGINS}(?:{'|'.join(_COMMANDS)})\([^()]*\)")


def _own(pattern: str) -> re.Pattern[str]:
    return re.compile(f"{_BEGINS}(?:{pattern}){_ENDS}")


# What is said of tools beside whole calls; verbs that are plain English are left alone.
_SPOKEN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        _own(r"get_status scope=(\w+)"),
        lambda found: as_command({"tool": "get_status", "arguments": {"scope": found[1]}}),
    ),
    (_own("deploy action=stop"), "honesmith undeploy"),
    (_own(r"read_logs view=(\w+)"), r"honesmith logs RUN --view \1"),
    (_own(r"read_rollouts pick=(\w+)"), r"honesmith rollouts RUN --pick \1"),
    (_own("install=true"), "--install"),
    (_own("(?:set )?accept_reward_risk ?= ?true"), "--set accept_reward_risk=true"),
    (_own("train://settings"), "docs/settings.md"),
    (
        _own(rf"(?<!honesmith )({'|'.join(name for name in _COMMANDS if '_' in name)})"),
        lambda found: f"honesmith {_COMMANDS[found[1]][0]}",
    ),
)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
