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
_SECOND_EDIT = 0.3  # probability of each edit beside the one that is drawn
_LAST_SENTENCE = re.compile(r"(?P<before>.*[.?!])(?P<gap>\s+)(?P<last>[A-Z][^\n]*[.!])", re.DOTALL)


def reframed(text: str, rng: random.Random, stock: Stock) -> str:
    """The text of a prompt after one or more edits: an opening sentence, a first letter in lower
    case, the last instruction first. It always differs from `text`.

    One edit that changes the text is drawn and made; each other one is made with probability
    `_SECOND_EDIT`.
    """
    edits: list[Callable[[str], str]] = [lambda prompt: _with_opening(prompt, rng, stock)]
    edits += [edit for edit in (_lower_first, _instruction_first) if edit(text) != text]
    certain_edit = rng.choice(edits)
    # Backwards, so that the opening comes last: the others look for the question's first word.
    for edit in reversed(edits):
        if edit is certain_edit or rng.random() < _SECOND_EDIT:
            text = edit(text)
    return text


def _with_opening(text: str, rng: random.Random, stock: Stock) -> str:
    """The text after an opening sentence, which says nothing about the question."""
    return rng.choice(_OPENINGS[stock]) + rng.choice((" ", "\n", "\n\n")) + text


def _lower_first(text: str) -> str:
    """The text with its first letter in lower case; unchanged where its first word is none of
    `_FIRST_WORDS`. A text that is one single question also loses its question mark."""
    first_word = text.partition(" ")[0].lower()
    if first_word not in _FIRST_WORDS:
        return text
    lowered = text[:1].lower() + text[1:]
    is_one_line = "\n" not in text
    is_one_sentence = re.fullmatch(r"[^.?!]*\?", text) is not None
    if first_word in _QUESTION_WORDS and is_one_line and is_one_sentence:
        return lowered.removesuffix("?")
    return lowered


def _instruction_first(text: str) -> str:
    """The text with its last sentence first, where that says how to answer and can stand alone;
    otherwise the text unchanged."""
    match = _LAST_SENTENCE.fullmatch(text)
    if match is None:
        return text
    last = match["last"]
    says_how_to_answer = _INSTRUCTION.match(last) is not None
    needs_what_precedes = _POINTS_BACK.search(last) is not None
    # The pattern may have matched several sentences as the last one; then nothing is moved.
    is_single = re.search(r"[.?!]\s", last) is None
    if not says_how_to_answer or needs_what_precedes or not is_single:
        return text
    return last + match["gap"] + match["before"]
