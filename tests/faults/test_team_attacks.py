"""Two keys of a team: neither sees, changes, overwrites, spends or holds up what is the other's."""

import asyncio
import json
import os
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import pytest
from answered import SUMS
from http_server import bearer, client_of, listening
from mcp import Client, MCPError
from team import Things, key_of, of, stored, tell_apart, things_of, valid_with

from engine.core.errors import UserError
from engine.core.files import take_lock
from engine.environments.registry import find_env
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.bearer import load_token
from mcp_server.access.keys import add_key, set_project
from tests.engine.conftest import Bench

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ALL = ["read", "train", "install", "deploy"]
RESOURCES = (
    "run://{}/metrics",
    "run://{}/config",
    "run://{}/card",
    "run://{}/report",
    "env://{}/source",
)


async def text_of(client: Client, tool: str, **arguments: Any) -> str:
    return (await client.call_tool(tool, arguments)).content[0].text  # type: ignore[union-attr]


def owned_by(home: Home, owner: str) -> tuple[Any, ...]:
    with Store(home) as store:
        runs = [row for row in store.list_runs(1000) if row.owner == owner]
        envs = [row for row in store.list_envs() if row.owner == owner]
        deployments = [row for row in store.list_deployments() if row.owner == owner]
    return runs, envs, deployments


async def test_a33_every_tool_and_resource_with_every_name_of_the_other(
    home: Home, bench: Bench, tmp_path: Path
):
    (home.root / "hold").touch()  # what he submits by the way waits
    ana = key_of(home, "ana")
    bob, token = add_key(home, "bob", ALL, calls_per_minute=0)
    hers = things_of(home, ana, tmp_path / "ana")
    his = things_of(home, bob, tmp_path / "bob", env="sums")
    lock = take_lock(home.deployment(hers.deployment).alive)  # her deployment lives
    before = owned_by(home, "ana")
    load_token(home)
    async with listening(home, "--root", str(tmp_path)) as url, client_of(url, token) as client:
        tried, apart = await tell_apart(client, hers.names(), valid_with(his, tmp_path))
        assert not apart and tried > 400
        for uri in RESOURCES:
            for name in hers.names():
                with pytest.raises(MCPError):
                    await client.read_resource(uri.format(name))
        for scope in ("all", "runs", "envs", "models", "datasets", "deployments", "hardware"):
            shown = await text_of(client, "get_status", scope=scope)
            # His own notes may name what they like.
            assert "secret" not in re.sub(r'"note":"[^"]*"', "", shown), scope
    assert owned_by(home, "ana") == before
    assert lock is not None
    os.close(lock)
    end_all(home, bench, hers)


def end_all(home: Home, bench: Bench, hers: Things) -> None:
    """Let everything that waits end."""
    from engine.runs import lifecycle

    with Store(home) as store:
        queued = [row.run_id for row in store.list_runs(1000, states=("queued",))]
    for run_id in queued:
        lifecycle.cancel(home, run_id)
    (home.root / "hold").unlink()
    with Store(home) as store:
        rows = store.list_runs(1000)
    for row in rows:
        if row.run_id not in (hers.run, hers.evaluation):
            bench.until_state(home.run(row.run_id), "cancelled", "failed", "done")


async def test_a33_what_one_key_pushes_never_becomes_what_another_names(
    home: Home, bench: Bench, tmp_path: Path
):
    ana, hers = add_key(home, "ana", ALL)
    _, his = add_key(home, "bob", ALL)
    env_id = stored(of(home, ana), "booking")
    other = {"environment.py": SUMS}
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("environment.py", SUMS + "\n# his\n")
    load_token(home)
    async with listening(home) as url, client_of(url, his) as client:
        pushed = json.loads(await text_of(client, "push_env", name="booking", files=other))
        assert pushed["env_id"] != env_id and find_env(of(home, ana), "booking").env_id == env_id
        async with httpx2.AsyncClient(headers=bearer(his), timeout=60) as http:
            target = url.replace("/mcp", "/envs/booking")
            answer = await http.put(target, content=packed.getvalue())
            assert answer.status_code == 200
            shared = await http.post(url.replace("/mcp", "/share"), json={"name": env_id})
            assert shared.status_code == 400
    async with listening(home) as url, client_of(url, hers) as client:
        assert env_id in await text_of(client, "get_status", scope="envs")
    assert find_env(of(home, ana), "booking").env_id == env_id


async def test_a33_one_request_id_of_two_keys_is_two_requests_and_a_budget_is_spent_once(
    home: Home, bench: Bench, env: str
):
    (home.root / "hold").touch()
    set_project(home, "robots", 1.0)
    tokens = [add_key(home, name, ALL, project="robots")[1] for name in ("ana", "bob")]
    plan = {"env_id": "sums", "algorithm": "sft", "settings": {"steps": 3}, "max_gpu_hours": 0.4}
    load_token(home)
    async with (
        listening(home) as url,
        client_of(url, tokens[0]) as one,
        client_of(url, tokens[1]) as two,
    ):
        calls = [
            text_of(client, "submit_train", **plan, request_id=f"try-{number}")
            for number in range(3)
            for client in (one, two)
        ]
        replies = [json.loads(text) for text in await asyncio.gather(*calls)]
    started = {reply["run_id"] for reply in replies if "run_id" in reply}
    refused = [reply for reply in replies if "code" in reply]
    assert len(started) == 2, replies
    assert {reply["code"] for reply in refused} == {"QUOTA"}
    assert all("project robots" in reply["message"] for reply in refused)
    from engine.runs import lifecycle

    for run_id in started:
        lifecycle.cancel(home, run_id)
    (home.root / "hold").unlink()
    for run_id in started:
        bench.until_state(home.run(run_id), "cancelled", "failed", "done")


def test_a33_a_flood_of_one_key_does_not_hold_up_the_next_run_of_another(home: Home):
    ana, bob = key_of(home, "ana"), key_of(home, "bob")
    new = NewRun("a-sft", "train", "sft", "a@0", "pebble", estimated_hours=0.1)
    with Store(of(home, ana)) as store:
        for _ in range(200):
            store.insert_run(new)
    with Store(of(home, bob)) as store:
        his = store.insert_run(new).run_id
        assert store.queue_position(his) <= 2
    with Store(home) as store:
        started = [store.lease_next([f"cuda:{number}"]) for number in range(2)]
    assert {row.owner for row in started if row} == {"ana", "bob"}


def test_a33_a_key_cannot_take_an_owner_by_its_name(home: Home):
    hers = stored(of(home, key_of(home, "ana")), "secret")
    for name in ("ana", "ana/../bob", "local", "owner", "stdio", "*", ""):
        with pytest.raises(UserError):
            key_of(home, name)
    later = key_of(home, "ana.")  # becomes an id without dots, which nobody has
    assert later.id == "ana-"
    with pytest.raises(UserError):
        find_env(of(home, later), hers)
