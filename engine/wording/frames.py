"""What stands around the question of a prompt: a sentence before it, the case of its first word,
the order of its last instruction. The question itself stays.

Nothing is ever put behind a prompt, as its end may be the text to work on, and a first word is
changed only where it is a common word of questions and instructions.
"""

import random
import re
from collections.abc import Callable

from engine.wording.kinds import Stock

_OPENINGS: dict[Stock, tuple[str, ...]] = {
    "training": (
        "Please answer this.",
        "Here is a question for you.",
        "Could you help me with this?",
        "I have a task for you.",
        "Question:",
        "A quick one:",
        "Hi there!",
        "Next one, please.",
    ),
    "probe": (
        "Please help me with the following.",
        "I would like to ask you something.",
        "Hello! Can you do this?",
        "Task:",
        "Kindly take care of this one.",
        "Let us go on.",
    ),
}
_QUESTION_WORDS = "what which who whose where when why how".split()
_FIRST_WORDS = frozenset(
    (
        "what which who whose where when why how is are was were do does did can could will would "
        "add subtract multiply divide compute calculate find give write name list tell say show "
        "explain answer classify decide translate convert count sort choose pick select solve "
        "complete read look the"
    ).split()
)
# The first words of a last sentence that says how to answer.
_INSTRUCTION = re.compile(
    r"(?:Answer|Reply|Respond|End|Finish|Give|Write|Return|Output|Use|Only|Show|State)\b"
)
# Words that point to what stands before them: such a sentence cannot move.
_POINTS_BACK = re.compile(
    r"\b(?:it|its|this|that|these|those|them|they|above|below|following|previous|then|so|also|"
    r"former|latter|otherwise|instead|first|last)\b",
    re.IGNORECASE,
)
_LAST_SENTENCE = re.compile(r"(?P<before>.*[.?!])(?P<gap>\s+)(?P<last>[A-Z][^\n]*[.!])", re.DOTALL)


def reframed(text: str, rng: random.Random, stock: Stock) -> str:
    """The text of a prompt with another frame; it always differs from `text`."""
    edits: list[Callable[[str], str]] = [lambda given: _with_opening(given, rng, stock)]
    edits += [edit for edit in (_lower_first, _instruction_first) if edit(text) != text]
    chosen = rng.choice(edits)
    # The opening goes last, so that what it stands before is already as it should be.
    for edit in reversed(edits):
        if edit is chosen or rng.random() < 0.3:
            text = edit(text)
    return text


def _with_opening(text: str, rng: random.Random, stock: Stock) -> str:
    """The text behind a sentence that says nothing about it."""
    return rng.choice(_OPENINGS[stock]) + rng.choice((" ", "\n", "\n\n")) + text


def _lower_first(text: str) -> str:
    """The text with its first letter in lower case, and without the mark of its only question."""
    first, _, _ = text.partition(" ")
    if first.lower() not in _FIRST_WORDS:
        return text
    lowered = text[:1].lower() + text[1:]
    is_one_question = first.lower() in _QUESTION_WORDS and "\n" not in text
    if is_one_question and re.fullmatch(r"[^.?!]*\?", text):
        return lowered.removesuffix("?")
    return lowered


def _instruction_first(text: str) -> str:
    """The text with its last sentence before the others, where that says how to answer."""
    match = _LAST_SENTENCE.fullmatch(text)
    if match is None or not _INSTRUCTION.match(match["last"]) or _POINTS_BACK.search(match["last"]):
        return text
    # The last sentence may hold more than one; only a single one can be told apart safely.
    if re.search(r"[.?!]\s", match["last"]):
        return text
    return match["last"] + match["gap"] + match["before"]
