"""The real Claude Code against a model that plays a script."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_script import LOOP, REFUSED, the_loop, the_refusals, tools_called
from fake_model import SAID_AT_THE_END, Call, FakeModel, Script, fake_model
from http_server import listening

from mcp_server.access.bearer import load_token
from mcp_server.cli.client_config import Launch, write_entry

pytestmark = [pytest.mark.clients, pytest.mark.timeout(60)]

Installed = Callable[[str], Path]


@pytest.fixture
def claude(installed: Installed) -> str:
    return str(installed("claude") / "node_modules" / ".bin" / "claude")


def variables(tmp_path: Path, model: FakeModel | None = None) -> dict[str, str]:
    """A key that is none, a configuration folder of the test's own."""
    config = tmp_path / "claude-config"
    config.mkdir(exist_ok=True)
    (config / "settings.json").write_text(json.dumps({"enableAllProjectMcpServers": True}))
    return {
        "CLAUDE_CONFIG_DIR": str(config),
        "ANTHROPIC_API_KEY": "no-key",
        "ANTHROPIC_BASE_URL": model.url if model else "http://127.0.0.1:9",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def load_tools(names: list[str]) -> Script:
    """Claude Code shows names alone until the model asks for the schemas."""
    asked = ",".join(f"mcp__honesmith__{name}" for name in names)
    seen = yield Call("ToolSearch", {"query": f"select:{asked}", "max_results": 20}, server="")
    assert {f"honesmith/{name}" for name in names} <= seen.offered, seen.text


def test_the_list_says_connected(claude, project, tmp_path: Path):
    listed = project.run([claude, "mcp", "list"], **variables(tmp_path))
    assert listed.returncode == 0, listed.stderr
    (line,) = (x for x in listed.stdout.splitlines() if x.startswith("honesmith:"))
    assert line.endswith("Connected"), listed.stdout


async def test_over_http_the_list_says_connected_with_the_token_alone(
    claude, project, tmp_path: Path
):
    async with listening(project.home) as url:
        said = {}
        for token in (load_token(project.home), "x" * 40):
            write_entry(project.folder, "claude", Launch(url=url, token=token), force=True)
            said[token] = project.run([claude, "mcp", "list"], **variables(tmp_path)).stdout
        right, wrong = said.values()
    assert "Connected" in right
    assert "Connected" not in wrong and "honesmith:" in wrong


@pytest.mark.worker
@pytest.mark.timeout(300)
def test_a_scripted_agent_goes_from_push_to_chat(claude, project, tmp_path: Path):
    argv = [claude, "-p", "Train it.", "--mcp-config", ".mcp.json", "--strict-mcp-config"]
    argv += ["--allowedTools", "mcp__honesmith", "--output-format", "json"]
    with fake_model(the_loop(project.folder / "arithmetic", load_tools)) as model:
        ran = project.run(argv, 280, **variables(tmp_path, model))
    if model.problem:
        raise model.problem
    assert ran.returncode == 0, ran.stderr[-2_000:]
    assert tools_called(model.shown) == LOOP
    answer = json.loads(ran.stdout)
    assert answer["result"] == SAID_AT_THE_END and answer["permission_denials"] == []
    first = json.dumps(model.requests[0])
    assert "Start with model" in first and "continue with next_cursor" in first, "not whole"


def test_refusals_reach_the_model_whole(claude, project, tmp_path: Path):
    project.home.config_file.write_text("auto_approve_gpu_hours = 0\n")
    argv = [claude, "-p", "Train it.", "--mcp-config", ".mcp.json", "--strict-mcp-config"]
    with fake_model(the_refusals(project.folder / "arithmetic", load_tools)) as model:
        project.run([*argv, "--allowedTools", "mcp__honesmith"], **variables(tmp_path, model))
    if model.problem:
        raise model.problem
    assert tools_called(model.shown) == REFUSED
