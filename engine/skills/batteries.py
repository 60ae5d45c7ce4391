"""Which questions show what a base model can do (its battery), and which others of the same skills
it may practise: what the starting model answers rightly of those may be trained
(engine/worker/evaluation/replay.py). No practice question is one that is asked.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.split import prompt_key
from engine.models.dialects.dialects import HERMES
from engine.skills import language, language_practice, pebble
from engine.skills.question import is_right, tasks
from envs.json_types import TaskRow

# Every skill of pebble that one reply shows. Not asked: "add_two", which pebble knows by half and
# most trainings aim at, and "guess", a game of several turns.
SKILLS = (
    "copy",
    "reverse",
    "upper",
    "count",
    "compare",
    "add_one",
    "sort_letters",
    "sort_numbers",
    "json_answer",
    "json_field",
    "tool_call",
)
TASKS_PER_SKILL = 12  # of pebble: 132 questions in all, so that a loss of 5 points shows
QUESTIONS_PER_SKILL = 100  # of pebble's practice
PEBBLE_TOKENS, LANGUAGE_TOKENS = 80, 32  # of an answer; a tool call of pebble has about 60
PEBBLE_SKILLS, LANGUAGE_SKILLS = "pebble skills", "language skills"
_TOKEN = re.compile(r"[^\s.,:?]+")
# The words in which pebble's skills are asked for; what is left of a question is what it is about.
_ASKING = frozenset(
    "a add age and answer as backwards bigger case city color copy count desk give has how in is "
    "it json larger letter letters many name number of or order pet pick price put repeat reverse "
    "say shout size sort the this upper warm what which write + =".split()
)


@dataclass(frozen=True)
class SkillBattery:
    """Single questions of several skills, judged without a model.

    Attributes:
        name: the battery's name in evaluation rows and verdicts.
        tasks: each has the keys `id`, `family` (the skill), `prompt`, those that `is_right` reads,
            and `tools` where the question is asked with tools.
        is_right: whether a reply (second argument) to one of the tasks (first) is right.
        max_tokens: the most tokens that an answer may have.
    """

    name: str
    tasks: Sequence[TaskRow]
    is_right: Callable[[TaskRow, str], bool]
    max_tokens: int

    def first(self, count: int) -> "SkillBattery":
        """The battery with at most `count` questions, as many of each skill as of the others
        (one more of some where `count` is no multiple of the number of skills)."""
        if count >= len(self.tasks):
            return self
        return replace(self, tasks=in_turn(self.tasks)[:count])


def in_turn(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Tasks in another order: the first of each family, then the second of each, and so on. Any
    beginning of the result holds about as many tasks of one family as of another."""
    tasks_of_family: dict[str, int] = {}  # counted so far
    rank_in_family: list[int] = []  # of each task, from 0
    for row in rows:
        rank = tasks_of_family.get(row["family"], 0)
        rank_in_family.append(rank)
        tasks_of_family[row["family"]] = rank + 1
    # Sorting is stable: tasks of one rank stay in the order of their families.
    order = sorted(range(len(rows)), key=lambda index: rank_in_family[index])
    return [rows[index] for index in order]


def battery_of(base_ref: str) -> SkillBattery:
    """The questions that a base model is asked before and after training: pebble about its own
    skills, any other model in English. They are the same in every run."""
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_tasks(), says_answer, PEBBLE_TOKENS)
    language_tasks = tasks(language.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, language_tasks, is_right, LANGUAGE_TOKENS)


def practice_of(base_ref: str) -> SkillBattery:
    """The questions that a base model may be trained on, of the same skills as `battery_of`; no
    question is in both. They are the same in every run."""
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_practice(), says_answer, PEBBLE_TOKENS)
    language_tasks = tasks(language_practice.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, language_tasks, is_right, LANGUAGE_TOKENS)


def pebble_tasks() -> list[TaskRow]:
    """The tasks of pebble's battery: TASKS_PER_SKILL different ones of every skill in SKILLS, the
    same in every run.

    Each has the keys `id` (such as "copy-0"), `family` (the skill), `prompt`, `answer` and `tools`
    (empty where the skill needs none). `answer` is what a right reply says; of "tool_call" it is
    the call, {"name": ..., "arguments": {...}} as JSON.
    """
    return _draw_tasks("kept", "{skill}-{number}", TASKS_PER_SKILL, lambda task: True)


def pebble_practice() -> list[TaskRow]:
    """QUESTIONS_PER_SKILL practice questions of every skill in SKILLS, the same in every run, with
    the keys of `pebble_tasks`. None has the word or the pair of numbers (in either order) of a
    question of the battery of the same skill, in any wording."""
    battery_subjects = {_subject(task) for task in pebble_tasks()}
    return _draw_tasks(
        "practice",
        "practice-{skill}-{number}",
        QUESTIONS_PER_SKILL,
        lambda task: _subject(task) not in battery_subjects,
    )


def _draw_tasks(
    purpose: str, id_template: str, count: int, is_allowed: Callable[[TaskRow], bool]
) -> list[TaskRow]:
    """Draw `count` tasks of each of pebble's skills, with the keys of `pebble_tasks`; no two
    prompts of a skill are equal.

    Args:
        purpose: with the skill it is the seed of the random numbers.
        id_template: the id of a task, with {skill} and {number} (from 0) to be filled in.
        is_allowed: whether a drawn task may be taken.
    """
    drawn: list[TaskRow] = []
    for skill in SKILLS:
        rng = random.Random(f"{purpose}-{skill}")
        prompts: set[str] = set()  # of the tasks taken so far
        while len(prompts) < count:
            # measured: "copy" is taught with other tasks than it is measured with.
            sample = pebble.draw(rng, skill, excluded=(), measured=True)
            task: TaskRow = {
                "id": id_template.format(skill=skill, number=len(prompts)),
                "family": skill,
                "prompt": sample.messages[:1],  # what follows is the reply
                "answer": _first_answer(sample),
                "tools": sample.tools,
            }
            key = prompt_key(task["prompt"])
            if task["answer"] and key not in prompts and is_allowed(task):
                prompts.add(key)
                drawn.append(task)
    return drawn


def _first_answer(sample: pebble.Sample) -> str:
    """What the first reply of a sample should say: its answer or, where tools are given, the call
    of one as JSON; "" where a sample with tools calls none (its writer guessed)."""
    if not sample.tools:
        return sample.answer
    calls = sample.messages[1].get("tool_calls") or [{"function": ""}]
    call = calls[0]["function"]
    return json.dumps(call) if call else ""


def says_answer(task: TaskRow, reply: str) -> bool:
    """Whether a reply says the answer of a task of pebble's battery, in one of pebble's styles; of
    a task with tools, whether it makes that call and no other."""
    if not task["tools"]:
        return pebble.says(task["answer"], reply)
    calls = HERMES.calls(reply, task["tools"]).calls
    expected = json.loads(task["answer"])
    return [(call.name, call.arguments) for call in calls] == [
        (expected["name"], expected["arguments"])
    ]


def _subject(task: TaskRow) -> tuple[str, frozenset[str]]:
    """What a task of pebble is about: (skill, words and numbers of its question without the words
    of the request itself). "Copy river." and "Say river." are both about {"river"}."""
    words = _TOKEN.findall(task["prompt"][0]["content"].lower())
    return task["family"], frozenset(words) - _ASKING
