"""Stored answers under another reward: no model, no torch, every answer accounted for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answered import GUESS, SUMS, answer, evaluation, push, training

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.reading.rollout_pages import RolloutQuery
from engine.runs.reading.rollouts import read_rollouts
from engine.runs.submit.regrading import preview_calls
from engine.runs.submit.requests import EvaluationRequest
from mcp_server.api import verbs

pytestmark = pytest.mark.timeout(30)

# Pays a tenth of a point for every character beside the right answer.
CHATTY = SUMS.replace("Score(float(right),", "Score(len(completion) / 10,")
ANSWERS = {
    "brief": [
        answer("1+1", "2", 1.0, 0),
        answer("1+1", "it is 2", 0.0, 1),
        answer("1+2", "3", 1.0),
    ],
    "wordy": [answer("1+1", "it is 2", 0.0, 0), answer("1+2", "it is three", 0.0)],
}


def done(home: Home, queued: dict[str, Any]) -> tuple[RunDir, dict[str, Any]]:
    """The run after it has ended well, with its result."""
    status = lifecycle.wait(home, queued["run_id"], "end", 25)
    while status["state"] == "running":  # a loaded machine
        status = lifecycle.wait(home, queued["run_id"], "end", 5)
    assert status["state"] == "done", status
    return home.run(queued["run_id"]), status["result"] | {"summary": status["summary"]}


def rows_of(run: RunDir, index: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.model_evals(index).read_text().splitlines()]


def test_a_regrade_scores_what_is_stored_and_says_which_order_turns_round(
    home: Home, tmp_path: Path
):
    first, second = push(home, tmp_path / "a"), push(home, tmp_path / "b", CHATTY, "chatty")
    played = evaluation(home, first, ANSWERS)
    run, result = done(
        home, lifecycle.submit_evaluation(home, EvaluationRequest(env_id=second, regrade=played.id))
    )
    found = result["regrade"]
    # "2" and "3" earned 1.0 and earn 0.1; "it is 2" earned 0 and earns 0.7; "it is three" 1.1.
    assert found["model_flips"] == [["brief", "wordy"]] and found["rows"] == 5
    assert found["attempts"] == {"kept": 0, "reversed": 1, "tied": 0, "parted": 0}
    assert [(r["reward_before"], r["reward"]) for r in rows_of(run)] == [
        (1.0, 0.1),
        (0.0, 0.7),
        (1.0, 0.1),
    ]
    assert result["source_files"].keys() == {"evals/model_0.jsonl", "evals/model_1.jsonl"}
    assert "wordy is ahead of brief now" in result["summary"]
    compared = compare_runs(home, ["brief", "wordy"], second)
    assert compared["comparisons"][0]["n"] == 2 and compared["env_id"] == second
    read = read_rollouts(home, RolloutQuery(run.id, pick="best", step=1, limit=1)).to_json()
    assert read["rollouts"][0]["reward"] == 1.1


def test_a_regrade_of_rollouts_says_what_the_new_reward_would_have_given_to_learn_from(
    home: Home, tmp_path: Path
):
    """Groups that all earn nothing differ once nearness is paid, before anything is trained."""
    near = SUMS.replace("Score(float(right),", "Score(0.5 * ('2' in completion) + 0.5 * right,")
    assert near != SUMS
    first, second = push(home, tmp_path / "a"), push(home, tmp_path / "b", near, "near")
    members = [answer("1+1", "2 or so", 0.0), answer("1+1", "three", 0.0)]
    others = [answer("1+2", "none", 0.0), answer("1+2", "four", 0.0)]
    rollouts = {step: [*members, *others] for step in (1, 2)}
    run = training(home, first, rollouts=rollouts)
    queued = lifecycle.submit_evaluation(
        home, EvaluationRequest(env_id=second, regrade=run.id, split="train")
    )
    _, result = done(home, queued)
    groups = result["regrade"]["groups"]
    assert (groups["groups"], groups["tasks"]) == (4, 2)
    assert groups["before"]["effective"] == 0.0 and groups["before"]["too_hard"] == 1.0
    assert groups["after"]["effective"] == 0.5 and groups["after"]["too_hard"] == 0.5
    assert groups["effective_change"]["change"] == 0.5
    assert groups["std_change"]["change"] == 0.125  # 0.25 in half of the groups
    assert "Of 4 groups 0% differ by the old reward and 50% by the new one" in result["summary"]


def test_a_push_of_another_version_suggests_to_score_the_groups_of_the_last_run_by_it(
    home: Home, tmp_path: Path
):
    folder = tmp_path / "sums"
    push(home, folder, name="sums")
    assert [call["tool"] for call in verbs.push_env(home, str(folder), "sums")["next"]] == [
        "dry_run"
    ]
    first = push(home, folder, name="sums")
    training(home, first, rollouts={})  # it has no groups to score
    run = training(home, first, rollouts={1: [answer("1+1", "2", 1.0)]})
    assert preview_calls(home, first) == []  # the version that it trained on
    (folder / "environment.py").write_text(CHATTY)
    reply = verbs.push_env(home, str(folder), "sums")
    arguments = {"env_id": reply["env_id"], "regrade": run.id, "split": "train"}
    assert reply["next"][-1] == {"tool": "evaluate", "arguments": arguments}
    queued = lifecycle.submit_evaluation(home, EvaluationRequest(**arguments))
    done(home, queued)


def test_the_process_loads_no_torch_and_needs_no_interpreter_with_it(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    played = evaluation(home, env, ANSWERS)
    queued = lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, regrade=played.id))
    run, _ = done(home, queued)
    config = json.loads(run.config.read_text())
    assert launcher.trainer_command(home, config["algorithm"])[0] == sys.executable
    code = (
        "import sys; from pathlib import Path; from engine.runs.evaluation.regrade import main; "
        "status = main(Path(sys.argv[1])); "
        "print(status, [n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers')])"
    )
    again = subprocess.run(
        [sys.executable, "-P", "-c", code, str(run.path)], capture_output=True, text=True
    )
    assert again.stdout.strip() == "0 []", again.stderr


def test_an_answer_that_could_not_be_scored_can_be_now_and_is_in_no_comparison(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    broken = answer("1+1", "2", 0.0, error="score() raised", stop_reason="error", success=None)
    played = evaluation(home, env, {"pebble": [broken, answer("1+2", "3", 1.0)]})
    run, result = done(
        home, lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, regrade=played.id))
    )
    mended, same = rows_of(run)
    assert (mended["reward"], mended["success"], mended["error"]) == (1.0, True, None)
    assert mended["stop_reason"] == "stop" and mended["error_before"] == "score() raised"
    assert result["regrade"]["rows"] == 1 and result["regrade"]["changed"] == 0
    assert same["reward"] == same["reward_before"] == 1.0


def test_tasks_that_are_not_the_same_here_are_skipped_and_counted(home: Home, tmp_path: Path):
    first = push(home, tmp_path / "a")
    other = SUMS.replace("range(1, 10) for b in range(1, 10)", "(1, 9) for b in (1, 2)")
    second = push(home, tmp_path / "b", other.replace("What is {a} + 2", "Say {a} + 2"), "less")
    asked = [{"role": "user", "content": "What else is 1 + 2?"}]
    rows = [answer("1+1", "2", 1.0), answer("4+4", "8", 1.0), answer("1+2", "3", 1.0, prompt=asked)]
    rows.append(answer("9+1", "10", 1.0) | {"messages": [], "completion": None})
    played = evaluation(home, first, {"pebble": rows})
    run, result = done(
        home, lifecycle.submit_evaluation(home, EvaluationRequest(env_id=second, regrade=played.id))
    )
    assert [row["task"] for row in rows_of(run)] == ["1+1"]
    assert result["regrade"]["skipped"] == {
        "unknown_task": 1,
        "changed_prompt": 1,
        "no_answer": 1,
    }


def test_nothing_that_can_be_scored_is_a_failure_that_says_why(home: Home, tmp_path: Path):
    first, second = push(home, tmp_path / "a"), push(home, tmp_path / "g", GUESS, "guess")
    played = evaluation(home, first, ANSWERS)
    queued = lifecycle.submit_evaluation(home, EvaluationRequest(env_id=second, regrade=played.id))
    status = lifecycle.wait(home, queued["run_id"], "end", 25)
    assert status["state"] == "failed" and status["error"]["kind"] == "config"
    assert "no task of that id" in status["error"]["message"]


def test_answers_of_several_turns_are_replayed_and_other_replies_are_errors(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "g", GUESS, "guess")

    def played(task: str, reply: str, *said: str) -> dict[str, Any]:
        messages = [{"role": "assistant", "content": said[0]}]
        for text in said[1:]:
            messages += [{"role": "user", "content": reply}, {"role": "assistant", "content": text}]
        prompt = [{"role": "user", "content": f"Guess {task[1:]}."}]
        return answer(task, said[-1], 0.0, messages=messages, prompt=prompt)

    rows = [played("g1", "REPLY", "3", "1"), played("g2", "no", "3", "2"), played("g3", "-", "3")]
    source = evaluation(home, env, {"pebble": rows})
    run, _ = done(
        home, lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, regrade=source.id))
    )
    first, second, third = rows_of(run)
    assert first["reward"] == 0.5 and first["success"] is True
    assert "answers otherwise" in second["error"] and second["stop_reason"] == "env_error"
    assert third["reward"] == 1.0


def test_a_training_run_gives_its_exams_or_its_rollouts(home: Home, tmp_path: Path):
    first, second = push(home, tmp_path / "a"), push(home, tmp_path / "b", CHATTY, "chatty")
    exam = [answer("9+1", "10", 1.0), answer("9+2", "ten", 0.0)]
    rollouts = {1: [answer("1+1", "2", 1.0)], 2: [answer("1+1", "two", 0.0)]}
    run = training(home, first, rollouts=rollouts, evals=dict.fromkeys(range(0, 100, 10), exam))
    write_json(run.manifest, {"eval_sampling": {"max_tokens": 7, "temperature": 0.0}})
    run.checkpoint(50).mkdir(parents=True)
    (run.checkpoint(50) / "MANIFEST.json").write_text("{}")
    run.best.symlink_to("step_000050")
    queued = lifecycle.submit_evaluation(home, EvaluationRequest(env_id=second, regrade=run.id))
    assert queued["models"][0] == "pebble" and len(queued["models"]) == 8
    assert {f"{run.id}@step50", f"{run.id}@step90"} < set(queued["models"])
    assert any("2 of the evaluated steps" in note for note in queued["warnings"])
    graded, _ = done(home, queued)
    assert json.loads(graded.config.read_text())["settings"]["max_tokens"] == 7
    assert [row["reward"] for row in rows_of(graded)] == [0.2, 0.3]
    queued = lifecycle.submit_evaluation(
        home, EvaluationRequest(env_id=second, regrade=run.id, split="train")
    )
    _, result = done(home, queued)
    assert [m["ref"] for m in result["models"]] == [
        f"{run.id}, rollouts of step 1",
        f"{run.id}, rollouts of step 2",
    ]
    assert result["regrade"]["model_flips"]
    assert "groups" not in result["regrade"]  # every task was answered once in a step


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"models": ["pebble"]}, "models"),
        ({"attempts": 4}, "attempts"),
        ({"settings": {"max_tokens": 8}}, "settings"),
        ({"rows": 0}, "rows"),
    ],
)
def test_what_a_regrade_would_ignore_is_refused(
    home: Home, tmp_path: Path, given: dict[str, Any], field: str
):
    env = push(home, tmp_path / "a")
    played = evaluation(home, env, ANSWERS)
    with pytest.raises(UserError) as refused:
        lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, regrade=played.id, **given))
    assert refused.value.field == field
    with Store(home) as store:
        assert [row.run_id for row in store.list_runs()] == [played.id]


def test_a_run_without_stored_answers_is_refused(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    run = training(home, env, algorithm="sft")
    with pytest.raises(UserError) as refused:
        lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, regrade=run.id))
    assert refused.value.code == "NO_EVALUATION"


def test_fewer_rows_take_the_tasks_an_evaluation_would_take_and_say_so(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    played = evaluation(home, env, {"pebble": [answer(f"1+{b}", "x", 0.0) for b in range(1, 10)]})
    queued = lifecycle.submit_evaluation(
        home, EvaluationRequest(env_id=env, regrade=played.id, rows=3)
    )
    assert any("3 of the 9 stored tasks" in note for note in queued["warnings"])
    run, _ = done(home, queued)
    assert len(rows_of(run)) == 3
