"""The main job through a real MCP client over stdio: push to chat, in both protocol eras."""

from pathlib import Path
from typing import Any

import pytest
from loop_client import agent
from loops import ENVIRONMENT

from engine.home.run_dir import Home

pytestmark = [pytest.mark.worker, pytest.mark.e2e, pytest.mark.timeout(60)]

SFT: dict[str, Any] = {"steps": 10, "batch_size": 8, "eval_rows": 20, "learning_rate": 3e-3}
GRPO: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 6,
    "group_size": 4,
    "max_tokens": 20,
    "eval_rows": 20,
    "learning_rate": 1e-3,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / "sums"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder.parent


async def test_the_whole_loop_in_the_new_era(home: Home, project: Path) -> None:
    async with agent(home, project, "2026-07-28") as a:
        assert (await a.call("get_status"))["summary"]
        pushed = await a.call("push_env", path=str(project / "sums"))
        env = pushed["env_id"]
        assert pushed["audit"]["verdict"] == "ok"
        checks = (await a.call("dry_run", env_id=env, algorithm="sft", settings=SFT))["checks"]
        assert {c["status"] for c in checks} <= {"pass", "warn", "skip"}
        cost = await a.call("estimate_cost", env_id=env, algorithm="sft", settings=SFT)
        assert cost["hours"]["low"] <= cost["hours"]["likely"] <= cost["hours"]["high"]
        sft = await a.call("submit_train", env_id=env, algorithm="sft", settings=SFT)
        done = await a.wait(sft["run_id"])
        assert done["state"] == "done" and done["verdict"] != "unknown"
        tuned = f"{sft['run_id']}@best"
        grpo = await a.call("submit_train", env_id=env, model=tuned, settings=GRPO)
        assert (await a.wait(grpo["run_id"]))["state"] == "done"
        rollouts = await a.call("read_rollouts", run_id=grpo["run_id"], pick="group")
        assert rollouts["summary"]
        diagnosis = await a.call("diagnose", run_id=grpo["run_id"])
        assert diagnosis["looked_at"]["steps"] == 4 and diagnosis["looked_at"]["rollouts"] == 96
        logs = await a.call("read_logs", run_id=grpo["run_id"], keys=["reward_mean"])
        assert "reward_mean" in logs["columns"]


@pytest.mark.long
async def test_judging_and_chatting_in_the_old_era(home: Home, project: Path) -> None:
    async with agent(home, project, "legacy") as a:
        env = (await a.call("push_env", path=str(project / "sums")))["env_id"]
        sft = await a.call("submit_train", env_id=env, algorithm="sft", settings=SFT)
        assert (await a.wait(sft["run_id"]))["state"] == "done"
        evaluation = await a.call("evaluate", env_id=env, models=["pebble", sft["run_id"]], rows=20)
        assert (await a.wait(evaluation["run_id"]))["state"] == "done"
        compared = await a.call("compare_runs", ids=["pebble", sft["run_id"]])
        assert compared["verdict"] in ("better", "worse", "no_difference", "inconclusive")
        deployed = await a.call("deploy", run_id=sft["run_id"])
        assert deployed["base_url"].startswith("http://127.0.0.1:")
        answer = await a.call(
            "chat", model=sft["run_id"], message="What is 3 + 4?", compare_to="pebble"
        )
        assert [x["model"] for x in answer["answers"]] == [sft["run_id"], "pebble"]
        await a.call("deploy", run_id=sft["run_id"], action="stop")
        assert not (await a.call("get_status", scope="deployments"))["deployments"]


async def test_refusals_queue_nothing(home: Home, project: Path) -> None:
    async with agent(home, project) as a:
        env = (await a.call("push_env", path=str(project / "sums")))["env_id"]
        for algorithm, settings in [
            ("grpo", {"group_size": 1}),
            ("grpo", {"temperature": 0}),
            ("grpo", {"epochs": 2}),
            ("sft", {"group_size": 8}),
            ("sft", {"batch_size": 1_000_000}),
            ("sft", {"learning_rte": 1e-4}),
            ("sft", {"steps": 5, "epochs": 1}),
            ("sft", {"learning_rate": 50}),
        ]:
            error = await a.refused(
                "submit_train", env_id=env, algorithm=algorithm, settings=settings
            )
            assert error["code"].startswith("SETTING_") and error["hint"], settings
        unknown = await a.refused("submit_train", env_id=env, settings={}, lerning_rate=1)
        assert unknown["code"] == "UNKNOWN_ARGUMENT"
        assert not (await a.call("get_status", scope="runs"))["runs"]
