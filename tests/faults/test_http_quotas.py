"""A key that loops: what it may start is bounded, however it calls."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from http_server import client_of, listening
from mcp import Client
from stand_ins import stand_in

from engine.core.files import read_json
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.models import catalog
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import add_key
from tests.engine.conftest import Bench

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

ENGINE = Path(__file__).parents[1] / "engine"
PLAN = {"env_id": "sums", "algorithm": "sft", "settings": {"steps": 3}, "max_gpu_hours": 0.4}


async def submit(client: Client, **more: Any) -> dict[str, Any]:
    """The reply, or the refusal, of one submit."""
    result = await client.call_tool("submit_train", PLAN | more)
    return json.loads(result.content[0].text)


async def test_a18_runs_at_once_and_hours_of_a_day_are_bounded_by_key(
    home: Home, bench: Bench, env: str
):
    (home.root / "hold").touch()  # every trainer waits
    _, one = add_key(home, "one", ["read", "train"], max_runs=1)
    _, day = add_key(home, "day", ["read", "train"], gpu_hours_per_day=1)
    owner = load_token(home)
    async with listening(home) as url:
        async with client_of(url, one) as client, client_of(url, one) as again:
            # Eight at once over two connections: the second must see the first.
            both = [submit(c, note=f"{n}") for n in range(4) for c in (client, again)]
            said = await asyncio.gather(*both)
            assert [reply.get("code", "ok") for reply in said].count("ok") == 1
            assert {reply.get("code", "ok") for reply in said} == {"ok", "QUOTA"}
            (started,) = (reply["run_id"] for reply in said if "run_id" in reply)
            refused = next(reply for reply in said if "code" in reply)
            assert started in refused["message"] and refused["retryable"]
        async with client_of(url, day) as client:
            assert "run_id" in await submit(client)
            assert "run_id" in await submit(client, note="b")
            third = await submit(client, note="c")
            assert third["code"] == "QUOTA" and "max_gpu_hours=0.2" in third["hint"]
            assert "run_id" in await submit(client, note="d", max_gpu_hours=0.2)
        async with client_of(url, owner) as client:
            assert "run_id" in await submit(client), "the owner has no quota"
            with Store(home) as store:
                rows = store.list_runs(50)
            assert len(rows) == 5
            for row in rows:
                await client.call_tool("cancel_run", {"run_id": row.run_id})
    (home.root / "hold").unlink()
    for row in rows:
        bench.until_state(home.run(row.run_id), "cancelled", "failed", "done")


async def test_a18_a_spend_above_the_limit_of_the_home_needs_a_person(
    home: Home, bench: Bench, env: str
):
    home.config_file.write_text("auto_approve_gpu_hours = 0\n")
    async with listening(home) as url, client_of(url, load_token(home)) as client:
        said = await submit(client)
    assert said["code"] == "NOT_APPROVED" and "Ask the user" in said["hint"]
    with Store(home) as store:
        assert store.list_runs(5) == []


async def test_a18_a_small_evaluation_fits_into_a_day_of_twelve_minutes(
    home: Home, bench: Bench, env: str, tmp_path: Path
):
    (home.root / "hold").touch()
    _, token = add_key(home, "day", ["read", "train"], gpu_hours_per_day=0.2)
    bases = [str(shutil.copytree(catalog.BUILTIN["pebble"], tmp_path / n)) for n in "abcdef"]
    long = {"models": bases, "rows": 40, "attempts": 64, "split": "train"}
    asked = {"env_id": "sums", "models": ["pebble"], "rows": 4}
    async with listening(home) as url, client_of(url, token) as client:

        async def evaluate(**more: Any) -> dict[str, Any]:
            result = await client.call_tool("evaluate", asked | more)
            return json.loads(result.content[0].text)

        first = await evaluate()
        assert "is ended after 0." in first["warnings"][0], first
        run = home.run(first["run_id"])
        promised = bench.row(run).max_gpu_hours
        assert 0 < promised < 0.2 and read_json(run.config)["max_gpu_hours"] == promised
        large = await evaluate(settings={"max_tokens": 400}, **long)
        assert large["code"] == "QUOTA" and "fewer rows" in large["hint"], large
        assert f"promised {promised:.3g}" in large["message"]
        left = await submit(client, max_gpu_hours=0.2 - promised / 2)
        assert left["code"] == "QUOTA"
        await client.call_tool("cancel_run", {"run_id": run.id})
        bench.until_state(run, "cancelled")
        (home.root / "hold").unlink()
        again = await submit(client, max_gpu_hours=0.2 - promised / 2)
        assert "run_id" in again, "an ended one counts with what it took"
    bench.until_state(home.run(again["run_id"]), "done")


def test_a18_an_evaluation_is_held_to_the_hours_its_key_was_given(
    home: Home, bench: Bench, env: str
):
    (home.root / "hold").touch()
    said = lifecycle.submit_evaluation(
        home,
        EvaluationRequest(env_id=env, models=["pebble"], rows=4),
        cap_function=lambda hours: 1 / 3600,
    )
    row = bench.until_state(home.run(said["run_id"]), "failed")
    assert row.reason_kind == "budget" and "is spent" in row.reason
    assert row.spent_hours < 0.1


async def test_a18_deployments_at_once_are_bounded_by_key(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    stand_in(monkeypatch, server=ENGINE / "fake_server.py")
    stand_in(monkeypatch, trainer=ENGINE / "fake_trainer.py")
    bases = [str(shutil.copytree(catalog.BUILTIN["pebble"], tmp_path / n)) for n in "abc"]
    _, one = add_key(home, "one", ["deploy"], max_deployments=1)
    _, usual = add_key(home, "usual", ["deploy"])
    owner = load_token(home)

    async def told(client: Client, tool: str, **asked: Any) -> dict[str, Any]:
        return json.loads((await client.call_tool(tool, asked)).content[0].text)

    try:
        async with listening(home) as url:
            async with client_of(url, one) as client, client_of(url, one) as again:
                both = await asyncio.gather(
                    told(client, "chat", model=bases[0], message="hi"),
                    told(again, "deploy", run_id=bases[1]),
                )
                codes = sorted(reply.get("code", "ok") for reply in both)
                assert codes == ["QUOTA", "ok"], both
                refused = next(reply for reply in both if "code" in reply)
                (mine,) = deployments.list_deployments(home)
                stop = f'deploy(run_id="{mine["deployment_id"]}", action="stop")'
                assert "has 1 deployments" in refused["message"] and stop in refused["hint"]
                await told(client, "deploy", run_id=mine["deployment_id"], action="stop")
                assert "base_url" in await told(client, "deploy", run_id=bases[2])
            async with client_of(url, usual) as client:
                said = [await told(client, "deploy", run_id=base) for base in bases]
                assert [reply.get("code", "ok") for reply in said] == ["ok", "ok", "ok"]
                assert len(deployments.living(home)) == 3, "what is served already is not counted"
                third = await told(client, "deploy", run_id="pebble")
                assert third["code"] == "QUOTA" and "may have 2" in third["message"]
            async with client_of(url, owner) as client:
                assert "base_url" in await told(client, "deploy", run_id="pebble")
    finally:
        for row in deployments.living(home):
            deployments.stop(home, row, "the test is over")
