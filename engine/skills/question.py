"""Questions whose answers are judged without a model, and how replies are judged. No torch."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.models.reasoning import after_thought
from envs.json_types import TaskRow

# How a reply is judged: see `is_right`.
Check = Literal["first", "phrases", "sentence", "three", "json"]
FEWEST_WORDS = 4  # of a sentence
FEWEST_THINGS = 3  # of a kind that a reply must name
_WORD = re.compile(r"[^\W_]+")
_OBJECT = re.compile(r"\{[^{}]*\}")  # a JSON object without another one in it
_NO_SENTENCE = ("{", "[", "```")  # how JSON and code begin


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        answers: words of which any is right, in lower case; with another `check` than "first" what
            `is_right` says of it.
        others: words that are wrong if they come before an answer, in lower case.
        check: how a reply is judged.
    """

    skill: str
    text: str
    answers: tuple[str, ...]
    others: tuple[str, ...] = ()
    check: Check = "first"


def same_wording(skill: str, ask: str, pairs: str) -> list[Question]:
    """Questions of one wording about several things. `ask` has {} in place of the thing; `pairs` is
    "thing: answer, thing: answer or other right answer, ..."."""
    questions = []
    for pair in pairs.split(","):
        thing, answer = pair.strip().split(": ")
        answers = tuple(answer.lower().split(" or "))
        questions.append(Question(skill, ask.format(thing), answers))
    return questions


def multiple_choice(
    skill: str, texts: str, options: tuple[str, ...] = (), after: str = ""
) -> list[Question]:
    """Questions with a choice of answers.

    Args:
        texts: a question per line, with its right answer and wrong ones: "question? right / wrong /
            wrong".
        options: answers that can be chosen in every question, beside those in its line.
        after: a text that follows each question.
    """
    questions = []
    for line in texts.strip().splitlines():
        text, _, words = line.strip().rpartition("? ")
        answer, *others = (word.strip().lower() for word in words.split("/"))
        others += [word for word in options if word != answer]
        question = f"{text}? {after}".strip()  # the split took the question mark away
        questions.append(Question(skill, question, (answer,), tuple(others)))
    return questions


def tasks(questions: Iterable[Question]) -> list[TaskRow]:
    """Questions as tasks, the same in every run.

    Each has the keys `id` (such as "capitals-0"), `family` (the skill), `prompt`, `answer` (a list
    of right words), `others` (a list of wrong ones) and `check` (how a reply is judged).
    """
    rows: list[TaskRow] = []
    next_numbers: dict[str, int] = {}  # by skill
    for question in questions:
        number = next_numbers.get(question.skill, 0)
        next_numbers[question.skill] = number + 1
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
    """Whether a reply to a task of `tasks` is right, by the task's check. Case does not count, and
    neither does a think block before the reply.

    - first: it says a right word, as a whole word, before any wrong one;
    - phrases: it says every phrase of the answer, whatever stands between its words;
    - sentence: it says the word of the answer, among at least FEWEST_WORDS words;
    - three: it says at least FEWEST_THINGS of the words of the answer;
    - json: the first JSON object in it is the one of the answer, a number as text or not.

    A reply that begins like JSON or code is right for json alone.
    """
    text = after_thought(reply).strip()
    check: Check = task["check"]
    if check == "json":
        return _says_object(text, task["answer"][0])
    if text.startswith(_NO_SENTENCE):
        return False
    words = _WORD.findall(text.lower())
    if check == "phrases":
        said = f" {' '.join(words)} "
        return all(f" {phrase} " in said for phrase in task["answer"])
    if check == "sentence":
        return task["answer"][0] in words and len(words) >= FEWEST_WORDS
    if check == "three":
        return len(set(words).intersection(task["answer"])) >= FEWEST_THINGS
    return _says_first(words, task)


def _says_first(words: Iterable[str], task: TaskRow) -> bool:
    """Whether a right word of a task comes before any wrong one among the words of a reply."""
    for word in words:
        if word in task["answer"]:
            return True
        if word in task["others"]:
            return False
    return False


def _says_object(text: str, expected: str) -> bool:
    """Whether the first JSON object in a text equals the one in `expected`, a number as text or
    not."""
    written = _OBJECT.search(text)
    try:
        values = json.loads(written.group()) if written else None
    except ValueError:  # it is not JSON
        return False
    return isinstance(values, dict) and _as_texts(values) == _as_texts(json.loads(expected))


def _as_texts(values: dict[str, object]) -> dict[str, str]:
    """A flat JSON object with every value as text, so that 12 and "12" are equal."""
    return {key: str(value) for key, value in values.items()}
