"""`chat` over a real client and server: conversations, tools, progress, answers in parts."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from stand_ins import stand_in

from engine.home.run_dir import Home
from engine.machine.processes import deployments
from engine.serving.chat_request import Patience
from mcp_server.api import verbs
from mcp_server.protocol import threads
from mcp_server.protocol.app import build_server

pytestmark = pytest.mark.timeout(60)

TESTS = Path(__file__).parents[2]
QUESTION = {"model": "pebble", "message": "Repeat: the quick brown planet jumps"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def served(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deployments are a stand-in, which repeats what it was sent."""
    stand_in(monkeypatch, server=TESTS / "engine" / "fake_server.py")
    stand_in(monkeypatch, trainer=TESTS / "engine" / "fake_trainer.py")
    yield
    stop_all(home)


@pytest.fixture
def gate(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real deployment samples as many tokens as this file says; each of them is reported."""
    stand_in(monkeypatch, server=TESTS / "helpers" / "gated_server.py")
    monkeypatch.setattr(threads, "TOKENS_EVERY_S", 0.0)
    file = home.root / "tokens"
    file.write_text("100000")
    yield file
    file.write_text("100000")
    stop_all(home)


def stop_all(home: Home) -> None:
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


async def answered(client: Client, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool("chat", arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_conversation_with_tools_goes_on_over_the_protocol(
    home: Home, served: None, mode: str
):
    async with Client(build_server(home, []), mode=mode) as client:
        first = await answered(client, **QUESTION, system="Be brief.", tools=[LOOK], seed=7)
        (call,) = first["answers"][0]["tool_calls"]
        assert call["function"]["name"] == "look"
        going_on = first["next"][0]["arguments"]
        going_on["messages"][0]["content"] = "a wall"
        second = await answered(client, **going_on, compare_to="")
        assert second["conversation"] == first["conversation"]
        assert second["answers"][0]["answer"].endswith("jumps a wall")
        refused = await client.call_tool("chat", {"model": "pebble", "messages": [{"role": "x"}]})
        error = json.loads(refused.content[0].text)
        assert refused.is_error and error["code"] == "BAD_ARGUMENT" and "role" in error["message"]
        refused = await client.call_tool("chat", {"model": "pebble", "messages": ["hi"]})
        assert refused.is_error and "BAD_ARGUMENT" in refused.content[0].text


@pytest.mark.worker
async def test_tokens_are_reported_and_what_there_is_is_returned_when_time_is_up(
    home: Home, gate: Path, monkeypatch: pytest.MonkeyPatch
):
    told: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    hurried = Patience(call_s=1.5, start_s=50, stall_s=50)
    async with Client(build_server(home, [])) as client:
        whole = (await answered(client, **QUESTION))["answers"][0]
        gate.write_text(str(whole["tokens"] + 2))
        with monkeypatch.context() as patch:
            patch.setattr(verbs, "chat", partial(verbs.chat, patience=hurried))
            result = await client.call_tool("chat", QUESTION, progress_callback=hear)
        body = result.structured_content
        assert body is not None
        (part,) = body["answers"]
        assert (part["partial"], part["tokens"], part["finish_reason"]) == (True, 2, "timeout")
        counted = [each for each in told if each[2] and each[2].startswith("pebble: ")]
        assert (2.0, 512.0, "pebble: 2 tokens") in counted
        assert [each[0] for each in told] == sorted(each[0] for each in told)
        gate.write_text("100000")
        (rest,) = (await answered(client, **body["next"][0]["arguments"]))["answers"]
    assert part["answer"] + rest["answer"] == whole["answer"] and "partial" not in rest


@pytest.mark.worker
async def test_a_call_that_nobody_waits_for_frees_the_model(home: Home, gate: Path):
    sampling = threading.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        if progress:
            sampling.set()

    async with Client(build_server(home, [])) as client:
        tokens = (await answered(client, **QUESTION))["answers"][0]["tokens"]
        gate.write_text(str(tokens + 1))
        async with anyio.create_task_group() as group:
            group.start_soon(partial(client.call_tool, "chat", QUESTION, progress_callback=hear))
            assert await anyio.to_thread.run_sync(sampling.wait, 20)
            group.cancel_scope.cancel()
        gate.write_text("100000")
        (row,) = deployments.living(home)
        with anyio.fail_after(20):
            while not deployments.is_idle(home.deployment(row.deployment_id)):
                await anyio.sleep(0.05)
    calls = [json.loads(line) for line in home.audit.read_text().splitlines()]
    assert [call["result"] for call in calls] == ["ok", "cut short"]
