"""Practice questions: of the skills that are asked, and never one that is asked."""

import re
from collections import Counter

from engine.cost.batteries import PEBBLE_SKILLS
from engine.skills import drawn as drawn_words
from engine.skills import language, language_practice
from engine.skills.batteries import (
    QUESTIONS_PER_SKILL,
    SKILLS,
    in_turn,
    pebble_practice,
    pebble_tasks,
    practice_of,
)
from engine.skills.drawn import PRACTISED


def texts(tasks):
    return [task["prompt"][0]["content"] for task in tasks]


def test_no_practice_question_of_pebble_is_asked_in_any_wording():
    practice, asked = pebble_practice(), pebble_tasks()
    assert not set(texts(practice)) & set(texts(asked))
    # The same word or the same numbers, however the question is worded.
    for skill in ("copy", "upper", "reverse"):  # the answer says the word
        answers = {task["answer"] for task in asked if task["family"] == skill}
        assert not answers & {task["answer"] for task in practice if task["family"] == skill}
    for skill in ("add_one", "compare"):
        numbers = [
            {tuple(sorted(re.findall(r"\d+", text))) for text in texts(side)}
            for side in (
                [task for task in asked if task["family"] == skill],
                [task for task in practice if task["family"] == skill],
            )
        ]
        assert numbers[0] and not numbers[0] & numbers[1]


def test_every_skill_that_is_asked_is_practised_by_as_many_questions_as_estimates_count():
    practice = practice_of("pebble")
    assert Counter(task["family"] for task in practice.tasks) == dict.fromkeys(
        SKILLS, QUESTIONS_PER_SKILL
    )
    assert len(set(texts(practice.tasks))) == len(practice.tasks) == PEBBLE_SKILLS.practice
    assert pebble_practice() == practice.tasks, "the same in every run"
    others = practice_of("any other")
    asked = Counter(question.skill for question in language.QUESTIONS)
    assert Counter(task["family"] for task in others.tasks) == dict.fromkeys(asked, PRACTISED)
    assert len(set(texts(others.tasks))) == len(others.tasks)


def test_no_practice_question_in_english_is_about_a_thing_that_is_asked():
    asked = {question.text.lower() for question in language.QUESTIONS}
    for question in language_practice.QUESTIONS:
        assert question.text.lower() not in asked
    # What differs between the questions of one wording is the thing that they are about.
    for skill in ("capitals", "opposites", "plurals", "languages"):
        things = [
            {re.sub(r"[?.]", "", each.text).split()[-1] for each in side if each.skill == skill}
            for side in (language.QUESTIONS, language_practice.QUESTIONS)
        ]
        assert things[0] and not things[0] & things[1]
    # A pair of opposites is one fact, in whichever direction it is asked.
    answers = {
        word
        for question in language.QUESTIONS
        if question.skill == "opposites"
        for word in question.answers
    }
    practised = {
        question.text.rstrip("?").split()[-1]
        for question in language_practice.QUESTIONS
        if question.skill == "opposites"
    }
    assert not answers & practised


def things(question):
    """The words of a drawn question that its side alone may use."""
    words = re.findall(r"[A-Za-z]+|[0-9]+", question.text)
    if question.skill == "arithmetic":
        return {frozenset(words[2:4])}
    drawn = {*drawn_words.NAMES, *drawn_words.NOUNS, *drawn_words.ANIMALS, *drawn_words.ADJECTIVES}
    return (drawn & set(words) - {"old"}) | ({words[-1]} if "three" in words else set())


def test_no_drawn_practice_question_is_about_a_word_pair_of_numbers_or_topic_that_is_asked():
    for skill in ("copying", "arithmetic", "JSON", "reading JSON", "lists", "instructions"):
        asked, practised = (
            {thing for each in side if each.skill == skill for thing in things(each)}
            for side in (language.QUESTIONS, language_practice.QUESTIONS)
        )
        assert asked and practised and not asked & practised, skill


def test_questions_in_turn_are_of_every_skill_before_any_comes_again():
    rows = in_turn(practice_of("pebble").tasks)
    assert {task["family"] for task in rows[: len(SKILLS)]} == set(SKILLS)
    assert sorted(texts(rows)) == sorted(texts(practice_of("pebble").tasks))
