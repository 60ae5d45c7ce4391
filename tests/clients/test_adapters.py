"""Libraries that bring MCP tools to other agents: each lists ours, calls one, sees a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcp_server.protocol.tools import NEEDS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(60)]

HERE = Path(__file__).parent
Installed = Callable[[str], Path]


def started(project, folder: Path, script: str) -> dict[str, Any]:
    """What the script printed last: it is run by node, or by the Python of its environment."""
    if script.endswith(".mjs"):
        argv = ["node", str(HERE / script), str(folder)]
    else:
        argv = [str(folder / "venv" / "bin" / "python"), str(HERE / script)]
    ran = project.run([*argv, *project.argv])
    assert ran.returncode == 0, ran.stderr[-3_000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("client", "script"),
    [
        ("typescript", "list_and_call.mjs"),
        ("openai-agents", "list_and_call_agents.py"),
        ("langchain", "list_and_call_langchain.py"),
    ],
)
def test_it_lists_the_tools_and_calls_one(installed: Installed, project, client: str, script: str):
    said = started(project, installed(client), script)
    assert len(said["tools"]) == len(NEEDS) and {"get_status", "submit_train"} <= set(said["tools"])
    status = json.loads(said["status"])
    assert status["hardware"]["devices"] and status["summary"]
    assert said.get("structured", status) == status
    assert "RUN_NOT_FOUND" in said["refused"] and "Traceback" not in said["refused"]
