"""Tool calls, alone and in prose, as the commands a person types."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any


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
