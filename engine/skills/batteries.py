"""Which questions show what a base model can do (its battery), and which others of the same skills
may be trained (practice). No question is in both.

Training replays the practice questions that the starting model answers correctly
(engine/worker/evaluation/replay.py).
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

# The skills of pebble that a single reply can show. "add_two" is not asked, because pebble half
# knows it and most trainings aim at it; nor is "guess", a game of several turns.
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
TASKS_PER_SKILL = 12  # in pebble's battery: 132 questions, enough to show a loss of 5 points
QUESTIONS_PER_SKILL = 100  # in pebble's practice
PEBBLE_TOKENS, LANGUAGE_TOKENS = 80, 32  # the longest answers; pebble's tool calls have about 60
PEBBLE_SKILLS, LANGUAGE_SKILLS = "pebble skills", "language skills"
_TOKEN = re.compile(r"[^\s.,:?]+")
# The words in which pebble's skills are asked for. The other words of a question are its subject.
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
            and `tools` if the question is asked with tools.
        is_right: (task, reply) -> whether the reply is right.
        max_tokens: the most tokens that an answer may have.
    """

    name: str
    tasks: Sequence[TaskRow]
    is_right: Callable[[TaskRow, str], bool]
    max_tokens: int

    def first(self, count: int) -> "SkillBattery":
        """Return the battery with at most `count` questions, spread evenly over the skills.

        If `count` is not a multiple of the number of skills, some skills have one question more.
        """
        if count >= len(self.tasks):
            return self
        return replace(self, tasks=in_turn(self.tasks)[:count])


def in_turn(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Return the tasks in another order: the first of each family, then the second of each, and so
    on.

    So any beginning of the result holds about equally many tasks of each family.
    """
    tasks_of_family: dict[str, int] = {}  # family -> its tasks counted so far
    rank_in_family: list[int] = []  # for each task its number in its family, from 0
    for row in rows:
        rank = tasks_of_family.get(row["family"], 0)
        rank_in_family.append(rank)
        tasks_of_family[row["family"]] = rank + 1
    # Sorting is stable: tasks of one rank stay in the order of their families.
    order = sorted(range(len(rows)), key=lambda index: rank_in_family[index])
    return [rows[index] for index in order]


def battery_of(base_ref: str) -> SkillBattery:
    """Return the questions that the base model named `base_ref` is asked before and after training,
    to see what training broke. They are the same in every run.

    The base "pebble", our own small model, is asked about the skills it was taught; any other is
    asked easy questions in English.
    """
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_tasks(), says_answer, PEBBLE_TOKENS)
    language_tasks = tasks(language.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, language_tasks, is_right, LANGUAGE_TOKENS)


def practice_of(base_ref: str) -> SkillBattery:
    """Return practice questions, which the base model named `base_ref` may be trained on. They are
    of the same skills as those of `battery_of`, but no question is in both; they are the same in
    every run."""
    if base_ref == "pebble":
        return SkillBattery(PEBBLE_SKILLS, pebble_practice(), says_answer, PEBBLE_TOKENS)
    language_tasks = tasks(language_practice.QUESTIONS)
    return SkillBattery(LANGUAGE_SKILLS, language_tasks, is_right, LANGUAGE_TOKENS)


def pebble_tasks() -> list[TaskRow]:
    """Return the questions about the skills of pebble, our own small model: TASKS_PER_SKILL
    different tasks of every skill in SKILLS; the same in every run.

    Each has the keys `id` (e.g. "copy-0"), `family` (the skill), `prompt`, `answer` and `tools`
    (empty if the skill needs none). `answer` is what a right reply says; for "tool_call" it is the
    right call as JSON: {"name": ..., "arguments": {...}}.
    """
    # "kept" is a part of the seed; every drawn task is allowed.
    return _draw_tasks("kept", "{skill}-{number}", TASKS_PER_SKILL, lambda task: True)


def pebble_practice() -> list[TaskRow]:
    """Return QUESTIONS_PER_SKILL practice questions of every skill in SKILLS; the same in every
    run.

    They have the keys of `pebble_tasks`. None is about the same word or the same pair of numbers
    (in either order) as a question of the same skill in the battery, whatever its wording.
    """
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
        purpose: part of the seed of the random numbers, together with the skill.
        id_template: the id of a task, in which {skill} and {number} (from 0) are filled in.
        count: how many tasks of each skill.
        is_allowed: whether a drawn task may be taken.
    """
    drawn: list[TaskRow] = []
    for skill in SKILLS:
        rng = random.Random(f"{purpose}-{skill}")
        prompts: set[str] = set()  # the prompts of the tasks taken so far
        while len(prompts) < count:
            # `measured` matters for "copy", which is taught as words and signs, measured as words.
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
    """Return what the first reply to a sample should say.

    That is its answer or, if tools are given, the right call as JSON. Returns "" for a sample with
    tools whose writer guessed instead of calling one.
    """
    if not sample.tools:
        return sample.answer
    first_reply = sample.messages[1]
    calls = first_reply.get("tool_calls")
    return json.dumps(calls[0]["function"]) if calls else ""


def says_answer(task: TaskRow, reply: str) -> bool:
    """Tell whether a reply to a task of pebble's battery is right: it says the answer in one of
    pebble's styles or, for a task with tools, makes the right call and no other."""
    if not task["tools"]:
        return pebble.says(task["answer"], reply)
    calls = HERMES.calls(reply, task["tools"]).calls
    names_and_arguments = [(call.name, call.arguments) for call in calls]
    expected = json.loads(task["answer"])
    return names_and_arguments == [(expected["name"], expected["arguments"])]


def _subject(task: TaskRow) -> tuple[str, frozenset[str]]:
    """Return what a pebble task is about: (skill, the words and numbers of its question without the
    words of the request).

    "Copy river." and "Say river." are both about ("copy", {"river"}).
    """
    words = _TOKEN.findall(task["prompt"][0]["content"].lower())
    return task["family"], frozenset(words) - _ASKING
