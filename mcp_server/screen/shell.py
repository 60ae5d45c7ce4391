"""Translates calls of tools into the shell commands that a person types."""

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
        positional: names of the arguments that are typed without an option, in order.
        options: argument -> name of its option, for options named otherwise than the argument.
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
# (tool, argument, value) -> the command to use instead if the argument has this value.
_SPECIAL: dict[tuple[str, str, str], _Command] = {
    ("get_status", "scope", "envs"): _Command("env list"),
    ("get_status", "scope", "runs"): _Command("runs"),
    ("deploy", "action", "stop"): _Command("undeploy", ("run_id",)),
    ("deploy", "action", "export"): _Command("export", ("run_id", "path")),
}
_LEFT_OUT = ("cursor",)  # arguments that commands do not have: a command reads all pages by itself


def as_command(call: Call) -> str:
    """Return the shell command that a person types for `call`: `honesmith wait arith-grpo-7`.

    Words are quoted if the shell needs it. The command of a tool that is not in `COMMANDS` is the
    tool's name with dashes.
    """
    arguments = dict(call.arguments)
    command = _take_command(call.tool, arguments)
    words = ["honesmith", *command.name.split()]
    for name in command.positional:
        value = arguments.pop(name, [])  # []: the argument is left out, so it gets no word
        items = value if isinstance(value, list | tuple) else [value]
        words += [_typed_value(item) for item in items]
    return shlex.join([*words, *_options(arguments, command.options)])


def _take_command(tool: str, arguments: dict[str, object]) -> _Command:
    """Return the command for a call of `tool`. Remove from `arguments` what the command implies.

    Some values of an argument have a command of their own (`_SPECIAL`), e.g. `undeploy` for
    action="stop". Such a command needs no option for the argument.
    """
    command = COMMANDS.get(tool) or _Command(tool.replace("_", "-"))
    for (special_tool, name, value), special in _SPECIAL.items():
        if special_tool == tool and arguments.get(name) == value:
            del arguments[name]
            command = special
    return command


def as_typed(hint: Hint) -> str:
    """Return a hint for a person: its sentence, then the command to type or the options to change.

    Examples: "Wait for it: honesmith wait r-1", "Try fewer steps. --set steps=20".
    """
    if hint.call is not None:
        return f"{hint.text} {as_command(hint.call)}".strip()
    if hint.change is not None:
        return f"{hint.text} {_changed_options(hint.change)}".strip()
    return hint.text.strip()


def _changed_options(change: Change) -> str:
    """Return the options by which a person makes the change, such as "--install --set steps=3"."""
    arguments = {**change.arguments, "settings": change.settings}
    return shlex.join(_options(arguments, names=_NO_NAMES))


def _options(arguments: Mapping[str, object], names: Mapping[str, str]) -> list[str]:
    """Turn arguments into the words of options, such as ["--limit", "5"].

    - `names` maps an argument to the name of its option, if the two differ.
    - An argument that is "", None or False, or is in `_LEFT_OUT`, gets no option.
    - True becomes the option alone; a list repeats its option for each item.
    - Each setting becomes `--set NAME=VALUE`.
    """
    words: list[str] = []
    for name, value in arguments.items():
        words += _option_words(name, value, f"--{names.get(name, name).replace('_', '-')}")
    return words


def _option_words(name: str, value: object, option: str) -> list[str]:
    """Return the words of a command for one argument, such as ["--limit", "5"]. Returns [] if the
    argument is left out of the command. `option` is the option of the argument, e.g. "--limit"."""
    if name == "settings" and isinstance(value, Mapping):
        return _setting_words(value)
    if name == "preview":  # the command has --save instead, for preview=false
        return [] if value else ["--save"]
    words: list[str] = []
    if name == "vary" and isinstance(value, Mapping):  # setting -> its values: --vary seed=[1,2]
        for setting, values in value.items():
            words += [option, f"{setting}={json.dumps(values)}"]
        return words
    if value is True:  # a flag
        return [option]
    if isinstance(value, list | tuple):  # the option is repeated for each item
        for item in value:
            words += [option, _typed_value(item)]
        return words
    # What is empty or false is left out. `is False` and not `== False`, because 0 equals False and
    # "--limit 0" must be written.
    if value in ("", None) or value is False or name in _LEFT_OUT:
        return []
    return [option, _typed_value(value)]


def _setting_words(settings: Mapping[str, object]) -> list[str]:
    """Return settings as words of a command, such as ["--set", "steps=3"]."""
    words = []
    for name, value in settings.items():
        words += ["--set", f"{name}={_typed_value(value)}"]
    return words


def _typed_value(value: object) -> str:
    """Return a value as a word of a command: a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
