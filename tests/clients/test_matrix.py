"""In memory, over stdio and over HTTP, in the 2025 era and the 2026 one: the same answers."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from echo_env import write_env
from http_server import client_of, listening
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import (
    ElicitResult,
    EmptyResult,
    PromptReference,
    ResourceTemplateReference,
    SubscribeRequest,
    SubscribeRequestParams,
)
from run_configs import train_config
from task_client import Taker, ask

import playbook
from engine.core.files import Appender, take_lock, write_json
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from mcp_server.access.bearer import load_token
from mcp_server.cli.client_config import serve_argv
from mcp_server.protocol.app import METRICS_EVERY_S, build_server
from mcp_server.protocol.tools import NEEDS

TRANSPORTS = ("memory", "stdio", "http")
OLD, NEW = "legacy", "2026-07-28"


@asynccontextmanager
async def connected(
    transport: str, era: str, project: Any, **options: Any
) -> AsyncIterator[Client]:
    """A client of the era, the server reached in that way."""
    if transport == "memory":
        async with Client(
            build_server(project.home, [project.folder]), mode=era, **options
        ) as client:
            yield client
    elif transport == "stdio":
        command, *args = serve_argv(project.folder, project.home.root)
        server = StdioServerParameters(command=command, args=args, env=dict(os.environ))
        async with Client(server, mode=era, **options) as client:
            yield client
    else:
        async with listening(project.home, "--root", str(project.folder)) as url:
            token = load_token(project.home)
            async with client_of(url, token, era, **options) as client:
                yield client


@contextmanager
def running(home: Home) -> Iterator[tuple[RunDir, Appender]]:
    """A run that trains as far as anybody can see: its row, its folder and the lock of the living.

    It is done when this ends.
    """
    locks: list[int] = []

    def prepare(run_id: str) -> None:
        # Locked before its row can be seen: a server that looks for work passes it over.
        run = home.run(run_id)
        run.create()
        write_json(run.config, train_config(run.id, algorithm="sft"))
        lock = take_lock(run.lock)
        assert lock is not None
        locks.append(lock)

    with Store(home) as store:
        new = NewRun("arith-sft", "train", "sft", "a@0", "pebble")
        run = home.run(store.insert_run(new, prepare).run_id)
        (lock,) = locks
        try:
            store.lease_next(["cpu"])
            store.set_state(run.id, "running", only_from={"preparing"})
            with Appender(run.events) as events, Appender(run.metrics) as metrics:
                events.append({"event": "started", "time": 0.5, "total_steps": 4})
                metrics.append({"step": 1, "time": 1.0, "loss": 2.0})
                yield run, metrics
                metrics.append({"step": 4, "time": 4.0, "loss": 1.0})
            store.set_state(run.id, "done", only_from={"running"})
        finally:
            os.close(lock)


async def refused(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert result.is_error and result.structured_content is None
    (part,) = result.content
    assert "\n" not in part.text and len(part.text) <= 1_000
    return json.loads(part.text)


async def answered(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    (part,) = result.content
    assert not result.is_error, part.text
    assert json.loads(part.text) == result.structured_content
    return result.structured_content


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("transport", "era"),
    [
        pytest.param("memory", OLD),
        pytest.param("memory", NEW),
        pytest.param("stdio", OLD),
        pytest.param("http", NEW),
        pytest.param("stdio", NEW, marks=pytest.mark.long),
        pytest.param("http", OLD, marks=pytest.mark.long),
    ],
)
async def test_a_client_gets_the_same_whichever_way_it_comes(project, transport: str, era: str):
    write_env(project.folder)
    async with connected(transport, era, project) as client:
        await _tools_and_errors(client)
        env_id = (await answered(client, "push_env", path="echo"))["env_id"]
        with running(project.home) as (run, _):
            told: list[tuple[float, float | None]] = []

            async def heard(step: float, total: float | None, line: str | None) -> None:
                told.append((step, total))

            waited = await client.call_tool(
                "wait_run", {"run_id": run.id, "timeout_s": 0.5}, progress_callback=heard
            )
            assert waited.structured_content["state"] == "running"
            assert (1.0, 4.0) in told
        assert (await answered(client, "wait_run", run_id=run.id))["state"] == "done"
        await _resources(client, env_id, run.id)
        await _prompts_and_completion(client, env_id, run.id)
        if era == OLD:
            await _lacking(client, run.id)


async def _tools_and_errors(client: Client) -> None:
    tools = (await client.list_tools()).tools
    assert len(tools) == len(NEEDS) and all(tool.annotations and tool.title for tool in tools)
    assert [tool.name for tool in tools if tool.output_schema is None] == ["read_playbook"]
    status = await answered(client, "get_status")
    assert status["hardware"]["devices"] and status["next"] and status["warnings"] == []
    prose = await client.call_tool("read_playbook", {})
    assert prose.content[0].text == playbook.read() and prose.structured_content is None
    for tool, arguments, code, named in [
        ("get_status", {"scop": "runs"}, "UNKNOWN_ARGUMENT", "scope"),
        ("wait_run", {"run_id": "nobody"}, "RUN_NOT_FOUND", "No run was submitted"),
        ("wait_run", {"run_id": 4}, "BAD_ARGUMENT", "text"),
        ("get_stats", {}, "BAD_ARGUMENT", "get_status"),
        ("push_env", {"path": "/etc"}, "PATH_OUTSIDE_ROOTS", "--root"),
    ]:
        error = await refused(client, tool, **arguments)
        assert error["code"] == code and named in error["hint"], error


async def _resources(client: Client, env_id: str, run_id: str) -> None:
    static = {str(item.uri) for item in (await client.list_resources()).resources}
    assert static == {
        "playbook://TRAINING.md",
        "train://hardware",
        "train://settings",
        "train://skills",
    }
    assert len((await client.list_resource_templates()).resource_templates) == 7
    for uri, mime, inside in [
        ("playbook://TRAINING.md/loop", "text/markdown", "#"),
        (f"env://{env_id}/source", "text/markdown", "load_environment"),
        (f"run://{run_id}/metrics", "application/json", '"loss"'),
        (f"run://{run_id}/config", "application/json", '"steps":4'),
        ("train://hardware", "application/json", '"devices"'),
    ]:
        (content,) = (await client.read_resource(uri)).contents
        assert content.mime_type == mime and inside in content.text, uri
    with pytest.raises(MCPError, match="RUN_NOT_FOUND"):
        await client.read_resource("run://nobody/metrics")


async def _prompts_and_completion(client: Client, env_id: str, run_id: str) -> None:
    prompts = {prompt.name for prompt in (await client.list_prompts()).prompts}
    assert prompts == {"train", "diagnose_run", "design_reward", "plan_next_experiment"}
    (message,) = (await client.get_prompt("diagnose_run", {"run_id": run_id})).messages
    assert run_id in message.content.text
    with pytest.raises(MCPError):
        await client.get_prompt("diagnose_run", {})
    for ref, name, start, expected in [
        (ResourceTemplateReference(uri="run://{run_id}/metrics"), "run_id", "ari", run_id),
        (ResourceTemplateReference(uri="env://{env_id}/source"), "env_id", "ec", env_id),
        (ResourceTemplateReference(uri="playbook://TRAINING.md/{section}"), "section", "l", "loop"),
        (PromptReference(name="diagnose_run"), "run_id", "", run_id),
    ]:
        found = await client.complete(ref, {"name": name, "value": start})
        assert expected in found.completion.values


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "transport",
    ["memory", *(pytest.param(way, marks=pytest.mark.clients) for way in ("stdio", "http"))],
)
@pytest.mark.parametrize("era", [OLD, NEW])
async def test_a_person_is_asked_before_a_spend_where_the_client_can_ask(
    project, transport: str, era: str
):
    write_env(project.folder)
    project.home.config_file.write_text("auto_approve_gpu_hours = 0\n")
    answers = [
        ElicitResult(action="cancel"),
        ElicitResult(action="accept", content={"agree": False}),
        ElicitResult(action="accept", content={"agree": True}),
    ]
    questions: list[str] = []

    async def ask_person(context: Any, params: Any) -> ElicitResult:
        questions.append(params.message)
        return answers.pop(0)

    plan = {"env_id": "echo", "settings": {"steps": 1}}
    with running(project.home):  # what is submitted waits for the device and never starts
        async with connected(transport, era, project) as client:
            await answered(client, "push_env", path="echo")
            error = await refused(client, "submit_train", **plan)
            assert error["code"] == "NOT_APPROVED" and "Ask the user" in error["hint"]
        options = {"elicitation_callback": ask_person}
        async with connected(transport, era, project, **options) as client:
            for _ in range(2):
                error = await refused(client, "submit_train", **plan)
                assert error["code"] == "NOT_APPROVED" and "nobody agreed" in error["message"]
            assert (await answered(client, "get_status"))["queue"] == []
            queued = await answered(client, "submit_train", **plan)
            assert queued["state"] == "queued" and answers == []
            assert len(questions) == 3 and "GPU-hours" in questions[0]
            await answered(client, "cancel_run", run_id=queued["run_id"])
    results = [json.loads(line)["result"] for line in project.home.audit.read_text().splitlines()]
    assert results[-2:] == ["ok", "ok"]
    assert results.count("asked") == (3 if era == NEW else 0)


async def _lacking(client: Client, run_id: str) -> None:
    """Tasks and subscriptions are of the new era; the old one is told so, and nothing else."""
    capabilities = client.server_capabilities
    assert capabilities.resources and not capabilities.resources.subscribe
    with pytest.raises(MCPError, match="not found"):
        await ask(client, "tasks/get", f"{run_id}:end:1:")
    subscribe = SubscribeRequest(params=SubscribeRequestParams(uri=f"run://{run_id}/metrics"))
    with pytest.raises(MCPError, match="not found"):
        await client.session.send_request(subscribe, EmptyResult)


@pytest.mark.clients  # news of metrics comes every ten seconds
@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_in_the_new_era_a_wait_is_a_task_and_metrics_are_news(project, transport: str):
    taker = Taker()
    async with connected(transport, NEW, project, extensions=[taker]) as client:
        with running(project.home) as (run, metrics):
            await client.call_tool("wait_run", {"run_id": run.id})
            (task,) = taker.taken
            assert (await ask(client, "tasks/get", task.task_id))["status"] == "working"
            uri = f"run://{run.id}/metrics"
            async with client.listen(resource_subscriptions=[uri]) as events:
                metrics.append({"step": 2, "time": 2.0, "loss": 1.5})
                event = await asyncio.wait_for(anext(aiter(events)), 2.5 * METRICS_EVERY_S)
                assert event.uri == uri
        over = await ask(client, "tasks/get", task.task_id)
    assert over["status"] == "completed"
    assert over["result"]["structuredContent"]["state"] == "done"
