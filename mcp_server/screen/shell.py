"""Calls of tools as the shell commands a person types."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.core.hints import Call, Change, Hint

_NOWHERE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class _Command:
    """How a tool is called from a shell.

    Attributes:
        name: the words after `honesmith`.
        positional: arguments that stand there without an option, in order.
        options: names of options that are not the argument's own.
    """

    name: str
    positional: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=lambda: _NOWHERE)


COMMANDS: dict[str, _Command] = {
    "get_status": _Command("status", ("scope",)),
    "push_env": _Command("env push", ("path",)),
    "dry_run": _Command("dry-run", ("env_id",)),
    "estimate_cost": _Command("estimate", ("env_id",)),
    "submit_train": _Command("train", ("env_id",)),
    "wait_run": _Command("wait", ("run_id",), {"timeout_s": "timeout"}),
    "read_logs": _Command("logs", ("run_id",), {"keys": "key"}),
    "read_rollouts": _Command("rollouts", ("run_id",)),
    "evaluate": _Command("evaluate", ("env_id", "models")),
    "compare_runs": _Command("compare", ("ids",)),
    "diagnose": _Command("diagnose", ("run_id",)),
    "curate": _Command("curate", ("source_ids",)),
    "deploy": _Command("deploy", ("run_id",)),
    "chat": _Command("chat", ("model", "message")),
    "cancel_run": _Command("cancel", ("run_id",)),
    "read_playbook": _Command("playbook", ("section",)),
}
# Where one argument decides on the command: (tool, argument, value).
_SPECIAL: dict[tuple[str, str, str], _Command] = {
    ("get_status", "scope", "envs"): _Command("env list"),
    ("get_status", "scope", "runs"): _Command("runs"),
    ("deploy", "action", "stop"): _Command("undeploy", ("run_id",)),
    ("deploy", "action", "export"): _Command("export", ("run_id", "path")),
}
_NOT_TYPED = ("cursor",)  # commands page by themselves


def as_command(call: Call) -> str:
    """The command a person types for `call`."""
    arguments = dict(call.arguments)
    command = COMMANDS.get(call.tool) or _Command(call.tool.replace("_", "-"))
    for (tool, name, value), special in _SPECIAL.items():
        if tool == call.tool and arguments.get(name) == value:
            del arguments[name]
            command = special
    words = ["honesmith", *command.name.split()]
    for name in command.positional:
        value = arguments.pop(name, [])
        words += map(_typed, value if isinstance(value, list | tuple) else [value])
    return shlex.join([*words, *_options(arguments, command.options)])


def as_typed(hint: Hint) -> str:
    """A hint for a person: the sentence, then the command or the options that change theirs."""
    if hint.call is not None:
        return f"{hint.text} {as_command(hint.call)}".strip()
    options = shlex.join(_changed(hint.change)) if hint.change is not None else ""
    return f"{hint.text} {options}".strip()


def _changed(change: Change) -> list[str]:
    return _options({**change.arguments, "settings": change.settings}, _NOWHERE)


def _options(arguments: Mapping[str, object], names: Mapping[str, str]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{names.get(name, name).replace('_', '-')}"
        if name == "settings" and isinstance(value, Mapping):
            for setting, wanted in value.items():
                words += ["--set", f"{setting}={_typed(wanted)}"]
        elif name == "preview":  # the command previews unless it is told to save
            words += [] if value else ["--save"]
        elif value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (option, _typed(item))]
        elif value not in ("", None) and value is not False and name not in _NOT_TYPED:
            words += [option, _typed(value)]
    return words


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
