"""The card of the batteries, a Markdown page for people: what base models are asked before and
after training, how replies are judged, examples, and what a comparison can show. It is made from
the questions themselves."""

from collections.abc import Sequence

from engine.skills.batteries import SkillBattery, battery_of, practice_of
from envs.json_types import TaskRow

ALPHA = 0.05  # significance level of a loss
# For each check (way to judge a reply) when a reply is right.
_JUDGED = {
    "phrases": "the reply says {answer}",
    "sentence": "the reply says {answer}, in at least four words",
    "three": "the reply names at least three such things",
    "json": "the first JSON object in the reply is {answer}",
}


def skills_card() -> str:
    """Return the card of both batteries (sets of questions that measure skills) as Markdown: an
    introduction, a section about pebble's battery, and one about that of every other model."""
    other_base = "any other"  # every name but "pebble" gives the other battery
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
            "`Answer: 7`, `The answer is 7.`); of a question with a tool, where it makes that call "
            "and no other. Pebble answers 86 % rightly. Not asked: sums of two-digit numbers, "
            "which it knows by half, and the guessing game of several turns.",
        ),
        _section(
            "Every other model",
            battery_of(other_base),
            practice_of(other_base),
            "Easy questions in English, since a skill can be lost only where it was there: "
            "SmolLM2-135M-Instruct answers 87 of 120 rightly. Case and a think block before the "
            "reply do not count; a reply that begins like JSON or code is right only where JSON "
            "is asked for.",
        ),
    ]
    return "\n".join(parts)


def fewest_significant(alpha: float = ALPHA) -> int:
    """Return how many answers must be lost, with none gained, for a significant loss at level
    `alpha`.

    The test is the two-sided exact sign test: its p value for n losses and no gain is 2 * 0.5**n.
    """
    losses = 1
    while 2 * 0.5**losses >= alpha:
        losses += 1
    return losses


def _section(title: str, battery: SkillBattery, practice: SkillBattery, judging: str) -> str:
    """Return the section about one battery (a set of questions) as Markdown: how replies are
    judged, the smallest loss of right answers that is significant, and a table with examples of
    each skill.

    Args:
        title: the section's title.
        battery: the questions that are asked before and after training.
        practice: the practice questions of the same skills.
        judging: how a reply is judged, in sentences.
    """
    count = len(battery.tasks)
    losses = fewest_significant()  # that many lost answers are significant if none was gained
    points = 100 * losses / count  # percentage points of all questions
    lines = [
        f"## {title}: {battery.name}\n",
        f"{count} questions, {len(practice.tasks)} for practice, answers of at most "
        f"{battery.max_tokens} tokens. {judging}\n",
        f"What it can show: {losses} answers lost and none gained ({points:.1f} points) "
        "are significant at 5 %; fewer, or losses beside gains, are told with their interval.\n",
        "| skill | asked | example | right where |",
        "|---|---|---|---|",
    ]
    tasks_by_skill: dict[str, list[TaskRow]] = {}
    for task in battery.tasks:
        tasks_by_skill.setdefault(task["family"], []).append(task)  # the family names the skill
    for skill, tasks in tasks_by_skill.items():
        lines += [_table_row(skill, len(tasks), example) for example in _examples(tasks)]
    return "\n".join(lines) + "\n"


def _examples(tasks: Sequence[TaskRow]) -> list[TaskRow]:
    """Return for each check (way to judge a reply) among the tasks the first task that has it.

    Tasks of pebble have no check, so they give one example.
    """
    # The dict is filled from the last task to the first, so the first task of each check stays.
    first_with_check = {task.get("check"): task for task in reversed(tasks)}
    last_check_first = list(first_with_check.values())
    return last_check_first[::-1]


def _table_row(skill: str, count: int, example: TaskRow) -> str:
    """Return a line of the table: a skill, the number of its questions (`count`), an example, and
    when the example's answer is right."""
    question = example["prompt"][0]["content"].replace("|", "\\|")
    return f"| {skill} | {count} | {question} | {_condition(example)} |"


def _condition(task: TaskRow) -> str:
    """Return when a reply to a task is right, in words, e.g. "it says `paris` or `lyon`". A task of
    pebble has its answer as a text, any other as a list of texts."""
    answer = task["answer"]
    if task.get("tools"):
        return f"it makes the call `{answer}`"
    if isinstance(answer, str):
        return f"it is `{answer}`"
    quoted = [f"`{text}`" for text in answer]
    check = task["check"]
    if check == "first":
        wrong = ", ".join(f"`{text}`" for text in task["others"])
        before_wrong = f" before {wrong}" if wrong else ""
        return f"it says {' or '.join(quoted)}{before_wrong}"
    return _JUDGED[check].format(answer=" and ".join(quoted))
