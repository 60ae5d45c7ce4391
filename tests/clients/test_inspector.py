"""The Inspector's command line: strict on every definition, and many calls at once."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from http_server import listening

from mcp_server.access.bearer import load_token
from mcp_server.protocol.tools import NEEDS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(60)]

LOAD = ["--load", "--load-duration", "4", "--load-concurrency", "4"]


@pytest.fixture
def inspector(installed: Callable[[str], Path]) -> list[str]:
    return [str(installed("inspector") / "node_modules" / ".bin" / "mcp-inspector"), "--cli"]


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_no_definition_is_one_that_a_client_may_refuse(inspector, project, era: str):
    argv = [*inspector, "--protocol-era", era, *project.argv, "--method"]
    listed = project.run([*argv, "tools/list", "--strict"])
    assert listed.returncode == 0, listed.stderr
    assert len(json.loads(listed.stdout)["tools"]) == len(NEEDS)


def test_resources_templates_and_prompts_are_listed(inspector, project):
    for method, key, count in [
        ("resources/list", "resources", 3),
        ("resources/templates/list", "resourceTemplates", 6),
        ("prompts/list", "prompts", 3),
    ]:
        listed = project.run([*inspector, *project.argv, "--method", method])
        assert listed.returncode == 0, listed.stderr
        assert len(json.loads(listed.stdout)[key]) == count


def test_a_refusal_is_a_tool_error(inspector, project):
    call = ["--method", "tools/call", "--tool-name", "wait_run", "--tool-arg", "run_id=nobody"]
    refused = project.run([*inspector, *project.argv, *call])
    assert refused.returncode == 5, refused.stderr
    assert "RUN_NOT_FOUND" in refused.stdout


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_few_seconds_of_load_bring_no_error(inspector, project, transport: str):
    call = ["--method", "tools/call", "--tool-name", "get_status", *LOAD]
    if transport == "stdio":
        ran = await asyncio.to_thread(project.run, [*inspector, *project.argv, *call])
    else:
        async with listening(project.home) as url:
            bearer = f"Authorization: Bearer {load_token(project.home)}"
            argv = [*inspector, url, "--transport", "http", "--header", bearer, *call]
            ran = await asyncio.to_thread(project.run, argv)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    print(transport, json.dumps({k: found[k] for k in ("requests", "throughput", "latencyMs")}))
    assert found["requests"] > 50, found
    assert (found["errors"], found["toolErrors"]) == (0, 0), found
