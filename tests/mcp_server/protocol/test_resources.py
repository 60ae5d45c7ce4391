"""What a client may read beside tools, and the completion of ids."""

import json
from pathlib import Path

import pytest
from mcp import Client, MCPError
from mcp.types import PromptReference, ResourceTemplateReference
from run_configs import train_config

import playbook
from engine.core.errors import UserError
from engine.core.files import Appender, write_json
from engine.core.reply import RESULT_CHARS
from engine.environments.registry import EnvRecord
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.audit import Audit
from engine.records.env_version import EnvVersion
from engine.records.settings import SCHEMAS
from envs.config.settings import Limits
from mcp_server.api.addresses import read_source
from mcp_server.protocol.app import build_server

TEMPLATES = {
    "playbook://TRAINING.md/{section}",
    "run://{run_id}/metrics",
    "run://{run_id}/config",
    "run://{run_id}/card",
    "run://{run_id}/report",
    "env://{env_id}/source",
    "train://settings/{kind}",
}


def a_run(home: Home, name: str = "arith-sft") -> str:
    with Store(home) as store:
        row = store.insert_run(NewRun(name, "train", "sft", "arith@0", "pebble"))
    run = home.run(row.run_id)
    run.create()
    write_json(run.config, train_config(row.run_id, algorithm="sft"))
    with Appender(run.metrics) as metrics:
        for step in range(5):
            metrics.append({"step": step, "time": 1.0 + step, "loss": 2.0 - step / 4})
    return row.run_id


async def read(home: Home, uri: str, mode: str = "auto") -> str:
    async with Client(build_server(home, []), mode=mode) as client:
        (content,) = (await client.read_resource(uri)).contents
    return content.text


async def refusal(home: Home, uri: str) -> str:
    async with Client(build_server(home, [])) as client:
        with pytest.raises(MCPError) as error:
            await client.read_resource(uri)
    return str(error.value)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_resources_are_listed_with_type_audience_and_priority(home: Home, mode: str):
    async with Client(build_server(home, []), mode=mode) as client:
        static = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates
    assert {str(item.uri) for item in static} == {
        "playbook://TRAINING.md",
        "train://hardware",
        "train://settings",
        "train://skills",
    }
    assert {item.uri_template for item in templates} == TEMPLATES
    for item in [*static, *templates]:
        assert item.mime_type in ("text/markdown", "application/json")
        assert item.title and item.description
        assert "assistant" in item.annotations.audience and item.annotations.priority


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_playbook_is_read_whole_and_by_section(home: Home, mode: str):
    assert await read(home, "playbook://TRAINING.md", mode) == playbook.read()
    for slug, _ in playbook.sections():
        assert await read(home, f"playbook://TRAINING.md/{slug}", mode) == playbook.read(slug)


async def test_a_section_that_is_not_there_is_not_found_with_a_hint(home: Home):
    said = await refusal(home, "playbook://TRAINING.md/reward")
    assert "SECTION_NOT_FOUND" in said and "read_playbook" in said


async def test_the_curves_of_a_run_are_json(home: Home):
    run_id = a_run(home)
    curves = json.loads(await read(home, f"run://{run_id}/metrics"))
    assert "loss" in curves["columns"]
    assert len(curves["rows"]) == 5


async def test_the_settings_of_a_run_are_json(home: Home):
    run_id = a_run(home)
    config = json.loads(await read(home, f"run://{run_id}/config"))
    assert config["settings"]["steps"] == 4


@pytest.mark.parametrize("what", ["card", "report"])
async def test_card_and_report_are_markdown_within_a_result(home: Home, what: str):
    text = await read(home, f"run://{a_run(home)}/{what}")
    assert text.startswith("#") or "---" in text[:4]
    assert len(text) <= RESULT_CHARS


@pytest.mark.parametrize("what", ["metrics", "config", "card", "report"])
async def test_an_unknown_run_is_not_found(home: Home, what: str):
    assert "RUN_NOT_FOUND" in await refusal(home, f"run://nobody-1/{what}")


@pytest.mark.parametrize(
    "uri",
    [
        "run://..%2F..%2Fetc/config",
        "run://%2Fetc%2Fpasswd/config",
        "env://..%2F..%2Fetc/source",
        "playbook://TRAINING.md/..%2F..%2Fetc%2Fpasswd",
    ],
)
async def test_a_path_is_never_an_id(home: Home, uri: str):
    said = await refusal(home, uri)
    assert "root:" not in said and "Traceback" not in said


async def test_a_config_not_written_yet_is_not_found(home: Home):
    run_id = a_run(home)
    home.run(run_id).config.unlink()
    assert "not written" in await refusal(home, f"run://{run_id}/config")


@pytest.mark.parametrize("damage", [b"{", b"", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5_000])
async def test_a_config_that_is_damaged_is_told_in_our_own_words(home: Home, damage: bytes):
    run_id = a_run(home)
    home.run(run_id).config.write_bytes(damage)
    said = await refusal(home, f"run://{run_id}/config")
    assert "HOME_UNUSABLE" in said and "honesmith doctor" in said
    assert "Traceback" not in said and str(home.root) not in said


async def test_hardware_and_settings_describe_this_installation(home: Home):
    machine = json.loads(await read(home, "train://hardware"))
    assert machine["hardware"]["devices"]
    assert "What is the capital of France?" in await read(home, "train://skills")
    reference = await read(home, "train://settings")
    assert "learning_rate" in reference and "group_size" in reference
    assert "train://settings/grpo" in reference


@pytest.mark.parametrize("kind", ["", "/sft", "/dpo", "/grpo", "/distill", "/evaluate"])
async def test_a_page_of_settings_is_no_longer_than_a_tool_may_answer(home: Home, kind: str):
    page = await read(home, f"train://settings{kind}")
    assert len(page) <= RESULT_CHARS


async def test_the_pages_of_settings_hold_every_setting_of_their_algorithm(home: Home):
    for algorithm, schema in SCHEMAS.items():
        page = await read(home, f"train://settings/{algorithm}")
        assert all(f"| `{name}` |" in page for name in schema.model_fields), algorithm
    assert "`group_size`" not in await read(home, "train://settings/sft")
    said = await refusal(home, "train://settings/ppo")
    assert "SECTION_NOT_FOUND" in said and "train://settings/distill" in said


def an_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    folder = tmp_path / "version"
    for name, content in files.items():
        path = folder / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    version = EnvVersion(
        kind="single", scored=True, tools=[], rows={"train": 1}, limits=Limits(), secrets=()
    )
    record = EnvRecord("a@1", "a", "1", folder, version, Audit(verdict="ok", headline="ok"))

    def find(home: Home, ref: str) -> EnvRecord:
        if ref != "a@1":
            raise UserError("ENV_NOT_FOUND", f"no {ref}", hint="a@1")
        return record

    monkeypatch.setattr("engine.environments.registry.find_env", find)


async def test_the_source_of_an_environment_is_read_by_its_id(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    an_env(tmp_path, monkeypatch, {"environment.py": b"x = 1\n", "datasets/rows.jsonl": b"{}\n"})
    text = await read(home, "env://a@1/source")
    assert text.index("environment.py") < text.index("datasets/rows.jsonl")
    assert "x = 1" in text
    assert "ENV_NOT_FOUND" in await refusal(home, "env://b/source")


def test_a_large_source_is_cut_to_a_result_and_names_every_cut(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {"environment.py": b"a" * 20_000, "weights.bin": bytes(range(256)) * 8}
    files |= {f"datasets/{n}.jsonl": b"b" * 5_000 for n in range(4)}
    an_env(tmp_path, monkeypatch, files)
    text = read_source(home, "a@1")
    assert len(text) <= RESULT_CHARS
    assert "(20000 bytes in all)" in text
    assert "2048 bytes, not text" in text
    for n in range(4):
        assert f"datasets/{n}.jsonl" in text


def test_a_fence_inside_a_file_does_not_end_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    an_env(tmp_path, monkeypatch, {"environment.py": b"a\n````\nb\n"})
    assert "`" * 7 + "\na\n````\nb\n" + "`" * 7 in read_source(home, "a@1")


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
async def test_ids_and_sections_are_completed(home: Home, mode: str):
    first, second = a_run(home), a_run(home, "poem-sft")
    metrics = ResourceTemplateReference(uri="run://{run_id}/metrics")
    section = ResourceTemplateReference(uri="playbook://TRAINING.md/{section}")
    async with Client(build_server(home, []), mode=mode) as client:

        async def ask(ref, name: str, value: str) -> list[str]:
            argument = {"name": name, "value": value}
            return (await client.complete(ref, argument)).completion.values

        assert await ask(metrics, "run_id", "") == [second, first]
        assert await ask(metrics, "run_id", "ari") == [first]
        assert await ask(PromptReference(name="diagnose_run"), "run_id", "po") == [second]
        assert await ask(section, "section", "re") == ["rewards"]
        assert await ask(PromptReference(name="train"), "goal", "x") == []


async def test_completion_lists_a_hundred_and_says_there_are_more(home: Home):
    with Store(home) as store:
        for _ in range(105):
            store.insert_run(NewRun("many", "train", "sft", "arith@0", "pebble"))
    metrics = ResourceTemplateReference(uri="run://{run_id}/metrics")
    async with Client(build_server(home, [])) as client:
        found = (await client.complete(metrics, {"name": "run_id", "value": "m"})).completion
    assert len(found.values) == 100 and found.has_more and found.total == 105
