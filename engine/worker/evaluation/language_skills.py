"""What a language model knows before it is trained here: short questions in English with one right
short answer, such as capitals, opposites and the days of the week. No torch.

They are asked of every base but pebble. They are easy, because a skill can be lost only where it
was there: SmolLM2-135M-Instruct answers two in three. A reply is right where it says a right
word before any wrong one, so both "Paris" and "The capital of France is Paris." are. A reply in
another form than language (a JSON object, the label of some other task) is wrong.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engine.models.reasoning import after_thought
from envs.json_types import TaskRow

_WORD = re.compile(r"[^\W_]+")
_NO_SENTENCE = ("{", "[", "```")  # how JSON and code begin


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        answers: words of which any is right, in lower case.
        others: words that are wrong if they come before an answer, in lower case.
    """

    skill: str
    text: str
    answers: tuple[str, ...]
    others: tuple[str, ...] = ()


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


QUESTIONS: tuple[Question, ...] = (
    *same_wording(
        "capitals",
        "What is the capital of {}?",
        "France: Paris, Italy: Rome, Japan: Tokyo, Egypt: Cairo, Norway: Oslo, Peru: Lima",
    ),
    *same_wording(
        "opposites",
        "What is the opposite of the word {}?",
        "hot: cold, big: small or little, early: late, rich: poor, empty: full, "
        "open: closed or close or shut",
    ),
    *same_wording(
        "plurals",
        "What is the plural of the word {}?",
        "child: children, mouse: mice, leaf: leaves, city: cities, goose: geese, box: boxes",
    ),
    *same_wording(
        "languages",
        "Which language do most people speak in {}?",
        "Spain: Spanish, Brazil: Portuguese, Japan: Japanese, Austria: German, Canada: English, "
        "Egypt: Arabic",
    ),
    *same_wording(
        "months",
        "{} month of the year?",
        "What is the first: January, What is the last: December, What is the second: February, "
        "Which holiday is in the last: Christmas, Which month comes after the sixth: July, "
        "What is the name of the fourth: April",
    ),
    *same_wording(
        "numbers",
        "How many {}? Answer with a number.",
        "days are in a week: seven or 7, legs does a spider have: eight or 8, "
        "hours are in a day: 24, wheels does a bicycle have: two or 2, "
        "sides does a triangle have: three or 3, minutes are in an hour: sixty or 60",
    ),
    *multiple_choice(
        "yes or no",
        """
        Can a fish live without water? no
        Is the sun a star? yes
        Is ice warmer than steam? no
        Is Paris in France? yes
        Do cows lay eggs? no
        Is gold a metal? yes
        """,
        options=("yes", "no"),
        after="Answer yes or no.",
    ),
    *multiple_choice(
        "which of two",
        """
        Which is colder, ice or fire? ice / fire
        Which is heavier, a feather or a stone? stone / feather
        Which is taller, a flower or a tree? tree / flower
        Which is an animal, a table or a horse? horse / table
        Which can fly, a stone or a bird? bird / stone
        Which is louder, a whisper or a shout? shout / whisper
        """,
        after="Answer with one word.",
    ),
)


def tasks(questions: Iterable[Question] = QUESTIONS) -> list[TaskRow]:
    """The questions as tasks, the same in every run; by default those of the battery.

    Each has the keys `id` (such as "capitals-0"), `family` (the skill), `prompt`, `answer` (a list
    of right words) and `others` (a list of wrong ones).
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
            }
        )
    return rows


def is_right(task: TaskRow, reply: str) -> bool:
    """Whether a reply says a right word, as a whole word in any case, before any wrong one.

    A think block before the reply does not count. A reply that begins like JSON or code is wrong.
    """
    text = after_thought(reply).strip().lower()
    if text.startswith(_NO_SENTENCE):
        return False
    for word in _WORD.findall(text):
        if word in task["answer"]:
            return True
        if word in task["others"]:
            return False
    return False
