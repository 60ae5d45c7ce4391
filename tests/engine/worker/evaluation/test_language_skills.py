"""The questions a language model is asked: each has one right answer, and replies are judged so."""

from collections import Counter

import pytest

from engine.cost import flops
from engine.worker.evaluation import language_skills
from engine.worker.evaluation.language_skills import QUESTIONS, is_right, tasks


def task(question: str) -> dict:
    return next(each for each in tasks() if each["prompt"][0]["content"] == question)


def test_every_skill_is_asked_as_often_as_the_others() -> None:
    asked = Counter(each["family"] for each in tasks())
    assert len(asked) == 8 and set(asked.values()) == {6}
    assert sum(asked.values()) == flops.LANGUAGE_TASKS
    assert flops.LANGUAGE_QUESTION in {question.text for question in QUESTIONS}


def test_no_question_is_asked_twice_and_ids_do_not_move() -> None:
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS)
    assert [each["id"] for each in tasks()] == [each["id"] for each in tasks()]
    assert len({each["id"] for each in tasks()}) == len(QUESTIONS)


@pytest.mark.parametrize("row", tasks(), ids=lambda row: row["id"])
def test_the_answer_alone_and_in_a_sentence_is_right_and_nothing_else(row: dict) -> None:
    for answer in row["answer"]:
        for reply in (answer, f"{answer.capitalize()}.", f"I think: {answer.upper()}, of course."):
            assert is_right(row, reply), reply
        assert not is_right(row, f'{{"answer": "{answer}"}}')
        assert not is_right(row, f"x{answer}x")
    for other in row["others"]:
        assert not is_right(row, f"{other}, not {row['answer'][0]}")
    for reply in ("", "I do not know.", row["prompt"][0]["content"][:9]):
        assert not is_right(row, reply), reply


def test_a_question_does_not_say_its_own_answer() -> None:
    """Or a reply that repeats it would be right, unless the answer is one of what is named."""
    for row in tasks():
        if row["family"] not in ("yes or no", "which of two"):
            assert not is_right(row, row["prompt"][0]["content"]), row


def test_what_is_named_first_counts() -> None:
    row = task("Which is colder, ice or fire? Answer with one word.")
    assert is_right(row, "Ice is colder than fire.")
    assert not is_right(row, "Fire is colder than ice.")
    assert not is_right(row, "Neither.")


def test_a_think_block_is_no_answer() -> None:
    row = task("What is the capital of France?")
    assert is_right(row, "<think>\nLyon or Paris?\n</think>\n\nParis")
    assert not is_right(row, "<think>\nParis\n</think>\n\nLyon")
    assert language_skills.is_right(row, "The capital of France is Paris.")
