"""A search for a prompt as a run, from submit to verdict, of a model behind a URL: no torch."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import FakeEndpoint, Said, fake_endpoint
from prompted import BAD, DEV, GOOD, push_sums, sums_under, writes

from engine.environments.registry import find_env, read_tasks
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs import lifecycle
from engine.runs.reading.rollout_pages import RolloutQuery
from engine.runs.reading.rollouts import read_rollouts
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

pytestmark = pytest.mark.timeout(60)  # a run is a supervisor, a process and the environment's

SETTINGS = {"max_tokens": 8, "select_rows": 8, "prompts_per_step": 2, "max_rollouts": 60}
PRICES = {"price_in": 100.0, "price_out": 1000.0}  # 0.006 for the usage of a `Said`


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", "sk-a-key-that-nobody-may-ever-see-0123456789")


def ended(home: Home, queued: dict[str, Any], state: str = "done") -> dict[str, Any]:
    status = lifecycle.wait(home, queued["run_id"], "end", 40)
    assert status["state"] == state, status
    with open(home.run(queued["run_id"]).lock, "rb") as lock:  # its supervisor holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
    return status


def search(home: Home, env: str, ref: str, writer: str, **more: Any) -> dict[str, Any]:
    settings = {**SETTINGS, "reflection": writer, **more}
    return lifecycle.submit(
        home, TrainRequest(env_id=env, model=ref, algorithm="prompt", settings=settings)
    )


def texts_sent(fake: FakeEndpoint) -> str:
    return json.dumps([body["messages"] for body in fake.bodies])


def test_the_planted_prompt_is_found_judged_pushed_and_compared(home: Home, tmp_path: Path):
    env = push_sums(home, tmp_path / "a")
    with (
        fake_endpoint(sums_under(GOOD)) as model,
        fake_endpoint(writes("Use digits.", GOOD)) as writer,
    ):
        ref, name = model.config(home, "small"), writer.config(home, "big", **PRICES)
        queued = search(home, env, ref, name, max_calls=5)
        status = ended(home, queued)
        result = status["result"]
        new = result["prompt"]["env_id"]
        asked = [
            ended(home, lifecycle.submit_evaluation(home, request))["run_id"]
            for request in (
                EvaluationRequest(env_id=each, models=[ref], settings={"max_tokens": 8})
                for each in (env, new)
            )
        ]
    assert status["verdict"] == "better", status["summary"]
    assert result["prompt"]["texts"] == {"system": GOOD}
    assert result["prompt"]["texts_before"] == {"system": BAD}
    assert new in status["summary"]
    assert queued["estimate"]["calls"] == 5 and queued["estimate"]["money"]["high"] > 0
    # What the search may take is counted and kept.
    used = result["endpoints"]["models"]["openai:big (reflection)"]
    assert used["calls"] == len(writer.bodies) == 2
    assert used["cost"] == pytest.approx(2 * 0.006)
    assert result["prompt"]["rollouts"] <= SETTINGS["max_rollouts"]
    # The endpoint is shown train tasks that do not choose, with what was answered and earned.
    heldout = [task["prompt"][1]["content"] for task in read_tasks(find_env(home, env), "heldout")]
    assert "that is not the sum" in texts_sent(writer) and "HM" in texts_sent(writer)
    assert not [text for text in heldout if text in texts_sent(writer)]
    shown = texts_sent(writer).count("What is ")
    assert shown == 2 * SETTINGS["prompts_per_step"]
    # The new version asks the same tasks on the same sides; the name means what it meant.
    before, after = find_env(home, env), find_env(home, new)
    assert find_env(home, "sums").env_id == env and after.version.prompt_of == env
    assert [(t["id"], t["split"]) for t in read_tasks(before)] == [
        (t["id"], t["split"]) for t in read_tasks(after)
    ]
    assert {t["prompt"][0]["content"] for t in read_tasks(after)} == {GOOD}
    # Base with the old prompt and with the new one, task by task.
    compared = compare_runs(home, asked)
    assert compared["verdict"] == "better"
    assert compared["comparisons"][0]["n"] == len(heldout)
    assert compared["comparisons"][0]["attribution"]["to"] == "prompt"
    assert any("different prompts" in warning for warning in compared["warnings"])
    of_run = compare_runs(home, [ref, queued["run_id"]])
    assert of_run["verdict"] == "better"
    assert of_run["comparisons"][0]["attribution"]["to"] == "prompt"
    read = read_rollouts(home, RolloutQuery(queued["run_id"], pick="worst", limit=1)).to_json()
    assert read["rollouts"][0]["reward"] == 0.0
    with Store(home) as store:
        row = store.get_run(queued["run_id"])
    assert (row.kind, row.gpus, row.device) == ("train", 0, "")
    assert [call["tool"] for call in status["next"]] == ["evaluate", "read_rollouts"]


@pytest.mark.long
def test_without_a_better_prompt_there_is_no_version_and_no_difference(home: Home, tmp_path: Path):
    env = push_sums(home, tmp_path / "a", other=DEV)
    with fake_endpoint(sums_under(GOOD)) as model, fake_endpoint(writes("Be brief.")) as writer:
        queued = search(
            home, env, model.config(home, "small"), writer.config(home, "big"), max_calls=2
        )
        status = ended(home, queued)
    result = status["result"]
    assert status["verdict"] in ("no_difference", "inconclusive")
    assert result["prompt"]["env_id"] == ""
    assert result["prompt"]["stopped_by"] == "max_calls = 2"
    assert len(writer.bodies) == 2
    with Store(home) as store:
        assert [row.env_id for row in store.list_envs()] == [env]


def test_a_search_whose_endpoint_fails_goes_on_where_it_was(home: Home, tmp_path: Path):
    env = push_sums(home, tmp_path / "a")
    is_broken = [True]
    write = writes(GOOD)

    def answer(body: dict[str, Any]) -> Said:
        return Said("no such key", status=401) if is_broken[0] else write(body)

    with fake_endpoint(sums_under(GOOD)) as model, fake_endpoint(answer) as writer:
        queued = search(home, env, model.config(home, "small"), writer.config(home, "big"))
        status = ended(home, queued, "failed")
        assert status["error"]["kind"] == "config" and "401" in status["error"]["evidence"]
        asked_before = len(model.bodies)
        is_broken[0] = False
        again = lifecycle.submit(home, TrainRequest(resume=queued["run_id"]))
        assert any("last round" in warning for warning in again["warnings"])
        status = ended(home, queued)
        exam = sum(task["split"] == "heldout" for task in read_tasks(find_env(home, env)))
        # Neither the exam before nor the tasks that choose are asked a second time by the old one.
        systems = [body["messages"][0]["content"] for body in model.bodies[asked_before:]]
        assert systems.count(BAD) <= 2 * SETTINGS["prompts_per_step"]
        assert systems.count(GOOD) >= exam
    assert status["verdict"] == "better"
