"""A rubric is a file beside the environment: criteria, weights, levels, and its judge."""

from pathlib import Path

import pytest

from envs import Task
from envs.judge import Judge, JudgeError, Rubric, _verdict_in

FILE = """
[judge]
url = "http://127.0.0.1:1/v1"
model = "some"
key = "RUBRIC_TEST_KEY"
prompt_price = 1

[[criteria]]
id = "short"
description = "Is short."
required = true
check = "short"

[[criteria]]
id = "kind"
description = "Is kind."
weight = 2
levels = ["rude", "cool", "kind"]
"""
TASK = Task("t", "Say hello.")


class Fixed:
    """A judge that always gives one value."""

    def grade(self, criteria, task, completion):
        return {criterion.id: 0.5 for criterion in criteria}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rubric.toml"
    path.write_text(FILE)
    return path


def test_it_scores_by_checks_and_judge_and_says_why(file: Path):
    rubric = Rubric.from_file(file, {"short": lambda task, text: len(text) < 5})
    score = rubric.score(TASK, "hey", Fixed())
    assert score.reward == pytest.approx((1 + 2 * 0.5) / 3) and score.success is True
    assert score.parts == {"short": (1.0, 1.0), "kind": (2.0, 0.5)}
    failed = rubric.score(TASK, "far too long", Fixed())
    assert (failed.reward, failed.success) == (0.0, False)
    assert failed.reason == "required and not met: short"


def test_its_judge_is_named_beside_it(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUBRIC_TEST_KEY", "k")
    judge = Judge.from_file(file)
    assert (judge.url, judge.model, judge.key, judge.prompt_price) == (
        "http://127.0.0.1:1/v1",
        "some",
        "k",
        1,
    )


def test_levels_are_chosen_by_number(file: Path):
    kind = Rubric.from_file(file).for_judge
    assert [_verdict_in(f'{{"kind": {n}}}', kind)["kind"] for n in (0, 1, 2)] == [0.0, 0.5, 1.0]
    for value in ("3", "0.5", "true", '"2"', "-1"):
        with pytest.raises(JudgeError, match="no level from 0 to 2"):
            _verdict_in(f'{{"kind": {value}}}', kind)


def test_a_calibration_holds_for_the_words_of_the_criteria(file: Path):
    before = Rubric.from_file(file).judged_hash
    file.write_text(FILE.replace("Is kind.", "Is very kind."))
    assert Rubric.from_file(file).judged_hash != before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[criteria]]", "[[criterion]]", "unknown table 'criterion'"),
        ('check = "short"', 'check = "long"', "the check 'long' of 'short' was not given"),
        ("weight = 2", "wieght = 2", "a criterion has no 'wieght'"),
        ("weight = 2", "weight = -2", "weight above 0"),
        ("weight = 2", "weight = true", "weight of a criterion cannot be True"),
        ('levels = ["rude", "cool", "kind"]', 'levels = ["kind"]', "at least two"),
        ("[judge]", "[judge", "cannot be read"),
    ],
)
def test_what_is_no_rubric_is_refused_by_name(file: Path, old: str, new: str, said: str):
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ValueError, match=r"rubric\.toml") as problem:
        Rubric.from_file(file, {"short": lambda task, text: 1.0})
    assert said in str(problem.value)


def test_ranking_reads_both_orders_so_that_a_place_earns_nothing(monkeypatch: pytest.MonkeyPatch):
    judge = Judge("http://127.0.0.1:1/v1", "m")
    asked: list[str] = []

    def reply(messages: list[dict[str, str]]) -> str:
        asked.append(messages[-1]["content"])
        return '{"1": 0.8, "2": 0.2}'  # whatever stands first

    monkeypatch.setattr(judge, "_ask", reply)
    assert judge.rank([], TASK, ["a", "b"]) == [0.5, 0.5]
    assert judge.prefers_first([], TASK, "a", "b") == pytest.approx(0.6)
    assert len(asked) == 2  # the third reading is the first again
