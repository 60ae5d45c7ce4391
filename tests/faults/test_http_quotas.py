"""A key that loops: what it may start is bounded, however it calls."""

import asyncio
import json
from typing import Any

import pytest
from http_server import client_of, listening
from mcp import Client

from engine.run_dir import Home
from engine.store import Store
from mcp_server.bearer import load_token
from mcp_server.keys import add_key
from tests.engine.conftest import Bench

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

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
