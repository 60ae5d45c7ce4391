"""What stands beside a verdict: the reward where success ties, the word of the audit."""

import json
from pathlib import Path

from run_configs import evaluate_config, train_config
from simulated import exam_records

from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.side_notes import (
    audit_sentences,
    calls_to_go_on,
    rival_constant,
    sentences_on,
    tie_sentences,
)
from engine.evidence.verdict.sides import Sides
from engine.home.run_dir import RunDir
from engine.records.run_config import as_run_config


def rows(rewards: list[float], success: list[bool], stop: str = "stop") -> list:
    return exam_records(
        [
            {"task": f"t{i}", "reward": r, "success": s, "error": None, "stop_reason": stop}
            for i, (r, s) in enumerate(zip(rewards, success, strict=True))
        ]
    )


def notes(before: list, after: list) -> list[str]:
    return tie_sentences(Sides(before, after, "step 0", "step 9"), compare_rows(before, after))


def test_where_success_ties_the_reward_and_the_cut_answers_are_told():
    never = [False] * 40
    reward, cut = notes(rows([0.0] * 40, never), rows([0.4] * 40, never, "max_tokens"))
    assert reward.startswith("Success ties on every task; the reward went from 0 to 0.4")
    assert cut == "Answers cut by a limit went from 0% to 100%."


def test_where_success_moved_nothing_is_added():
    some = [i < 20 for i in range(40)]
    assert notes(rows([0.0] * 40, [False] * 40), rows([0.5] * 40, some)) == []
    assert notes(rows([0.5] * 40, some), rows([0.5] * 40, some)) == []  # nor where nothing moved


def test_a_failed_audit_is_named_with_what_it_pays(tmp_path: Path):
    config = as_run_config(evaluate_config(env_dir=str(tmp_path)))
    assert audit_sentences(config) == []
    audit = {"verdict": "risk", "risks": ["junk", "empty", "echo"]}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    (sentence,) = audit_sentences(config)
    assert "says risk (junk, empty are paid)" in sentence
    (tmp_path / "audit.json").write_text(json.dumps({"verdict": "ok"}))
    assert audit_sentences(config) == []


def constant_notes(folder: Path, answers: list[str], right: int) -> list[str]:
    """The notes on a model that lacked the form of these answers and now gets so many right."""
    tasks = [
        {"id": f"t{i}", "split": "heldout", "answer": [{"role": "assistant", "content": answer}]}
        for i, answer in enumerate(answers)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    n = len(answers)
    before, after = rows([0.0] * n, [False] * n), rows([1.0] * n, [i < right for i in range(n)])
    config = as_run_config(train_config(env_dir=str(folder)))
    sides = Sides(before, after, "step 0", "step 9")
    constant = rival_constant(sides, compare_rows(before, after), config)
    return sentences_on(constant)


def test_a_model_no_better_than_one_answer_to_all_tasks_is_told_so(tmp_path: Path):
    teams = ["a"] * 24 + ["b"] * 20 + ["c"] * 18 + ["d"] * 18
    (note,) = constant_notes(tmp_path, teams, 20)
    assert note.startswith("Always answering 'a' would be right on 24 of 80 of these tasks (30%)")
    assert constant_notes(tmp_path, teams, 60) == []


def test_tasks_of_many_answers_have_no_such_rival(tmp_path: Path):
    assert constant_notes(tmp_path, [f"{i}" for i in range(80)], 0) == []


def test_what_no_constant_beats_is_asked_of_the_training_rows_before_more_training(tmp_path: Path):
    before, after = rows([0.0] * 40, [False] * 40), rows([1.0] * 40, [i < 12 for i in range(40)])
    config = as_run_config(train_config(env_dir=str(tmp_path)))
    calls = calls_to_go_on(
        RunDir(tmp_path / "a-sft-1"), config, compare_rows(before, after), is_constant=True
    )
    assert [call.tool for call in calls] == ["evaluate", "diagnose"]
    assert calls[0].arguments["split"] == "train"
