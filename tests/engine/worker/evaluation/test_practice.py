"""Practice questions: of the skills that are asked, and never one that is asked."""

import re
from collections import Counter

from engine.cost import flops
from engine.worker.evaluation import language_practice, language_skills
from engine.worker.evaluation.practice import QUESTIONS_PER_SKILL, pebble_practice, practice_of
from engine.worker.evaluation.prior_skills import SKILLS, pebble_tasks


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
    assert len(set(texts(practice.tasks))) == len(practice.tasks) == flops.PEBBLE_SKILLS.practice
    assert pebble_practice() == practice.tasks, "the same in every run"
    language = practice_of("any other")
    asked = Counter(question.skill for question in language_skills.QUESTIONS)
    assert Counter(task["family"] for task in language.tasks).keys() == asked.keys()
    assert len(set(texts(language.tasks))) == len(language.tasks) == flops.LANGUAGE_PRACTICE


def test_no_practice_question_in_english_is_about_a_thing_that_is_asked():
    asked = {question.text.lower() for question in language_skills.QUESTIONS}
    for question in language_practice.QUESTIONS:
        assert question.text.lower() not in asked
    # What differs between the questions of one wording is the thing that they are about.
    for skill in ("capitals", "opposites", "plurals", "languages"):
        things = [
            {re.sub(r"[?.]", "", each.text).split()[-1] for each in side if each.skill == skill}
            for side in (language_skills.QUESTIONS, language_practice.QUESTIONS)
        ]
        assert things[0] and not things[0] & things[1]
    # A pair of opposites is one fact, in whichever direction it is asked.
    answers = {
        word
        for question in language_skills.QUESTIONS
        if question.skill == "opposites"
        for word in question.answers
    }
    practised = {
        question.text.rstrip("?").split()[-1]
        for question in language_practice.QUESTIONS
        if question.skill == "opposites"
    }
    assert not answers & practised
