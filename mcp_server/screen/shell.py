"""Calls of tools as the shell commands a person types."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.core.hints import Call, Change, Hint

_NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class _Command:
    """How a tool is called from a shell.

    Attributes:
        name: the words after `honesmith`.
        positional: the arguments that have no option, in order.
        options: the names of options that differ from their argument's, by argument.
    """

    name: str
    positional: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)


COMMANDS: dict[str, _Command] = {
    "get_status": _Command("status", ("scope",)),
    "push_env": _Command("env push", ("path",)),
    "dry_run": _Command("dry-run", ("env_id",), {"full": "all"}),
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
# Calls for which there is another command if an argument has a value: (tool, argument, value).
_SPECIAL: dict[tuple[str, str, str], _Command] = {
    ("get_status", "scope", "envs"): _Command("env list"),
    ("get_status", "scope", "runs"): _Command("runs"),
    ("deploy", "action", "stop"): _Command("undeploy", ("run_id",)),
    ("deploy", "action", "export"): _Command("export", ("run_id", "path")),
}
_LEFT_OUT = ("cursor",)  # arguments that commands do not need: they page by themselves


def as_command(call: Call) -> str:
    """The shell command that a person types for `call`, such as `honesmith wait arith-grpo-7`.

    Words are quoted where needed. For a tool that is not in `COMMANDS` the command is the tool's
    name with dashes.
    """
    arguments = dict(call.arguments)
    command = _take_command(call.tool, arguments)
    words = ["honesmith", *command.name.split()]
    for name in command.positional:
        value = arguments.pop(name, [])  # [] for an argument that is left out: no word
        items = value if isinstance(value, list | tuple) else [value]
        words += [_typed_value(item) for item in items]
    return shlex.join([*words, *_options(arguments, command.options)])


def _take_command(tool: str, arguments: dict[str, object]) -> _Command:
    """The command for a call of `tool`.

    Some values of an argument have a command of their own (`_SPECIAL`), such as `undeploy` for
    action="stop". The command needs no option for such an argument, so it is removed from
    `arguments`.
    """
    command = COMMANDS.get(tool) or _Command(tool.replace("_", "-"))
    for (special_tool, name, value), special in _SPECIAL.items():
        if special_tool == tool and arguments.get(name) == value:
            del arguments[name]
            command = special
    return command


def as_typed(hint: Hint) -> str:
    """A hint as a person types it: its sentence, then the command to run or the options to change.

    For example "Wait for it: honesmith wait r-1" or "Try fewer steps. --set steps=20".
    """
    if hint.call is not None:
        return f"{hint.text} {as_command(hint.call)}".strip()
    if hint.change is not None:
        return f"{hint.text} {_changed_options(hint.change)}".strip()
    return hint.text.strip()


def _changed_options(change: Change) -> str:
    """The options that set what `change` changes, such as "--install --set steps=3"."""
    arguments = {**change.arguments, "settings": change.settings}
    return shlex.join(_options(arguments, names=_NO_NAMES))


def _options(arguments: Mapping[str, object], names: Mapping[str, str]) -> list[str]:
    """Turn arguments into the words of options, such as ["--limit", "5"].

    - `names` gives the option's name for arguments whose option is named differently.
    - "", None, False, and the arguments in `_LEFT_OUT` are left out.
    - True becomes the option alone; a list repeats its option.
    - each setting becomes `--set NAME=VALUE`.
    """
    words: list[str] = []
    for name, value in arguments.items():
        words += _option_words(name, value, f"--{names.get(name, name).replace('_', '-')}")
    return words


def _option_words(name: str, value: object, option: str) -> list[str]:
    """The words for the argument `name`, such as ["--limit", "5"]; `option` is its option, such as
    "--limit". [] for an argument that is left out of the command."""
    if name == "settings" and isinstance(value, Mapping):
        return _setting_words(value)
    if name == "preview":  # the command has --save instead, for preview=false
        return [] if value else ["--save"]
    if name == "vary" and isinstance(value, Mapping):
        return [
            word
            for key, values in value.items()
            for word in (option, f"{key}={json.dumps(values)}")
        ]
    if value is True:
        return [option]
    if isinstance(value, list | tuple):
        return [word for item in value for word in (option, _typed_value(item))]
    # `is False`, since 0 equals False: an option of 0 has to be written.
    if value in ("", None) or value is False or name in _LEFT_OUT:
        return []
    return [option, _typed_value(value)]


def _setting_words(settings: Mapping[str, object]) -> list[str]:
    """Settings as the words of options, such as ["--set", "steps=3"]."""
    words = []
    for name, value in settings.items():
        words += ["--set", f"{name}={_typed_value(value)}"]
    return words


def _typed_value(value: object) -> str:
    """A value as a word of a command: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
