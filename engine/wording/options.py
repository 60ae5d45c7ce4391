"""Options of a multiple choice in another order: the letters stay, the texts behind them move.

The letter of the right answer moves with its text. Where it stands in the task (in its answer, in
its metadata) is the environment's affair, so several readings are offered here and the caller lets
the environment score them (engine/worker/rollouts/rewording.py).
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from envs.json_types import JsonObject, TaskRow

_OPTION = re.compile(r"^(?P<open>[ \t]*\(?)(?P<letter>[A-Z])(?P<close>[).:]\)?[ \t]+)(?P<text>.+)$")
# Options that speak of others, or of where they stand.
_SPEAKS_OF_OTHERS = re.compile(
    r"\b(?:all|none|both|neither|any|two) of\b|\b(?:above|below|former|latter)\b|"
    r"\b[a-z] (?:and|or) [a-z]\b",
    re.IGNORECASE,
)
_LETTER_ANSWER = re.compile(
    r"^(?P<open>.*?\(?)\b(?P<letter>[A-Z])(?P<close>\)?[).:]?(?:[ \t].*)?)$"
)
# Keys of metadata under which a position, from 0, may stand for the right option.
_POSITION_KEYS = frozenset("answer label gold correct target index answer_index answer_idx".split())


@dataclass(frozen=True)
class MovedOptions:
    """A task whose options stand in another order.

    Attributes:
        letters: the old letter of each option -> its new one.
        readings: the task with prompt and right answer moved, in each way that the environment may
            keep the right answer.
        answer_letter: the old letter of the option whose text is the task's answer; "" for none.
    """

    letters: dict[str, str]
    readings: list[TaskRow]
    answer_letter: str


def moved_options(task: TaskRow, rng: random.Random) -> MovedOptions | None:
    """The task with its options in another order; None where its last message of the user has no
    options, or some that speak of others."""
    users = [index for index, each in enumerate(task["prompt"]) if each["role"] == "user"]
    if not users:
        return None
    lines = str(task["prompt"][users[-1]]["content"]).split("\n")
    options = _options_in(lines)
    if options is None:
        return None
    order = _another_order(len(options), rng)
    letters = {
        options[old][1]["letter"]: options[new][1]["letter"] for new, old in enumerate(order)
    }
    for (place, option), old in zip(options, order, strict=True):
        moved_text = options[old][1]["text"]
        lines[place] = f"{option['open']}{option['letter']}{option['close']}{moved_text}"
    prompt = list(task["prompt"])
    prompt[users[-1]] = {**prompt[users[-1]], "content": "\n".join(lines)}
    answer = last_answer(task)
    named = [match["letter"] for _, match in options if match["text"].strip() == answer]
    return MovedOptions(
        letters,
        readings=list(_readings({**task, "prompt": prompt}, letters)),
        answer_letter=named[0] if len(named) == 1 else "",
    )


def _options_in(lines: list[str]) -> list[tuple[int, re.Match[str]]] | None:
    """The lines that are options, lettered from A without a gap, with their places. None for fewer
    than two, and where an option speaks of others."""
    options = [(place, m) for place, line in enumerate(lines) if (m := _OPTION.match(line))]
    expected = [chr(ord("A") + number) for number in range(len(options))]
    if len(options) < 2 or [match["letter"] for _, match in options] != expected:
        return None
    if any(_SPEAKS_OF_OTHERS.search(match["text"]) for _, match in options):
        return None
    return options


def _another_order(count: int, rng: random.Random) -> list[int]:
    """The numbers below `count`, turned by one or more: none keeps its place."""
    turn = rng.randrange(1, count)
    return [(number + turn) % count for number in range(count)]


def _readings(task: TaskRow, letters: dict[str, str]) -> Iterator[TaskRow]:
    """The task with the letter of its right answer moved: nowhere, in the answer alone, in the
    answer and wherever the metadata holds that letter, and in positions of the metadata too."""
    yield task  # where the answer is the text of an option, it stays
    old = _letter_of(task)
    if old is None:
        return
    new = letters.get(old, old)
    answered = {**task, "answer": _with_letter(task["answer"], new)}
    yield answered
    metadata: JsonObject = task.get("metadata") or {}
    lettered = {key: new if value == old else value for key, value in metadata.items()}
    yield {**answered, "metadata": lettered}
    old_place, new_place = ord(old) - ord("A"), ord(new) - ord("A")
    placed = {
        key: new_place
        if key.lower() in _POSITION_KEYS and type(value) is int and value == old_place
        else value
        for key, value in lettered.items()
    }
    yield {**answered, "metadata": placed}


def _letter_of(task: TaskRow) -> str | None:
    """The letter that the task's answer names; None where it names none."""
    match = _LETTER_ANSWER.match(last_answer(task))
    return match["letter"] if match else None


def last_answer(task: TaskRow) -> str:
    """The text of the task's reference answer; "" without one."""
    return str(task["answer"][-1]["content"]).strip() if task.get("answer") else ""


def _with_letter(answer: list[JsonObject], letter: str) -> list[JsonObject]:
    """The answer with `letter` in place of the one that it names."""
    text = str(answer[-1]["content"]).strip()
    moved = _LETTER_ANSWER.sub(lambda match: match["open"] + letter + match["close"], text, count=1)
    return [*answer[:-1], {**answer[-1], "content": moved}]
