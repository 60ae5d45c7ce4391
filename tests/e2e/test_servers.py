"""Servers that die and servers that share a home, with real torch trainers.

Trainers and supervisors are killed in tests/engine/test_supervisor_kill.py.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from loop_client import agent
from loops import ENVIRONMENT, metrics, push
from mcp import Client, StdioServerParameters

from engine.home.run_dir import Home, RunDir

pytestmark = [pytest.mark.worker, pytest.mark.e2e, pytest.mark.timeout(60)]

SETTINGS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "eval_every": 4,
    "eval_rows": 10,
    "skill_rows": 4,
    "save_every": 2,
    "learning_rate": 1e-3,
    "seed": 3,
}


def until(condition: Callable[[], Any], within_s: float = 40) -> Any:
    """Poll with a deadline: the processes under test are not ours to be told by."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return found


def stepped(run: RunDir, step: int) -> Callable[[], bool]:
    return lambda: run.metrics.exists() and (metrics(run) or [{"step": -1}])[-1]["step"] >= step


@pytest.mark.long  # the campaign of tests/faults kills a hundred
async def test_a_killed_server_leaves_its_run_alone(home: Home, tmp_path: Path) -> None:
    project = tmp_path / "project"
    push(home, project / "sums", ENVIRONMENT)
    argv = ["-P", "-m", "mcp_server.cli", "serve", "--home", str(home.root)]
    server = StdioServerParameters(command=sys.executable, args=argv, env=dict(os.environ))
    try:
        async with Client(server) as client:
            plan = {"env_id": "sums", "algorithm": "sft", "settings": SETTINGS}
            result = await client.call_tool("submit_train", plan)
            assert result.structured_content is not None
            run = home.run(result.structured_content["run_id"])
            await asyncio.to_thread(until, stepped(run, 2))
            mine = [
                p
                for p in psutil.Process().children(recursive=True)
                if "mcp_server.cli" in p.cmdline()
            ]
            assert mine
            for process in mine:
                process.kill()
    except Exception:  # noqa: BLE001 - the client may mind losing its server; we do not
        pass
    async with agent(home, project) as a:
        done = await a.wait(run.id)
    assert done["state"] == "done"
    assert [line["step"] for line in metrics(run)] == list(range(13))


async def test_two_servers_on_one_home_start_one_run_and_queue_the_other(
    home: Home, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    push(home, project / "sums", ENVIRONMENT)
    plan = {"env_id": "sums", "algorithm": "sft", "settings": SETTINGS | {"steps": 4}}
    async with agent(home, project) as one, agent(home, project) as two:
        answers = await asyncio.gather(
            one.call("submit_train", **plan), two.call("submit_train", **plan)
        )
        ids = [a["run_id"] for a in answers]
        assert len(set(ids)) == 2
        states = {r["run_id"]: r for r in (await one.call("get_status", scope="runs"))["runs"]}
        waiting = [i for i in ids if states[i]["state"] == "queued"]
        assert len(waiting) == 1
        assert (await two.call("wait_run", run_id=waiting[0], timeout_s=0))["queue_position"] == 1
        for run_id in ids:
            assert (await one.wait(run_id))["state"] == "done"
    for run_id in ids:
        events = home.run(run_id).events.read_text().splitlines()
        started = [e for e in map(json.loads, events) if e["event"] == "started"]
        assert len(started) == 1, "a run was started twice"
