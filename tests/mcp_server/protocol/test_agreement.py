"""Who may agree to a spend above the home's limit, and what is no agreement.

That the question reaches a person in both eras over every transport is in
tests/clients/test_matrix.py.
"""

import json
from typing import Any

import anyio
import pytest
from echo_env import write_env
from http_server import client_of, listening
from mcp import Client, MCPError
from mcp.types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    ElicitResult,
    InputRequiredResult,
)

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.runs.submit.requests import TrainRequest
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import add_key
from mcp_server.api import verbs
from mcp_server.protocol import agreement
from mcp_server.protocol.agreement import SPEND
from mcp_server.protocol.app import build_server

YES = ElicitResult(action="accept", content={"agree": True})


async def agrees(context: Any, params: Any) -> ElicitResult:
    return YES


@pytest.fixture
def approvals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a person had agreed, for each submit that was tried: those without are refused."""
    tried: list[bool] = []

    def submit(home: Home, request: TrainRequest) -> dict[str, Any]:
        tried.append(request.approved)
        if not tried[-1]:
            raise UserError("NOT_APPROVED", "it likely takes 9.00 GPU-hours", hint="Ask the user.")
        return {"run_id": "r-1", "state": "queued", "summary": "r-1 is queued."}

    monkeypatch.setattr(verbs, "submit_train", submit)
    return tried


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "answer",
    [
        ElicitResult(action="decline"),
        ElicitResult(action="cancel"),
        ElicitResult(action="decline", content={"agree": True}),
        ElicitResult(action="accept"),
        ElicitResult(action="accept", content={}),
        ElicitResult(action="accept", content={"agree": "true"}),
        ElicitResult(action="accept", content={"agree": 1}),
    ],
)
async def test_nothing_but_a_clear_yes_is_an_agreement(
    home: Home, approvals: list[bool], mode: str, answer: ElicitResult
):
    async def answers(context: Any, params: Any) -> ElicitResult:
        return answer

    async with Client(build_server(home, []), mode=mode, elicitation_callback=answers) as client:
        result = await client.call_tool("submit_train", {"env_id": "a"})
    assert result.is_error and True not in approvals
    assert json.loads(result.content[0].text)["code"] == "NOT_APPROVED"


async def test_an_answer_to_a_question_that_was_not_asked_is_none(
    home: Home, approvals: list[bool]
):
    async with Client(build_server(home, []), elicitation_callback=agrees) as client:

        async def call(kind: Any, **more: Any) -> Any:
            params = CallToolRequestParams(name="submit_train", **more)
            request = CallToolRequest(params=params)
            return await client.session.send_request(request, kind)

        plan, yes = {"env_id": "a"}, {SPEND: YES}
        for state in (SPEND, "AAAA"):
            with pytest.raises(MCPError):
                await call(CallToolResult, arguments=plan, input_responses=yes, request_state=state)
        asked = await call(InputRequiredResult, arguments=plan, input_responses=yes)
        assert asked.input_requests and True not in approvals
        sealed = {"input_responses": yes, "request_state": asked.request_state}
        dearer = {"env_id": "a", "max_gpu_hours": 500}
        with pytest.raises(MCPError):
            await call(CallToolResult, arguments=dearer, **sealed)
        assert True not in approvals, "what was agreed to is one call, not any call"
        done = await call(CallToolResult, arguments=plan, **sealed)
    assert done.structured_content["run_id"] == "r-1"
    assert approvals[-1] is True


async def test_a_person_who_does_not_answer_does_not_agree(
    home: Home, approvals: list[bool], monkeypatch: pytest.MonkeyPatch
):
    async def silent(context: Any, params: Any) -> ElicitResult:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(agreement, "MAX_WAIT_S", 0.1)
    server = build_server(home, [])
    async with Client(server, mode="legacy", elicitation_callback=silent) as client:
        result = await client.call_tool("submit_train", {"env_id": "a"})
    assert result.is_error and "nobody agreed" in result.content[0].text
    assert approvals == [False, False]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
async def test_a_key_that_may_not_do_everything_cannot_agree(home: Home, mode: str):
    home.config_file.write_text("auto_approve_gpu_hours = 0\n")
    load_token(home)
    token = add_key(home, "night", ("read", "train"))[1]
    asked = []

    async def answers(context: Any, params: Any) -> ElicitResult:
        asked.append(params)
        return YES

    folder = write_env(home.root.parent)
    async with (
        listening(home, "--root", str(folder.parent)) as url,
        client_of(url, token, mode, elicitation_callback=answers) as client,
    ):
        pushed = await client.call_tool("push_env", {"path": str(folder)})
        assert not pushed.is_error, pushed.content[0].text
        result = await client.call_tool("submit_train", {"env_id": "echo"})
    assert result.is_error and asked == []
    assert json.loads(result.content[0].text)["code"] == "NOT_APPROVED"
