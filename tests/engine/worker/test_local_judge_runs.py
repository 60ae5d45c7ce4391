"""A run whose judge is a model of its home: served beside it, counted, named in the manifest."""

import json
from pathlib import Path

import pytest
from loops import BASE, go, make_run, metrics, push
from stand_ins import stand_in

from engine.environments.registry import find_env, open_process, read_tasks
from engine.home.run_dir import Home
from engine.machine.processes import deployments
from engine.models.served.judge import local_judge
from engine.records.manifest import read_manifest
from engine.worker.core.failures import WorkerFailure
from envs.host.judge_budget import JudgeBudget

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]
ENGINE = Path(__file__).parents[1]
ENV = """
from pathlib import Path
from envs import SingleTurnEnv, Task
from envs.judge import Judge, Rubric

FILE = Path(__file__).with_name("rubric.toml")

class Judged(SingleTurnEnv):
    rubric, judge = Rubric.from_file(FILE), Judge.from_file(FILE)
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(40)]
    def score(self, task, completion):
        return self.rubric.score(task, completion, self.judge)

def load_environment():
    return Judged()
"""
RUBRIC = """
judge = "model:pebble"

[[criteria]]
id = "kind"
description = "Is kind."
"""
FEW = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "eval_rows": 2, "eval_every": 2}


@pytest.fixture
def judged(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An environment whose judge is pebble; at the end nothing of it is served."""
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "rubric.toml").write_text(RUBRIC)
    monkeypatch.setenv("HONESMITH_HOME", str(home.root))
    yield folder
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


def test_a_run_has_its_judge_served_and_names_it_in_the_manifest(
    home: Home, judged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, server=ENGINE / "fake_server.py")
    (home.root / "grade").write_text('{"kind": 0.5}')
    env_id = push(home, judged, ENV)
    run = make_run(home, env_id, "grpo", BASE["grpo"] | FEW)
    go(run)
    step = metrics(run)[1]
    assert 1 <= step["judge_calls"] <= 4 and step["judge_cost"] == 0
    assert step["judge_tokens"] == 15 * step["judge_calls"]
    assert step["reward_errors"] == 0 and step["reward_mean"] == 0.5
    (used,) = read_manifest(run.manifest).judges
    judge = local_judge(home, "model:pebble")
    assert (used.ref, used.served_as, used.weights) == ("model:pebble", "pebble", judge.weights)
    assert used.identity == judge.identity
    for row in deployments.living(home):
        deployments.stop(home, row, "the next one fails")
    (home.root / "behave").write_text("fail")
    unserved = make_run(home, env_id, "grpo", BASE["grpo"] | FEW, run_id="sums-run-2")
    with pytest.raises(WorkerFailure) as caught:
        go(unserved)
    assert caught.value.kind == "endpoint" and "the weights are damaged" in caught.value.evidence


@pytest.mark.long
def test_pebble_itself_is_asked_through_the_port_of_the_box(home: Home, judged: Path) -> None:
    record = find_env(home, push(home, judged, ENV))
    (row,) = deployments.living(home)
    with open_process(record) as process:
        process.judge_budget = JudgeBudget()
        score = process.score(read_tasks(record)[0], "A kind answer.")
        used = process.judge_budget.used
    # Pebble was never taught to grade: what it said is in the error, and the score does not count.
    assert "it replied with no JSON object" in str(score["error"]), json.dumps(score)
    assert used.calls == 1 and used.cost == 0 and used.tokens > 500
    assert deployments.served(home, row) == ["pebble"]
