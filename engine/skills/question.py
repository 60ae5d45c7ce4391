"""Questions whose answers can be judged without a model, and how replies are judged. No torch."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.models.reasoning import after_thought
from envs.json_types import TaskRow

# How a reply is judged: see `is_right`.
Check = Literal["first", "phrases", "sentence", "three", "json"]
FEWEST_WORDS = 4  # how many words a sentence must have
FEWEST_THINGS = 3  # how many things a reply must name if asked for three
_WORD = re.compile(r"[^\W_]+")
_OBJECT = re.compile(r"\{[^{}]*\}")  # a flat JSON object
_NO_SENTENCE = ("{", "[", "```")  # how JSON and code begin


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        skill: the skill that it tests.
        text: the question.
        answers: words in lower case; with the check "first" any of them is right. `is_right` says
            what they mean for other checks.
        others: words in lower case that are wrong if they come before an answer.
        check: how a reply is judged.
    """

    skill: str
    text: str
    answers: tuple[str, ...]
    others: tuple[str, ...] = ()
    check: Check = "first"


def same_wording(skill: str, ask: str, pairs: str) -> list[Question]:
    """Return questions of one wording about several things, one for each pair.

    Args:
        skill: the skill of all of them.
        ask: the question with {} in place of the thing, e.g. "What is the capital of {}?".
        pairs: things with their right answers: "France: Paris, Bolivia: Sucre or La Paz".
    """
    questions = []
    for pair in pairs.split(","):
        thing, right_answers = pair.strip().split(": ")
        answers = tuple(right_answers.lower().split(" or "))
        questions.append(Question(skill, ask.format(thing), answers))
    return questions


def multiple_choice(
    skill: str, texts: str, options: tuple[str, ...] = (), after: str = ""
) -> list[Question]:
    """Return questions with one right answer and some wrong ones, one for each line of `texts`.

    Args:
        skill: the skill of all of them.
        texts: lines such as "question? right / wrong / wrong".
        options: answers that are possible for every question; all but the right one of a line are
            wrong.
        after: a text that follows each question.
    """
    questions = []
    for line in texts.strip().splitlines():
        text, _, choices = line.strip().rpartition("? ")
        right, *wrong = (choice.strip().lower() for choice in choices.split("/"))
        wrong += [option for option in options if option != right]
        question = f"{text}? {after}".strip()  # `rpartition` has removed the question mark
        questions.append(Question(skill, question, (right,), tuple(wrong)))
    return questions


def tasks(questions: Iterable[Question]) -> list[TaskRow]:
    """Convert questions to tasks, in their order.

    Each task has the keys `id` (e.g. "capitals-0"), `family` (the skill), `prompt`, `answer` (a
    list of right words), `others` (a list of wrong ones) and `check` (how a reply is judged).
    """
    rows: list[TaskRow] = []
    count_of_skill: Counter[str] = Counter()  # skill -> rows made so far
    for question in questions:
        number = count_of_skill[question.skill]
        count_of_skill[question.skill] += 1
        rows.append(
            {
                "id": f"{question.skill}-{number}",
                "family": question.skill,
                "prompt": [{"role": "user", "content": question.text}],
                "answer": list(question.answers),
                "others": list(question.others),
                "check": question.check,
            }
        )
    return rows


def is_right(task: TaskRow, reply: str) -> bool:
    """Tell whether a reply to a task of `tasks` is right, by the task's `check`.

    - first: the reply has a right word, as a whole word, before any wrong one;
    - phrases: it has every phrase of the answer; punctuation between the words is ignored;
    - sentence: it has the word of the answer, and at least FEWEST_WORDS words in all;
    - three: it has at least FEWEST_THINGS different words of the answer;
    - json: its first JSON object equals the one of the answer; 12 and "12" are equal.

    Case is ignored, except in JSON, and so is a think block before the reply. A reply that begins
    like JSON or code can be right only for json.
    """
    text = after_thought(reply).strip()
    check: Check = task["check"]
    if check == "json":
        return _says_object(text, task["answer"][0])
    if text.startswith(_NO_SENTENCE):
        return False
    words = _WORD.findall(text.lower())
    if check == "phrases":
        reply_text = f" {' '.join(words)} "  # spaces at the ends: only whole words match
        return all(f" {phrase} " in reply_text for phrase in task["answer"])
    if check == "sentence":
        return task["answer"][0] in words and len(words) >= FEWEST_WORDS
    if check == "three":
        return len(set(words).intersection(task["answer"])) >= FEWEST_THINGS
    return _says_first(words, task)


def _says_first(words: Iterable[str], task: TaskRow) -> bool:
    """Tell whether a right word of a task (`answer`) comes before any wrong one (`others`) in
    `words`, the words of the reply in lower case. A reply with neither is not right."""
    for word in words:
        if word in task["answer"]:
            return True
        if word in task["others"]:
            return False
    return False


def _says_object(text: str, expected: str) -> bool:
    """Tell whether the first flat JSON object in `text` (one without objects in it) equals the
    object whose JSON is `expected`. Values are compared as texts, so that 12 equals "12"."""
    match = _OBJECT.search(text)
    if match is None:
        return False
    try:
        values = json.loads(match.group())
    except ValueError:  # it looks like an object but is not JSON
        return False
    return isinstance(values, dict) and _as_texts(values) == _as_texts(json.loads(expected))


def _as_texts(values: dict[str, object]) -> dict[str, str]:
    """Return a flat JSON object with every value as text, so that 12 and "12" are equal."""
    return {key: str(value) for key, value in values.items()}
