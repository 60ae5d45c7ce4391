"""Which questions show what a base model can do (its battery), and which others of the same skills
it may practise: what the starting model answers rightly of those may be trained
(engine/worker/evaluation/replay.py). No practice question is one that is asked.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.split import prompt_key
from engine.skills import language, language_practice, pebble
from engine.skills.question import is_right, tasks
from envs.json_types import TaskRow

SKILLS = ("copy", "reverse", "upper", "count", "compare", "add_one", "sort_letters", "json_answer")
TASKS_PER_SKILL = 15  # of pebble: 120 questions in all, so that a loss of 5 points shows
QUESTIONS_PER_SKILL = 100  # of pebble's practice
PEBBLE_TOKENS, LANGUAGE_TOKENS = 24, 32  # of an answer
PEBBLE_SKILLS, LANGUAGE_SKILLS = "pebble skills", "language skills"
_TOKEN = re.compile(r"[^\s.,:?]+")
# The words in which pebble's skills are asked for; what is left of a question is what it is about.
_ASKING = frozenset(
    "a add and answer as backwards bigger case city color copy count how in is it json larger "
    "letter letters many name of or order pet pick put repeat reverse say shout sort the this "
    "upper what which write + =".split()
)


@dataclass(frozen=True)
class SkillBattery:
    """Single questions of several skills, judged without a model.

    Attributes:
        name: as rows and verdicts name it.
        tasks: each with `id`, `family` (the skill), `prompt` and what `is_right` reads.
        is_right: whether a reply to one of the tasks is right.
        max_tokens: of an answer.
    """

    name: str
    tasks: Sequence[TaskRow]
    is_right: Callable[[TaskRow, str], bool]
    max_tokens: int

    def first(self, count: int) -> "SkillBattery":
        """The battery with at most `count` questions, as many of each skill as of the others."""
        return replace(self, tasks=in_turn(self.tasks)[:count]) if count < len(self.tasks) else self


def in_turn(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Tasks in another order: the first of each family, then the second of each, and so on."""
    seen: dict[str, int] = {}
    places: list[int] = []  # of each task among those of its family
    for row in rows:
        places.append(seen.get(row["family"], 0))
        seen[row["family"]] = places[-1] + 1
    order = sorted(range(len(rows)), key=lambda index: places[index])  # stable
    return [rows[index] for index in order]


def battery_of(base_ref: str) -> SkillBattery:
    """What a base model is asked before and after training: pebble its own skills, any other
    questions in English. The same in every run."""
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_tasks(), says_answer, PEBBLE_TOKENS)
    asked = tasks(language.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, asked, is_right, LANGUAGE_TOKENS)


def practice_of(base_ref: str) -> SkillBattery:
    """The practice questions for a base model, of the skills of its battery."""
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_practice(), says_answer, PEBBLE_TOKENS)
    practised = tasks(language_practice.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, practised, is_right, LANGUAGE_TOKENS)


def pebble_tasks() -> list[TaskRow]:
    """The tasks of pebble's battery: TASKS_PER_SKILL different ones of every skill in SKILLS, the
    same in every run.

    Each has the keys `id` (such as "copy-0"), `family` (the skill), `prompt` and `answer`.
    """
    return _drawn("kept", "{skill}-{number}", TASKS_PER_SKILL, lambda task: True)


def pebble_practice() -> list[TaskRow]:
    """QUESTIONS_PER_SKILL practice questions of every skill in SKILLS, the same in every run, with
    the keys of `pebble_tasks`. None is about what a question of the battery is about, in any
    wording: not about its word, and not about its two numbers, in either order."""
    asked = {_subject(task) for task in pebble_tasks()}
    return _drawn(
        "practice",
        "practice-{skill}-{number}",
        QUESTIONS_PER_SKILL,
        lambda task: _subject(task) not in asked,
    )


def _drawn(
    purpose: str, name: str, count: int, is_allowed: Callable[[TaskRow], bool]
) -> list[TaskRow]:
    """`count` tasks of each of pebble's skills whose prompts differ.

    Args:
        purpose: decides, with the skill, what is drawn.
        name: the id of a task, with {skill} and {number}.
        is_allowed: whether a task may be taken.
    """
    drawn: list[TaskRow] = []
    for skill in SKILLS:
        rng = random.Random(f"{purpose}-{skill}")
        prompts: set[str] = set()  # so that no question comes twice
        while len(prompts) < count:
            # measured: "copy" is taught with other tasks than it is measured with.
            sample = pebble.draw(rng, skill, excluded=(), measured=True)
            task: TaskRow = {
                "id": name.format(skill=skill, number=len(prompts)),
                "family": skill,
                "prompt": sample.messages[:1],  # what follows is the reply
                "answer": sample.answer,
            }
            key = prompt_key(task["prompt"])
            if key not in prompts and is_allowed(task):
                prompts.add(key)
                drawn.append(task)
    return drawn


def says_answer(task: TaskRow, reply: str) -> bool:
    """Whether a reply says the answer of a task of pebble's battery, in one of pebble's styles."""
    return pebble.says(task["answer"], reply)


def _subject(task: TaskRow) -> tuple[str, frozenset[str]]:
    """What a question of pebble's is about: its skill, and the words and numbers in it beside those
    in which the skill is asked for."""
    words = _TOKEN.findall(task["prompt"][0]["content"].lower())
    return task["family"], frozenset(words) - _ASKING
