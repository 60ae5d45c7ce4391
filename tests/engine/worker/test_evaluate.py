"""Scores that fail are said before whatever was scored, by each worker that scores."""

import json
from pathlib import Path
from typing import Any

import pytest
from loops import ENVIRONMENT, GRPO, PEBBLE, go, make_run, push

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.environments.registry import find_env, read_tasks
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.lines.evaluation_row import read_evaluation
from engine.records.settings import EvaluationSettings
from engine.runs import lifecycle
from engine.runs.evaluation import exam
from engine.worker.core.job import Job
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.evaluate import evaluate, probe, samples_of
from engine.worker.rollouts.guard import ERRORS_JUDGED_FROM

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ON_WRONG_ANSWERS = """
from envs import Score, SingleTurnEnv, Task

class Raising(SingleTurnEnv):
    def tasks(self):
        return [Task(str(i), f"What is {i % 9 + 1} + {i // 9 + 1}?",
                     answer=str(i % 9 + i // 9 + 2), split="train" if i < 40 else "heldout")
                for i in range(80)]
    def score(self, task, completion):
        kind = int(task.id) % 4
        if kind == 1 or (kind == 3 and completion != task.answer):
            raise ValueError("not this one")
        return Score(1.0, success=True)

def load_environment():
    return Raising()
"""
SETTINGS = GRPO | {"accept_reward_risk": True, "steps": 2, "prompts_per_step": 2, "eval_rows": 4}


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "raising", ON_WRONG_ANSWERS, "raising")


def asked(run: RunDir, **about: Any) -> Job[Any]:
    """What a run was asked, as evaluations and probes are."""
    models = [{"ref": "pebble", "base_path": str(PEBBLE), "adapter": None}]
    config = read_json(run.config) | {"models": models, "wall_limit_hours": 1.0, **about}
    if about["kind"] == "evaluate":
        names = EvaluationSettings.model_fields
        config["settings"] = {k: v for k, v in config["settings"].items() if k in names}
    write_json(run.config, config | {"algorithm": about["kind"]})
    return Job(run.path)


def finished(home: Home, env_id: str, kind: str, result: dict[str, Any]) -> dict[str, Any]:
    """What a wait says of a run of this kind that ended with `result`."""

    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        write_json(home.run(run_id).config, {"models": [{"ref": "pebble"}]})
        write_json(home.run(run_id).result, result)

    with Store(home) as store:
        made = store.insert_run(NewRun("ended", kind, kind, env_id, "pebble"), prepare).run_id
        for before, after in (("queued", "preparing"), ("preparing", "running")):
            store.set_state(made, after, only_from={before})
        store.set_state(made, "done", only_from={"running"})
    return lifecycle.wait(home, made)


def test_an_evaluation_says_first_how_many_scores_failed(home: Home, env_id: str) -> None:
    job = asked(
        make_run(home, env_id, "grpo", SETTINGS),
        kind="evaluate",
        split="heldout",
        rows=8,
        attempts=1,
    )
    result = evaluate(job)
    (model,) = result["models"]
    failed = f"{model['errors']} of 8 scores failed (they count as not solved), success"
    assert 0 < model["errors"] < 8
    assert result["summary"].startswith(f"pebble: {failed} {model['success']:.3f} over 8 tasks")
    said = finished(home, env_id, "evaluate", result)
    assert f"pebble: {failed}" in said["summary"]
    assert said["warnings"][0].startswith(f"{model['errors']} of 8 scores failed: ")
    assert [call["tool"] for call in said["next"][:2]] == ["diagnose", "read_rollouts"]
    assert said["next"][1]["arguments"]["pick"] == "error"


def test_an_evaluation_plays_the_tasks_at_the_positions_asked_for(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "grpo", SETTINGS)
    positions = {"task_indices": [0, 7, 39], "rows": 3}
    evaluate(asked(run, kind="evaluate", split="heldout", attempts=1, **positions))
    rows = [json.loads(line) for line in run.model_evals(0).read_text().splitlines()]
    assert {row["task"] for row in rows} == {"40", "47", "79"}  # the held-out tasks begin at 40


def test_an_exam_without_training_rows_is_pushed_and_evaluated(
    home: Home, env_id: str, tmp_path: Path
) -> None:
    exam = ENVIRONMENT.replace('"heldout" if (a + 2 * b) % 4 == 0 else "train"', '"heldout"')
    record = find_env(home, push(home, tmp_path / "exam", exam, "exam"))
    assert record.rows == {"train": 0, "heldout": 81}
    with pytest.raises(UserError, match="has no train rows") as refused:
        make_run(home, record.env_id, "grpo", SETTINGS)
    assert f'evaluate(env_id="{record.env_id}")' in str(refused.value.hint)
    of_exam = {"env_id": record.env_id, "env_dir": str(record.dir), "split": "heldout"}
    run = make_run(home, env_id, "grpo", SETTINGS)
    result = evaluate(asked(run, kind="evaluate", rows=100, attempts=1, **of_exam))
    rows = read_evaluation(run.model_evals(0))
    assert len(rows) == 81 and all(row.success is not None for row in rows)
    share = sum(bool(row.success) for row in rows) / 81
    assert result["models"][0]["success"] == pytest.approx(share, abs=1e-4)


def test_tasks_that_choose_no_checkpoint_are_asked_first(home: Home, env_id: str) -> None:
    """Whatever the number of rows: the reported half of a training run, then the other half."""
    record = find_env(home, env_id)
    tasks = read_tasks(record, "heldout")
    in_order = exam.ordered(tasks, len(tasks))
    halves = exam.halves(in_order)
    reported = [task["id"] for task in in_order if halves[task["id"]] == exam.TEST]
    run = make_run(home, env_id, "grpo", SETTINGS)
    evaluate(asked(run, kind="evaluate", split="heldout", rows=8, attempts=1))
    assert [row.task for row in read_evaluation(run.model_evals(0))] == reported[:8]
    more = make_run(home, env_id, "grpo", SETTINGS)
    evaluate(asked(more, kind="evaluate", split="heldout", rows=len(reported) + 2, attempts=1))
    rows = read_evaluation(more.model_evals(0))
    assert [row.task for row in rows[:-2]] == reported
    assert [row.half for row in rows] == [exam.TEST] * len(reported) + ["select"] * 2


def test_a_probe_never_takes_failed_scores_for_solved_tasks(home: Home, env_id: str) -> None:
    job = asked(make_run(home, env_id, "grpo", SETTINGS), kind="probe", samples=8)
    result = probe(job)
    failed = result["failed_scores"]
    assert 0 < failed["failed"] < failed["of"] == 32
    assert "scores failed" in result["summary"] and result["advice"][0]["lever"] == "score"
    assert result["pass_at_k"]["1"] <= 1 - failed["failed"] / failed["of"]
    said = finished(home, env_id, "probe", result)
    assert said["warnings"][0].startswith(f"{failed['failed']} of 32 scores failed")


def test_a_run_too_short_to_be_stopped_for_its_failed_scores_names_them(
    home: Home, env_id: str
) -> None:
    run = make_run(home, env_id, "grpo", SETTINGS | {"max_reward_errors": 0.0})
    result = go(run)
    failed = result["failed_scores"]
    assert 0 < failed["failed"] < failed["of"] == 16 < ERRORS_JUDGED_FROM
    rows = [json.loads(line) for line in run.rollouts(2).read_text().splitlines()]
    last = sum(bool(row["error"]) for row in rows)
    assert failed["last_step"] == {"failed": last, "of": 8}
    said = finished(home, env_id, "train", result)
    assert said["warnings"][0].startswith(f"{failed['failed']} of 16 scores failed")
    assert (f", {last} of 8 in the last step" in said["warnings"][0]) == (last > 0)


TOOL_TASKS = """
from envs import Score, SingleTurnEnv, Task

def tool(text):
    return {"type": "function", "function": {"name": "add", "description": text}}

class Tools(SingleTurnEnv):
    tools = [tool("Adds two numbers.")]
    def tasks(self):
        texts = ["Adds two numbers.", "Gives a sum."]
        return [Task(str(i), f"What is {i} + 1?", answer=str(i + 1),
                     split="heldout" if i < 6 else "train",
                     tools=[tool("Gives a sum.")] if i % 2 else None)
                for i in range(12)]
    def score(self, task, completion):
        return Score(float(completion == task.answer), success=completion == task.answer)

def load_environment():
    return Tools()
"""


def test_an_evaluation_asks_the_same_tasks_in_other_words(home: Home, tmp_path: Path) -> None:
    env_id = push(home, tmp_path / "tools", TOOL_TASKS, "tools")
    run = make_run(home, env_id, "grpo", SETTINGS | {"max_length": 512})
    job = asked(
        run, kind="evaluate", split="heldout", rows=6, attempts=1, perturb=["tools", "options"]
    )
    result = evaluate(job)
    kinds = [json.loads(line) for line in run.reworded_kinds.read_text().splitlines()]
    assert [(each["kind"], each["tasks"], each["left_out"]) for each in kinds] == [
        ("tools", 6, 0),
        ("options", 0, 6),
    ]
    rows = [json.loads(line) for line in run.reworded_evals(0, "tools").read_text().splitlines()]
    plain = [json.loads(line) for line in run.model_evals(0).read_text().splitlines()]
    assert [row["task"] for row in rows] == [row["task"] for row in plain]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in plain]
    shown = {row["tools"][0]["function"]["description"] for row in rows}
    assert not shown & {"Adds two numbers.", "Gives a sum."} and len(shown) > 1
    (model,) = result["evidence"]["robustness"]
    assert [kind["kind"] for kind in model["kinds"]] == ["tools", "options"]
    assert model["kinds"][0]["n"] == 6
    assert "options in another order: not asked" in result["evidence"]["summary"]
    told = finished(home, env_id, "evaluate", result)
    assert "tool descriptions reworded:" in told["summary"]
    assert told["result"]["evidence"]["robustness"] == [model]


def test_trajectories_are_judged_by_reward_success_error_and_length() -> None:
    right = Trajectory("t", [], [1], reward=1, success=True)
    failed = Trajectory("t", [], [1], error="boom")
    cut = Trajectory("t", [], [1], loss_mask=[1, 1, 0], stop_reason="max_tokens", completion="hm")
    (found,) = samples_of([Group("a", [right, failed, cut])])
    assert [s.solved for s in found] == [True, False, False]
    assert [s.error for s in found] == [False, True, False]
    assert (found[2].tokens, found[2].cut, found[2].text) == (2, True, "hm")
