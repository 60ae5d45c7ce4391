"""The tools as a client sees them: names, schemas, hints, size."""

import hashlib
import inspect
import json
from pathlib import Path

import pytest
from mcp import Client

from engine.core.errors import UserError
from engine.core.reply import LEAST_ROLLOUT_CHARS, MOST_ROLLOUT_CHARS, MOST_ROLLOUTS
from engine.home.rows import DEFAULT_GPU_HOURS, NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.reading.rollout_pages import RolloutQuery
from engine.runs.submit.requests import DryRunRequest, EvaluationRequest, TrainRequest
from engine.serving.chat_request import ChatRequest
from mcp_server.api import verbs
from mcp_server.protocol.app import build_server
from mcp_server.protocol.tools import all_tools

NAMES = [
    "get_status",
    "push_env",
    "dry_run",
    "estimate_cost",
    "submit_train",
    "wait_run",
    "read_logs",
    "read_rollouts",
    "evaluate",
    "compare_runs",
    "diagnose",
    "curate",
    "deploy",
    "chat",
    "cancel_run",
    "read_playbook",
]
MOST_BYTES = 12_600  # of names, descriptions and input schemas, for at most 16 tools
ROOM_BYTES = 900  # for each tool that is still to come
FORBIDDEN = {"anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "title"}


def surface(home: Home) -> dict[str, dict]:
    return {
        tool.name: {
            "name": tool.name,
            "description": tool.description,
            "inputSchema": tool.parameters,
        }
        for tool in all_tools(home, ())
    }


# Of everything a client is told about the tools. It changes with them and with nothing else: no
# environment, run or file may say a word here. Print the new one with pytest -vv and read the diff.
SURFACE = "42d67c0941b0f3520fbe22846e7bcffe53c07ea977e73b1904af03277f638c6e"


def test_what_agents_are_told_of_the_tools_is_pinned(home: Home):
    told = [
        {
            "name": tool.name,
            "title": tool.title,
            "description": tool.description,
            "inputSchema": tool.parameters,
            "outputSchema": tool.fn_metadata.output_schema,
            "hints": tool.annotations.model_dump() if tool.annotations else None,
        }
        for tool in all_tools(home, ())
    ]
    assert hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest() == SURFACE


def test_the_limits_of_read_rollouts_are_the_engines(home: Home):
    (tool,) = [tool for tool in all_tools(home, ()) if tool.name == "read_rollouts"]
    shown = tool.parameters["properties"]
    assert (shown["limit"]["minimum"], shown["limit"]["maximum"]) == (1, MOST_ROLLOUTS)
    ends = (shown["max_chars"]["minimum"], shown["max_chars"]["maximum"])
    assert ends == (LEAST_ROLLOUT_CHARS, MOST_ROLLOUT_CHARS)
    for allowed in (shown["limit"]["maximum"], shown["limit"]["minimum"]):
        RolloutQuery("r-1", limit=allowed, max_chars=ends[0]).check()
    with pytest.raises(UserError):
        RolloutQuery("r-1", limit=MOST_ROLLOUTS + 1).check()


def keys_of(value) -> set[str]:
    if isinstance(value, dict):
        return set(value) | set().union(*(keys_of(item) for item in value.values()), set())
    if isinstance(value, list):
        return set().union(*(keys_of(item) for item in value), set())
    return set()


def test_the_tools_are_those_of_the_loop_in_its_order(home: Home):
    assert list(surface(home)) == NAMES


def test_the_surface_leaves_room_for_sixteen_tools(home: Home):
    line = json.dumps(list(surface(home).values()), separators=(",", ":"), ensure_ascii=False)
    assert len(line.encode()) <= MOST_BYTES - ROOM_BYTES * (16 - len(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_an_input_schema_is_flat_and_plain(home: Home, name: str):
    schema = surface(home)[name]["inputSchema"]
    assert schema["type"] == "object"
    assert not keys_of({k: v for k, v in schema.items() if k != "properties"}) & FORBIDDEN
    for argument, part in schema["properties"].items():
        assert not keys_of(part) & FORBIDDEN, argument
        assert part["type"] in ("string", "integer", "number", "boolean", "array", "object")
        if part["type"] == "array":
            # Messages and schemas of tools are OpenAI's own, steps of a plan are checked by the
            # engine; no schema of them stands here.
            items = "object" if argument in ("messages", "tools", "then") else "string"
            assert part["items"] == {"type": items}
    assert "null" not in json.dumps(schema)


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_says_what_it_is_for_in_few_words(home: Home, name: str):
    about = surface(home)[name]["description"]
    assert 40 <= len(about) <= 400
    assert "  " not in about and "\n" not in about


async def test_a_client_gets_hints_titles_and_output_schemas(home: Home):
    async with Client(build_server(home, [])) as client:
        tools = (await client.list_tools()).tools
    for tool in tools:
        hints = tool.annotations
        assert tool.title and hints
        assert None not in (
            hints.read_only_hint,
            hints.destructive_hint,
            hints.idempotent_hint,
            hints.open_world_hint,
        )
        assert hints.destructive_hint is False and hints.open_world_hint is False
        if tool.name == "read_playbook":
            assert tool.output_schema is None
        else:
            assert tool.output_schema["required"] == ["summary", "next", "warnings"]


async def test_both_eras_offer_the_same_tools(home: Home):
    seen = []
    for mode in ("auto", "legacy"):
        async with Client(build_server(home, []), mode=mode) as client:
            seen.append([tool.model_dump() for tool in (await client.list_tools()).tools])
    assert seen[0] == seen[1]


REQUESTS = {
    "dry_run": DryRunRequest,
    "estimate_cost": TrainRequest,
    "submit_train": TrainRequest,
    "evaluate": EvaluationRequest,
    "chat": ChatRequest,
}


def test_defaults_are_those_of_the_verbs(home: Home):
    for tool in all_tools(home, ()):
        taker = REQUESTS.get(tool.name, getattr(verbs, tool.name))
        verb = inspect.signature(taker).parameters
        for argument, part in tool.parameters["properties"].items():
            assert argument in verb, f"{tool.name}.{argument}"
            if (tool.name, argument) == ("submit_train", "max_gpu_hours"):
                assert part["default"] == DEFAULT_GPU_HOURS  # a resumed run's own, see the guard
            elif "default" in part:
                assert part["default"] == verb[argument].default, f"{tool.name}.{argument}"


async def test_a_tool_call_reaches_its_verb_with_every_argument(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    calls: dict[str, dict] = {}
    samples = {"string": "x", "integer": 5, "number": 1.5, "boolean": True, "object": {"steps": 3}}
    samples["array"] = ["a", "b"]

    def spy(name: str):
        bind = inspect.signature(getattr(verbs, name))

        def verb(*args, **kwargs):
            seen = bind.bind(*args, **kwargs).arguments
            calls[name] = vars(seen["request"]) if "request" in seen else seen
            return "prose" if name == "read_playbook" else {"summary": "s"}

        return verb

    for name in NAMES:
        monkeypatch.setattr(verbs, name, spy(name))
    root = Path("/some/root")
    async with Client(build_server(home, [root])) as client:
        for tool in (await client.list_tools()).tools:
            given = {}
            for argument, part in tool.input_schema["properties"].items():
                given[argument] = part["enum"][-1] if "enum" in part else samples[part["type"]]
                if part.get("items") == {"type": "object"}:
                    given[argument] = [{"role": "user"}]
                if argument == "max_chars":
                    given[argument] = 60
            result = await client.call_tool(tool.name, given)
            assert not result.is_error, result.content
            seen = calls[tool.name]
            assert {name: seen[name] for name in given} == given
    assert calls["push_env"]["roots"] == (root,)
    assert calls["deploy"]["roots"] == (root,)


async def test_a_resume_that_names_no_cap_has_the_one_of_the_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    with Store(home) as store:
        row = store.insert_run(
            NewRun("sums-sft", "train", "sft", "sums@0", "pebble", max_gpu_hours=0.4)
        )
    caps = []

    def submit(home, request):
        caps.append(request.max_gpu_hours)
        return {"summary": "s"}

    monkeypatch.setattr(verbs, "submit_train", submit)
    async with Client(build_server(home, [])) as client:
        for given in ({}, {"max_gpu_hours": None}, {"max_gpu_hours": 3}):
            result = await client.call_tool("submit_train", {"resume": row.run_id} | given)
            assert not result.is_error, result.content
    assert caps == [0.4, 0.4, 3]


async def test_dry_run_of_a_data_file_says_what_is_in_it_in_tokens_of_the_model(
    home: Home, tmp_path: Path
):
    inside = tmp_path / "project"
    inside.mkdir()
    row = json.dumps({"question": "2 + 2 = ?", "answer": "4"})
    (inside / "train.jsonl").write_text(f"{row}\n{{\n")
    (tmp_path / "outside.jsonl").write_text(row)
    async with Client(build_server(home, [inside])) as client:
        looked_into = await client.call_tool("dry_run", {"env_id": "train.jsonl"})
        (inside / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
        outside = [str(tmp_path / "outside.jsonl"), "link.jsonl"]
        refused = [await client.call_tool("dry_run", {"env_id": path}) for path in outside]
    report = looked_into.structured_content
    assert report["rows"] == 1 and [bad["line"] for bad in report["bad_rows"]] == [2]
    assert report["tokens"]["model"] == "pebble" and report["tokens"]["answer"]["max"] > 0
    assert all(reply.is_error and "PATH_OUTSIDE_ROOTS" in str(reply.content) for reply in refused)
