"""Some of an exam's answers are scored again by a process that has scored nothing else."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from answered import GUESS, SUMS, answer, push, training

from engine.environments.registry import find_env, read_tasks
from engine.evidence.verdict.fresh_scores import rescored, rewards_depend_on_past, warnings
from engine.home.run_dir import Home, RunDir
from engine.runs.evaluation import stored_answers
from envs.host.pipe import Pipe

pytestmark = pytest.mark.timeout(30)

GAME = "import random\n" + GUESS.replace("range(4)", "range(9)")


def asked(home: Home, env_id: str, rows: list[dict[str, Any]], half: str = "") -> RunDir:
    """A run whose answers of step 3 were scored again; what was skipped is an error."""
    run = training(home, env_id, evals={3: rows})
    record = find_env(home, env_id)
    told: list[str] = []
    with stored_answers.rescoring(run, record, told.append) as begin:
        begin(run.evals(3), half, {task["id"]: task for task in read_tasks(record)})
    assert told == []
    return run


def sums(count: int, paid: float | None = None) -> list[dict[str, Any]]:
    """Answers that are right by turns, with their honest rewards, or all `paid` alike."""
    rows = []
    for at in range(count):
        a, b = 1 + at % 9, 1 + at // 9
        said = str(a + b + at % 2)
        rows.append(answer(f"{a}+{b}", said, float(at % 2 == 0) if paid is None else paid))
    return rows


def test_honest_rewards_are_found_again(home: Home, tmp_path: Path):
    found = rescored(asked(home, push(home, tmp_path / "a"), sums(60)))
    assert (found["asked"], found["scored"], found["differing"]) == (24, 24, 0)
    assert not rewards_depend_on_past(found) and found["deterministic"] and not found["network"]


def test_a_few_answers_are_all_asked_and_failed_or_other_ones_are_not(home: Home, tmp_path: Path):
    rows = [*sums(5), answer("1+1", "2", 0.0, 1, error="ValueError"), answer("99+1", "7", 0.0)]
    rows.append(answer("2+2", "5", 1.0, 2, half="select"))
    found = rescored(asked(home, push(home, tmp_path / "a"), rows, "report"))
    assert (found["asked"], found["scored"], found["differing"]) == (5, 5, 0)


def test_forged_rewards_are_told_with_numbers_and_an_example(home: Home, tmp_path: Path):
    run = asked(home, push(home, tmp_path / "a"), sums(60, paid=1.0))
    found = rescored(run)
    assert found["scored"] == 24 and 4 <= found["differing"] <= 20 and found["wavering"] == 0
    example = found["examples"][0]
    assert (example["first"], example["second"]) == (1.0, 0.0) and example["task"]
    assert rewards_depend_on_past(found)
    (said,) = warnings(run)
    assert f"{found['differing']} of 24 answers got another reward in a new env process" in said


def test_chance_in_a_scorer_is_not_taken_for_a_state(home: Home, tmp_path: Path):
    moody = SUMS.replace(
        "right = completion == task.answer", "right = __import__('random').random() < 0.5"
    )
    found = rescored(asked(home, push(home, tmp_path / "a", moody), sums(60)))
    assert found["differing"] > 0 and found["wavering"] > 0
    assert found["deterministic"] is False, "the audit saw it at push"
    assert not rewards_depend_on_past(found) and not rewards_depend_on_past(
        found | {"deterministic": True}
    )


def test_several_turns_are_played_again(home: Home, tmp_path: Path):
    def played(task: str, *said: str, heard: str = "no") -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in said:
            messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": heard}]
        return answer(task, said[-1], 1 / len(said), messages=messages[:-1], prompt=[])

    rows = [played(f"g{n}", "x", str(n)) for n in range(1, 8)] + [played("g8", "1", "2", "3")]
    env_id = push(home, tmp_path / "a", GAME.replace("REPLY", "no"), "game")
    found = rescored(asked(home, env_id, rows))
    assert (found["scored"], found["differing"], found["skipped"]) == (8, 0, {})
    rows[0]["reward"] = 1.0
    assert rescored(asked(home, env_id, rows))["differing"] == 1


def test_turns_that_are_answered_otherwise_are_skipped_and_said_so(home: Home, tmp_path: Path):
    moody = GAME.replace('"REPLY"', "str(random.random())")
    heard = [
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "0.5"},
        {"role": "assistant", "content": "1"},
    ]
    rows = [answer("g1", "1", 0.5, messages=heard), answer("g2", "2", 1.0, messages=heard[2:])]
    rows[1]["messages"] = [{"role": "assistant", "content": "2"}]
    found = rescored(asked(home, push(home, tmp_path / "a", moody, "game"), rows))
    assert (found["scored"], found["skipped"]) == (1, {"unrepeatable": 1})


def test_an_environment_that_is_gone_costs_the_run_nothing(home: Home, tmp_path: Path):
    env_id = push(home, tmp_path / "a")
    record = find_env(home, env_id)
    run = training(home, env_id, evals={3: sums(9)})
    (record.source / "environment.py").write_text("raise ValueError('gone')")
    told: list[str] = []
    with stored_answers.rescoring(run, record, told.append) as begin:
        begin(run.evals(3), "", {task["id"]: task for task in read_tasks(record)})
    found = rescored(run)
    assert (found["scored"], found["differing"]) == (0, 0) and "gone" in found["why"]
    assert not rewards_depend_on_past(found)


def test_a_scorer_that_is_slow_is_asked_for_a_few_seconds_only(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stored_answers, "SECONDS", 0.0)
    found = rescored(asked(home, push(home, tmp_path / "a"), sums(60)))
    assert (found["asked"], found["scored"], found["why"]) == (24, 0, "the time was up")


def test_a_caller_that_fails_does_not_wait_for_an_environment_that_loads_slowly(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    env_id = push(home, tmp_path / "a")
    run, record = training(home, env_id, evals={3: sums(5)}), find_env(home, env_id)
    source = record.source / "environment.py"
    source.write_text("import time\ntime.sleep(600)\n" + source.read_text())
    loading, greet = threading.Event(), Pipe.greet

    def seen(pipe: Pipe, seconds: float) -> Any:
        loading.set()
        return greet(pipe, seconds)

    monkeypatch.setattr(Pipe, "greet", seen)
    began = time.monotonic()
    with pytest.raises(KeyError), stored_answers.rescoring(run, record, lambda _: None):
        assert loading.wait(20)
        raise KeyError("cancelled")
    assert time.monotonic() - began < 20 < record.limits.start_seconds
    assert not run.rescored.exists()


def test_a_fault_beside_a_run_is_told_and_costs_it_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    env_id = push(home, tmp_path / "a")
    run, record = training(home, env_id, evals={3: sums(5)}), find_env(home, env_id)
    monkeypatch.setattr(stored_answers, "score_again", lambda *_: 1 / 0)
    told: list[str] = []
    with stored_answers.rescoring(run, record, told.append) as begin:
        begin(run.evals(3), "", {task["id"]: task for task in read_tasks(record)})
    assert told == ["ZeroDivisionError: division by zero"] and not run.rescored.exists()
