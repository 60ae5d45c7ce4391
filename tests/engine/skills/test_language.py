"""The questions a language model is asked: each has one right answer, and replies are judged so."""

import json
from collections import Counter

import pytest

from engine.skills.batteries import battery_of
from engine.skills.drawn import ASKED
from engine.skills.question import FEWEST_THINGS, is_right

BATTERY = battery_of("any other")
TASKS = BATTERY.tasks
WRITTEN = [task for task in TASKS if task["check"] == "first"]


def task(question: str) -> dict:
    return next(each for each in TASKS if each["prompt"][0]["content"] == question)


def of_check(check: str) -> list[dict]:
    return [task for task in TASKS if task["check"] == check]


def test_every_skill_is_asked_and_together_a_loss_of_five_points_shows() -> None:
    asked = Counter(each["family"] for each in TASKS)
    assert Counter(asked.values()) == {6: 8, ASKED: 6}
    # Without gains six lost answers are the fewest that a two-sided test calls significant.
    assert 2 * 0.5**6 < 0.05 < 2 * 0.5**5 and 6 / len(TASKS) <= 0.05


def test_no_question_is_asked_twice_and_ids_do_not_move() -> None:
    assert len({each["prompt"][0]["content"] for each in TASKS}) == len(TASKS)
    assert list(battery_of("another").tasks) == list(TASKS)
    assert len({each["id"] for each in TASKS}) == len(TASKS)


def test_fewer_questions_are_of_as_many_skills() -> None:
    few = BATTERY.first(28).tasks
    assert set(Counter(each["family"] for each in few).values()) == {2}
    assert BATTERY.first(len(TASKS)).tasks == TASKS


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row["id"])
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
    named = ("yes or no", "which of two", "reading JSON", "lists")
    for row in WRITTEN:
        if row["family"] not in named:
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


def test_a_copied_sentence_may_stand_in_quotes_but_misses_no_word() -> None:
    for row in (each for each in TASKS if each["family"] == "copying"):
        sentence = row["prompt"][0]["content"].partition(": ")[2]
        assert is_right(row, sentence) and is_right(row, f'Sure: "{sentence.lower()}"')
        assert not is_right(row, sentence.replace("The ", "The very "))
        assert not is_right(row, json.dumps({"sentence": sentence}))


def test_a_json_object_is_compared_by_its_values() -> None:
    for row in of_check("json"):
        (expected,) = row["answer"]
        values = json.loads(expected)
        assert is_right(row, expected) and is_right(row, f"```json\n{expected}\n```")
        assert is_right(row, json.dumps({**values, "age": str(values["age"])}, indent=2))
        assert not is_right(row, json.dumps({**values, "city": "Rome"}))
        assert not is_right(row, json.dumps({**values, "age": values["age"] + 1}))
        assert not is_right(row, expected[:-1]) and not is_right(row, row["prompt"][0]["content"])
        assert not is_right(row, '{"name": }') and not is_right(row, "")


def test_instructions_are_followed_in_words() -> None:
    for row in of_check("phrases"):
        if row["family"] == "instructions":
            name = row["answer"][1].capitalize()
            assert is_right(row, f"Hello, {name}! How are you?") and not is_right(row, "Hello!")
    for row in of_check("sentence"):
        (word,) = row["answer"]
        assert is_right(row, f"I like the {word}.") and not is_right(row, f"{word}.")
        assert not is_right(row, "I like the thing.")
    for row in of_check("three"):
        things = row["answer"]
        assert is_right(row, f"1. {things[0]}\n2. {things[1]}\n3. {things[2]}")
        assert not is_right(row, f"{things[0]}, {things[0]}, {things[1]}")
        assert len(set(things)) > FEWEST_THINGS
