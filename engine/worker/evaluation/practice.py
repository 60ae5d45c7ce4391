"""Practice questions: of the same skills as the batteries (prior_skills.py), but never one that is
asked there. What the starting model answers rightly of them may be trained (replay.py). No torch.
"""

import random
import re

from engine.core.split import prompt_key
from engine.worker.evaluation import language_practice, language_skills, pebble_skills
from engine.worker.evaluation.prior_skills import SKILLS, Battery, pebble_tasks, says_answer
from envs.json_types import TaskRow

QUESTIONS_PER_SKILL = 100  # of pebble
_TOKEN = re.compile(r"[^\s.,:?]+")
# The words in which pebble's skills are asked for; what is left of a question is what it is about.
_ASKING = frozenset(
    "a add and answer as backwards bigger case city color copy count how in is it json larger "
    "letter letters many name of or order pet pick put repeat reverse say shout sort the this "
    "upper what which write + =".split()
)


def practice_of(base_ref: str) -> Battery:
    """The practice questions for a base model: those of pebble's skills, or those in English."""
    if base_ref == "pebble":
        return Battery("pebble skills", pebble_practice(), scorer=says_answer)
    questions = language_skills.tasks(language_practice.QUESTIONS)
    return Battery("language skills", questions, scorer=language_skills.is_right)


def pebble_practice() -> list[TaskRow]:
    """QUESTIONS_PER_SKILL practice questions of every skill in SKILLS, the same in every run, with
    the keys of `pebble_tasks`. None is about what a question of the battery is about, in any
    wording: not about its word, and not about its two numbers, in either order."""
    asked = {_subject(task) for task in pebble_tasks()}
    tasks: list[TaskRow] = []
    for skill in SKILLS:
        rng = random.Random(f"practice-{skill}")
        prompts: set[str] = set()  # so that no question comes twice
        while len(prompts) < QUESTIONS_PER_SKILL:
            sample = pebble_skills.draw(rng, skill, excluded=(), measured=True)
            task = {
                "id": f"practice-{skill}-{len(prompts)}",
                "family": skill,
                "prompt": sample.messages[:1],
                "answer": sample.answer,
            }
            key = prompt_key(task["prompt"])
            if _subject(task) not in asked and key not in prompts:
                prompts.add(key)
                tasks.append(task)
    return tasks


def _subject(task: TaskRow) -> tuple[str, frozenset[str]]:
    """What a question of pebble's is about: its skill, and the words and numbers in it beside those
    in which the skill is asked for."""
    words = _TOKEN.findall(task["prompt"][0]["content"].lower())
    return task["family"], frozenset(words) - _ASKING
