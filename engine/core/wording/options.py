"""Puts the options of a multiple choice into another order: the letters stay in place, the texts
behind them move.

The letter of the right answer moves with its text. Only the environment knows where that letter
stands in the task (in its answer, in its metadata). So several readings are offered here, and the
caller lets the environment score them (engine/worker/rollouts/rewording.py).
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from envs.json_types import JsonObject, TaskRow

_OPTION = re.compile(r"^(?P<open>[ \t]*\(?)(?P<letter>[A-Z])(?P<close>[).:]\)?[ \t]+)(?P<text>.+)$")
# An option with such a text refers to other options, or to positions: "all of the above".
_REFERS_TO_OTHERS = re.compile(
    r"\b(?:all|none|both|neither|any|two) of\b|\b(?:above|below|former|latter)\b|"
    r"\b[a-z] (?:and|or) [a-z]\b",
    re.IGNORECASE,
)
_LETTER_ANSWER = re.compile(
    r"^(?P<open>.*?\(?)\b(?P<letter>[A-Z])(?P<close>\)?[).:]?(?:[ \t].*)?)$"
)
# Keys of metadata whose value may be the position (from 0) of the right option.
_POSITION_KEYS = frozenset("answer label gold correct target index answer_index answer_idx".split())


@dataclass(frozen=True)
class MovedOptions:
    """A task with its options in another order.

    Attributes:
        letters: the old letter of each option -> its new one.
        readings: the task with the new prompt, once for each way in which the environment may store
            the right answer (see `_readings`).
        answer_letter: the old letter of the one option whose text is the task's answer; "" if none
            or several have this text.
    """

    letters: dict[str, str]
    readings: list[TaskRow]
    answer_letter: str


def moved_options(task: TaskRow, rng: random.Random) -> MovedOptions | None:
    """Put the options of the task's last user message, a multiple choice, into another order.

    Returns None if that message has no options, or one whose text refers to others, such as "all of
    the above".
    """
    prompt = list(task["prompt"])
    roles = [message["role"] for message in prompt]
    if "user" not in roles:
        return None
    last_user = len(roles) - 1 - roles[::-1].index("user")
    lines = str(prompt[last_user]["content"]).split("\n")
    options = _options_in(lines)
    if options is None:
        return None
    new_letters: dict[str, str] = {}  # old letter of an option -> its new letter
    # Each option's line keeps its letter and gets the text of another option.
    for option, moved in zip(options, _rotated(options, rng), strict=True):
        lines[option.line] = f"{option.lead}{moved.text}"
        new_letters[moved.letter] = option.letter
    prompt[last_user] = {**prompt[last_user], "content": "\n".join(lines)}
    return MovedOptions(
        new_letters,
        readings=list(_readings({**task, "prompt": prompt}, new_letters)),
        answer_letter=_letter_of_text(options, last_answer(task)),
    )


@dataclass(frozen=True)
class _Option:
    """One option of a multiple choice, on a line of its own such as " (B) Paris".

    Attributes:
        line: the number of its line in the message, from 0.
        lead: the part of its line before the text: " (B) ".
        letter: "B".
        text: "Paris".
    """

    line: int
    lead: str
    letter: str
    text: str


def _options_in(lines: list[str]) -> list[_Option] | None:
    """Return the options of a multiple choice among the lines of a message.

    They must be lettered from A without a gap. Returns None if there are fewer than two, if the
    letters are others, or if an option refers to other options ("all of the above").
    """
    options: list[_Option] = []
    for number, line in enumerate(lines):
        match = _OPTION.match(line)
        if match:
            lead = line[: match.start("text")]  # such as "A) "
            options.append(_Option(number, lead, match["letter"], match["text"]))
    letters = [option.letter for option in options]
    expected_letters = [chr(ord("A") + index) for index in range(len(options))]
    if len(options) < 2 or letters != expected_letters:
        return None
    if any(_REFERS_TO_OTHERS.search(option.text) for option in options):
        return None
    return options


def _rotated(options: list[_Option], rng: random.Random) -> list[_Option]:
    """Return the options rotated by a random number of places, so that none keeps its position."""
    shift = rng.randrange(1, len(options))
    return [*options[shift:], *options[:shift]]


def _letter_of_text(options: list[_Option], text: str) -> str:
    """Return the letter of the only option whose text is `text`; "" if none or several have it."""
    letters = [option.letter for option in options if option.text.strip() == text]
    return letters[0] if len(letters) == 1 else ""


def _readings(task: TaskRow, new_letters: dict[str, str]) -> Iterator[TaskRow]:
    """Yield copies of a task whose options were reordered, with the right answer moved along: one
    for each way in which an environment may store that answer.

    1. the answer is unchanged, because it is the text of an option;
    2. the answer has the new letter;
    3. and so has every value of the metadata that is the old letter;
    4. and the metadata has the new position (from 0) under `_POSITION_KEYS`.

    If the answer names no letter, only the first is yielded.

    Args:
        task: the task, whose prompt has the new order already; its answer is still the old one.
        new_letters: the old letter of each option -> its new letter.
    """
    yield task
    old_letter = _letter_of(task)
    if old_letter is None:
        return
    new_letter = new_letters.get(old_letter, old_letter)
    with_answer = {**task, "answer": _with_letter(task["answer"], new_letter)}
    yield with_answer
    metadata: JsonObject = task.get("metadata") or {}
    with_letters = {
        key: new_letter if value == old_letter else value for key, value in metadata.items()
    }
    yield {**with_answer, "metadata": with_letters}
    yield {**with_answer, "metadata": _with_position(with_letters, old_letter, new_letter)}


def _with_position(metadata: JsonObject, old: str, new: str) -> JsonObject:
    """Return a copy of a task's metadata in which the position of the right option is the new one.

    Only values under `_POSITION_KEYS`, such as "answer_index", are replaced. `old` and `new` are
    the letters of that option, such as "B"; A has position 0.
    """
    old_position, new_position = ord(old) - ord("A"), ord(new) - ord("A")

    def is_old_position(key: str, value: object) -> bool:
        """Return whether a value of the metadata is the old position; True is not the number 1."""
        return key.lower() in _POSITION_KEYS and type(value) is int and value == old_position

    return {
        key: new_position if is_old_position(key, value) else value
        for key, value in metadata.items()
    }


def _letter_of(task: TaskRow) -> str | None:
    """Return the letter that the task's reference answer names, such as "B" for "(B) Paris"; None
    if it names none."""
    match = _LETTER_ANSWER.match(last_answer(task))
    return match["letter"] if match else None


def last_answer(task: TaskRow) -> str:
    """Return the text of the last message of the task's reference answer; "" if it has none."""
    return str(task["answer"][-1]["content"]).strip() if task.get("answer") else ""


def _with_letter(answer: list[JsonObject], letter: str) -> list[JsonObject]:
    """Return a copy of an answer's messages in which the last one names `letter`.

    Only the letter is replaced: with "C", "(B) Paris" becomes "(C) Paris".
    """
    *earlier, last = answer
    text = str(last["content"]).strip()
    new_text = _LETTER_ANSWER.sub(
        lambda match: match["open"] + letter + match["close"], text, count=1
    )
    return [*earlier, {**last, "content": new_text}]
