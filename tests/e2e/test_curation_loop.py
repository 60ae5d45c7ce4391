"""The loop of curation through a real MCP client: evaluate, curate, train, evaluate, compare."""

import json
from pathlib import Path
from typing import Any

import pytest
from loop_client import Agent, agent
from loops import ENVIRONMENT

from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home

pytestmark = [pytest.mark.worker, pytest.mark.e2e, pytest.mark.timeout(60)]

SFT: dict[str, Any] = {
    "steps": 10,
    "batch_size": 4,
    "eval_rows": 20,
    "skill_rows": 4,
    "learning_rate": 3e-3,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / "sums"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder.parent


async def finished(a: Agent, tool: str, **arguments: Any) -> str:
    """Queue a run and see it done; its id."""
    run_id = (await a.call(tool, **arguments))["run_id"]
    status = await a.wait(run_id)
    assert status["state"] == "done", status
    return run_id


async def test_what_a_model_did_well_becomes_its_next_training_set_and_is_judged(
    home: Home, project: Path
) -> None:
    async with agent(home, project) as a:
        source = (await a.call("push_env", path=str(project / "sums")))["env_id"]
        played = await finished(
            a, "evaluate", env_id=source, models=["pebble"], split="train", rows=24, attempts=8
        )
        plan = {"source_ids": [played], "name": "sums-best", "where": "0 < avg < 1"}
        seen = await a.call("curate", **plan, select="correct")
        assert seen["env_id"] == "" and seen["kept"] >= 4
        assert seen["kept"] + sum(seen["dropped"].values()) == seen["attempts"] == 8 * 24
        (call,) = seen["next"]
        saved = await a.call(call["tool"], **call["arguments"])
        assert saved["kept"] == seen["kept"] and saved["dropped"] == seen["dropped"]

        dataset, origin = find_env(home, saved["env_id"]), find_env(home, source)
        answers = {row["id"]: row["answer"][0]["content"] for row in read_tasks(origin, "train")}
        for row in read_tasks(dataset, "train"):
            told = row["metadata"]["origin"]
            assert told["run"] == played and told["reward"] == 1.0
            assert row["answer"][0]["content"] == answers[told["task"]]
        exam = [row["id"] for row in read_tasks(origin, "heldout")]
        assert [row["id"] for row in read_tasks(dataset, "heldout")] == exam

        sft = await finished(
            a, "submit_train", env_id=saved["env_id"], algorithm="sft", settings=SFT
        )
        await finished(a, "evaluate", env_id=source, models=["pebble", sft], rows=40)
        compared = await a.call("compare_runs", ids=["pebble", sft], env_id=source)
        assert compared["verdict"] in ("better", "worse", "no_difference", "inconclusive")
        (pair,) = compared["comparisons"]
        assert pair["n"] == len(exam) and pair["interval"][0] <= pair["difference"]
        assert pair["attribution"]["levers"] == [f"training of {sft}"] or pair["attribution"]["to"]


@pytest.mark.long  # runs/evaluation/test_regrade shows the parts
async def test_stored_answers_are_scored_again_by_another_reward(home: Home, project: Path) -> None:
    other = project / "lenient"
    other.mkdir()
    strict = ENVIRONMENT.replace("completion == task.answer", "completion != task.answer")
    (other / "environment.py").write_text(strict)
    async with agent(home, project) as a:
        first = (await a.call("push_env", path=str(project / "sums")))["env_id"]
        second = (await a.call("push_env", path=str(other)))["env_id"]
        played = await finished(a, "evaluate", env_id=first, models=["pebble"], rows=10, attempts=4)
        run_id = (await a.call("evaluate", env_id=second, regrade=played))["run_id"]
        status = await a.wait(run_id)
        assert status["state"] == "done", status
        found = status["result"]["regrade"]
        assert found["rows"] == found["changed"] == 40 and found["source"] == played
        within = found["attempts"]
        assert within["kept"] == within["tied"] == within["parted"] == 0
        rows = [json.loads(x) for x in home.run(run_id).model_evals(0).read_text().splitlines()]
        assert all(row["reward"] == 1.0 - row["reward_before"] for row in rows)
        look = await a.call("read_rollouts", run_id=run_id, where="reward == 1", limit=1)
        assert look["matching"] == sum(row["reward"] == 1.0 for row in rows)
        refused = await a.refused("evaluate", env_id=second, regrade=played, models=["pebble"])
        assert refused["field"] == "models"


@pytest.mark.long
async def test_two_environments_with_equal_task_ids_and_their_exams_stay_apart(
    home: Home, project: Path
) -> None:
    other = project / "more"
    other.mkdir()
    more = ENVIRONMENT.replace("What is {a} + {b}?", "What is {a} + {b} + 1?")
    (other / "environment.py").write_text(more.replace('f"{a + b}"', 'f"{a + b + 1}"'))
    async with agent(home, project) as a:
        envs = [
            (await a.call("push_env", path=str(f)))["env_id"] for f in (project / "sums", other)
        ]
        played = [
            await finished(a, "evaluate", env_id=env, models=["pebble"], split="train", rows=60)
            for env in envs
        ]
        exam = await finished(a, "evaluate", env_id=envs[0], models=["pebble"], rows=20)
        refused = await a.refused("curate", source_ids=[exam], name="stolen", preview=False)
        assert "heldout" in refused["message"] and 'split="train"' in refused["hint"]
        asked = {"source_ids": [*played, exam], "name": "both", "select": "all", "preview": False}
        saved = await a.call("curate", **asked)
        rows = read_tasks(find_env(home, saved["env_id"]), "train")
        heldout = {
            env: {row["id"] for row in read_tasks(find_env(home, env), "heldout")} for env in envs
        }
        assert saved["dropped"]["heldout"] == len(heldout[envs[0]]) > 0
        origins = [
            (row["metadata"]["origin"]["env_id"], row["metadata"]["origin"]["task"]) for row in rows
        ]
        assert not [task for env, task in origins if task in heldout[env]]
        shared = {task for env, task in origins if env == envs[0]} & {
            task for env, task in origins if env == envs[1]
        }
        assert len(shared) > 20 and len(set(origins)) == len(rows) == len({r["id"] for r in rows})
        asks_more = {row["id"]: row["prompt"][0]["content"].count("+") == 2 for row in rows}
        for row in rows:
            assert asks_more[row["id"]] == (row["metadata"]["origin"]["env_id"] == envs[1])
