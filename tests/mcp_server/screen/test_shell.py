"""Every call that the engine can suggest is a call of a tool, and a command that can be typed."""

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from engine.core.hints import Call, Change, Hint
from engine.home.run_dir import Home
from mcp_server.cli.main import app
from mcp_server.protocol.tools import all_tools
from mcp_server.screen.shell import COMMANDS, as_command, as_typed

ROOT = Path(__file__).parents[3]
TOOLS: dict[str, dict[str, Any]] = {
    tool.name: dict(tool.parameters["properties"]) for tool in all_tools(Home(Path("home")), ())
}


def takes(words: list[str]) -> dict[str, Any] | None:
    """The arguments of a command line, None where it is refused."""
    command, name, parent = get_command(app), "honesmith", None
    try:
        while True:
            context = command.make_context(name, list(words), parent=parent)
            if not hasattr(command, "resolve_command"):
                return dict(context.params)
            rest = [*getattr(context, "_protected_args", []), *context.args]
            chosen, command, words = command.resolve_command(context, rest)
            name, parent = str(chosen), context
    except Exception as error:  # typer's own click is not to be named
        if type(error).__name__ == "Exit" or hasattr(error, "format_message"):
            return None
        raise


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (Call("wait_run", {"run_id": "r", "until": "end", "cursor": "7"}), "wait r --until end"),
        (
            Call("submit_train", {"env_id": "a", "algorithm": "sft", "settings": {"steps": 6}}),
            "train a --algorithm sft --set steps=6",
        ),
        (
            Call("submit_train", {"env_id": "a", "settings": {"a": None, "x": [False, "N"]}}),
            """train a --set a=null --set 'x=[false, "N"]'""",
        ),
        (Call("submit_train", {"env_id": "a", "settings": {}}), "train a"),
        (
            Call("submit_train", {"resume": "r", "max_gpu_hours": 2.0}),
            "train --resume r --max-gpu-hours 2.0",
        ),
        (
            Call(
                "submit_train",
                {"env_id": "a", "then": [{"algorithm": "evaluate"}], "vary": {"seed": [1, 2]}},
            ),
            """train a --then '{"algorithm": "evaluate"}' --vary 'seed=[1, 2]'""",
        ),
        (Call("push_env", {"path": "x y", "install": True}), "env push 'x y' --install"),
        (
            Call("evaluate", {"env_id": "a", "models": ["m", "n"], "rows": 9}),
            "evaluate a m n --rows 9",
        ),
        (Call("compare_runs", {"ids": ["a", "b"], "env_id": "e"}), "compare a b --env-id e"),
        (Call("diagnose", {"run_id": "r-1"}), "diagnose r-1"),
        (Call("chat", {"model": "m", "message": "hi you"}), "chat m 'hi you'"),
        (
            Call("chat", {"model": "m", "conversation": "c-1", "messages": [{"role": "tool"}]}),
            """chat m --conversation c-1 --messages '{"role": "tool"}'""",
        ),
        (Call("deploy", {"run_id": "r", "action": "stop"}), "undeploy r"),
        (Call("deploy", {"run_id": "r", "action": "export", "path": "out"}), "export r out"),
        (Call("read_logs", {"run_id": "r", "keys": ["kl", "lr"]}), "logs r --key kl --key lr"),
        (Call("read_rollouts", {"run_id": "r", "step": 0}), "rollouts r --step 0"),
        (Call("get_status", {"scope": "envs"}), "env list"),
        (Call("get_status", {"scope": "deployments"}), "status deployments"),
        (
            Call("curate", {"source_ids": ["r"], "name": "x", "preview": False}),
            "curate r --name x --save",
        ),
        (Call("read_playbook"), "playbook"),
    ],
)
def test_a_call_is_shown_as_a_command_that_can_be_typed(call: Call, shown: str):
    assert as_command(call) == f"honesmith {shown}"
    assert takes(shlex.split(shown)) is not None
    assert set(call.arguments) <= set(TOOLS[call.tool])


def test_every_tool_has_a_command():
    assert set(COMMANDS) == set(TOOLS)


def test_a_hint_is_its_sentence_and_the_command_or_the_options_that_change_one():
    stop = Call("deploy", {"run_id": "d-1", "action": "stop"})
    assert as_typed(Hint("Stop it:", stop)) == "Stop it: honesmith undeploy d-1"
    change = Change({"install": True}, {"steps": 3})
    assert as_typed(Hint("Again.", change=change)) == "Again. --install --set steps=3"
    assert as_typed(Hint("A path: /srv/push_env/dry_run.py")) == "A path: /srv/push_env/dry_run.py"


def calls_in_the_source() -> Iterator[tuple[str, str, list[str]]]:
    """(where, tool, arguments as far as they are written there) of every suggested call."""
    for package in ("engine", "mcp_server", "playbook"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if node.func.id not in ("Call", "suggest") or not node.args:
                    continue
                if isinstance(first := node.args[0], ast.Constant) and isinstance(first.value, str):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield where, first.value, arguments_of(node)


def arguments_of(node: ast.Call) -> list[str]:
    named = [pair.arg for pair in node.keywords if pair.arg]
    dicts = (
        [part for part in ast.walk(node.args[1]) if isinstance(part, ast.Dict)]
        if (len(node.args) > 1)
        else []
    )
    keys = [key for part in dicts for key in part.keys]
    return named + [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def test_every_call_in_the_source_is_one_of_a_tool_with_arguments_it_has():
    calls = list(calls_in_the_source())
    assert len(calls) > 60
    for where, tool, arguments in calls:
        assert tool in TOOLS, where
        assert set(arguments) - {"needs"} <= set(TOOLS[tool]), (where, arguments)


def test_whatever_a_call_says_its_command_can_be_typed():
    """Each argument of each tool, alone beside those that it needs."""
    values = {"string": "x", "boolean": True, "number": 0.5, "array": ["x"], "object": {"seed": 1}}
    for tool in all_tools(Home(Path("home")), ()):
        required = list(tool.parameters.get("required", []))
        if tool.name == "push_env":
            required += ["path"]
        # A command pushes a folder; `files` is for a caller that has none on this machine.
        for name in [name for name in TOOLS[tool.name] if name != "files"]:
            arguments: dict[str, object] = {}
            of_export = ["action", "path"] if tool.name == "deploy" and name != "compute" else []
            for argument in dict.fromkeys([*required, *of_export, name]):
                about = TOOLS[tool.name][argument]
                given = about["enum"][-1] if "enum" in about else about.get("minimum", 3)
                arguments[argument] = given if "enum" in about else values.get(about["type"], given)
            typed = as_command(Call(tool.name, arguments))
            assert takes(shlex.split(typed)[1:]) is not None, typed
