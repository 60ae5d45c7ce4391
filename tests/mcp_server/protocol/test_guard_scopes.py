"""Which key may call what: every tool and every resource against every set of scopes."""

import json
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from http_server import client_of, listening
from mcp import MCPError

from engine.core.errors import UserError
from engine.environments.push import push_env
from engine.environments.registry import check_judges
from engine.home.run_dir import Home
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import SCOPES, add_key
from mcp_server.access.sharing import share
from mcp_server.protocol.guard import envs_of, models_of
from mcp_server.protocol.tools import LOOK, NEEDS, all_tools

# The scope admin is none for a call: it says whose things the other scopes hold for.
SETS = [pick for size in (1, 2, 4) for pick in combinations(SCOPES[:4], size)] + [("admin",)]
VALUES = {"string": "nobody", "integer": 1, "number": 1, "boolean": False, "array": ["nobody"]}


def arguments_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What a call of a tool must have, none of which exists."""
    return {name: VALUES[schema["properties"][name]["type"]] for name in schema.get("required", [])}


def code_of(result: Any) -> str:
    return json.loads(result.content[0].text)["code"] if result.is_error else ""


def test_every_tool_needs_a_scope_and_what_only_looks_needs_read(home: Home):
    tools = all_tools(home, ())
    assert set(NEEDS) == {tool.name for tool in tools}
    for tool in tools:
        assert (NEEDS[tool.name] == "read") == (tool.annotations is LOOK), tool.name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
async def test_a_key_calls_exactly_what_its_scopes_allow(home: Home, mode: str):
    tokens = {pick: add_key(home, "-".join(pick), pick)[1] for pick in SETS}
    load_token(home)
    async with listening(home) as url:
        for pick, token in tokens.items():
            async with client_of(url, token, mode) as client:
                for tool in (await client.list_tools()).tools:
                    result = await client.call_tool(tool.name, arguments_of(tool.input_schema))
                    forbidden = code_of(result) == "FORBIDDEN"
                    assert forbidden == (NEEDS[tool.name] not in pick), (pick, tool.name)
                    if forbidden:
                        said = json.loads(result.content[0].text)
                        assert NEEDS[tool.name] in said["message"] and "key add" in said["hint"]
                for uri in ("train://hardware", "playbook://TRAINING.md", "run://nobody/config"):
                    try:
                        await client.read_resource(uri)
                        told = ""
                    except MCPError as error:
                        told = str(error)
                    assert ("FORBIDDEN" in told) == ("read" not in pick), (pick, uri, told)
    lines = [json.loads(line) for line in home.audit.read_text().splitlines()]
    denied = {(line["who"], line["tool"]) for line in lines if line["result"] == "FORBIDDEN"}
    assert ("read", "submit_train") in denied and ("read-train", "deploy") in denied
    assert ("train", "submit_train") not in denied


@pytest.mark.timeout(60)
async def test_a_key_that_only_reads_is_not_sent_to_what_it_may_not_call(home: Home):
    _, token = add_key(home, "reader", ["read"])
    load_token(home)
    async with listening(home) as url:
        async with client_of(url, token) as client:
            told = (await client.call_tool("get_status", {})).structured_content
        async with client_of(url, load_token(home)) as client:
            owner = (await client.call_tool("get_status", {})).structured_content
    assert {NEEDS[call["tool"]] for call in told["next"]} <= {"read"}
    assert any(NEEDS[call["tool"]] != "read" for call in owner["next"])


@pytest.mark.timeout(60)
async def test_completion_and_tasks_need_the_scope_read_too(home: Home):
    from mcp.types import ResourceTemplateReference

    _, token = add_key(home, "trainer", ["train"])
    load_token(home)
    reference = ResourceTemplateReference(uri="run://{run_id}/metrics")
    async with listening(home) as url, client_of(url, token) as client:
        with pytest.raises(MCPError, match="FORBIDDEN"):
            await client.complete(reference, {"name": "run_id", "value": ""})
        assert (await client.list_tools()).tools, "what is offered is no secret"


THIEF = """
import os

from envs import Score, SingleTurnEnv, Task


class Thief(SingleTurnEnv):
    def tasks(self):
        return [Task(f"t{n}", f"Say {n}.", str(n)) for n in range(40)]

    def score(self, task, completion):
        return Score(float(completion == task.answer))


def load_environment():
    return Thief()
"""


def thief(folder: Path, settings: str) -> Path:
    folder.mkdir()
    (folder / "environment.py").write_text(THIEF)
    (folder / "environment.toml").write_text(settings)
    return folder


@pytest.mark.timeout(90)
async def test_a_key_gives_its_environment_only_what_the_owner_agreed_to(
    home: Home, tmp_path: Path
):
    """A secret is a variable of the server: who may train may not read them all."""
    folder = thief(tmp_path / "thief", 'secrets = ["CLOUD_KEY"]\n[limits]\nnetwork = true\n')
    plain = thief(tmp_path / "plain", "")
    _, token = add_key(home, "trainer", ["train"])
    owner = load_token(home)
    async with listening(home, "--root", str(tmp_path)) as url:

        async def push(key: str, place: Path, **named: str) -> Any:
            async with client_of(url, key) as client:
                return await client.call_tool("push_env", {"path": str(place)} | named)

        refused = await push(token, folder)
        said = json.loads(refused.content[0].text)
        assert said["code"] == "FORBIDDEN"
        assert "the secret CLOUD_KEY and a network" in said["message"]
        assert 'key_secrets = ["CLOUD_KEY"] and key_network = true' in said["hint"]
        assert not list(home.root.rglob("thief")), "nothing of it is stored"
        asks = (await push(token, plain)).structured_content
        assert (asks["secrets"], asks["network"]) == ([], False)
        asks = (await push(owner, folder)).structured_content
        assert (asks["secrets"], asks["network"]) == (["CLOUD_KEY"], True)
        again = json.loads((await push(token, folder)).content[0].text)
        assert again["code"] == "FORBIDDEN", "that the local user has it gives no key its secrets"
        assert code_of(await push(token, folder, name="mine")) == "FORBIDDEN"
        home.config_file.write_text('key_secrets = ["CLOUD_KEY"]\n')
        said = json.loads((await push(token, folder, name="mine")).content[0].text)
        assert "CLOUD_KEY" not in said["message"] and "a network" in said["message"]
        home.config_file.write_text('key_secrets = ["CLOUD_KEY"]\nkey_network = true\n')
        assert not (await push(token, folder, name="mine")).is_error


@pytest.mark.timeout(60)
async def test_the_judge_of_an_environment_is_asked_by_other_keys_only_where_it_is_shared(
    home: Home, tmp_path: Path
):
    folder = thief(tmp_path / "judged", 'endpoints = ["openai:big"]\n')
    _, token = add_key(home, "trainer", ["train"])
    with pytest.raises(UserError, match=r"has no .endpoints.big"):
        push_env(home, folder)
    table = '[endpoints.big]\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\n'
    home.config_file.write_text(table)
    push_env(home, folder)
    share(home, "judged", may="use")
    async with (
        listening(home, "--root", str(tmp_path)) as url,
        client_of(url, token) as client,
    ):
        copy = {"path": str(folder), "name": "mine"}
        said = json.loads((await client.call_tool("push_env", copy)).content[0].text)
        assert "the model openai:big" in said["message"]
        assert "shared = true in [endpoints.big]" in said["hint"]
        asked = {"env_id": "judged", "algorithm": "sft"}
        assert code_of(await client.call_tool("submit_train", asked)) == "FORBIDDEN"
    check = partial(check_judges, home, "judged")
    with pytest.raises(UserError, match="openai:big may be asked by the owner"):
        check()
    home.config_file.write_text(table + "shared = true\n")
    check()


def test_environments_of_a_call_are_those_of_its_further_steps_too():
    then = [{"env_id": "b"}, 3, {"env_id": 4}, {}]
    assert envs_of({"env_id": "a", "then": then}) == ["a", "b"]


@pytest.mark.timeout(60)
async def test_a_key_cannot_ask_which_files_there_are(home: Home, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    plain = thief(tmp_path / "plain", "")
    _, token = add_key(home, "reader", ["read"])
    owner = load_token(home)
    told: dict[str, set[str]] = {}
    taught: dict[str, list[Any]] = {}
    async with listening(home, "--root", str(tmp_path)) as url:
        async with client_of(url, owner) as client:
            assert not (await client.call_tool("push_env", {"path": str(plain)})).is_error
        for key in (token, owner):
            async with client_of(url, key) as client:
                for name in ("folder", "file", "none"):
                    asked = {"env_id": "plain", "model": str(tmp_path / name)}
                    result = await client.call_tool("estimate_cost", asked)
                    text = result.content[0].text.replace(str(tmp_path / name), "PATH")
                    told.setdefault(key, set()).add(text)
                # The last is longer than any path may be, and a URL all the same.
                urls = ("http://127.0.0.1:9/v1", f"http://127.0.0.1:9/{'x' * 260}")
                for teacher in (str(tmp_path / "folder"), *urls):
                    asked = {"env_id": "plain", "algorithm": "distill"}
                    asked["settings"] = {"teacher": teacher}
                    result = await client.call_tool("estimate_cost", asked)
                    taught.setdefault(key, []).append(json.loads(result.content[0].text))
    (said,) = told[token]
    assert json.loads(said)["code"] == "MODEL_NOT_FOUND"
    assert len(told[owner]) == 3, "the owner is told what is wrong"
    # A teacher is a model; and to which servers this machine speaks is the owner's to say.
    assert [reply["code"] for reply in taught[token]] == ["MODEL_NOT_FOUND"] * 3
    for reply in taught[owner][1:]:
        assert reply["code"] == "SETTING_INVALID", "the owner lacks a model's name alone"


@pytest.mark.timeout(90)
async def test_keys_do_not_meet_in_their_request_ids_and_a_retry_is_the_same_call(
    home: Home, tmp_path: Path
):
    """The key of the second has too few hours for the default cap: it is given what is left."""
    plain = thief(tmp_path / "plain", "")
    tokens = [
        add_key(home, name, ["read", "train"], gpu_hours_per_day=hours)[1]
        for name, hours in (("first", 0.0), ("second", 0.7), ("third", 0.0))
    ]
    runs = []
    async with listening(home, "--root", str(tmp_path)) as url:
        for number, token in enumerate(tokens):
            async with client_of(url, token) as client:
                await client.call_tool("push_env", {"path": str(plain)})
                asked = {"env_id": "plain", "request_id": "try-1", "note": str(number)}
                asked |= {"algorithm": "sft", "settings": {"steps": 1}}
                made = await client.call_tool("submit_train", asked)
                assert not made.is_error, made.content[0].text
                again = await client.call_tool("submit_train", asked)
                assert not again.is_error, again.content[0].text
                assert again.structured_content["run_id"] == made.structured_content["run_id"]
                runs.append(made.structured_content)
                told = await client.call_tool("get_status", {"scope": "runs"})
                key = told.structured_content.get("key")
                assert bool(key) == (number == 1), "only a key with a limit has something to count"
                await client.call_tool("cancel_run", {"run_id": runs[-1]["run_id"]})
    assert len({run["run_id"] for run in runs}) == 3
    said = [any("max_gpu_hours was not given" in w for w in run["warnings"]) for run in runs]
    assert said == [False, True, False]
    config = json.loads(home.run(runs[1]["run_id"]).config.read_text())
    assert config["max_gpu_hours"] == 0.7


def test_a_teacher_in_a_step_of_a_plan_is_a_model_of_the_call_too():
    arguments = {
        "model": "pebble",
        "then": [{"algorithm": "distill", "settings": {"teacher": "/etc"}}, 3, {"settings": 4}],
        "vary": {"teacher": ["./a", "b"], "seed": [1]},
    }
    assert models_of("submit_train", arguments) == ["pebble", "/etc", "./a", "b"]
