"""What passes the guard and what comes out of it, in both protocol eras."""

import json
import logging

import pytest
from mcp import Client

from engine.core.errors import UserError
from engine.core.reply import RESULT_CHARS
from engine.home.run_dir import Home
from mcp_server.access.keys import LOCAL
from mcp_server.access.log import log_file
from mcp_server.api import verbs
from mcp_server.protocol.app import build_server

ERAS = ("auto", "legacy")


async def refused(home: Home, mode: str, tool: str, arguments: dict, **options) -> dict:
    """The payload of the error result that a call gives."""
    async with Client(build_server(home, [], **options), mode=mode) as client:
        result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert result.structured_content is None
    (part,) = result.content
    assert len(part.text) <= 1000 and "\n" not in part.text
    payload = json.loads(part.text)
    assert {"code", "message", "hint", "retryable"} <= set(payload)
    return payload


@pytest.mark.parametrize("mode", ERAS)
async def test_an_unknown_argument_is_refused_with_the_nearest_name(home: Home, mode: str):
    payload = await refused(home, mode, "get_status", {"scpoe": "runs"})
    assert payload["code"] == "UNKNOWN_ARGUMENT"
    assert payload["field"] == "scpoe"
    assert "Did you mean scope?" in payload["hint"]


@pytest.mark.parametrize("mode", ERAS)
async def test_a_setting_given_flat_is_sent_into_settings(home: Home, mode: str):
    payload = await refused(home, mode, "submit_train", {"env_id": "a", "learning_rte": 1e-4})
    assert payload["code"] == "UNKNOWN_ARGUMENT"
    assert 'settings={"learning_rate": ...}' in payload["hint"]


@pytest.mark.parametrize(
    ("tool", "given"),
    [("evaluate", "max_gpu_hours"), ("evaluate", "steps"), ("estimate_cost", "max_gpu_hours")],
)
async def test_what_is_no_setting_either_is_not_sent_into_settings(
    home: Home, tool: str, given: str
):
    payload = await refused(home, ERAS[0], tool, {"env_id": "a", given: 1})
    assert payload["code"] == "UNKNOWN_ARGUMENT" and payload["field"] == given
    assert "settings=" not in payload["hint"] and "Available: " in payload["hint"]


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize(
    ("tool", "arguments", "field", "hint"),
    [
        ("wait_run", {}, "run_id", "It takes a text."),
        ("wait_run", {"run_id": None}, "run_id", "It takes a text."),
        ("get_status", {"scop": None}, "scop", "Did you mean scope?"),
        ("compare_runs", {"run_ids": ["a", "b"]}, "run_ids", "Did you mean ids?"),
        ("wait_run", {"run_id": "r", "until": "never"}, "until", "end, first_step"),
        ("wait_run", {"run_id": "r", "timeout_s": 3601}, "timeout_s", "from 0 to 3600"),
        ("wait_run", {"run_id": 3}, "run_id", "text"),
        ("get_status", {"limit": True}, "limit", "whole number"),
        ("get_status", {"limit": 1.5}, "limit", "whole number"),
        ("get_status", {"limit": "5"}, "limit", "whole number"),
        ("dry_run", {"env_id": "a", "samples": "5"}, "samples", "whole number"),
        ("wait_run", {"run_id": "r", "timeout_s": "1"}, "timeout_s", "number"),
        ("push_env", {"path": "p", "install": 1}, "install", "boolean"),
        ("push_env", {"path": "p", "install": "yes"}, "install", "boolean"),
        ("submit_train", {"settings": [1]}, "settings", "object"),
        ("submit_train", {"max_gpu_hours": 0}, "max_gpu_hours", "number"),
        ("submit_train", {"max_gpu_hours": "much"}, "max_gpu_hours", "number"),
        ("evaluate", {"env_id": "a", "models": ["m"] * 9}, "models", "list"),
        ("evaluate", {"env_id": "a", "models": []}, "models", "1 to 8"),
        ("evaluate", {"env_id": "a", "models": [1]}, "models.0", ""),
        ("deploy", {"run_id": "r", "format": "gguf"}, "format", "adapter, merged"),
        ("evaluate", {"env_id": "a", "models": ["m"], "regrade": "r"}, "models", "stored"),
        ("evaluate", {"env_id": "a", "regrad": "r"}, "regrad", "Did you mean regrade"),
        ("curate", {"source_ids": ["r"]}, "name", "arith-best"),
        ("curate", {"source_ids": ["r"], "name": "x", "select": "newest"}, "select", "best_n"),
    ],
)
async def test_a_wrong_value_is_refused_in_our_own_words(
    home: Home, mode: str, tool: str, arguments: dict, field: str, hint: str
):
    payload = await refused(home, mode, tool, arguments)
    assert payload["code"] in ("BAD_ARGUMENT", "UNKNOWN_ARGUMENT")
    assert payload["field"] == field
    assert hint in payload["hint"]
    assert "pydantic" not in json.dumps(payload) and "errors." not in payload["message"]


@pytest.mark.parametrize("name", ["delete_run", "delete_env", "seal_env"])
async def test_who_wants_to_delete_is_told_how_and_not_sent_to_cancel(home: Home, name: str):
    payload = await refused(home, ERAS[0], name, {"run_id": "a-sft-1"})
    assert payload["code"] == "BAD_ARGUMENT" and "Did you mean" not in payload["hint"]
    assert "does it with `honesmith" in payload["hint"]


@pytest.mark.parametrize("mode", ERAS)
async def test_an_unknown_tool_is_refused_with_the_names_there_are(home: Home, mode: str):
    payload = await refused(home, mode, "submit_training", {})
    assert payload["code"] == "BAD_ARGUMENT"
    assert "Did you mean submit_train?" in payload["hint"]


@pytest.mark.parametrize("mode", ERAS)
async def test_a_refusal_of_the_engine_arrives_whole(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args, **kwargs):
        raise UserError(
            "BUDGET", "6 > 2", hint="max_gpu_hours=7", field="max_gpu_hours", playbook="loop"
        )

    monkeypatch.setattr(verbs, "submit_train", refuse)
    payload = await refused(home, mode, "submit_train", {"env_id": "a"})
    assert payload == {
        "code": "BUDGET",
        "message": "6 > 2",
        "field": "max_gpu_hours",
        "hint": "max_gpu_hours=7",
        "retryable": False,
        "playbook": "loop",
    }


@pytest.mark.parametrize("mode", ERAS)
async def test_a_crash_of_ours_is_told_without_its_traceback(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    def crash(*args, **kwargs):
        raise RuntimeError("secret detail at /etc/passwd")

    monkeypatch.setattr(verbs, "get_status", crash)
    payload = await refused(home, mode, "get_status", {})
    assert payload["code"] == "INTERNAL"
    assert "secret detail" not in json.dumps(payload)
    logged = log_file(home).read_text()
    assert "secret detail" in logged and "Traceback" in logged


async def test_a_result_that_cannot_be_shown_is_a_crash_of_ours(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verbs, "get_status", lambda *a, **k: {"next": 3})
    assert (await refused(home, "auto", "get_status", {}))["code"] == "INTERNAL"


@pytest.mark.parametrize("mode", ERAS)
async def test_a_result_is_the_same_as_structure_and_as_text(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    dirty = {"summary": "ok\x1b[2J", "runs": [{"id": "r", "note": None}], "loss": float("nan")}
    monkeypatch.setattr(verbs, "get_status", lambda *a, **k: dirty)
    async with Client(build_server(home, []), mode=mode) as client:
        result = await client.call_tool("get_status", {})
    assert not result.is_error
    assert json.loads(result.content[0].text) == result.structured_content
    assert result.structured_content == {
        "summary": "ok",
        "next": [],
        "warnings": [],
        "runs": [{"id": "r"}],
    }


@pytest.mark.parametrize("mode", ERAS)
async def test_no_result_is_longer_than_ten_thousand_characters(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    rows = {"rows": [{"text": "x" * 500}] * 100}
    monkeypatch.setattr(verbs, "read_logs", lambda *a, **k: rows)
    monkeypatch.setattr(verbs, "read_playbook", lambda *a, **k: "y" * 30_000)
    async with Client(build_server(home, []), mode=mode) as client:
        logs = await client.call_tool("read_logs", {"run_id": "r"})
        prose = await client.call_tool("read_playbook", {})
    assert len(logs.content[0].text) <= RESULT_CHARS
    assert logs.structured_content["truncated"] is True
    assert len(prose.content[0].text) <= RESULT_CHARS
    assert prose.structured_content is None


async def test_an_optional_argument_given_as_null_takes_its_default(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(verbs, "get_status", lambda *a, **k: seen.append(a) or {})
    async with Client(build_server(home, [])) as client:
        result = await client.call_tool("get_status", {"scope": None, "limit": 7})
    assert not result.is_error
    assert seen == [(home, "all", 7, "", LOCAL)]


async def test_a_list_or_object_sent_as_json_text_is_understood(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(verbs, "compare_runs", lambda *a, **k: seen.append(a) or {})
    async with Client(build_server(home, [])) as client:
        await client.call_tool("compare_runs", {"ids": '["a", "b"]'})
    assert [call[:3] for call in seen] == [(home, ["a", "b"], "")]


async def test_a_read_only_server_offers_what_changes_nothing(home: Home):
    async with Client(build_server(home, [], read_only=True)) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
    assert names == {
        "get_status",
        "estimate_cost",
        "wait_run",
        "read_logs",
        "read_rollouts",
        "compare_runs",
        "diagnose",
        "read_playbook",
    }


@pytest.mark.parametrize("mode", ERAS)
async def test_a_read_only_server_refuses_what_it_hides(home: Home, mode: str):
    payload = await refused(home, mode, "submit_train", {"env_id": "a"}, read_only=True)
    assert payload["code"] == "READ_ONLY"


async def test_a_read_only_server_suggests_only_what_it_offers(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    after = [verbs.suggest("submit_train", env_id="a"), verbs.suggest("read_logs", run_id="r")]
    monkeypatch.setattr(verbs, "estimate_cost", lambda *a, **k: {"next": after})
    async with Client(build_server(home, [], read_only=True)) as client:
        result = await client.call_tool("estimate_cost", {"env_id": "a"})
    assert [call["tool"] for call in result.structured_content["next"]] == ["read_logs"]


def test_our_log_stays_out_of_the_protocol(home: Home):
    build_server(home, [])
    assert logging.getLogger("honesmith").propagate is False
