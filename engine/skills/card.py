"""The card of the batteries: what base models are asked before and after training, how replies are
judged, examples, and what a comparison can show. Markdown, made from the questions themselves."""

from collections.abc import Sequence

from engine.skills.batteries import SkillBattery, battery_of, practice_of
from envs.json_types import TaskRow

ALPHA = 0.05
_JUDGED = {
    "phrases": "the reply says {answer}",
    "sentence": "the reply says {answer}, in at least four words",
    "three": "the reply names at least three such things",
    "json": "the first JSON object in the reply is {answer}",
}


def skills_card() -> str:
    """The card of both batteries as Markdown."""
    parts = [
        "# Skills that are asked before and after training\n\n"
        "Every training run asks its model, greedily, what its base can do: at step 0 and with the "
        "checkpoint it chose. The verdict's kept skills compare the two, question by question; "
        "`read_rollouts(run_id, where=\"half == 'kept'\")` reads questions and answers. Of each "
        "battery at most `skill_rows` questions are asked. SFT replays (`keep`) the starting "
        "model's own right answers to practice questions of the same skills; no practice question "
        "is about a word, number pair or topic that is asked. A second battery is yours: the "
        "newest environment that you push under the name `keep`.\n\n"
        "The questions were written for this package, word lists included, and are under its "
        "licence (Apache-2.0). They are the same in every run and need no network.\n",
        _section(
            "Pebble",
            battery_of("pebble"),
            practice_of("pebble"),
            "A reply is right where it is the answer in one of pebble's styles (`7`, `7.`, "
            "`Answer: 7`, `The answer is 7.`). Pebble answers 94 % rightly.",
        ),
        _section(
            "Every other model",
            battery_of("any other"),
            practice_of("any other"),
            "Easy questions in English, since a skill can be lost only where it was there: "
            "SmolLM2-135M-Instruct answers 87 of 120 rightly. Case and a think block before the "
            "reply do not count; a reply that begins like JSON or code is right only where JSON "
            "is asked for.",
        ),
    ]
    return "\n".join(parts)


def fewest_significant(alpha: float = ALPHA) -> int:
    """The fewest lost answers, with none gained, that a two-sided exact test calls significant."""
    lost = 1
    while 2 * 0.5**lost >= alpha:
        lost += 1
    return lost


def _section(title: str, asked: SkillBattery, practised: SkillBattery, about: str) -> str:
    """The section of one battery: how it is judged, what it can show, an example of each skill."""
    count, lost = len(asked.tasks), fewest_significant()
    lines = [
        f"## {title}: {asked.name}\n",
        f"{count} questions, {len(practised.tasks)} for practice, answers of at most "
        f"{asked.max_tokens} tokens. {about}\n",
        f"What it can show: {lost} answers lost and none gained ({100 * lost / count:.1f} points) "
        "are significant at 5 %; fewer, or losses beside gains, are told with their interval.\n",
        "| skill | asked | example | right where |",
        "|---|---|---|---|",
    ]
    for family in dict.fromkeys(task["family"] for task in asked.tasks):
        rows = [task for task in asked.tasks if task["family"] == family]
        lines += [_row(family, len(rows), example) for example in _examples(rows)]
    return "\n".join(lines) + "\n"


def _examples(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """The first task of each way in which replies are judged."""
    return list({row.get("check"): row for row in reversed(rows)}.values())[::-1]


def _row(family: str, count: int, task: TaskRow) -> str:
    """A line of the table: a skill with one of its tasks."""
    question = task["prompt"][0]["content"].replace("|", "\\|")
    return f"| {family} | {count} | {question} | {_judged(task)} |"


def _judged(task: TaskRow) -> str:
    """When a reply to a task is right, in words."""
    answer = task["answer"]
    if isinstance(answer, str):
        return f"it is `{answer}`"
    answers = " or ".join(f"`{text}`" for text in answer)
    check = task["check"]
    if check == "first":
        others = f" before {', '.join(f'`{text}`' for text in task['others'])}"
        return f"it says {answers}{others if task['others'] else ''}"
    return _JUDGED[check].format(answer=answers.replace(" or ", " and "))
