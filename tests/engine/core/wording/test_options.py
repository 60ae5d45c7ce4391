"""Options change places, and the letter of the right one moves with its text."""

import random
from typing import Any

import pytest

from engine.core.wording.options import moved_options
from envs.json_types import TaskRow

QUESTION = "Which is a fruit?\nA) chair\nB) apple\nC) river\nAnswer with the letter."


def task(text: str = QUESTION, answer: str = "B", **metadata: Any) -> TaskRow:
    return {
        "id": "q",
        "prompt": [{"role": "user", "content": text}],
        "answer": [{"role": "assistant", "content": answer}],
        "metadata": metadata,
    }


@pytest.mark.parametrize("seed", range(6))
def test_every_text_moves_and_the_letters_say_where(seed: int) -> None:
    moved = moved_options(task(), random.Random(seed))
    assert moved is not None
    before = dict(zip("ABC", ("chair", "apple", "river"), strict=True))
    for reading in moved.readings:
        lines = reading["prompt"][0]["content"].split("\n")
        assert lines[0] == "Which is a fruit?" and lines[-1] == "Answer with the letter."
        after = {line[0]: line[3:] for line in lines[1:-1]}
        assert sorted(after) == ["A", "B", "C"]
        for old, text in before.items():
            assert after[moved.letters[old]] == text and moved.letters[old] != old


def test_the_right_letter_moves_in_answer_metadata_and_position() -> None:
    given = task(gold="B", label=1, other="C", count=1)
    moved = moved_options(given, random.Random(0))
    assert moved is not None
    new = moved.letters["B"]
    _, answered, lettered, placed = moved.readings
    assert answered["answer"][-1]["content"] == new and answered["metadata"]["gold"] == "B"
    assert lettered["metadata"] == {"gold": new, "label": 1, "other": "C", "count": 1}
    assert placed["metadata"] == {**lettered["metadata"], "label": "ABC".index(new)}
    assert given == task(gold="B", label=1, other="C", count=1)


@pytest.mark.parametrize("answer", ["(B)", "The answer is B.", "B) apple"])
def test_a_letter_is_seen_in_the_usual_forms(answer: str) -> None:
    moved = moved_options(task(answer=answer), random.Random(0))
    assert moved is not None
    expected = answer.replace("B", moved.letters["B"])
    assert moved.readings[1]["answer"][-1]["content"] == expected


def test_an_answer_that_is_the_text_stays_and_its_letter_is_known() -> None:
    moved = moved_options(task(answer="apple"), random.Random(0))
    assert moved is not None and moved.answer_letter == "B"
    assert [reading["answer"][-1]["content"] for reading in moved.readings] == ["apple"]


@pytest.mark.parametrize(
    "text",
    [
        "What is 2 + 2?",
        "Pick.\nA) one",
        "Pick.\nA) one\nC) two",
        "Pick.\nA) one\nB) two\nC) none of the above",
        "Pick.\nA) one\nB) two\nC) A and B",
    ],
)
def test_options_that_speak_of_others_or_are_none_stay(text: str) -> None:
    assert moved_options(task(text), random.Random(0)) is None
