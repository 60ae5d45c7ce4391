"""Data files with a scorer named by a word."""

import json
from pathlib import Path

import pytest

from envs.base import Task
from envs.config.problem import EnvProblem
from envs.config.settings import SCORERS
from envs.host.loader import load_folder
from envs.scored_rows import ScoredRows, fitting_scorer


def rows_file(folder: Path, *answers: object) -> Path:
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"task {n}", "answer": answer} for n, answer in enumerate(answers)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "wrong"),
    [
        (
            "exact",
            "[tino][27]",
            [" [tino][27]\n"],
            ["[tino][2]", "[tino] [27]", "", "x [tino][27]"],
        ),
        ("number", "1200", ["1,200", "The answer is 1200."], ["1201", "1200 or 1300", "", "12"]),
        ("json", '{"a": 1, "b": [2]}', ['{"b":[2],"a":1}'], ['{"a": 1}', "{}", "", '{"a": 1']),
        ("contains", "New York", ["It is new  york."], ["NewYork", "New Yorkers", "", "York New"]),
    ],
)
def test_each_word_pays_the_right_answers_and_no_others(tmp_path, scorer, answer, right, wrong):
    env = ScoredRows(scorer, rows_file(tmp_path, answer))
    (task,) = env.tasks()
    assert [env.score(task, text).reward for text in right] == [1.0] * len(right)
    assert [env.score(task, text).success for text in wrong] == [False] * len(wrong)


def test_a_thought_before_the_answer_is_no_part_of_what_is_compared(tmp_path):
    env = ScoredRows("exact", rows_file(tmp_path, "<think>14 - 5 = 9</think>\n\nLEFT=9 jars"))
    (task,) = env.tasks()
    assert task.answer_text == "LEFT=9 jars"
    assert env.score(task, "LEFT=9 jars").success is True  # score() never sees the thought


def test_a_list_of_everything_does_not_count_as_containing_the_answer(tmp_path):
    env = ScoredRows("contains", rows_file(tmp_path, "red"))
    task = Task("t", "Which colour?", "red")
    assert env.score(task, "The colour is red").reward == 1.0
    assert env.score(task, " ".join(f"colour{n}" for n in range(30)) + " red").reward == 0.0


def test_the_words_are_those_of_environment_toml(tmp_path):
    for scorer in SCORERS:
        ScoredRows(scorer, rows_file(tmp_path, "7"))  # a number, JSON and a text in one


@pytest.mark.parametrize(
    ("scorer", "answer", "fault"),
    [("number", "seven", "no number"), ("json", "{x", "no JSON"), ("exact", " ", "no answer")],
)
def test_a_row_that_the_scorer_cannot_score_is_refused_by_its_id(tmp_path, scorer, answer, fault):
    file = rows_file(tmp_path, "7", answer)
    with pytest.raises(EnvProblem, match=fault) as caught:
        ScoredRows(scorer, file)
    assert "rows-2" in str(caught.value)


def test_the_scorer_that_fits_is_named_by_the_answers():
    assert fitting_scorer(["1", "2.5", "1,000"]) == "number"
    assert fitting_scorer(['{"a": 1}', "[2]"]) == "json"
    assert fitting_scorer(["1", "one"]) == "exact"
    assert fitting_scorer(["1", "x" * 200]) == "" == fitting_scorer([]) == fitting_scorer(["1", ""])


def test_environment_toml_chooses_it_for_data_and_not_beside_code(tmp_path):
    rows_file(tmp_path, "yes", "no")
    (tmp_path / "environment.toml").write_text('scorer = "exact"\n')
    assert isinstance(load_folder(tmp_path), ScoredRows)
    (tmp_path / "environment.py").write_text("def load_environment(): ...\n")
    with pytest.raises(EnvProblem, match="scores by itself"):
        load_folder(tmp_path)
    (tmp_path / "environment.toml").write_text('scorer = "near"\n')
    with pytest.raises(EnvProblem, match="scorer is one of exact, number, json, contains"):
        load_folder(tmp_path)
